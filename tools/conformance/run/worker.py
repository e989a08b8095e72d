"""A worker process: reads a case's place in the list from stdin, answers with its outcome. It may die of a case."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Started as `python -m graphrt.tools.conformance.run.worker JSON`, see pool.Worker."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a backend prints must not get between the answers
    faulthandler.enable(all_threads=False)  # on a crash, what Python was doing is part of the report

    from graphrt.errors import GraphrtError
    from graphrt.tools.conformance.cases.graphs import run_any
    from graphrt.tools.conformance.cases.sources import Source, make_backend

    def answer(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        cases = list(Source(**settings["source"]).cases())
        backend = make_backend(settings["backend"])
    except GraphrtError as error:
        answer(error=str(error))
        return
    answer(ready=len(cases))
    saved = Path(settings["save"]) if settings["save"] else None
    for line in sys.stdin:
        index = int(line)
        answer(outcome=run_any(cases[index], backend, settings["seed"], saved).to_json())


if __name__ == "__main__":
    main()
