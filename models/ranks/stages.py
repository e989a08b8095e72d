"""Stages of a pipeline: which layers each has, and with them which tensors of a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from graphrt.errors import ArchError
from graphrt.models.gguf import TensorInfo
from graphrt.models.ranks.share import Span

_LAYER = re.compile(r"blk\.([0-9]+)\..+")
#: Tensors outside of layers that only the first stage reads, or the last, by their names without what follows the last
#: dot. All stages have the others.
FIRST = ("token_embd", "token_embd_norm", "position_embd")
LAST = ("output", "output_norm", "cls.output")


def owners(name: str, layers: Sequence[Span]) -> range:
    """The stages that have the tensor of that name, given the layers of each."""
    found, last = _LAYER.fullmatch(name), len(layers) - 1
    if found:
        il = int(found[1])
        stage = next((i for i, (_, stop) in enumerate(layers) if il < stop), last)
        return range(stage, stage + 1)
    stem = name.rpartition(".")[0]
    if stem in FIRST:
        return range(1)
    return range(last, last + 1) if stem in LAST else range(len(layers))


def stages_of(tensors: Mapping[str, TensorInfo], n_layer: int, stages: int) -> tuple[Span, ...]:
    """The layers of each stage: those cuts for which the stage with the most bytes of weights has the fewest. Raises
    ArchError where there are more stages than layers."""
    if stages > n_layer:
        raise ArchError(
            f"each of {stages} stages of a pipeline must have a layer, the model has {n_layer}; use at most so many"
        )
    costs = [0] * n_layer
    for name, info in tensors.items():
        found = _LAYER.fullmatch(name)
        at = int(found[1]) if found else -1 if name.rpartition(".")[0] in LAST else 0
        costs[min(at, n_layer - 1)] += info.nbytes
    if "output.weight" not in tensors and stages > 1:
        costs[-1] += tensors["token_embd.weight"].nbytes  # the last stage has the embedding in its place
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(costs, stages, middle) else (middle + 1, high)
    return _filled(costs, stages, low)


def _filled(costs: Sequence[int], stages: int, most: int) -> tuple[Span, ...]:
    """Layers in their order, as many to a stage as take no more than `most`, and one for each stage to come."""
    edges, held = [0], 0
    for il, cost in enumerate(costs):
        left = stages - len(edges)
        must = len(costs) - il <= left
        if il > edges[-1] and left and (held + cost > most or must):
            edges.append(il)
            held = 0
        held += cost
    return tuple(zip(edges, [*edges[1:], len(costs)]))


def _fits(costs: Sequence[int], stages: int, most: int) -> bool:
    spans = _filled(costs, stages, most)
    return len(spans) == stages and all(sum(costs[a:b]) <= most for a, b in spans)
