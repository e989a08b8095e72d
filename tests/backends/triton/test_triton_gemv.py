"""Few vectors times packed and plain matrices, and the rounding of activations, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import gguf
import numpy as np
from pytest import FixtureRequest, MonkeyPatch
from support.wgmma_order import wgmma_order

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.kernels.products import activations
from graphrt.backends.triton.kernels.products.activations import (
    GLU_KINDS,
    NormWeight,
    Q8Rows,
    Rows,
    add_norm_quantize,
    norm_quantize,
    parts_of,
    quantize_rows,
)
from graphrt.backends.triton.kernels.products.gemv import GemvConfig, Segment, config_for, gemv
from graphrt.backends.triton.kernels.products.gemv_packed import needs_sums
from graphrt.backends.triton.packing import PACKED_TYPES, Packed, pack, packing_of
from graphrt.dtypes import dtype

TARGET = device.target()
DEVICE = TARGET.device
#: What f32 sums of some thousand terms, each rounded a few times, may be off, against the sum of the terms' magnitudes.
CLOSE = 5e-7


#: Where a block has f16 scales.
_HALF_SCALES = {
    "q4_0": [0], "q5_0": [0], "q8_0": [0], "iq4_nl": [0], "q4_1": [0, 2], "q5_1": [0, 2], "q2_K": [80, 82],
    "q3_K": [108], "q4_K": [0, 2], "q5_K": [0, 2], "q6_K": [208], "iq4_xs": [0], "tq2_0": [64], "tq1_0": [52],
    "iq2_xxs": [0], "iq2_xs": [0], "iq2_s": [0], "iq3_xxs": [0], "iq3_s": [0], "iq1_s": [0],
}  # fmt: skip


@pytest.fixture(params=[1, 2])
def parts(request: FixtureRequest, monkeypatch: MonkeyPatch) -> int:
    """Rows of every length are rounded in so many parts."""
    monkeypatch.setattr(activations, "MAX_TWO_PARTS", 0 if request.param == 1 else 1 << 20)
    return int(request.param)


class Matrix:
    """A random packed matrix and its values in float64."""

    def __init__(self, kind: str, m: int, k: int, seed: int = 0) -> None:
        rng = np.random.default_rng((seed, m, k))
        dt = dtype(kind)
        blocks = rng.integers(0, 256, (m, k // dt.block_size, dt.type_size), dtype=np.uint8)
        halves = _HALF_SCALES.get(kind, [])
        for at in halves:
            scale = (rng.uniform(0.5, 1.5, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])).astype(np.float16)
            blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
        if kind == "mxfp4":
            blocks[..., 0] = rng.integers(120, 134, blocks.shape[:2])
        if kind == "iq1_m":  # an f16 in the high nibbles of four words
            scale = rng.uniform(0.5, 1.5, blocks.shape[:2]).astype(np.float16).view(np.uint16)
            blocks[..., 49::2] = blocks[..., 49::2] & 15 | (scale[..., None] >> [0, 4, 8, 12] & 15) << 4
        raw = blocks.reshape(m, -1)
        self.values = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])).double()
        self.packed = Packed.empty(kind, m, k, DEVICE)
        pack(torch.from_numpy(raw).to(DEVICE), self.packed)


def _vectors(n: int, k: int, seed: int = 1) -> torch.Tensor:
    """Values with very different groups, one of them zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k // 32, 32, generator=g) * torch.exp(2 * torch.randn(n, k // 32, 1, generator=g))
    x = x.reshape(n, k)
    x[0, :32] = 0
    return x


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """The definition, in float32 as kernels have it, returned as float64."""
    groups = x.float().reshape(x.shape[0], -1, 32)
    d = groups.abs().amax(-1, keepdim=True) * np.float32(1 / 127)
    inverse = 1 / torch.where(d > 0, d, 1)
    q = torch.round(groups * inverse).double()
    if parts_of(x.shape[1]) == 2:
        finer = torch.round((groups - q.float() * d) * (inverse * 254))
        q += finer.double() / 254
    return (q * d.double()).reshape(x.shape)


def _of_edges(x: torch.Tensor) -> torch.Tensor:
    """How far the last bits of float32 values x can move what they are rounded to: some lie between two numbers."""
    unsure = 4 * torch.finfo(torch.float32).eps * x.reshape(x.shape[0], -1, 32).abs().amax(-1, keepdim=True)
    below, at, above = (_rounded((x.reshape(x.shape[0], -1, 32) + by * unsure).reshape(x.shape)) for by in (-1, 0, 1))
    return torch.maximum((below - at).abs(), (above - at).abs())


def _activations(x: torch.Tensor) -> Q8Rows:
    n, k = x.shape
    found = Q8Rows.empty(n, k, DEVICE)
    quantize_rows(TARGET, Rows(x.to(DEVICE), n, k, k), found)()
    return found


def _check(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor, more: torch.Tensor | float = 0.0) -> None:
    """y [n, m] is w x + more, each element to within rounding of the sum of its terms' magnitudes."""
    expected = x @ w.T + more
    size = x.abs() @ w.abs().T + torch.as_tensor(more).abs()
    off = ((y.cpu().double() - expected).abs() / size.clamp_min(1e-30)).max().item()
    assert off < CLOSE, off


def _out(n: int, m: int) -> torch.Tensor:
    return torch.full((n, m), torch.nan, device=DEVICE)


@pytest.mark.parametrize("kind", PACKED_TYPES)
@pytest.mark.parametrize(("n", "m", "k", "config"), [
    (1, 5, 1280, GemvConfig(1, 32, 2, 1)),  # two tiles, the second not full; two rows a warp
    (3, 5, 256, GemvConfig(1, 8, 2, 1)),  # one block of a K type, odd rows, rows over lanes
    (2, 3, 2048, GemvConfig(2, 64, 1, 1)),  # warps side by side along k
])  # fmt: skip
def test_every_type(kind: str, n: int, m: int, k: int, config: GemvConfig, parts: int) -> None:
    matrix, x = Matrix(kind, m, k), _vectors(n, k)
    out = _out(n, m)
    gemv(TARGET, [Segment(matrix.packed, out, m)], _activations(x), config=config)()
    _check(out, matrix.values, _rounded(x))


@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q8_0", "mxfp4"])
@pytest.mark.parametrize("k", [32, 96])
def test_short_rows(kind: str, k: int) -> None:
    matrix, x = Matrix(kind, 7, k), _vectors(1, k)
    x[0, 0] = 1.0
    out = _out(1, 7)
    gemv(TARGET, [Segment(matrix.packed, out, 7)], _activations(x))()
    _check(out, matrix.values, _rounded(x))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_tokens(n: int) -> None:
    """Whatever config_for says; results lie apart, and nothing between them is written."""
    matrix, x = Matrix("q4_K", 10, 1024), _vectors(n, 1024)
    out = _out(n, 17)
    gemv(TARGET, [Segment(matrix.packed, out, 17)], _activations(x))()
    _check(out[:, :10], matrix.values, _rounded(x))
    assert out[:, 10:].isnan().all()


@pytest.mark.parametrize("u", [1, 2, 4])
def test_steps_in_registers(u: int) -> None:
    matrix, x = Matrix("q6_K", 4, 1792), _vectors(2, 1792)
    out = _out(2, 4)
    gemv(TARGET, [Segment(matrix.packed, out, 4)], _activations(x), config=GemvConfig(1, 8, 2, u))()
    _check(out, matrix.values, _rounded(x))


def test_what_a_launch_touches() -> None:
    """Each plane by itself, and nothing of planes that the type lacks or of matrices that are not there."""
    matrix = Matrix("q4_K", 4, 512)
    launch = gemv(TARGET, [Segment(matrix.packed, _out(1, 4), 4)], _activations(_vectors(1, 512)))
    read = {access.name for access in launch.accesses() if access.reads}
    assert read == {"packed0.quants", "packed0.scales", "packed0.supers", "p_q", "p_d", "p_s"}
    assert {a.name for a in launch.accesses() if a.writes} == {"p_out0"}


def _product(matrix: Matrix, x: torch.Tensor, form: str, config: GemvConfig | None = None) -> torch.Tensor:
    """x W^T on the CPU, x in one of the kernel's forms, which for "norm" is an RMS norm's result."""
    (n, k), m = x.shape, matrix.packed.rows
    out = _out(n, m)
    given = _activations(x) if form == "q8" else Rows(x.to(DEVICE), n, k, k)
    norm = (torch.ones(k, device=DEVICE), 1e-6) if form == "norm" else None
    launch = gemv(TARGET, [Segment(matrix.packed, out, m)], given, norm=norm, config=config)
    assert launch.args["X_FORM"] == form
    launch()
    return out.cpu()


def _error(found: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> float:
    """The worst token's, relative to the root of the sum of its squared terms, which unlike results does not cancel."""
    terms = x.square() @ w.square().T
    return float(((found.double() - x @ w.T).square().sum(-1) / terms.sum(-1)).sqrt().max())


#: Elements are off by d2 / sqrt(12) on average, 2e-5 of normal x: up to 4.2e-5 here, where one part is off by 3e-3 to
#: 8e-3.
TWO_PARTS = 6e-5


#: Of activations: form, tokens, length.
FORMS = (
    ("q8", 2, 512), ("together", 1, 1536), ("q8", 1, 1536), ("q8", 3, 256), ("q8", 8, 256), ("f32", 1, 768),
    ("f32", 2, 512), ("norm", 2, 768), ("norm", 1, 1536),
)  # fmt: skip


def _is_decoded(kind: str) -> bool:
    """Its codes are bytes in order before they meet activations: all such types are then multiplied alike."""
    facts = packing_of(kind)
    return facts is not None and facts.grid is not None


@pytest.mark.parametrize(
    ("kind", "form", "n", "k"),
    [(kind, *form) for kind in PACKED_TYPES for form in FORMS[: 2 if _is_decoded(kind) else None]],
)
def test_two_parts_are_close_to_exact(kind: str, form: str, n: int, k: int) -> None:
    matrix, x = Matrix(kind, 16, k), _vectors(n, k)
    exact = _normed(x, None, 1e-6) if form == "norm" else x.double()
    assert _error(_product(matrix, x, form), matrix.values, exact) < TWO_PARTS


def _first_sums(a: Q8Rows) -> torch.Tensor:
    """Sums of the first parts alone, of three tokens."""
    sums = a.q[:3].float().reshape(3, -1, 2, 16).sum(-1)
    return (sums * 254 * a.d[:, :, None]).reshape(3, -1)


#: What is done to the second parts of three tokens.
SECOND_BUGS: dict[str, Callable[[Q8Rows], object]] = {
    "there is none": lambda a: a.q[3:].zero_(),
    "sums lack it": lambda a: a.s.copy_(_first_sums(a)),
    "tokens have each other's": lambda a: a.q[3:].copy_(a.q[3:].roll(1, 0)),
    "the first one has its step": lambda a: a.d.mul_(254),
}


@pytest.mark.parametrize(
    ("bug", "kind"),
    [(b, k) for b in SECOND_BUGS for k in PACKED_TYPES if not _is_decoded(k) and ("sums" not in b or needs_sums(k))],
)
def test_a_wrong_second_part_is_seen(kind: str, bug: str) -> None:
    matrix, x = Matrix(kind, 16, 256), _vectors(3, 256)
    given, out = _activations(x), _out(3, 16)
    SECOND_BUGS[bug](given)
    gemv(TARGET, [Segment(matrix.packed, out, 16)], given)()
    assert _error(out.cpu(), matrix.values, x.double()) > 3 * TWO_PARTS


def test_segments_of_different_types(parts: int) -> None:
    x = _vectors(2, 512)
    matrices = [Matrix("q4_K", 9, 512), Matrix("q8_0", 4, 512), Matrix("q6_K", 5, 512)]
    for count in (2, 3):
        used = matrices[:count]
        outs = [_out(2, m.packed.rows + 1) for m in used]
        residual = torch.randn(2, 11)
        segments = [Segment(m.packed, out, out.shape[1]) for m, out in zip(used, outs)]
        gemv(TARGET, segments, _activations(x), residual=(residual.to(DEVICE), 11), config=GemvConfig(1, 16, 2, 1))()
        for i, (m, out) in enumerate(zip(used, outs)):
            _check(out[:, :-1], m.values, _rounded(x), residual[:, :9].double() if i == 0 else 0.0)
            assert out[:, -1].isnan().all()


@pytest.mark.parametrize("which", [(1, 1, 1), (1, 0, 1), (0, 1, 0), (1,), (0, 1)])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_biases(which: tuple[int, ...], plain: bool, n: int) -> None:
    """Each matrix's own or none, for every token alike, beside a residual of the first."""
    x = _vectors(n, 512)
    matrices = [Matrix("q4_K", m, 512, seed) for seed, m in enumerate((9, 4, 5)[: len(which)])]
    weights = [torch.randn(m.packed.rows, 512).to(DEVICE) if plain else m.packed for m in matrices]
    biases = [torch.randn(m.packed.rows) if has else None for m, has in zip(matrices, which)]
    outs, residual = [_out(n, m.packed.rows) for m in matrices], torch.randn(n, 9)
    segments = [
        Segment(w, out, out.shape[1], None if bias is None else bias.to(DEVICE))
        for w, out, bias in zip(weights, outs, biases)
    ]
    given = Rows(x.to(DEVICE), n, 512, 512) if plain else _activations(x)
    gemv(TARGET, segments, given, residual=(residual.to(DEVICE), 9), config=GemvConfig(1, 16, 2, 1))()
    for i, (matrix, w, bias, out) in enumerate(zip(matrices, weights, biases, outs)):
        more = (0.0 if bias is None else bias.double()) + (residual.double() if i == 0 else 0.0)
        values, exact = (w.cpu().double(), x.double()) if isinstance(w, torch.Tensor) else (matrix.values, _rounded(x))
        _check(out, values, exact, more)


def test_a_residual_may_be_the_result() -> None:
    matrix, x = Matrix("q4_0", 6, 64), _vectors(2, 64)
    before = torch.randn(2, 6)
    out = before.to(DEVICE, copy=True)
    gemv(TARGET, [Segment(matrix.packed, out, 6)], _activations(x), residual=(out, 6))()
    _check(out, matrix.values, _rounded(x), before.double())


def _gated(kind: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    f = {"swiglu": torch.nn.functional.silu, "reglu": torch.relu,
         "geglu": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}[kind]  # fmt: skip
    return f(gate) * up


@pytest.mark.parametrize("kind", GLU_KINDS)
@pytest.mark.parametrize("types", [("q4_K", "q4_K"), ("q5_0", "q8_0"), ("f16", "f16")])
def test_glu(kind: str, types: tuple[str, str], parts: int) -> None:
    n, m, k, config = 2, 5, 512, GemvConfig(1, 8)  # several tiles
    x = _vectors(n, k) * 0.02
    out = _out(n, m)
    if types[0] == "f16":
        w, v = (torch.randn(m, k).half() for _ in range(2))
        gemv(
            TARGET,
            [Segment(t.to(DEVICE), out, m) for t in (w, v)],
            Rows(x.to(DEVICE), n, k, k),
            glu=kind,
            config=config,
        )()
        gate, up = x.double() @ w.double().T, x.double() @ v.double().T
    else:
        a, b = (Matrix(t, m, k, seed) for seed, t in enumerate(types))
        for matrix in (a, b):  # so that the activation is neither 0 nor the gate itself
            matrix.packed = _divided(matrix, 256)
        gemv(TARGET, [Segment(w.packed, out, m) for w in (a, b)], _activations(x), glu=kind, config=config)()
        gate, up = _rounded(x) @ a.values.T, _rounded(x) @ b.values.T
    expected = _gated(kind, gate, up)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def _divided(matrix: Matrix, by: int) -> Packed:
    """The same matrix with smaller scales: of f16 ones by a power of two."""
    packed = matrix.packed
    scales = packed.scales if packed.supers is None else packed.supers
    scales /= by
    matrix.values /= by
    return packed


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 576), (2, 1024), (3, 32)])
def test_activations_rounded_in_the_kernel(n: int, k: int, norm: bool, parts: int) -> None:
    matrix, x = Matrix("q4_1", 6, k), _vectors(n, k)
    x[0, 1] = 0.5
    weight = torch.rand(k) + 0.5
    out, given = _out(n, 6), torch.full((n, k + 5), torch.nan)
    given[:, :k] = x
    launch = gemv(TARGET, [Segment(matrix.packed, out, 6)], Rows(given.to(DEVICE), n, k, k + 5),
                  norm=(weight.to(DEVICE), 1e-5) if norm else None, config=GemvConfig(1, 32))  # fmt: skip
    launch()
    if norm:
        x = _normed(x, weight, 1e-5).float()
        error = (out.cpu().double() - _rounded(x) @ matrix.values.T).abs()
        terms = x.double().abs() @ matrix.values.abs().T
        assert (error <= CLOSE * terms + _of_edges(x) @ matrix.values.abs().T).all()
    else:
        _check(out, matrix.values, _rounded(x))


@pytest.mark.parametrize(("n", "k", "config"), [(1, 1536, None), (2, 1056, GemvConfig(1, 32)), (1, 2048, None)])
def test_activations_rounded_by_all_warps(n: int, k: int, config: GemvConfig | None, parts: int) -> None:
    matrix, x = Matrix("q4_1", 6, k), _vectors(n, k)
    out, given = _out(n, 6), torch.full((n, k + 5), torch.nan)
    given[:, :k] = x
    launch = gemv(TARGET, [Segment(matrix.packed, out, 6)], Rows(given.to(DEVICE), n, k, k + 5), config=config)
    assert launch.args["X_FORM"] == "together"
    launch()
    _check(out, matrix.values, _rounded(x))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "m", "k", "stride"), [(1, 7, 520, 520), (2, 5, 37, 41), (5, 3, 1, 1), (1, 6, 2048, 2048)]
)
def test_plain_weights(kind: torch.dtype, n: int, m: int, k: int, stride: int) -> None:
    w = torch.full((m, stride), torch.nan)
    w[:, :k] = torch.randn(m, k)
    w = w.to(kind).to(DEVICE)[:, :k]
    x = torch.full((n, k + 3), torch.nan)
    x[:, :k] = torch.randn(n, k)
    outs = [_out(n, m + 1) for _ in range(3)]
    halves = [w, w[: m // 2], w[m // 2 :]]
    gemv(TARGET, [Segment(part, out, m + 1) for part, out in zip(halves, outs)], Rows(x.to(DEVICE), n, k, k + 3))()
    for part, out in zip(halves, outs):
        _check(out[:, : part.shape[0]], part.cpu().double(), x[:, :k].double())
        assert out[:, part.shape[0] :].isnan().all()


def test_results_repeat() -> None:
    matrix, x = Matrix("q5_K", 3, 2048), _vectors(1, 2048)
    outs = [_out(1, 3), _out(1, 3)]
    for out in outs:
        gemv(TARGET, [Segment(matrix.packed, out, 3)], _activations(x), config=GemvConfig(4, 128))()
    assert torch.equal(*outs)


# --- activations ---


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.double()


def _check_activations(found: Q8Rows, x: torch.Tensor, exact: bool) -> None:
    """x float64, unrounded. exact: the kernel had it to the last bit, so that q is the definition's."""
    n, k = x.shape
    assert (found.n, found.k, found.parts) == (n, k, parts_of(k))
    d, groups, values = found.d.cpu().double().reshape(n, -1, 1), x.reshape(n, -1, 32), _values(found)
    most = groups.abs().amax(-1, keepdim=True)
    if exact:
        torch.testing.assert_close(values.reshape(n, k), _rounded(x), rtol=1e-6, atol=0)
    unsure = most * (3e-6 if found.parts == 2 else 0)  # of the second part, since x is known to f32 only
    assert ((d * (127 * 254 if found.parts == 2 else 127) - most).abs() <= 1e-6 * most).all()
    assert ((groups - values).abs() <= d * 0.5001 + unsure).all()
    torch.testing.assert_close(found.s.cpu().double(), values.reshape(n, -1, 16).sum(-1), rtol=1e-6, atol=1e-9)


def _values(a: Q8Rows) -> torch.Tensor:
    """What was rounded, f64 [n, groups, 32]."""
    q = a.q.cpu().double().reshape(a.parts, a.n, -1, 32)
    return (q[0] if a.parts == 1 else q[0] * 254 + q[1]) * a.d.cpu().double().reshape(a.n, -1, 1)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (3, 96), (2, 1600)])
def test_quantize_rows(kind: torch.dtype, n: int, k: int, parts: int) -> None:
    x = _vectors(n, k).to(kind)
    spread = torch.full((n, k + 1, 3), torch.nan, dtype=kind)  # strides of their own
    spread[:, :k, 1] = x
    data = spread.flatten()[1:].to(DEVICE)
    found = Q8Rows.inside(_out(n, k).flatten(), n, k)
    quantize_rows(TARGET, Rows(data, n, k, 3 * (k + 1), 3), found)()
    _check_activations(found, x.double(), True)
    half = torch.empty(n, k, dtype=torch.float16, device=DEVICE)
    quantize_rows(TARGET, Rows(data, n, k, 3 * (k + 1), 3), half)()
    assert torch.equal(half.cpu(), x.float().half())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", ["q8", "f32", "norm", "together"])
def test_what_is_not_finite_stays_so(bad: float, form: str, parts: int) -> None:
    k = 1536 if form == "together" else 64
    matrix, x = Matrix("q4_1", 3, k), _vectors(2, k)
    x[0, 40] = bad
    found = _activations(x)
    assert found.d[0, 0].isfinite() and not found.d[0, 1].isfinite()
    assert found.d[1].isfinite().all()
    out = _product(matrix, x, form)
    assert not out[0].isfinite().any() and out[1].isfinite().all()


def test_numbers_at_the_ends_of_f32(parts: int) -> None:
    x = torch.zeros(1, 128)
    x[0, ::32] = torch.tensor([2e38, 1e-34, 1e-37, 1e-45])
    x[0, 1::32] = x[0, ::32] * 0.3
    found = _activations(x)
    assert found.d.isfinite().all() and found.s.isfinite().all()
    values = _values(found).flatten()
    step = found.d[0].cpu().double().repeat_interleave(32)
    small = 127 * 1e-36  # below this all is 0
    assert ((values - x[0]).abs() <= step * 0.5001 + x[0] * 1e-7 + small).all()


def test_groups_of_tiny_numbers(parts: int) -> None:
    """Of every size down to f32's last: 1 over the second part's step must not be infinite where numbers are not 0."""
    sizes = 10.0 ** torch.arange(-45.0, -29.0, 0.25, dtype=torch.float64)
    x = torch.zeros(1, 32 * len(sizes))
    x[0, ::32], x[0, 5::32] = sizes.float(), -0.3 * sizes.float()
    found = _activations(x)
    assert found.d.isfinite().all() and found.s.isfinite().all()
    step = found.d[0].cpu().double().repeat_interleave(32)
    assert ((_values(found).flatten() - x[0]).abs() <= step * 0.5001 + 127 * 1e-36).all()


def test_an_f32_tensor_has_room() -> None:
    for n in range(1, 9):
        for k in range(32, 2081, 32):
            for start in range(4):
                found = Q8Rows.inside(torch.empty(n * k + start)[start:], n, k)
                assert (found.n, found.k, found.parts) == (n, k, 2 if k <= 2048 else 1)


@pytest.mark.parametrize(("n", "k"), [(2, 64), (2, 640), (2, 8320)])
@pytest.mark.parametrize("weighted", [True, False])
def test_norm_quantize(n: int, k: int, weighted: bool, parts: int) -> None:
    x, weight = _vectors(n, k), torch.rand(k) + 0.5 if weighted else None
    expected = _normed(x, weight, 1e-5)
    given = weight if weight is None else weight.to(DEVICE)
    rows = Rows(x.to(DEVICE), n, k, k)
    found, plain = Q8Rows.empty(n, k, DEVICE), _out(n, k + 1)
    norm_quantize(TARGET, rows, given, 1e-5, found, Rows(plain, n, k, k + 1))()
    _check_activations(found, expected, False)
    torch.testing.assert_close(plain[:, :k].cpu().double(), expected, rtol=2e-6, atol=1e-7)
    assert plain[:, k].isnan().all()
    half = torch.empty(n, k, dtype=torch.float16, device=DEVICE)
    norm_quantize(TARGET, rows, given, 1e-5, half)()
    torch.testing.assert_close(half.cpu().double(), expected, rtol=6e-4, atol=1e-6)
    if k % 128 == 0:
        ordered = torch.empty_like(half)
        norm_quantize(TARGET, rows, given, 1e-5, ordered, ordered=True)()
        assert torch.equal(ordered, half[:, wgmma_order(k)])


def test_norm_of_a_row_that_is_not_whole_groups() -> None:
    x, plain = _vectors(2, 64)[:, :45].contiguous(), _out(2, 45)
    norm_quantize(TARGET, Rows(x.to(DEVICE), 2, 45, 45), None, 1e-6, None, Rows(plain, 2, 45, 45))()
    torch.testing.assert_close(plain.cpu().double(), _normed(x, None, 1e-6), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("n", "k"), [(1, 64), (2, 1120), (9, 96), (9, 256)])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_add_norm_quantize(n: int, k: int, first: bool, early: bool, parts: int) -> None:
    x, residual, w, w2 = _vectors(n, k), _vectors(n, k)[:, torch.randperm(k)], torch.rand(k) + 0.5, torch.rand(k) + 0.5
    total = (_normed(x, w, 1e-5) if first else x.double()) + residual.double()
    expected = _normed(total.float(), w2, 1e-6)
    found = Q8Rows.empty(n, k, DEVICE) if n <= 8 else torch.empty(n, k, dtype=torch.float16, device=DEVICE)
    here, other = x.to(DEVICE), residual.clone().to(DEVICE)
    before = NormWeight(w.to(DEVICE), 1e-5) if first else None
    add_norm_quantize(TARGET, here, before, other, other, NormWeight(w2.to(DEVICE), 1e-6), found, early)()
    torch.testing.assert_close(other.cpu().double(), total, rtol=2e-6, atol=1e-6)
    for rounded in (Q8Rows.empty(n, k, DEVICE), None):  # beside f32, and that alone
        whole, other = _out(n, k), residual.clone().to(DEVICE)
        second = NormWeight(w2.to(DEVICE), 1e-6)
        add_norm_quantize(TARGET, here, before, other, other, second, rounded, early, out_f32=whole)()
        torch.testing.assert_close(whole.cpu().double(), expected, rtol=2e-6, atol=1e-6)
        if rounded is not None:
            _check_activations(rounded, expected, False)
    if isinstance(found, Q8Rows):
        _check_activations(found, expected, False)
    else:
        torch.testing.assert_close(found.cpu().double(), expected, rtol=6e-4, atol=1e-5)
        if k % 128 == 0:
            ordered, other = torch.empty_like(found), residual.clone().to(DEVICE)
            second = NormWeight(w2.to(DEVICE), 1e-6)
            add_norm_quantize(TARGET, here, before, other, other, second, ordered, early, ordered=True)()
            assert torch.equal(ordered, found[:, wgmma_order(k)])


def test_configs_hold_their_shape() -> None:
    for kind in ("f32", "f16", "q4_K", "q8_0"):
        for m in (1, 640, 1024, 4096, 128256):
            for k in (256, 512, 576, 1536, 4096, 14336):
                for n in range(1, 9):
                    c = config_for(kind, m, k, n)
                    assert c.w >= 1 and c.w * c.g == 32 * c.warps and c.g >= 8, (kind, m, k, n, c)
