"""The GGUF loader's rules, a row for each; the check of tensors' scales; and files of any bytes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import (
    KV,
    TensorSpec,
    build,
    random_blocks,
    sample_tensors,
)
from support.gguf_loading import load, refused, sample

from graphrt.dtypes import REMOVED_IDS, TYPES
from graphrt.errors import GGUFError

I64_MAX = (1 << 63) - 1


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("version", 1, "version 1 is not read any more"),
        ("version", 4, "Update graphrt"),
        ("version", 0, "must be 2 or 3, got 0"),
        ("version", 0x30000, "must be 2 or 3"),
        ("version", 0x01000000, "version 1 is not read"),
        ("n_tensors", -1, "number of tensors must be 0 to"),
        ("n_tensors", I64_MAX, "number of tensors must be 0 to"),
        ("n_kv", -1, "number of keys must be 0 to"),
        ("n_kv", 1 << 40, "number of keys must be 0 to"),
        ("t.u8.key.len", 0, "must not be empty"),
        ("t.u8.key.len", 1 << 20, "at most 65535 bytes"),
        ("general.architecture.value.len", 1 << 31, "at most 1073741824 bytes"),
        ("general.architecture.value.len", 1 << 20, "are left in the file"),
        ("general.architecture.value.len", (1 << 64) - 1, "at most"),
        ("t.u8.type", 13, "must be 0 to 12, got 13"),
        ("t.halves.element_type", 9, "array of arrays"),
        ("t.halves.element_type", 99, "must be 0 to 12, got 99"),
        ("t.halves.count", (1 << 64) - 1, "at most 1073741824 elements"),
        ("t.halves.count", 1 << 29, "are left in the file"),
        ("tokenizer.ggml.tokens.count", 1 << 29, "are left in the file"),
        ("tokenizer.ggml.tokens.count", 200, "must end inside the file"),
        ("tokenizer.ggml.tokens[5].len", (1 << 64) - 1, "string 5 of 'tokenizer.ggml.tokens' must end inside"),
        ("t.bool.value", 2, "must be 0 or 1, got 2"),
        ("general.alignment.value", 0, "power of two"),
        ("general.alignment.value", 33, "power of two"),
        ("general.alignment.value", 1 << 31, "must start at 2147483648"),
        ("general.alignment.type", 5, None),  # i32 32: the number is right, the type is not
        ("tokenizer.ggml.scores.element_type", 5, None),  # i32 scores exist
        ("tokenizer.ggml.token_type.element_type", 6, "must be an array of i32 or u32, got an array of f32"),
        ("output.weight.name.len", 64, "at most 63 bytes"),
        ("output.weight.name.len", 0, "must not be empty"),
        ("output.weight.n_dims", 5, "at most 4 dimensions, got 5"),
        ("output.weight.ne0", -256, "at least 0"),
        ("output.weight.ne0", 257, "whole q6_K blocks of 256 elements, got 257"),
        ("output.weight.ne0", 512, "must end inside the file"),
        ("output.weight.ne0", 1 << 62, "must end inside the file"),
        ("blk.0.attn_k.weight.ne1", I64_MAX, "at most 2**63 - 1"),
        ("blk.0.empty.ne0", I64_MAX, None),  # no elements at all is fine
        ("blk.0.attn_v.weight.type", 4, "q4_2"),
        ("blk.0.attn_v.weight.type", 43, "got id 43"),
        ("blk.0.attn_v.weight.type", 0xFFFFFFFF, "got id 4294967295"),
        ("blk.0.attn_v.weight.offset", 0, "must start at"),
        ("blk.0.attn_v.weight.offset", (1 << 64) - 32, "must start at"),
    ],
)
def test_each_rule(field: str, value: int, says: str | None) -> None:
    data = sample().patch(field, value)
    if says is None:
        with load(data) as f:
            assert len(f.tensors) == len(sample_tensors())
    else:
        assert says in refused(data)


@pytest.mark.parametrize("type_id", REMOVED_IDS)
def test_removed_types_are_named(type_id: int) -> None:
    message = refused(sample().patch("output.weight.type", type_id))
    assert REMOVED_IDS[type_id] in message and "Quantize" in message


def tensor(name: str = "w", ne: tuple[int, ...] = (4,)) -> TensorSpec:
    return (name, "f32", ne, bytes(4 * int(np.prod(ne))))


@pytest.mark.parametrize(
    ("kv", "tensors", "says"),
    [
        ([("a", "u8", 1), ("a", "u8", 2)], [], "a key may appear once, got 'a' again"),
        ([], [tensor(), tensor()], "a tensor's name may appear once, got 'w' again"),
        ([("general.alignment", "u64", 1 << 40)], [], "below 2**32"),
        ([("general.alignment", "bool", 1)], [], "got True"),
        ([("general.alignment", "string", "32")], [], "got '32'"),
        ([("t.b", "array:u8", [0, 1])], [], None),
        ([("tokenizer.ggml.tokens", "array:i32", [1])], [], "must be an array of string, got an array of i32"),
        ([("tokenizer.ggml.merges", "string", "a b")], [], "must be an array of string, got 'a b'"),
        (
            [("tokenizer.ggml.tokens", "array:string", ["a", "b"]), ("tokenizer.ggml.scores", "array:f32", [1.0])],
            [],
            "each of the 2 tokens, got 1",
        ),
        (
            [("tokenizer.ggml.tokens", "array:string", ["a", "b"]), ("tokenizer.ggml.token_type", "array:i32", [])],
            [],
            "each of the 2 tokens, got 0",
        ),
        ([], [("w", "f32", (1 << 40, 0, 1 << 40), b"")], "at most 2**63 - 1"),
    ],
)
def test_rules_on_content(kv: list[KV], tensors: list[TensorSpec], says: str | None) -> None:
    data = build(kv, tensors).data
    if says is None:
        load(data)
    else:
        assert says in refused(data)


def test_bool_arrays_hold_bools() -> None:
    built = build([("t.b", "array:bool", [0, 1, 0])])
    built.data[-1] = 7
    assert "must be 0 or 1" in refused(built.data)


def test_names_must_be_utf8() -> None:
    assert "valid UTF-8" in refused(bytes(sample().data).replace(b"t.u16", b"t.\xff16"))
    assert "valid UTF-8" in refused(bytes(sample().data).replace(b"blk.0.ids", b"blk.\xff.ids"))


def test_scalar_tensor_has_one_dimension() -> None:
    with load(build((), [("s", "f32", (), np.float32(3).tobytes())]).data) as f:
        assert f.tensors["s"].ne == (1,) and f.dequantize("s").tolist() == [3.0]


def test_last_tensor_needs_no_padding_and_no_byte_may_miss() -> None:
    built = build((), [tensor("a", (3,)), tensor("b", (5,))])
    load(built.data)
    assert "tensor 'b' must end inside" in refused(built.data[:-1])


def test_long_names_do_not_flood_the_terminal() -> None:
    message = refused(build([("k" * 60_000, "bool", 1)]).patch("k" * 60_000 + ".value", 3))
    assert len(message) < 300


#: Offsets of an f16 scale in each type's block.
SCALES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q8_1": (0, 2), "q2_K": (80, 82),
    "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,),
    "iq3_xxs": (0,), "iq3_s": (0,), "iq1_s": (0,), "iq4_nl": (0,), "iq4_xs": (0,), "tq1_0": (52,), "tq2_0": (64,),
    "q1_0": (0,), "q2_0": (0,), "f16": (0,),
}  # fmt: skip


@pytest.mark.parametrize("type_name", SCALES)
def test_check_tensors_finds_bad_scales(type_name: str) -> None:
    t = TYPES[type_name]
    for offset in SCALES[type_name]:
        for value, what in ((np.inf, "Inf"), (np.nan, "NaN"), (-np.inf, "Inf")):
            raw = bytearray(random_blocks(type_name, t.block_size * 5))
            load(build((), [("w", type_name, (t.block_size * 5,), bytes(raw))]).data).check_tensors()
            at = 3 * t.type_size + offset
            raw[at : at + 2] = np.float16(value).tobytes()
            with pytest.raises(GGUFError, match=rf"{what} in tensor 'w' \({type_name}\) at (block|element) 3"):
                load(build((), [("w", type_name, (t.block_size * 5,), bytes(raw))]).data).check_tensors()


@pytest.mark.parametrize(
    ("type_name", "offset", "bad", "what"),
    [
        ("f32", 0, np.float32(np.nan).tobytes(), "NaN"),
        ("f64", 0, np.float64(np.inf).tobytes(), "Inf"),
        ("bf16", 0, b"\x80\x7f", "Inf"),
        ("bf16", 0, b"\x81\xff", "NaN"),
        ("q8_K", 0, np.float32(np.inf).tobytes(), "Inf"),
        ("mxfp4", 0, b"\xff", "NaN"),
        ("iq1_m", 48, b"\x00\x00\x00\x00\x00\xc0\x00\x70", "Inf"),  # f16 0x7c00 over four top nibbles
        *(
            ("iq1_m", 48, scale, "NaN")
            for scale in (  # and a further bit, of each of the other nibbles and of the third
                b"\x00\x10\x00\x00\x00\xc0\x00\x70",
                b"\x00\x00\x00\x10\x00\xc0\x00\x70",
                b"\x00\x00\x00\x00\x00\xd0\x00\x70",
            )
        ),
    ],
)
def test_check_tensors_other_layouts(type_name: str, offset: int, bad: bytes, what: str) -> None:
    t = TYPES[type_name]
    raw = bytearray(random_blocks(type_name, t.block_size * 5))
    load(build((), [("w", type_name, (t.block_size * 5,), bytes(raw))]).data).check_tensors()
    at = 2 * t.type_size + offset
    raw[at : at + len(bad)] = bad
    with pytest.raises(GGUFError, match=f"{what} in tensor 'w'.* 2\\."):
        load(build((), [("w", type_name, (t.block_size * 5,), bytes(raw))]).data).check_tensors()


def test_check_tensors_looks_past_the_first_chunk() -> None:
    values = np.zeros(3_000_000, np.float32)
    values[2_500_000] = np.nan
    with pytest.raises(GGUFError, match="at element 2500000"):
        load(build((), [("w", "f32", (3_000_000,), values.tobytes())]).data).check_tensors()


@settings(deadline=None, max_examples=60)
@given(
    strings=st.lists(st.binary(max_size=30), max_size=20),
    numbers=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20),
    order=st.sampled_from("<>"),
)
def test_any_strings_and_numbers_come_back(strings: list[bytes], numbers: list[int], order: str) -> None:
    f = load(build([("s", "array:string", strings), ("n", "array:i64", numbers)], order=order).data)
    assert [s.encode("utf-8", "surrogateescape") for s in f.metadata["s"]] == strings
    assert f.metadata["n"].tolist() == numbers
    assert f.metadata["n"].dtype.isnative


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=200), header=st.booleans())
def test_junk_is_refused_or_read(data: bytes, header: bool) -> None:
    with contextlib.suppress(GGUFError):
        load((b"GGUF\x03\0\0\0" if header else b"") + data)
