"""SAMPLE, SAMPLE_EACH, PENALIZE."""

from __future__ import annotations

import math
from collections import Counter

import torch

from graphrt.backends.cpu.reference import reference
from graphrt.ops.sample_each import RowSettings
from graphrt.tensor import Tensor


@reference("SAMPLE", stored=("logits", "uniforms"))
def sample(node: Tensor, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Its sources as they are: a uniform number has 53 bits."""
    rows, numbers, settings = logits.reshape(-1, logits.shape[-1]), uniforms.reshape(-1), RowSettings.of(node.params)
    chosen = [_drawn(row, float(u), 0.0, settings, node.params.top_k) for row, u in zip(rows, numbers)]
    return torch.tensor(chosen).reshape(node.shape)


@reference("SAMPLE_EACH", stored=("logits", "uniforms", "settings"))
def sample_each(
    node: Tensor, logits: torch.Tensor, uniforms: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor
) -> torch.Tensor:
    """The same, of each row by its slot's settings."""
    rows, (draws, xtc) = logits.reshape(-1, logits.shape[-1]), uniforms.reshape(-1, 2).T.tolist()
    chosen = [
        _drawn(row, u, v, (s := _settings(settings, slot)), max(1, _count(s.top_k, node.params.most)))
        for row, u, v, slot in zip(rows, draws, xtc, _slots(slots, settings))
    ]
    return torch.tensor(chosen).reshape(node.shape)


def _slots(slots: torch.Tensor, settings: torch.Tensor) -> list[int]:
    """Each row's column of settings: the first or the last for one that is not there."""
    found: list[int] = slots.reshape(-1).clamp(0, settings.shape[-2] - 1).tolist()
    return found


def _settings(table: torch.Tensor, slot: int) -> RowSettings:
    return RowSettings(*table.reshape(-1, table.shape[-1])[slot, : len(RowSettings.__dataclass_fields__)].tolist())


def _count(number: float, most: int) -> int:
    """A number of a settings column as a count of 0 to `most`, which NaN and infinity are not."""
    return int(min(max(0.0, number), most))  # max(0.0, NaN) is 0.0


def _drawn(logits: torch.Tensor, uniform: float, xtc: float, s: RowSettings, top_k: int) -> int:
    """The id that is drawn by `uniform`, of candidates that XTC may lose by the number `xtc`."""
    highest, ids = (x[:top_k] for x in torch.sort(logits, descending=True, stable=True))
    if s.temp <= 0 or not highest[0] > -math.inf:
        return int(ids[0])
    left, min_keep = torch.arange(len(ids)), _count(s.min_keep, len(ids))
    if s.typical_p < 1:
        left = left[_typical(_shares(highest), s.typical_p, min_keep)]
    if s.top_p < 1:
        below = torch.cumsum(_shares(highest[left]), 0) < s.top_p
        left = left[: max(int(below.sum()) + 1, min_keep)]
    if s.least > -math.inf:
        limit = highest[left[0]] + torch.tensor(s.least, dtype=torch.float32)
        left = left[: max(int((highest[left] >= limit).sum()), min_keep, 1)]
    if s.xtc_probability > 0 and xtc <= s.xtc_probability and s.xtc_threshold <= 0.5:
        last = int((_shares(highest[left]) >= s.xtc_threshold).sum()) - 1
        left = left[last:] if last > 0 and len(left) - last >= min_keep else left
    top = highest[left[0]]
    # The highest is moved to 0 first, so that a tiny temp leaves it finite; infinity can't be moved.
    moved = highest[left] if torch.isinf(top) else highest[left] - top
    sums = torch.cumsum(_shares((moved.double() / s.temp).float()), 0)
    place = int((sums <= uniform * sums[-1]).sum())
    return int(ids[left[min(place, len(left) - 1)]])


def _typical(shares: torch.Tensor, p: float, min_keep: int) -> torch.Tensor:
    """The places of those whose surprise is nearest the entropy, in rising order."""
    surprise = -torch.log(shares)
    entropy = torch.where(shares > 0, shares * surprise, 0.0).sum()
    order = torch.argsort((surprise - entropy).abs(), stable=True)
    n = int((torch.cumsum(shares[order], 0) <= p).sum()) + 1
    return order[: max(n, min_keep, 1)].sort().values


def _shares(logits: torch.Tensor) -> torch.Tensor:
    """softmax in float64; +inf logits share everything. The first is the highest."""
    weights = (logits == logits[0]).double() if torch.isinf(logits[0]) else torch.exp(logits.double() - logits[0])
    return weights / weights.sum()


@reference("PENALIZE", stored=("settings", "biases"))
def penalize(
    node: Tensor, logits: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor, biased: torch.Tensor,
    biases: torch.Tensor, past: torch.Tensor, n_past: torch.Tensor, allowed: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Steps in the compute type; tokens that are none of the row's have no effect."""
    out = logits.clone()
    n, size = logits.shape[-1], past.shape[-1]
    for row, slot, length in zip(out.view(-1, n), _slots(slots, settings), n_past.clamp(min=0).reshape(-1).tolist()):
        s = _settings(settings, slot)
        ids, values = (x[0, 0, slot, : _count(s.n_biases, biases.shape[-1])] for x in (biased, biases))
        for i, value in zip(ids.tolist(), values.tolist()):
            if 0 <= i < n:
                row[i] = -math.inf if value == -math.inf else row[i].double() + value
        if s.masked:
            bits = (allowed[0, 0, slot, :, None] >> torch.arange(32)) & 1
            row[bits.reshape(-1)[:n] == 0] = -math.inf
        if s.penalizes:
            first = max(0, length - _count(s.last_n, size))
            said = Counter(past[0, 0, slot, torch.arange(first, length) % size].tolist())
            for i, count in said.items():
                if 0 <= i < n:
                    less = torch.tensor(count, dtype=row.dtype) * s.frequency + s.presence
                    row[i] = (row[i] * s.repeat if row[i] <= 0 else row[i] / s.repeat) - less
    return out
