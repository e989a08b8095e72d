"""Score functions of the triton backend in Triton's interpreter: values and gradients in each schedule, what they leave
as it is, and who refuses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from graphrt.backends.triton import device

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support import varlen_emulation
from support.aot_arch import target_of
from support.gluon_emulator import Gl, Memory, Value, rebuilt
from support.named_cases import assert_passes, named_case

from graphrt import ops, prepare
from graphrt.backend import Usage, get_backend
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.describe import AttentionChoice
from graphrt.backends.triton.kernels.flash_attn import gluon_score, gluon_score_math, portable, score_code
from graphrt.backends.triton.kernels.flash_attn.backward.kernels import back_kernels_of
from graphrt.backends.triton.kernels.flash_attn.backward.problem import BackProblem
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.hopper.specs import TileSpec
from graphrt.backends.triton.kernels.flash_attn.kernel import Scratch
from graphrt.backends.triton.kernels.flash_attn.kernels import kernels_of
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.memory import allocate
from graphrt.graph import Graph
from graphrt.ops import score
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.flash_attn_ext import FlashAttnParams
from graphrt.ops.score_tree import packed
from graphrt.tensor import new_input

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
#: op and what stands in the case.
WANTED = {
    "positions, sequences and heads": ("FLASH_ATTN_EXT", r"n_q=19,.*score=branches"),
    "one query": ("FLASH_ATTN_EXT", r"n_q=1,.*mask=window.*score=branches"),
    "-inf beside a softcap and sinks": ("FLASH_ATTN_EXT", r"n_q=70,.*score=hides"),
    "NaN that the mask hides": ("FLASH_ATTN_EXT", r"spoil=nan.*score=temperature"),
    "the denominators": ("FLASH_ATTN_LSE", r"n_q=19,.*score=smooth"),
    "gradient of q": ("FLASH_ATTN_BACK", r"of=q,.*score=smooth"),
    "gradient of k": ("FLASH_ATTN_BACK", r"of=k,.*score=branches"),
    "gradient of k, hidden keys": ("FLASH_ATTN_BACK", r"of=k,.*score=hides"),
    "gradient of a bias": ("FLASH_ATTN_BACK", r"of=attn_bias,.*score=branches"),
}


@pytest.mark.parametrize("what", WANTED)
def test_case(what: str) -> None:
    assert_passes(*WANTED[what])


def _attention(function: score.Expr | None, n_q: int = 1, **given: Any) -> Any:
    sources = (("q", "f32", n_q, 4), ("k", "f16", 300, 2), ("v", "f16", 300, 2))
    leaves = [new_input(kind, 64, n, heads, name=name) for name, kind, n, heads in sources]
    mask = new_input("f16", 300, n_q, name="mask")
    return ops.flash_attn_ext(*leaves, mask, 0.2, score=function, **given), [*leaves, mask]


def _result(backend: Any, function: score.Expr | None, n_q: int) -> Any:
    node, leaves = _attention(function, n_q)
    exe = prepare(Graph(node), backend)
    rng = np.random.default_rng(0)
    for t in leaves[:3]:
        exe.write(t, rng.normal(size=t.shape).astype(np.float16 if t.dtype.name == "f16" else np.float32))
    mask = np.zeros(leaves[3].shape, np.float16)
    mask[..., 290:] = -np.inf
    exe.write(leaves[3], mask)
    exe.run()
    return np.asarray(exe.read(node))


@pytest.mark.parametrize("schedule", ["tile", "split", "stream_k"])
def test_the_same_in_every_schedule(schedule: str) -> None:
    function = SCORES["branches"](4, 300)
    found = _result(TritonBackend(schedule=schedule), function, 5)
    np.testing.assert_allclose(found, _result(get_backend("cpu"), function, 5), atol=2e-3)


@pytest.mark.parametrize("of", ["k", "v"])
def test_a_query_that_is_not_there_may_be_anything(of: str) -> None:
    """Rows past the last query have a score of 0, of which this function and its slope make NaN: no gradient of a key
    may see it."""
    d_out, q = new_input("f32", 16, 1, 3, name="d_out"), new_input("f32", 16, 3, 1, name="q")
    k, v, lse = (new_input(kind, *ne, name=name) for name, kind, *ne in
                 (("k", "f16", 16, 20, 1), ("v", "f16", 16, 20, 1), ("lse", "f32", 1, 3)))  # fmt: skip
    s = score.symbols()[0]
    text, numbers = score.as_params(s / score.sqrt(s * s))
    params = FlashAttnParams(0.5, score=text, score_numbers=numbers)
    node = ops.flash_attn_back(of, d_out, q, k, v, d_out, lse, params)
    exe = prepare(Graph(node), TritonBackend())
    rng = np.random.default_rng(0)
    for t in (d_out, q, k, v, lse):
        exe.write(t, rng.normal(size=t.shape).astype(np.float16 if t.dtype.name == "f16" else np.float32) + 3)
    exe.run()
    assert np.isfinite(exe.read(node)).all()


def _problem(node: Any) -> Problem:
    return Problem(attention_of(node), lambda t: (allocate(t.nbytes, Usage.COMPUTE, "cpu"), 0))


def test_none_and_identity_launch_the_same() -> None:
    plain, same = (portable.Forward(_problem(_attention(f)[0]), target_of("sm_90")) for f in (None, score.identity()))
    args = [kernel.launches(None, False, Scratch("cpu"))[0].args for kernel in (plain, same)]
    assert all(x["SCORE"] is None for x in args)
    constants = [{name: x for name, x in each.items() if not isinstance(x, torch.Tensor)} for each in args]
    assert constants[0] == constants[1]


@pytest.mark.parametrize("n_q", [1, 64])
@pytest.mark.parametrize("function", [score.softcap(30.0), score.softcap(-30.0), score.identity()])
def test_what_a_parameter_stands_for_takes_its_path(function: score.Expr, n_q: int) -> None:
    """The same kernels with the same arguments as without a function, and explain says why."""
    softcap = 30.0 if function != score.identity() else 0.0
    found = []
    for node in (_attention(function, n_q)[0], _attention(None, n_q, softcap=softcap)[0]):
        p = _problem(node)
        kind = next(k for k in kernels_of(target_of("sm_90")) if k(p, target_of("sm_90"), "tile").serves() is None)
        kernel = kind(p, target_of("sm_90"), "tile")
        step = kernel.launches(MaskPlan(*[torch.zeros(99, dtype=torch.int32)] * 5), False, Scratch("cpu"))[0]
        plain = (int, float, str, bool, TileSpec, type(None))
        found.append((step.kernel, {k: x for k, x in step.args.items() if isinstance(x, plain)}))
        said = AttentionChoice(kernel.chosen({}), target_of("sm_90")).reasons
        assert any("as the op's softcap, 30" in text for text in said) == bool(node.params.score)
    assert found[0] == found[1] and found[0][0].__name__ == ("flash_attn_decode" if n_q == 1 else "hopper_flash_attn")


#: op, what stands in the case, the kernel: each kind of mask, heads that share a tile, tables of heads and of keys.
ON_HOPPER = {
    "positions": ("FLASH_ATTN_VARLEN", r"page=16,seqs=..40,40.*score=branches", "hopper_varlen_attn"),
    "packed keys": ("FLASH_ATTN_VARLEN", r"page=0,seqs=..40,40.*score=branches", "hopper_varlen_attn"),
    "beside a softcap": ("FLASH_ATTN_VARLEN", r"softcap=5.*score=hides", "hopper_varlen_attn"),
    "beside ALiBi": ("FLASH_ATTN_VARLEN", r"max_bias.*score=temperature", "hopper_varlen_attn"),
    "shared pages": ("FLASH_ATTN_VARLEN", r"groups=.*score=branches", "hopper_varlen_attn"),
    "a table of distances": ("FLASH_ATTN_EXT", r"n_q=70,.*score=relative", "hopper_flash_attn"),
    "-inf beside a softcap and sinks": ("FLASH_ATTN_EXT", r"n_q=70,.*score=hides", "hopper_flash_attn"),
    "without a mask": ("FLASH_ATTN_EXT", r"n_q=65,.*mask=None,score=branches", "hopper_flash_attn"),
    "ALiBi of packed heads": ("FLASH_ATTN_EXT", r"n_q=65,.*max_bias.*score=branches", "hopper_flash_attn"),
}


@pytest.mark.parametrize("what", ON_HOPPER)
def test_on_hopper(what: str) -> None:
    """Gluon's form of functions, in the emulator."""
    op, pattern, kernel = ON_HOPPER[what]
    schedule = "tile" if op == "FLASH_ATTN_EXT" else None
    _, kernels, found, expected = varlen_emulation.run(named_case(op, pattern), 3, 1, schedule)
    assert kernel in kernels
    np.testing.assert_allclose(found, expected, atol=4e-3)


#: Portable: pages and packed keys, few rows and many.
VARLEN = {
    "few rows": r"heads=.8,2.,.*page=16,seqs=..1,700.*score=branches", "one key": r"page=0,seqs=..1,0.*score=branches",
    "quantized": r"types=.q8_0,q4_0.*score=gate", "more queries than keys": r"seqs=..5,2.*score=branches",
}  # fmt: skip


@pytest.mark.parametrize("what", VARLEN)
def test_varlen_case(what: str) -> None:
    assert_passes("FLASH_ATTN_VARLEN", VARLEN[what])


def test_rounding_down_of_negative_numbers() -> None:
    """As Python's, where Gluon's integers are divided as C's are."""
    a, b = Value(np.arange(-9, 9, dtype=np.int32)), 4
    as_in_c = {
        "__mod__": lambda x, n: Value(np.fmod(x.data, n)),
        "__floordiv__": lambda x, n: Value(np.trunc(x.data / n).astype(int)),
    }
    truncated = type("C", (Value,), as_in_c)
    for name, how in (("floor_div", np.floor_divide), ("floor_mod", np.mod)):
        run = rebuilt(getattr(gluon_score_math, name), {"gl": Gl(Memory({}), 4)})
        np.testing.assert_array_equal(run(truncated(a.data), b).data, how(a.data, b))


def test_rows_are_made_once_a_tile() -> None:
    """What does not depend on score and key is no part of the loop: loads of numbers, divisions, tables of heads."""
    for text, numbers in (packed(score.softcap(30.0)), packed(score.temperature([0.5, 2.0]))):
        code = gluon_score.source(text, numbers)
        rows, value = code.split("def value_")
        assert "load" not in value and "look_up" not in value and " / " not in value, value
        assert "load" in rows or "look_up" in rows
    assert "look_up" in gluon_score.source(*packed(score.relative([1.0, 2.0, 3.0]))).split("def value_")[1]


def test_a_function_is_compiled_once_for_all_numbers() -> None:
    params = [_attention(score.softcap(cap))[0].params for cap in (2.0, 30.0)]
    assert score_code.function_of(params[0]) is score_code.function_of(params[1])
    assert score_code.numbers_of(params[0], "cpu").tolist() == [2.0]
    assert score_code.function_of(params[0]) is not score_code.function_of(params[0], slope=True)


def test_its_source_says_what_it_is() -> None:
    code = score_code.source(*packed(score.softcap(30.0)), slope=True)
    assert "tanh(" in code and code.count("tl.load(p + 0)") == 1 and " / x" in code
    assert score_code.source(*packed(score.softcap(2.0)), slope=True) == code


@pytest.mark.parametrize("n_q", [1, 64])
def test_who_refuses_and_who_serves(n_q: int) -> None:
    """Hopper's kernel for many queries has score functions; of few the portable kernel alone."""
    node, leaves = _attention(score.sigmoid_gate(1.5), n_q)
    p = _problem(node)
    said = {kind.name: kind(p, target_of("sm_90"), "tile").serves() for kind in kernels_of(target_of("sm_90"))}
    serving = [name for name, reason in said.items() if reason is None]
    assert serving == (["hopper", "forward"] if n_q == 64 else ["forward"])
    assert all("score function" in (said[name] or "") and "sigmoid" in (said[name] or "") for name in ("decode",)), said
    assert "score function" in (said["hopper_quant"] or "")
    q, k, v, mask = leaves
    rows = [new_input("f32", *node.ne, name=name) for name in ("d_out", "out")]
    lse = new_input("f32", 4, n_q, name="lse")
    back = ops.flash_attn_back("k", rows[0], q, k, v, rows[1], lse, node.params, mask=mask)
    kinds = back_kernels_of(target_of("sm_90"), "split")
    asked = [kind(BackProblem([back], p.place), ("k",), target_of("sm_90")) for kind in kinds if "k" in kind.makes]
    by_name = {kernel.name: kernel for kernel in asked}
    assert "score function" in (by_name["hopper_keys"].serves() or "") and asked[-1].serves() is None
