"""Which tensors a family's files have, as data, and the layers made of them.

What llama.cpp requires is required, what it takes or leaves is optional, and what it loads without using is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from graphrt.models.hparams import HParams
from graphrt.models.weights import Weights
from graphrt.tensor import Tensor


class Need(Enum):
    """ABSENT: never asked for, so that a file with it is refused; UNUSED: a file may have it, and nothing reads it."""

    ABSENT = "absent"
    UNUSED = "unused"
    OPTIONAL = "optional"
    REQUIRED = "required"


ABSENT, UNUSED, OPTIONAL, REQUIRED = Need.ABSENT, Need.UNUSED, Need.OPTIONAL, Need.REQUIRED


@dataclass(frozen=True)
class ExpertLayout:
    """The tensors of a mixture beside the router and the experts' up, gate and down. bias: of all of these;
    choice_bias: exp_probs_b, added to probabilities for the choice alone; merged: a file may have gate and up in one.
    """

    bias: Need = ABSENT
    choice_bias: Need = ABSENT
    merged: bool = False


@dataclass(frozen=True)
class Layout:
    """The tensors of a family. ffn_norm_name: what files call the norm before the feed-forward; norm_bias: of all norms
    but those of `extra_weights`; fused_qkv: q, k and v are rows of one matrix (a file may always have them so; here it
    must); feed_forward: "gated" (gate and up), "fused" (both in up, the gate first) or "plain" (no gate); output: of
    the matrix, whose place the embedding takes when it is not there; positions: position_embd, a row for each; experts:
    of layers that have them."""

    attn_norm: Need = REQUIRED
    ffn_norm: Need = REQUIRED
    ffn_norm_name: str = "ffn_norm"
    norm_bias: Need = ABSENT
    fused_qkv: bool = False
    qkv_bias: Need = OPTIONAL
    out_bias: Need = ABSENT
    feed_forward: str = "gated"
    ffn_bias: Need = ABSENT
    output: Need = OPTIONAL
    output_bias: Need = ABSENT
    positions: Need = ABSENT
    experts: ExpertLayout = ExpertLayout()


@dataclass(frozen=True)
class Affine:
    """A matrix, or the row of a norm, and the row that is added to its result."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Extra:
    """A weight that a layer has beside the common ones: its shape; whether it and its bias, [ne[-1]], must be there."""

    ne: tuple[int, ...]
    weight: Need = REQUIRED
    bias: Need = ABSENT


@dataclass(frozen=True)
class Attention:
    """qkv: one matrix with the rows of q, k and v in this order, or three; biases: of one matrix, where the file has
    three of them all the same."""

    qkv: tuple[Affine, ...]
    out: Affine
    biases: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class FeedForward:
    """gate: None where up holds it too, or there is none."""

    gate: Affine | None
    up: Affine
    down: Affine


@dataclass(frozen=True)
class Experts:
    """router: [n_embd, n_expert]; up, gate: [n_embd, n_ff, n_expert]; gate: None where up holds it too, before its own
    rows; down: [n_ff, n_embd, n_expert]; biases: a column an expert; choice_bias: [n_expert]; shared: what every token
    is given."""

    router: Affine
    gate: Affine | None
    up: Affine
    down: Affine
    choice_bias: Tensor | None
    shared: FeedForward | None


@dataclass(frozen=True)
class Layer:
    """The weights of a layer; None and absent from `extra` where the family or the file has none."""

    attn_norm: Affine | None
    attention: Attention | None
    ffn_norm: Affine | None
    feed_forward: FeedForward | Experts | None
    extra: Mapping[str, Affine]


class Loader:
    """The weights of one layer, or those outside of layers (prefix ""), by their names without ".weight"."""

    def __init__(self, weights: Weights, layout: Layout, prefix: str = "") -> None:
        self.weights, self.layout, self.prefix = weights, layout, prefix

    def tensor(self, name: str, need: Need, *ne: int) -> Tensor | None:
        """The tensor of that full name, None where there is none. Raises nothing: Weights keeps what is missing."""
        if need is UNUSED:
            self.weights.leave(self.prefix + name)
        if need in (ABSENT, UNUSED):
            return None
        return self.weights(self.prefix + name, *ne, optional=need is OPTIONAL)

    def affine(self, name: str, ne: tuple[int, ...], need: Need = REQUIRED, bias: Need = ABSENT) -> Affine | None:
        """A weight and its bias, None where there is no weight."""
        weight = self.tensor(f"{name}.weight", need, *ne)
        if weight is None:
            self.tensor(f"{name}.bias", UNUSED if need is UNUSED else ABSENT)
            return None
        return Affine(weight, self.tensor(f"{name}.bias", bias, ne[-1]))

    def needed(self, name: str, ne: tuple[int, ...], bias: Need = ABSENT) -> Affine:
        """A weight that must be there, and its bias."""
        found = self.affine(name, ne, REQUIRED, bias)
        assert found is not None
        return found

    def norm(self, name: str, n: int, need: Need = REQUIRED) -> Affine | None:
        """The row of a norm over n elements, with the family's kind of bias."""
        return self.affine(name, (n,), need, self.layout.norm_bias)

    def attention(self, hp: HParams, il: int) -> Attention:
        """The matrices of layer il's attention."""
        d_q, d_k, d_v = hp.d_k * hp.n_head[il], hp.d_k * hp.n_head_kv[il], hp.d_v * hp.n_head_kv[il]
        out = self.needed("attn_output", (hp.d_v * hp.n_head[il], hp.n_embd), self.layout.out_bias)
        bias = self.layout.qkv_bias
        need = REQUIRED if self.layout.fused_qkv else OPTIONAL
        fused = self.affine("attn_qkv", (hp.n_embd, d_q + d_k + d_v), need, bias)
        sizes = {"attn_q": d_q, "attn_k": d_k, "attn_v": d_v}
        if fused is None:
            return Attention(tuple(self.needed(name, (hp.n_embd, d), bias) for name, d in sizes.items()), out)
        apart = [self.tensor(f"{name}.bias", OPTIONAL, d) for name, d in sizes.items() if fused.bias is None]
        biases = tuple(b for b in apart if b is not None)
        return Attention((fused,), out, biases if len(biases) == len(sizes) else ())

    def feed_forward(self, hp: HParams, il: int) -> FeedForward:
        """The matrices of layer il's feed-forward."""
        n, n_ff, bias = hp.n_embd, hp.n_ff[il], self.layout.ffn_bias
        kind = self.layout.feed_forward
        return FeedForward(
            gate=self.needed("ffn_gate", (n, n_ff), bias) if kind == "gated" else None,
            up=self.needed("ffn_up", (n, 2 * n_ff if kind == "fused" else n_ff), bias),
            down=self.needed("ffn_down", (n_ff, n), bias),
        )

    def experts(self, hp: HParams) -> Experts:
        """The matrices of a layer's experts."""
        p, layout = hp.experts, self.layout.experts
        assert p is not None
        n, shared, held = hp.n_embd, p.shared_ff or p.n_ff * p.n_shared, p.held or p.n
        merged = self.tensor("ffn_gate_up_exps.weight", OPTIONAL if layout.merged else ABSENT, n, 2 * p.n_ff, held)
        return Experts(
            router=self.needed("ffn_gate_inp", (n, p.n), layout.bias),
            choice_bias=self.tensor("exp_probs_b.bias", layout.choice_bias, p.n),
            gate=self._of_experts("ffn_gate_exps", n, p.n_ff, held) if merged is None else None,
            up=self._of_experts("ffn_up_exps", n, p.n_ff, held) if merged is None else Affine(merged),
            down=self._of_experts("ffn_down_exps", p.n_ff, n, held),
            shared=self._shared(n, shared) if shared else None,
        )

    def _of_experts(self, name: str, k: int, m: int, n_expert: int) -> Affine:
        weight = self.tensor(f"{name}.weight", REQUIRED, k, m, n_expert)
        assert weight is not None
        return Affine(weight, self.tensor(f"{name}.bias", self.layout.experts.bias, m, n_expert))

    def _shared(self, n: int, n_ff: int) -> FeedForward:
        up, gate = (self.needed(f"ffn_{side}_shexp", (n, n_ff)) for side in ("up", "gate"))
        return FeedForward(gate, up, self.needed("ffn_down_shexp", (n_ff, n)))

    def extra(self, weights: Mapping[str, Extra]) -> dict[str, Affine]:
        """Those that the file has."""
        found = {name: self.affine(name, x.ne, x.weight, x.bias) for name, x in weights.items()}
        return {name: weight for name, weight in found.items() if weight is not None}
