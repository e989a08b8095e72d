"""Gradients of whole tiny models of every architecture: a loss by all weights, against torch's own derivative.

In float64 torch differentiates the forward alone, by itself; the nodes that gradients() builds are evaluated apart from
it. Then the same nodes run in f32, as they would in training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import MODELS, tokens, write_model
from support.tiny_archs import DECODERS, ENCODERS

from graphrt import Graph, Tensor, gradients, new_input, ops, prepare
from graphrt.backend import Usage
from graphrt.models import load
from graphrt.models.arch.encoder import Texts
from graphrt.models.engine import SessionOptions
from graphrt.ops.recompute import training_graph
from graphrt.testing import dequantize
from graphrt.tools.conformance.run.exact import exact_values
from graphrt.tools.conformance.run.grad import relative

N, CELLS = 6, 8
OPTIONS = SessionOptions(n_ctx=CELLS, n_batch=N, type_k="f32", type_v="f32")


class Trained:
    """A loss of a tiny model with its gradients by every plain weight that it depends on, and the inputs' values."""

    def __init__(self, path: Path, encoder: bool) -> None:
        model = load(path, "cpu", exact=True)
        self.model = model
        result, values = (_encoded if encoder else _decoded)(model)
        labels = new_input("f32", *result.ne, name="labels")
        rng = np.random.default_rng(0)
        values["labels"] = rng.dirichlet(np.ones(result.ne[0]), result.n_rows).astype(np.float32)
        self.loss = ops.cross_entropy_loss(result, labels, name="loss")
        self.values = values
        leafs = Graph(self.loss).leafs
        self.weights = [t for t in leafs if _is_trained(t)]
        self.found = gradients(self.loss, self.weights)
        self.graph = training_graph(self.loss, self.found)

    def numbers(self) -> dict[Tensor, Any]:
        """What all leafs hold."""
        given: dict[Tensor, Any] = {}
        for leaf in self.graph.leafs:
            if leaf.buffer is None:
                given[leaf] = self.values[leaf.name]
                continue
            raw = leaf.buffer.read(leaf.offset, leaf.nbytes)
            shape = (*leaf.shape[:3], -1) if leaf.dtype.is_quantized else leaf.shape
            stored = raw.reshape(shape) if leaf.dtype.is_quantized else raw.view(_HOST[leaf.dtype.name]).reshape(shape)
            given[leaf] = dequantize(stored, leaf.dtype)
        return given

    def expected(self) -> list[torch.Tensor]:
        """The gradients by torch, in float64."""
        given = self.numbers()
        for t in self.weights:
            given[t] = torch.tensor(given[t], dtype=torch.float64).requires_grad_()
        values = exact_values(Graph(self.loss).nodes, given)
        found = torch.autograd.grad(values[self.loss].sum(), [given[t] for t in self.weights])
        return [g.reshape(t.shape) for g, t in zip(found, self.weights)]

    def exact(self) -> list[torch.Tensor]:
        values = exact_values(self.graph.nodes, self.numbers())
        return [values[t] for t in self.found]

    def in_f32(self) -> list[torch.Tensor]:
        exe = prepare(self.graph, "cpu")
        exe.write_all({name: v for name, v in self.values.items() if name in {t.name for t in self.graph.inputs}})
        exe.run()
        return [torch.tensor(exe.read(t)).double() for t in self.found]


_HOST = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}


def _is_trained(t: Tensor) -> bool:
    constant = t.buffer is None or t.buffer.usage is not Usage.WEIGHTS or t.dtype.kind != "float"
    # factors of the rotation are no weights, and what only chooses experts moves in steps
    return not constant and not t.name.startswith("rope_f") and "exp_probs_b" not in t.name


def _decoded(model: Any) -> tuple[Tensor, dict[str, Any]]:
    cache = model.session(OPTIONS).cache
    inputs = model.decoder.inputs(N, N, cache)
    places = inputs.places(np.arange(N)[None])
    values = {leaf.name: np.array(value, _HOST[leaf.dtype.name]).reshape(-1) for leaf, value in places}
    values["inp_tokens"], values["inp_out_ids"] = np.array(tokens()[:N], np.int32), np.arange(N, dtype=np.int32)
    return model.decoder.result(inputs), values


def _encoded(model: Any) -> tuple[Tensor, dict[str, Any]]:
    """Two texts of 4 and 2 tokens."""
    names = {"tokens": ("inp_tokens", N), "positions": ("inp_pos", N), "starts": ("attn_inp_q_starts", 3)}
    texts = Texts(**{key: new_input("i32", n, name=name) for key, (name, n) in names.items()})
    given = {"inp_tokens": tokens()[:N], "inp_pos": [0, 1, 2, 3, 0, 1], "attn_inp_q_starts": [0, 4, N]}
    return model.encoder.result(texts), {name: np.array(v, np.int32) for name, v in given.items()}


#: Through weights that are read as they are, to the plain ones: norms, biases, routers.
QUANTIZED = ("gemma2 Q4_0", "phi3-wide Q4_K", "gpt-oss MXFP4", "qwen3moe-wide Q6_K")


@pytest.mark.parametrize("name", [*MODELS, *DECODERS, *ENCODERS, *QUANTIZED])
def test_gradients_of_all_weights(tmp_path: Path, name: str) -> None:
    trained = Trained(write_model(tmp_path / "m.gguf", *name.split()), name in ENCODERS)
    expected = trained.expected()
    whole = torch.cat([e.reshape(-1) for e in expected]).norm()
    for weight, e, exact, f32 in zip(trained.weights, expected, trained.exact(), trained.in_f32()):
        assert e.norm() > 0 or (exact.norm() == 0), weight.name
        if e.norm() < 1e-12 * whole:  # a bias of k moves all logits of a row alike: nothing but rounding
            continue
        assert relative(exact, e) < 1e-9, weight.name
        assert float((f32 - e).norm()) < 1e-5 * float(e.norm() + 0.01 * whole), weight.name
