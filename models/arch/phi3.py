"""phi3: q, k and v in one matrix, gate and up in another; frequency factors for long and for short contexts. A window
that a file names is not kept, as in llama.cpp."""

from __future__ import annotations

from graphrt.models.arch.layout import OPTIONAL, Layout, Loader
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import ROPE_SCALINGS, Traits
from graphrt.tensor import Tensor


class Phi3(Decoder):
    """The skeleton with frequency factors by the context's size."""

    traits = Traits(rope_mode="neox", scalings=(*ROPE_SCALINGS, "longrope"))
    layout = Layout(feed_forward="fused")

    def load(self, load: Loader) -> None:
        super().load(load)
        assert self.hp.rope is not None
        n = self.hp.rope.n_dims // 2
        self.long = load.tensor("rope_factors_long.weight", OPTIONAL, n)
        self.short = load.tensor("rope_factors_short.weight", OPTIONAL, n)

    def rope_factors(self, n_ctx: int) -> Tensor | None:
        assert self.hp.rope is not None
        return self.long if n_ctx > self.hp.rope.n_ctx_orig else self.short
