"""Join the parts of a split model into one file. FIRST is its first part, named ...-00001-of-00003.gguf."""

from __future__ import annotations

import argparse

from graphrt.printing import human_bytes
from graphrt.tools.common import print_json, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="FIRST", help="the first part, or hf:OWNER/REPO/FILE of it")
    parser.add_argument("output", metavar="OUT", help="the file to write")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args: argparse.Namespace) -> int:
    from graphrt.models import gguf_split, hub
    from graphrt.models.gguf import GGUFFile

    with GGUFFile.open(hub.resolve(args.first)) as file:
        with progress("merging", len(file.tensors)) as advance:
            path = gguf_split.merge(file, args.output, lambda name: advance())
        facts = {"output": str(path), "parts": len(file.paths), "tensors": len(file.tensors)}
    nbytes = path.stat().st_size
    if args.json:
        print_json(facts | {"bytes": nbytes})
    else:
        print(f"{path}: {facts['tensors']} tensors of {facts['parts']} parts, {human_bytes(nbytes)}")
    return 0
