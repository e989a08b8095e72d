"""The backends that are installed: score, devices, or the reason why one can't be used."""

from __future__ import annotations

import argparse
from typing import Any

from graphrt.backend import BackendInfo, discover
from graphrt.printing import human_bytes
from graphrt.tools.common import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def main(args: argparse.Namespace) -> int:
    found = [_describe(info) for info in discover().values()]
    if args.json:
        print_json(found)
        return 0
    rows = []
    for backend in found:
        for device in backend["devices"] or [{"name": "-", "description": backend["reason"], "memory_total": 0}]:
            memory = human_bytes(device["memory_total"]) if device["memory_total"] else "-"
            rows.append((backend["name"], backend["score"], device["name"], memory, device["description"]))
    print_table(("backend", "score", "device", "memory", "what"), rows)
    return 0


def _describe(info: BackendInfo) -> dict[str, Any]:
    usable = info.cls is not None and info.reason is None
    devices = info.cls().devices() if usable and info.cls is not None else []
    return {
        "name": info.name,
        "score": info.score,
        "reason": info.reason,
        "devices": [vars(d) for d in devices],
    }
