"""What a kernel does with the memory behind each of its pointers, read from Triton's own listing of it (TTGIR).

accesses_of(text).args["p_out"]    # {"write"}

A read or write is early if the kernel may come to it without having waited for the launches before it (gdc_wait).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

#: What can be done with an argument's memory. An early read that the L1 cache may answer is an early cached one too.
READ, WRITE, EARLY_READ, EARLY_WRITE, CACHED = "read", "write", "early read", "early write", "early cached read"

#: Operations that read or write memory outside of the multiprocessor.
_READS = {"tt.load", "ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local", "tt.descriptor_load"}
_WRITES = {"tt.store", "ttng.async_tma_copy_local_to_global", "ttng.async_tma_reduce", "tt.descriptor_store"}
_BOTH = {"tt.atomic_rmw", "tt.atomic_cas"}
#: Operations whose results are no addresses made of their operands, or are followed by themselves.
_NO_FLOW = {*_READS, *_BOTH, "scf.if", "ttg.warp_specialize", "scf.yield", "scf.condition"}
#: Past the L1 cache: TMA, and what is marked so.
_UNCACHED = re.compile(r"tma|atomic|cacheModifier = (cg|cv)|isVolatile = true|\.(cg|cv|volatile|relaxed|acquire)\b")
_VALUE = re.compile(r"%[\w-]+(?:#\d+)?")
_NAME = re.compile(r"%[\w-]+")


@dataclass
class Found:
    """What a kernel does. args: what is done with each pointer argument; parameters: all of the kernel's, in order.

    waits: there is a gdc_wait; lets_go_early: a program may let the next launch start before it has waited itself;
    unknown: accesses whose pointer comes from no argument.
    """

    args: dict[str, set[str]] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    waits: bool = False
    lets_go_early: bool = False
    unknown: list[str] = field(default_factory=list)


@dataclass
class _Block:
    """A region's lines, with the regions inside. label: what stands before its brace: "else", "do", "partition0"..."""

    label: str
    lines: list[str | _Block]


def accesses_of(ttgir: str) -> Found:
    """What the kernel of a listing does. Raises ValueError for one that calls functions or jumps with values."""
    lines = list(_lines(ttgir))
    start = next(i for i, line in enumerate(lines) if line.startswith("tt.func public"))
    header = lines[start]
    pointers = re.findall(r"%([\w-]+): !tt\.(?:ptr|tensordesc)<", header)
    found = Found({name: set() for name in pointers}, re.findall(r"%([\w-]+): ", header))
    body = _Parser(lines, start + 1).region("")
    _rename(body, {}, count(1))
    roots = _roots(body, pointers)
    _walk(body, False, roots, found)
    return found


def _lines(text: str) -> Iterator[str]:
    """Lines without their places in the source."""
    for raw in text.splitlines():
        line = re.sub(r' loc\((?:"[^"]*"\()?#?\w+\)?\)', "", raw).strip()
        if line and not line.startswith("#"):
            yield line


# --- regions ---


class _Parser:
    """Lines as nested regions."""

    def __init__(self, lines: list[str], at: int) -> None:
        self.lines, self.at = lines, at

    def region(self, label: str) -> _Block:
        block = _Block(label, [])
        while not (line := self.lines[self.at]).startswith("}"):
            self.at += 1
            block.lines.append(line)
            if line.endswith("({"):  # a reduction's combining function: no memory
                while not self.lines[self.at].startswith("})"):
                    self.at += 1
                self.at += 1
            elif line.endswith("{"):
                block.lines.append(self.region(""))
                while self.lines[self.at - 1].endswith("{"):  # `} else {`, `} do {`
                    block.lines.append(self.region(self.lines[self.at - 1].strip("{} ")))
            elif line.startswith("ttg.warp_specialize"):
                while self.lines[self.at].startswith(("default", "partition")):
                    self.at += 1
                    block.lines.append(self.region(self.lines[self.at - 1]))
        self.at += 1
        return block


def _rename(block: _Block, names: dict[str, str], numbers: Iterator[int]) -> None:
    """Gives each value a name of its own, as regions side by side use the same ones. names: those known outside."""

    def fresh(found: list[str]) -> dict[str, str]:
        return {name: f"{name}-{next(numbers)}" for name in found}

    def known(text: str, names: dict[str, str]) -> str:
        return _NAME.sub(lambda m: names.get(m[0], m[0]), text)

    inner: dict[str, str] = dict(names)
    for i, item in enumerate(block.lines):
        if isinstance(item, _Block):
            if item.label.startswith("partition"):  # which knows nothing but its arguments
                inner = fresh(re.findall(r"(%[\w-]+): ", item.label))
                item.label = known(item.label, inner)
            _rename(item, dict(inner), numbers)
            continue
        results, rest = re.match(r"((?:%[\w-]+(?::\d+)? = )?)(.*)", item).groups()  # type: ignore[union-attr]
        if item.startswith("^"):  # a block's arguments
            names |= fresh(re.findall(r"(%[\w-]+): ", item))
        carried = re.findall(r"(%[\w-]+) = (%[\w#-]+)", _carried(rest))
        arguments = fresh([name for name, _ in carried])
        pairs = ", ".join(f"{arguments[name]} = {known(value, names)}" for name, value in carried)
        text = known(rest, names)
        if carried:
            text = text.replace(_carried(text), pairs)
        own = fresh(_NAME.findall(results))
        names |= own
        block.lines[i] = known(results, own) + text
        inner = names | arguments


def _carried(rest: str) -> str:
    """What a loop carries from turn to turn, `name = value` each."""
    opened = {"scf.for": "iter_args(", "scf.while": "scf.while ("}.get(_operation(rest))
    return rest.partition(opened)[2].partition(")")[0] if opened else ""


def _split(line: str) -> tuple[list[str], str]:
    """(names of an operation's results, the rest of the line). `%a:2 = ...` gives %a#0 and %a#1."""
    m = re.match(r"(%[\w-]+)(?::(\d+))? = (.*)", line)
    if m is None:
        return [], line
    return ([f"{m[1]}#{i}" for i in range(int(m[2]))] if m[2] else [m[1]]), m[3]


def _operation(rest: str) -> str:
    m = re.match(r'"?([a-z_]+\.[a-z_0-9.]+)', rest)
    return m[1] if m else ""


# --- addresses ---

Edges = list[tuple[str, str]]


def _roots(body: _Block, pointers: list[str]) -> dict[str, set[str]]:
    """Which arguments' memory each value may point into."""
    edges: Edges = []
    _flow(body, edges)
    roots = {f"%{name}": {name} for name in pointers}
    spread(roots, edges)
    return roots


def spread(roots: dict[str, set[str]], edges: Edges) -> None:
    """Gives each value the roots of all that it is made of. edges: (what it is made of, value)."""
    changed = True
    while changed:
        changed = False
        for source, target in edges:
            known = roots.get(source, set())
            if not known <= roots.get(target, set()):
                roots[target] = roots.get(target, set()) | known
                changed = True


@dataclass
class _Operation:
    """One with regions. carried: what a loop hands from turn to turn; passed: what scf.condition hands on."""

    name: str
    results: list[str]
    operands: list[str]
    carried: list[str]
    passed: list[str]


def _flow(block: _Block, edges: Edges) -> None:
    """From which value to which an address may go."""
    op = _Operation("", [], [], [], [])
    for item in block.lines:
        if isinstance(item, _Block):
            _region_flow(item, op, edges)
            continue
        results, rest = _split(item)
        pairs = re.findall(r"(%[\w-]+) = (%[\w#-]+)", _carried(rest))
        op = _Operation(_operation(rest), results, _VALUE.findall(rest), [name for name, _ in pairs], [])
        if op.name == "tt.call" or (op.name.startswith("cf.") and re.search(r"\^bb\d+\(", rest)):
            raise ValueError(f"calls, and jumps that hand on values, are not followed: {rest[:80]}")
        edges += [(value, name) for name, value in pairs]
        if op.name == "scf.for":
            edges += [(value, result) for (_, value), result in zip(pairs, results)]
        elif op.name not in _NO_FLOW and not op.carried and not _loads_by_asm(op.name, rest):
            edges += [(value, result) for value in op.operands for result in results]


def _loads_by_asm(name: str, rest: str) -> bool:
    """It is PTX that loads: what it gives is what lies there."""
    return name == "tt.elementwise_inline_asm" and re.search(r'"[^"]*\bld\.', rest) is not None


def _region_flow(part: _Block, op: _Operation, edges: Edges) -> None:
    """What goes into a region and out of it."""
    _flow(part, edges)
    last = next((x for x in reversed(part.lines) if isinstance(x, str)), "")
    given = _VALUE.findall(last.partition(" : ")[0])
    if op.name == "ttg.warp_specialize":
        edges += zip(op.operands, re.findall(r"(%[\w-]+): ", part.label))
        edges += zip(given, op.results) if part.label.startswith("default") else []
    elif op.name == "scf.while" and part.label != "do":
        op.passed = given[1:]
        edges += zip(op.passed, op.results)
    elif op.name == "scf.while":
        first = part.lines[0] if isinstance(part.lines[0], str) else ""
        edges += [*zip(op.passed, re.findall(r"(%[\w-]+): ", first)), *zip(given, op.carried)]
    else:
        edges += [*zip(given, op.results), *zip(given, op.carried)]


# --- order ---


def _walk(block: _Block, waited: bool, roots: dict[str, set[str]], found: Found) -> bool:
    """Notes what the lines do, in order; waited: on every way here a gdc_wait was passed. Whether it was at the end."""
    name, before, ends, jumps = "", waited, list[bool](), dict[str, list[bool]]()
    for item in block.lines:
        if isinstance(item, _Block):
            # A loop's second region comes after the first, other regions take turns.
            ends.append(_walk(item, ends[0] if item.label == "do" else before, roots, found))
            waited = before or _all_waited(name, ends)
            continue
        _, rest = _split(item)
        name, before, ends = _operation(rest), waited, []
        for label in re.findall(r"\^bb\d+", rest):
            if name.startswith("cf."):  # a jump to there, always forwards
                jumps.setdefault(label, []).append(waited)
            elif item.startswith(label) and label in jumps:
                waited = all(jumps[label])
        if "griddepcontrol.wait" in rest:
            waited = found.waits = True
        elif "griddepcontrol.launch_dependents" in rest:
            found.lets_go_early |= not waited
        else:
            _note(name, rest, waited, roots, found)
    return waited


def _all_waited(name: str, ends: list[bool]) -> bool:
    """Whether all ways through an operation's regions, as far as they are known, have waited."""
    if name == "scf.if":
        return len(ends) == 2 and all(ends)
    return name in ("scf.while", "ttg.warp_specialize") and ends[0]  # of scf.for there may be no turn


def _note(name: str, rest: str, waited: bool, roots: dict[str, set[str]], found: Found) -> None:
    """Notes what an operation reads and writes."""
    reads, writes = name in _READS | _BOTH or _loads_by_asm(name, rest), name in _WRITES | _BOTH
    if not (reads or writes):
        return
    args = roots.get(next(iter(_VALUE.findall(rest)), ""), set())
    if not args:
        found.unknown.append(rest[:120])
    what = {READ} if reads else set[str]()
    what |= {WRITE} if writes else set()
    if not waited:
        what |= {EARLY_READ} if reads else set()
        what |= {EARLY_WRITE} if writes else set()
        what |= {CACHED} if reads and not _UNCACHED.search(rest) else set()
    for arg in args:
        found.args[arg] |= what
