"""llama: Llama 1 to 3, Mistral, Mixtral, SmolLM and all that share their file layout. Rotates neighbouring pairs (rows
of q and k are permuted when a model is converted), optional biases, optional frequency factors (Llama 3.1 and later),
optional experts."""

from __future__ import annotations

from graphrt.errors import ArchError
from graphrt.models.arch.experts import MixtureDecoder
from graphrt.models.arch.layout import OPTIONAL, Layout, Loader
from graphrt.models.hparams import HParams, Keys
from graphrt.tensor import Tensor


class Llama(MixtureDecoder):
    """The skeleton as it is, experts as wide as a dense feed-forward. A window that a file names is
    not kept, as in llama.cpp."""

    layout = Layout(out_bias=OPTIONAL, ffn_bias=OPTIONAL)

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        hp = super().hparams(keys)
        if hp.rope is None or hp.rope.n_dims != hp.d_k or hp.d_k != hp.d_v:
            rotated = hp.rope.n_dims if hp.rope else 0
            raise ArchError(f"llama rotates whole heads, k and v of one size, got {rotated} of {hp.d_k} and {hp.d_v}")
        return hp

    def load(self, load: Loader) -> None:
        super().load(load)
        assert self.hp.rope is not None
        self.rope_freqs = load.tensor("rope_freqs.weight", OPTIONAL, self.hp.rope.n_dims // 2)

    def rope_factors(self, n_ctx: int) -> Tensor | None:
        return self.rope_freqs
