"""Shapes of models that people use, for files that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A model's shape. keys: of its file, without the architecture's name; tied: the output is the embedding; mix: of
    the file that people use; rope_factor: of Llama 3.1's stretched rotation, 0 for none; optional: ends of the
    names of those optional tensors that it has."""

    arch: str
    keys: Mapping[str, int | float | str]
    tied: bool
    mix: str = "q4_k_m"
    rope_factor: float = 0.0
    optional: tuple[str, ...] = ()

    @property
    def is_70b(self) -> bool:
        """Llama's 70B, which has mixes of its own, as llama.cpp tells it."""
        heads, kv = (self.keys[f"attention.{key}"] for key in ("head_count", "head_count_kv"))
        return self.arch == "llama" and self.keys["block_count"] == 80 and heads != kv


def _keys(
    vocab: int,
    context: int,
    embd: int,
    layers: int,
    ff: int,
    heads: tuple[int, int],
    head: int,
    eps: float,
    base: float,
) -> dict[str, int | float | str]:
    return {
        "vocab_size": vocab, "context_length": context, "embedding_length": embd, "block_count": layers,
        "feed_forward_length": ff, "attention.head_count": heads[0], "attention.head_count_kv": heads[1],
        "attention.key_length": head, "attention.value_length": head, "attention.layer_norm_rms_epsilon": eps,
        "rope.dimension_count": head, "rope.freq_base": base,
    }  # fmt: skip


def _layer_norm(keys: Mapping[str, int | float | str], **more: int | float) -> dict[str, int | float | str]:
    """The same with layer norms, and no rotation."""
    kept = {key: value for key, value in keys.items() if not key.startswith("rope.")}
    kept["attention.layer_norm_epsilon"] = kept.pop("attention.layer_norm_rms_epsilon")
    return kept | {f"attention.{key}": value for key, value in more.items()}


def _yarn(factor: float, context: int) -> dict[str, int | float | str]:
    """A rotation stretched from a context of so many tokens."""
    scaling: dict[str, int | float | str] = {
        "type": "yarn", "factor": factor, "original_context_length": context,
    }  # fmt: skip
    return {f"rope.scaling.{key}": value for key, value in scaling.items()}


def _gpt_oss(layers: int, experts: int) -> dict[str, int | float | str]:
    keys = _keys(201088, 131072, 2880, layers, 2880, (64, 8), 64, 1e-5, 150000.0) | _yarn(32.0, 4096)
    mixture = {"expert_count": experts, "expert_used_count": 4, "expert_feed_forward_length": 2880}
    return keys | {"attention.sliding_window": 128} | mixture


_QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")

#: Llama 3.1 8B and 70B, Llama 3.2 1B (whose output is tied; here it is a matrix of its own, as in llama.cpp's figures
#: that this is compared with), SmolLM2 135M, Gemma 3 270M, the encoder bge-small-en and others under their usual names,
#: and one to try things out.
RECIPES = {
    "llama-8b": Recipe(
        "llama", _keys(128256, 131072, 4096, 32, 14336, (32, 8), 128, 1e-5, 500000.0), False, rope_factor=8.0
    ),
    "llama-1b": Recipe(
        "llama", _keys(128256, 131072, 2048, 16, 8192, (32, 8), 64, 1e-5, 500000.0), False, rope_factor=32.0
    ),
    "llama-70b": Recipe(
        "llama", _keys(128256, 131072, 8192, 80, 28672, (64, 8), 128, 1e-5, 500000.0), False, rope_factor=8.0
    ),
    "smollm2-135m": Recipe("llama", _keys(49152, 8192, 576, 30, 1536, (9, 3), 64, 1e-5, 100000.0), True, "q4_1"),
    "gemma3-270m": Recipe(
        "gemma3",
        _keys(262144, 32768, 640, 18, 2048, (4, 1), 256, 1e-6, 1000000.0) | {"attention.sliding_window": 512},
        True,
    ),
    "qwen2.5-7b": Recipe(
        "qwen2",
        _keys(152064, 32768, 3584, 28, 18944, (28, 4), 128, 1e-6, 1000000.0),
        False,
        optional=_QKV_BIASES,
    ),
    "qwen3-8b": Recipe("qwen3", _keys(151936, 40960, 4096, 36, 12288, (32, 8), 128, 1e-6, 1000000.0), False),
    "gemma2-2b": Recipe(
        "gemma2",
        _keys(256000, 8192, 2304, 26, 9216, (8, 4), 256, 1e-6, 10000.0) | {"attention.sliding_window": 4096},
        True,
    ),
    "phi3-mini": Recipe(
        "phi3",
        _keys(32064, 4096, 3072, 32, 8192, (32, 32), 96, 1e-5, 10000.0),
        False,
        optional=("attn_qkv.weight",),
    ),
    "gpt2": Recipe("gpt2", _layer_norm(_keys(50257, 1024, 768, 12, 3072, (12, 12), 64, 1e-5, 1.0)), True, "q8_0"),
    "mpt-7b": Recipe(
        "mpt",
        _layer_norm(_keys(50432, 2048, 4096, 32, 16384, (32, 32), 128, 1e-5, 1.0), max_alibi_bias=8.0),
        True,
    ),
    "gpt-oss-20b": Recipe("gpt-oss", _gpt_oss(24, 32), False, "mxfp4", optional=_QKV_BIASES),
    "gpt-oss-120b": Recipe("gpt-oss", _gpt_oss(36, 128), False, "mxfp4", optional=_QKV_BIASES),
    "deepseek2-lite": Recipe(
        "deepseek2",
        _keys(102400, 163840, 2048, 27, 10944, (16, 1), 576, 1e-6, 10000.0)
        | _yarn(40.0, 4096)
        | {"rope.scaling.yarn_log_multiplier": 0.0707, "rope.dimension_count": 64}
        | {"attention.kv_lora_rank": 512, "attention.value_length": 512}
        | {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
        | {"expert_count": 64, "expert_used_count": 6, "expert_feed_forward_length": 1408}
        | {"expert_shared_count": 2, "leading_dense_block_count": 1},
        False,
    ),
    "bge-small": Recipe(
        "bert",
        _layer_norm(_keys(30522, 512, 384, 12, 1536, (12, 12), 32, 1e-12, 1.0), causal=False)
        | {"tokenizer.ggml.token_type_count": 2, "pooling_type": 2},
        True,
        "f16",
        optional=(*_QKV_BIASES, "attn_output.bias", "token_types.weight"),
    ),
    "tiny": Recipe("llama", _keys(512, 512, 256, 3, 416, (4, 2), 64, 1e-5, 10000.0), False, rope_factor=8.0),
}
