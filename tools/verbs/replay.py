"""Runs a case that `graphrt test --save` wrote, on any backend, and judges it anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphrt.tools.common import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="an .npz file from `graphrt test --save`")
    parser.add_argument("-b", "--backend", default="auto", metavar="NAME", help="a name or MODULE:CLASS")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args: argparse.Namespace) -> int:
    from graphrt.tools.conformance.cases.sources import make_backend
    from graphrt.tools.conformance.run.saved import load_failure
    from graphrt.tools.conformance.run.step import run_inputs

    inputs = load_failure(Path(args.file))
    backend = make_backend(args.backend)
    outcome = run_inputs(inputs.case.partition("(")[0], inputs, backend)
    if args.json:
        print_json({"backend": backend.name, **outcome.to_json()})
    else:
        print(f"{outcome.case}, seed {inputs.seed}, on {backend.name}: {outcome.status}")
        if outcome.message:
            print(f"  {outcome.message}")
        elif outcome.nmse is not None and outcome.limit is not None:
            print(f"  NMSE {outcome.nmse:.3g} of {outcome.limit:.3g}")
    return 0 if outcome.status == "pass" else 1
