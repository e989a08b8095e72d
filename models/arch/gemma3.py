"""gemma3: gemma2 with norms of q and k instead of the cap on their product, sliding windows on five of six layers, and
a rotation of their own there, which is never stretched."""

from __future__ import annotations

from dataclasses import replace

from graphrt.models.arch.gemma2 import Gemma2
from graphrt.models.arch.layout import OPTIONAL, Extra, Layout
from graphrt.models.hparams import HParams, Keys, with_windows
from graphrt.ops import RopeParams

#: Every sixth layer sees the whole context.
PERIOD = 6


class Gemma3(Gemma2):
    """Gemma2 with norms of q and k."""

    layout = Layout(output=OPTIONAL)
    layers_of_27b = 62

    @classmethod
    def capped_and_windowed(cls, hp: HParams, keys: Keys) -> HParams:
        assert hp.rope is not None
        local = RopeParams(hp.rope.n_dims, hp.rope.mode, keys.positive("rope.freq_base_swa", 10000.0))
        hp = replace(hp, final_softcap=keys.amount("final_logit_softcapping", 0.0))
        return with_windows(hp, keys, PERIOD, local)

    def extra_weights(self, il: int) -> dict[str, Extra]:
        heads = {"attn_q_norm": Extra((self.hp.d_k,)), "attn_k_norm": Extra((self.hp.d_k,))}
        return heads | super().extra_weights(il)
