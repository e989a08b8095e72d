"""Adapters of tiny models, and models with the same merged into their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from graphrt.models.model import Model

FloatArray = npt.NDArray[np.float64]
#: Linear layers of every tiny model with a plain feed-forward of its own.
TARGETS = ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")


def write_adapter(
    path: Path,
    model: Model,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    targets: Sequence[str] = TARGETS,
    more: Sequence[str] = (),
    keys: Mapping[str, str] = {},
    quantized: bool = False,
) -> dict[str, FloatArray]:
    """Writes a random adapter of the matrices with these names in all layers, and of `more`; gives what is to be added
    to each matrix, float64 [m, k]. keys: instead of its own; quantized: each A is in Q8_0."""
    rng = np.random.default_rng(seed)
    says = {"general.type": "adapter", "adapter.type": "lora", **keys}
    writer = gguf.GGUFWriter(str(path), says.pop("general.architecture", model.network.hp.arch))
    for key, value in says.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    stems = [f"blk.{il}.{name}.weight" for il in range(model.network.hp.n_layer) for name in targets]
    found = {}
    for stem in [*stems, *more]:
        k, m = model.weights.loaded[stem].ne[:2]
        a = rng.normal(0.0, 0.3 * k**-0.5, (rank, k)).astype(np.float32)
        b = rng.normal(0.0, 0.3, (m, rank)).astype(np.float32)
        if quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(a, kind)
            a = gguf.quants.dequantize(data, kind)
            writer.add_tensor(f"{stem}.lora_a", data, raw_dtype=kind)
        else:
            writer.add_tensor(f"{stem}.lora_a", a)
        writer.add_tensor(f"{stem}.lora_b", b)
        found[stem] = alpha / rank * (b.astype(np.float64) @ a.astype(np.float64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def merge(model: Model, changes: Sequence[tuple[float, Mapping[str, FloatArray]]]) -> Model:
    """Adds adapters times their scales to the f32 weights of a model, in memory."""
    for scale, added in changes:
        for stem, delta in added.items():
            leaf = model.weights.loaded[stem]
            assert leaf.buffer is not None and leaf.dtype.name == "f32"
            now = leaf.buffer.read(leaf.offset, leaf.nbytes).view(np.float32).reshape(delta.shape)
            leaf.buffer.write(leaf.offset, (now + scale * delta).astype(np.float32).reshape(-1).view(np.uint8))
    return model
