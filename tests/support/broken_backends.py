"""Backends that are wrong on purpose, one way each, on the ToyBackend: `-b support.broken_backends:Crashing`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch

from graphrt import ops
from graphrt.backend import Group, Place, Region
from graphrt.backends.cpu import CpuBackend
from graphrt.backends.cpu.reference import Reference
from graphrt.program import Program
from graphrt.tensor import Tensor
from graphrt.testing import Case
from support.toy import ToyBackend, ToyBuffer

Step = Callable[[], None]
#: The case that each backend spoils; it is right on the others.
SPOILT = "ADD(kind=spoilt)"


def cases() -> Iterator[Case]:
    """Six cases that the toy can run, the third of them the one that backends here spoil, and one that it refuses."""
    for kind in ("plain", "other", "spoilt", "last"):
        make = lambda inputs: ops.add(inputs("a", "f32", (32, 6, 4)), inputs("b", "f32", (32, 6, 4)))  # noqa: E731
        yield Case("ADD", {"kind": kind}, make)
    yield Case("SQR", {}, lambda inputs: ops.sqr(inputs("a", "f32", (5,))))
    yield Case("SCALE", {}, lambda inputs: ops.scale(inputs("a", "f32", (5, 3)), 2.0, 1.0))
    yield Case("SQRT", {}, lambda inputs: ops.sqrt(inputs("a", "f32", (5,))))


class Right(ToyBackend):
    name: ClassVar[str] = "right"

    def _step(self, node: Tensor, place: Callable[[Tensor], Place]) -> Step:
        step = super()._step(node, place)
        if node.op != "ADD" or not self._is_spoilt(node, place):
            return step
        (buffer, offset), sources = place(node), [place(s) for s in node.sources()]
        assert isinstance(buffer, ToyBuffer)
        out = buffer.memory[offset : offset + node.nbytes].view(np.float32).reshape(node.shape)

        def spoilt() -> None:
            step()
            self.spoil(out, buffer, offset + node.nbytes, sources)

        return spoilt

    def _is_spoilt(self, node: Tensor, place: Callable[[Tensor], Place]) -> bool:
        """By its first input's first value: a backend does not see a case's name."""
        buffer, offset = place(next(node.sources()))
        return bool(buffer.read(offset, 4).view(np.float32)[0] == FIRST_VALUE)

    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        """What goes wrong after the right result has been computed."""


def _first_value() -> np.float32:
    case = next(c for c in cases() if str(c) == SPOILT)
    return np.float32(next(iter(case.build(0).values.values())).reshape(-1)[0])


FIRST_VALUE = _first_value()


class Crashing(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        os.write(2, b"toy: assertion failed\n")
        os.abort()


class Leaving(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        os._exit(3)


class Raising(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        sys.exit("no more")


class Hanging(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        time.sleep(600)


class OutOfBounds(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        buffer.memory[end : end + 8] = 0


class InputWriting(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        source, offset = sources[1]
        source.write(offset + 4, np.zeros(4, np.uint8))


class Undecided(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        out += np.float32(1e-7) * np.random.default_rng().random(out.shape, np.float32)


class Printing(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        print("between the answers", flush=True)


class NotANumber(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        out[0, 2, 5, 31] = np.nan


class Unwritten(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        out.view(np.uint8)[..., -4:] = 0xFF


class Swapping(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        out[0, [1, 2]] = out[0, [2, 1]]


class TailLosing(Right):
    def spoil(self, out: np.ndarray, buffer: ToyBuffer, end: int, sources: list[Place]) -> None:
        out[..., -5:, :] = 0


class Lying(ToyBackend):
    """Says that it takes everything."""

    name: ClassVar[str] = "lying"

    def supports(self, node: Tensor) -> str | None:
        return None


class BadFusing(CpuBackend):
    """Joins an elementwise node with the one before it although others read that one too."""

    name: ClassVar[str] = "badfusing"

    def fuse(self, region: Region) -> list[Group]:
        groups: list[Group] = []
        for node in region.nodes:
            before = groups[-1].nodes[-1] if groups else None
            if node.op in ("ADD", "MUL", "SCALE", "UNARY") and before in node.src and not region.kept(before):
                groups[-1] = Group([*groups[-1].nodes, node])
            else:
                groups.append(Group([node]))
        return groups


class Spoiling(CpuBackend):
    """The CPU's fast form, which spoils the result of a step right after it has run. It goes by the name of cpu, whose
    memory it uses. runs: how many runs of a program are spoilt."""

    def __init__(self, value: float = np.nan, runs: int = 10**9) -> None:
        super().__init__(exact=False)
        self.value, self.runs = value, runs

    def spoils(self, group: Group) -> bool:
        raise NotImplementedError

    def spoil(self, out: torch.Tensor) -> None:
        """out: torch's shape of the group's last node."""
        raise NotImplementedError

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        at = [i for i, group in enumerate(groups) if self.spoils(group)]
        edges = [0, *(i + 1 for i in at), len(groups)]
        parts = [super(Spoiling, self).compile(groups[a:b], place) for a, b in zip(edges, edges[1:])]
        outs = [self._stored(groups[i].nodes[-1], place) for i in at]

        def run() -> None:
            for i, part in enumerate(parts):
                part()
                if i < len(outs) and self.runs > 0:
                    self.spoil(outs[i])
            self.runs -= bool(outs)

        return Program(groups, run)


class SpoilingAttention(Spoiling):
    """Row 1 (or the only one) of head 2 in layer 7's attention."""

    def spoils(self, group: Group) -> bool:
        return group.nodes[-1].name == "__fattn__-7"

    def spoil(self, out: torch.Tensor) -> None:
        out[0, min(1, out.shape[1] - 1), 2] = self.value


class SpoilingDecode(SpoilingAttention):
    """The same, only where a single token is read."""

    def spoils(self, group: Group) -> bool:
        return super().spoils(group) and group.nodes[-1].ne[2] == 1


class SpoilingCache(Spoiling):
    """What layer 7 writes into its cache of values: cell 1, the second head's first value."""

    def spoils(self, group: Group) -> bool:
        return group.nodes[-1].name == "cache_v_l7 (set)"

    def spoil(self, out: torch.Tensor) -> None:
        out[0, 0, 1, 16] = self.value


class SpoilingFusion(Spoiling):
    """Row 1 of layer 7's norm and weight, only when they are one step."""

    layers: tuple[int, ...] = (7,)

    def spoils(self, group: Group) -> bool:
        return len(group.nodes) > 1 and group.nodes[-1].name in [f"ffn_norm-{il}" for il in self.layers]

    def spoil(self, out: torch.Tensor) -> None:
        out[0, 0, 1] = self.value


class SpoilingFusions(SpoilingFusion):
    """The same in two layers."""

    layers = (3, 7)


class WrongStride(CpuBackend):
    """Attention takes the rows of V from one row further for each head: a stride that is a row too long."""

    name: ClassVar[str] = "cpu"  # whose memory it uses
    ending: ClassVar[str] = ""

    def reference_of(self, node: Tensor) -> Reference:
        right = super().reference_of(node)
        if node.op != "FLASH_ATTN_EXT" or not node.name.endswith(self.ending):
            return right

        def wrong(node: Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            shifted = torch.stack([v[:, head].roll(-head, 1) for head in range(v.shape[1])], 1)
            return right.function(node, q, k, shifted, *rest)

        return Reference(wrong)


class WrongStrideIn12(WrongStride):
    """The same in layer 12 alone: what docs/debugging.md looks for."""

    ending = "-12"


class SoftcapDropping(CpuBackend):
    """The fusion of SCALE, tanh and SCALE forgets them; by themselves they are right."""

    name: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        super().__init__(exact=False)

    def fuse(self, region: Region) -> list[Group]:
        return [Group(g.nodes, kernel="dropped") if g.kernel == "softcap" else g for g in super().fuse(region)]

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        parts = [
            self._dropped(g, place) if g.kernel == "dropped" else super(SoftcapDropping, self).compile([g], place)
            for g in groups
        ]

        def run() -> None:
            for part in parts:
                part()

        return Program(groups, run)

    def _dropped(self, group: Group, place: Callable[[Tensor], Place]) -> Step:
        source = group.nodes[0].src[0]
        assert source is not None
        capped, logits = self._stored(group.nodes[-1], place), self._stored(source, place)

        def forget() -> None:
            capped.copy_(logits)

        return forget


class Picky(CpuBackend):
    """Takes no product with weights of 4 bits in blocks of 32, and computes nothing."""

    name: ClassVar[str] = "picky"

    def supports(self, node: Tensor) -> str | None:
        w = node.src[0] if node.src else None
        if node.op == "MUL_MAT" and w is not None and w.dtype.name in ("q4_0", "q4_1"):
            return f"its product has no 4-bit weights, these are {w.dtype.name}"
        return None
