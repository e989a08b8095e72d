"""Launches of gemv_packed.py and gemv_plain.py: up to three matrices times a few vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.products.activations import GLU_KINDS, Q8Rows, Rows, parts_of, uses_ptx
from graphrt.backends.triton.kernels.products.gemv_packed import packed_gemv
from graphrt.backends.triton.kernels.products.gemv_plain import dense_gemv
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.packing import NO_PLANES, Packed, Packing, packing_of

#: Tokens that one launch serves.
MAX_TOKENS = 8
#: Up to so many it is the fastest. 5 to 8 take what 8 take, and on an H200 gemm_small's wgmma needs 0.5 to 0.9 of that
#: for rows of 4096 and 14336 elements (BENCHMARKS.md); short rows are rounded here, without a launch for it.
FEW_TOKENS = 4
#: Elements of a row up to which a program can round its activations itself: a tile holds them.
MAX_INLINE = 2048
#: Rows from which on every multiprocessor has programs enough that take two at a time.
MANY_ROWS = 4096
#: Rows longer than this are rounded by a program's warps together, shorter ones by each warp for itself.
MAX_ALONE = 1024


@dataclass(frozen=True, eq=False)
class Segment:
    """One of the matrices that a launch multiplies: packed, or plain [m, k] with elements of a row side by side.

    out: flat f32; the result of row r for token t goes to out[t * stride + r]. bias: f32 [m], is added to each token's.
    """

    weight: Packed | torch.Tensor
    out: torch.Tensor
    stride: int
    bias: torch.Tensor | None = None

    @property
    def m(self) -> int:
        return self.weight.rows if isinstance(self.weight, Packed) else self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.k if isinstance(self.weight, Packed) else self.weight.shape[1]


@dataclass(frozen=True)
class GemvConfig:
    """g: lanes side by side along k (8 to 32; more: several warps share a row); r: rows, u: steps along k in a lane's
    registers; registers: the most a thread may have, 0: as many as the compiler likes. Speed only.
    """

    warps: int = 4
    g: int = 32
    r: int = 1
    u: int = 1
    registers: int = 0

    @property
    def w(self) -> int:
        """Rows side by side over lanes and warps."""
        return 32 * self.warps // self.g

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return self.r * self.w

    def for_x(self, x: Q8Rows | Rows) -> GemvConfig:
        """The same for packed weights and activations that lie so: of those that programs round, a tile is the row."""
        if isinstance(x, Q8Rows):
            return self
        return replace(self, u=max(self.u, 1 << (-(-x.k // (32 * self.g)) - 1).bit_length()))


def config_for(kind: str, m: int, k: int, n: int, single: bool = False) -> GemvConfig:
    """A launch's shape: kind of weights ("f32", "f16", "bf16" or a packed type), rows in all, their length, tokens;
    single: matrices by themselves, neither experts nor heads nor pairs of gate and up."""
    packing = packing_of(kind)
    dense = packing is None
    step = (4 if kind == "f32" else 8) if dense else 32
    pieces = -(-k // step)  # what a lane loads at once
    g = 32 if pieces > 16 else 16 if pieces > 8 else 8
    tiles = -(-pieces // g)
    if n > 4 and not dense and parts_of(k) == 2:
        # Twice the activations on their way: with two rows, or fewer registers, some of them would be spilled.
        return GemvConfig(4, g, 1, 1)
    if n > 1:
        # Tokens fill the registers; two rows share a token's loads. From 5 tokens on the compiler would take over 200
        # registers, to have all activations on their way at once.
        return GemvConfig(4, g, 2 if m >= 2048 else 1, 1, 168 if n > 4 else 0)
    if not dense and m < 1024 and tiles > 4:
        # Too few rows to fill the multiprocessors with a row a warp.
        return GemvConfig(4, 128, 1, 1 if tiles < 8 else 2)
    if dense and m <= 256 and 4 < tiles <= 32:
        # The same, as of a mixture's router: all of a row on its way at once, before x is there.
        return GemvConfig(4, 128, 1, 1 << (-(-pieces // 128) - 1).bit_length())
    if packing is not None and single and m >= MANY_ROWS and parts_of(k) == 1 and _is_small(packing):
        # Few bytes of a row are on their way at a time, and a warp's rows share the loads of activations.
        return GemvConfig(4, g, 2, 2 if packing.grid else 4 if tiles > 2 else tiles)
    # One row a warp, so that programs are many and small; all of a short row on its way at once.
    return GemvConfig(4, g, 1, 1 << (tiles - 1).bit_length() if tiles <= 4 else 4 if dense else 2)


def _is_small(packing: Packing) -> bool:
    """Types of which a warp takes two rows at a time: codes of up to 4 bits that need no looking up and have no bits
    elsewhere, and points of a grid."""
    return packing.grid is not None or (packing.bits <= 4 and packing.high_bits == 0 and packing.codebook is None)


def gemv(
    target: Target, segments: Sequence[Segment], x: Q8Rows | Rows, *, glu: str = "",
    residual: tuple[torch.Tensor, int] | None = None, norm: tuple[torch.Tensor, float] | None = None,
    config: GemvConfig | None = None,
) -> Launch:  # fmt: skip
    """Up to three matrices of one k times up to MAX_TOKENS vectors, in one launch.

    segments: all packed or all plain; types may differ. x: Q8Rows for packed weights; Rows of f32 (elements side
    by side) for plain ones, and for packed ones of k up to MAX_INLINE, which every program then rounds for itself.
    glu: one of GLU_KINDS: the two segments are gate and up, without biases, and the first one's out gets
    activation(gate) * up. residual: (flat f32, stride) added to the first segment's result; it may be its `out`.
    norm: (weights f32 [k], eps) of an RMS norm before the rounding of f32 x. config: instead of config_for's.
    """
    first = segments[0]
    assert 1 <= len(segments) <= 3 and 1 <= x.n <= MAX_TOKENS and all(s.k == x.k for s in segments)
    assert glu == "" or (glu in GLU_KINDS and len(segments) == 2 and segments[1].m == first.m)
    assert glu == "" or all(s.bias is None for s in segments)
    kind = first.weight.kind if isinstance(first.weight, Packed) else _PLAIN[first.weight.dtype]
    counted = segments[:1] if glu else segments
    c = config or config_for(kind, sum(s.m for s in counted), x.k, x.n, single=not glu)
    if isinstance(first.weight, Packed):
        c = c.for_x(x)
    args: dict[str, Any] = {
        "p_residual": residual and residual[0], "residual_stride": residual[1] if residual else 0,
        "n": x.n, "GLU": glu, "N": 1 << (x.n - 1).bit_length(), "U": c.u, "R": c.r, "W": c.w, "G": c.g,
        "PDL": target.has_pdl,
    }  # fmt: skip
    for i in range(3):
        s = segments[i] if i < len(segments) else None
        args |= {
            f"p_out{i}": None if s is None or (glu and i) else s.out,
            f"out_stride{i}": 0 if s is None else s.stride,
            f"m{i}": 0 if s is None else s.m,
            f"p_bias{i}": None if s is None else s.bias,
        }
    if isinstance(first.weight, Packed):
        args |= packed_arguments(segments, x, norm) | {"PTX": uses_ptx(target)}
    else:
        assert isinstance(x, Rows) and norm is None
        args |= _dense_arguments(segments, x)
    grid = sum(-(-s.m // c.rows) for s in counted)
    kernel = packed_gemv if isinstance(first.weight, Packed) else dense_gemv
    return Launch(kernel, (grid,), args, options_for(target, c))


def options_for(target: Target, config: GemvConfig) -> dict[str, Any]:
    """How a kernel with this configuration is launched."""
    options = launch_options(target, config.warps)
    if config.registers and target.is_nvidia:
        options["maxnreg"] = config.registers
    return options


_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def packed_arguments(
    segments: Sequence[Segment], x: Q8Rows | Rows, norm: tuple[torch.Tensor, float] | None
) -> dict[str, Any]:
    """What kernels that multiply packed weights are given of these and of x."""
    args: dict[str, Any] = {"NG": x.k // 32, "p_norm": norm and norm[0], "eps": norm[1] if norm else 0.0}
    args["PARTS"] = x.parts if isinstance(x, Q8Rows) else parts_of(x.k)
    for i in range(3):
        w = segments[i].weight if i < len(segments) else None
        assert w is None or isinstance(w, Packed)
        args |= {f"packed{i}": w.planes() if w else NO_PLANES, f"KIND{i}": w.kind if w else ""}
    if isinstance(x, Q8Rows):
        assert norm is None
        form = {"X_FORM": "q8", "p_q": x.q.view(torch.int32), "p_d": x.d, "p_s": x.s, "p_x": None, "x_row": 0}
    else:
        assert x.stride == 1 and x.k <= MAX_INLINE and x.data.dtype == torch.float32
        form = {
            "X_FORM": "norm" if norm else "together" if x.k > MAX_ALONE else "f32",
            "p_q": None,
            "p_d": None,
            "p_s": None,
        }
        form |= {"p_x": x.data, "x_row": x.row_stride}
    return args | form


def _dense_arguments(segments: Sequence[Segment], x: Rows) -> dict[str, Any]:
    assert x.stride == 1 and x.data.dtype == torch.float32
    args: dict[str, Any] = {"K": x.k, "MATRICES": len(segments), "p_x": x.data, "x_row": x.row_stride}
    for i in range(3):
        w = segments[i].weight if i < len(segments) else None
        assert w is None or (isinstance(w, torch.Tensor) and (w.stride(1) == 1 or w.shape[1] == 1))
        args |= {f"p_w{i}": w, f"stride{i}": 0 if w is None else w.stride(0)}
    args["V"] = 4 if any(s.weight.dtype == torch.float32 for s in segments) else 8  # type: ignore[union-attr]
    return args
