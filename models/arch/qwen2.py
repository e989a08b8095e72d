"""qwen2: biases on q, k and v, and rarely on the logits; pairs half a head apart."""

from __future__ import annotations

from graphrt.models.arch.layout import OPTIONAL, Layout
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import Traits


class Qwen2(Decoder):
    """The skeleton as it is."""

    traits = Traits(rope_mode="neox")
    layout = Layout(output_bias=OPTIONAL)
