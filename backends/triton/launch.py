"""Launches: a kernel with all its arguments, made once and run many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from graphrt.backends.triton.accesses import Access, declaration_of
from graphrt.backends.triton.device import Target, interpreting
from graphrt.program import LaunchInfo

if interpreting():
    from graphrt.backends.triton import interpreter  # noqa: F401  (mends Triton's interpreter)


class Launch:
    """kernel: a triton.jit function; args: tensors, numbers and constexprs by name, or named tuples of them that the
    kernel takes as one; options: num_warps and the like.

    smaller: arguments to replace, in order, where the device has too little shared memory. They change speed only.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        smaller: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        unknown = args.keys() - set(kernel.arg_names)
        assert not unknown, (
            f"{kernel.__name__} has no parameters {sorted(unknown)}"
        )  # which Triton's interpreter ignores
        self.kernel = kernel
        self.grid = grid
        self.args = dict(args)
        self.options = dict(options or {})
        self.smaller = list(smaller)

    def __call__(self) -> None:
        while True:
            try:
                self.kernel[self.grid](**self.args, **self.options)
                return
            except OutOfResources:
                if not self.smaller:
                    raise
                self.args |= self.smaller.pop(0)

    def compile_ahead(self) -> None:
        """Begins to compile the kernel, where a pool of threads does that; else compiles it."""
        self.kernel.warmup(grid=self.grid, **self.args, **self.options)

    @property
    def starts_early(self) -> bool:
        """It may begin before the launch before it has ended."""
        return bool(self.options.get("launch_pdl", False))

    @property
    def waits(self) -> bool:
        """Its kernel is compiled to wait for the launch before it."""
        return bool(self.args.get("PDL", getattr(self.form, "pdl", False)))

    @property
    def form(self) -> Any:
        """The record that has the constants of a Gluon kernel, None where there is none."""
        return self.args.get("form", self.args.get("spec"))

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def lets_go_early(self) -> bool:
        """It lets the launch after it begin before it has waited itself."""
        return declaration_of(self.kernel).lets_go_early

    def _declared(self, names: frozenset[str]) -> Iterator[tuple[str, str, Any]]:
        """(parameter, name, value) of the arguments that are declared, and of named tuples of each field."""
        for parameter in sorted(names & self.args.keys()):
            value = self.args[parameter]
            fields = getattr(value, "_asdict", None)
            if fields is not None:
                yield from ((parameter, f"{parameter}.{name}", x) for name, x in fields().items())
            else:
                yield parameter, parameter, value

    def accesses(self) -> list[Access]:
        """What its kernel declares, of the tensors that it is given; of a TMA descriptor all that it describes."""
        declared, found = declaration_of(self.kernel), []
        for parameter, name, value in self._declared(declared.names):
            memory = getattr(value, "base", value)
            if isinstance(memory, torch.Tensor):
                needs = declared.early.get(parameter)
                early = self.starts_early and needs is not None and (not needs or bool(self.args[needs]))
                reads, writes = parameter in declared.reads, parameter in declared.writes
                found.append(Access(name, memory, reads, writes, early, parameter in declared.uncached))
        return found

    def info(self) -> LaunchInfo:
        """For those who ask what a program launches."""
        args = self.args | (vars(self.form) if self.form is not None else {})
        chosen = {k for k in args if k.isupper() or k == "n_splits" or k not in self.args}
        return LaunchInfo(
            self.name,
            tuple(self.grid),
            self.options.get("num_warps", 4),
            tuple((k, v) for k, v in args.items() if k in chosen and _is_plain(v)),
            declaration_of(self.kernel).helper,
            tuple(access.use for access in self.accesses()),
            self.starts_early,
            self.waits,
            self.lets_go_early,
        )


def _is_plain(value: object) -> bool:
    """Worth showing: a number or a word that says something."""
    return isinstance(value, (int, float, str)) and value is not False and value != ""


def launch_options(target: Target, warps: int) -> dict[str, Any]:
    """How a kernel that waits for the one before it by itself is launched: before that one's end, where that can be."""
    return {"num_warps": warps, **({"launch_pdl": True} if target.has_pdl else {})}


def without_early_start(launch: Launch) -> Launch:
    """A launch_options() launch, changed to begin when the one before it has ended: for a kernel that reads weights
    before it waits for that one, where that one may write them."""
    if "PDL" in launch.args:
        launch.args["PDL"] = False
    else:
        launch.args["form"] = replace(launch.args["form"], pdl=False)
    launch.options.pop("launch_pdl", None)
    return launch
