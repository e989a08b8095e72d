"""Activations as matrix products take them: rounded to 8 bits in groups of 32, or f16; what comes before is joined in.

A group's scale is d = max|x| / 127 and q = x / d to the nearest integer (ties to even). A group with a value that is
not finite gets a d that is NaN, and so are its products.

Short rows are rounded in two parts: what the first leaves, x - d * q, is rounded once more, to steps of d / 254. An
element is then off by at most d / 508 instead of d / 2, far less than rounding to f16 costs; a product takes both parts
times the same weights, and scales 254 times the one integer sum plus the other. Models with rows so short wait for
launches more than for dp4a, and need it most: with one part they often choose another token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.device import Target, interpreting
from graphrt.backends.triton.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.launch import Launch, launch_options

#: Elements that share a scale.
GROUP = 32
#: Rows of up to so many elements are rounded in two parts.
MAX_TWO_PARTS = 2048
#: Steps of the second part in one of the first.
FINER = tl.constexpr(254)
#: Elements that one program of a norm holds at once; longer rows are read twice.
_NORM_BLOCK = 8192
#: The longest row that a sum and its norm take in one launch: it stays in registers.
MAX_ADD_NORM = _NORM_BLOCK
#: Elements of a program where groups are independent of each other.
_BLOCK = 1024
#: A gate's activations that kernels know, as GLU's `kind`.
GLU_KINDS = ("swiglu", "geglu", "reglu")


@dataclass(frozen=True)
class Rows:
    """Vectors as kernels read or write them: element i of row t is data[t * row_stride + i * stride].

    data: flat, f32, f16 or bf16, from the first row's first element on.
    """

    data: torch.Tensor
    n: int
    k: int
    row_stride: int
    stride: int = 1


def parts_of(k: int) -> int:
    """In how many parts rows of k elements are rounded: 1 or 2."""
    return 2 if k <= MAX_TWO_PARTS else 1


@dataclass(frozen=True, eq=False)
class Q8Rows:
    """n rows of k values rounded to 8 bits in so many parts. q: int8 [parts * n, k], all first parts before the second;
    d: f32 [n, k/32], the last part's step; s: f32 [n, k/16], the sum of each half group's rounded values."""

    q: torch.Tensor
    d: torch.Tensor
    s: torch.Tensor
    parts: int

    @property
    def n(self) -> int:
        return self.q.shape[0] // self.parts

    @property
    def k(self) -> int:
        return self.q.shape[1]

    @staticmethod
    def nbytes(n: int, k: int) -> int:
        """Bytes of memory for n rows of k values, its start at a multiple of 16."""
        return sum(_planes(n, k)[1])

    @classmethod
    def inside(cls, memory: torch.Tensor, n: int, k: int) -> Q8Rows:
        """In the memory of a flat tensor, such as the f32 one that the values come from, which is always large enough:

        two parts take 2.4 bytes an element, and at most 20 that alignment costs."""
        data = memory.view(torch.uint8)
        start = -data.data_ptr() % 16
        shapes, sizes = _planes(n, k)
        assert start + sum(sizes) <= data.numel(), (n, k, data.numel())
        planes = []
        for kind, shape, size in zip((torch.int8, torch.float32, torch.float32), shapes, sizes):
            planes.append(data[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape))
            start += size
        q, d, s = planes
        return cls(q, d, s, parts_of(k))

    @classmethod
    def empty(cls, n: int, k: int, device: str | torch.device) -> Q8Rows:
        return cls.inside(torch.empty(cls.nbytes(n, k), dtype=torch.uint8, device=device), n, k)


def _planes(n: int, k: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Shapes of q, d and s, and the bytes from one's start to the next one's: multiples of 16."""
    assert k % GROUP == 0, k
    shapes = [(parts_of(k) * n, k), (n, k // GROUP), (n, 2 * k // GROUP)]
    return shapes, [-(-math.prod(shape) * size // 16) * 16 for shape, size in zip(shapes, (1, 4, 4))]


# --- parts of kernels ---


@triton.jit
def magnitude(x):
    """|x| as an int32 that orders as |x| does, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(most):
    """(d, 1 / d) of groups whose largest magnitude() is `most`. Of numbers so small that FINER / d is none, 1: q is 0.

    d is NaN of NaN and of infinity: with an infinite d, products would be infinities of a sign that says nothing.
    """
    d = most.to(tl.float32, bitcast=True) * (1.0 / 127.0)
    d = d * 0.0 + d
    return d, 1.0 / tl.where(d >= 1e-36, d, 1.0)


@triton.jit
def rounded(x):
    """x to the nearest integer, as f32, and as an int32 whose low 8 bits are its int8. |x| is below 2**21."""
    shifted = x + 12582912.0  # 1.5 * 2**23: an ulp is 1
    return shifted - 12582912.0, shifted.to(tl.int32, bitcast=True)


@triton.jit
def finer(x, number, d, inverse):
    """The second part of x, of which number * d is the first: its integer and its byte, as rounded() has them."""
    return rounded((x - number * d) * (inverse * FINER))


@triton.jit
def _store_q8(x, p_q, p_d, p_s, row, group, k, PARTS: tl.constexpr):
    """Rounds x, f32 [groups, 32], in PARTS and stores it as groups `group` ([groups] int) of a row of Q8Rows.

    Programs of axis 0 are the rows."""
    G: tl.constexpr = x.shape[0]
    m = group < k // 32
    at = row * (k // 32) + group
    d, inverse = scale_of(tl.max(magnitude(x), 1))
    number, byte = rounded(x * inverse[:, None])
    _store_bytes(byte, p_q, at, m)
    if PARTS == 2:
        more, byte = finer(x, number, d[:, None], inverse[:, None])
        _store_bytes(byte, p_q, (tl.num_programs(0) + row) * (k // 32) + group, m)
        number = number * FINER + more
        d *= 1.0 / FINER
    tl.store(p_d + at, d, mask=m)
    sums = tl.sum(tl.reshape(number, (G, 2, 16)), 2) * d[:, None]
    tl.store(p_s + at[:, None] * 2 + tl.arange(0, 2)[None, :], sums, mask=m[:, None])


@triton.jit
def _store_bytes(byte, p_q, at, m):
    """The low bytes of [groups, 32] as groups `at` ([groups] int) where m ([groups])."""
    # Four bytes a lane, as it has them from loading f32: with more, values would go through shared memory first.
    i = tl.max_contiguous(at[:, None] * 32 + tl.arange(0, 32)[None, :], (1, 4))
    tl.store(p_q + i, byte.to(tl.int8), mask=m[:, None])


@triton.jit
def ordered_element(place):
    """Which element lies at a place of gemm_small/wgmma.py's order: of an element's place in 128 the bits
    c1 c0 h i1 i0 b1 b0 become h i1 i0 b0 c1 c0 b1."""
    return (place // 128) * 128 + (
        place // 2 % 4 * 32 + place // 64 % 2 * 16 + place // 16 % 4 * 4 + place % 2 * 2 + place // 8 % 2
    )


@triton.jit
def in_order(x):
    """Values of whole 128s of elements, as they lie in gemm_small/wgmma.py's order: for every place what
    ordered_element() says. In registers and shared memory, so that rows are read and written wide."""
    x = tl.reshape(x, (x.numel // 128, 4, 2, 4, 2, 2))  # .., c1 c0, h, i1 i0, b1, b0
    return tl.permute(x, (0, 2, 3, 5, 1, 4))


@triton.jit
def _store_f16(x, p_q, at, m, ORDERED: tl.constexpr):
    """The same as f16, of rows that need not be whole groups. at: elements, m: which of them, [groups, 32]; if ORDERED
    whole 128s of them."""
    x = x.to(tl.float16)
    if ORDERED:
        x = tl.reshape(in_order(x), x.shape)
    tl.store(p_q + at, x, mask=m)


@triton.jit
def store_row(y, p_q, p_d, p_s, row, i, k, TO: tl.constexpr, PARTS: tl.constexpr):
    """Stores a whole row y, f32 [groups, 32], elements i of k, as TO says: "q8" in PARTS, "f16", "ordered", or not."""
    if TO == "q8":
        _store_q8(y, p_q, p_d, p_s, row, tl.arange(0, y.shape[0]), k, PARTS)
    elif TO != "":
        _store_f16(y, p_q, row * k + i, i < k, TO == "ordered")


# --- kernels ---
@accesses(reads="p_x", writes="p_q p_d p_s", helper=True)
@triton.jit
def round_rows(
    p_x, x_row, x_col, p_q, p_d, p_s, k, Q8: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, i) rounds elements i * BLOCK to (i + 1) * BLOCK - 1 of a row of x.

    x_row, x_col: strides of x, in elements; Q8: to Q8Rows' q, d and s in PARTS, else to f16 in q.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    m = at < k
    if PDL:
        gdc_wait()
    x = tl.load(p_x + row * x_row + at * x_col, mask=m, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    if Q8:
        _store_q8(x, p_q, p_d, p_s, row, group, k, PARTS)
    else:
        _store_f16(x, p_q, row * k + at, m, False)


@accesses(reads="p_x p_w", writes="p_out p_q p_d p_s", early_if={"EARLY": "p_w"})
@triton.jit
def norm_rows(
    p_x, x_row, x_col, p_w, eps, p_out, out_row, p_q, p_d, p_s, k,
    TO_F32: tl.constexpr, TO: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): x / sqrt(mean(x**2) + eps) * w of a row of x. w: f32 [k] or None.

    TO_F32: into `out`, rows out_row apart; TO: "q8" (in PARTS) or "f16" as round_rows, "ordered": f16 in that order
    (half.Activations), "" for none of these. EARLY: w is read before what other kernels wrote. WHOLE: a block is a row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    p_row = p_x + row * x_row
    if p_w is not None and EARLY:
        w = tl.load(p_w + i, mask=i < k, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(p_row + i * x_col, mask=i < k, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    squares = x * x
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            x = tl.load(p_row + (start + i) * x_col, mask=start + i < k, other=0.0).to(tl.float32)
            squares += x * x
    factor = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0) / k + eps)
    for start in range(0, BLOCK if WHOLE else k, BLOCK):
        at = start + i
        m = at < k
        if not WHOLE:
            x = tl.load(p_row + at * x_col, mask=m, other=0.0).to(tl.float32)
        y = x * factor
        if p_w is not None:
            if not EARLY:
                w = tl.load(p_w + at, mask=m, other=0.0)
            y *= w
        if TO_F32:
            tl.store(p_out + row * out_row + at, y, mask=m)
        if TO == "q8":
            group = start // 32 + tl.arange(0, BLOCK // 32)
            _store_q8(y, p_q, p_d, p_s, row, group, k, PARTS)
        elif TO != "":
            _store_f16(y, p_q, row * k + at, m, TO == "ordered")


@triton.jit
def row_over_rms(x, k, eps):
    """What makes x, one row with zeros past its k elements, a row of unit root mean square."""
    return 1.0 / tl.sqrt_rn(tl.sum(tl.sum(x * x, 1), 0) / k + eps)


@triton.jit
def norm_weight(p_w, i, m):
    """Elements i, where m, of a norm's weights, f32 [k]; 1 where there are none."""
    w = 1.0
    if p_w is not None:
        w = tl.load(p_w + i, mask=m, other=0.0)
    return w


@triton.jit
def add_norm_row(
    x, p_w, w, eps, p_residual, residual, p_sum, p_w2, w2, eps2, p_out, p_q, p_d, p_s, row, i, m, k,
    TO: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of one row, f32 [groups, 32] with zeros past its k elements: sum = norm(x) * w, or x where p_w is None, plus the
    residual where p_residual is not; then norm(sum) * w2 as store_row() says and, with p_out, in f32, unless p_w2 is
    None.

    row: int64; i, m: a row's elements, and which of them there are. p_sum, p_out: f32 [n, k] without gaps.
    """
    at = row * k + i
    if p_w is not None:
        x = x * row_over_rms(x, k, eps) * w
    if p_residual is not None:
        x += residual
    tl.store(p_sum + at, x, mask=m)
    if p_w2 is not None:
        y = x * row_over_rms(x, k, eps2) * w2
        if p_out is not None:
            tl.store(p_out + at, y, mask=m)
        store_row(y, p_q, p_d, p_s, row, i, k, TO, PARTS)


@accesses(reads="p_x p_w p_residual p_w2", writes="p_sum p_out p_q p_d p_s", early_if={"EARLY": "p_w p_w2"})
@triton.jit
def add_norm_rows(
    p_x, p_w, eps, p_residual, p_sum, p_w2, eps2, p_out, p_q, p_d, p_s, k,
    TO: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): sum = norm(x) * w + residual, or x + residual where w is None; norm(sum) * w2 rounded as TO says.

    x, residual, sum: f32 [n, k] without gaps; sum's memory may be x's or residual's. w, w2: f32 [k], read before what
    other kernels wrote if EARLY. out: the last in f32 [n, k], or None. TO, PARTS: as norm_rows. A block is a row.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    m = i < k
    at = row * k + i
    if EARLY:
        w, w2 = norm_weight(p_w, i, m), norm_weight(p_w2, i, m)
    if PDL:
        gdc_wait()
    x = tl.load(p_x + at, mask=m, other=0.0)
    residual = tl.load(p_residual + at, mask=m, other=0.0)
    if PDL:
        gdc_launch_dependents()
    if not EARLY:
        w, w2 = norm_weight(p_w, i, m), norm_weight(p_w2, i, m)
    add_norm_row(
        x, p_w, w, eps, p_residual, residual, p_sum, p_w2, w2, eps2, p_out, p_q, p_d, p_s, row, i, m, k, TO, PARTS
    )  # fmt: skip


# --- launches ---


def quantize_rows(target: Target, x: Rows, out: Q8Rows | torch.Tensor) -> Launch:
    """Rounds rows of x. out: Q8Rows of x's n and k, or f16 [n, k]; its memory must not overlap x's."""
    block = min(_BLOCK, max(32, 1 << (x.k - 1).bit_length()))
    args = {
        "p_x": x.data, "x_row": x.row_stride, "x_col": x.stride, **outputs_of(out), "k": x.k,
        "Q8": isinstance(out, Q8Rows), "BLOCK": block, "PDL": target.has_pdl,
    }  # fmt: skip
    return Launch(round_rows, (x.n, -(-x.k // block)), args, launch_options(target, max(1, block // 256)))


def norm_quantize(
    target: Target, x: Rows, weight: torch.Tensor | None, eps: float, out: Q8Rows | torch.Tensor | None,
    out_f32: Rows | None = None, ordered: bool = False, early: bool = False,
) -> Launch:  # fmt: skip
    """Rounds the RMS norm of x's rows times `weight` (f32 [k]). out: as quantize_rows, or None for out_f32 alone.

    out_f32: takes the result unrounded, its elements side by side; it may be x itself. ordered: f16 in that order.
    early: no kernel of a run writes the weight.
    """
    block = min(_NORM_BLOCK, max(32, 1 << (x.k - 1).bit_length()))
    assert out_f32 is None or out_f32.stride == 1
    args = {
        "p_x": x.data, "x_row": x.row_stride, "x_col": x.stride, "p_w": weight, "eps": eps,
        "p_out": None if out_f32 is None else out_f32.data, "out_row": 0 if out_f32 is None else out_f32.row_stride,
        **outputs_of(out), "k": x.k, "TO_F32": out_f32 is not None, "TO": form_of(out, ordered), "BLOCK": block,
        "EARLY": early and x.k <= block, "WHOLE": x.k <= block, "PDL": target.has_pdl,
    }  # fmt: skip
    return Launch(norm_rows, (x.n,), args, launch_options(target, min(16, max(1, block // 256))))


@dataclass(frozen=True)
class NormWeight:
    """An RMS norm and what it is multiplied with. row: f32 [k]."""

    row: torch.Tensor
    eps: float


def add_norm_quantize(
    target: Target, x: torch.Tensor, norm: NormWeight | None, residual: torch.Tensor, total: torch.Tensor,
    second: NormWeight, out: Q8Rows | torch.Tensor | None, early: bool = False, ordered: bool = False,
    out_f32: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """total = x + residual, x after `norm` if there is one; and out, `second` of total, rounded.

    x, residual, total: f32 [n, k] without gaps, k up to MAX_ADD_NORM; total may be x or residual. out: as
    quantize_rows, or None for out_f32 alone. early: no kernel of a run writes the norms' weights. ordered: as
    norm_quantize. out_f32: f32 [n, k], takes the result unrounded. All that is written but total has memory of its own.
    """
    n, k = x.shape
    assert k <= MAX_ADD_NORM
    block = max(32, 1 << (k - 1).bit_length())
    args = {
        "p_x": x, "p_w": norm and norm.row, "eps": norm.eps if norm else 0.0, "p_residual": residual, "p_sum": total,
        "p_w2": second.row, "eps2": second.eps, "p_out": out_f32, **outputs_of(out), "k": k,
        "TO": form_of(out, ordered), "EARLY": early, "BLOCK": block, "PDL": target.has_pdl,
    }  # fmt: skip
    return Launch(add_norm_rows, (n,), args, launch_options(target, min(16, max(1, block // 256))))


def form_of(out: Q8Rows | torch.Tensor | None, ordered: bool) -> str:
    """What kernels write, by the name that they have for it."""
    if out is None:
        return ""
    return "q8" if isinstance(out, Q8Rows) else "ordered" if ordered else "f16"


def outputs_of(out: Q8Rows | torch.Tensor | None) -> dict[str, torch.Tensor | int | None]:
    """Arguments of a kernel that writes there."""
    if isinstance(out, Q8Rows):
        return {"p_q": out.q, "p_d": out.d, "p_s": out.s, "PARTS": out.parts}
    return {"p_q": out, "p_d": None, "p_s": None, "PARTS": 1}


def uses_ptx(target: Target) -> bool:
    """Kernels may hold PTX: the GPU is NVIDIA's and nothing is interpreted."""
    return target.is_nvidia and not interpreting()
