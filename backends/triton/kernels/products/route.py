"""Which kernel makes a product, and why: one ordered list that dense, head-wise and experts' products are asked by.

A kernel says of a product None, that it serves it, or a sentence why not; the first that serves is the product's Route.
The sentences of those before it are kept, for `graphrt explain`. Nothing here looks at memory or makes a launch: what
the answer depends on is in the Product (product.py) and the Setting, so that plan.py, a backend without a graph
(`rounds_activations`) and tests get the same one.

One token: gemv.py, gemv_heads.py and experts/gemv.py are bound by memory; packed weights are multiplied with
activations rounded to 8 bits, which results that are to be exact forbid. From 2 tokens to 16, gemm_small's int8.py
multiplies the same integers on NVIDIA's matrix units; what it doesn't take is gemv's, up to 8 tokens. Up to 64, on
Hopper up to 256, gemm_small's others read weights once for all tokens and multiply in 16 bits. More: weights are
dequantized to scratch, then the vendor's product. Experts' pairs of token and expert count as tokens, and take kernels
of their own, and so do the products that are gradients of others (Product.transposed): they add up over the rows of a
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.experts import hopper
from graphrt.backends.triton.kernels.experts.gather import MAX_ROW
from graphrt.backends.triton.kernels.products import fusions, gemv
from graphrt.backends.triton.kernels.products.activations import GLU_KINDS, parts_of
from graphrt.backends.triton.kernels.products.forms import Form
from graphrt.backends.triton.kernels.products.gemm_small import int8_launch, mma_launch, wgmma_launch
from graphrt.backends.triton.kernels.products.gemm_small.arguments import STEP
from graphrt.backends.triton.kernels.products.product import PLAIN, Product
from graphrt.backends.triton.packing import packing_of

#: Up to so many tokens gemm_small takes a product, by the kind of its weights.
SMALL_TOKENS = {"packed": 64, "plain": 64, "f32": 8}
#: experts/gemv.py reads an expert's weights once for each pair, the others once for all: it serves up to so many pairs.
#: Measured on an H100: at 64 to 96 pairs it takes a third of the other's time, at 256 it would take twice as long.
MAX_PAIRS = 128

_EXACT = "rounds activations to 8 bits, and results are to be exact"
_SOME_GLUS = "joins the products of a GLU that it knows, if both weights are"


class Setting(Protocol):
    """What a choice depends on beside the product: a Context, or the backend."""

    @property
    def target(self) -> Target: ...

    @property
    def exact(self) -> bool: ...


@dataclass(frozen=True)
class Kernel:
    """A way to make a product.

    name: what plans and explanations call it; serves: None where it can make a product, else why not, as what follows
    its name in a sentence; form: how it reads activations, AS_IS if it converts them itself or need not; why: what
    speaks for it; joins: a gate and its partner, both served, are one launch with the GLU.
    """

    name: str
    serves: Callable[[Product, Setting], str | None]
    form: Callable[[Product], Form]
    why: Callable[[Product], str]
    joins: Callable[[Product], bool] = lambda p: False
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Route:
    """How a product is made. form: of its activations, as the kernel reads them; joined: its launch makes the partner's
    product and the GLU too; reason: why this kernel; refused: why kernels before it in the list don't serve, by name.
    """

    kernel: Kernel
    form: Form
    joined: bool
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)


# ---- what several kernels say ----


def _as_is(p: Product) -> Form:
    return Form.AS_IS


def _in_8_bits(p: Product) -> Form:
    return Form.Q8 if p.is_packed else Form.AS_IS


def _in_16_bits(p: Product) -> Form:
    """The type of activations that a weight is multiplied with in 16 bits, or f32 ones in f32."""
    return {"bf16": Form.BF16, "f32": Form.F32, "f64": Form.F32}.get(p.type, Form.F16)


def _dp4a(p: Product) -> str:
    """How a kernel for few tokens multiplies."""
    if not p.is_packed:
        return "weights as they are"
    return f"dp4a on activations rounded {_rounding(p)}"


def _rounding(p: Product) -> str:
    return f"{'in two parts of' if parts_of(p.weight.ne[0]) == 2 else 'to'} 8 bits"


def _up_to_8(p: Product) -> str:
    return f"it takes up to {gemv.MAX_TOKENS}, {_dp4a(p)}"


def _vendor(p: Product) -> str:
    return ("weights dequantized to scratch in each run, then " * (not p.is_plain)) + "the vendor's product"


def _alike(p: Product) -> bool:
    """A gate and its partner are both packed or both as they are."""
    return len({packing_of(w.dtype.name) is None for w in p.halves}) == 1


def _why_not_weights(p: Product, s: Setting) -> str | None:
    """What kernels for few tokens say of a weight and its partner: plain ones are read as they are."""
    for w in p.halves:
        if w.dtype.name in PLAIN and not w.has_contiguous_rows:
            return "reads weights whose rows are without gaps"
        if w.dtype.name not in PLAIN and packing_of(w.dtype.name) is None:
            return f"does not decode {w.dtype.name}"
        if w.dtype.name not in PLAIN and s.exact:
            return _EXACT
    return None


# ---- what each says ----


def _expert_gemv(p: Product, s: Setting) -> str | None:
    assert p.ids is not None
    if p.ids.n_elements > MAX_PAIRS:
        return f"takes up to {MAX_PAIRS} pairs"
    evenly = p.x.has_contiguous_rows and (p.x.is_contiguous or p.x.ne[1] == 1)
    return _why_not_weights(p, s) if evenly else "reads rows of x at equal distances"


def _expert_wgmma(p: Product, s: Setting) -> str | None:
    if s.target.arch != "sm_90":
        return "is Hopper's"
    if p.x.dtype.name not in ("f32", "f16"):
        return f"reads activations in f32 or f16, not {p.x.dtype.name}"
    if not hopper.takes(s.target, p.type, p.weight.ne[0]):
        return f"takes rows of {STEP + 1} to {MAX_ROW} elements of {', '.join(mma_launch.KINDS)}"
    return None


def _expert_wgmma_joins(p: Product) -> bool:
    return p.gate is not None and p.gate.kind in hopper.GATES and len({w.dtype.name for w in p.halves}) == 1


def _gemv_heads(p: Product, s: Setting) -> str | None:
    w, x = p.weight, p.x
    if not (w.ne[2] > 1 and w.ne[3] == 1 and x.ne[2:] == w.ne[2:]):
        return "takes a matrix for each head"
    if x.ne[1] > gemv.MAX_TOKENS:
        return f"takes up to {gemv.MAX_TOKENS} tokens"
    if x.dtype.name != "f32" or not x.has_contiguous_rows:
        return "reads rows of f32 without gaps"
    if p.is_packed and w.ne[0] > gemv.MAX_INLINE:
        return f"rounds activations as it multiplies, rows of up to {gemv.MAX_INLINE} elements"
    return _why_not_weights(p, s)


def _gemv(p: Product, s: Setting) -> str | None:
    b, x = p.broadcast, p.x
    if b.tokens > gemv.MAX_TOKENS:
        return f"takes up to {gemv.MAX_TOKENS} tokens"
    if b.count > 1:
        return "takes one matrix"
    if not (x.is_contiguous or x.ne[2] == x.ne[3] == 1):
        return "reads rows of x at equal distances"
    if p.gate is not None and not (p.gate.kind in GLU_KINDS and _alike(p)):
        return f"{_SOME_GLUS} packed or both are not"
    if p.is_plain and not (x.dtype.name == "f32" and x.has_contiguous_rows):
        return "multiplies weights as they are with f32, its rows without gaps"
    return _why_not_weights(p, s)


def _int8(p: Product, s: Setting) -> str | None:
    if not s.target.is_nvidia:
        return "is NVIDIA's"
    if p.is_packed and s.exact:
        return _EXACT
    found = _why_not_batch(p, int8_launch.MAX_TOKENS)
    if found is None and p.broadcast.tokens < int8_launch.MIN_TOKENS:
        return f"takes {int8_launch.MIN_TOKENS} tokens or more"
    if found is None and int8_launch.config_for(s.target, p.type, p.broadcast.tokens, p.weight.ne[0]) is None:
        return "finds too little shared memory for its buffers"
    return found


def _mma(p: Product, s: Setting) -> str | None:
    if not s.target.is_nvidia:
        return "is NVIDIA's"
    found = _why_not_batch(p, mma_launch.MAX_TOKENS)
    if found is None and not mma_launch.fits(p.type, p.weight.ne[0], p.broadcast.tokens, s.target):
        return "finds too little shared memory for its buffers"
    return found


def _why_not_batch(p: Product, most: int) -> str | None:
    """What int8, wgmma and mma have in common. most: tokens."""
    if not p.is_packed:
        return "takes packed weights"
    b = p.broadcast
    if b.tokens > most:
        return f"takes up to {most} tokens"
    if b.count > 1 or not mma_launch.has_whole_steps(p.type, p.weight.ne[0]):
        return f"takes one matrix of {', '.join(mma_launch.KINDS)} whose rows are whole steps"
    if not (p.x_aligned and p.aligned):
        return "copies 16 bytes at a time, and x or the weights don't begin where it can"
    if p.gate is not None and not (p.gate.kind in GLU_KINDS and len({(w.dtype.name, w.ne) for w in p.halves}) == 1):
        return f"{_SOME_GLUS} of one type and size"
    return None


def _wgmma(p: Product, s: Setting) -> str | None:
    if s.target.arch != "sm_90":
        return "is Hopper's"
    found = _why_not_batch(p, wgmma_launch.MAX_TOKENS)
    if found is None and not mma_launch.has_wgmma_config(s.target, p.type, p.weight.ne[0], p.broadcast.tokens):
        return "finds too little shared memory for its buffers"
    if found is None and p.x.dtype.name != "f32":
        return f"reads activations in an order that they get when f32 is rounded, these are {p.x.dtype.name}"
    return found


def _most_small(p: Product) -> int:
    return SMALL_TOKENS["f32" if p.type == "f32" else "plain" if p.is_plain else "packed"]


def _small(p: Product, s: Setting) -> str | None:
    if not (p.is_packed or p.is_plain):
        return f"does not decode {p.type}"
    if p.broadcast.tokens > _most_small(p):
        return f"takes up to {_most_small(p)} tokens"
    return "writes a head's results side by side, not a token's" if p.by_token else None


def _skinny(p: Product, s: Setting) -> str | None:
    if {t.dtype.name for t in (p.weight, p.x)} != {"f32"} or p.broadcast.count > 1:
        return "takes one matrix of f32 and activations of f32"
    if p.transposed and p.broadcast.tokens != p.x.ne[0]:
        return "reads one matrix of gradients"
    if p.partner is not None or p.bias is not None:
        return "has no GLU and no bias"
    if not fusions.is_skinny(p.broadcast.tokens, *p.weight.ne[:2]):
        short, long = fusions.MAX_SHORT, fusions.MIN_LONG
        return f"takes products of a side of up to {short} and two from {long} on"
    return None


def _large_each(p: Product, s: Setting) -> str | None:
    w = p.weight
    if not p.broadcast.one_each:
        return "takes several matrices, each with tokens of its own"
    even = w.ne[2] == 1 or w.ne[3] == 1 or w.nb[3] == w.ne[2] * w.nb[2]
    if p.type == "f64" or not (p.is_packed or even):
        return "takes matrices that lie one after the other, of types up to f32"
    return None


def _serves_all(p: Product, s: Setting) -> str | None:
    return None


#: In the order in which they are asked; experts' products are asked by the first list, all others by the second.
EXPERT_KERNELS = (
    Kernel("expert_gemv", _expert_gemv, _in_8_bits, lambda p: f"it takes up to {MAX_PAIRS}, {_dp4a(p)}", _alike),
    Kernel(
        "expert_wgmma", _expert_wgmma, _as_is,
        lambda p: "pairs sorted by expert on the device, weights dequantized in registers for wgmma",
        _expert_wgmma_joins,
    ),
    Kernel(
        "expert_gemm", _serves_all, _in_16_bits,
        lambda p: "it takes any number, sorted by expert on the device"
        + "; weights dequantized to scratch in each run" * (not (p.is_packed or p.is_plain)),
    ),
    Kernel(
        "expert_back", _serves_all, _in_16_bits,
        lambda p: "it adds up over weights' rows, pairs sorted by expert on the device"
        + "; weights dequantized to scratch in each run" * (not p.is_plain),
        transposed=True,
    ),
)  # fmt: skip
KERNELS = (
    Kernel("gemv_heads", _gemv_heads, _as_is, _up_to_8),
    Kernel(
        "gemm_small_int8", _int8, _in_8_bits,
        lambda p: f"it takes {int8_launch.MIN_TOKENS} to {int8_launch.MAX_TOKENS} on NVIDIA, integers on matrix units, "
        f"activations rounded {_rounding(p)}",
        lambda p: True,
    ),
    Kernel("gemv", _gemv, _in_8_bits, _up_to_8, lambda p: True),
    Kernel(
        "gemm_small_wgmma", _wgmma, lambda p: Form.F16_ORDERED,
        lambda p: f"it takes up to {wgmma_launch.MAX_TOKENS} on Hopper, weights dequantized in registers for wgmma",
        lambda p: True,
    ),
    Kernel(
        "gemm_small_mma", _mma, lambda p: Form.F16,
        lambda p: f"it takes up to {mma_launch.MAX_TOKENS} on NVIDIA, weights dequantized on their way", lambda p: True,
    ),
    Kernel(
        "gemm_small", _small, _in_16_bits,
        lambda p: f"it takes up to {_most_small(p)}, weights dequantized on their way",
    ),
    Kernel(
        "gemm_skinny", _skinny, lambda p: Form.F32, lambda p: "one side is short: f32 in two parts, on tensor cores",
    ),
    Kernel(
        "gemm_large_each", _large_each, _in_16_bits,
        lambda p: f"any number of tokens, {'results written in place, ' * p.by_token}{_vendor(p)} of all matrices",
    ),
    Kernel("gemm_large", _serves_all, _in_16_bits, lambda p: f"any number of tokens, {_vendor(p)}"),
    Kernel(
        "gemm_skinny_back", _skinny, lambda p: Form.F32,
        lambda p: "it adds up over weights' rows, one side is short: f32 in two parts, on tensor cores",
        transposed=True,
    ),
    Kernel(
        "gemm_large_back", _serves_all, _in_16_bits, lambda p: f"it adds up over weights' rows, {_vendor(p)}",
        transposed=True,
    ),
)  # fmt: skip
#: Those of mma_launch.py.
SMALL_MMA = ("gemm_small_wgmma", "gemm_small_mma")
#: Those that take several matrices in a launch, of one type.
OF_ONE_TYPE = ("gemm_small_int8", *SMALL_MMA)


def route_of(p: Product, s: Setting) -> Route:
    """How a product is made."""
    refused: dict[str, str] = {}
    for kernel in KERNELS if p.ids is None else EXPERT_KERNELS:
        reason = _why_not_transposed(kernel, p) or kernel.serves(p, s) or _why_not_form(kernel, p)
        if reason is None:
            joined = p.partner is not None and kernel.joins(p)
            return Route(kernel, kernel.form(p), joined, f"{_tokens(p)}: {kernel.why(p)}", refused)
        refused[kernel.name] = reason
    raise AssertionError(f"the last kernel of a list serves everything: {refused}")


def _why_not_transposed(kernel: Kernel, p: Product) -> str | None:
    if kernel.transposed == p.transposed:
        return None
    return "adds up over a weight's rows" if kernel.transposed else "adds up along a weight's rows"


def _why_not_form(kernel: Kernel, p: Product) -> str | None:
    """Why a kernel can't read x as it lies."""
    form = kernel.form(p)
    return None if p.x_form.is_readable_as(form) else f"reads {form.value}, x lies in {p.x_form.value}"


def _tokens(p: Product) -> str:
    """How many vectors each matrix is multiplied with."""
    if p.ids is not None:
        return f"{p.ids.n_elements} pair{'s' * (p.ids.n_elements != 1)} of token and expert"
    b = p.broadcast
    return f"{b.tokens} token{'s' * (b.tokens != 1)}" + (f" for each of {b.count} matrices" if b.count > 1 else "")
