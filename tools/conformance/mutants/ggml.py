"""How many of the mutants of FLASH_ATTN_EXT ggml's own cases would find, by ggml's own rule.

The rule of test-backend-ops: sum((a - b)^2) / sum(a^2) over 5e-4 fails, a being the device's result; so does NaN on
either side, or an infinity that the other has not; 0/0 passes, and so does what a backend does not support. b is the
result of the correct kernel, which the default cases hold against float64: what lies between it and ggml's own CPU
reference is far below 5e-4. In a case without the broken feature (its node or inputs give the replaced piece the same
values) a mutant's result is the correct kernel's and passes, so that such pairs need not run: that is exact.
Nothing is sampled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt

from graphrt.backend import Bytes, Usage
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, all_cases
from graphrt.tools.common import progress
from graphrt.tools.conformance.mutants.backend import KernelBackend, KernelBuffer
from graphrt.tools.conformance.mutants.pieces import Mutant
from graphrt.tools.conformance.mutants.table import MUTANTS

OP = "FLASH_ATTN_EXT"
#: ggml's limit of the NMSE of FLASH_ATTN_EXT.
LIMIT = 5e-4
#: Cases a task; small ones first, so that the larger ones meet only the mutants that are hard to find.
_BATCH = 8


@dataclass(frozen=True)
class Kill:
    mutant: str
    case: str
    nmse: float


@dataclass
class GgmlGrid:
    """kills: by mutant, the first that came. ran: pairs of case and mutant that were computed, of `pairs` in all;
    n_unsupported: cases of types that can't be decoded here, which pass."""

    mutants: list[Mutant]
    kills: dict[str, Kill]
    n_cases: int
    n_unsupported: int
    ran: int
    seconds: float

    @property
    def survivors(self) -> list[Mutant]:
        return [m for m in self.mutants if m.name not in self.kills]

    @property
    def pairs(self) -> int:
        return self.n_cases * len(self.mutants)


def ggml_nmse(device: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    """ggml's measure: infinite for NaN and lone infinities, NaN for 0/0."""
    a, b = device.astype(np.float64), reference.astype(np.float64)
    if np.isnan(a).any() or np.isnan(b).any():
        return float("inf")
    if not np.array_equal(np.where(np.isinf(a), a, 0), np.where(np.isinf(b), b, 0)):
        return float("inf")
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.float64(((a - b) ** 2).sum()) / np.float64((a**2).sum()))


def ggml_fails(device: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> bool:
    """NaN is not over the limit: 0/0 passes."""
    return ggml_nmse(device, reference) > LIMIT


class Bound:
    """A case's inputs in memory: result() of any backend of this module's kernels."""

    def __init__(self, inputs: Inputs) -> None:
        self.node = inputs.result
        self.buffers: dict[Tensor, KernelBuffer] = {}
        self.backend = KernelBackend()
        for t, values in inputs.values.items():
            raw: Bytes = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            buffer = self.backend.alloc(raw.size, Usage.STATE)
            buffer.write(0, raw)
            self.buffers[t] = buffer

    def result(self, mutant: Mutant | None) -> npt.NDArray[np.float32]:
        """What the node holds after a run; its memory is NaN before."""
        backend = KernelBackend(mutant)
        out = backend.alloc(self.node.nbytes, Usage.COMPUTE)

        def place(t: Tensor) -> tuple[KernelBuffer, int]:
            return (out, 0) if t is self.node else (self.buffers[t.root], t.view_offs)

        kernel = backend.kernel(self.node)(self.node, place)
        kernel.run()
        return out.memory.numpy().view(np.float32)


@cache
def _cases() -> list[Case]:
    """Small cases first. Their nodes are built without values."""
    found = list(all_cases(OP, "ggml"))
    nodes = [case.without_values() for case in found]
    work = [op_spec(node.op).work(node).flops for node in nodes]
    return [found[i] for i in np.argsort(work, kind="stable")]


def _can_show(mutant: Mutant, inputs: Inputs) -> bool:
    return mutant.active(inputs.result) and mutant.shows_on(inputs)


def _run(first: int, alive: Sequence[str], seed: int) -> tuple[list[Kill], int, int]:
    """The kills of a batch of cases, how many pairs ran, and how many cases are unsupported."""
    kills: dict[str, Kill] = {}
    ran = unsupported = 0
    for case in _cases()[first : first + _BATCH]:
        inputs = case.build(seed)
        node = inputs.result
        if KernelBackend().supports(node) is not None:
            unsupported += 1
            continue
        active = [name for name in alive if name not in kills and _can_show(MUTANTS[name], inputs)]
        if not active:
            continue
        bound = Bound(inputs)
        reference = bound.result(None)
        for name in active:
            ran += 1
            try:
                device = bound.result(MUTANTS[name])
            except IndexError:  # it wrote where there is no memory: ggml's guards would tell
                kills[name] = Kill(name, str(case), float("inf"))
                continue
            if ggml_fails(device, reference):
                kills[name] = Kill(name, str(case), ggml_nmse(device, reference))
    return list(kills.values()), ran, unsupported


def run_ggml_grid(names: Sequence[str] | None = None, *, jobs: int = 0, seed: int = 0) -> GgmlGrid:
    """Every case of ggml's grid against the mutants of FLASH_ATTN_EXT that no case has found so far."""
    started = time.perf_counter()
    mutants = [m for m in MUTANTS.values() if m.op == OP and (names is None or m.name in names)]
    jobs = jobs or len(os.sched_getaffinity(0))
    grid = GgmlGrid(mutants, {}, len(_cases()), 0, 0, 0.0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        progress("ggml's cases", -(-grid.n_cases // _BATCH)) as advance,
    ):
        running: set[Future[tuple[list[Kill], int, int]]] = set()
        for first in range(0, grid.n_cases, _BATCH):
            running.add(pool.submit(_run, first, [m.name for m in grid.survivors], seed))
            advance()
            if len(running) >= 2 * jobs:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                _gather(grid, done)
        _gather(grid, running)
    grid.seconds = time.perf_counter() - started
    return grid


def _gather(grid: GgmlGrid, done: Iterable[Future[tuple[list[Kill], int, int]]]) -> None:
    for future in done:
        kills, ran, unsupported = future.result()
        for kill in kills:
            grid.kills.setdefault(kill.mutant, kill)
        grid.ran += ran
        grid.n_unsupported += unsupported


def grid_lines(grid: GgmlGrid) -> Iterable[str]:
    width = max((len(m.name) for m in grid.mutants), default=0)
    for m in grid.mutants:
        kill = grid.kills.get(m.name)
        if kill is None:
            yield f"{m.name:<{width}}  SURVIVED ggml's cases: {m.what}"
        else:
            yield f"{m.name:<{width}}  killed by {kill.case}: NMSE {kill.nmse:.2g} over {LIMIT:g}"
    yield (
        f"{len(grid.kills)} of {len(grid.mutants)} mutants of {OP} killed by ggml's {grid.n_cases} cases under ggml's "
        f"rule, {grid.n_unsupported} of them unsupported; {grid.ran} of {grid.pairs} pairs computed, the others have "
        f"no broken feature or a mutant found before; nothing is sampled; {grid.seconds:.0f} s"
    )


def grid_json(grid: GgmlGrid) -> str:
    fields: Mapping[str, object] = {
        "kills": [asdict(k) | {"nmse": str(k.nmse)} for k in grid.kills.values()],
        "survivors": [m.name for m in grid.survivors],
        "n_cases": grid.n_cases,
        "n_unsupported": grid.n_unsupported,
        "pairs_computed": grid.ran,
        "pairs": grid.pairs,
        "limit": LIMIT,
        "seconds": grid.seconds,
    }
    return json.dumps(fields)
