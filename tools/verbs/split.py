"""Cut a model's file into parts, PREFIX-00001-of-00003.gguf and so on, which load as one by the first."""

from __future__ import annotations

import argparse
import re

from graphrt.printing import human_bytes
from graphrt.tools.common import MODEL_HELP, print_json, progress, whole

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "prefix", metavar="PREFIX", help="what the parts' names begin with; may have a folder before it"
    )
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument(
        "--max-size", dest="size", type=_size, default=0, metavar="N[M|G]",
        help="the most bytes of a part, in millions (M) or thousands of millions (G); larger tensors stand alone",
    )  # fmt: skip
    limit.add_argument(
        "--max-tensors", dest="count", type=whole(1), default=0, metavar="N", help="the most tensors of a part"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _size(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,11})([KMG]?)", text.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a whole number of bytes, or of K, M or G of them, got {text[:40]!r}")
    return int(found[1]) * UNITS.get(found[2], 1)


def main(args: argparse.Namespace) -> int:
    from pathlib import Path

    from graphrt.models import gguf_split, hub
    from graphrt.models.gguf import GGUFFile

    with GGUFFile.open(hub.resolve(args.model)) as file:
        parts = gguf_split.planned_parts(file, args.size, args.count)
        paths = [gguf_split.part_path(Path(args.prefix), i, len(parts)) for i in range(len(parts))]
        if not args.dry_run:
            with progress("splitting", len(file.tensors)) as advance:
                gguf_split.split(file, args.prefix, parts, lambda name: advance())
    if args.json:
        rows = [{"path": str(path), "tensors": len(infos)} for path, infos in zip(paths, parts)]
        print_json({"written": not args.dry_run, "parts": rows})
    else:
        for path, infos in zip(paths, parts):
            print(f"{path}: {len(infos)} tensors, {human_bytes(sum(info.nbytes for info in infos))}")
    return 0
