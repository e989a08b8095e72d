"""What a step reads and writes, and which of that before it has waited for the launches before it: data for
`graphrt check --order`.

A kernel's declaration stands with the kernel:

    @accesses(reads="p_x p_w", writes="p_out", early="p_w")
    @triton.jit
    def scaled(p_x, p_w, p_out, n, PDL: tl.constexpr): ...

tests/support/kernel_accesses.py holds it against what the compiled kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from graphrt.backends.triton.memory import span_of
from graphrt.errors import BackendError
from graphrt.program import LaunchInfo, Use

Kernel = TypeVar("Kernel")


@dataclass(frozen=True)
class Declaration:
    """Names of a kernel's pointer parameters. early: read before gdc_wait, each with the constant that must be true for
    it, "" for always; uncached: of these, those that are read past the L1 cache; lets_go_early: it
    lets the next launch begin before it has waited itself; helper: it prepares or finishes what other kernels do;
    elsewhere: it writes to other GPUs' memory, by addresses that it reads."""

    reads: frozenset[str]
    writes: frozenset[str]
    early: Mapping[str, str]
    uncached: frozenset[str]
    lets_go_early: bool = False
    helper: bool = False
    elsewhere: bool = False

    @property
    def names(self) -> frozenset[str]:
        return self.reads | self.writes


@dataclass(frozen=True, eq=False)
class Access:
    """One tensor of a step. name: the parameter; early: before the step has waited; uncached: past the L1 cache."""

    name: str
    memory: torch.Tensor
    reads: bool
    writes: bool
    early: bool = False
    uncached: bool = False

    @property
    def use(self) -> Use:
        """The same as plain data: the bytes from the first element to the last."""
        return Use(self.name, *span_of(self.memory), self.reads, self.writes, self.early, self.uncached)


def accesses(
    *,
    reads: str = "",
    writes: str = "",
    early: str = "",
    early_if: Mapping[str, str] | None = None,
    uncached: str = "",
    lets_go_early: bool = False,
    helper: bool = False,
    elsewhere: bool = False,
) -> Callable[[Kernel], Kernel]:
    """Declares what a kernel does with its pointer parameters, named with spaces between; a parameter that is a named
    tuple stands for all pointers in it.

    early: those that it reads before its gdc_wait, in launches that may begin before the one before has ended; all else
    comes after it. early_if: the same for those that are early only if a constant of the kernel is true, by the
    constant's name. uncached: early ones that it reads past the L1 cache: a launch of the run may write them.
    lets_go_early: it lets the next launch begin before it has waited itself, which no kernel here should. helper: it
    only prepares or finishes what other kernels do: it is not what a step is called after. elsewhere: it writes to
    other GPUs' memory, by addresses that it reads.
    """
    sooner = dict.fromkeys(early.split(), "")
    sooner |= {name: constant for constant, names in (early_if or {}).items() for name in names.split()}
    read, written, uncached_ones = (frozenset(names.split()) for names in (reads, writes, uncached))
    declared = Declaration(read, written, sooner, uncached_ones, lets_go_early, helper, elsewhere)
    odd = (set(sooner) - declared.reads) | (declared.uncached - set(sooner))
    assert not odd, f"what is early must be read, what is uncached must be early: {sorted(odd)}"

    def declare(kernel: Kernel) -> Kernel:
        kernel.declared_accesses = declared  # type: ignore[attr-defined]
        return kernel

    return declare


def declaration_of(kernel: Any) -> Declaration:
    """What a kernel declares. Raises BackendError for one that declares nothing."""
    found = getattr(kernel, "declared_accesses", None)
    if not isinstance(found, Declaration):
        raise BackendError(
            f"a kernel must declare what it reads and writes, {kernel.__name__!r} doesn't; put @accesses(...) of "
            f"backends/triton/accesses.py above its jit"
        )
    return found


class Step(Protocol):
    """What a lowering makes: a Launch (launch.py) or a Call."""

    def __call__(self) -> None: ...
    def info(self) -> LaunchInfo:
        """For those who ask what a program launches."""
        ...


class Call:
    """A step that is no Launch: torch operations. It begins when all before it has ended.

    name: for people; reads, writes: all memory that it touches; helper: see accesses().
    """

    starts_early = waits = lets_go_early = False

    def __init__(
        self,
        name: str,
        function: Callable[[], object],
        reads: Sequence[torch.Tensor | None],
        writes: Sequence[torch.Tensor | None],
        helper: bool = False,
    ) -> None:
        self.name = name
        self.function = function
        self.reads = [t for t in reads if t is not None]
        self.writes = [t for t in writes if t is not None]
        self.helper = helper

    def __call__(self) -> None:
        self.function()

    def accesses(self) -> list[Access]:
        reads = [Access("reads", t, True, False) for t in self.reads]
        return reads + [Access("writes", t, False, True) for t in self.writes]

    def info(self) -> LaunchInfo:
        """For those who ask what a program launches."""
        uses = tuple(access.use for access in self.accesses())
        return LaunchInfo(
            self.name, helper=self.helper, uses=uses, starts_early=self.starts_early, waits=self.waits,
            lets_go_early=self.lets_go_early,
        )  # fmt: skip
