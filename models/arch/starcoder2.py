"""starcoder2: gpt2's norms, biases and feed-forward with a rotation, and q, k and v apart."""

from __future__ import annotations

from dataclasses import replace

from graphrt.models.arch.gpt2 import GPT2
from graphrt.models.arch.layout import ABSENT, OPTIONAL
from graphrt.models.hparams import Traits


class StarCoder2(GPT2):
    """GPT-2 with a rotation."""

    traits = Traits(norm="layer", rope_mode="neox")
    layout = replace(GPT2.layout, fused_qkv=False, qkv_bias=OPTIONAL, positions=ABSENT)
