"""Tensor: strides, sizes, views, names; and the table of types."""

from __future__ import annotations

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphrt import new_input, new_tensor, ops
from graphrt.dtypes import REMOVED_IDS, TYPES, dtype, dtype_by_id
from graphrt.errors import GraphError
from graphrt.tensor import Flag, Tensor


def test_the_type_table_is_gguf_s() -> None:
    of_files = {name: t for name, t in TYPES.items() if t.id is not None}
    assert set(TYPES) - set(of_files) == {"f8_e4m3", "f8_e5m2"}
    for name, t in of_files.items():
        known = gguf.GGMLQuantizationType(t.id) if t.id in list(gguf.GGMLQuantizationType) else None
        if known is not None:
            assert known.name.lower() == name.lower()
            if (
                name != "q8_1"
            ):  # gguf says 40 bytes; ggml's block_q8_1 has two halves and 32 bytes, and no file holds it
                assert gguf.GGML_QUANT_SIZES[known] == (t.block_size, t.type_size)
        assert dtype_by_id(t.id) is t and dtype(name.upper()) is t
    assert {q.value for q in gguf.GGMLQuantizationType} <= {t.id for t in TYPES.values()}
    assert not set(REMOVED_IDS) & {t.id for t in TYPES.values()}
    assert dtype_by_id(4) is None


def test_an_unknown_type_lists_the_known() -> None:
    with pytest.raises(GraphError, match=r"must be one of f32, f16, .*got 'f12'"):
        dtype("f12")


def test_strides_of_a_plain_and_a_quantized_tensor() -> None:
    a, q = new_tensor("f16", 5, 4, 3, 2), new_tensor("q4_0", 64, 3)
    assert a.ne == (5, 4, 3, 2) and a.nb == (2, 10, 40, 120) and a.shape == (2, 3, 4, 5)
    assert q.ne == (64, 3, 1, 1) and q.nb == (18, 36, 108, 108) and q.nbytes == q.data_nbytes == 108
    assert (a.n_elements, a.n_rows, a.n_dims, q.n_dims) == (120, 24, 4, 2)


@pytest.mark.parametrize(
    ("ne", "rule"),
    [
        ((), "1 to 4 dimensions, got 0"),
        ((1,) * 5, "1 to 4 dimensions, got 5"),
        ((3, 0), "at least 1"),
        ((-1,), "at least 1"),
    ],
)
def test_bad_shapes(ne: tuple[int, ...], rule: str) -> None:
    with pytest.raises(GraphError, match=rule):
        new_tensor("f32", *ne)


def test_a_row_holds_whole_blocks() -> None:
    with pytest.raises(GraphError, match="whole blocks of 32 elements, got 33"):
        new_tensor("q8_0", 33)


def test_a_view_of_a_view_points_at_the_root() -> None:
    a = new_tensor("f32", 8, 4)
    b = ops.view(a, (8, 2), offs=32)
    c = ops.view(b, (4,), offs=48)
    assert c.root is c.view_src is a and c.view_offs == 80 and b.view_offs == 32
    assert ops.reshape(b, 16).view_offs == 32 and a.root is a


def test_a_view_of_a_written_view_points_at_the_root() -> None:
    cache = new_tensor("f16", 8, 16)
    half = ops.view(cache, (8, 8), offs=8 * 16)
    written = ops.set_rows(new_input("f32", 8, 2, name="rows"), new_input("i64", 2, name="ids"), half)
    assert (written.root, written.view_offs, written.nb) == (cache, 128, half.nb)
    assert ops.view(written, (8,), offs=16).view_offs == 144


def test_contiguity() -> None:
    a = new_tensor("f32", 8, 4, 3)
    assert a.is_contiguous and a.has_contiguous_rows
    assert not ops.transpose(a).is_contiguous and not ops.transpose(a).has_contiguous_rows
    rows = ops.view(a, (4, 4), a.nb[1:2])
    assert not rows.is_contiguous and rows.has_contiguous_rows
    assert ops.view(a, (4, 1), a.nb[1:2]).is_contiguous, "a stride over one element says nothing"
    assert ops.transpose(new_tensor("f32", 1, 4)).is_contiguous
    q = new_tensor("q8_0", 64, 4)
    assert q.is_contiguous and ops.view(q, (32, 1), q.nb[1:2]).is_contiguous
    assert not ops.view(q, (32, 4), q.nb[1:2]).is_contiguous


def test_rows_of_one_element_or_block_have_no_gaps() -> None:
    a, q = new_tensor("f32", 4, 3), new_tensor("q8_0", 64, 4)
    assert ops.transpose(ops.view(a, (4, 1), a.nb[1:2])).has_contiguous_rows
    assert ops.view(q, (32, 4), q.nb[1:2]).has_contiguous_rows


def test_a_view_of_quantized_rows_without_strides() -> None:
    q = new_tensor("q8_0", 64, 4)
    assert ops.view(q, (64, 3), offs=68).nb == q.nb[:2] + (3 * 68, 3 * 68)
    assert ops.view(q, (32, 2)).nb == (34, 34, 68, 68)


@given(
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.permutations(range(4)),
    st.sampled_from(["f32", "f16", "i64"]),
)
def test_nbytes_reaches_the_last_element(ne: list[int], axes: list[int], dt: str) -> None:
    """Whatever the order of dimensions, a permuted look spans exactly its root."""
    a = new_tensor(dt, *ne)
    p = ops.permute(a, *axes)
    assert p.nbytes == a.nbytes == p.data_nbytes
    assert sorted(zip(p.ne, p.nb)) == sorted(zip(a.ne, a.nb))
    assert all(p.ne[axis] == a.ne[i] for i, axis in enumerate(axes))


def test_nbytes_of_a_gapped_view_ends_with_its_last_element() -> None:
    a = new_tensor("f32", 8, 4)
    assert ops.view(a, (3, 4), a.nb[1:2]).nbytes == 3 * 32 + 12
    q = new_tensor("q8_0", 64, 4)
    assert ops.view(q, (32, 4), q.nb[1:2]).nbytes == 3 * 68 + 34


def test_names() -> None:
    a = new_tensor("f32", 4, name="a")
    assert a.named("b") is a and a.name == "b"
    with pytest.raises(GraphError, match="at most 63 characters, got 64"):
        a.named("x" * 64)
    assert repr(ops.scale(a, 2.0, name="c")) == "<c = SCALE(b) f32[4]>"


def test_flags_and_sources() -> None:
    a = new_input("f32", 4, name="a")
    assert a.flags == Flag.INPUT and a.as_output().flags == Flag.INPUT | Flag.OUTPUT
    q, k = new_tensor("f32", 8, 1), new_tensor("f32", 8, 2)
    node = ops.flash_attn_ext(q, k, k, None, 1.0)
    assert node.src == (q, k, k, None, None, None, None, None) and list(node.sources()) == [q, k, k]
    assert node["q"] is q and node["v"] is k and node["mask"] is None and node["sinks"] is None
    assert node.sources_by_name() == {"q": q, "k": k, "v": k}
    shorter = Tensor("f32", (4,), op="SOFT_MAX", src=[a])  # absent ones at the end may be left out
    assert shorter["a"] is a and shorter["mask"] is None
    with pytest.raises(
        GraphError, match="FLASH_ATTN_EXT has q, k, v, mask, sinks, attn_bias, k_scale, v_scale; got 'bias'"
    ):
        node["bias"]
    with pytest.raises(GraphError, match="NONE has no sources; got 'q'"):
        a["q"]
    with pytest.raises(TypeError, match="not iterable"):
        list(node)  # type: ignore[call-overload]
    with pytest.raises(GraphError, match="at most 10 sources, MANY got 11"):
        Tensor("f32", (4,), op="MANY", src=[a] * 11)
