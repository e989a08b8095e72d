"""Write a model's file in smaller types: every type that can be written, and llama.cpp's mixtures such as Q4_K_M.

OUT is written beside its place and moved there when it is whole. Memory is needed for some rows of a tensor only.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.errors import GGUFError
from graphrt.printing import human_bytes
from graphrt.tools.common import MODEL_HELP, add_threads_argument, print_json, print_table, progress

if TYPE_CHECKING:
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.quantize.imatrix import Importance
    from graphrt.models.quantize.mixtures import Request
    from graphrt.models.quantize.run import Plan

#: Names in a note.
MAX_NAMED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("output", nargs="?", metavar="OUT", help="the file to write; not needed with --dry-run")
    parser.add_argument("type", metavar="TYPE", help="Q4_K_M, Q8_0, F16 ...; a wrong one is answered with the list")
    parser.add_argument("--imatrix", metavar="FILE", help="importances of weights (`graphrt imatrix` makes them)")
    parser.add_argument("--allow-requantize", action="store_true", help="quantize what is quantized already, too")
    parser.add_argument("--pure", action="store_true", help="one type for all that is quantized, no mixture")
    parser.add_argument(
        "--output-tensor-type", metavar="TYPE", help="of output.weight (or the embedding that it shares)"
    )
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="of token_embd.weight")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and how large it would be")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_threads_argument(parser)


def main(args: argparse.Namespace) -> int:
    from graphrt.models import hub
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.quantize import imatrix
    from graphrt.models.quantize.run import plan

    request = _request(args)
    if args.output is None and not args.dry_run:
        raise GGUFError("a file to write must be given: graphrt quantize MODEL OUT TYPE. --dry-run needs none.")
    importance = imatrix.load(args.imatrix) if args.imatrix else None
    if args.threads > 0:
        import torch

        torch.set_num_threads(args.threads)
    with GGUFFile.open(hub.resolve(args.model)) as file:
        try:
            planned = plan(file, request, requantize=args.allow_requantize or args.dry_run, importance=importance)
        except GGUFError as error:
            hint = "\n--allow-requantize asks for it" if "allow_requantize" in str(error) else ""
            raise GGUFError(f"{error}{hint}") from None
        _tell_unweighed(planned, importance)
        errors = {} if args.dry_run else _write(file, planned, Path(args.output), importance)
        _report(args, planned, errors, sum(info.nbytes for info in file.tensors.values()))
    return 0


def _request(args: argparse.Namespace) -> Request:
    from graphrt.models.quantize.mixtures import Request, file_type, writable

    output, token_embd = (
        writable(name) if name else None for name in (args.output_tensor_type, args.token_embedding_type)
    )
    return Request(file_type(args.type), output, token_embd, args.pure, bool(args.imatrix))


def _write(file: GGUFFile, planned: Plan, output: Path, importance: Importance | None) -> dict[str, float]:
    """Writes the file; the error of each tensor, by name."""
    from graphrt.models.quantize.run import write

    errors: dict[str, float] = {}
    with progress("quantizing", len(planned.steps)) as advance:

        def done(step: Any, error: float) -> None:
            errors[step.info.name] = error
            advance()

        write(file, planned, output, importance=importance, done=done)
    return errors


def _tell_unweighed(planned: Plan, importance: Importance | None) -> None:
    if importance is None:
        return
    without = [s.info.name for s in planned.steps if s.changes and importance.of(s.info) is None]
    if without:
        more = f" and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
        print(
            f"no importances for {', '.join(without[:MAX_NAMED])}{more}: all their errors count alike", file=sys.stderr
        )


def _report(args: argparse.Namespace, planned: Plan, errors: dict[str, float], before: int) -> None:
    steps = [
        {
            "name": s.info.name,
            "from": s.info.dtype.name,
            "to": s.dtype.name,
            "bytes": s.planned.nbytes,
            "error": errors.get(s.info.name),
        }
        for s in planned.steps
    ]
    if args.json:
        facts = {"output": None if args.dry_run else args.output, "bytes": planned.nbytes}
        print_json(facts | {"bits_per_weight": planned.bits_per_weight, "tensors": steps})
        return
    if args.tensors:
        shown = [
            (s["name"], s["from"], s["to"], s["bytes"], "" if s["error"] is None else f"{s['error']:.2e}")
            for s in steps
        ]
        print_table(("tensor", "from", "to", "bytes", "error"), shown)
        print()
    counts, sizes = Counter(s["to"] for s in steps), Counter[str]()
    for s in planned.steps:
        sizes[s.dtype.name] += s.planned.nbytes
    print_table(("type", "tensors", "size"), [(t, counts[t], human_bytes(n)) for t, n in sizes.most_common()])
    what = "would be written" if args.dry_run else args.output
    print(
        f"\n{what}: {human_bytes(planned.nbytes)}, {planned.bits_per_weight:.2f} bits a weight "
        f"(tensors had {human_bytes(before)})"
    )
