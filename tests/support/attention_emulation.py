"""Cases of FLASH_ATTN_EXT through the launches of an sm_90, Hopper's kernels in the emulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphrt.backend import Usage
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.judge import Verdict
from graphrt.tensor import Tensor
from graphrt.testing import Case
from graphrt.tools.conformance.run.reference import know
from support import gluon_attention, gluon_emulator, gluon_warps
from support.aot_arch import target_of
from support.gluon_emulator import Value


def run(
    case: Case, sm_count: int, seed: int = 0, schedule: str | None = "tile"
) -> tuple[list[str], np.ndarray, Verdict]:  # fmt: skip
    """(kernels that ran, result, whether it is right) on a GPU of so many multiprocessors; see result()."""
    inputs, kernels = case.build(), list[str]()
    found = result(inputs.result, inputs.values, sm_count, seed, kernels, schedule)
    return kernels, found, know(inputs).judge(inputs.result, found)


def result(
    node: Tensor, given: Mapping[Tensor, Any], sm_count: int, seed: int = 0, kernels: list[str] | None = None,
    schedule: str | None = "tile",
) -> np.ndarray:  # fmt: skip
    """The result of a node. given: of each leaf, as stored; seed: of the order of things in kernels with several
    partitions; kernels: takes the names of those that ran. Memory that nothing was written to holds NaN. No tile may be
    done again."""
    places = dict[Tensor, TritonBuffer]()

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        unwritten = torch.full((t.root.nbytes,), 0xFF, dtype=torch.uint8)
        return places.setdefault(t.root, TritonBuffer(unwritten, Usage.COMPUTE)), t.view_offs

    for leaf, values in given.items():
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        place(leaf)[0].memory[: len(data)] = torch.from_numpy(data.copy())
    launcher = Launcher(replace(target_of("sm_90"), sm_count=sm_count), place, schedule)
    steps = [step for step in launcher.launches(attention_of(node)) if isinstance(step, Launch)]
    for step in steps:
        if step.kernel.__name__.startswith("hopper"):
            gluon_attention.emulate(step, seed)
        elif step.kernel.__name__.startswith("flash_attn_decode"):
            gluon_emulator.emulate(step, True)
        else:
            step.args |= {name: False for name in ("PDL", "PTX") if name in step.args}
            step.options.pop("launch_pdl", None)
            step()
    assert not any(int(count) for count in launcher.scratch.redone), "tiles are done again"
    if kernels is not None:
        kernels += [step.kernel.__name__ for step in steps]
    memory = places[node.root].memory
    if node.dtype.is_float8:  # as stored
        return memory[: node.n_elements].numpy().reshape(node.shape)
    return memory.view(torch.float32)[: node.n_elements].numpy().reshape(node.shape)


def largest_start(case: Case) -> float:
    """The largest sum that a product of P and V goes on from."""
    found = [0.0]
    start = gluon_warps.Products.start

    def watched(self: gluon_warps.Products, a: Any, b: Any, acc: Any, is_async: bool, use_acc: bool = True) -> Any:
        if use_acc:
            found.append(float(np.abs(acc.data).max()) if isinstance(acc, Value) else math.inf)
        return start(self, a, b, acc, is_async, use_acc)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon_warps.Products, "start", watched)
        run(case, 1)
    return max(found)
