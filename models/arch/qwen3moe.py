"""qwen3moe: qwen3 with experts in every layer."""

from __future__ import annotations

from graphrt.models.arch.experts import Mixture, MixtureDecoder
from graphrt.models.arch.qwen3 import Qwen3
from graphrt.models.hparams import HParams, Keys


class Qwen3MoE(MixtureDecoder, Qwen3):
    """Qwen3 with experts, as wide as the file says or of a dense layer's width together."""

    mixture = Mixture()

    @classmethod
    def expert_width(cls, keys: Keys, hp: HParams) -> int:
        return keys.count("expert_feed_forward_length", hp.n_ff[0] // keys.count("expert_used_count"))
