"""refact: llama with ALiBi instead of a rotation. Biases after the attention and in the feed-forward are left alone, as
llama.cpp leaves them."""

from __future__ import annotations

from dataclasses import replace

from graphrt.models.arch.bloom import MAX_ALIBI_BIAS
from graphrt.models.arch.layout import UNUSED, Layout, Loader
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import HParams, Keys, Traits


class Refact(Decoder):
    """The skeleton with ALiBi."""

    traits = Traits(rope_mode=None)
    layout = Layout(out_bias=UNUSED, ffn_bias=UNUSED)

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        keys.get("attention.max_alibi_bias", float, MAX_ALIBI_BIAS)  # newer files say what is known
        return replace(super().hparams(keys), max_alibi_bias=MAX_ALIBI_BIAS)

    def load(self, load: Loader) -> None:
        super().load(load)
        load.tensor("rope_freqs.weight", UNUSED)
