"""What configurations ask of AMD's compiler: it gets there, and nowhere else; `graphrt tune` tries it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.attention_plans import Shape, prepared

pytest.importorskip("triton")

from graphrt import ops, prepare
from graphrt.backends.triton import TritonBackend, device
from graphrt.backends.triton.kernels.flash_attn.configs import Config
from graphrt.graph import Graph
from graphrt.tensor import new_input
from graphrt.tools.explain.devices import DEVICES
from graphrt.tools.verbs.tune import Measured, _row_text, candidates

ASKED = Config(64, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16, pre_load_v=True)


@pytest.mark.parametrize("name", ["mi300x", "a100"])
def test_options_of_a_launch(name: str) -> None:
    target = device.Target.elsewhere(DEVICES[name].elsewhere)
    found, early = {}, {}
    for config in (ASKED, replace(ASKED, waves_per_eu=0, matrix_instr_nonkdim=0, pre_load_v=False)):
        exe = prepared(Shape(n_q=64).node(), TritonBackend(exact=False, target=target, config=config))
        steps = exe.splits[0].run.segments[0].steps  # type: ignore[attr-defined]
        step = next(s for s in steps if s.name == "flash_attn")
        found[config], early[config] = step.options, step.args["PRE_LOAD_V"]
    both = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16} if name == "mi300x" else {}
    plain = found.pop(replace(ASKED, waves_per_eu=0, matrix_instr_nonkdim=0, pre_load_v=False))
    assert list(early.values()) == [name == "mi300x", False]
    assert found == {ASKED: plain | both} and not both.keys() & plain.keys()


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_what_is_tried(form: str) -> None:
    tried = list(candidates(form, amd=True))
    assert {c.waves_per_eu for c in tried} == {0, 1, 2, 3, 4}
    assert {c.matrix_instr_nonkdim for c in tried} == ({16} if form == "decode" else {16, 32})
    assert len(set(tried)) == len(tried) and not any(c.waves_per_eu or c.pre_load_v for c in candidates(form))
    assert sum(c.pre_load_v for c in tried) == len(tried) // 2
    row = _row_text(form, 128, "half", Measured(ASKED, 1e-6))
    assert "Config(64, 32, 4, 1, per_sm=1, waves_per_eu=2, matrix_instr_nonkdim=16, pre_load_v=True)" in row
    assert "waves" not in _row_text(form, 128, "half", Measured(Config(64, 32, 4, 1), 1e-6))


@pytest.mark.skipif(device.unusable() is not None, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("mask", [None, "mask"])
def test_v_may_come_before_the_softmax(mask: str | None) -> None:
    """The same bits, with keys that end within a tile and heads of two parts."""
    q, k, v = (new_input(kind, 40, n, h, name=name) for name, kind, n, h in
               (("q", "f32", 5, 4), ("k", "f16", 77, 2), ("v", "f16", 77, 2)))  # fmt: skip
    node = ops.flash_attn_ext(q, k, v, new_input("f16", 77, 5, name="mask") if mask else None, 0.2)
    rng, found = np.random.default_rng(0), []
    values = {t: rng.normal(size=t.shape).astype(np.float16 if t.dtype.name == "f16" else np.float32)
              for t in node.sources()}  # fmt: skip
    for early in (False, True):
        exe = prepare(Graph(node), TritonBackend())
        for t, x in values.items():
            exe.write(t, x)
        steps = exe.splits[0].run.segments[0].steps  # type: ignore[attr-defined]
        next(s for s in steps if s.name == "flash_attn").args["PRE_LOAD_V"] = early
        exe.run()
        found.append(np.asarray(exe.read(node)))
    np.testing.assert_array_equal(*found)
