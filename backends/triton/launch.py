"""Launches: a kernel with all its arguments, made once and run many times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from triton.runtime.errors import OutOfResources

from graphrt.backends.triton.device import Target, interpreting

if interpreting():
    from graphrt.backends.triton import interpreter  # noqa: F401  (mends Triton's interpreter)


class Launch:
    """kernel: a triton.jit function; args: tensors, numbers and constexprs by name; options: num_warps and the like.

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


def launch_options(target: Target, warps: int) -> dict[str, Any]:
    """How a kernel that waits for the one before it by itself is launched: before that one's end, where that can be."""
    return {"num_warps": warps, **({"launch_pdl": True} if target.has_pdl else {})}


def in_turn(launch: Launch) -> Launch:
    """A launch_options() launch, changed to begin when the one before it has ended: for a kernel that reads weights
    before it waits for that one, where that one may write them."""
    if "PDL" in launch.args:
        launch.args["PDL"] = False
    else:
        launch.args["form"] = replace(launch.args["form"], pdl=False)
    launch.options.pop("launch_pdl", None)
    return launch
