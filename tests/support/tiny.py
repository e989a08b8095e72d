"""Tiny random models, the same bytes everywhere: what the model tests run, and what llama.cpp made golden logits of.

With tokenizer="spm" or "bpe" a model also has a small vocabulary, and with chat=CHAT a chat template: enough for the
command line. The golden logits are of the models without.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
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


Shapes = dict[str, tuple[int, ...]]
MODELS = {"llama": llama, "gemma3": gemma3}
#: Those of tiny_archs.py, whose golden logits lie elsewhere.
OTHERS: dict[str, Callable[[], tuple[str, dict[str, Any], Shapes]]] = {}

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
PIECES = (
    *("▁", *"etaoinshrdlucmfwypvbgkjqxz", *"ETAOIN", *".,!?'-0123456789", "é", "日"),
    *("▁t", "he", "in", "re", "an", "on", "▁a", "▁the", "▁w", "▁se", "▁sea", "ll", "lo", "▁he", "▁hel", "▁hello"),
    b"\xff\xfe",  # a piece that is no UTF-8, as damaged vocabularies have
)
#: Renders to special tokens, as real models' templates do.
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spm() -> dict[str, Any]:
    """<unk>, <s>, </s>, a token a byte, two control tokens, pieces: the longer the earlier it is merged."""
    entries: list[tuple[str | bytes, float, int]] = [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
    ]
    entries += [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)]
    entries += [(IM_START, 0.0, CONTROL), (IM_END, 0.0, CONTROL)]
    entries += [(piece, float(len(piece)) - i / 256 - 20, NORMAL) for i, piece in enumerate(PIECES)]
    return {
        "model": "llama", "tokens": [e[0] for e in entries], "scores": [e[1] for e in entries],
        "token_type": [e[2] for e in entries], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
        "add_bos_token": True,
    }  # fmt: skip


def bpe() -> dict[str, Any]:
    """GPT-2's 256 byte characters, a few merges, two control tokens; no BOS."""
    merges = ["h e", "Ġ t", "Ġt he", "l l", "he ll", "hell o", "Ġ s", "e a", "Ġs ea"]
    tokens = [*byte_chars(), *(pair.replace(" ", "") for pair in merges), "<|endoftext|>", IM_START, IM_END]
    kinds = [NORMAL] * (len(tokens) - 3) + [CONTROL] * 3
    end = len(tokens) - 3
    return {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": end,
        "eos_token_id": end, "add_bos_token": False,
    }  # fmt: skip


def byte_chars() -> list[str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    return [chr(b if b in printable else 256 + b - sum(p < b for p in printable)) for b in range(256)]


VOCABS = {"spm": spm, "bpe": bpe}


def values(name: str, ne: tuple[int, ...]) -> np.ndarray:
    """float32 of shape `ne` reversed, a function of the name: norms and factors near 1, the rest near 0."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    raw = np.random.Philox(key=seed).random_raw(int(np.prod(ne)))
    unit = ((raw >> np.uint64(40)).astype(np.float64) / 2.0**24 * 2 - 1) * 3**0.5
    mean = 1.0 if re.search(r"norm(_2)?\.weight|rope_f|act\.scales", name) else 0.0
    spread = 0.02 if name == "token_embd.weight" else 0.15
    return (mean + spread * unit).astype(np.float32).reshape(ne[::-1])


def blocks(name: str, ne: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random blocks of Q4_K or Q6_K, which gguf does not quantize to: uint8, values of about 0.1 around 0."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    raw = np.random.Philox(key=seed).random_raw(int(np.prod(ne)) // block * -(-size // 8)).view(np.uint8)
    made = raw.reshape(-1, -(-size // 8) * 8)[:, :size].copy()
    scales = (3e-4, 7.5 * 3e-4) if kind.name == "Q4_K" else (8e-5,)
    at = 0 if kind.name == "Q4_K" else size - 2
    made[:, at : at + 2 * len(scales)] = np.array(scales, np.float16).view(np.uint8)
    return made.reshape(*ne[:0:-1], -1)


def write_model(
    path: Path,
    model: str,
    tensor_type: str = "F32",
    *,
    tokenizer: str | None = None,
    chat: str | None = None,
    vocab: dict[str, Any] | None = None,
    **changed: Any,
) -> Path:
    """Writes a tiny model; matrices but routers in `tensor_type` where their rows allow, in MXFP4 only experts and the
    others in Q8_0, as people's files are. `changed` keys replace the model's own.

    tokenizer: "spm" or "bpe" instead of none, with as many tokens in the model; vocab: keys that replace its own
    (without "tokenizer.ggml."); chat: the chat template's text.
    """
    arch, keys, shapes = (MODELS | OTHERS)[model]()
    words = VOCABS[tokenizer]() | (vocab or {}) if tokenizer else {"model": "no_vocab"}
    if tokenizer:
        keys = keys | {"vocab_size": len(words["tokens"])}
        tables = [name for name in ("token_embd.weight", "output.weight") if name in shapes]
        shapes = shapes | {name: (shapes[name][0], len(words["tokens"])) for name in tables}
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (keys | changed).items():
        _add(writer, f"{arch}.{key}", value)
    for key, value in (words | ({"token_type_count": 2} if "token_types.weight" in shapes else {})).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    if chat is not None:
        writer.add_string("tokenizer.chat_template", chat)
    for name, ne in shapes.items():
        data = values(name, ne)
        apart = tensor_type == "MXFP4" and "_exps" not in name
        kind = gguf.GGMLQuantizationType["Q8_0" if apart else tensor_type]
        plain = "norm" in name or "ffn_gate_inp" in name or name.endswith("_exps.bias")
        if tensor_type != "F32" and len(ne) > 1 and ne[0] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and not plain:
            quantized = blocks(name, ne, kind) if tensor_type.endswith("_K") else gguf.quants.quantize(data, kind)
            writer.add_tensor(name, quantized, raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])


def tokens(n: int = 40) -> list[int]:
    """n token ids below the vocabulary's size."""
    return [int(t) for t in np.random.Philox(key=7).random_raw(n) % np.uint64(128)]
