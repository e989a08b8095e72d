"""Backends that round a product's activations to 8 bits on purpose: judged by that, told so, and wrong ones fail.

Those that round short rows in two parts declare nothing, and are judged as exact ones are.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("triton")

from support.toy import ToyBackend

from graphrt import get_backend, ops
from graphrt.backend import Backend
from graphrt.backends.triton import device
from graphrt.judge import PRECISIONS
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, all_cases
from graphrt.testing.values import Init
from graphrt.tools import cli
from graphrt.tools.conformance.cases.sources import make_backend
from graphrt.tools.conformance.run.lowprec import GROUP
from graphrt.tools.conformance.run.reference import know
from graphrt.tools.conformance.run.step import Outcome, run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.kernels.products import emit
from graphrt.backends.triton.kernels.products.activations import Q8Rows, quantize_rows

#: Six tokens: their activations are rounded by a launch of its own, which the tests can spoil.
KINDS = ("q4_0", "q4_K", "q6_K", "q8_0")
#: Elements of rows that are rounded in one part, and in two.
LONG, SHORT = 2304, 512


def wide(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal values, every fourth group of 32 times 5: as in models, some channels are larger than others."""
    return rng.standard_normal(shape) * np.where(np.arange(shape[-1]) // GROUP % 4 == 3, 5.0, 1.0)


def product(kind: str, n: int = 6, k: int = LONG, m: int = 16, init: Init | None = None) -> Case:
    def make(inputs: Inputs) -> Tensor:
        return ops.mul_mat(inputs("w", kind, (k, m)), inputs("x", "f32", (k, n), init))

    return Case("MUL_MAT", {"type": kind, "m": m, "n": n, "k": k}, make)


def spoilt(spoil: Callable[[Q8Rows], object]) -> Callable[..., Callable[[], None]]:
    """quantize_rows() with something done to what it made."""

    def wrong(target: object, x: object, out: Q8Rows) -> Callable[[], None]:
        launch = quantize_rows(target, x, out)

        def step() -> None:
            launch()
            spoil(out)

        return step

    return wrong


#: What is done to the activations, and the types of weights that it shows with.
BUGS: dict[str, tuple[Callable[[Q8Rows], object], tuple[str, ...]]] = {
    "a group has its neighbour's step": (lambda a: a.d.copy_(a.d.roll(1, 1)), KINDS),
    "one group of a row has its neighbour's step": (lambda a: a.d[:, 3].copy_(a.d[:, 4]), KINDS),
    "an element of a row is dropped": (lambda a: a.q[:, 127].zero_(), KINDS),
    "an element of each group is dropped": (lambda a: a.q[:, 31::32].zero_(), KINDS),
    "one token's last group is dropped": (lambda a: a.q[-1, -32:].zero_(), KINDS),
    "the offset is missed": (lambda a: a.s.zero_(), ("q4_0", "q4_K", "q6_K")),
    "a half group's sum is its neighbour's": (lambda a: a.s[:, 5::32].copy_(a.s[:, 4::32]), ("q4_0", "q4_K", "q6_K")),
}


def _without_second(a: Q8Rows) -> None:
    """As if there were none: the first part's values, and their sums."""
    a.q[6:].zero_()
    a.s.copy_((a.q[:6].float().view(6, -1, 16).sum(2).view(6, -1, 2) * 254 * a.d[:, :, None]).view(6, -1))


#: The same of what is done to the second parts of short rows: the last six rows of q.
SECOND_BUGS: dict[str, tuple[Callable[[Q8Rows], object], tuple[str, ...]]] = {
    "there is none": (_without_second, KINDS),
    "it is missed in sums": (lambda a: a.q[6:].zero_(), KINDS),
    "the first has its step": (lambda a: a.d.mul_(254), KINDS),
    "tokens have each other's": (lambda a: a.q[6:].copy_(a.q[6:].roll(1, 0)), KINDS),
    "a group has its neighbour's": (lambda a: a.q[6:, 96:128].copy_(a.q[6:, 64:96]), KINDS),
    "a half group's sum is its neighbour's": (lambda a: a.s[:, 7].copy_(a.s[:, 6]), ("q4_0", "q6_K")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_passes_as_what_it_says_it_is(kind: str) -> None:
    found = run_case(product(kind), make_backend("triton-fast"))
    assert found.status == "pass" and found.rounded == "int8", found.message
    assert found.nmse is not None and 1e-6 < found.nmse < 1e-4  # 0.1 % to 1 % off


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_kernel_does_not_pass(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, kinds = BUGS[bug]
    monkeypatch.setattr(emit, "quantize_rows", spoilt(spoil))
    for kind in kinds:
        found = run_case(product(kind, init=wide), make_backend("triton-fast"))
        assert found.status == "fail" and "NMSE" in found.message, (kind, found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 6])
def test_two_parts_pass_as_exact(kind: str, n: int) -> None:
    found = run_case(product(kind, n, SHORT, init=wide), make_backend("triton-fast"))
    assert found.status == "pass" and found.rounded is None, found.message
    assert found.nmse is not None and found.nmse < 1e-8  # 0.01 %; f16 is off by 0.02 % to 0.03 %


@pytest.mark.parametrize("bug", SECOND_BUGS)
def test_a_wrong_second_part_does_not_pass(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, kinds = SECOND_BUGS[bug]
    monkeypatch.setattr(emit, "quantize_rows", spoilt(spoil))
    for kind in kinds:
        found = run_case(product(kind, k=SHORT, init=wide), make_backend("triton-fast"))
        assert found.status == "fail" and "NMSE" in found.message, (kind, found)


def test_without_its_word_the_rounding_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphrt.backends.triton.backend.TritonBackend.rounds_activations", lambda self, node: None)
    found = run_case(product("q4_0"), make_backend("triton-fast"))
    assert found.status == "fail" and found.rounded is None


def test_what_is_rounded() -> None:
    def said(backend: Backend, kind: str, **how: int) -> str | None:
        return backend.rounds_activations(product(kind, **how).build().result)

    fast = make_backend("triton-fast")
    assert said(fast, "q4_K") == said(fast, "q8_0", n=8) == said(fast, "iq2_xxs") == "int8"
    assert said(fast, "q4_K", k=2048) is said(fast, "q4_0", k=576) is None
    assert said(fast, "q4_K", n=9) is said(fast, "f16") is None
    assert said(get_backend("triton"), "q4_K") is said(get_backend("cpu"), "q4_K") is None
    assert fast.rounds_activations(ops.sqr(Tensor("f32", (4,)))) is None


class Claiming(ToyBackend):
    """Says of everything that its activations are rounded."""

    def rounds_activations(self, node: Tensor) -> str | None:
        return "int8"


def test_the_wider_tolerance_is_for_products_alone() -> None:
    case = Case("ADD", {}, lambda inputs: ops.add(inputs("a", "f32", (32,)), inputs("b", "f32", (32,))))
    found = run_case(case, Claiming())
    assert found.status == "crashed" and "products of quantized weights" in found.message


def test_the_error_of_right_rounding_is_in_the_row() -> None:
    """The figures beside PRECISIONS["int8"]."""
    for values, low, high in (("uniform", 0.0035, 0.0045), ("normal", 0.0045, 0.006)):
        rng = np.random.default_rng(3)
        x = rng.uniform(-1, 1, (1, 1, 6, 4096)) if values == "uniform" else rng.standard_normal((1, 1, 6, 4096))
        inputs = product("q8_0", k=4096, m=64).build()
        inputs.values[next(t for t in inputs.values if t.name == "x")][...] = x.astype(np.float32)
        known = know(inputs, "int8")
        error = np.sqrt(((known.low - known.expected) ** 2).sum() / (known.expected**2).sum())
        assert low < error < high, values
    worst = np.sqrt(GROUP / 12) / 127
    assert 2 * worst + PRECISIONS["int8"].band < PRECISIONS["int8"].ceiling < 3 * worst


def test_reports_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    cases = "^type=(q4_0,m=5,n=1,k=2304|q4_0,m=16,n=1,k=256|f16,m=16,n=1,k=256)$"
    args = ["-b", "triton-fast", "-o", "MUL_MAT", "-p", cases]
    assert cli.main(["test", *args, "-j", "0"]) == 0
    assert "activations rounded to int8 in 1 of them, as the backend says: at most 0." in capsys.readouterr().out
    assert cli.main(["test", *args, "-j", "0", "--json"]) == 0
    cases = [Outcome.from_json(c) for c in json.loads(capsys.readouterr().out)["cases"]]
    assert {o.case: o.rounded for o in cases} == {
        "MUL_MAT(type=q4_0,m=5,n=1,k=2304)": "int8", "MUL_MAT(type=q4_0,m=16,n=1,k=256)": None,
        "MUL_MAT(type=f16,m=16,n=1,k=256)": None,
    }  # fmt: skip
    assert cli.main(["test", "support", *args]) == 0
    assert "triton-fast takes 1 of MUL_MAT with activations rounded to int8" in capsys.readouterr().out
    assert cli.main(["test", "support", *args, "--output", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["rounded"] == "1" and row["taken"] == "3"


def test_names_of_fast_forms() -> None:
    assert make_backend("triton-fast").exact is False and make_backend("cpu-fast").name == "cpu"
    assert sum(c.op == "MUL_MAT" for c in all_cases()) > 300
