"""The order in which gemm_small/wgmma.py wants activations, from its description and not from its code."""

from __future__ import annotations


def wgmma_order(k: int) -> list[int]:
    """By place, which element of a row lies there: k, a multiple of 128, numbers from 0 on."""
    places = {}
    for element in range(k):
        c1, c0, h, i1, i0, b1, b0 = (int(bit) for bit in f"{element % 128:07b}")
        places[element // 128 * 128 + int("".join(map(str, (h, i1, i0, b0, c1, c0, b1))), 2)] = element
    return [places[p] for p in range(k)]
