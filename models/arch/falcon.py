"""falcon: attention and feed-forward side by side on one norm; the 40B has a second one, which attention reads."""

from __future__ import annotations

from graphrt.models.arch.layout import ABSENT, OPTIONAL, REQUIRED, Extra, Layout
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import Traits
from graphrt.tensor import Tensor


class Falcon(Decoder):
    """The skeleton with a parallel feed-forward."""

    traits = Traits(norm="layer", rope_mode="neox")
    activation = "gelu"
    layout = Layout(ffn_norm=ABSENT, norm_bias=REQUIRED, fused_qkv=True, qkv_bias=ABSENT, feed_forward="plain")
    parallel = True

    def extra_weights(self, il: int) -> dict[str, Extra]:
        return {"attn_norm_2": Extra((self.hp.n_embd,), OPTIONAL, OPTIONAL)}

    def attention_source(self, il: int, x: Tensor, normed: Tensor) -> Tensor:
        second = self.layers[il].extra.get("attn_norm_2")
        return normed if second is None else self.normed(x, second, f"attn_norm_2-{il}")
