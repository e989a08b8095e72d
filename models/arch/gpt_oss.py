"""gpt-oss: experts with biases and a clamped SwiGLU in every layer, a sink for each head, sliding windows on every
other layer, the first among them."""

from __future__ import annotations

from dataclasses import replace

from graphrt import ops
from graphrt.errors import ArchError
from graphrt.models.arch.experts import Mixture, MixtureDecoder
from graphrt.models.arch.layout import REQUIRED, Affine, ExpertLayout, Extra, Layout
from graphrt.models.hparams import HParams, Keys, Traits, with_windows
from graphrt.tensor import Tensor

#: Of the GLU: the slope of its sigmoid, and the most that it takes of gate and up.
ALPHA, LIMIT = 1.702, 7.0


class GptOss(MixtureDecoder):
    """The skeleton with experts, sinks and windows. An expert's weight is its share of the chosen ones' softmax."""

    traits = Traits(rope_mode="neox")
    layout = Layout(
        ffn_norm_name="post_attention_norm",
        out_bias=REQUIRED,
        output=REQUIRED,
        experts=ExpertLayout(bias=REQUIRED),
    )
    mixture = Mixture("chosen", norm=False)
    ffn_normed = "attn_post_norm"

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        hp = super().hparams(keys)
        assert hp.rope is not None
        if not hp.rope.n_dims == hp.d_k == hp.d_v:
            raise ArchError(
                f"gpt-oss rotates whole heads, k and v of one size, got {hp.rope.n_dims} of {hp.d_k} and {hp.d_v}; the "
                f"file is damaged"
            )
        local = replace(hp.rope, freq_base=keys.positive("rope.freq_base_swa", hp.rope.freq_base))
        keys.count("attention.sliding_window")
        return with_windows(hp, keys, 2, local)

    @classmethod
    def expert_width(cls, keys: Keys, hp: HParams) -> int:
        return keys.count("expert_feed_forward_length")

    def extra_weights(self, il: int) -> dict[str, Extra]:
        return {"attn_sinks": Extra((self.hp.n_head[il],))}

    def sinks(self, il: int) -> Tensor | None:
        found: Affine = self.layers[il].extra["attn_sinks"]
        return found.weight

    def expert_glu(self, il: int, gate: Tensor, up: Tensor) -> Tensor:
        return ops.glu(gate, up, "swiglu_oai", alpha=ALPHA, limit=LIMIT, name=f"ffn_moe_swiglu_oai-{il}")
