"""What configurations ask of AMD's compiler: it gets there, and nowhere else; `graphrt tune` tries it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.attention_plans import Shape, prepared

pytest.importorskip("triton")

from graphrt.backends.triton import TritonBackend, device
from graphrt.backends.triton.kernels.flash_attn.configs import Config
from graphrt.tools.explain.devices import DEVICES
from graphrt.tools.verbs.tune import Measured, _row_text, candidates

ASKED = Config(64, 32, 4, 1, waves_per_eu=2, matrix_instr_nonkdim=16)


@pytest.mark.parametrize("name", ["mi300x", "a100"])
def test_options_of_a_launch(name: str) -> None:
    target = device.Target.elsewhere(DEVICES[name].elsewhere)
    found = {}
    for config in (ASKED, replace(ASKED, waves_per_eu=0, matrix_instr_nonkdim=0)):
        exe = prepared(Shape(n_q=64).node(), TritonBackend(exact=False, target=target, config=config))
        steps = exe.splits[0].run.segments[0].steps  # type: ignore[attr-defined]
        found[config] = next(s for s in steps if s.name == "flash_attn").options
    both = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16} if name == "mi300x" else {}
    plain = found.pop(replace(ASKED, waves_per_eu=0, matrix_instr_nonkdim=0))
    assert found == {ASKED: plain | both} and not both.keys() & plain.keys()


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_what_is_tried(form: str) -> None:
    tried = list(candidates(form, amd=True))
    assert {c.waves_per_eu for c in tried} == {0, 1, 2, 3, 4}
    assert {c.matrix_instr_nonkdim for c in tried} == ({16} if form == "decode" else {16, 32})
    assert len(set(tried)) == len(tried) and not any(c.waves_per_eu for c in candidates(form))
    row = _row_text(form, 128, "half", Measured(ASKED, 1e-6))
    assert "Config(64, 32, 4, 1, per_sm=1, waves_per_eu=2, matrix_instr_nonkdim=16)" in row
    assert "waves" not in _row_text(form, 128, "half", Measured(Config(64, 32, 4, 1), 1e-6))
