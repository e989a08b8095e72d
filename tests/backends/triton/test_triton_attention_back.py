"""Gradients of attention of the triton backend in Triton's interpreter: its cases in every form, one launch for several
gradients, equal bits, and what is told of the choice."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt import ops, prepare
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.kernels.flash_attn.backward.forms import FORMS
from graphrt.backends.triton.kernels.flash_attn.backward.keys import _seeing_span
from graphrt.backends.triton.kernels.flash_attn.backward.pieces import BackSpec
from graphrt.backends.triton.kernels.flash_attn.visits import visited_span
from graphrt.backends.triton.launch import Launch
from graphrt.errors import BackendError
from graphrt.graph import Graph
from graphrt.ops.cases.flash_attn_back import Axes
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.tensor import Tensor, new_input
from graphrt.testing import all_cases
from graphrt.tools.conformance.cases.sources import make_backend
from graphrt.tools.conformance.run.step import run_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Array = npt.NDArray[np.float32]
OPS = ("FLASH_ATTN_BACK", "FLASH_ATTN_VARLEN_BACK")
CASES = {str(case): case for op in OPS for case in all_cases(op)}
#: Without those of several tiles of 16 bits, which take seconds each: test_triton_back_hopper.py is for them.
SMALL = [name for name in CASES if not re.search(r"n_q=\d{2,},n_kv=\d{3},.*d=.(64|128|256),.*type=b?f16", name)]
#: Every so many of them run here; on a GPU the conformance tool runs all.
SOME = {"split": SMALL[::5], "fused-q": SMALL[1::9], "fused-k": SMALL[2::7]}
#: What a bug was once found by, or would be.
ALWAYS = {
    "split": (
        "FLASH_ATTN_BACK(of=k,type=f16,softcap=3.0,sinks=True,layout=cache)",
        "FLASH_ATTN_BACK(of=q,type=f16,d=[64,64],bias=[1,1],size=1e-07)",
        "FLASH_ATTN_BACK(of=k,type=f16,d=[64,64],bias=[1,1],size=1000000.0)",
        "FLASH_ATTN_BACK(of=attn_bias,type=f16,n_q=40,mask=causal,softcap=2.0,bias=[1,1],dropout_p=0.3)",
    ),
    "fused-k": ("FLASH_ATTN_BACK(of=q,type=f16,softcap=3.0,sinks=True,layout=cache)",),
}


def _named(name: str) -> str:
    """The case whose parameters are these, in any order."""
    return next(n for n in CASES if n.partition("(")[0] == name.partition("(")[0] and _parts(n) == _parts(name))


def _parts(name: str) -> list[str]:
    inner, depth, parts = name.partition("(")[2][:-1], 0, [""]
    for letter in inner:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return sorted(parts)


CHOSEN = [
    (form, name)
    for form in FORMS
    for name in dict.fromkeys([*SOME[form], *(_named(n) for n in ALWAYS.get(form, ()))])
]  # fmt: skip


@pytest.mark.parametrize(("form", "name"), CHOSEN)
def test_case(form: str, name: str) -> None:
    outcome = run_case(CASES[name], TritonBackend(backward=form), 0)
    assert outcome.status == "pass", outcome.message


def test_every_feature_is_among_them() -> None:
    names = [name for _, name in CHOSEN]
    for part in (
        "of=q", "of=k", "of=v", "of=sinks", "of=attn_bias", "softcap", "max_bias", "layout=cache", "d_lse", "type=f16",
        "type=bf16", "dropout_p", "VARLEN", "window", "causal=False",
    ):  # fmt: skip
        assert any(part in name for name in names), part
    assert Axes("q").mask == "random"


def _attention(
    form: str = "split", dropout_p: float = 0.25, kind: str = "f16", n: int = 70
) -> tuple[Any, dict[str, Any]]:
    """An executable of all gradients of one attention, and its nodes; inputs are written."""

    def leaf(name: str, type_: str, *ne: int) -> Tensor:
        return new_input(type_, *ne, name=name)

    q, k, v = leaf("q_", "f32", 32, n, 4), leaf("k_", kind, 32, n, 2), leaf("v_", kind, 32, n, 2)
    out, d_out, lse = leaf("out", "f32", 32, 4, n), leaf("d_out", "f32", 32, 4, n), leaf("lse", "f32", 4, n)
    mask, bias, sinks = leaf("mask", "f16", n, n), leaf("bias", "f32", n, n, 2), leaf("sinks_", "f32", 4)
    params = FlashAttnParams(0.2, dropout_p=dropout_p, seed=7, offset=3)
    nodes = {
        of: ops.flash_attn_back(of, d_out, q, k, v, out, lse, params, mask=mask, attn_bias=bias, sinks=sinks, name=of)
        for of in ("q", "k", "v", "attn_bias", "sinks")
    }
    exe = prepare(Graph(*nodes.values()), TritonBackend(backward=form))
    rng = np.random.default_rng(5)
    for t in (q, k, v, out, d_out, bias, sinks):
        exe.write(t, rng.standard_normal(t.shape).astype(np.float16 if t.dtype.name == "f16" else np.float32))
    exe.write(lse, rng.uniform(4, 5, lse.shape).astype(np.float32))
    exe.write(mask, np.where(np.tri(n, dtype=bool), 0, -np.inf).astype(np.float16).reshape(mask.shape))
    return exe, nodes


def _run(exe: Any, nodes: dict[str, Any]) -> dict[str, Array]:
    exe.run()
    return {of: np.array(exe.read(node)) for of, node in nodes.items()}


@pytest.mark.parametrize("form", FORMS)
def test_one_launch_for_several_gradients(form: str) -> None:
    """All gradients of an attention are one step, and what each is in the form "split"; the same bits each time."""
    exe, nodes = _attention(form)
    groups = [g for split in exe.splits for g in split.groups if len(g.nodes) > 1]
    assert [g.kernel for g in groups] == ["attention_back"] and len(groups[0].nodes) == 5
    first, again, plain = _run(exe, nodes), _run(exe, nodes), _run(*_attention("split"))
    for of in nodes:
        np.testing.assert_array_equal(first[of], again[of])
        if form == "split" or of in ("attn_bias", "sinks"):
            np.testing.assert_array_equal(first[of], plain[of])
        else:
            np.testing.assert_allclose(first[of], plain[of], atol=2e-3 * np.abs(plain[of]).max())
        assert np.abs(first[of]).max() > 0


def test_what_is_told_of_the_choice() -> None:
    exe, _ = _attention("fused-q")
    [step] = [s for split in exe.splits for s in split.run.steps if len(s.group.nodes) == 5]
    facts = list(step.choice.facts())
    assert ("form", facts[0][1]) == facts[0] and facts[0][1].startswith("fused-q: ")
    kernels = [text for of, text in facts if of == "kernel"]
    assert [text.partition(" ")[0] for text in kernels] == ["fused-q", "bias", "sinks"]
    assert any(of == "dropout" and "0.25" in text for of, text in facts)
    assert any(of == "repeatable" and "all but those of k and v" in text for of, text in facts)
    data = step.choice.data()["gradients"]
    assert data["form"] == "fused-q" and [k["repeatable"] for k in data["kernels"]] == [False, True, True]


def test_a_form_that_does_not_serve_leaves_the_work_to_split() -> None:
    q, k, v = (new_input("f16" if name != "q" else "f32", 320, 8, 1, name=name) for name in "qkv")
    out, lse = new_input("f32", 320, 1, 8, name="out"), new_input("f32", 1, 8, name="lse")
    node = ops.flash_attn_back("k", out, q, k, v, out, lse, FlashAttnParams(1.0))
    exe = prepare(Graph(node), TritonBackend(backward="fused-k"))
    [step] = exe.splits[0].run.steps
    assert step.choice.kernel == "keys" and "320" in step.choice.refused["fused-k"]


def test_names_of_forms() -> None:
    with pytest.raises(BackendError, match="split, fused-q, fused-k"):
        TritonBackend(backward="fused")
    backend = make_backend("triton-fused-k")
    assert isinstance(backend, TritonBackend) and backend.backward == "fused-k" and backend.exact


@triton.jit
def _both_spans(p_keys, p_queries, n_qt, n_blocks, queries, keys, window, spec: tl.constexpr):
    for j in range(0, n_blocks):
        first, full_first, full_end, end = _seeing_span(
            j * spec.block_n, keys, queries, keys - queries, window, spec
        )  # fmt: skip
        _store(p_keys + 4 * j, first, full_first, full_end, end)
    for i in range(0, n_qt):
        first, full_first, full_end, end, _, _ = visited_span(
            i * spec.block_m, queries, keys, keys - queries, 0, window, 1, spec.block_m, spec.block_n, spec.causal,
            spec.window, False,
        )  # fmt: skip
        _store(p_queries + 4 * i, first, full_first, full_end, end)


@triton.jit
def _store(p, a, b, c, d):
    tl.store(p, a)
    tl.store(p + 1, b)
    tl.store(p + 2, c)
    tl.store(p + 3, d)


def test_who_sees_keys_is_who_they_are_seen_by() -> None:
    """Tiles of queries that _seeing_span() names for keys are those whose visited_span() has them."""
    rng = np.random.default_rng(3)
    for _ in range(24):
        m, n = (int(2 ** rng.integers(4, 7)) for _ in range(2))
        queries, keys, window = int(rng.integers(1, 200)), int(rng.integers(1, 200)), int(rng.integers(0, 2) * 37)
        spec = BackSpec(
            16, 16, 16, 0, 16, 0, m, n, tl.float16, "ieee", False, False, False, False, True, bool(rng.integers(0, 2)),
            window > 0, False, False, False, False,
        )  # fmt: skip
        tiles, blocks = -(-queries // m), -(-keys // n)
        seeing, seen = (torch.zeros(count, 4, dtype=torch.int32) for count in (blocks, tiles))
        args = {"p_keys": seeing, "p_queries": seen, "n_qt": tiles, "n_blocks": blocks, "queries": queries}
        Launch(_both_spans, (1,), args | {"keys": keys, "window": window, "spec": spec})()
        for j, (first, full_first, full_end, end) in enumerate(seeing.tolist()):
            assert list(range(first, end)) == [i for i, s in enumerate(seen.tolist()) if s[0] <= j < s[3]]
            full = {i for i, s in enumerate(seen.tolist()) if s[1] <= j < s[2]}
            assert set(range(full_first, full_end)) <= full and first <= full_first <= full_end <= end
