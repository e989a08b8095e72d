"""gemma3: sliding windows on five of six layers, norms of q and k, norms after attention and feed-forward too,
two rotation bases. Norm weights hold the +1 already."""

from __future__ import annotations

from dataclasses import replace

from graphrt import ops
from graphrt.models.arch.skeleton import Decoder, Step
from graphrt.models.hparams import HParams, Keys, read_hparams, with_windows
from graphrt.ops import RopeParams
from graphrt.tensor import Tensor

#: Every sixth layer sees the whole context.
PERIOD = 6
LAYERS_OF_27B = 62


class Gemma3(Decoder):
    """The skeleton with gemma3's extra norms, windows and embedding scale."""

    activation = "geglu"

    @classmethod
    def read(cls, keys: Keys) -> HParams:
        hp = read_hparams(keys, "neox")
        scale = (hp.n_embd / hp.n_head[0]) ** -0.5 if hp.n_layer == LAYERS_OF_27B else hp.d_k**-0.5
        base = keys.get("rope.freq_base_swa", float, 10000.0)
        local_rope = RopeParams(hp.rope.n_dims, hp.rope.mode, base)  # local layers are never stretched
        return with_windows(replace(hp, attn_scale=scale), keys, PERIOD, local_rope)

    def extra_weights(self) -> dict[str, tuple[int, ...]]:
        d, n = self.hp.d_k, self.hp.n_embd
        return {"attn_q_norm": (d,), "attn_k_norm": (d,), "post_attention_norm": (n,), "post_ffw_norm": (n,)}

    def embed(self, step: Step) -> Tensor:
        return ops.scale(super().embed(step), self.hp.n_embd**0.5, name="inp_scaled")

    def query_key_norm(self, il: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        extra = self.layers[il].extra
        q = self.normed(q, extra["attn_q_norm"], f"Qcur_normed-{il}")
        k = self.normed(k, extra["attn_k_norm"], f"Kcur_normed-{il}")
        return q, k

    def after_attention(self, il: int, x: Tensor) -> Tensor:
        return self.normed(x, self.layers[il].extra["post_attention_norm"], f"attn_post_norm-{il}")

    def after_feed_forward(self, il: int, x: Tensor) -> Tensor:
        return self.normed(x, self.layers[il].extra["post_ffw_norm"], f"ffn_post_norm-{il}")
