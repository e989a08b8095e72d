"""A tiny model of every architecture but those of tiny.py, and of what sets variants of one apart.

A row says what a model has, the tensors follow from it as llama.cpp's loader asks for them. write_model() of tiny.py
writes them, by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from support import tiny

N_VOCAB, N_CTX = tiny.COMMON["vocab_size"], tiny.COMMON["context_length"]


@dataclass(frozen=True)
class Tiny:
    """bias: layer tensors (without ".weight") that have one; extra: further tensors of a layer, in n_embd n, n_ff ff,
    heads h, kv heads g, head size d; top: further tensors outside; without: those of a llama that it has not; rms: the
    kind of norm; fused: q, k and v in one; gate: none, apart, or "fused" in up; keys: beside the sizes; experts: what
    takes the place of the feed-forward's, but in the first `dense` layers."""

    arch: str
    n: int = 64
    heads: tuple[int, int] = (4, 2)
    d: int = 0
    ff: int = 96
    layers: int = 2
    rms: bool = True
    fused: bool = False
    gate: str = "apart"
    bias: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    top: dict[str, tuple[int, ...]] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dense: int = 0

    def model(self) -> tuple[str, dict[str, Any], tiny.Shapes]:
        """What tiny.py's models are: the architecture, its keys, its tensors."""
        d = self.d or self.n // self.heads[0]
        eps = {"attention.layer_norm_rms_epsilon": 1e-6} if self.rms else {"attention.layer_norm_epsilon": 1e-5}
        keys: dict[str, Any] = tiny.COMMON | eps | {
            "embedding_length": self.n, "block_count": self.layers, "feed_forward_length": self.ff,
            "attention.head_count": self.heads[0], "attention.head_count_kv": self.heads[1],
        }  # fmt: skip
        if self.d:
            keys |= {"attention.key_length": d, "attention.value_length": d}
        shapes: tiny.Shapes = {"token_embd.weight": (self.n, N_VOCAB)}
        shapes |= {"output_norm.weight": (self.n,)} if "output_norm" not in self.without else {}
        shapes |= {"output.weight": (self.n, N_VOCAB)} if "output" not in self.without else {}
        shapes |= {"output_norm.bias": (self.n,)} if "output_norm" in self.bias else {}
        for il in range(self.layers):
            shapes |= {f"blk.{il}.{name}": ne for name, ne in self._layer(d, il).items()}
        return self.arch, keys | self.keys, shapes | self.top

    def _layer(self, d: int, il: int) -> tiny.Shapes:
        n, (h, g) = self.n, self.heads
        up = 2 * self.ff if self.gate == "fused" else self.ff
        weights = {"attn_norm": (n,), "ffn_norm": (n,), "ffn_up": (n, up), "ffn_down": (self.ff, n)}
        weights |= {"attn_output": (h * d, n)}
        weights |= {"ffn_gate": (n, self.ff)} if self.gate == "apart" else {}
        parts = {"attn_q": (n, h * d), "attn_k": (n, g * d), "attn_v": (n, g * d)}
        weights |= {"attn_qkv": (n, (h + 2 * g) * d)} if self.fused else parts
        mixes = bool(self.experts) and il >= self.dense
        without = (*self.without, "ffn_gate", "ffn_up", "ffn_down") if mixes else self.without
        weights = {name: ne for name, ne in weights.items() if name not in without} | self.extra
        weights |= self.experts if mixes else {}
        shapes = {f"{name}.weight" if "." not in name else name: ne for name, ne in weights.items()}
        return shapes | {f"{name}.bias": (ne[-1],) for name, ne in weights.items() if name in self.bias}


NORMS = ("attn_norm", "ffn_norm", "output_norm")
QKV = ("attn_q", "attn_k", "attn_v")
POSITIONS = {"position_embd.weight": (64, N_CTX)}
EVERYWHERE = (*NORMS, "attn_qkv", "attn_output", "ffn_up", "ffn_down")
BOTH_SIDES = {"post_attention_norm": (64,), "post_ffw_norm": (64,)}
ENCODED = {"attn_output_norm": (64,), "layer_output_norm": (64,)}
WINDOW = {"attention.sliding_window": 12}
gpt = partial(Tiny, rms=False, fused=True, gate="none", heads=(4, 4))
TYPES = {"token_types.weight": (64, 2), "token_embd_norm.weight": (64,), "token_embd_norm.bias": (64,)}
encoder = partial(
    Tiny, rms=False, heads=(4, 4), without=("attn_norm", "ffn_norm", "output_norm", "output"), extra=ENCODED
)


def experts(n: int, ff: int, count: int, bias: bool = False, merged: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a mixture: its router and `count` feed-forwards of width ff."""
    sides = {"ffn_gate_up_exps": (n, 2 * ff)} if merged else {"ffn_gate_exps": (n, ff), "ffn_up_exps": (n, ff)}
    sides["ffn_down_exps"] = (ff, n)
    found: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (n, count)}
    found |= {"ffn_gate_inp.bias": (count,)} if bias else {}
    for name, ne in sides.items():
        found |= {name: (*ne, count)} | ({f"{name}.bias": (ne[1], count)} if bias else {})
    return found


def chosen(count: int, used: int, **more: Any) -> dict[str, Any]:
    """The keys of a mixture."""
    return {"expert_count": count, "expert_used_count": used} | {f"expert_{key}": v for key, v in more.items()}


def shared(n: int, ff: int) -> dict[str, tuple[int, ...]]:
    return {"ffn_gate_shexp": (n, ff), "ffn_up_shexp": (n, ff), "ffn_down_shexp": (ff, n)}


def latent(n: int, heads: int, q: int, kv: int) -> dict[str, Any]:
    """The fields of a Tiny with latent attention: rows of kv + 16, heads of k of 32 + 16 and of v of 32."""
    extra: dict[str, tuple[int, ...]] = {"attn_q": (n, heads * 48)}
    if q:
        extra = {"attn_q_a": (n, q), "attn_q_a_norm": (q,), "attn_q_b": (q, heads * 48)}
    extra |= {"attn_kv_a_mqa": (n, kv + 16), "attn_kv_a_norm": (kv,), "attn_output": (heads * 32, n)}
    extra |= {"attn_k_b": (32, kv, heads), "attn_v_b": (kv, 32, heads)}
    keys: dict[str, Any] = {"key_length": kv + 16, "value_length": kv, "key_length_mla": 48, "value_length_mla": 32}
    keys = {f"attention.{key}": value for key, value in (keys | {"kv_lora_rank": kv}).items()}
    keys |= {"attention.q_lora_rank": q} if q else {}
    return {"n": n, "heads": (heads, 1), "without": (*QKV, "attn_output"), "extra": extra,
            "keys": keys | {"rope.dimension_count": 16, "leading_dense_block_count": 1}, "dense": 1}  # fmt: skip


def deepseek(
    experts: dict[str, tuple[int, ...]], keys: dict[str, Any], *, n: int = 64, heads: int = 4, q: int = 0, kv: int = 64,
    **changed: Any,
) -> Tiny:  # fmt: skip
    fields = latent(n, heads, q, kv) | changed
    return Tiny("deepseek2", experts=experts, **(fields | {"keys": fields["keys"] | keys}))


def yarn(factor: float, log_multiplier: float = 0.0) -> dict[str, Any]:
    keys = {"type": "yarn", "factor": factor, "original_context_length": 64}
    keys |= {"yarn_log_multiplier": log_multiplier} if log_multiplier else {}
    return {f"rope.scaling.{key}": value for key, value in keys.items()}


#: Rows of whole super-blocks, to be quantized.
WIDE = {
    "qwen3moe-wide": Tiny(
        "qwen3moe",
        n=256,
        ff=512,
        extra={"attn_q_norm": (64,), "attn_k_norm": (64,)},
        experts=experts(256, 256, 4),
        keys=chosen(4, 2),
    ),
    "deepseek2-wide": deepseek(
        experts(256, 256, 4) | shared(256, 256),
        chosen(4, 2, feed_forward_length=256, shared_count=1),
        n=256,
        q=256,
        kv=256,
    ),
    "phi3-wide": Tiny("phi3", n=256, ff=256, fused=True, gate="fused"),
    "falcon-wide": gpt("falcon", n=256, ff=256, heads=(4, 1), bias=("attn_norm", "output_norm"), without=("ffn_norm",)),
}
#: By name: the architecture's, and after a dash what is special. A key that llama.cpp does not read is among them.
DECODERS: dict[str, Tiny] = {
    "llama-window": Tiny("llama", bias=("ffn_up", "ffn_gate", "ffn_down"), keys=WINDOW),
    "llama-yarn": Tiny(
        "llama",
        keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    "qwen2": Tiny("qwen2", bias=QKV, top={"output.bias": (N_VOCAB,)}, keys={"rope.freq_base": 1e6}),
    "qwen2-tied": Tiny("qwen2", bias=QKV, without=("output",)),
    "qwen2-fused": Tiny("qwen2", fused=True, extra={"attn_q.bias": (64,), "attn_k.bias": (32,), "attn_v.bias": (32,)}),
    "qwen3": Tiny(
        "qwen3",
        heads=(4, 1),
        d=32,
        extra={"attn_q_norm": (32,), "attn_k_norm": (32,)},
        top={"cls.output.weight": (64, 1)},
    ),
    "llama-moe": Tiny("llama", experts=experts(64, 96, 6), keys=chosen(6, 3)),
    "llama-moe-one": Tiny("llama", experts=experts(64, 96, 3), keys=chosen(3, 1)),
    "qwen3moe": Tiny(
        "qwen3moe",
        heads=(4, 1),
        d=32,
        extra={"attn_q_norm": (32,), "attn_k_norm": (32,)},
        experts=experts(64, 48, 8),
        keys=chosen(8, 2),
    ),
    "qwen3moe-width": Tiny(
        "qwen3moe",
        extra={"attn_q_norm": (16,), "attn_k_norm": (16,)},
        experts=experts(64, 32, 5),
        keys=chosen(5, 5, feed_forward_length=32),
        without=("output",),
    ),
    "gpt-oss": Tiny(
        "gpt-oss",
        d=32,
        layers=3,
        bias=(*QKV, "attn_output"),
        without=("ffn_norm",),
        extra={"post_attention_norm": (64,), "attn_sinks": (4,)},
        experts=experts(64, 96, 8, bias=True),
        keys=WINDOW | yarn(4.0) | chosen(8, 3, feed_forward_length=96),
    ),
    "deepseek2": deepseek(
        experts(64, 32, 12) | {"exp_probs_b.bias": (12,)} | shared(64, 64),
        yarn(4.0, 0.1)
        | chosen(12, 3, feed_forward_length=32, shared_count=2, gating_func=2, weights_norm=True, weights_scale=2.5)
        | {"expert_group_count": 3, "expert_group_used_count": 2},
        q=32,
    ),
    "deepseek2-lite": deepseek(
        experts(32, 32, 6) | shared(32, 64),
        yarn(8.0, 0.0707) | chosen(6, 2, feed_forward_length=32, shared_count=2),
        n=32,
        heads=2,
        kv=32,
        ff=32,
        layers=26,  # by which llama.cpp knows those that make queries of the embedding
    ),
    "deepseek2-merged": deepseek(
        experts(64, 32, 6, merged=True) | shared(64, 32),
        chosen(6, 2, feed_forward_length=32, shared_count=1, weights_scale=1.5),
        q=32,
    ),
    "gemma": Tiny("gemma", heads=(3, 1), d=32, without=("output",)),
    "gemma2": Tiny("gemma2", layers=3, without=("output",), extra=BOTH_SIDES, keys=WINDOW),
    "gemma2-caps": Tiny(
        "gemma2",
        layers=3,
        without=("output",),
        extra=BOTH_SIDES,
        keys=WINDOW
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention.sliding_window_pattern": 3},
    ),
    "phi3": Tiny("phi3", fused=True, gate="fused", keys=WINDOW),
    "phi3-long": Tiny(
        "phi3",
        fused=True,
        gate="fused",
        top={"rope_factors_long.weight": (8,), "rope_factors_short.weight": (8,)},
        keys={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.25,
        },
    ),
    "phi3-short": Tiny(
        "phi3",
        gate="fused",
        top={"rope_factors_long.weight": (8,), "rope_factors_short.weight": (8,)},
        keys={"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 256},
    ),
    "gpt2": gpt("gpt2", bias=EVERYWHERE, top=POSITIONS, without=("output",)),
    "gpt2-grouped": gpt(
        "gpt2",
        heads=(4, 2),
        d=16,
        bias=EVERYWHERE,
        top=POSITIONS,
    ),
    "mpt": gpt("mpt", n=96, heads=(6, 2), keys={"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.7}),
    "mpt-full": gpt(
        "mpt",
        bias=EVERYWHERE,
        top=POSITIONS,
        extra={"attn_k_norm": (64,), "ffn.act.scales": (96,)},
    ),
    "bloom": gpt(
        "bloom",
        bias=EVERYWHERE,
        n=48,
        heads=(3, 3),
        top={"token_embd_norm.weight": (48,), "token_embd_norm.bias": (48,)},
    ),
    "refact": Tiny(
        "refact",
        heads=(4, 1),
        bias=("attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        top={"rope_freqs.weight": (8,)},
    ),
    "falcon": gpt("falcon", heads=(4, 1), bias=("attn_norm", "output_norm"), without=("ffn_norm",)),
    "falcon-40b": gpt(
        "falcon",
        heads=(4, 2),
        bias=("attn_norm", "attn_norm_2", "output_norm"),
        without=("ffn_norm", "output"),
        extra={"attn_norm_2": (64,)},
    ),
    "olmo2": Tiny(
        "olmo2", without=("attn_norm", "ffn_norm"), extra=BOTH_SIDES | {"attn_q_norm": (64,), "attn_k_norm": (32,)}
    ),
    "olmo2-window": Tiny(
        "olmo2",
        layers=5,
        without=("attn_norm", "ffn_norm"),
        extra=BOTH_SIDES | {"attn_q_norm": (64,), "attn_k_norm": (32,)},
        keys=WINDOW | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "command-r": Tiny("command-r", rms=False, without=("ffn_norm", "output"), keys={"logit_scale": 0.0625}),
    "command-r-plus": Tiny(
        "command-r",
        n=32,
        heads=(2, 1),
        ff=32,
        layers=64,
        rms=False,
        without=("ffn_norm", "output"),
        extra={"attn_q_norm": (16, 2), "attn_k_norm": (16, 1)},
        keys={"logit_scale": 0.5},
    ),
    "starcoder2": Tiny("starcoder2", rms=False, gate="none", bias=(*NORMS, *QKV, "attn_output", "ffn_up", "ffn_down")),
    "stablelm": Tiny("stablelm", rms=False, bias=(*NORMS, *QKV), keys={"rope.dimension_count": 4}),
    "stablelm-12b": Tiny(
        "stablelm",
        rms=False,
        bias=NORMS,
        without=("ffn_norm",),
        extra={"attn_q_norm": (16, 4), "attn_k_norm": (16, 2)},
        keys={"rope.dimension_count": 8},
    ),
}
ENCODERS: dict[str, Tiny] = {
    "bert": encoder(
        "bert",
        gate="none",
        bias=(*QKV, "attn_output", *ENCODED, "ffn_up", "ffn_down"),
        top=TYPES | POSITIONS,
        keys={"attention.causal": False, "pooling_type": 2},
    ),
    "nomic-bert": encoder(
        "nomic-bert",
        fused=True,
        bias=tuple(ENCODED),
        top=TYPES,
        keys={"attention.causal": False, "pooling_type": 1, "rope.freq_base": 1000.0},
    ),
}
tiny.OTHERS.update({name: model.model for name, model in (DECODERS | ENCODERS | WIDE).items()})

#: Models with weights of a type, by their names in DECODERS and the type's.
QUANTIZED = (
    *("gemma2 Q4_0", "mpt Q8_0", "phi3-wide Q4_K", "falcon-wide Q6_K"),
    *("llama-moe Q4_0", "gpt-oss MXFP4", "deepseek2-merged Q8_0", "qwen3moe-wide Q4_K", "deepseek2-wide Q6_K"),
)
#: Token ids of texts that an encoder reads in one batch.
TEXTS = ([1, 17, 99, 5, 64, 2], [1, 2], [1, 120, 33, 33, 8, 71, 44, 9, 10, 11, 127, 0, 3, 2])
