"""Parameters as ggml's words, addresses in a dump, and what a file keeps of an attention's precision."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import numpy as np
import pytest

import graphrt
from graphrt import get_backend, new_input, ops, prepare
from graphrt.errors import GraphError
from graphrt.ops import FlashAttnParams, RopeParams
from graphrt.ops.copy import ConcatParams
from graphrt.ops.norm import NormParams
from graphrt.ops.soft_max import SoftMaxParams
from graphrt.ops.sort import ArgsortParams
from graphrt.ops.unary import GluParams, UnaryParams
from graphrt.tensor import Tensor
from graphrt.tools.conformance.cases import test_file
from graphrt.tools.inspect import graph_json
from graphrt.tools.inspect.describe import describe
from graphrt.tools.inspect.op_params import words_of

PARAMS = [
    ("NORM", NormParams(1e-5)), ("SOFT_MAX", SoftMaxParams(0.125, 8.0)), ("CONCAT", ConcatParams(2)),
    ("ARGSORT", ArgsortParams(True)), ("UNARY", UnaryParams("gelu_quick")), ("GLU", GluParams("geglu", swapped=True)),
    ("GLU", GluParams("swiglu_oai", alpha=1.75, limit=7.0)), ("ROPE", RopeParams(64, "neox", 5e5, 0.25, 4096, 1.0)),
    ("FLASH_ATTN_EXT", FlashAttnParams(0.125, 8.0, 30.0, prec=10)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "params"), PARAMS, ids=[op for op, _ in PARAMS])
def test_words_are_read_back(op: str, params: object) -> None:
    """By what reads llama.cpp's files of nodes."""
    words = words_of(op, dataclasses.asdict(params))  # type: ignore[call-overload]
    assert words is not None and all(-(2**31) <= w < 2**31 for w in words)
    made = test_file._PARAMS[op](test_file._Words(words), (1, 1, 1, 1), [])
    for field in dataclasses.fields(made):
        assert (
            getattr(made, field.name) == np.float32(value)
            if isinstance(value := getattr(params, field.name), float)
            else getattr(made, field.name) == value
        )


def test_an_attentions_words_are_ggmls() -> None:
    words = words_of("FLASH_ATTN_EXT", dataclasses.asdict(FlashAttnParams(0.125, 0.0, -0.0, prec=10)))
    assert words == (struct.unpack("<i", struct.pack("<f", 0.125))[0], 0, -(2**31), 10)
    assert words_of("REPEAT", {"ne": (1, 1, 1, 1)}) is None and words_of("ADD", None) is None


def attention(prec: int = 0, kind: str = "f16") -> Tensor:
    q, k = new_input("f32", 64, 3, 4, name="q"), new_input(kind, 64, 40, 2, name="k")
    return ops.flash_attn_ext(q, k, k, None, 0.125, prec=prec, name="attn")


@pytest.mark.parametrize("prec", [0, 10])
def test_a_graphs_file_keeps_the_precision(prec: int) -> None:
    info = describe(graphrt.Graph(attention(prec)))
    said = graph_json.to_json(info)
    node = said["tensors"][-1]
    assert node["params"]["prec"] == node["op_params"][3] == prec
    again = graph_json.from_json(said)
    assert again == info and graph_json.graph_of(again).nodes[0].params.prec == prec
    node["op_params"][3] = 10 - prec
    with pytest.raises(GraphError, match="op_params must be"):
        graph_json.graph_of(graph_json.from_json(said))


def test_a_file_of_llama_cpps_nodes_keeps_it(tmp_path: Path) -> None:
    op, words = test_file.OPS.index("FLASH_ATTN_EXT"), words_of("FLASH_ATTN_EXT", vars(FlashAttnParams(0.5, prec=10)))
    assert words is not None
    q, k, out = (64, 3, 4, 1), (64, 40, 2, 1), (64, 4, 3, 1)

    def source(kind: int, ne: tuple[int, ...], size: int) -> list[int]:
        return [kind, *ne, size, *(size * int(np.prod(ne[:i])) for i in (1, 2, 3))]

    line = [op, 0, *out, len(words), *words, 3, *source(0, q, 4), *source(1, k, 2), *source(1, k, 2)]
    (tmp_path / "nodes.txt").write_text(" ".join(map(str, line)) + " attn\n")
    (case,), unknown = test_file.file_cases(tmp_path / "nodes.txt")
    assert not unknown and case.without_values().params == FlashAttnParams(0.5, prec=10)


def test_the_precision_must_be_one_that_there_is() -> None:
    with pytest.raises(GraphError, match=r"prec must be 0 \(default\), 10 \(f32\) or 8 \(8-bit floats\), got 5"):
        attention(5)


def test_a_tensors_address_is_where_its_bytes_are() -> None:
    import ctypes

    node = attention()
    exe = prepare(graphrt.Graph(node), get_backend("cpu"))
    values = np.random.default_rng(0).standard_normal(node.src[0].shape).astype(np.float32)  # type: ignore[union-attr]
    exe.write("q", values)
    (q,) = (t for t in describe(exe).tensors if t.name == "q")
    assert q.place is not None and q.place.address
    assert ctypes.string_at(q.place.address, values.nbytes) == values.tobytes()
