"""stablelm: llama with layer norms and a rotation of a part of each head. The 12B norms the heads of q and k, each by a
row of its own, and has no norm before the feed-forward, which then reads what attention reads."""

from __future__ import annotations

from graphrt.models.arch.layout import OPTIONAL, REQUIRED, Extra, Layout
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import Traits


class StableLM(Decoder):
    """The skeleton as it is."""

    traits = Traits(norm="layer", rope_mode="neox")
    layout = Layout(ffn_norm=OPTIONAL, norm_bias=REQUIRED, output=REQUIRED)
    parallel = True

    def extra_weights(self, il: int) -> dict[str, Extra]:
        d, hp = self.hp.d_k, self.hp
        return {
            "attn_q_norm": Extra((d, hp.n_head[il]), OPTIONAL),
            "attn_k_norm": Extra((d, hp.n_head_kv[il]), OPTIONAL),
        }
