"""Scales of groups of values: those with which rounding to a type's codes loses the least, by weighted squares.

A group is a row of x, float32 [groups, n]; w, of the same shape, says how much the square of each value's error counts.
A type's codes are a grid: whole numbers from low to high, or a table of values. For a scale s a value x becomes
s * (the grid's value nearest to x / s); best scales are searched for among candidates, and each candidate's codes have
their own best scale, by least squares, which is what is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Candidates for a grid's extreme code, in steps of a code: the largest value of a group may be rounded or cut.
STEPS = tuple(i / 10 for i in range(-9, 10))
#: How often codes and scales are fitted to each other after the search.
ROUNDS = 2


@dataclass(frozen=True)
class Grid:
    """Whole numbers from low to high, or some of them: `table`, float32, increasing, whose ends are low and high.

    nearest: which of the table is nearest to what lies from i / 2 to (i + 1) / 2, for i from 2 low to 2 high, int64.
    """

    low: float
    high: float
    table: Tensor | None = None
    nearest: Tensor | None = None

    @classmethod
    def of(cls, values: Sequence[int]) -> Grid:
        """The grid of some whole numbers, in increasing order."""
        table = torch.tensor(values, dtype=torch.float32)
        low, high = values[0], values[-1]
        # Between two whole numbers values change hands at a whole number or a half, so that halves tell all.
        middles = torch.arange(2 * low, 2 * high + 1) / 2 + 0.25
        return cls(low, high, table, torch.bucketize(middles, (table[1:] + table[:-1]) / 2))

    def snap(self, x: Tensor) -> Tensor:
        """The grid's nearest values; may write to x."""
        if self.table is None:
            return x.round_().clamp_(self.low, self.high)
        return self.table[self.index(x)]

    def index(self, x: Tensor) -> Tensor:
        """Which of the grid's values each is nearest to, int64."""
        if self.nearest is None:
            return (x.round().clamp_(self.low, self.high) - self.low).long()
        halves = (x * 2).floor_().clamp_(2 * self.low, 2 * self.high)
        return self.nearest[halves.sub_(2 * self.low).long()]


def ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """a / b, 0 where b is 0."""
    b = torch.as_tensor(b, dtype=a.dtype)
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


def scales(x: Tensor, w: Tensor, grid: Grid) -> Tensor:
    """The scale of each group, float32 [groups], of either sign where the grid has negative values; 0 for a group that
    is 0."""
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    wx = w * x
    best, found = torch.full_like(extreme[:, 0], -1.0), torch.zeros_like(extreme[:, 0])

    def consider(inverse: Tensor) -> None:
        nonlocal best, found
        codes = grid.snap(x * inverse)
        along, square = (wx * codes).sum(1), (w * codes.square()).sum(1)
        gain = ratio(along.square(), square)  # by how much the error is smaller than that of zeros
        better = gain > best
        best = torch.where(better, gain, best)
        found = torch.where(better, ratio(along, square), found)

    for end in _ends(grid):
        consider(ratio(torch.full_like(extreme, end), extreme))
    for _ in range(ROUNDS):
        consider(ratio(torch.ones_like(extreme), found[:, None]))
    return found


def _ends(grid: Grid) -> Iterable[float]:
    """The codes, whole or between, that a group's extreme value is tried at."""
    unit = 1.0 if grid.table is None else (grid.high - grid.low) / (len(grid.table) - 1)
    sides = (grid.high,) if grid.low >= 0 else (grid.low, grid.high)
    return [side + step * unit for side in sides for step in STEPS if abs(side + step * unit) >= unit / 2]


def scales_and_minimums(x: Tensor, w: Tensor, high: int, *, below_zero: bool = True) -> tuple[Tensor, Tensor]:
    """Scales s and minimums m of s * code - m with codes from 0 to `high`: float32 [groups] each.

    below_zero: m is at least 0, as the K types store it; else it has either sign. s is at least 0.
    """
    low, top = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    if below_zero:
        low = low.clamp(max=0.0)
    fit = _Affine(x, w, below_zero)
    for step in (0.0, *STEPS, -1.0, 1.0):
        fit.consider(ratio(torch.full_like(low, high + step), top - low), -low, high)
    for _ in range(ROUNDS):
        fit.consider(ratio(torch.ones_like(low), fit.scale[:, None]), fit.minimum[:, None], high)
    return fit.scale, fit.minimum


class _Affine:
    """The best scale and minimum so far. Sums over groups are compared in float64: the errors are small differences."""

    def __init__(self, x: Tensor, w: Tensor, below_zero: bool) -> None:
        self.x, self.w, self.wx, self.below_zero = x, w, w * x, below_zero
        self.sum_w, self.sum_x = w.sum(1).double(), self.wx.sum(1).double()
        self.sum_xx = (self.wx * x).sum(1).double()
        self.error = torch.full_like(self.sum_w, torch.inf)
        self.scale, self.minimum = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])

    def consider(self, inverse: Tensor, minimum: Tensor, high: int) -> None:
        """The codes that these give, with the scale and minimum that are best for them."""
        codes = ((self.x + minimum) * inverse).round_().clamp_(0, high)
        weighted = self.w * codes
        sum_l, sum_ll = weighted.sum(1).double(), (weighted * codes).sum(1).double()
        sum_xl = (self.wx * codes).sum(1).double()
        spread = self.sum_w * sum_ll - sum_l.square()
        flat = spread <= 1e-9 * self.sum_w * sum_ll  # all codes alike: the minimum alone, or the scale alone
        s = torch.where(flat, 0.0, ratio(self.sum_w * sum_xl - self.sum_x * sum_l, spread))
        m = ratio(s * sum_l - self.sum_x, self.sum_w)
        if self.below_zero:
            s = torch.where(m < 0, ratio(sum_xl, sum_ll), s)
            m = m.clamp(min=0.0)
        error = (
            self.sum_xx + s.square() * sum_ll + m.square() * self.sum_w
            - 2 * s * sum_xl + 2 * m * self.sum_x - 2 * s * m * sum_l
        )  # fmt: skip
        better = (error < self.error) & (s >= 0)
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, s.float(), self.scale)
        self.minimum = torch.where(better, m.float(), self.minimum)
