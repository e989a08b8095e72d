"""qwen3: qwen2 with a norm on each head of q and k before the rotation, and heads of a size of their own."""

from __future__ import annotations

from graphrt.models.arch.layout import UNUSED, Extra, Layout, Loader
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import Traits


class Qwen3(Decoder):
    """The skeleton with norms of q and k."""

    traits = Traits(rope_mode="neox")
    layout = Layout()

    def load(self, load: Loader) -> None:
        super().load(load)
        load.tensor("cls.output.weight", UNUSED)  # a reranker's head, which no logits need

    def extra_weights(self, il: int) -> dict[str, Extra]:
        return {"attn_q_norm": Extra((self.hp.d_k,)), "attn_k_norm": Extra((self.hp.d_k,))}
