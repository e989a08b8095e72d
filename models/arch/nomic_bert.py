"""nomic-bert: bert with a rotation instead of learned positions and a gated feed-forward. llama.cpp leaves biases of
the latter alone, and so does this."""

from __future__ import annotations

from dataclasses import replace

from graphrt.models.arch.encoder import Encoder
from graphrt.models.arch.layout import ABSENT, UNUSED
from graphrt.models.hparams import Traits


class NomicBert(Encoder):
    """The skeleton with a rotation and a gate."""

    traits = Traits(norm="layer", rope_mode="neox")
    activation = "silu"
    layout = replace(Encoder.layout, positions=ABSENT, feed_forward="gated", ffn_bias=UNUSED)
