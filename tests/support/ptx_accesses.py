"""What a kernel's PTX does before it has waited, where the compiler may have moved what TTGIR has behind the wait.

Not for kernels whose warps have work of their own: their parts are entered through memory, so that a part that only
begins after the wait can't be told from one that doesn't wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from support.ttgir_accesses import spread

_GLOBAL = re.compile(r"(?:@!?%p\d+ )?(ld|st|atom|red|cp\.async|cp\.reduce\.async)\b([\w.:]*)\s+(.*);")
_ADDRESS = re.compile(r"\[\s*(%rd\d+)")


@dataclass(frozen=True)
class Early:
    """Names of the pointers that are read or written before the wait; cached: read so that the L1 cache may answer."""

    reads: frozenset[str]
    writes: frozenset[str]
    cached: frozenset[str]


def early_in_ptx(ptx: str, parameters: list[str]) -> Early:
    """parameters: the kernel's names, in order. Raises ValueError for an access whose pointer is none of them."""
    lines = list(_instructions(ptx))
    roots = _roots(lines, parameters)
    reads, writes, cached = set[str](), set[str](), set[str]()
    for at in _before_wait(lines):
        found = _GLOBAL.match(lines[at])
        if found is None or "global" not in found[2]:
            continue
        kind, how, operands = found.groups()
        address = _ADDRESS.findall(operands)[-1]  # of a copy the second one is the source
        names = roots.get(address, set())
        if not names:
            raise ValueError(f"an address that comes from no parameter: {lines[at]}")
        if kind in ("st", "red") or (kind == "atom") or how.startswith(".bulk") and operands.startswith("[%rd"):
            writes |= names
        if kind in ("ld", "atom", "cp.async"):
            reads |= names
        if kind in ("ld", "cp.async") and not re.search(r"\.(cg|cv|volatile|relaxed|acquire|bulk)\b", how):
            cached |= names
    return Early(frozenset(reads), frozenset(writes), frozenset(cached))


def _instructions(ptx: str) -> Iterator[str]:
    """Labels and instructions of the first function, each on a line."""
    body = ptx.partition("\n{")[2].partition("\n}")[0]
    for raw in body.splitlines():
        line = raw.partition("//")[0].strip()
        if line and not line.startswith("."):
            yield from (part.strip() + ";" if part.strip()[-1:] != ":" else part.strip() for part in _split(line))


def _split(line: str) -> list[str]:
    """Inline assembly has several instructions on a line."""
    return [part for part in line.split(";") if part.strip()] if not line.endswith(":") else [line]


def _roots(lines: list[str], parameters: list[str]) -> dict[str, set[str]]:
    """Which parameters each 64-bit register may be an address from."""
    roots: dict[str, set[str]] = {}
    edges: list[tuple[str, str]] = []
    for line in lines:
        # A pointer's value, a descriptor's place.
        if found := re.match(r"(?:ld\.param|mov)\.[ub]64\s+(%rd\d+), \[?\w+_param_(\d+)", line):
            roots[found[1]] = {parameters[int(found[2])]}
        elif not re.match(r"(@!?%p\d+ )?(ld|atom)", line):
            target, *sources = re.findall(r"%rd\d+", line) or [""]
            edges += [(source, target) for source in sources]
    spread(roots, edges)
    return roots


def _before_wait(lines: list[str]) -> set[int]:
    """Instructions that the kernel can come to without having passed griddepcontrol.wait."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    seen, ahead = set[int](), [0]
    while ahead:
        at = ahead.pop()
        while at < len(lines) and at not in seen:
            seen.add(at)
            line = lines[at]
            if line.startswith("griddepcontrol.wait"):
                break
            if "bra" in line and (jump := re.match(r"(@!?%p\d+ )?bra(\.uni)?\s+(\S+?);", line)):
                ahead.append(labels[jump[3]])
                if jump[1] is None:
                    break
            elif line.startswith(("ret", "trap", "exit")):
                break
            at += 1
    return seen
