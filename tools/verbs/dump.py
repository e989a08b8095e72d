"""A graph as it would run: every leaf and node with its op, parameters, types, strides, views, backend, place, fusion
and work. Layers that are alike fold into one; --layer opens one. # is the number that every verb calls a tensor by:
leafs come first, so that node_6, ggml's name for the seventh node without one, has a higher number.

MODEL may be a model, of which a step is shown, a case that `graphrt test --save` wrote, or script.py:build, a function
that returns a graphrt Graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphrt.errors import SessionError
from graphrt.tools.common import whole, write_text
from graphrt.tools.inspect.subject import add_subject_arguments, subject_of
from graphrt.tools.outputs import OutputFile

if TYPE_CHECKING:
    from graphrt.tools.inspect.describe import GraphInfo

FORMATS = ("text", "json", "dot", "svg", "html", "model-explorer")
#: Formats that hold every layer, since programs read them.
WHOLE = ("json", "model-explorer")
#: Formats that show values of other tools beside the graph.
OVERLAID = ("html", "model-explorer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    parser.add_argument("--layer", type=whole(0), metavar="N", help="show this layer by itself")
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text; svg needs graphviz")
    parser.add_argument(
        "--json", action="store_const", dest="format", const="json", help="print a JSON object (docs/graph-json.md)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=OutputFile,
        metavar="FILE",
        help="write there; with model-explorer each overlay too, FLOP and bytes among them, beside it",
    )
    parser.add_argument(
        "--overlay",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help='values to lay over html or model-explorer, JSON of {"a node": number}; may be given again',
    )


def main(args: argparse.Namespace) -> int:
    from graphrt.tools.inspect.describe import describe

    _check(args)
    subject = subject_of(args)
    # A table has a line for each thing that pages are told by; what else has a title has them there.
    title = subject.title if args.format == "text" else "; ".join([subject.title, *subject.pages])
    info = describe(subject.executable, title, subject.phase, subject.n_tokens)
    if args.format == "text" and args.output is None and sys.stdout.isatty():
        from graphrt.tools.dump.text import print_rich
        from graphrt.tools.inspect.fold import fold

        print_rich(info, fold(info, args.layer))
        print("".join(f"{line}\n" for line in subject.pages), end="")
        return 0
    text = rendered(info, args.format, args.layer, args.overlay)
    if args.format == "text":
        text += "".join(f"{line}\n" for line in subject.pages)
    if args.output is None:
        sys.stdout.write(text)
        return 0
    write_text(args.output, text)
    if args.format == "model-explorer":
        _write_node_data(info, Path(args.output), args.overlay)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises SessionError for options that the format has no use for."""
    if args.layer is not None and args.format in WHOLE:
        raise SessionError(f"--layer opens a layer of a picture or a table, {args.format} has all; leave it out")
    if args.overlay and args.format not in OVERLAID:
        raise SessionError(f"--overlay is for {' and '.join(OVERLAID)}, got {args.format}; leave it out")
    if args.overlay and args.format == "model-explorer" and args.output is None:
        raise SessionError("model-explorer reads overlays from files of their own, got no -o; name the graph's file")


def rendered(info: GraphInfo, kind: str, layer: int | None = None, overlay: Sequence[Path] = ()) -> str:
    """The graph in one of FORMATS. layer: one to open; overlay: files of values to lay over html."""
    from graphrt.tools.dump import dot as dump_dot
    from graphrt.tools.dump import html as dump_html
    from graphrt.tools.dump import model_explorer as dump_model_explorer
    from graphrt.tools.dump import text as dump_text
    from graphrt.tools.inspect import graph_json
    from graphrt.tools.inspect.fold import fold
    from graphrt.tools.inspect.overlay import overlays

    if kind == "json":
        return _json(graph_json.to_json(info))
    if kind == "model-explorer":
        return _json(dump_model_explorer.collection(info))
    if kind == "html":
        return dump_html.page(info, overlays(info, overlay), layer)
    folded = fold(info, layer)
    if kind == "text":
        return "\n".join(dump_text.lines(info, folded)) + "\n"
    text = dump_dot.dot(info, folded)
    return dump_dot.svg(text) if kind == "svg" else text


def _json(value: object) -> str:
    """One line of strict JSON in ASCII, which every pipe takes."""
    return json.dumps(value, allow_nan=False) + "\n"


def _write_node_data(info: GraphInfo, graph: Path, files: Sequence[Path]) -> None:
    from graphrt.tools.dump.model_explorer import node_data
    from graphrt.tools.inspect.overlay import overlays

    for overlay in overlays(info, files):
        path = graph.with_suffix(f".{overlay.name}.json")
        write_text(path, _json(node_data(overlay)))
