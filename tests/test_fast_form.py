"""The fast form of the CPU backend on the conformance cases of every op that it has a form of."""

from __future__ import annotations

import numpy as np
import pytest
from judging import Judged

from graphrt import Graph, get_backend, new_input, ops, prepare
from graphrt.backends.cpu import fast
from graphrt.backends.cpu.lower import _METHODS
from graphrt.dtypes import dtype
from graphrt.testing import Case, all_cases, nmse, quantize

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)

CASES = [case for case in all_cases() if case.op in _METHODS and not case.needs_bytes]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fast_form_is_right(case: Case) -> None:
    judged = Judged(case)
    exe = judged.run(get_backend("cpu", exact=False))
    judged.check(exe)
    judged.check_sources_unchanged(exe)


@pytest.mark.parametrize("tokens", [2, 11])
@pytest.mark.parametrize("kind", ["q8_0", "f32"])
def test_experts_change_between_runs(kind: str, tokens: int) -> None:
    """A prepared graph; numbers of no expert leave nothing of the run before in their rows."""
    x, ids = new_input("f32", 32, 1, tokens, name="x"), new_input("i32", 2, tokens, name="ids")
    out = ops.mul_mat_id(new_input(kind, 32, 5, 4, name="w"), x, ids)
    exe = prepare(Graph(out), get_backend("cpu", exact=False))
    rng = np.random.default_rng(tokens)
    w = rng.integers(-127, 128, (4, 5, 32)).astype(np.float32)
    w[..., 0] = 127  # so that q8_0 holds them as they are
    exe.write("w", w if kind == "f32" else quantize(w, dtype(kind)))
    for least, most in ((0, 4), (-1, 5), (1, 3)):
        values, chosen = rng.standard_normal((tokens, 1, 32)), rng.integers(least, most, (tokens, 2))
        chosen[0] = least, most - 1
        exe.write("x", values)
        exe.write("ids", chosen)
        exe.run()
        known = (chosen >= 0) & (chosen < 4)
        expected = np.einsum("tsmk,tk->tsm", w[np.where(known, chosen, 0)].astype(np.float64), values[:, 0])
        found = exe.read(out).reshape(expected.shape)
        assert nmse(found[known], expected[known]) < 1e-12
        assert np.isnan(found[~known]).all()
