"""ROPE: rotary position embedding, normal and neox order, with frequency factors and YaRN."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.tensor import Tensor

#: normal rotates the pair (2i, 2i+1), neox the pair (i, i + n_dims/2).
ROPE_MODES = ("normal", "neox")


@dataclass(frozen=True)
class RopeParams:
    """n_dims: how many leading elements of a head rotate; the rest are copied. mode: one of ROPE_MODES.

    freq_base, freq_scale: a pair's angle is position * freq_scale * freq_base^(-2i/n_dims). ext_factor: how much of
    YaRN there is, 0 for none; n_ctx_orig, beta_fast, beta_slow are YaRN's. attn_factor: on sine and cosine. All as
    ggml_rope_ext has them.
    """

    n_dims: int
    mode: str = "normal"
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    n_ctx_orig: int = 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def yarn_ramp(p: RopeParams) -> list[float]:
    """For each pair how far YaRN extrapolates: ext_factor where the pair turns often, 0 where it turns rarely.

    From the YaRN paper (arXiv 2309.00071), section 3.2, with ggml's rounding of the corner dimensions.
    """

    def corner(rotations: float) -> float:
        return p.n_dims * math.log(p.n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(p.freq_base))

    low = max(0.0, math.floor(corner(p.beta_fast)))
    high = min(p.n_dims - 1.0, math.ceil(corner(p.beta_slow)))
    width = max(0.001, high - low)
    return [p.ext_factor * (1.0 - min(1.0, max(0.0, (i - low) / width))) for i in range(p.n_dims // 2)]


def rope_frequencies(p: RopeParams, factors: list[float] | None = None) -> tuple[list[float], float]:
    """The angle of each pair at position 1, and the factor on sine and cosine, in double precision.

    theta_i = base^(-2i/n_dims) / factor_i; YaRN mixes it with freq_scale * theta_i along yarn_ramp(). A factor of 0
    gives an infinity, as where floats are divided by machines.
    """
    base = [p.freq_base ** (-2.0 * i / p.n_dims) for i in range(p.n_dims // 2)]
    if factors is not None:
        base = [theta / f if f else math.copysign(math.inf, f) for theta, f in zip(base, factors)]
    if p.ext_factor == 0.0:
        return [p.freq_scale * theta for theta in base], p.attn_factor
    mixed = [theta * (p.freq_scale * (1.0 - r) + r) for theta, r in zip(base, yarn_ramp(p))]
    return mixed, p.attn_factor * (1.0 + 0.1 * math.log(1.0 / p.freq_scale))


#: Bases and scales of frequencies are within this of 1, so that their powers and quotients are numbers.
_WIDEST = 1e30


def _check_frequencies(op: str, p: RopeParams) -> None:
    """Raises GraphError for a number by which rope_frequencies() could not divide, or take the logarithm of."""
    for name, value in (("freq_base", p.freq_base), ("freq_scale", p.freq_scale)):
        sane = 1 / _WIDEST <= value <= _WIDEST
        require(sane, op, f"{name} must be over 0, from {1 / _WIDEST:g} to {_WIDEST:g}, got {value}")
    finite = math.isfinite(p.ext_factor) and math.isfinite(p.attn_factor)
    require(finite, op, f"ext_factor and attn_factor must be finite, got {p.ext_factor}, {p.attn_factor}")
    if p.ext_factor != 0.0:
        require(p.freq_base > 1.0, op, f"YaRN needs a freq_base over 1, got {p.freq_base}")
        require(p.n_ctx_orig > 0, op, f"YaRN needs n_ctx_orig over 0, got {p.n_ctx_orig}")
        for name, value in (("beta_fast", p.beta_fast), ("beta_slow", p.beta_slow)):
            sane = 1 / _WIDEST <= value <= _WIDEST
            require(sane, op, f"YaRN needs {name} over 0, from {1 / _WIDEST:g} to {_WIDEST:g}, got {value}")


def check_rope(op: str, params: RopeParams, a: Tensor, positions: Tensor, factors: Tensor | None) -> None:
    """Raises GraphError for what `a` can't be turned by."""
    require(positions.dtype.name == "i32", op, "positions must be i32", positions)
    fits = positions.ne == (a.ne[2], 1, 1, 1)
    require(fits, op, "there must be one position for each of dimension 2", a, positions)
    even = params.n_dims % 2 == 0 and 0 < params.n_dims <= a.ne[0]
    require(even, op, f"n_dims must be even and at most ne[0], got {params.n_dims}", a)
    require(params.mode in ROPE_MODES, op, f"the mode must be one of {', '.join(ROPE_MODES)}, got {params.mode!r}")
    _check_frequencies(op, params)
    if factors is not None:
        fits = factors.dtype.name == "f32" and factors.ne[0] >= params.n_dims // 2
        require(fits, op, f"frequency factors must be f32 and at least n_dims/2 = {params.n_dims // 2}", factors)


def _infer(params: RopeParams, a: Tensor, positions: Tensor, factors: Tensor | None) -> Result:
    require(a.dtype.name in ("f32", "f16"), "ROPE", "the source must be f32 or f16", a)
    check_rope("ROPE", params, a, positions, factors)
    return Result(a.dtype, a.ne)


ROPE = register(
    OpSpec(
        "ROPE", _infer, elementwise_work(6), ("a", "positions", "factors?"), params=RopeParams, inplace=("a",)
    )
)  # fmt: skip


@checked(GraphError)
def rope(a: Tensor, positions: Tensor, params: RopeParams, factors: Tensor | None = None, name: str = "") -> Tensor:
    """Rotates pairs of `a` by their token's position (rotary position embedding).

    With (x, y) a pair of a head, elements (2i, 2i + 1) in mode normal and (i, i + n_dims/2) in mode neox, and t the
    position times the pair's angle freq_scale * freq_base^(-2i/n_dims) / factors[i]: result = attn_factor * (x cos t -
    y sin t, x sin t + y cos t). YaRN changes the angles, see rope_frequencies(). a: f32 or f16 [head_dim, n_head,
    n_tokens, n_seq], whose type and shape the result has; positions: i32 [n_tokens]; params: a RopeParams; factors: f32
    [n_dims/2] or more, or None for ones. Source: RoFormer (arXiv 2104.09864) and YaRN (arXiv 2309.00071), as
    ggml_rope_ext has them. Raises GraphError for other types, shapes and numbers.
    """
    return build(ROPE, a, positions, factors, params=params, name=name)
