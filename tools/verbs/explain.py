"""How a node is run and why: kernel, schedule, tiles, fusion, the reasons of every choice, and what it takes at the
device's ceilings. Without NODE a table of all steps, layers that are alike folded into one.

MODEL may be a model, of which a step is shown, a case that `graphrt test --save` wrote, or script.py:build, a function
that returns a graphrt Graph. NODE is a name as `graphrt dump` prints it (__fattn__-7), or #index. With --device no GPU
is needed: the graph is prepared as the triton backend (or --backend's) would there, and nothing runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphrt.errors import GraphError, SessionError
from graphrt.tools.common import DEVICE_NAMES, print_json, size, whole, write_text
from graphrt.tools.inspect.subject import add_subject_arguments, subject_of
from graphrt.tools.outputs import OutputFile

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.tools.explain.devices import KnownDevice
    from graphrt.tools.explain.steps import Explained
    from graphrt.tools.inspect.describe import TensorInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    parser.add_argument("node", nargs="?", metavar="NODE", help="a node's name as dumps print it, or #index")
    parser.add_argument(
        "-d", "--depth", type=whole(0), metavar="N",
        help="tokens that the cache holds before the step (default: as many as fit for decode, none for prefill)",
    )  # fmt: skip
    parser.add_argument("--device", metavar="NAME", help=f"plan for this GPU, which need not be here: {DEVICE_NAMES}")
    parser.add_argument("--arch", metavar="NAME", help="or for one of this architecture: sm_80, sm_89, gfx942, ...")
    parser.add_argument("--sm-count", type=whole(1), metavar="N", help="with so many multiprocessors")
    parser.add_argument("--shared-memory", type=size, metavar="SIZE", help="and so much shared memory a program")
    parser.add_argument(
        "--program", type=whole(0), metavar="N", help="of an attention: what program N of its launch does, tile by tile"
    )
    parser.add_argument("--svg", type=OutputFile, metavar="FILE", help="draw which program has which part of each tile")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def main(args: argparse.Namespace) -> int:
    from graphrt.tools.explain import as_json as explain_json
    from graphrt.tools.explain import node as explain_node
    from graphrt.tools.explain import text as explain_text
    from graphrt.tools.explain.steps import explained

    if args.synthetic is not None and args.model is not None and args.node is None:
        args.model, args.node = None, args.model  # --synthetic took MODEL's place
    if args.svg is not None and args.node is None:
        raise SessionError("a picture is of one attention, got no NODE; name one, such as __fattn__-0")
    if args.program is not None and args.node is None:
        raise SessionError("a program is one of an attention's, got no NODE; name one, such as __fattn__-0")
    device, backends = _device(args)
    found = explained(subject_of(args, backends), args.depth, device)
    node = explain_node.find_node(found, args.node) if args.node is not None else None
    if args.svg is not None and node is not None:
        write_text(args.svg, _picture(found, node))
    if args.json:
        print_json(explain_json.as_json(found, node, args.program))
        return 0
    if node is None:
        lines = list(explain_text.table(found))
    else:
        walked = args.program is not None
        facts = list(explain_node.walk(found, node, args.program) if walked else explain_node.facts(found, node))
        lines = [explain_text.title(found), *explain_text.device_lines(found), "", *explain_text.columns(facts)]
    if sys.stdout.isatty() and node is None:
        explain_text.print_rich(lines)
    else:
        print("\n".join(lines))
    return 0


def _device(args: argparse.Namespace) -> tuple[KnownDevice | None, Sequence[Backend] | None]:
    """The device to plan for and the backends of that plan; None where the machine's own are meant. Raises
    BackendError."""
    if not any((args.device, args.arch, args.sm_count, args.shared_memory)):
        return None, None
    from graphrt.backend import backend_elsewhere, get_backend
    from graphrt.tools.explain.devices import device_of

    known = device_of(args.device, args.arch, args.sm_count, args.shared_memory)
    planned = backend_elsewhere("triton" if args.backend == "auto" else args.backend, known.elsewhere, exact=args.exact)
    return known, [planned, get_backend("cpu", exact=args.exact)]


def _picture(found: Explained, node: TensorInfo) -> str:
    from graphrt.tools.explain.node import not_attention, step_of
    from graphrt.tools.explain.svg import svg
    from graphrt.tools.explain.text import title

    step = step_of(found, node)
    tiles = step.tiles if step is not None else None
    if step is None or tiles is None:
        raise GraphError(not_attention("a picture", node))
    return svg(tiles, f"{step.nodes[0].name} of {title(found)}")
