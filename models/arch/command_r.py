"""command-r: attention and feed-forward side by side on one layer norm, logits scaled, output tied. Command R+ norms
the heads of q and k, each by a row of its own."""

from __future__ import annotations

from dataclasses import replace

from graphrt.models.arch.layout import ABSENT, Extra, Layout
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import HParams, Keys, Traits

#: From so many layers on q and k have norms, by which llama.cpp knows Command R+.
LAYERS_OF_PLUS = 64


class CommandR(Decoder):
    """The skeleton with a parallel feed-forward and scaled logits."""

    traits = Traits(norm="layer")
    layout = Layout(ffn_norm=ABSENT, output=ABSENT)
    parallel = True

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        return replace(super().hparams(keys), logit_scale=keys.amount("logit_scale", 0.0))

    def extra_weights(self, il: int) -> dict[str, Extra]:
        hp = self.hp
        if hp.n_layer < LAYERS_OF_PLUS:
            return {}
        return {"attn_q_norm": Extra((hp.d_k, hp.n_head[il])), "attn_k_norm": Extra((hp.d_k, hp.n_head_kv[il]))}
