"""tq1_0's digits of base 3, up to five in a byte, as codes of their own, and back."""

from __future__ import annotations

import torch

#: (first byte, bytes, digits that each of them has): parts of a block whose elements follow one another.
_DIGITS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))


def digits(data: torch.Tensor) -> torch.Tensor:
    """tq1_0's 52 bytes [..., 52] as codes 0 to 2, uint8 [..., 256]: of all bytes of a part their first digits, then
    their second ones. A byte times a power of 3, modulo 256, has the next digit on top."""
    found = []
    for first, size, count in _DIGITS:
        part = data[..., first : first + size].to(torch.int32)
        found += [((part * 3**n & 255) * 3) >> 8 for n in range(count)]
    return torch.cat(found, -1).to(torch.uint8)


def of_digits(codes: torch.Tensor) -> torch.Tensor:
    """Inverse of digits(): the bytes that quantizers write, of several with the same digits."""
    parts, at = [], 0
    for _, size, count in _DIGITS:
        part = codes[..., at : at + size * count].to(torch.int32)
        rows = part.reshape(*part.shape[:-1], count, size)
        powers = 3 ** torch.arange(4, 4 - count, -1, dtype=torch.int32, device=codes.device)
        number = (rows * powers[:, None]).sum(-2)
        parts.append((number * 256 + 242) // 243)
        at += size * count
    return torch.cat(parts, -1).to(torch.uint8)
