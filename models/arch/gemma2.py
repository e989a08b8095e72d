"""gemma2: gemma with norms after attention and feed-forward too, soft caps on q.k and on the logits, and a sliding
window on every other layer, the first among them."""

from __future__ import annotations

from dataclasses import replace

from graphrt.models.arch.gemma import Gemma
from graphrt.models.arch.layout import Extra
from graphrt.models.hparams import HParams, Keys, with_windows
from graphrt.tensor import Tensor

#: What a file that is silent means.
WINDOW, ATTENTION_CAP, LOGIT_CAP = 4096, 50.0, 30.0


class Gemma2(Gemma):
    """Gemma with the norms of both sides, caps and windows. layers_of_27b: that model scales q.k by the width of a head
    as the embedding would be cut into heads, and the others by the head's own."""

    layers_of_27b = 46

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        hp = super().hparams(keys)
        if hp.n_layer == cls.layers_of_27b:
            hp = replace(hp, attn_scale=(hp.n_embd // hp.n_head[0]) ** -0.5)
        return cls.capped_and_windowed(hp, keys)

    @classmethod
    def capped_and_windowed(cls, hp: HParams, keys: Keys) -> HParams:
        """The record with what the later gemmas do each in their own way."""
        assert hp.rope is not None
        local = replace(hp.rope, freq_base=keys.positive("rope.freq_base_swa", hp.rope.freq_base))
        caps = keys.amount("attn_logit_softcapping", ATTENTION_CAP), keys.amount("final_logit_softcapping", LOGIT_CAP)
        hp = replace(hp, attn_softcap=caps[0], final_softcap=caps[1])
        return with_windows(hp, keys, 2, local, WINDOW)

    def extra_weights(self, il: int) -> dict[str, Extra]:
        return {"post_attention_norm": Extra((self.hp.n_embd,)), "post_ffw_norm": Extra((self.hp.n_embd,))}

    def after_attention(self, il: int, x: Tensor) -> Tensor:
        return self.normed(x, self.layers[il].extra["post_attention_norm"], f"attn_post_norm-{il}")

    def after_feed_forward(self, il: int, x: Tensor) -> Tensor:
        return self.normed(x, self.layers[il].extra["post_ffw_norm"], f"ffn_post_norm-{il}")
