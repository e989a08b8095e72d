"""A case run again and again on one backend, many runs queued at once, each result's bits compared with the first's."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend
from graphrt.execute import host_type
from graphrt.models.engine import SessionOptions
from graphrt.models.model import Model
from graphrt.models.synthetic import synthetic
from graphrt.patterns import describe
from graphrt.testing import Case, Inputs, dequantize, nmse
from graphrt.tools.conformance.cases.share import StepCase
from graphrt.tools.conformance.run.guard import Guarded
from graphrt.tools.conformance.run.redone import uncalled
from graphrt.tools.conformance.run.reference import computing_nodes, know
from graphrt.tools.conformance.run.step import run_inputs

Bytes = npt.NDArray[np.uint8]
#: Runs that are queued, each with the comparison of its result, before the first is waited for.
QUEUED = 64
#: Every so many runs the result's memory is poisoned before, so that what a run leaves out shows.
POISONED = 8
PROMPT, TOKENS = 40, 64


@dataclass(frozen=True)
class Repeated:
    """What came of a case: runs, how many of them gave other bits, and the first such in words ("" for none).

    refused: why the backend does not run it, "" if it does; digest: of the first run's bits, which all processes share.
    """

    case: str
    runs: int = 0
    differing: int = 0
    message: str = ""
    refused: str = ""
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def repeat(case: Case, backend: Backend, seed: int, judged: bool = True) -> Runs | Steps | str:
    """What repeats a case on a backend, or the backend's reason not to run it. judged: see Runs."""
    if isinstance(case, StepCase):
        return Steps(case, backend)
    inputs = case.build(seed)
    refused = next((r for n in computing_nodes(inputs.graph()) if (r := backend.supports(n)) is not None), None)
    return refused if refused is not None else Runs(inputs, backend, judged)


class Runs:
    """One node's runs, held against the first one's bits. judged: the case is tested before, as `graphrt test` does,
    which takes a while. Calling it runs for some seconds: the runs, how many differ, the first difference in words."""

    def __init__(self, inputs: Inputs, backend: Backend, judged: bool = True) -> None:
        self.wrong = ""
        if judged and (outcome := run_inputs(inputs.result.op, inputs, backend)).status != "pass":
            self.wrong = f"wrong from the first run on: {outcome.message}"
        self.inputs, self.backend = inputs, backend
        self.guarded = Guarded(backend, inputs, inputs.graph())
        self.guarded.run()
        self.buffer, self.offset = self.guarded.place(inputs.result)
        self.nbytes = inputs.result.nbytes
        self.first: Bytes = self.buffer.read(self.offset, self.nbytes)
        # What writes into a source leaves the rest of it alone: that can't be poisoned.
        own = inputs.result.root is inputs.result
        self.comparison = self.buffer.comparison(self.offset, self.first)
        self.poison = np.full(self.nbytes, 0xFF, np.uint8) if own else None

    def __call__(self, seconds: float) -> tuple[int, int, str]:
        end = time.monotonic() + seconds
        runs, differing, message = 0, 0, ""
        while runs == 0 or time.monotonic() < end:
            runs += self._queue(end)
            wrong, last = self.comparison.found()
            if wrong:
                differing += wrong
                message = message or self._described(last)
        message = message or self.wrong
        message = message or "".join(uncalled(self.inputs, self.guarded.program.redone()))
        return runs, max(differing, int(bool(message))), message

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.first.tobytes()).hexdigest()[:16]

    def _queue(self, end: float) -> int:
        """Queues runs, each result compared in its turn, until there are enough or the time is over. How many."""
        for i in range(QUEUED):
            if self.poison is not None and i % POISONED == 0:
                self.buffer.write(self.offset, self.poison)
            self.guarded.program()
            self.comparison.look()
            if i > 0 and time.monotonic() >= end:
                break
        return i + 1

    def _described(self, result: Bytes) -> str:
        """Where a result differs from the first run's, by how much, and how far either is from float64's."""
        node = self.inputs.result
        size = node.dtype.type_size
        a, b = (x.reshape(-1, size) for x in (result, self.first))
        where = (a != b).any(1)
        if node.dtype.is_quantized or node.nbytes != node.ne[0] * node.n_rows * size:
            return f"{int(where.sum())} of {where.size} blocks have other bytes"
        stored = [x.view(host_type(node.dtype)).reshape(node.shape) for x in (result, self.first)]
        values = [dequantize(x, node.dtype).astype(np.float64) for x in stored]
        text = f"{describe(where.reshape(node.shape), node.op)} have other bits, at most "
        text += f"{float(np.nanmax(np.abs(values[0] - values[1]), initial=0.0)):.3g} off"
        if node.dtype.kind == "int":
            return text
        expected = know(self.inputs).expected
        errors = " and ".join(f"{nmse(np.nan_to_num(v), expected):.2g}" for v in values)
        return f"{text}; NMSE against float64 of this run and the first: {errors}"


class Steps:
    """A model's prefill and greedy decode, steps queued ahead. A token's step is a run. Called as Runs is."""

    def __init__(self, case: StepCase, backend: Backend) -> None:
        self.session = Model(synthetic(case.model, case.layers), [backend]).session(SessionOptions(n_ctx=128))
        self.prompt = [i * 7919 % self.session.decoder.hp.n_vocab for i in range(PROMPT)]
        self.first = self._once()

    def __call__(self, seconds: float) -> tuple[int, int, str]:
        end = time.monotonic() + seconds
        runs, differing, message = 0, 0, ""
        while runs == 0 or time.monotonic() < end:
            found = self._once()
            runs += TOKENS + 1
            wrong = next((what for what, mine in found.items() if mine != self.first[what]), None)
            if wrong is not None:
                differing += 1
                message = message or f"{wrong} differ from the first time's"
        return runs, differing, message

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.first).encode()).hexdigest()[:16]

    def _once(self) -> dict[str, object]:
        """Everything that the steps give, bit by bit."""
        self.session.reset()
        logits = self.session.eval(self.prompt).copy()
        tokens = list(self.session.likeliest(int(logits.argmax()), TOKENS))
        last = self.session.eval([tokens[-1]])
        return {"the prompt's logits": logits.tobytes(), "the tokens": tokens, "the last logits": last.tobytes()}
