"""Fetch a model into the cache: a known name (smollm2-135m, gemma3-270m), hf:OWNER/REPO/FILE, or hf:OWNER/REPO[:QUANT],
of whose files that of the type QUANT is chosen, or of Q4_K_M, or the only one. Prints where it lies.

The cache is $GRAPHRT_CACHE, else ~/.cache/graphrt.
"""

from __future__ import annotations

import argparse

from graphrt.tools.common import MODEL_NAMES, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=MODEL_NAMES)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args: argparse.Namespace) -> int:
    from graphrt.models import hub

    path = hub.pull(args.name)
    if args.json:
        print_json({"name": args.name, "path": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return 0
