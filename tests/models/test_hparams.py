"""Hyperparameters from keys alone: sizes that no tiny model has, and what one key changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.gguf_files import KV, build
from support.tiny_archs import DECODERS

from graphrt.errors import ArchError
from graphrt.models.arch import architecture
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparams import HParams, Keys, yarn_mscale


def read(model: str, **changed: Any) -> HParams:
    """The record of a tiny model's keys with some changed; keys have underscores for the dots of their sections."""
    arch, keys, _ = (tiny.MODELS[model] if model in tiny.MODELS else DECODERS[model].model)()
    named = {key.replace("rope_scaling_", "rope.scaling.").replace("rope_", "rope.", 1)
             .replace("attention_", "attention.", 1): value for key, value in changed.items()}  # fmt: skip
    kv: list[KV] = [("general.architecture", "string", arch)]
    for key, value in (keys | named).items():
        full = f"{arch}.{key}"
        if isinstance(value, list):
            kv.append((full, "array:bool" if isinstance(value[0], bool) else "array:i32", value))
        else:
            kv.append((full, {bool: "bool", int: "u32", float: "f32", str: "string"}[type(value)], value))
    return architecture(arch).read(Keys(GGUFFile.from_bytes(build(kv).data)))


@pytest.mark.parametrize(("model", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_scales_by_the_embeddings_share_of_a_head(model: str, layers: int) -> None:
    sizes = {"embedding_length": 256, "attention_head_count": 4, "attention_head_count_kv": 2}
    heads = {"attention_key_length": 16, "attention_value_length": 16}
    assert read(model, block_count=layers, **sizes, **heads).attn_scale == (256 // 4) ** -0.5
    for other in (layers - 1, layers + 1, 108 - layers):
        assert read(model, block_count=other, **sizes, **heads).attn_scale == 16**-0.5


@pytest.mark.parametrize(("model", "silent"), [("gemma2", 5e5), ("gemma3", 1e4), ("gpt-oss", 5e5)])
def test_layers_with_a_window_have_a_base_of_their_own(model: str, silent: float) -> None:
    hp = read(model, rope_freq_base=5e5)
    assert hp.rope is not None and hp.local_rope is not None
    assert (hp.rope.freq_base, hp.local_rope.freq_base) == (5e5, silent)
    hp = read(model, rope_freq_base=5e5, rope_freq_base_swa=2e4)
    assert hp.rope is not None and hp.local_rope is not None
    assert (hp.rope.freq_base, hp.local_rope.freq_base) == (5e5, 2e4)


def test_windows_of_olmo_are_not_stretched() -> None:
    hp = read("olmo2-window", rope_freq_base=5e5, rope_scaling_type="linear", rope_scaling_factor=4.0)
    assert hp.rope is not None and hp.local_rope is not None
    assert (hp.rope.freq_scale, hp.local_rope.freq_scale, hp.local_rope.freq_base) == (0.25, 1.0, 5e5)


@pytest.mark.parametrize(
    ("pattern", "windowed"),
    [
        (None, [True, False, True, False, True, False]),  # gemma2's own: the last of each two sees all
        (3, [True, True, False, True, True, False]),
        (0, [True] * 6),
        (1, [False] * 6),
        ([False, True, True, False, False, True], [False, True, True, False, False, True]),
    ],
    ids=str,
)
def test_which_layers_have_a_window(pattern: Any, windowed: list[bool]) -> None:
    changed = {} if pattern is None else {"attention_sliding_window_pattern": pattern}
    assert read("gemma2", block_count=6, **changed).windowed == tuple(windowed)


def test_a_flag_for_each_layer_is_wanted() -> None:
    with pytest.raises(ArchError, match="a flag for each of 6 layers, got 5"):
        read("gemma2", block_count=6, attention_sliding_window_pattern=[True] * 5)


def test_layers_may_differ_in_width() -> None:
    hp = read("qwen2", block_count=3, attention_head_count_kv=[4, 2, 1], feed_forward_length=[96, 64, 32])
    assert hp.n_head == (4, 4, 4) and hp.n_head_kv == (4, 2, 1) and hp.n_ff == (96, 64, 32)
    with pytest.raises(ArchError, match="must be 3 numbers of at least 1"):
        read("qwen2", block_count=3, attention_head_count_kv=[4, 2])


def test_a_stretched_rotation() -> None:
    scaled = read("qwen2", rope_scaling_type="linear", rope_scaling_factor=4.0).rope
    older = read("qwen2", rope_scale_linear=8.0).rope
    none = read("qwen2", rope_scaling_type="none", rope_scaling_factor=4.0).rope
    assert scaled is not None and older is not None and none is not None
    assert (scaled.freq_scale, older.freq_scale, none.freq_scale) == (1 / 4, 1 / 8, 1.0)
    assert (scaled.ext_factor, scaled.attn_factor) == (0.0, 1.0)


def test_yarn() -> None:
    """Its magnitude as llama.cpp has it: the op multiplies by 0.1 ln(factor) + 1 itself."""
    yarn = {"rope_scaling_type": "yarn", "rope_scaling_factor": 8.0}
    rope = read("qwen2", **yarn).rope
    assert rope is not None
    assert (rope.n_ctx_orig, rope.freq_scale, rope.ext_factor) == (256, 1 / 8, 1.0)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0) and rope.attn_factor == 1.0
    told = {"rope_scaling_original_context_length": 64, "rope_scaling_attn_factor": 1.5}
    told |= {
        "rope_scaling_yarn_ext_factor": 0.5,
        "rope_scaling_yarn_beta_fast": 16.0,
        "rope_scaling_yarn_beta_slow": 2.0,
    }
    rope = read("qwen2", **yarn, **told).rope
    assert rope is not None
    assert (rope.n_ctx_orig, rope.attn_factor, rope.ext_factor) == (64, 1.5, 0.5)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
    assert yarn_mscale(1 / 8) == 0.1 * math.log(8) + 1


def test_deepseek_attends_sharper_by_its_multiplier() -> None:
    yarn = {"rope_scaling_type": "yarn", "rope_scaling_factor": 40.0}
    hp = read("deepseek2", **yarn, rope_scaling_yarn_log_multiplier=0.0707)
    assert hp.latent is not None and hp.rope is not None
    sharper = 0.1 * 0.707 * math.log(40) + 1
    np.testing.assert_allclose(hp.attn_scale, sharper**2 * hp.latent.d_k**-0.5, rtol=1e-6)
    np.testing.assert_allclose(hp.rope.attn_factor, 1 / yarn_mscale(1 / 40), rtol=1e-6)


@pytest.mark.parametrize(
    ("layers", "vocab", "told", "gating"),
    [
        (47, 154880, None, "sigmoid"), (48, 154880, None, "sigmoid"), (46, 154880, None, "softmax"),
        (47, 154879, None, "softmax"), (48, 154880, 1, "softmax"), (46, 1000, 2, "sigmoid"),
    ],
)  # fmt: skip
def test_glm_is_known_by_its_layers_and_vocabulary(layers: int, vocab: int, told: int | None, gating: str) -> None:
    named = {} if told is None else {"expert_gating_func": told}
    arch, keys, _ = DECODERS["deepseek2"].model()
    silent = {"expert_gating_func": 0} if "expert_gating_func" in keys else {}
    hp = read("deepseek2", **({"block_count": layers, "vocab_size": vocab} | silent | named))
    assert hp.experts is not None and hp.experts.gating == gating


def test_an_expert_scale_below_one_is_kept() -> None:
    hp = read("deepseek2", expert_weights_scale=0.5)
    assert hp.experts is not None and hp.experts.scale == 0.5


def test_a_scale_on_attention_that_the_file_names() -> None:
    assert read("qwen2", attention_scale=0.25).attn_scale == 0.25
