"""gpt2: learned positions, no rotation, layer norms, a feed-forward without a gate, biases everywhere."""

from __future__ import annotations

from graphrt.models.arch.layout import REQUIRED, Layout
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import Traits


class GPT2(Decoder):
    """The skeleton as it is."""

    traits = Traits(norm="layer", rope_mode=None)
    activation = "gelu"
    layout = Layout(
        norm_bias=REQUIRED,
        fused_qkv=True,
        qkv_bias=REQUIRED,
        out_bias=REQUIRED,
        feed_forward="plain",
        ffn_bias=REQUIRED,
        positions=REQUIRED,
    )
