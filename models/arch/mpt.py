"""mpt: gpt2 with every bias optional, ALiBi or learned positions, and at times a limit on q, k and v, norms of q and k
over all heads together, or divisors of the activation (AWQ)."""

from __future__ import annotations

from dataclasses import replace

from graphrt import ops
from graphrt.models.arch.gpt2 import GPT2
from graphrt.models.arch.layout import OPTIONAL, Extra, Layout, Loader
from graphrt.models.hparams import HParams, Keys
from graphrt.tensor import Tensor


class MPT(GPT2):
    """GPT-2 with ALiBi and what MPT's variants add."""

    layout = Layout(
        norm_bias=OPTIONAL,
        fused_qkv=True,
        qkv_bias=OPTIONAL,
        out_bias=OPTIONAL,
        feed_forward="plain",
        ffn_bias=OPTIONAL,
        positions=OPTIONAL,
    )

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        bias, limit = keys.amount("attention.max_alibi_bias", 0.0), keys.amount("attention.clamp_kqv", 0.0)
        return replace(super().hparams(keys), max_alibi_bias=bias, clamp_kqv=limit)

    def extra_weights(self, il: int) -> dict[str, Extra]:
        norm = Extra((self.hp.d_k * self.hp.n_head[il],), OPTIONAL, OPTIONAL)
        return {"attn_q_norm": norm, "attn_k_norm": norm}

    def load(self, load: Loader) -> None:
        super().load(load)
        names = [f"blk.{il}.ffn.act.scales" for il in range(self.hp.n_layer)]
        self.divisors = [load.tensor(name, OPTIONAL, n_ff) for name, n_ff in zip(names, self.hp.n_ff)]

    def query_key_norm(self, il: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        extra = self.layers[il].extra
        if "attn_q_norm" not in extra:  # as llama.cpp, which asks for that of k only then
            return q, k
        q = self.normed_together(q, extra["attn_q_norm"], f"Qcur_normed-{il}")
        return q, self.normed_together(k, extra.get("attn_k_norm"), f"Kcur_normed-{il}")

    def activated(self, il: int, x: Tensor) -> Tensor:
        bent, divisors = super().activated(il, x), self.divisors[il]
        return bent if divisors is None else ops.div(bent, divisors, name=f"ffn_act-{il}")
