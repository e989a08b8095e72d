"""What varies in the cases of FLASH_ATTN_EXT and FLASH_ATTN_LSE, and how a point of it becomes a node with inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from graphrt.dtypes import dtype
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.flash_attn_ext import flash_attn_ext, flash_attn_lse
from graphrt.ops.key_panels import PANELS, panel_width
from graphrt.ops.key_panels import ROWS as IN_ROWS
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor
from graphrt.testing import (
    BlockMask,
    Case,
    CausalMask,
    Given,
    Hiding,
    Init,
    Inputs,
    Islands,
    LengthMask,
    MaskValues,
    Normal,
    Spoiled,
    Uniform,
)  # fmt: skip


@dataclass(frozen=True)
class Axes:
    """One point of the cases. d: D_k and D_v; heads: n_head and n_head_kv; types: of k and v.

    scale: on q.k, None for D_k^-0.5. mask, rows, sinks, values and layout are names in the tables MASKS, ROWS, SINKS,
    VALUES and LAYOUTS below. spoil: what k and v hold in the cells that the mask hides from every query, of SPOILS;
    None for values like all others. bias: dimensions 2 and 3 of attn_bias and its type, None for none. prec: 10 for
    products in f32, 8 for products of 8-bit floats. score: a name of scores.py's SCORES. q_type: of q.
    scaled: values of k_scale and v_scale, "" for none, "one", or "heads", one a head. out: type and scale of the
    result.
    """

    d: tuple[int, int] = (64, 64)
    n_q: int = 3
    n_kv: int = 113
    heads: tuple[int, int] = (4, 2)
    n_seq: int = 1
    types: tuple[str, str] = ("f16", "f16")
    mask: str | None = "causal"
    rows: str | None = None
    sinks: str | None = None
    max_bias: float = 0.0
    softcap: float = 0.0
    scale: float | None = None
    values: str = "normal"
    layout: str = "plain"
    spoil: str | None = None
    bias: tuple[int, int, str] | None = None
    dropout_p: float = 0.0
    prec: int = 0
    score: str | None = None
    q_type: str = "f32"
    scaled: str = ""
    out: tuple[str, float] = ("f32", 1.0)


#: Values of each kind of mask. The first four come with a shape of their own in _mask_dims().
MASKS: Mapping[str, Init] = {
    "per_head": MaskValues(0.3),
    "some_heads": MaskValues(0.3),
    "lengths": LengthMask(),
    "head_lengths": LengthMask(),
    "one_for_all": MaskValues(0.3),
    "causal": CausalMask(),
    "window": CausalMask(window=48),
    "distance": CausalMask(distance=True),
    "random": MaskValues(0.3),
    "sparse": MaskValues(0.97),
    "blocks": BlockMask(16, 32),
    "big_blocks": BlockMask(64, 256),
}

#: From which queries every key is hidden: shares of n_q from and to.
ROWS: Mapping[str, tuple[float, float]] = {
    "leading": (0.0, 0.34), "middle": (0.4, 0.7), "trailing": (0.67, 1.0), "all": (0.0, 1.0),
}  # fmt: skip

#: What is added to about the log of a row's denominator. `near` has the weight of all keys together: left out, doubled
#: or added once a split it shows; `large` takes nearly all, `none_of_it` has the weight 0.
SINKS: Mapping[str, Callable[[float], Init]] = {
    "near": lambda lse: Uniform(lse - 2.0, lse + 1.0),
    "large": lambda lse: Uniform(lse + 3.0, lse + 6.0),
    "none_of_it": lambda lse: Given((-math.inf, lse)),
}


@dataclass(frozen=True)
class Values:
    """Distributions of q, k and v; mean, deviation: of the logits q.k/8 that they give for heads of 64 elements."""

    q: Init
    k: Init = Normal(1.0)
    v: Init = Normal(1.0)
    mean: float = 0.0
    deviation: float = 0.0


VALUES: Mapping[str, Values] = {
    "normal": Values(Normal(3.0), deviation=3.0),
    "hot": Values(Normal(10.0), deviation=10.0),  # a softcap near it bends most logits
    "peaked": Values(Normal(30.0, step=0.125), Normal(1.0, step=0.125), deviation=30.0),  # one key has all the weight
    # Past f16's 65504; exact in f16 and in f32's products, so that the largest logit is the same for everyone.
    "huge": Values(Normal(400.0, step=8.0), Normal(256.0, step=8.0), deviation=1e5),
    # All logits near -200 or +200: a maximum that starts at 0 or -1e2 loses them, f16 sums of 64 products blur them.
    "sunken": Values(Normal(0.5, -5.0, 0.125), Normal(0.5, 5.0, 0.125), mean=-200.0, deviation=3.5),
    "raised": Values(Normal(0.5, 5.0, 0.125), Normal(0.5, 5.0, 0.125), mean=200.0, deviation=3.5),
    # Nearly equal weights and a v with a large mean: what is summed in f16, or lost at the end, shows.
    "level": Values(Normal(0.125, step=0.03125), Normal(1.0, step=0.125), Normal(1.0, 16.0, 0.0625), deviation=0.125),
    "large_v": Values(Normal(0.5), v=Normal(5000.0, 30000.0, 32.0), deviation=0.5),  # two of them pass f16's range
}

#: Those whose logits are exact in f32 as long as k is: the blocks of a quantized k would blur what they test.
_EXACT = ("peaked", "huge", "sunken", "raised")

#: plain; permuted: heads inside rows, for q, k and v; padded: rows longer than D, cells after n_kv, all of it NaN;
#: cache: permuted, a stretch of a longer cache that holds NaN before and after; v_in_k: v is the start of k's rows;
#: v_after: their end; mask_padded: the mask is a corner of a larger one, NaN around it; far: the second head of k and v
#: is 2^31 elements behind the first. panels: k in panels (key_panels.py).
LAYOUTS = ("plain", "panels", "permuted", "padded", "cache", "v_in_k", "v_after", "mask_padded", "far")
SPOILS = ("nan", "inf")

_FAR_ROWS = 2**31 // 64


def hidden_cells(n_kv: int) -> list[int]:
    """The keys that `spoil` hides: the first, every seventh, and the last five."""
    return sorted({0, *range(3, n_kv, 7), *range(max(1, n_kv - 5), n_kv)})


def _spoiled(init: Init, axes: Axes, axis: int) -> Init:
    if axes.spoil is None:
        return init
    return Spoiled(init, hidden_cells(axes.n_kv), axis, infinite=axes.spoil == "inf")


def _cached(inputs: Inputs, name: str, dt: str, d: int, axes: Axes, init: Init) -> Tensor:
    """k or v as axes.layout says, with what axes.spoil asks for in the cells that the mask hides."""
    n_head_kv, n_kv, n_seq = axes.heads[1], axes.n_kv, axes.n_seq
    if axes.layout == "permuted":
        whole = inputs(name, dt, (d, n_head_kv, n_kv, n_seq), _spoiled(init, axes, -3))
        return permute(whole, 0, 2, 1, 3)
    if axes.layout == "cache":
        around = [*range(5), *range(5 + n_kv, 16 + n_kv)]
        whole = inputs(name, dt, (d, n_head_kv, n_kv + 16, n_seq), Spoiled(init, around, -3))
        return permute(view(whole, (d, n_head_kv, n_kv, n_seq), whole.nb[1:], 5 * whole.nb[2]), 0, 2, 1, 3)
    if axes.layout == "padded":
        row = d + max(dtype(dt).block_size, 8)
        whole = inputs(name, dt, (row, n_kv + 9, n_head_kv, n_seq), Spoiled(init, range(n_kv, n_kv + 9), used=d))
        return view(whole, (d, n_kv, n_head_kv, n_seq), whole.nb[1:])
    return inputs(name, dt, (d, n_kv, n_head_kv, n_seq), _spoiled(init, axes, -2))


def _far(inputs: Inputs, axes: Axes, values: Values) -> tuple[Tensor, Tensor]:
    """k and v of two heads as views of one tensor, whose second head begins 2^31 elements behind the first.

    Of each head k's rows come first, then v's.
    """
    d, n = axes.d[0], axes.n_kv
    islands = Islands(values.k, (0, _FAR_ROWS), 2 * n)
    whole = inputs("kv", axes.types[0], (d, _FAR_ROWS + 2 * n), islands)
    nb = (whole.nb[1], _FAR_ROWS * whole.nb[1])
    return view(whole, (d, n, 2), nb), view(whole, (d, n, 2), nb, n * whole.nb[1])


def _panels(inputs: Inputs, axes: Axes, values: Values) -> Tensor:
    """k in panels that has cells behind n_kv, which hold NaN."""
    x = panel_width(dtype(axes.types[0]))
    ne = (x, axes.n_kv + 3, axes.d[0] // x * axes.heads[1], axes.n_seq)
    cells = [*(hidden_cells(axes.n_kv) if axes.spoil else ()), *range(axes.n_kv, axes.n_kv + 3)]
    whole = inputs("k", axes.types[0], ne, Spoiled(values.k, cells, -2))
    return view(whole, (x, axes.n_kv, *ne[2:]), whole.nb[1:])


def _kv(inputs: Inputs, axes: Axes, values: Values) -> tuple[Tensor, Tensor]:
    d_k, d_v = axes.d
    if axes.layout == "far":
        return _far(inputs, axes, values)
    if axes.layout == "panels":
        return _panels(inputs, axes, values), _cached(inputs, "v", axes.types[1], d_v, axes, values.v)
    k = _cached(inputs, "k", axes.types[0], d_k, axes, values.k)
    if axes.layout in ("v_in_k", "v_after"):
        behind = d_k - d_v if axes.layout == "v_after" else 0
        return k, view(k, (d_v, *k.ne[1:]), k.nb[1:], k.dtype.row_size(behind))
    return k, _cached(inputs, "v", axes.types[1], d_v, axes, values.v)


def _mask_dims(axes: Axes) -> tuple[int, int]:
    n_head, n_seq = axes.heads[0], axes.n_seq
    own = {"per_head": (n_head, n_seq), "head_lengths": (n_head, n_seq), "some_heads": (2, min(2, n_seq))}
    return {**own, "one_for_all": (1, 1)}.get(axes.mask or "", (1, n_seq))


def _mask(inputs: Inputs, axes: Axes) -> Tensor | None:
    if axes.mask is None:
        return None
    cells = hidden_cells(axes.n_kv) if axes.spoil is not None else ()
    init: Init = Hiding(MASKS[axes.mask], cells, ROWS[axes.rows] if axes.rows is not None else (0.0, 0.0))
    n_q, n_kv = axes.n_q, axes.n_kv
    if axes.layout != "mask_padded":
        return inputs("mask", "f16", (n_kv, n_q, *_mask_dims(axes)), init)
    whole = inputs("mask", "f16", (n_kv + 24, n_q + 2, *_mask_dims(axes)), Spoiled(init, (n_q, n_q + 1), used=n_kv))
    return view(whole, (n_kv, n_q, *_mask_dims(axes)), whole.nb[1:])


def _expected_lse(axes: Axes) -> float:
    """Nearly the log of a row's denominator, the sum of exp(s) over its n keys, for normally distributed logits.

    Logits that lie close together count by their mean and variance; of logits spread wide the largest one decides.
    """
    values, n, (d, _) = VALUES[axes.values], axes.n_kv, axes.d
    scale = axes.scale if axes.scale is not None else d**-0.5
    mean, deviation = values.mean * d * scale / 8.0, values.deviation * math.sqrt(d) * scale
    widest = math.sqrt(2.0 * math.log(n))
    above = deviation**2 / 2 if deviation < widest else deviation * widest - math.log(n)
    lse = mean + above
    return math.log(n) + (min(lse, 0.8 * axes.softcap) if axes.softcap else lse)


def _sinks(inputs: Inputs, axes: Axes) -> Tensor | None:
    if axes.sinks is None:
        return None
    return inputs("sinks", "f32", axes.heads[:1], SINKS[axes.sinks](_expected_lse(axes)))


def _bias(inputs: Inputs, axes: Axes) -> Tensor | None:
    if axes.bias is None:
        return None
    *dims, kind = axes.bias
    return inputs("attn_bias", str(kind), (axes.n_kv, axes.n_q, *map(int, dims)), Normal(2.0))


def _scales(inputs: Inputs, axes: Axes) -> dict[str, Any]:
    """Scales of k, v and the result, those of heads far enough apart that another head's shows."""
    given: dict[str, Any] = {"out_type": axes.out[0], "out_scale": axes.out[1]}
    if axes.scaled:
        ne = (axes.heads[1] if axes.scaled == "heads" else 1,)
        given |= {"k_scale": inputs("k_scale", "f32", ne, Uniform(0.3, 1.0))}
        given |= {"v_scale": inputs("v_scale", "f32", ne, Uniform(0.5, 4.0))}
    return given


def _make(inputs: Inputs, axes: Axes, lse: bool) -> Tensor:
    values = VALUES[axes.values]
    if axes.layout in ("permuted", "cache"):
        q = permute(inputs("q", axes.q_type, (axes.d[0], axes.heads[0], axes.n_q, axes.n_seq), values.q), 0, 2, 1, 3)
    else:
        q = inputs("q", axes.q_type, (axes.d[0], axes.n_q, axes.heads[0], axes.n_seq), values.q)
    scale = axes.scale if axes.scale is not None else axes.d[0] ** -0.5
    mask, bias = _mask(inputs, axes), _bias(inputs, axes)
    given: dict[str, Any] = {"sinks": _sinks(inputs, axes), "max_bias": axes.max_bias, "softcap": axes.softcap}
    given |= {"prec": axes.prec, "k_layout": PANELS if axes.layout == "panels" else IN_ROWS}
    if axes.score is not None:
        given["score"] = SCORES[axes.score](axes.heads[0], axes.n_kv)
    if lse:
        own = partial(_panels, inputs) if axes.layout == "panels" else None
        k = own(axes, values) if own else _cached(inputs, "k", axes.types[0], axes.d[0], axes, values.k)
        return flash_attn_lse(q, k, mask, scale, attn_bias=bias, **given)
    k, v = _kv(inputs, axes, values)
    given |= _scales(inputs, axes)
    given |= {"attn_bias": bias, "dropout_p": axes.dropout_p, "seed": 2**35 + 77, "offset": 2**31 + 1}
    return flash_attn_ext(q, k, v, mask, scale, **given)


def as_case(op: str, axes: Axes) -> Case:
    """The case of one of the two ops at a point.

    Its name has a few axes that are always given, and of the others those that differ from Axes().
    """
    base = asdict(Axes())
    always = ("d", "n_q", "n_kv", "heads", "types", "mask")
    shown = {name: value for name, value in asdict(axes).items() if name in always or value != base[name]}
    # The input, the copy in the backend's memory and the one that is read back to be compared.
    needs = 3 * 2 * 2**31 if axes.layout == "far" else 0
    return Case(op, shown, partial(_make, axes=axes, lse=op == "FLASH_ATTN_LSE"), needs)


#: What can't be asked for, by name.
IMPOSSIBLE: Mapping[str, Callable[[Axes], bool]] = {
    "ALiBi without a mask": lambda a: a.max_bias > 0 and a.mask is None,
    "rows hidden without a mask": lambda a: a.rows is not None and a.mask is None,
    "spoiled cells that no mask hides": lambda a: a.spoil is not None and a.mask is None,
    "spoiled cells in a cache of one key": lambda a: a.spoil is not None and a.n_kv < 8,
    "a layout that spoils by itself": lambda a: a.spoil is not None and a.layout in ("padded", "cache", "far"),
    "infinity in a block": lambda a: a.spoil == "inf" and any(dtype(t).is_quantized for t in a.types),
    "rows of no whole blocks": lambda a: any(n % dtype(t).block_size for n, t in zip(a.d, a.types)),
    "v longer than the k it lies in": lambda a: a.layout in ("v_in_k", "v_after") and a.d[1] > a.d[0],
    "v of another type than the k it lies in": lambda a: a.layout in ("v_in_k", "v_after") and a.types[0] != a.types[1],
    "v's end within a block": lambda a: a.layout == "v_after" and (a.d[0] - a.d[1]) % dtype(a.types[0]).block_size != 0,
    "a mask for every other head of odd ones": lambda a: a.mask == "some_heads" and a.heads[0] % 2 != 0,
    "a mask for every other of odd sequences": lambda a: a.mask == "some_heads" and a.n_seq > 1 and a.n_seq % 2 != 0,
    "a k that blurs exact logits": lambda a: a.values in _EXACT and dtype(a.types[0]).kind in ("quant", "float8"),
    "panels of blocks": lambda a: a.layout == "panels" and dtype(a.types[0]).is_quantized,
    "a padding without a mask": lambda a: a.layout == "mask_padded" and a.mask is None,
}
