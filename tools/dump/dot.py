"""`graphrt dump --format dot` and `svg`: a picture by graphviz. Layers are frames, fused nodes share an inner frame.

Fill colours tell the backend (Okabe and Ito's, which colour-blind people tell apart), with a legend; shapes tell the
kind: boxes compute, dashed ones look at another's memory, ellipses are inputs and caches. What many nodes read from
outside of the layers (positions, masks) has dotted arrows, weights stand by name in the node that reads them. The
background is transparent and lines are mid-grey, so that it reads on light and on dark pages.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence

from graphrt.errors import GraphError
from graphrt.op import op_spec
from graphrt.tools.common import printable
from graphrt.tools.dump.text import header, section_title
from graphrt.tools.inspect.describe import GraphInfo, TensorInfo
from graphrt.tools.inspect.fold import Folded, Section
from graphrt.tools.inspect.labels import params_text, role, type_text, view_text

#: Fills for backends in the order in which they come; black on each has a contrast of 5 and more.
FILLS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00")
NO_BACKEND = "#BBBBBB"
LINE = "#808080"
FONT = 'fontname="Helvetica,Arial,sans-serif"'  # whose widths graphviz knows without the fonts
SVG_SECONDS = 120
#: What lies outside of layers and more nodes read than this has dotted arrows, for which the layout makes no room:
#: solid ones would hide the rest.
MAX_ARROWS = 2


def dot(info: GraphInfo, folded: Folded) -> str:
    """The graph in graphviz's language."""
    return "\n".join(_Picture(info, folded).lines()) + "\n"


def svg(text: str) -> str:
    """The picture that graphviz's `dot` makes of a graph in its language. Raises GraphError where there is none."""
    program = shutil.which("dot")
    if program is None:
        raise GraphError(
            "an SVG is drawn by graphviz, and there is no `dot` on the PATH; install graphviz (apt install graphviz), "
            "or take --format dot elsewhere"
        )
    try:
        done = subprocess.run([program, "-Tsvg"], input=text.encode(), capture_output=True, timeout=SVG_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise GraphError(f"graphviz must draw it within {SVG_SECONDS} s, it did not; open a smaller part") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[:300]
        raise GraphError(f"graphviz must draw the graph, `dot` left with {done.returncode}: {said}; try --format dot")
    return done.stdout.decode()


class _Picture:
    """A graph's lines of graphviz's language. inlined: what is named in its readers, with no arrows of its own; shared:
    what many nodes read."""

    def __init__(self, info: GraphInfo, folded: Folded) -> None:
        self.info = info
        self.folded = folded
        names = list(dict.fromkeys(t.backend for t in info.tensors if t.backend))
        self.fills = {name: FILLS[i % len(FILLS)] for i, name in enumerate(names)}
        readers = Counter(source for source, _ in self._pairs())
        self.inlined = {t.index for t in info.tensors if self._is_constant(t)}
        self.shared = {t.index for t in info.tensors if t.layer is None and readers[t.index] > MAX_ARROWS}

    def lines(self) -> Iterator[str]:
        yield "digraph graphrt {"
        yield f'  graph [rankdir=TB bgcolor=transparent {FONT} fontcolor="{LINE}" color="{LINE}"'
        yield f"    labelloc=t label={_quoted(header(self.info))}];"
        yield f'  node [shape=box style="filled" margin="0.35,0.06" {FONT} fontsize=11 fontcolor="#000000"'
        yield f'    color="{LINE}" fillcolor="{NO_BACKEND}"];'
        yield f'  edge [color="{LINE}" fontcolor="{LINE}" {FONT} fontsize=9];'
        for i, section in enumerate(self.folded.sections):
            yield from self._section(section, i)
        yield from self._edges()
        yield from self._legend()
        yield "}"

    def _pairs(self) -> list[tuple[int, int]]:
        """Source and reader of every arrow, as they are shown, each pair once."""
        shown = self.folded.shown_as
        return list(dict.fromkeys((shown[s], shown[n.index]) for n in self.info.nodes for s in n.sources()))

    def _is_constant(self, t: TensorInfo) -> bool:
        return t.is_leaf and role(self.info, t) not in ("input", "state")

    def _section(self, section: Section, number: int) -> Iterator[str]:
        yield f"  subgraph cluster_{number} {{"
        yield f"    label={_quoted([section_title(self.info, section)])}; style={_frame(section)};"
        shown = [t for t in map(self.info.tensors.__getitem__, section.tensors) if not self._is_constant(t)]
        inside = {t.index for t in shown}
        done: set[int] = set()
        for t in shown:
            members = self.info.groups[t.group].members if t.group is not None else ()
            if t.group is None or len(members) < 2 or not inside.issuperset(members):
                yield f"    {self._node(t)}"
            elif t.group not in done:
                done.add(t.group)
                yield from self._group(t.group)
        yield "  }"

    def _group(self, number: int) -> Iterator[str]:
        group = self.info.groups[number]
        yield f"    subgraph cluster_g{number} {{"
        yield f'      label={_quoted([group.name])}; style="rounded,dashed"; fontsize=10;'
        yield from (f"      {self._node(self.info.tensors[i])}" for i in group.members)
        yield "    }"

    def _node(self, t: TensorInfo) -> str:
        info = self.info
        named = [info.tensors[s] for s in dict.fromkeys(t.sources()) if s in self.inlined]
        text = [f"{role(info, t)}  {t.name}", type_text(t), *(f"{s.name} {type_text(s)}" for s in named)]
        shape = "shape=ellipse " if t.is_leaf else 'style="filled,dashed" ' if op_spec(t.op).is_view else ""
        width = "penwidth=3 " if "output" in t.flags else ""
        fill = self.fills.get(t.backend or "", NO_BACKEND)
        on = f"on {t.backend}" if t.backend else ""
        tip = [line for line in (f"#{t.index} {t.name}", params_text(t), view_text(info, t), on) if line]
        return f't{t.index} [{shape}{width}fillcolor="{fill}" label={_quoted(text)} tooltip={_quoted(tip)}];'

    def _edges(self) -> Iterator[str]:
        """From one layer of a fold to the next an arrow goes back up, dashed."""
        for source, reader in self._pairs():
            if source not in self.inlined:
                style = ' [style=dashed constraint=false label="next layer"]' if source >= reader else ""
                style = style or (" [style=dotted penwidth=1.5 weight=0]" if source in self.shared else "")
                yield f"  t{source} -> t{reader}{style};"

    def _legend(self) -> Iterator[str]:
        if self.fills:
            yield '  subgraph cluster_legend { label="runs on"; style=dotted;'
            for i, (name, fill) in enumerate(self.fills.items()):
                yield f'    legend_{i} [label={_quoted([name])} fillcolor="{fill}"];'
            yield "  }"


def _frame(section: Section) -> str:
    return "bold" if section.count > 1 else "solid"


def _quoted(lines: Sequence[str]) -> str:
    """A string of graphviz's language; nothing in its lines is an escape."""
    shown = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + "\\n".join(shown) + '"'
