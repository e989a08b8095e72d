"""Where a server's time went in a load: what its /metrics say after it beside what they said before."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Histograms of `graphrt serve`, in the order of a request's way, with what they are called in a table. What is counted
#: in seconds is shown in milliseconds.
TALLIES = {
    "request_queue_time_seconds": "waiting for its turn",
    "request_prefill_time_seconds": "then to the first token",
    "iteration_tokens_total": "tokens a step",
    "step_device_seconds": "a step on the device",
    "step_wait_seconds": "the host waits for it",
    "step_host_seconds": "the host beside it",
    "step_delivery_seconds": "until the event loop has it",
    "stream_write_seconds": "a write to a socket",
}
#: Sizes of steps that were made ready: each keeps all texts waiting once.
PREPARED, SECONDS = "steps_prepared_total", "_seconds"
_LINE = re.compile(r'^graphrt:(\w+?)(?:\{le="([^"]+)"\})? (\S+)$', re.M)


class Figure(NamedTuple):
    """A histogram's values of a load: how many, their sum, and those that half and 95 of 100 are under."""

    n: int
    sum: float
    p50: float
    p95: float


def read(text: str) -> dict[tuple[str, str], float]:
    """Figures by their name and the upper end of their range, "" for none; of other servers none."""
    return {(name, edge): float(value) for name, edge, value in _LINE.findall(text)}


def figures(old: Mapping[tuple[str, str], float], new: Mapping[tuple[str, str], float]) -> dict[str, Figure]:
    """Those of TALLIES that have values between two looks at /metrics, as read() gives them."""
    found = dict[str, Figure]()
    for name in TALLIES:
        cuts = {edge: n - old.get((key, edge), 0.0) for (key, edge), n in new.items() if key == f"{name}_bucket"}
        count = int(cuts.get("+Inf", 0))
        if count > 0:
            total = new[f"{name}_sum", ""] - old.get((f"{name}_sum", ""), 0.0)
            p50, p95 = (_cut(cuts, share, whole=not name.endswith(SECONDS)) for share in (0.5, 0.95))
            found[name] = Figure(count, total, p50, p95)
    return found


def _cut(cuts: Mapping[str, float], share: float, *, whole: bool) -> float:
    """The value that so many are under, as if those of a range lay evenly in it; of whole numbers the range's end."""
    wanted, low, under = share * cuts["+Inf"], 0.0, 0.0
    for edge, n in cuts.items():
        if n >= wanted:
            part = 1.0 if whole else (wanted - under) / max(n - under, 1e-9)
            return low if edge == "+Inf" else low + (float(edge) - low) * part
        low, under = float(edge), n
    return low


def as_json(before: str, after: str) -> dict[str, Any]:
    """The figures between two texts of /metrics, and how many sizes of steps were new; {} of a server that tells
    nothing."""
    old, new = read(before), read(after)
    found = {name: figure._asdict() for name, figure in figures(old, new).items()}
    n_prepared = int(new.get((PREPARED, ""), 0) - old.get((PREPARED, ""), 0))
    return found | {"steps_prepared": n_prepared} if found else {}


def rows(told: Mapping[str, Any]) -> list[list[str]]:
    """Of a table: what, how often, mean, p50, p95, all together in seconds."""
    found = []
    for name, what in TALLIES.items():
        if figure := told.get(name):
            unit, seconds = (1e3, f"{figure['sum']:.2f}") if name.endswith(SECONDS) else (1, "")
            means = [figure["sum"] / figure["n"], figure["p50"], figure["p95"]]
            found.append([what, str(figure["n"]), *(f"{unit * value:.2f}" for value in means), seconds])
    return found
