"""Outcomes as a table for people, JSON, CSV and JUnit XML."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from graphrt.tools.common import printable
from graphrt.tools.conformance.run.step import BAD, Outcome

FORMATS = ("console", "json", "csv", "junit")
_STATUSES = ("pass", "fail", "crashed", "timeout", "unsupported")


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many outcomes have each status."""
    found = Counter[str](o.status for o in outcomes)
    return {status: found.get(status, 0) for status in _STATUSES}


def reasons(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Why cases are unsupported, the most frequent reason first."""
    return dict(Counter(o.message for o in outcomes if o.status == "unsupported").most_common())


def console(outcomes: Sequence[Outcome], about: Mapping[str, Any], verbose: bool = False) -> str:
    """A line for each op, then what failed, then why cases were refused."""
    lines = [f"{about['backend']}, seed {about['seed']}, {len(outcomes)} cases", ""]
    width = max(len(op) for op in {o.op for o in outcomes})
    for op in dict.fromkeys(o.op for o in outcomes):
        mine = [o for o in outcomes if o.op == op]
        shown = ", ".join(f"{n} {spoken(status)}" for status, n in counts(mine).items() if n)
        margin = _margin(mine)
        lines.append(f"  {op:<{width}}  {shown}{margin}")
        lines += [f"  {'':<{width}}  {line}" for line in _rounded(mine)]
    for o in outcomes:
        if o.status in BAD or verbose:
            figures = f" NMSE {o.nmse:.2g} of {o.limit:.2g}" if verbose and o.nmse is not None and o.limit else ""
            lines += ["", f"{spoken(o.status)}: {o.case}{figures}"] + (
                [f"  {printable(o.message)}"] if o.message else []
            )
    refused = reasons(outcomes)
    if refused:
        lines += ["", "unsupported, by reason:"]
        lines += [f"  {n:>6}  {printable(reason)}" for reason, n in list(refused.items())[:20]]
    total = ", ".join(f"{n} {spoken(status)}" for status, n in counts(outcomes).items() if n)
    lines += ["", f"{total} in {about['seconds']:.1f} s"]
    return "\n".join(lines)


def spoken(status: str) -> str:
    """A case's status in a report's words."""
    return {"pass": "passed", "fail": "FAILED", "crashed": "CRASHED", "timeout": "TIMED OUT"}.get(status, status)


def _margin(outcomes: Sequence[Outcome]) -> str:
    """How near the nearest pass came to its limit, as a relative error."""
    shares = [(o.nmse / o.limit) ** 0.5 for o in outcomes if o.status == "pass" and o.nmse is not None and o.limit]
    return f", at most {100 * max(shares):.0f} % of the error allowed" if shares else ""


def _rounded(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each type that activations were rounded to on purpose, with the worst error against float64."""
    lines = []
    for kind in dict.fromkeys(o.rounded for o in outcomes if o.rounded is not None):
        mine = [o for o in outcomes if o.rounded == kind]
        passed = [o.nmse for o in mine if o.status == "pass" and o.nmse is not None]
        worst = f": at most {100 * max(passed) ** 0.5:.2f} % off float64 where they passed" if passed else ""
        lines.append(f"activations rounded to {kind} in {len(mine)} of them, as the backend says{worst}")
    return lines


def as_json(outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> str:
    """One object: what ran, the counts, and every outcome."""
    report = {**about, "counts": counts(outcomes), "unsupported": reasons(outcomes)}
    report["cases"] = [o.to_json() for o in outcomes]
    return json.dumps(report, indent=1, allow_nan=False)


def as_csv(outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> str:
    """A row for each case."""
    columns = ["backend", "seed", "op", "case", "status", "nmse", "limit", "max_abs", "worst", "seconds"]
    columns += ["rounded", "message"]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(columns)
    for o in outcomes:
        fields = {**o.to_json(), "backend": about["backend"], "seed": about["seed"]}
        fields["worst"] = " ".join(map(str, o.worst)) if o.worst is not None else ""
        table.writerow(["" if fields[c] is None else fields[c] for c in columns])
    return out.getvalue()


def as_junit(outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> str:
    """JUnit XML: a failed case has a failure, one that crashed or timed out an error, an unsupported one is skipped."""
    n = counts(outcomes)
    suite = ElementTree.Element("testsuite", {
        "name": f"graphrt test -b {about['backend']}", "tests": str(len(outcomes)), "failures": str(n["fail"]),
        "errors": str(n["crashed"] + n["timeout"]), "skipped": str(n["unsupported"]),
        "time": f"{about['seconds']:.3f}",
    })  # fmt: skip
    for o in outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"{about['backend']}.{o.op}", "name": o.case, "time": f"{o.seconds:.3f}"}
        )
        if o.status != "pass":
            tag = {"fail": "failure", "unsupported": "skipped"}.get(o.status, "error")
            ElementTree.SubElement(case, tag, {"type": o.status, "message": printable(o.message)})
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode")


def render(kind: str, outcomes: Sequence[Outcome], about: Mapping[str, Any], verbose: bool = False) -> str:
    """The report in one of FORMATS."""
    if kind == "console":
        return console(outcomes, about, verbose)
    return {"json": as_json, "csv": as_csv, "junit": as_junit}[kind](outcomes, about)
