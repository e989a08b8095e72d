"""Weights that a step of training keeps in f16: the same as without, also when adapters change between runs."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from graphrt import Graph, Tensor, new_input, ops, prepare
from graphrt.backend import Usage
from graphrt.backends.triton import device
from graphrt.errors import BackendError
from graphrt.tensor import new_tensor
from graphrt.testing import nmse, quantize
from graphrt.tools.memory.report import kept_by_backend

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.kernels.products import trained_fusions

K, N, RANK, ROWS = 64, 12, 16, (33, 20)


def _leaf(backend: TritonBackend, name: str, *ne: int, kind: str = "f32") -> Tensor:
    leaf, rng = new_tensor(kind, *ne, name=name), np.random.default_rng(len(name) + ne[1])
    values = rng.standard_normal(leaf.shape).astype(np.float32)
    if kind == "f32":
        leaf.buffer = backend.alloc(leaf.nbytes, Usage.STATE)
        leaf.buffer.write(0, values.reshape(-1).view(np.uint8))
    else:
        leaf.buffer = backend.hold(leaf, np.ascontiguousarray(quantize(values, leaf.dtype, rng)).view(np.uint8))
    return leaf


def _run(keep: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[np.ndarray], list[str]]:
    """Products of one x and its gradient, in two runs with other adapters; and the kernels that ran."""
    monkeypatch.setattr(trained_fusions, "MORE_THAN_TOKENS", 8)
    monkeypatch.setenv("GRAPHRT_KEEP_WEIGHTS", keep)
    backend, x, outs = TritonBackend(exact=False), new_input("f32", K, N, name="x"), []
    total: Tensor | None = None
    adapters = []
    for i, m in enumerate(ROWS):
        w, a, b = (_leaf(backend, *args) for args in ((f"w{i}", K, m), (f"a{i}", K, RANK), (f"b{i}", RANK, m)))
        w = _leaf(backend, f"w{i}", K, m, kind="q8_0")
        low = ops.scale(ops.mul_mat(a, x), 2.0)
        outs.append(ops.add(ops.mul_mat(w, x), ops.mul_mat(b, low)))
        d = ops.scale(outs[-1], 0.5)
        v = ops.out_prod(b, ops.transpose(d))
        of_x = ops.add(ops.out_prod(w, ops.transpose(d)), ops.out_prod(a, ops.transpose(v)))
        total = of_x if total is None else ops.add(of_x, total)  # the last one first
        adapters += [a, b]
    assert total is not None
    exe = prepare(Graph(*outs, total), backend)
    (split,) = exe.splits
    assert {"trained_products", "gradient_of_x"} <= {g.kernel for g in split.groups}
    found = []
    for run in range(2):
        for leaf in adapters if run else ():
            assert leaf.buffer is not None
            values = np.random.default_rng(leaf.ne[1]).standard_normal(leaf.n_elements).astype(np.float32)
            leaf.buffer.write(0, values.view(np.uint8))
        exe.write(x, np.random.default_rng(run).standard_normal((N, K)).astype(np.float32))
        exe.run()
        found += [np.array(exe.read(t)) for t in (*outs, total)]
    # Rows of both weights and of both adapters, of K and as many columns as rows of adapters, in whole lines of 64.
    assert kept_by_backend(exe) == ({"triton": 2 * (sum(ROWS) + 2 * RANK) * 128} if keep != "0" else {})
    return found, [launch.name for step in split.run.steps for launch in step.launches]


def test_kept_weights_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, launches = _run("1M", monkeypatch)
    anew, others = _run("0", monkeypatch)
    anew_only = "dequantize_groups"  # the backward product's: it reads what the forward's has left
    assert anew_only in others and anew_only not in launches
    for a, b in zip(kept, anew, strict=True):
        assert nmse(a, b) < 1e-11  # sums in another order
    assert not np.array_equal(kept[0], kept[3])


def test_a_size_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="GRAPHRT_KEEP_WEIGHTS must be a number of bytes such as 16G"):
        _run("many", monkeypatch)
