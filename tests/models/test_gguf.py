"""The GGUF loader: what it reads, against gguf-py and against numbers known beforehand, and what it refuses."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.effort import instructions
from support.gguf_files import (
    KV,
    VALUE_TYPES,
    build,
    random_blocks,
    sample_kv,
    sample_tensors,
    write_gguf,
)
from support.gguf_loading import load, sample

from graphrt.dtypes import TYPES
from graphrt.errors import GGUFError
from graphrt.models.gguf import GGUFFile

FILE_TYPES = [name for name, t in TYPES.items() if t.id is not None]
DEQUANTIZABLE = [t for t in FILE_TYPES if t not in ("q8_1", "q8_K", "q1_0", "q2_0", "i8", "i16", "i32", "i64", "f64")]
AMBIGUOUS = ("q5_0", "q5_1", "iq1_m", "iq2_xxs", "iq3_xxs")


# ---- reading ----


def check_sample_values(f: GGUFFile) -> None:
    expected: list[KV] = sample_kv()
    assert list(f.metadata) == [key for key, _, _ in expected]
    assert len(f.metadata) == len(expected)
    for key, kind, value in expected:
        got = f.metadata[key]
        if kind == "array:string":
            raw = [v if isinstance(v, bytes) else v.encode() for v in value]
            assert [s.encode("utf-8", "surrogateescape") for s in got] == raw
            assert f.metadata.array_length(key) == len(value)
        elif kind.startswith("array:"):
            assert got.tolist() == value
            assert got.dtype == ("?" if kind == "array:bool" else np.dtype(VALUE_TYPES[kind.removeprefix("array:")][1]))
            assert f.metadata.array_length(key) == len(value)
        else:
            assert got == value and type(got) is (bool if kind == "bool" else type(value))
            assert f.metadata.array_length(key) is None


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_reads_keys_and_tensors(tmp_path: Path, version: int, alignment: int) -> None:
    kv = [("general.alignment", "u32", alignment) if row[0] == "general.alignment" else row for row in sample_kv()]
    path = write_gguf(tmp_path / "m.gguf", kv, sample_tensors(), version=version, alignment=alignment)
    with GGUFFile.open(path) as f:
        assert (f.version, f.byte_order, f.alignment, f.paths) == (version, "little", alignment, [path])
        assert list(f.tensors) == [name for name, *_ in sample_tensors()]
        for name, type_name, ne, data in sample_tensors():
            info = f.tensors[name]
            assert (info.name, info.dtype.name, info.ne, info.nbytes, info.part) == (name, type_name, ne, len(data), 0)
            assert info.offset % alignment == 0
            assert path.read_bytes()[info.offset : info.offset + info.nbytes] == data
            assert f.data(name).tobytes() == data


def test_metadata_values() -> None:
    check_sample_values(load(sample().data))
    f = load(sample().data)
    with pytest.raises(KeyError):
        f.metadata["no.such.key"]
    assert f.metadata["t.longs"] is f.metadata["t.longs"]  # decoded once


def test_big_endian_file_reads_the_same() -> None:
    f = load(build(sample_kv(), sample_tensors(">"), order=">").data)
    assert (f.byte_order, f.version) == ("big", 3)
    check_sample_values(f)
    little = load(sample().data)
    for name, type_name, _, _ in sample_tensors():
        if type_name in ("f32", "f16"):
            assert f.data(name).tobytes() == little.data(name).tobytes()


#: Where the wide fields of each type lie, from ggml's structs: (offset, width, count).
SWAPS = {
    "q4_0": [(0, 2, 1)], "q4_1": [(0, 2, 2)], "q8_0": [(0, 2, 1)], "q2_K": [(80, 2, 2)], "q3_K": [(108, 2, 1)],
    "q4_K": [(0, 2, 2)], "q5_K": [(0, 2, 2)], "q6_K": [(208, 2, 1)], "q8_K": [(0, 4, 1), (260, 2, 16)],
    "mxfp4": [], "nvfp4": [], "i8": [], "i16": [(0, 2, 1)], "i32": [(0, 4, 1)], "i64": [(0, 8, 1)],
    "f64": [(0, 8, 1)], "bf16": [(0, 2, 1)], "iq4_nl": [(0, 2, 1)], "iq4_xs": [(0, 2, 2)], "tq1_0": [(52, 2, 1)],
    "tq2_0": [(64, 2, 1)], "q8_1": [(0, 2, 2)], "q1_0": [(0, 2, 1)], "q2_0": [(0, 2, 1)],
    "iq1_s": [(0, 2, 1), (34, 2, 8)], "iq2_xs": [(0, 2, 33)], "iq2_s": [(0, 2, 1)], "iq3_s": [(0, 2, 1)],
    "f32": [(0, 4, 1)], "f16": [(0, 2, 1)],
}  # fmt: skip


@pytest.mark.parametrize("type_name", FILE_TYPES)
def test_big_endian_blocks(type_name: str) -> None:
    t = TYPES[type_name]
    ne = (t.block_size * 3, 2)
    raw = np.random.default_rng(1).integers(0, 256, t.row_size(ne[0]) * 2, dtype=np.uint8)
    f = load(build((), [("w", type_name, ne, raw.tobytes())], order=">").data)
    if type_name in AMBIGUOUS:
        with pytest.raises(GGUFError, match=f"'w' of type {type_name}"):
            f.data("w")
        return
    expected = bytearray(raw.tobytes())
    for block in range(0, len(expected), t.type_size):
        for offset, width, count in SWAPS[type_name]:
            for i in range(count):
                at = block + offset + i * width
                expected[at : at + width] = expected[at : at + width][::-1]
    assert f.data("w").tobytes() == bytes(expected)


def test_all_types_are_covered_by_the_swap_table() -> None:
    assert set(SWAPS) | set(AMBIGUOUS) == set(FILE_TYPES)


@pytest.mark.parametrize("type_name", DEQUANTIZABLE)
def test_dequantize_is_ggufs(type_name: str) -> None:
    ne = (TYPES[type_name].block_size * 2, 3, 2)
    raw = random_blocks(type_name, ne[0] * ne[1] * ne[2])
    got = load(build((), [("w", type_name, ne, raw)]).data).dequantize("w")
    rows = np.frombuffer(raw, np.uint8).reshape(2, 3, -1)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(TYPES[type_name].id))
    assert got.shape == (2, 3, ne[0]) and got.dtype == np.float32
    assert np.array_equal(got, expected.reshape(got.shape))


def test_dequantize_known_values() -> None:
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    f = load(build((), [("w", "f32", (3, 2, 2), values.tobytes())]).data)
    assert np.array_equal(f.dequantize("w"), values)
    block = np.float16(2).tobytes() + bytes([0x80 | 8] * 16)  # scale 2, all nibbles 8: (8 - 8) * 2
    assert not load(build((), [("w", "q4_0", (32,), block)]).data).dequantize("w").any()


def test_dequantize_empty_and_refused_types() -> None:
    f = load(build((), [("e", "q4_K", (256, 0), b""), ("i", "i32", (2,), bytes(8))]).data)
    assert f.dequantize("e").shape == (0, 256)
    with pytest.raises(GGUFError, match=r"'i' of type i32 can't be dequantized.\nThe types that can: f32, f16, q4_0"):
        f.dequantize("i")


def test_reads_what_gguf_py_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b", "\u00e9"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_custom_alignment(64)
    writer.add_tensor("a", weights)
    writer.add_tensor("b", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as f:
        assert f.get("general.architecture", str) == "llama" and f.get("llama.context_length", int) == 77
        assert f.metadata["tokenizer.ggml.tokens"] == ["a", "b", "\u00e9"]
        assert f.alignment == 64 and f.tensors["a"].ne == (64, 4)
        assert np.array_equal(f.dequantize("a"), weights)
        assert np.array_equal(f.data("b"), packed.reshape(-1))


def test_gguf_py_reads_our_helper(tmp_path: Path) -> None:
    """The tests' own writer is right: gguf-py, which wrote none of it, reads the same."""
    reader = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", sample_kv()[:13], sample_tensors()[:4]))
    for key, kind, value in sample_kv()[:13]:
        assert reader.fields[key].contents() == value, (key, kind)
    for tensor, (name, _, ne, data) in zip(reader.tensors, sample_tensors(), strict=False):
        assert (tensor.name, tuple(tensor.shape.tolist()), tensor.data.tobytes()) == (name, ne, data)


def test_data_goes_to_torch_without_copy_or_warning_and_never_to_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", (), [("w", "f32", (4,), np.ones(4, np.float32).tobytes())])
    before = path.read_bytes()
    with GGUFFile.open(path) as f, warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.from_numpy(f.data("w")).view(torch.float32)
        tensor.fill_(7)
        assert f.dequantize("w").tolist() == [7.0] * 4  # the same memory
    assert path.read_bytes() == before
    assert tensor.tolist() == [7.0] * 4  # outlives the file object


def test_closed_file_says_so(tmp_path: Path) -> None:
    f = GGUFFile.open(write_gguf(tmp_path / "m.gguf", sample_kv(), sample_tensors()))
    f.close()
    f.close()
    assert f.metadata["t.u8"] == 200  # scalars are there already
    with pytest.raises(GGUFError, match="closed"):
        f.metadata["tokenizer.ggml.tokens"]
    with pytest.raises(GGUFError, match="closed"):
        f.data("output.weight")


def test_a_large_vocabulary_takes_little_to_open(tmp_path: Path) -> None:
    n = 16_384
    kv: list[KV] = [
        ("tokenizer.ggml.tokens", "array:string", [f"token{i}" for i in range(n)]),
        ("tokenizer.ggml.scores", "array:f32", np.zeros(n)),
    ]
    path = write_gguf(tmp_path / "m.gguf", kv)

    def read() -> None:
        with GGUFFile.open(path) as f:
            assert f.metadata["tokenizer.ggml.tokens"][-1] == f"token{n - 1}"
            assert len(f.metadata["tokenizer.ggml.scores"]) == n

    assert instructions(read) < 100 * n  # 65 a string, none a number


def test_invalid_utf8_in_a_single_string_is_replaced() -> None:
    assert load(build([("t.s", "string", b"a\xffb")]).data).metadata["t.s"] == "a\ufffdb"


# ---- get ----


def test_get_checks_kinds() -> None:
    f = load(sample().data)
    assert f.get("t.u32", int) == 4_000_000_000
    assert f.get("t.u8", float) == 200.0 and type(f.get("t.u8", float)) is float
    assert f.get("t.bool", bool) is True
    assert f.get("tokenizer.ggml.merges", list) == ["a b", "b c"]
    assert f.get("t.longs", (int, np.ndarray)).tolist() == [-1, 1 << 40]
    assert f.get("t.u8", (int, np.ndarray)) == 200
    assert f.get("missing", int, 5) == 5 and f.get("missing", int, None) is None


@pytest.mark.parametrize(
    ("key", "kind", "parts"),
    [
        ("t.bool", int, ("'t.bool'", "an integer", "the bool True")),
        ("t.f32", int, ("an integer", "the float 0.5")),
        ("t.u8", bool, ("a bool", "the int 200")),
        ("t.u8", str, ("a string", "the int 200")),
        ("general.architecture", (int, np.ndarray), ("an integer or an array of numbers", "the str 'llama'")),
        ("t.longs", int, ("an integer", "an array of 2 int64 values")),
        ("tokenizer.ggml.merges", np.ndarray, ("an array of numbers", "an array of 2 strings")),
        ("missing", float, ("'missing'", "a number", "missing")),
    ],
)
def test_get_refuses(key: str, kind: type, parts: tuple[str, ...]) -> None:
    with pytest.raises(GGUFError) as caught:
        load(sample().data).get(key, kind)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_unknown_tensor_suggests_one() -> None:
    f = load(sample().data)
    with pytest.raises(GGUFError, match=r"Did you mean 'output.weight'"):
        f.data("output.weigth")
    with pytest.raises(GGUFError, match="8 tensors"):
        f.dequantize("zzz")


# ---- split models ----


def split_model(folder: Path, n: int = 3, **keys: int) -> list[Path]:
    """A model in n parts of one tensor each; keys overrides the first part's split.* values."""
    paths = []
    for i in range(n):
        values = {"no": i, "count": n, "tensors_count": n, **(keys if i == 0 else {})}
        kv: list[KV] = [
            ("split.no", "u16", values["no"]),
            ("split.count", "u16", values["count"]),
            ("split.tensors.count", "i32", values["tensors_count"]),
        ]
        kv += [("general.architecture", "string", "llama")] if i == 0 else []
        data = np.full(4, i, np.float32).tobytes()
        paths.append(write_gguf(folder / f"m-{i + 1:05d}-of-{n:05d}.gguf", kv, [(f"w{i}", "f32", (4,), data)]))
    return paths


def test_split_model(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    with GGUFFile.open(paths[0]) as f:
        assert f.paths == paths
        assert [(t.name, t.part) for t in f.tensors.values()] == [("w0", 0), ("w1", 1), ("w2", 2)]
        assert [f.dequantize(f"w{i}").tolist() for i in range(3)] == [[float(i)] * 4 for i in range(3)]
        assert f.get("general.architecture", str) == "llama"


def test_split_model_refusals(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    with pytest.raises(GGUFError, match=r"part 2 of 3 .*\n.*m-00001-of-00003.gguf"):
        GGUFFile.open(paths[1])
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    with pytest.raises(GGUFError, match=r"must be named PREFIX-00001-of-00003.gguf, got 'other.gguf'"):
        GGUFFile.open(renamed)
    with pytest.raises(GGUFError, match="split model can't be read from memory"):
        load(paths[0].read_bytes())
    good = paths[2].read_bytes()
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(GGUFError, match=r"m-00003-of-00003.gguf: must be part 3 of 3, but says part 2 of 3"):
        GGUFFile.open(paths[0])
    paths[2].write_bytes(good.replace(b"w2", b"w1"))
    with pytest.raises(GGUFError, match="in one part only, got 'w1' again"):
        GGUFFile.open(paths[0])
    paths[2].write_bytes(good[:-1])
    with pytest.raises(GGUFError, match=r"m-00003-of-00003.gguf: tensor 'w2' must end inside"):
        GGUFFile.open(paths[0])
    paths[2].unlink()
    with pytest.raises(GGUFError, match=r"m-00003-of-00003.gguf: this part of the model is missing"):
        GGUFFile.open(paths[0])


def test_split_model_counts(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="must have 5 tensors together, got 3"):
        GGUFFile.open(split_model(tmp_path, tensors_count=5)[0])
    with pytest.raises(GGUFError, match="must have 2 tensors together, got 3"):
        GGUFFile.open(split_model(tmp_path, tensors_count=2)[0])
    with pytest.raises(GGUFError, match="got part 4 of 3"):
        GGUFFile.open(split_model(tmp_path, no=3)[0])
    bad = write_gguf(tmp_path / "x-00001-of-00002.gguf", [("split.count", "string", "two")])
    with pytest.raises(GGUFError, match=r"'split.count' must be an integer"):
        GGUFFile.open(bad)
    second = split_model(tmp_path)[1]
    write_gguf(second, [("split.no", "u16", 1), ("split.count", "u16", 3)], order=">")
    with pytest.raises(GGUFError, match="one byte order"):
        GGUFFile.open(tmp_path / "m-00001-of-00003.gguf")


# ---- files that are not models ----


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"GG", "must start with b'GGUF', got b'GG'"),
        (b"GGUF", "version"),
        (b"GGUF\x03\x00", "only 2 are left"),
        (b"hello world, not a model", "Give the path of a GGUF model"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>", "web page"),
        (b"PK\x03\x04....", "zip archive"),
        (b"tjgg\x03\x00\x00\x00", "GGJT"),
    ],
)
def test_not_a_gguf_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_paths_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GGUFError, match=r"there is no such file\. Check the path\.$"):
        GGUFFile.open(tmp_path / "missing.gguf")
    with pytest.raises(GGUFError, match="got a directory"):
        GGUFFile.open(tmp_path)
    with pytest.raises(GGUFError, match="can't be opened"):
        GGUFFile.open("a\0b")
    with pytest.raises(GGUFError, match="can't be opened"):
        GGUFFile.open(tmp_path / ("x" * 5000))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(GGUFError, match="a pipe or a device"):
        GGUFFile.open(pipe)
    path = write_gguf(tmp_path / "m.gguf")

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)  # root may read everything, so a real chmod proves nothing in CI
    with pytest.raises(GGUFError, match="may not be read"):
        GGUFFile.open(path)
