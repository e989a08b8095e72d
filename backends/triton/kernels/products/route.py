"""Which kernel makes a product, and why: one ordered list that dense, head-wise and experts' products are asked by.

A kernel says of a product None, that it serves it, or a sentence why not; the first that serves is the product's Route.
The sentences of those before it are kept, for `graphrt explain`. Nothing here looks at memory or makes a launch: what
the answer depends on is in the Product (product.py) and the Setting, so that plan.py, a backend without a graph
(`rounds_activations`) and tests get the same one.

Up to 8 tokens: gemv.py, gemv_heads.py and experts/gemv.py read each weight once a token and are bound by memory; packed
weights are multiplied with activations rounded to 8 bits, which results that are to be exact forbid. Up to 64:
gemm_small reads weights once for all tokens and multiplies in 16 bits. More: weights are dequantized to scratch, then
the vendor's product. Experts' pairs of token and expert count as tokens, and take kernels of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.experts import hopper
from graphrt.backends.triton.kernels.experts.gather import MAX_ROW
from graphrt.backends.triton.kernels.products import gemv
from graphrt.backends.triton.kernels.products.activations import GLU_KINDS, parts_of
from graphrt.backends.triton.kernels.products.forms import Form
from graphrt.backends.triton.kernels.products.gemm_small import mma_launch
from graphrt.backends.triton.kernels.products.gemm_small.arguments import STEP
from graphrt.backends.triton.kernels.products.product import Product
from graphrt.tensor import Tensor

#: Up to so many tokens gemm_small takes a product, by the kind of its weights.
SMALL_TOKENS = {"packed": 64, "plain": 64, "f32": 8}
#: experts/gemv.py reads an expert's weights once for each pair, the others once for all: it serves up to so many pairs.
#: Measured on an H100: at 64 to 96 pairs it takes a third of the other's time, at 256 it would take twice as long.
MAX_PAIRS = 128

_EXACT = "rounds activations to 8 bits, and results are to be exact"


class Setting(Protocol):
    """What a choice depends on beside the product: a Context, or the backend."""

    @property
    def target(self) -> Target: ...

    @property
    def exact(self) -> bool: ...


class Kernel(ABC):
    """A way to make a product. name: what plans and explanations call it."""

    name: str

    @abstractmethod
    def serves(self, p: Product, s: Setting) -> str | None:
        """None where it can make the product, else why not, as a sentence that goes on behind its name."""

    @abstractmethod
    def form(self, p: Product) -> Form:
        """How it reads activations. AS_IS: it converts them itself, or need not."""

    @abstractmethod
    def why(self, p: Product) -> str:
        """Why it is the one that makes a product that it serves, and how."""

    def joins(self, p: Product) -> bool:
        """A gate and its partner, both served, are one launch with the GLU."""
        return False


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


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _tokens(p: Product) -> str:
    """How many vectors each matrix is multiplied with."""
    if p.ids is not None:
        return _counted(p.ids.n_elements, "pair") + " of token and expert"
    b = p.broadcast
    return _counted(b.tokens, "token") + (f" for each of {b.count} matrices" if b.count > 1 else "")


def _dp4a(p: Product) -> str:
    """How a kernel for few tokens multiplies."""
    if not p.is_packed:
        return "weights as they are"
    return f"dp4a on activations rounded {'in two parts of' if parts_of(p.weight.ne[0]) == 2 else 'to'} 8 bits"


def _sixteen_bits(p: Product) -> Form:
    """The type of activations that a weight is multiplied with in 16 bits, or f32 ones in f32."""
    return {"bf16": Form.BF16, "f32": Form.F32, "f64": Form.F32}.get(p.type, Form.F16)


def _alike(p: Product) -> bool:
    """A gate and its partner are both packed or both as they are."""
    return p.partner is None or p.is_packed == _of_partner(p).is_packed


def _of_partner(p: Product) -> Product:
    assert p.partner is not None
    return Product(p.partner, p.x, p.ids, None, p.weight, p.gate, p.by_token, p.x_form, p.x_aligned, p.aligned)


class ExpertGemv(Kernel):
    """experts/gemv.py."""

    name = "expert_gemv"

    def serves(self, p: Product, s: Setting) -> str | None:
        assert p.ids is not None
        if p.ids.n_elements > MAX_PAIRS:
            return f"takes up to {MAX_PAIRS} pairs"
        if not (p.x.has_contiguous_rows and (p.x.is_contiguous or p.x.ne[1] == 1)):
            return "reads rows of x at equal distances"
        found = self._serves_weight(p, s)
        return found if found or p.partner is None else self._serves_weight(_of_partner(p), s)

    def _serves_weight(self, p: Product, s: Setting) -> str | None:
        if p.is_plain:
            return None if p.weight.has_contiguous_rows else "reads weights whose rows are without gaps"
        if not p.is_packed:
            return f"does not decode {p.type}"
        return _EXACT if s.exact else None

    def form(self, p: Product) -> Form:
        return Form.Q8 if p.is_packed else Form.AS_IS

    def why(self, p: Product) -> str:
        return f"it takes up to {MAX_PAIRS}, {_dp4a(p)}"

    def joins(self, p: Product) -> bool:
        return _alike(p)


class ExpertWgmma(Kernel):
    """experts/wgmma.py."""

    name = "expert_wgmma"

    def serves(self, p: Product, s: Setting) -> str | None:
        if s.target.arch != "sm_90":
            return "is Hopper's"
        if p.x.dtype.name not in ("f32", "f16"):
            return f"reads activations in f32 or f16, not {p.x.dtype.name}"
        if not hopper.takes(s.target, p.type, p.weight.ne[0]):
            return f"takes rows of {STEP + 1} to {MAX_ROW} elements of {', '.join(mma_launch.KINDS)}"
        return None

    def form(self, p: Product) -> Form:
        return Form.AS_IS

    def why(self, p: Product) -> str:
        return "pairs sorted by expert on the device, weights dequantized in registers for wgmma"

    def joins(self, p: Product) -> bool:
        same = p.partner is not None and p.partner.dtype.name == p.type
        return same and p.gate is not None and p.gate.kind in hopper.GATES


class ExpertGemm(Kernel):
    """experts/gemm.py."""

    name = "expert_gemm"

    def serves(self, p: Product, s: Setting) -> str | None:
        return None

    def form(self, p: Product) -> Form:
        return _sixteen_bits(p)

    def why(self, p: Product) -> str:
        before = "" if p.is_packed or p.is_plain else "; weights dequantized to scratch in each run"
        return f"it takes any number, sorted by expert on the device{before}"


class HeadGemv(Kernel):
    """gemv_heads.py."""

    name = "gemv_heads"

    def serves(self, p: Product, s: Setting) -> str | None:
        w, x = p.weight, p.x
        if not (w.ne[2] > 1 and w.ne[3] == 1 and x.ne[2:] == w.ne[2:]):
            return "takes a matrix for each head"
        if x.ne[1] > gemv.MAX_TOKENS:
            return f"takes up to {gemv.MAX_TOKENS} tokens"
        if x.dtype.name != "f32" or not x.has_contiguous_rows:
            return "reads rows of f32 without gaps"
        if p.is_plain:
            return None if w.has_contiguous_rows else "reads weights whose rows are without gaps"
        if not p.is_packed:
            return f"does not decode {p.type}"
        if w.ne[0] > gemv.MAX_INLINE:
            return f"rounds activations as it multiplies, rows of up to {gemv.MAX_INLINE} elements"
        return _EXACT if s.exact else None

    def form(self, p: Product) -> Form:
        return Form.AS_IS

    def why(self, p: Product) -> str:
        return f"it takes up to {gemv.MAX_TOKENS}, {_dp4a(p)}"


class Gemv(Kernel):
    """gemv.py."""

    name = "gemv"

    def serves(self, p: Product, s: Setting) -> str | None:
        b, x = p.broadcast, p.x
        if b.tokens > gemv.MAX_TOKENS:
            return f"takes up to {gemv.MAX_TOKENS} tokens"
        if b.count > 1:
            return "takes one matrix"
        if not (x.is_contiguous or x.ne[2] == x.ne[3] == 1):
            return "reads rows of x at equal distances"
        if p.gate is not None and not (p.gate.kind in GLU_KINDS and _alike(p)):
            return "joins the products of a GLU that it knows, if both weights are packed or both are not"
        found = self._serves_weight(p, s)
        return found if found or p.partner is None else self._serves_weight(_of_partner(p), s)

    def _serves_weight(self, p: Product, s: Setting) -> str | None:
        if p.is_plain:
            plain = p.x.dtype.name == "f32" and p.x.has_contiguous_rows and p.weight.has_contiguous_rows
            return None if plain else "multiplies weights as they are with f32, rows of both without gaps"
        if not p.is_packed:
            return f"does not decode {p.type}"
        return _EXACT if s.exact else None

    def form(self, p: Product) -> Form:
        return Form.Q8 if p.is_packed else Form.AS_IS

    def why(self, p: Product) -> str:
        return f"it takes up to {gemv.MAX_TOKENS}, {_dp4a(p)}"

    def joins(self, p: Product) -> bool:
        return p.gate is not None


class SmallMma(Kernel):
    """gemm_small/mma.py."""

    name = "gemm_small_mma"

    def serves(self, p: Product, s: Setting) -> str | None:
        if not s.target.is_nvidia:
            return "is NVIDIA's"
        if not p.is_packed:
            return "takes packed weights"
        b = p.broadcast
        if b.tokens > mma_launch.MAX_TOKENS:
            return f"takes up to {mma_launch.MAX_TOKENS} tokens"
        if b.count > 1 or not mma_launch.fits(p.type, p.weight.ne[0], b.tokens, s.target):
            return f"takes one matrix of {', '.join(mma_launch.KINDS)} whose rows are whole steps"
        if not (p.x_aligned and p.aligned):
            return "copies 16 bytes at a time, and x or the weights don't begin where it can"
        if p.partner is not None and not (p.gate and p.gate.kind in GLU_KINDS and _of_one_kind(p.weight, p.partner)):
            return "joins the products of a GLU that it knows, if both weights are of one type and size"
        return None

    def form(self, p: Product) -> Form:
        return Form.F16

    def why(self, p: Product) -> str:
        return f"it takes up to {mma_launch.MAX_TOKENS} on NVIDIA, weights dequantized on their way"

    def joins(self, p: Product) -> bool:
        return p.gate is not None


def _of_one_kind(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.ne == b.ne


class SmallWgmma(SmallMma):
    """gemm_small/wgmma.py."""

    name = "gemm_small_wgmma"

    def serves(self, p: Product, s: Setting) -> str | None:
        if s.target.arch != "sm_90":
            return "is Hopper's"
        found = super().serves(p, s)
        if found is None and not mma_launch.has_wgmma_config(s.target, p.type, p.weight.ne[0], p.broadcast.tokens):
            return "finds too little shared memory for its buffers"
        if found is None and p.x.dtype.name != "f32":
            return f"reads activations in an order that they get when f32 is rounded, these are {p.x.dtype.name}"
        return found

    def form(self, p: Product) -> Form:
        return Form.F16_ORDERED

    def why(self, p: Product) -> str:
        return f"it takes up to {mma_launch.MAX_TOKENS} on Hopper, weights dequantized in registers for wgmma"


class Small(Kernel):
    """gemm_small/portable.py."""

    name = "gemm_small"

    def serves(self, p: Product, s: Setting) -> str | None:
        if not (p.is_packed or p.is_plain):
            return f"does not decode {p.type}"
        if p.broadcast.tokens > self._most(p):
            return f"takes up to {self._most(p)} tokens"
        return "writes a head's results side by side, not a token's" if p.by_token else None

    def _most(self, p: Product) -> int:
        return SMALL_TOKENS["f32" if p.type == "f32" else "plain" if p.is_plain else "packed"]

    def form(self, p: Product) -> Form:
        return _sixteen_bits(p)

    def why(self, p: Product) -> str:
        return f"it takes up to {self._most(p)}, weights dequantized on their way"


class Large(Kernel):
    """gemm_large.py."""

    name = "gemm_large"

    def serves(self, p: Product, s: Setting) -> str | None:
        return None

    def form(self, p: Product) -> Form:
        return _sixteen_bits(p)

    def why(self, p: Product) -> str:
        return f"it takes any number of tokens, {self._how(p)}"

    def _how(self, p: Product) -> str:
        return ("weights dequantized to scratch in each run, then " * (not p.is_plain)) + "the vendor's product"


class LargeEach(Large):
    """gemm_large.py, all matrices at once."""

    name = "gemm_large_each"

    def serves(self, p: Product, s: Setting) -> str | None:
        w = p.weight
        if not p.broadcast.one_each:
            return "takes several matrices, each with tokens of its own"
        even = w.ne[2] == 1 or w.ne[3] == 1 or w.nb[3] == w.ne[2] * w.nb[2]
        if p.type == "f64" or not (p.is_packed or even):
            return "takes matrices that lie one after the other, of types up to f32"
        return None

    def why(self, p: Product) -> str:
        place = "results written in place, " if p.by_token else ""
        return f"it takes any number of tokens, {place}{self._how(p)} of all matrices"


#: In the order in which they are asked; experts' products are asked by the first list, all others by the second.
EXPERT_KERNELS: tuple[Kernel, ...] = (ExpertGemv(), ExpertWgmma(), ExpertGemm())
KERNELS: tuple[Kernel, ...] = (HeadGemv(), Gemv(), SmallWgmma(), SmallMma(), Small(), LargeEach(), Large())


def route_of(p: Product, s: Setting) -> Route:
    """How a product is made."""
    refused: dict[str, str] = {}
    for kernel in KERNELS if p.ids is None else EXPERT_KERNELS:
        reason = kernel.serves(p, s) or _why_not_form(kernel, p)
        if reason is None:
            joined = p.partner is not None and kernel.joins(p)
            return Route(kernel, kernel.form(p), joined, f"{_tokens(p)}: {kernel.why(p)}", refused)
        refused[kernel.name] = reason
    raise AssertionError(f"the last kernel of a list serves everything: {refused}")


def _why_not_form(kernel: Kernel, p: Product) -> str | None:
    """Why a kernel can't read x as it lies."""
    form = kernel.form(p)
    return None if p.x_form.is_readable_as(form) else f"reads {form.value}, x lies in {p.x_form.value}"
