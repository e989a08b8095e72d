"""The mutation score: planted bugs against the default cases. Every one of them must be found.

Correct kernels run all cases first. Then each mutant runs the cases of its op in which the broken feature is active,
until one does not pass; in the others it is the correct kernel. A mutant survives only if all of them pass.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing import get_context

from graphrt.op import op_spec
from graphrt.testing import Case, Inputs, all_cases
from graphrt.tools.common import progress
from graphrt.tools.conformance.mutants.backend import KernelBackend
from graphrt.tools.conformance.mutants.pieces import KERNELS, Mutant
from graphrt.tools.conformance.mutants.table import MUTANTS
from graphrt.tools.conformance.run.reference import Memory
from graphrt.tools.conformance.run.step import Outcome, run_inputs

#: Inputs and references of the latest cases, so that the next mutant need not make them again.
_KEPT_INPUTS = 256 * 2**20


@dataclass(frozen=True)
class Trial:
    """What became of a mutant. killed_by: the case, "" for a survivor; tried: how many cases ran."""

    mutant: str
    op: str
    what: str
    killed_by: str
    message: str
    nmse: float | None
    limit: float | None
    tried: int
    seconds: float

    @property
    def survived(self) -> bool:
        return not self.killed_by


@dataclass
class Score:
    """trials: in the table's order; failures: cases that correct kernels do not pass, which kill nothing; skipped:
    cases that could not run here."""

    trials: list[Trial]
    failures: list[Outcome] = field(default_factory=list)
    skipped: list[Outcome] = field(default_factory=list)
    n_cases: int = 0
    seconds: float = 0.0

    @property
    def survivors(self) -> list[Trial]:
        return [t for t in self.trials if t.survived]

    @property
    def ok(self) -> bool:
        return not self.survivors and not self.failures


class _Bench:
    """One process's cases, with their inputs and what is known of their results. Killers of others come first."""

    def __init__(self, which: str, seed: int) -> None:
        self.seed = seed
        self.known = Memory()
        self.inputs: dict[str, Inputs] = {}
        self.kept_bytes = 0
        self.cases: dict[str, list[Case]] = {}
        self.huge: dict[str, list[Case]] = {}
        for case in all_cases(which=which):
            if case.op in KERNELS:
                kind = self.huge if case.needs_bytes else self.cases
                kind.setdefault(case.op, []).append(case)
        self.kills: dict[str, int] = {}

    def run(self, case: Case, backend: KernelBackend) -> Outcome:
        inputs = self.build(case)
        return run_inputs(case.op, inputs, backend, lambda rounded: self.known.know(case, inputs, rounded))

    def build(self, case: Case) -> Inputs:
        name = str(case)
        if name not in self.inputs:
            inputs = case.build(self.seed)
            size = sum(values.nbytes for values in inputs.values.values())
            if size > _KEPT_INPUTS // 8:
                return inputs
            if self.kept_bytes + size > _KEPT_INPUTS:
                self.inputs.clear()
                self.kept_bytes = 0
            self.inputs[name] = inputs
            self.kept_bytes += size
        return self.inputs[name]

    def telling_first(self, mutant: Mutant, but: frozenset[str], huge: bool) -> list[Case]:
        """The cases in which a mutant is active: those that killed others, then the small ones."""
        cases = (self.huge if huge else self.cases).get(mutant.op, [])
        nodes = {str(case): case.without_values() for case in cases}
        active = [c for c in cases if str(c) not in but and mutant.active(nodes[str(c)])]
        work = {name: op_spec(node.op).work(node).flops for name, node in nodes.items()}
        return sorted(active, key=lambda c: (-self.kills.get(str(c), 0), work[str(c)]))


@cache
def _bench(which: str, seed: int) -> _Bench:
    return _Bench(which, seed)


def _baseline(which: str, seed: int, op: str, part: int, parts: int) -> list[Outcome]:
    bench = _bench(which, seed)
    return [bench.run(case, KernelBackend()) for case in bench.cases.get(op, [])[part::parts]]


def _huge_baseline(which: str, seed: int, op: str) -> list[Outcome]:
    """The same for the cases that need much memory; one for which there is not enough counts as unsupported."""
    bench, outcomes = _bench(which, seed), []
    for case in bench.huge.get(op, []):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if free < case.needs_bytes:
            reason = f"it needs {case.needs_bytes / 2**30:.0f} GiB of free memory, there are {free / 2**30:.0f}"
            outcomes.append(Outcome(str(case), op, "unsupported", reason))
        else:
            outcomes.append(bench.run(case, KernelBackend()))
    return outcomes


def _try(mutant: Mutant | str, which: str, seed: int, but: frozenset[str], huge: bool = False) -> Trial:
    m = MUTANTS[mutant] if isinstance(mutant, str) else mutant
    bench, started, tried = _bench(which, seed), time.perf_counter(), 0
    backend = KernelBackend(m)
    for case in bench.telling_first(m, but, huge):
        outcome = bench.run(case, backend)
        tried += 1
        if outcome.status in ("fail", "crashed"):
            bench.kills[outcome.case] = bench.kills.get(outcome.case, 0) + 1
            message = outcome.message or outcome.status
            figures = outcome.nmse, outcome.limit, tried, time.perf_counter() - started
            return Trial(m.name, m.op, m.what, outcome.case, message, *figures)
    return Trial(m.name, m.op, m.what, "", "", None, None, tried, time.perf_counter() - started)


def run_mutants(names: Sequence[str] | None = None, *, jobs: int = 0, seed: int = 0, which: str = "quick") -> Score:
    """Tries mutants by name (default: all) in `jobs` processes (0: one a core).

    Cases that need much memory come last, in one process, for the mutants that are still alive.
    """
    started = time.perf_counter()
    chosen = [MUTANTS[name] for name in (names or MUTANTS)]
    jobs = jobs or len(os.sched_getaffinity(0))
    ops = list(dict.fromkeys(m.op for m in chosen))
    with _pool(jobs) as pool:
        parts = 4 * jobs
        checks = [pool.submit(_baseline, which, seed, op, i, parts) for op in ops for i in range(parts)]
        outcomes = [outcome for check in checks for outcome in check.result()]
        but = frozenset(o.case for o in outcomes if o.status != "pass")
        trials = _results("mutants", [pool.submit(_try, m.name, which, seed, but) for m in chosen])
    alive = [m for m in chosen if trials[m.name].survived]
    with _pool(1) as pool:
        checks = [pool.submit(_huge_baseline, which, seed, op) for op in dict.fromkeys(m.op for m in alive)]
        huge = [outcome for check in checks for outcome in check.result()]
        but = frozenset(o.case for o in huge if o.status != "pass")
        last = _results("the last", [pool.submit(_try, m.name, which, seed, but, True) for m in alive])
    for name, trial in last.items():
        trials[name] = replace(trial, tried=trials[name].tried + trial.tried)
    outcomes += huge
    failures = [o for o in outcomes if o.status not in ("pass", "unsupported")]
    skipped = [o for o in outcomes if o.status == "unsupported"]
    return Score(list(trials.values()), failures, skipped, len(outcomes), time.perf_counter() - started)


def _results(title: str, futures: list[Future[Trial]]) -> dict[str, Trial]:
    trials = {}
    with progress(title, len(futures)) as advance:
        for future in futures:
            trials[future.result().mutant] = future.result()
            advance()
    return trials


def _pool(jobs: int) -> ProcessPoolExecutor:
    """Fresh processes with one arithmetic thread each: torch's threads do not survive a fork."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


# -- what is printed


def score_lines(score: Score) -> Iterable[str]:
    """The table and the score."""
    width = max((len(t.mutant) for t in score.trials), default=0)
    for t in score.trials:
        if t.survived:
            yield f"{t.mutant:<{width}}  SURVIVED {t.tried} cases: {t.what}"
            continue
        figures = f"NMSE {t.nmse:.2g} over {t.limit:.2g}" if t.nmse is not None and t.limit else t.message[:60]
        yield f"{t.mutant:<{width}}  killed by {t.killed_by}: {figures}"
    for failure in score.failures:
        yield f"correct kernels do not pass {failure.case}: {failure.status}, {failure.message[:200]}"
    for skipped in score.skipped:
        yield f"not run: {skipped.case}: {skipped.message[:200]}"
    killed = len(score.trials) - len(score.survivors)
    share = 100 * killed / max(1, len(score.trials))
    about = f"{score.n_cases} cases, {score.seconds:.0f} s"
    yield f"{killed} of {len(score.trials)} mutants killed ({share:.0f} %), {about}"


def score_json(score: Score) -> str:
    survivors = [t.mutant for t in score.survivors]
    return json.dumps({
        "mutants": [asdict(t) for t in score.trials], "survivors": survivors, "n_cases": score.n_cases,
        "correct_kernels_fail": [o.to_json() for o in score.failures],
        "not_run": [o.to_json() for o in score.skipped], "seconds": score.seconds,
    }, default=str)  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """`graphrt test --mutants`: 0 if every mutant is killed. Reads args.jobs (1: every core), seed, output, ggml_grid.

    With --ggml-grid the mutants of FLASH_ATTN_EXT meet ggml's own cases instead, and what comes is a figure and no
    verdict: 0.
    """
    jobs, seed = (args.jobs if args.jobs > 1 else 0), args.seed
    as_json = args.output == "json"
    if args.ggml_grid:
        from graphrt.tools.conformance.mutants.ggml import grid_json, grid_lines, run_ggml_grid

        grid = run_ggml_grid(jobs=jobs, seed=seed)
        print(grid_json(grid) if as_json else "\n".join(grid_lines(grid)))
        return 0
    score = run_mutants(jobs=jobs, seed=seed)
    print(score_json(score) if as_json else "\n".join(score_lines(score)))
    return 0 if score.ok else 1
