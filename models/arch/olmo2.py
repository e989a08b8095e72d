"""olmo2 (and OLMo 3, whose files say so too): norms after attention and feed-forward, none before; norms of q and k
over all heads together; sliding windows, if a file names one, on three of four layers, where the rotation is plain."""

from __future__ import annotations

from graphrt.models.arch.layout import ABSENT, REQUIRED, Extra, Layout
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import HParams, Keys, Traits, with_windows
from graphrt.ops import RopeParams
from graphrt.tensor import Tensor

#: Every fourth layer sees the whole context.
PERIOD = 4


class Olmo2(Decoder):
    """The skeleton with norms on the other side."""

    traits = Traits(rope_mode="neox")
    layout = Layout(attn_norm=ABSENT, ffn_norm=ABSENT, output=REQUIRED)

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        hp = super().hparams(keys)
        assert hp.rope is not None
        keys.get("rope.freq_base_swa", float, hp.rope.freq_base)  # llama.cpp reads it and rotates by the other
        return with_windows(hp, keys, PERIOD, RopeParams(hp.rope.n_dims, hp.rope.mode, hp.rope.freq_base))

    def extra_weights(self, il: int) -> dict[str, Extra]:
        hp = self.hp
        heads = {"attn_q_norm": hp.d_k * hp.n_head[il], "attn_k_norm": hp.d_k * hp.n_head_kv[il]}
        widths = heads | {"post_attention_norm": hp.n_embd, "post_ffw_norm": hp.n_embd}
        return {name: Extra((n,)) for name, n in widths.items()}

    def query_key_norm(self, il: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        extra = self.layers[il].extra
        q = self.normed_together(q, extra["attn_q_norm"], f"Qcur_normed-{il}")
        return q, self.normed_together(k, extra["attn_k_norm"], f"Kcur_normed-{il}")

    def after_attention(self, il: int, x: Tensor) -> Tensor:
        return self.normed(x, self.layers[il].extra["post_attention_norm"], f"attn_post_norm-{il}")

    def after_feed_forward(self, il: int, x: Tensor) -> Tensor:
        return self.normed(x, self.layers[il].extra["post_ffw_norm"], f"ffn_post_norm-{il}")
