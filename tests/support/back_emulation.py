"""Gradients of attention through the launches of an sm_90, Gluon kernels in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

import graphrt
from graphrt import ops
from graphrt.backend import Usage
from graphrt.backends.triton.kernels.flash_attn.backward import shared
from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackChosen, BackLauncher
from graphrt.backends.triton.kernels.flash_attn.fusions import Gradients
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.graph import Graph
from graphrt.tensor import Tensor
from graphrt.testing import Case
from support import gluon_attention
from support.aot_arch import target_of


def siblings(node: Tensor, of: Sequence[str]) -> list[Tensor]:
    """The gradients of these sources of the attention that a node has a gradient of."""
    named = node.sources_by_name()
    if "q_starts" in named:
        fixed = [named[name] for name in ("d_out", "q", "k", "v", "out", "lse", "q_starts", "k_starts")]
        more = {name: named.get(name) for name in ("sinks", "d_lse")}
        return [ops.flash_attn_varlen_back(source, *fixed, node.params.attn, **more) for source in of]
    first = [named[name] for name in ("d_out", "q", "k", "v", "out", "lse")]
    rest = {name: t for name, t in named.items() if name in ("mask", "sinks", "attn_bias", "d_lse")}
    return [ops.flash_attn_back(source, *first, node.params.attn, **rest) for source in of]


def _launcher(
    case: Case, of: Sequence[str], form: str, change: Callable[[str, Any], Any]
) -> tuple[Any, dict[Tensor, TritonBuffer], list[Tensor], BackLauncher]:
    """A case's inputs, where its tensors lie, the nodes of these sources, and a launcher for an sm_90."""
    inputs, places = case.build(), dict[Tensor, TritonBuffer]()

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        unwritten = torch.full((t.root.nbytes,), 0xFF, dtype=torch.uint8)
        return places.setdefault(t.root, TritonBuffer(unwritten, Usage.COMPUTE)), t.view_offs

    for leaf in inputs.values:
        inputs.values[leaf] = change(leaf.name, inputs.values[leaf])
    for leaf, values in inputs.values.items():
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        place(leaf)[0].memory[: len(data)] = torch.from_numpy(data.copy())
    launcher = BackLauncher(replace(target_of("sm_90"), sm_count=4), place, form)
    return inputs, places, siblings(inputs.result, of), launcher


_NONE = torch.empty(0)


def _round_rows(p_x: torch.Tensor, p_made: torch.Tensor, s_t: int, s_h: int, s_s: int, **rest: Any) -> None:
    """What attention_back_halves does, of bf16, which Triton's interpreter rounds wrongly."""
    p_made.copy_(p_x.as_strided(p_made.shape, (s_s, s_h, s_t, 1)))


def _as_it_is(name: str, values: Any) -> Any:
    return values


def chosen(case: Case, of: Sequence[str], form: str = "split") -> BackChosen:
    """What is chosen for these sources."""
    _, _, nodes, launcher = _launcher(case, of, form, _as_it_is)
    launcher.launches(Gradients(tuple(nodes)))
    return launcher.chosen[nodes[0]]


def run(
    case: Case,
    of: Sequence[str],
    seed: int = 0,
    form: str = "split",
    change: Callable[[str, Any], Any] = _as_it_is,
) -> tuple[BackChosen, list[str], list[tuple[Any, Any]]]:
    """(what was chosen, kernels that ran, for each source the gradient and the CPU's). Memory that nothing was written
    to holds NaN. seed: of the order of things; change: what becomes of an input, by its name."""
    inputs, places, nodes, launcher = _launcher(case, of, form, change)
    ran = []
    # As on a GPU: Hopper's kernels take q and d_out in 16 bits, of bf16 too.
    with mock.patch.object(shared, "interpreting", lambda: False):
        steps = launcher.launches(Gradients(tuple(nodes)))
    for step in steps:
        if isinstance(step, Launch) and step.args.get("p_made", _NONE).dtype == torch.bfloat16:
            _round_rows(**step.args)
            continue
        if isinstance(step, Launch):
            ran.append(step.kernel.__name__)
            if isinstance(step.kernel, GluonJITFunction):
                gluon_attention.emulate(step, seed)
                continue
            step.args |= {name: False for name in ("PDL", "PTX") if name in step.args}
            step.options.pop("launch_pdl", None)
        step()
    pairs = []
    for node in nodes:
        exact = graphrt.prepare(Graph(node), "cpu")
        inputs.fill(exact)
        exact.run()
        found = places[node.root].memory.view(torch.float32)[: node.n_elements].numpy().reshape(node.shape)
        pairs.append((found, exact.read(node)))
    return launcher.chosen[nodes[0]], ran, pairs
