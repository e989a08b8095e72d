"""What a kernel of attention's gradients is to the launcher: whose it makes, which problems it serves, its launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.backward.forms import FORMS
from graphrt.backends.triton.kernels.flash_attn.backward.problem import BackProblem
from graphrt.backends.triton.kernels.flash_attn.backward.shared import Shared


class BackKernel(ABC):
    """One kernel considered for one problem on one GPU. The rest may be asked only if serves() returns None.

    name: as people read it; file: of kernels/flash_attn/; forms: those it belongs to; makes: the sources whose
    gradients it can make in its launch; of: those of them that are wanted.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    forms: ClassVar[tuple[str, ...]] = FORMS
    makes: ClassVar[tuple[str, ...]]

    def __init__(self, p: BackProblem, of: Sequence[str], target: Target) -> None:
        self.p = p
        self.of = tuple(of)
        self.target = target

    @abstractmethod
    def serves(self) -> str | None:
        """None, or a sentence why it does not serve the problem."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """How its work is cut up."""

    @abstractmethod
    def launches(self, shared: Shared) -> list[Step]:
        """The launches, with those before them of what is shared and not made yet."""

    # What follows is for the record.

    @property
    @abstractmethod
    def tiles(self) -> str:
        """Tiles and warps, in words."""

    @property
    def unordered(self) -> tuple[str, ...]:
        """The sources whose gradients are added up in any order."""
        return ()

    @property
    def repeatable(self) -> bool:
        """The same inputs give the same bits."""
        return not self.unordered
