"""A process of `graphrt test --share`: repeats its cases in turn for some seconds and writes what came of each, a line
of JSON each time. Started as `python -m graphrt.tools.conformance.run.share_worker JSON`, see share.py."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any

#: Seconds of one case before the next has its turn.
TURN = 0.4


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a backend prints must not get between the answers
    end = time.monotonic() + settings["seconds"]

    from graphrt.errors import GraphrtError
    from graphrt.tools.conformance.cases.sources import make_backend
    from graphrt.tools.conformance.run.repeated import Repeated, Runs, Steps, repeat
    from graphrt.tools.conformance.run.share import chosen_cases

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        cases = chosen_cases(settings["source"], settings["op"], settings["params"])
        backend = make_backend(settings["backend"])
    except GraphrtError as error:
        answer({"error": str(error)})
        return
    made: dict[int, Runs | Steps | str] = {}
    needed = set(range(len(cases)) if settings["whole_round"] else ())
    turn = min(TURN, settings["seconds"] / max(1, len(needed)))
    # The case that has run least is next, so that a slow kernel runs as often as a fast one.
    runs = [settings["runs"].get(str(case), 0) for case in cases]
    while time.monotonic() < end or needed:
        i = min(needed or range(len(cases)), key=lambda i: (runs[i], (i - settings["first"]) % len(cases)))
        needed.discard(i)
        if i not in made:
            made[i] = repeat(cases[i], backend, settings["seed"], judged=settings["whole_round"])
        work = made[i]
        if isinstance(work, str):
            answer(Repeated(str(cases[i]), refused=work).to_json())
            runs[i] = math.inf
            if all(of == math.inf for of in runs):
                return
        else:
            found = work(turn)
            answer(Repeated(str(cases[i]), *found, digest=work.digest).to_json())
            runs[i] += found[0]


if __name__ == "__main__":
    main()
