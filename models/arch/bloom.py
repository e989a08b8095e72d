"""bloom: gpt2 with ALiBi instead of positions and a norm right after the embedding."""

from __future__ import annotations

from dataclasses import replace

from graphrt.models.arch.gpt2 import GPT2
from graphrt.models.arch.layout import ABSENT, Loader
from graphrt.models.hparams import HParams, Keys
from graphrt.tensor import Tensor

#: Of every model of the family; llama.cpp reads no key.
MAX_ALIBI_BIAS = 8.0


class Bloom(GPT2):
    """GPT-2 with ALiBi and a norm of the embedding."""

    layout = replace(GPT2.layout, positions=ABSENT)

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        keys.get("attention.max_alibi_bias", float, MAX_ALIBI_BIAS)  # newer files say what is known
        return replace(super().hparams(keys), max_alibi_bias=MAX_ALIBI_BIAS)

    def load(self, load: Loader) -> None:
        super().load(load)
        self.token_embd_norm = load.norm("token_embd_norm", self.hp.n_embd)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.normed(super().embed(tokens, positions), self.token_embd_norm, "inp_norm")
