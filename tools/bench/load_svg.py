"""A picture of latency against load: each step of a load is a point, tokens a second across, milliseconds up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

#: Sizes in pixels: of the picture, and around its two plots.
WIDTH, HEIGHT, LEFT, GAP, TOP, BOTTOM = 960, 380, 64, 72, 48, 52
PLOTS = (("time_to_first_token_ms", "time to first token, ms"), ("per_token_ms", "time a token, ms"))
LINES = (("p50", "#0072B2"), ("p95", "#D55E00"), ("p99", "#CC79A7"))
_STYLE = """text{font:12px sans-serif;fill:#222}.t{font-size:15px}.g{stroke:#ddd}.p{fill:none;stroke-width:2}
@media(prefers-color-scheme:dark){svg{background:#181818}text{fill:#ddd}.g{stroke:#333}}"""


def picture(title: str, points: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """An SVG. points: (what the load was, summary()), by rising load; those without an answer are left out."""
    known = [(name, found) for name, found in points if all(key in found for key, _ in PLOTS)]
    width = (WIDTH - LEFT - GAP) // 2 - 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<style>{_STYLE}</style><text class="t" x="{LEFT}" y="24">{escape(title)}</text>',
    ]
    for i, (key, label) in enumerate(PLOTS):
        parts += _plot(LEFT + i * (width + GAP), width, key, label, known)
    for i, (name, colour) in enumerate(LINES):
        parts.append(f'<text x="{WIDTH - 150 + 48 * i}" y="24" style="fill:{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _plot(x0: int, width: int, key: str, label: str, points: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    height = HEIGHT - TOP - BOTTOM
    right = _round_up(max((found["output_tokens_per_s"] for _, found in points), default=1.0))
    upper = _round_up(max((found[key]["p99"] for _, found in points), default=1.0))

    def at(rate: float, value: float) -> tuple[float, float]:
        return x0 + width * rate / right, TOP + height * (1 - value / upper)

    parts = [f'<text x="{x0}" y="{TOP - 6}">{label}</text>']
    for i in range(5):
        y, x = TOP + height * i / 4, x0 + width * i / 4
        parts.append(f'<line class="g" x1="{x0}" y1="{y:.1f}" x2="{x0 + width}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{upper * (4 - i) / 4:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + height + 18}" text-anchor="middle">{right * i / 4:g}</text>')
    parts.append(f'<text x="{x0 + width / 2}" y="{HEIGHT - 12}" text-anchor="middle">output tokens/s</text>')
    for name, colour in LINES:
        places = [at(found["output_tokens_per_s"], found[key][name]) for _, found in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="p" stroke="{colour}" points="{path}"/>')
        for (x, y), (load, found) in zip(places, points):
            told = f"{load}: {name} {found[key][name]:.1f} ms at {found['output_tokens_per_s']:.0f} tokens/s"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{told}</title></circle>')
    return parts


def _round_up(value: float) -> float:
    """A number of one digit that is not below."""
    unit = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return unit * math.ceil(value / unit)
