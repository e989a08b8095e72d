"""What a verb that generates text does between opening a model's file and reading its weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphrt.tools.common import session_options

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.models.gguf import GGUFFile


def before_weights(args: argparse.Namespace, told: dict[str, Any], file: GGUFFile, backends: Sequence[Backend]) -> None:
    """What can go on while the weights are read, and what must be known before."""
    from graphrt.models.chat import start_soon

    if not args.raw:
        start_soon(file.metadata)
    _check_memory(args, told, file, backends)


def _check_memory(args: argparse.Namespace, told: dict[str, Any], file: GGUFFile, backends: Sequence[Backend]) -> None:
    """Says what a model will take, before it does: of a GPU always, else when asked. Raises MemoryPlanError."""
    from graphrt.models.arch import read_file
    from graphrt.models.engine import check_options
    from graphrt.models.memory import check_fits, memory_needs

    if not args.memory and backends[0].name == "cpu":
        return  # nothing to tell, and reading the header twice over takes time
    options = session_options(args)
    n_seq = args.parallel if options.page else 1
    if options.page and not options.n_pages:  # as many as texts need, a whole context's at least
        options = replace(options, n_pages=-(-check_options(options, read_file(file))[0] // options.page))
    needs = memory_needs(file, backends, options, n_seq, getattr(args, "as_ranks", None))
    if args.memory or (needs.total and not needs.in_place):
        print(f"memory: {needs}", file=sys.stderr)
        told["memory"] = needs.facts()
    check_fits(needs, options)
