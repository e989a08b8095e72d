"""Is a result right? One judgement for the conformance tool, the tests of backends and third parties.

The rule: a result's relative error (the root of its NMSE, the float64 reference's energy below) is at most twice that
of an independent low-precision computation of the same inputs plus a rounding band, and never over a fixed ceiling. Of
several such computations the root mean square counts, so that no lucky one decides. The same holds row by row, so that
one wrong row in thousands can't hide in the sum. Moved elements are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt import float8
from graphrt.dtypes import CACHES, FLOATS8, CacheType
from graphrt.host import host_type
from graphrt.judge_bias import why_biased
from graphrt.patterns import coarser_type, describe, place
from graphrt.tensor import Tensor
from graphrt.testing import dequantize

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Precision:
    """Relative errors. band: always allowed; ceiling: never passed, whatever the low-precision computation does.

    bias: how far off results may be in one direction, beyond what chance explains (judge_bias.py); None where errors
    are so small that their size is enough of a rule.
    """

    band: float
    ceiling: float
    bias: float | None = None


#: The one table of tolerances, by what an op computes in. ggml allows 2.2e-2 (NMSE 5e-4) for attention and MUL_MAT of
#: every type, and 3.2e-4 (1e-7) elsewhere.
PRECISIONS = {
    "f32": Precision(2.0**-22, 2.0**-18),
    "f16": Precision(2.0**-13, 2.0**-8),
    "bf16": Precision(2.0**-10, 2.0**-6),
    "stored f16": Precision(2.0**-12, 2.0**-10),  # computed in f32, then rounded to the result's type
    "stored bf16": Precision(2.0**-9, 2.0**-7),
    # Rounding to 8 bits goes up as often as down.
    "stored f8_e4m3": Precision(2.0**-5, 2.0**-3, 2.0**-9),
    "stored f8_e5m2": Precision(2.0**-4, 2.0**-2, 2.0**-9),
    # Activations that a backend rounds to 8 bits on purpose (Backend.rounds_activations), in groups of 32 with a step
    # of max|x| / 127. A rounding is off by step / sqrt(12) on average: 0.4 % of uniform x, 0.5 % of normal x, and since
    # max|x| is at most the group's length, sqrt(32 / 12) / 127 = 1.3 % of any x. On the suite's 109 products of few
    # tokens it is 0.4 % (median), 0.6 % (95 of 100), 1.05 % (five sums that nearly cancel). The ceiling lies above
    # twice the 1.3 %. The band is for a step kept in f16, as ggml keeps it (2**-11), and as much again for values
    # between two steps that go the other way.
    "int8": Precision(2.0**-10, 2.0**-5),
    # Attention whose products multiply floats of 8 bits, as its parameter prec allows. Rounding to three bits of
    # mantissa is off by 2.6 % on average. In q that is as much of a score, so of scores of deviation 3 (the suite's)
    # 0.08, 8 % of a weight, and the weights' own rounding is little beside it. The ceiling is three times that. The
    # bias is for matrix units that cut sums of such products off at 14 bits, once for each 32 of them.
    "f8": Precision(2.0**-7, 2.0**-2, 2.0**-8),
}
#: FlashAttnParams.prec (ops/flash_attn_ext.py) as a key of PRECISIONS.
_ASKED = {10: "f32", 8: "f8"}
#: Ops that may multiply in a source's type: the sources that decide.
_DECIDING = {
    "MUL_MAT": ("weights",), "MUL_MAT_ID": ("weights",), "FLASH_ATTN_EXT": ("k", "v"), "FLASH_ATTN_LSE": ("k",),
    "FLASH_ATTN_VARLEN": ("k", "v"), "FLASH_ATTN_VARLEN_LSE": ("k",),
    "FLASH_ATTN_BACK": ("k", "v"), "FLASH_ATTN_VARLEN_BACK": ("k", "v"), "OUT_PROD": ("a",),
    "MUL_MAT_ID_BACK": ("weights",),
}  # fmt: skip
#: A row's error may be this often the worst row's of the low-precision computation, and its ceiling this much higher.
ROW_FACTOR, ROW_CEILING = 3.0, 8.0
#: A row's energy counts as at least this part of the mean row's: a row that cancels out is no measure of itself.
ROW_FLOOR = 2.0**-8
#: Of elements written in a quantized type, this part may be off by one step.
OFF_BY_ONE_SHARE = 0.01
#: Differences under this part of a block's largest value come from the rounding of its f16 scale, not of an element.
SCALE_ROUNDING = 2.0**-9


@dataclass(frozen=True)
class Verdict:
    """message: why it is wrong, "" when it is right. worst: index of the largest error in the order of ne."""

    ok: bool
    message: str = ""
    nmse: float | None = None
    limit: float | None = None
    max_abs: float | None = None
    worst: tuple[int, ...] | None = None


def precision(node: Tensor) -> str:
    """The key in PRECISIONS of what a node may compute in, which its sources' types decide, or its parameter prec."""
    if asked := _ASKED.get(getattr(node.params, "prec", 0)):
        return asked
    names = {node[source].dtype.name for source in _DECIDING.get(node.op, ())}
    if names:
        return "bf16" if "bf16" in names else "f32" if names == {"f32"} else "f16"
    stored = f"stored {node.dtype.name}"
    return stored if stored in PRECISIONS else "f32"


def tolerance(node: Tensor) -> str:
    """The key of what a node's result is held to: what it computes in, or where it is stored in 8 bits, which rounds
    more than the types that are multiplied in, that."""
    coarse = node.dtype.is_float8 and precision(node) != "f8"
    return f"stored {node.dtype.name}" if coarse else precision(node)


@dataclass(frozen=True)
class Share:
    """How many elements may be far off: `part` of those where |a - e| > atol + rtol * |e|, none of them by name."""

    atol: float
    rtol: float
    part: float


#: What results that floats of 8 bits went into must keep beside the relative error, as is usual for these types: they
#: have few bits, so that single elements may be far off, but hardly any.
SHARE = Share(0.3, 0.25, 0.005)


def judge_share(node: Tensor, actual: npt.ArrayLike, expected: npt.ArrayLike, rule: Share = SHARE) -> Verdict:
    """Judges a result by how many of its elements are far from what they must be; both in torch's shape, as numbers.

    NaN and infinities of the reference are for judge() to look at and count here as right where they are met.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - e))
        over = ~same & ~(error <= rule.atol + rule.rtol * np.abs(e))
    count, most = int(over.sum()), rule.part * over.size
    if count <= most:
        return Verdict(True, max_abs=float(error.max(initial=0.0)))
    first = tuple(int(i) for i in np.argwhere(over)[0])
    message = (
        f"{count} of {over.size} elements are off by more than {rule.atol:g} + {rule.rtol:g} times what they must be, "
        f"{rule.part:.1%} may be; first at {place(first[::-1], node.op)}: {a[first]:.6g} instead of {e[first]:.6g}; "
        f"{describe(over, node.op)}"
    )
    return Verdict(False, message, None, None, float(np.nan_to_num(error, nan=np.inf).max()), first[::-1])


def judge(
    node: Tensor,
    actual: npt.ArrayLike,
    expected: npt.ArrayLike,
    low: npt.ArrayLike,
    rule: str | Precision | None = None,
) -> Verdict:
    """Judges a result. All three in torch's shape and as numbers; expected: float64; low: the low-precision one, or
    several, which differ by what no rule fixes (an order of adding up), along a first dimension.

    rule: what was computed in, a key of PRECISIONS or figures of one's own, if it is not precision() of the node.

    A result of floats of 8 bits, or of an op that reads k or v or a matrix of them, must keep judge_share()'s rule too;
    one that is rounded so coarsely that a wrong factor hides in that, judge_bias.py's.

    A result of floats of 8 bits holds no number past the largest one, which such a one is judged as.

    Where the reference is NaN or infinite the result must be so too, and nowhere else. A result of an integer type, or
    one that moves elements (low is None), must be equal.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    special = _special(node, a, e)
    if special is not None:
        return special
    draws = np.asarray(low, np.float64)
    unrounded = draws = np.broadcast_to(draws, (draws.shape[0] if draws.ndim > e.ndim else 1, *e.shape))
    if node.dtype.is_float8:
        # As both are when they are stored: what is too large becomes the largest number, and low is rounded.
        largest = FLOATS8[node.dtype.name].largest
        e, draws = np.clip(e, -largest, largest), float8.decode(float8.encode(draws, node.dtype), node.dtype)
    finite = np.isfinite(e)
    a, e = np.where(finite, a, 0.0), np.where(finite, e, 0.0)
    error = np.abs(a - e)
    worst = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))[::-1]
    allowed = rule if isinstance(rule, Precision) else PRECISIONS[rule or tolerance(node)]
    figures = _Figures(node, allowed, error, e, np.where(finite, draws, 0.0))
    message = figures.why_wrong(worst, a, e)
    if message and node.dtype.name == "f32":
        message += coarser_type(a, e)
    if not message and reads_float8(node):
        message = judge_share(node, a, e).message
    if not message and allowed.bias is not None:
        band = PRECISIONS[precision(node)].band
        message = why_biased(node, a, e, unrounded[0], allowed.bias, band)
    return Verdict(not message, message, figures.nmse, figures.limit, float(error.max()), worst)


def reads_float8(node: Tensor) -> bool:
    """A node has floats of 8 bits, or computes with some."""
    queries = ("q",) if node.op in ("FLASH_ATTN_EXT", "FLASH_ATTN_LSE") else ()
    sources = (*_DECIDING.get(node.op, ()), *queries)
    return node.dtype.is_float8 or any(node[source].dtype.is_float8 for source in sources)


def _special(node: Tensor, a: Floats, e: Floats) -> Verdict | None:
    """What NaN and infinity decide, None when they are where the reference has them."""
    with np.errstate(over="ignore"):  # what the result's type can't hold is infinite in it
        kind = host_type(node.dtype)
        stored = e.astype(kind) if kind.kind == "f" else e.astype(np.float32)
    overflow = np.isinf(stored) & np.isfinite(e)
    special = ~np.isfinite(e)
    wrong = ~np.isfinite(a) & ~special & ~(overflow & (a == stored))
    lost = special & ~((a == e) | (np.isnan(a) & np.isnan(e)))
    e[overflow & np.isinf(a)] = np.inf
    for mask, what in (
        (wrong, "NaN or infinite where it must be a number"),
        (lost, "not the NaN or infinity that it must be"),
    ):
        if mask.any():
            return _misplaced(node, mask, what, a, e)
    return None


class _Figures:
    """Errors of a result and of the low-precision ones, over all and by row; low: [draws, *shape]."""

    def __init__(self, node: Tensor, rule: Precision, error: Floats, expected: Floats, low: Floats) -> None:
        self.node, self.rule, self.error = node, rule, error
        self.energy = (expected**2).sum(-1)
        with np.errstate(invalid="ignore", over="ignore"):
            self.low_error = np.nan_to_num(np.abs(low - expected), nan=np.inf, posinf=np.inf)
        self.rms = math.sqrt(float(self.energy.sum()) / max(error.size, 1))
        self.nmse = _ratio(float((error**2).sum()), float(self.energy.sum()))
        low_nmse = _ratio(float((self.low_error**2).sum()) / len(low), float(self.energy.sum()))
        self.limit = min(2.0 * math.sqrt(low_nmse) + self.rule.band, self.rule.ceiling) ** 2

    def rows(self, error: Floats) -> Floats:
        """The relative error of each row."""
        floor = max(float(self.energy.mean()) * ROW_FLOOR, np.finfo(np.float64).tiny)
        relative: Floats = np.sqrt((error**2).sum(-1) / np.maximum(self.energy, floor))
        return relative

    def why_wrong(self, worst: tuple[int, ...], a: Floats, e: Floats) -> str:
        actual_rows = self.rows(self.error)
        worst_rows = self.rows(self.low_error).reshape(len(self.low_error), -1).max(1)
        row_limit = ROW_FACTOR * math.sqrt(float((worst_rows**2).mean())) + self.rule.band
        row_limit = min(row_limit, ROW_CEILING * self.rule.ceiling)
        if self.nmse > self.limit:
            what = f"NMSE {self.nmse:.3g} over {self.limit:.3g}"
        elif float(actual_rows.max()) > row_limit:
            row = np.unravel_index(int(actual_rows.argmax()), actual_rows.shape)
            named = place((0, *(int(i) for i in row[::-1])), self.node.op).rpartition(", ")[0]
            figure = float(actual_rows.max()) ** 2
            what = f"NMSE {figure:.3g} over {row_limit**2:.3g} in one row ({named}), {self.nmse:.3g} over all"
        else:
            return ""
        at = worst[::-1]
        return (
            f"{what}; worst at {place(worst, self.node.op)}: {a[at]:.6g} instead of {e[at]:.6g}; "
            f"{describe(self._bad(), self.node.op)}"
        )

    def _bad(self) -> Mask:
        """The elements to point at: far over what the low-precision computation does, or else the larger errors."""
        finite = self.low_error[np.isfinite(self.low_error)]
        noise = max(2.0 * float(finite.max(initial=0.0)), 4.0 * self.rule.band * self.rms)
        bad: Mask = self.error > noise
        return bad if bad.any() else self.error > 0.5 * float(self.error.max())


def _ratio(error: float, energy: float) -> float:
    """error / energy; 0/0 is right only when met exactly."""
    if energy == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / energy if math.isfinite(error) else math.inf


def judge_broken(
    node: Tensor, actual: npt.ArrayLike, expected: npt.ArrayLike, from_nan: Mask, from_infinity: Mask
) -> Verdict:
    """Judges what comes of inputs with NaN or infinities among them, of one op or of several that may be fused.

    All in torch's shape. from_nan: where a NaN of the inputs takes part; from_infinity: where one does not, but an
    infinity; expected: float64. A NaN stays NaN. An infinity may become NaN (operands rounded to fewer bits meet it as
    0 * inf), or another infinity, and a number only where the reference has one. Nothing else may be anything but a
    number, and all numbers together have a relative error of at most the ceiling for 8 bits: what is nearer is for the
    cases of numbers to say.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    lost = (from_nan & ~np.isnan(a)) | (from_infinity & ~np.isfinite(e) & np.isfinite(a))
    spread = ~from_nan & ~from_infinity & ~np.isfinite(a)
    for mask, what in (
        (spread, "NaN or infinite where it must be a number"),
        (lost, "not the NaN or infinity that it must be"),
    ):
        if mask.any():
            return _misplaced(node, mask, what, a, e)
    numbers = np.isfinite(a) & np.isfinite(e)
    error, limit = np.where(numbers, a - e, 0.0), PRECISIONS["int8"].ceiling ** 2
    nmse = _ratio(float((error**2).sum()), float((e[numbers] ** 2).sum()))
    message = "" if nmse <= limit else f"NMSE {nmse:.3g} over {limit:.3g} in what is a number"
    return Verdict(not message, message, nmse, limit, float(np.abs(error).max()))


def _misplaced(node: Tensor, mask: Mask, what: str, a: Floats, e: Floats) -> Verdict:
    first = tuple(int(i) for i in np.argwhere(mask)[0])
    values = f"{a[first]:g} instead of {e[first]:g}"
    where = f"first at {place(first[::-1], node.op)}: {values}; {describe(mask, node.op)}"
    return Verdict(False, f"{what}: {int(mask.sum())} elements, {where}", math.inf, None, None, first[::-1])


def judge_equal(node: Tensor, actual: Array, expected: Array) -> Verdict:
    """Judges integers and what is made without rounding: every bit must be right, but that one NaN is as good as any.

    Both as stored (see graphrt.execute.host_type), in torch's shape.
    """
    wrong = actual != expected
    if not node.dtype.is_quantized and node.dtype.kind != "int":
        a, e = dequantize(actual, node.dtype), dequantize(expected, node.dtype)
        wrong &= ~(np.isnan(a) & np.isnan(e))
        wrong |= (a == e) & (np.signbit(a) != np.signbit(e))
    if not wrong.any():
        return Verdict(True, "", 0.0, 0.0, 0.0)
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    unit = "bytes" if node.dtype.is_quantized else "elements"
    where = f"first at {place(first[::-1], node.op)}: {actual[first]} instead of {expected[first]}"
    message = f"{int(wrong.sum())} {unit} differ, {where}; {describe(wrong, node.op)}"
    return Verdict(False, message, None, 0.0, None, first[::-1])


def judge_order(node: Tensor, actual: Array, expected: Array, values: Floats) -> Verdict:
    """Judges indices into rows of `values` (ARGMAX, ARGSORT, TOP_K) by what they point at: ties may go either way.

    An index may appear once a row. TOP_K's order is free.
    """
    rows, n = values.reshape(-1, values.shape[-1]), values.shape[-1]
    a, e = actual.reshape(len(rows), -1).astype(np.int64), expected.reshape(len(rows), -1).astype(np.int64)
    if ((a < 0) | (a >= n)).any():
        return Verdict(False, f"indices must lie in 0..{n - 1}, got {int(a.min())}..{int(a.max())}")
    ordered = np.sort(a, axis=-1)
    if (np.diff(ordered, axis=-1) == 0).any():
        row = int(np.argwhere(np.diff(ordered, axis=-1) == 0)[0][0])
        return Verdict(False, f"an index appears twice in row {row}: {a[row][:16].tolist()}")
    got, right = np.take_along_axis(rows, a, -1), np.take_along_axis(rows, e, -1)
    if node.op == "TOP_K":
        got, right = np.sort(got, axis=-1), np.sort(right, axis=-1)
    if np.array_equal(got, right, equal_nan=True):
        return Verdict(True, "", 0.0, 0.0, 0.0)
    wrong = (got != right).reshape(actual.shape)
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f"first at {place(first[::-1], node.op)}: {actual[first]} instead of {expected[first]}"
    return Verdict(False, f"{int(wrong.sum())} indices point at other values, {where}; {describe(wrong, node.op)}")


def judge_written(node: Tensor, actual: Array, expected: Array) -> Verdict:
    """Judges what was written in a quantized type, both as stored: at most one step off, in few elements.

    A step is the block's largest value over its type's steps (CacheType); OFF_BY_ONE_SHARE says what few is.
    """
    if np.array_equal(actual, expected):
        return Verdict(True, "", 0.0, 0.0, 0.0)
    kind = CACHES.get(node.dtype.name, CacheType())
    if not kind.steps:
        return judge_equal(node, actual, expected)
    size = node.dtype.block_size
    a, e = (
        np.asarray(dequantize(np.ascontiguousarray(x), node.dtype), np.float64).reshape(-1, size)
        for x in (actual, expected)
    )
    span = np.ptp(e, axis=1) if kind.from_least else np.abs(e).max(1)
    step = (span / kind.steps)[:, None]
    error = np.where(np.isnan(a) & np.isnan(e), 0.0, np.abs(a - e))
    off = ~((error <= SCALE_ROUNDING * np.abs(e).max(1, keepdims=True)) | (error == 0.0))  # NaN for a number is off
    far = off & ~(error <= step * 1.01 + SCALE_ROUNDING * np.abs(e).max(1, keepdims=True))
    count, few = int(off.sum()), max(1, int(OFF_BY_ONE_SHARE * off.size))
    max_abs = float(np.nan_to_num(error, nan=np.inf).max())
    worst = tuple(int(i) for i in np.unravel_index(int(error.argmax()), node.shape))[::-1]
    figures = (_ratio(float((error**2).sum()), float((e**2).sum())), None, max_abs, worst)
    if far.any():
        wrong = far.reshape(node.shape)
        message = f"{int(far.sum())} elements are more than one {node.dtype.name} step off; {describe(wrong, node.op)}"
        return Verdict(False, message, *figures)
    if count > few:
        return Verdict(False, f"{count} elements are one {node.dtype.name} step off, {few} may be", *figures)
    return Verdict(True, "", *figures)
