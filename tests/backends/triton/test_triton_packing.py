"""Quantized matrices as planes, and what the kernels make of them: against the bytes themselves and gguf's values."""

from __future__ import annotations

import math
import zlib

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

from graphrt.backend import Usage
from graphrt.backends.triton import device, packing
from graphrt.dtypes import TYPES, dtype
from graphrt.errors import GraphError
from graphrt.testing import dequantize as decoded
from graphrt.testing import quantize

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.kernels.dequantize import dequantize, gather_rows
from graphrt.backends.triton.kernels.products.trained import lines
from graphrt.backends.triton.packing import PACKED_TYPES, Packed, PackedBuffer, pack, packing_of, unpack

#: Rows and blocks a row: one block; rows and groups that no tile divides; more than a tile of groups.
SHAPES = ((1, 1), (7, 3), (37, 9))
DEVICE = device.target().device


def _blocks(kind: str, rows: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Sane blocks, with different numbers for each type and shape."""
    rng = np.random.default_rng(zlib.crc32(f"{kind} {rows} {blocks}".encode()))
    values = rng.normal(0, 0.1, (rows, blocks * dtype(kind).block_size))
    return quantize(values, dtype(kind), rng).view(np.uint8)


def _any_bytes(kind: str, rows: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Any bytes at all, among whose scales are NaN and infinity."""
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    raw = rng.integers(0, 256, (rows, blocks * dtype(kind).type_size), dtype=np.uint8)
    raw[0] = 0xFF
    raw[1:2] = 0x7F
    return _as_quantizers_write(raw) if kind == "tq1_0" else raw


def _as_quantizers_write(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Of tq1_0's bytes that mean the same digits of base 3 the one that a quantizer gives: digits n are n / 243 of 256,
    rounded up; those of the last four bytes before the scale have a last digit of 0."""
    of_byte = (np.arange(256) * 243 >> 8).astype(np.int64)
    five, four = (-(-n * 256 // 243) for n in (of_byte, of_byte // 3 * 3))
    blocks = raw.reshape(raw.shape[0], -1, 54)
    blocks[..., :48] = five[blocks[..., :48]]
    blocks[..., 48:52] = four[blocks[..., 48:52]]
    return raw


def _values(raw: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return decoded(raw, dtype(kind)).astype(np.float32)


def _packed(raw: npt.NDArray[np.uint8], kind: str) -> Packed:
    dt = dtype(kind)
    packed = Packed.empty(kind, raw.shape[0], raw.shape[1] // dt.type_size * dt.block_size, DEVICE)
    pack(torch.from_numpy(raw).to(DEVICE), packed)
    return packed


def _nan(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=kind, device=DEVICE)


class _Guarded:
    """out: memory of a shape for a kernel to fill, between numbers that must stay."""

    def __init__(self, shape: tuple[int, ...], kind: torch.dtype) -> None:
        self.memory = torch.full((math.prod(shape) + 32768,), 77.0, dtype=kind, device=DEVICE)
        self.out = self.memory[16384:-16384].view(shape).fill_(float("nan"))

    def values(self) -> npt.NDArray[np.generic]:
        assert (self.memory[:16384] == 77.0).all() and (self.memory[-16384:] == 77.0).all()
        return self.out.cpu().numpy()


def test_every_type_with_values_is_packed() -> None:
    # These two hold activations and are in no file; gguf can't decode the newest.
    without = {"q8_1", "q8_K", "q1_0", "q2_0"}
    assert {*PACKED_TYPES} == {t.name for t in TYPES.values() if t.is_quantized} - without


@pytest.mark.parametrize("kind", PACKED_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacking_gives_every_byte(kind: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SLICE", 5 * shape[1] * dtype(kind).block_size)  # five rows
    raw = _any_bytes(kind, *shape)
    assert np.array_equal(unpack(_packed(raw, kind)).cpu().numpy(), raw)


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_planes(kind: str) -> None:
    """Shapes, alignment, and that no two planes share memory."""
    p, facts = Packed.empty(kind, 5, 768, DEVICE), packing_of(kind)
    assert facts is not None
    assert p.quants.dtype == torch.int32 and p.quants.shape == (5, 24, facts.words)
    assert p.scales.dtype == facts.scale_type and p.scales.shape == (5, 24, facts.scales)
    assert (p.high is not None) == (facts.high_bits > 0) and (p.supers is not None) == (facts.supers > 0)
    planes = [plane for plane in (p.quants, p.high, p.scales, p.supers) if plane is not None]
    for plane in planes:
        assert plane.storage_offset() * plane.itemsize % 256 == 0 and plane.is_contiguous()
    p.memory.zero_()
    for plane in planes:
        plane.view(torch.uint8).add_(1)
    assert int(p.memory.max()) == 1
    assert int(p.memory.sum(dtype=torch.int64)) == sum(plane.nbytes for plane in planes) <= p.nbytes


def _code(packed: Packed, row: int, group: int, i: int) -> int:
    """Element i of a group, put together from the planes as packing.py describes them."""
    facts = packing_of(packed.kind)
    assert facts is not None
    half, word, byte = i // 16, i % 16 // 4, i % 4

    def bits(plane: torch.Tensor, width: int) -> int:
        if width == 8:
            word_index, shift = i // 4, 8 * byte
        elif width == 4:
            word_index, shift = word, 8 * byte + 4 * half
        elif width == 2:
            word_index, shift = word // 2, 8 * byte + 4 * (word % 2) + 2 * half
        else:
            word_index, shift = 0, 8 * byte + 2 * word + half
        return int(plane[row, group, word_index]) >> shift & ((1 << width) - 1)

    code = bits(packed.quants, facts.bits)
    if packed.high is not None:
        code |= bits(packed.high, facts.high_bits) << facts.bits
    if facts.signed:
        code -= (code & 128) << 1
    return (facts.codebook[code] if facts.codebook else code) - facts.offset


def _word(plane: torch.Tensor | None, row: int, group: int) -> int:
    """What a group has in a plane as one number."""
    return 0 if plane is None else int.from_bytes(plane[row, group].cpu().numpy().tobytes(), "little")


def _point_value(packed: Packed, row: int, group: int, i: int) -> int:
    """Element i of a group by gguf's grid, put together as packing_grids.py describes it."""
    facts, (eight, j) = packing_of(packed.kind), divmod(i, 8)
    assert facts is not None and facts.grid is not None
    grid, own = facts.grid, getattr(gguf.quants, packed.kind.upper())
    own.init_grid()
    first, second = (int(w) & 0xFFFFFFFF for w in (packed.quants[row, group, 0], packed.quants[row, group, -1]))
    words = {"quants": second, "high": _word(packed.high, row, group), "scales": _word(packed.scales, row, group)}
    point, value = divmod(j, grid.size)
    number = (second if point else first) >> 8 * eight & 255
    if grid.more is not None:
        at = grid.more.at + grid.more.step * eight + 4 * point
        number |= (words[grid.more.plane] >> at & (1 << grid.more.bits) - 1) << 8
    found = int(own.grid[0, 0, number, value])
    if grid.sign is not None:  # eighths
        return 8 * found + (-1 if words[grid.sign.plane] >> grid.sign.at + grid.sign.step * eight & 1 else 1)
    assert grid.signs is not None
    signs = [words[grid.signs.plane] >> 4 * n + eight & 1 for n in range(8)]
    if grid.even:
        signs[7] = sum(signs[:7]) % 2
    return -found if signs[j] else found


def _odd_scale(packed: Packed, row: int, group: int, half: int) -> float:
    """A scale of the form "odd", without that of its block."""
    form = packing_of(packed.kind).scale  # type: ignore[union-attr]
    return (2 * (_word(packed.scales, row, group) >> form.at[half] & (1 << form.width) - 1) + 1) * 2.0**form.power


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_planes_are_as_described(kind: str) -> None:
    """Other kernels read planes as packing.py says: one element at a time, by its definition."""
    raw = _blocks(kind, 2, 2 if dtype(kind).block_size == 256 else 16)
    want, p, facts = _values(raw, kind), _packed(raw, kind), packing_of(kind)
    assert facts is not None
    rng = np.random.default_rng(1)
    for row, group, i in zip(rng.integers(0, 2, 64), rng.integers(0, 16, 64), rng.integers(0, 32, 64)):
        decoded_by = _point_value if facts.grid else _code
        code, half = decoded_by(p, row, group, i), i // 16
        scales = [float(s) for s in p.scales[row, group]]
        supers = [float(s) for s in p.supers[row, group // 8]] if p.supers is not None else [1.0]
        if kind == "mxfp4":
            value = 2.0 ** (scales[0] - 128) * code
        elif kind == "nvfp4":
            value = float(gguf.quants.NVFP4.ue4m3_to_fp32(p.scales[row, group].cpu().numpy())[half]) * code
        elif facts.scale.name == "odd":
            value = supers[0] * _odd_scale(p, row, group, half) * code
        elif facts.scale.name == "d":
            value = supers[0] * code
        elif kind == "q2_K":
            scale = int(scales[half])
            value = supers[0] * (scale & 15) * code - supers[1] * (scale >> 4)
        elif kind in ("q4_1", "q5_1"):
            value = scales[0] * code + scales[1]
        elif facts.has_min:
            value = supers[0] * scales[0] * code - supers[1] * scales[1]
        else:
            value = supers[0] * scales[half if facts.scale.name.endswith("halves") else 0] * code
        assert np.float32(value) == want[row, group * 32 + i], (row, group, i)


@pytest.mark.parametrize("kind", PACKED_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized(kind: str, shape: tuple[int, int]) -> None:
    raw = _blocks(kind, *shape)
    want, packed = _values(raw, kind), _packed(raw, kind)
    for to in (torch.float32, torch.float16):
        guarded = _Guarded(want.shape, to)
        dequantize(packed, guarded.out)()
        assert np.array_equal(guarded.values(), want.astype(np.float32 if to is torch.float32 else np.float16))


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_rows_that_lie_apart(kind: str) -> None:
    """On a GPU compilers have their say too: one got q6_K alone wrong, in a kernel that copied other rows besides."""
    raw = _blocks(kind, 37, 9)
    want = _values(raw, kind)
    k = want.shape[1]
    guarded = _Guarded((37, k + 64), torch.float16)
    lines(_packed(raw, kind), guarded.out[:, : k + 16])()
    found = guarded.values()
    assert np.array_equal(found[:, :k], want.astype(np.float16))
    assert np.isnan(found[:, k:]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, that sums of infinity and NaN are NaN
@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_any_bytes_have_gguf_s_values(kind: str) -> None:
    """Denormal, infinite and NaN scales."""
    raw = _any_bytes(kind, 9, 3)
    want = _values(raw, kind)
    out = _nan(want.shape, torch.float32).fill_(123.0)
    dequantize(_packed(raw, kind), out)()
    np.testing.assert_array_equal(out.cpu().numpy(), want)


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_gathered(kind: str) -> None:
    """Rows of 3 x 2 matrices by indices whose memory is in another order, with repeats."""
    n_rows, n_ids, (d3, d2) = 5, 4, (2, 3)
    raw = _blocks(kind, d3 * d2 * n_rows, 5)
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, n_rows, (n_ids, 2 * d3, d2)).astype(np.int32))
    ids = ids.to(DEVICE)[:, ::2].permute(1, 2, 0)
    want = _values(raw, kind).reshape(d3, d2, n_rows, -1)
    want = np.take_along_axis(want, ids.cpu().numpy()[..., None].astype(np.int64), 2)
    guarded = _Guarded(want.shape, torch.float32)
    gather_rows(_packed(raw, kind), ids, guarded.out)()
    assert np.array_equal(guarded.values(), want)


@pytest.mark.parametrize("kind", ["q4_0", "q6_K"])
def test_a_packed_buffer_reads_and_writes_raw_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = _any_bytes(kind, 7, 3)
    monkeypatch.setattr(packing, "_SLICE", 2 * 3 * dtype(kind).block_size)  # two rows
    buffer = PackedBuffer(Packed.empty(kind, 7, 3 * dtype(kind).block_size, DEVICE), Usage.WEIGHTS)
    assert buffer.nbytes == raw.size
    assert (buffer.read(0, raw.size) == 0xFF).all()
    buffer.write(0, raw.copy())
    flat, size = raw.reshape(-1), raw.shape[1]
    for first, n in ((0, raw.size), (size, 2 * size), (size // 2, 3 * size + 5), (raw.size - 1, 1), (3, 1)):
        new = flat[first : first + n] ^ 0x5A
        flat[first : first + n] = new
        buffer.write(first, new)
        assert np.array_equal(buffer.read(first, n), new)
        assert np.array_equal(buffer.read_later(0, raw.size)(), flat)


def test_rows_of_broken_blocks_are_refused() -> None:
    with pytest.raises(GraphError, match="256"):
        Packed.empty("q4_K", 2, 128, DEVICE)
