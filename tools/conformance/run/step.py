"""One case on one backend, in this process: guarded, judged, and whatever goes wrong is an outcome, not an error."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend
from graphrt.errors import BackendError, MemoryPlanError
from graphrt.judge import Verdict
from graphrt.op import op_spec
from graphrt.patterns import describe
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, dequantize
from graphrt.tools.conformance.run.guard import Guarded
from graphrt.tools.conformance.run.lowprec import why_not_rounded
from graphrt.tools.conformance.run.redone import uncalled
from graphrt.tools.conformance.run.reference import Array, Known, Memory, computing_nodes, know
from graphrt.tools.conformance.run.saved import save_failure

Status = Literal["pass", "fail", "unsupported", "crashed", "timeout"]
BAD = ("fail", "crashed", "timeout")


@dataclass(frozen=True)
class Outcome:
    """What came of a case. message: why it isn't a pass. worst: the index of the largest error in the order of ne.
    rounded: the type that the backend says it rounds activations to, and that the result was judged by."""

    case: str
    op: str
    status: Status
    message: str = ""
    nmse: float | None = None
    limit: float | None = None
    max_abs: float | None = None
    worst: tuple[int, ...] | None = None
    seconds: float = 0.0
    rounded: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields; a number that JSON can't spell becomes its name as a string."""
        out = dict(vars(self))
        for key, value in out.items():
            if isinstance(value, float) and not math.isfinite(value):
                out[key] = repr(value)
        out["worst"] = list(self.worst) if self.worst is not None else None
        return out

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Outcome:
        """The inverse of to_json()."""
        values = dict(fields)
        for key in ("nmse", "limit", "max_abs"):
            values[key] = float(values[key]) if values[key] is not None else None
        values["worst"] = tuple(values["worst"]) if values["worst"] is not None else None
        return Outcome(**values)


@dataclass
class _Ran:
    """What a backend did. refusal: its reason not to; rounded: what it says it rounds activations to; actual: the
    result as stored; unwritten: which of its elements were not written, where there is NaN among them; in_place: the
    results in sources' memory; problems: what else was wrong."""

    refusal: str | None = None
    rounded: str | None = None
    crash: str | None = None
    actual: Array | None = None
    unwritten: npt.NDArray[np.bool_] | None = None
    in_place: list[Array] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


#: What is known of a result, given what the backend rounds activations to.
Reference = Callable[[str | None], Known]
_MEMORY = Memory()


def run_case(case: Case, backend: Backend, seed: int = 0, *, saved: Path | None = None) -> Outcome:
    """Runs a case on a backend and judges it.

    saved: a folder for a file with the graph, the inputs and both outputs if the case fails; `graphrt replay` runs it.
    Whatever the backend raises but KeyboardInterrupt becomes the status "crashed".
    """
    if case.needs_bytes > (free := _free_bytes()):
        needed = f"it needs {case.needs_bytes / 2**30:.0f} GiB of free memory, there are {free / 2**30:.0f}"
        return Outcome(str(case), case.op, "unsupported", needed)
    inputs = case.build(seed)
    return run_inputs(case.op, inputs, backend, lambda rounded: _MEMORY.know(case, inputs, rounded), saved)


def run_inputs(
    op: str, inputs: Inputs, backend: Backend, reference: Reference | None = None, saved: Path | None = None
) -> Outcome:
    """The same for a node with its inputs, wherever they come from. reference: gives what is known of the result, and
    is told what the backend rounds activations to."""
    started = time.perf_counter()
    name = str(inputs.case)
    ran = _guarding(lambda: _asked(inputs, backend))
    known: Known | None = None
    if ran.refusal is None and ran.crash is None:
        # Before the backend runs: it is given the nodes, and what it does to them must not reach the reference.
        known = reference(ran.rounded) if reference is not None else know(inputs, ran.rounded)
        ran = _guarding(lambda: _run(inputs, backend))
    if ran.refusal is not None:
        return Outcome(name, op, "unsupported", ran.refusal, seconds=time.perf_counter() - started)
    if ran.crash is not None or known is None:
        outcome = Outcome(name, op, "crashed", ran.crash or "", seconds=time.perf_counter() - started)
    else:
        outcome = _judged(name, op, inputs, ran, known, started)
    if saved is not None and outcome.status in BAD:
        expected = known.expected if known is not None else know(inputs).expected
        save_failure(saved / file_name(name), inputs, expected, ran.actual, outcome.message)
    return outcome


def _free_bytes() -> float:
    """Memory that this machine has to spare; infinite where it can't be asked."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return 1024.0 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return math.inf


def file_name(case: str) -> str:
    """A short file name for a case: its op and a digest."""
    return f"{case.partition('(')[0]}-{hashlib.sha256(case.encode()).hexdigest()[:12]}.npz"


def _judged(name: str, op: str, inputs: Inputs, ran: _Ran, known: Known, started: float) -> Outcome:
    assert ran.actual is not None
    verdict = known.judge(inputs.result, ran.actual)
    problems = [verdict.message + _of_nan(inputs.result, ran)] if verdict.message else []
    for result in ran.in_place if not problems else ():
        again = known.judge(inputs.result, result)
        problems += [f"in its source's memory it is wrong: {again.message}"] if again.message else []
    return _outcome(name, op, verdict, problems + ran.problems, time.perf_counter() - started, known.rounded)


def _of_nan(node: Tensor, ran: _Ran) -> str:
    """Where a wrong result's NaN is from: what guard.py put there and nobody wrote, or what the kernel read or made."""
    if ran.unwritten is None:
        return ""
    assert ran.actual is not None
    if np.array_equal(ran.unwritten, np.isnan(dequantize(ran.actual, node.dtype))):
        return "; none of these was ever written"
    if ran.unwritten.any():
        return f"; {int(ran.unwritten.sum())} elements were never written: {describe(ran.unwritten, node.op)}"
    return "; all elements were written, so that NaN was computed, or read: gaps and what lies around sources are NaN"


def _outcome(name: str, op: str, v: Verdict, problems: list[str], seconds: float, rounded: str | None) -> Outcome:
    status: Status = "fail" if problems else "pass"
    return Outcome(name, op, status, "; ".join(problems), v.nmse, v.limit, v.max_abs, v.worst, seconds, rounded)


def rounding_of(node: Tensor, backend: Backend) -> str | None:
    """What a backend rounds a node's activations to on purpose. Raises BackendError if it may not."""
    rounded = backend.rounds_activations(node)
    wrong = None if rounded is None else why_not_rounded(node, rounded)
    if wrong is not None:
        raise BackendError(f"{wrong}; {backend.name} says it rounds those of {node.op} to {rounded!r}")
    return rounded


def _asked(inputs: Inputs, backend: Backend) -> _Ran:
    """What a backend says of a case before it runs: a reason not to run it, or how it rounds."""
    for node in computing_nodes(inputs.graph()):
        reason = backend.supports(node)
        if reason is not None:
            return _Ran(refusal=reason)
    return _Ran(rounded=rounding_of(inputs.result, backend))


def _run(inputs: Inputs, backend: Backend) -> _Ran:
    guarded = Guarded(backend, inputs, inputs.graph())
    actual = guarded.run()
    problems = guarded.damage()
    if backend.deterministic:
        problems += _differences(actual, guarded.run())
    problems += uncalled(inputs, guarded.program.redone())
    node = inputs.result
    in_place = guarded.run_in_place() if op_spec(node.op).inplace else []
    plain = node.dtype.kind == "float" and not node.dtype.is_quantized and op_spec(node.op).writes is None
    unwritten = guarded.unwritten() if plain and np.isnan(dequantize(actual, node.dtype)).any() else None
    return _Ran(actual=actual, unwritten=unwritten, in_place=in_place, problems=problems)


def _guarding(work: Callable[[], _Ran]) -> _Ran:
    """What the backend's own code does for a case, whatever it raises."""
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except MemoryPlanError as error:
        return _Ran(refusal=f"no room: {error}")
    # A backend is somebody else's code, and telling how it fails is what this tool is for: here, and only here,
    # everything is caught, SystemExit too.
    except BaseException as error:
        return _Ran(crash=f"{type(error).__name__}: {error}"[:2000])


def outcome_of(case: Case, work: Callable[[], str]) -> Outcome:
    """What comes of a case of several ops. work: runs it and returns what is wrong, "" for nothing; whatever the
    backend raises but KeyboardInterrupt becomes the status "crashed"."""
    started = time.perf_counter()
    status: Status
    try:
        message = work()
        status = "fail" if message else "pass"
    except KeyboardInterrupt:
        raise
    except Exception as error:  # see _guarding()
        status, message = "crashed", f"{type(error).__name__}: {error}"[:2000]
    return Outcome(str(case), case.op, status, message, seconds=time.perf_counter() - started)


def _differences(first: Array, second: Array) -> list[str]:
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (first, second))
    wrong = int((a != b).sum())
    return [f"two runs on the same inputs differ in {wrong} of {a.size} bytes"] if wrong else []
