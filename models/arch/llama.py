"""llama: Llama 1 to 3, SmolLM and all that share their file layout. Rotates neighbouring pairs (rows of q and k are
permuted when a model is converted), optional biases, optional frequency factors (Llama 3.1 and later)."""

from __future__ import annotations

from graphrt.errors import ArchError
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.hparams import HParams, Keys, read_hparams


class Llama(Decoder):
    """The skeleton as it is."""

    @classmethod
    def read(cls, keys: Keys) -> HParams:
        hp = read_hparams(keys, "normal")
        if keys.get("expert_count", int, 0):
            raise ArchError("llama with experts (Mixtral) is not implemented; use a dense llama model")
        if hp.rope.n_dims != hp.d_k or hp.d_k != hp.d_v:
            raise ArchError(
                f"llama rotates whole heads, k and v of one size, got {hp.rope.n_dims} of {hp.d_k} and {hp.d_v}"
            )
        return hp
