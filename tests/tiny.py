"""Tiny random models, the same bytes everywhere: what the model tests run, and what llama.cpp made the golden logits of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, tuple[tuple[int, ...], float]]

COMMON = {"vocab_size": 128, "context_length": 256}


def _layer(il: int, n: int, q: int, kv: int, ff: int, extra: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n,), "attn_q.weight": (n, q), "attn_k.weight": (n, kv), "attn_v.weight": (n, kv),
        "attn_output.weight": (q, n), "ffn_norm.weight": (n,), "ffn_gate.weight": (n, ff), "ffn_up.weight": (n, ff),
        "ffn_down.weight": (ff, n),
    }  # fmt: skip
    return {f"blk.{il}.{name}": ne for name, ne in (shapes | extra).items()}


def llama() -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]:
    """Grouped heads, biases, frequency factors."""
    keys = COMMON | {
        "embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
    }  # fmt: skip
    biases = {f"attn_{x}.bias": (d,) for x, d in (("q", 64), ("k", 32), ("v", 32), ("output", 64))}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (64, 128), "output_norm.weight": (64,)}
    shapes |= {"output.weight": (64, 128), "rope_freqs.weight": (8,)}
    for il in range(2):
        shapes |= _layer(il, 64, 64, 32, 96, biases)
    return "llama", keys, shapes


def gemma3() -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]:
    """Seven layers, so that one is global; a window of 12 tokens, which 40 tokens leave; stretched global rotation."""
    keys = COMMON | {
        "embedding_length": 48, "block_count": 7, "feed_forward_length": 80, "attention.head_count": 3,
        "attention.head_count_kv": 1, "attention.key_length": 32, "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 12, "rope.freq_base": 1000000.0,
        "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
    }  # fmt: skip
    extra = {"attn_q_norm.weight": (32,), "attn_k_norm.weight": (32,)}
    extra |= {"post_attention_norm.weight": (48,), "post_ffw_norm.weight": (48,)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (48, 128), "output_norm.weight": (48,)}
    for il in range(7):
        shapes |= _layer(il, 48, 96, 32, 80, extra)
    return "gemma3", keys, shapes


MODELS = {"llama": llama, "gemma3": gemma3}


def values(name: str, ne: tuple[int, ...]) -> np.ndarray:
    """float32 of shape `ne` reversed, a function of the name: norms and factors near 1, the rest near 0."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    raw = np.random.Philox(key=seed).random_raw(int(np.prod(ne)))
    unit = ((raw >> np.uint64(40)).astype(np.float64) / 2.0**24 * 2 - 1) * 3**0.5
    mean = 1.0 if "norm" in name or "rope_freqs" in name else 0.0
    spread = 0.02 if name == "token_embd.weight" else 0.15
    return (mean + spread * unit).astype(np.float32).reshape(ne[::-1])


def write_model(path: Path, model: str, tensor_type: str = "F32", **changed: Any) -> Path:
    """Writes a tiny model; matrices in `tensor_type` where their rows allow. `changed` keys replace the model's own."""
    arch, keys, shapes = MODELS[model]()
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (keys | changed).items():
        kind = {int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType[kind])
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    kind = gguf.GGMLQuantizationType[tensor_type]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, ne in shapes.items():
        data = values(name, ne)
        if tensor_type != "F32" and len(ne) == 2 and ne[0] % block == 0:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens(n: int = 40) -> list[int]:
    """n token ids below the vocabulary's size."""
    return [int(t) for t in np.random.Philox(key=7).random_raw(n) % np.uint64(128)]
