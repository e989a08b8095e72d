"""gemma: embeddings scaled by the root of their width, GELU gates, output tied. Norm weights hold the +1 already."""

from __future__ import annotations

from graphrt import ops
from graphrt.models.arch.layout import ABSENT, Layout
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import Traits
from graphrt.tensor import Tensor


class Gemma(Decoder):
    """The skeleton with a scaled embedding."""

    traits = Traits(rope_mode="neox")
    activation = "gelu"
    layout = Layout(output=ABSENT)
    residual = "sa_out"

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return ops.scale(super().embed(tokens, positions), self.hp.n_embd**0.5, name="inp_scaled")
