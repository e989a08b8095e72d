"""LoRA (arXiv 2106.09685): two small matrices beside each linear layer of a model, put into its graph."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.arguments import check_fields
from graphrt.backend import Backend, Usage
from graphrt.dtypes import F32
from graphrt.errors import SessionError
from graphrt.models import gguf_write
from graphrt.models.adapters import with_products
from graphrt.tensor import MAX_NAME, Tensor, new_tensor

_LINEAR = re.compile(r"blk\.\d+\.(\w+)\.weight")
_F32_KEY = 6  # the format's number of f32 values


@dataclass(frozen=True)
class LoraOptions:
    """rank: of the adapters; alpha: an adapter's result is scaled by alpha / rank; targets: which matrices get one, by
    the part of their name in a layer ("attn_q"), none for all; seed: of the random start."""

    rank: int = 16
    alpha: float = 32.0
    targets: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, SessionError)
        if not 1 <= self.rank <= 4096 or not self.alpha > 0:
            raise SessionError(f"rank must be 1 to 4096 and alpha over 0, got rank {self.rank} and alpha {self.alpha}")


def lora_of(text: str) -> LoraOptions:
    """What `lora:16` says. Raises SessionError for anything else."""
    kind, _, rank = text.partition(":")
    if kind != "lora" or not rank.isdecimal() or len(rank) > 4:
        raise SessionError(f"what is trained must be lora:RANK, such as lora:16, got {text[:40]!r}")
    return LoraOptions(rank=int(rank), alpha=2.0 * int(rank))


class Adapter(NamedTuple):
    """What a product with `weight`, [k, m], gets added: alpha / rank * b (a x). a: f32 [k, rank]; b: f32 [rank, m]."""

    weight: Tensor
    a: Tensor
    b: Tensor


class Adapted(NamedTuple):
    """result: of the graph with adapters in it; adapters: in the graph's order."""

    result: Tensor
    adapters: list[Adapter]


def state(like: Sequence[int], name: str, backend: Backend, values: npt.NDArray[np.float32] | None = None) -> Tensor:
    """A leaf f32 in the backend's memory that steps may write, 0 unless it has values."""
    leaf = new_tensor("f32", *like, name=name[: MAX_NAME - 1])
    leaf.buffer = backend.alloc(leaf.nbytes, Usage.STATE)
    given = np.zeros(leaf.n_elements, np.float32) if values is None else values
    leaf.buffer.write(0, np.ascontiguousarray(given).reshape(-1).view(np.uint8))
    return leaf


def new_adapter(weight: Tensor, options: LoraOptions, backend: Backend) -> Adapter:
    """An adapter whose result is 0: a is random, as torch starts linear layers, b is 0."""
    k, m = weight.ne[:2]
    rng = np.random.default_rng([options.seed, zlib.crc32(weight.name.encode())])
    start = rng.uniform(-1.0, 1.0, (options.rank, k)).astype(np.float32) / np.float32(k**0.5)
    a = state((k, options.rank), f"{weight.name}.lora_a", backend, start)
    return Adapter(weight, a, state((options.rank, m), f"{weight.name}.lora_b", backend))


def adapted(result: Tensor, make: Callable[[Tensor], Adapter], targets: Sequence[str], scale: float) -> Adapted:
    """The graph of `result` with an adapter beside each of its linear layers, MUL_MATs by matrices of a layer.

    make: gives a weight its adapter; targets, scale: see LoraOptions. Raises SessionError where there is none.
    """
    adapters: dict[Tensor, Adapter] = {}
    seen: set[str] = set()

    def product(node: Tensor, x: Tensor) -> Tensor | None:
        kind = _kind(node)
        seen.add(kind)
        if not kind or (targets and kind not in targets):
            return None
        weight = node["weights"]
        adapter = adapters[weight] if weight in adapters else adapters.setdefault(weight, make(weight))
        return ops.mul_mat(adapter.b, ops.scale(ops.mul_mat(adapter.a, x), scale))

    found = with_products(result, product)
    unknown = [name for name in targets if name not in seen]
    if unknown or not adapters:
        known = ", ".join(sorted(seen - {""})) or "none"
        raise SessionError(f"targets must be linear layers of the model, {known}, got {', '.join(unknown) or 'none'}")
    return Adapted(found, list(adapters.values()))


def _kind(node: Tensor) -> str:
    """What the matrix of a product by weights is called within its layer, "" outside of layers."""
    found = _LINEAR.fullmatch(node["weights"].name)
    return found[1] if found else ""


def values_of(leaf: Tensor) -> npt.NDArray[np.float32]:
    """What a leaf f32 with a buffer holds, in torch's shape without leading ones: [rows, columns]."""
    assert leaf.buffer is not None
    raw = leaf.buffer.read(leaf.offset, leaf.nbytes)
    return raw.view(np.float32).reshape(leaf.ne[1], leaf.ne[0])


def save(path: Path, adapters: Sequence[Adapter], arch: str, alpha: float) -> None:
    """Writes adapters as a GGUF file, as llama.cpp's --lora reads them. Raises GGUFError where it can't be written."""
    keys = {
        "general.type": gguf_write.string("adapter"), "general.architecture": gguf_write.string(arch),
        "adapter.type": gguf_write.string("lora"), "adapter.lora.alpha": struct.pack("=If", _F32_KEY, alpha),
    }  # fmt: skip
    parts = [(f"{x.weight.name}.lora_{side}", leaf) for x in adapters for side, leaf in (("a", x.a), ("b", x.b))]
    tensors = [gguf_write.Planned(name, F32, leaf.ne[:2]) for name, leaf in parts]
    with gguf_write.writing(path, keys, tensors) as writer:
        for planned, (_, leaf) in zip(tensors, parts):
            writer.tensor(planned, [values_of(leaf).view(np.uint8)])
