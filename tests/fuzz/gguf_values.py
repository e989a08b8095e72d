"""Values that a stranger may give the keys of a GGUF file."""

from __future__ import annotations

import random
import struct
from typing import Any

from support.gguf_files import VALUE_TYPES

Rng = random.Random

WHOLE = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 100, 128, 255, 256, 257, 512, 513, 1024, 1025, 4096, 10**5, 10**6),
    *(10**9, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63)),
)
REAL = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e-38, -1e-38, 1e-6, 1e6, 3.4e38, -3.4e38, 1e30, float("inf")),
    *(float("-inf"), float("nan"), 1e300, 1e-300, 0.1, 4.0, 1e9),
)
#: What keys are called behind "<architecture>.", with what they hold.
KEYS = {
    "vocab_size": "u32", "context_length": "u32", "embedding_length": "u32", "block_count": "u32",
    "feed_forward_length": "u32", "attention.head_count": "u32", "attention.head_count_kv": "u32",
    "attention.key_length": "u32", "attention.value_length": "u32", "attention.layer_norm_rms_epsilon": "f32",
    "attention.layer_norm_epsilon": "f32", "attention.scale": "f32", "attention.causal": "bool",
    "attention.sliding_window": "u32", "attention.sliding_window_pattern": "u32", "attention.key_length_swa": "u32",
    "attention.value_length_swa": "u32", "attention.max_alibi_bias": "f32", "attention.clamp_kqv": "f32",
    "attention.kv_lora_rank": "u32", "attention.q_lora_rank": "u32", "attention.key_length_mla": "u32",
    "attention.value_length_mla": "u32", "attention.temperature_scale": "f32", "pooling_type": "u32",
    "hidden_activation": "string", "logit_scale": "f32", "attn_logit_softcapping": "f32",
    "final_logit_softcapping": "f32", "expert_count": "u32", "expert_used_count": "u32",
    "expert_feed_forward_length": "u32", "expert_shared_count": "u32", "expert_gating_func": "u32",
    "expert_weights_norm": "bool", "expert_weights_scale": "f32", "expert_group_count": "u32",
    "expert_group_used_count": "u32", "leading_dense_block_count": "u32", "nextn_predict_layers": "u32",
    "rope.dimension_count": "u32", "rope.dimension_count_swa": "u32", "rope.freq_base": "f32",
    "rope.freq_base_swa": "f32", "rope.scaling.type": "string", "rope.scaling.factor": "f32",
    "rope.scale_linear": "f32",
    "rope.scaling.original_context_length": "u32", "rope.scaling.attn_factor": "f32",
    "rope.scaling.yarn_ext_factor": "f32", "rope.scaling.yarn_beta_fast": "f32", "rope.scaling.yarn_beta_slow": "f32",
    "rope.scaling.yarn_log_multiplier": "f32", "unheard.of": "f32",
}  # fmt: skip
OF_TOKENIZER = {
    "model": "string", "pre": "string", "bos_token_id": "u32", "eos_token_id": "u32", "unknown_token_id": "u32",
    "seperator_token_id": "u32", "cls_token_id": "u32", "eot_token_id": "u32", "eom_token_id": "u32",
    "fim_pre_token_id": "u32", "fim_pad_token_id": "u32", "add_bos_token": "bool", "add_eos_token": "bool",
    "add_space_prefix": "bool", "normalizer.lowercase": "bool", "normalizer.strip_accents": "bool",
    "token_type_count": "u32", "tokens": "array:string", "merges": "array:string", "scores": "array:f32",
    "token_type": "array:i32",
}  # fmt: skip
OTHERS = {
    "general.architecture": "string", "general.name": "string", "general.alignment": "u32", "split.count": "u32",
    "split.no": "u32", "split.tensors.count": "u32", "tokenizer.chat_template": "string", "general.file_type": "u32",
}  # fmt: skip
WORDS = (
    *("yarn", "linear", "none", "longrope", "su", "gelu", "silu", "llama", "gpt2", "bert", "gemma4", "no_vocab", "t5"),
    *("default", "gpt-2", "llama-bpe", "qwen2", "kimi-k2", "deepseek-v3", "superbpe", "jais-2", "viking", "phi-3", ""),
    *("jina-v2-de", "chatglm-bpe", "modern-bert", "nomic-bert-moe", "mixtral", "{{ messages[0]['content'] }}"),
)
RAW = ("\x1b[2J\x1b]0;owned\x07", "\u202eevil\u202c", "\x00", "\r\n\x9b31m", "\u2066", "\ufeff", "a\nb\nc", "%s%n{}{0}")


def hostile_number(rng: Rng, old: Any) -> int | float:
    """One that breaks sums, products and comparisons, or is next to the right one."""
    near = (old + rng.choice((-1, 1)), old * 2, old // 2, old * 1000) if isinstance(old, (int, float)) else (0,)
    return rng.choice((rng.choice(WHOLE), rng.choice(REAL), rng.choice(near), rng.getrandbits(rng.randint(1, 64))))


def hostile_text(rng: Rng) -> str | bytes:
    """Names that steer terminals, are endless, or are no UTF-8; and words that some key may have."""
    long = rng.choice(("A", "\x1b", "ab ", "\u202e", "\u00e9")) * rng.choice((70, 5000, 100_000, 300_000))
    return rng.choice((rng.choice(RAW), rng.choice(WORDS), long, b"\xff\xfe\x80", rng.randbytes(20), rng.choice(WORDS)))


def hostile_array(rng: Rng, old: Any) -> tuple[str, Any]:
    """(kind, value) of any type, arrays among them."""
    n = rng.choice((0, 1, 2, 3, 5, 8, 100, 5000, 60_000))
    kind = rng.choice((*VALUE_TYPES, "string", "array:string", "array"))
    if kind == "string":
        return kind, hostile_text(rng)
    if kind == "array:string":
        text = hostile_text(rng)
        return kind, [text if len(text) * n < 10**6 else "x"] * n
    if kind == "array":
        kind = rng.choice(list(VALUE_TYPES))
        return f"array:{kind}", [of_kind(kind, hostile_number(rng, 4)) for _ in range(min(n, 20))] * (n // 20 + 1)
    return kind, of_kind(kind, hostile_number(rng, old))


def hostile_key(rng: Rng, arch: str) -> tuple[str, str, Any]:
    """A key with a value of the type that it has, mostly."""
    table = {f"{arch}.{key}": kind for key, kind in KEYS.items()}
    if rng.random() < 0.4:
        table = {f"tokenizer.ggml.{key}": kind for key, kind in OF_TOKENIZER.items()} | OTHERS
    key = rng.choice(list(table))
    if rng.random() < 0.05:
        text = hostile_text(rng)
        key = arch + "." + (text if isinstance(text, str) else text.decode("latin-1"))[:20_000]
        table[key] = "u32"
    kind = table[key]
    if rng.random() < 0.25 or kind.startswith("array"):
        return (key, *hostile_array(rng, 4))
    if kind == "string":
        return key, kind, hostile_text(rng)
    return key, kind, of_kind(kind, hostile_number(rng, 4))


def of_kind(kind: str, number: float) -> int | float:
    """The number as that type can hold it: wrapped, cut, or infinite."""
    code = VALUE_TYPES[kind][1]
    if code in "fd":
        try:
            struct.pack("<" + code, float(number))
            return float(number)
        except OverflowError:
            return float("inf")
    bits = 8 * struct.calcsize("<" + code)
    whole = int(number) if number == number and abs(number) != float("inf") else -1
    if kind == "bool":
        return whole % 2 if whole % 7 else 2
    whole %= 1 << bits
    return whole - (1 << bits) if code.islower() and whole >> (bits - 1) else whole
