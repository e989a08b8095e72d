"""Mixtures of experts: a router gives each token a few of many feed-forwards, whose results are added up by weight.

The graph is llama.cpp's, node by node, which is also what the GPU backend's fusions look for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graphrt import ops
from graphrt.errors import ArchError
from graphrt.models.arch.layout import Affine, Experts, FeedForward, Loader
from graphrt.models.arch.own_experts import OwnExperts
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.arch.transformer import GLU_OF, linear
from graphrt.models.hparam_keys import NO_FURTHER_TOKENS
from graphrt.models.hparam_limits import MAX_EXPERTS
from graphrt.models.hparams import GATINGS, ExpertParams, HParams, Keys
from graphrt.tensor import Tensor

#: The least that weights are divided by: the smallest normal number of f16, as in ggml.
LEAST_SUM = 2.0**-14


@dataclass(frozen=True)
class Mixture:
    """What a family's name tells of its experts. gating, norm: as in ExpertParams; stated: a file may say otherwise,
    scale weights, share experts and begin with dense layers; required: a file must have experts."""

    gating: str = "softmax"
    norm: bool = True
    stated: bool = False
    required: bool = True


class MixtureDecoder(Decoder):
    """A decoder with experts in the layers after the dense ones, in all or in none."""

    mixture = Mixture(required=False)
    variants = NO_FURTHER_TOKENS
    #: Those that a rank has, where ranks share experts out whole.
    own: OwnExperts | None = None

    def load(self, load: Loader) -> None:
        super().load(load)
        p, share = self.hp.experts, self.share
        if p is not None and share is not None and share.experts:
            self.own = OwnExperts.of(self.weights, share.experts[share.rank], p.n, p.used)

    @classmethod
    def hparams(cls, keys: Keys) -> HParams:
        hp = super().hparams(keys)
        if not cls.mixture.required and not keys.get("expert_count", int, 0):
            return hp
        return replace(hp, experts=read_experts(keys, cls.mixture, cls.expert_width(keys, hp)))

    @classmethod
    def expert_width(cls, keys: Keys, hp: HParams) -> int:
        """The width of one expert."""
        return hp.n_ff[0]

    def load_feed_forward(self, load: Loader, il: int) -> FeedForward | Experts | None:
        p = self.hp.experts
        return load.feed_forward(self.hp, il) if p is None or il < p.n_dense else load.experts(self.hp)

    def feed_forward(self, il: int, x: Tensor) -> Tensor:
        w = self.layers[il].feed_forward
        if not isinstance(w, Experts):
            return super().feed_forward(il, x)
        mixed = self.mixed(il, w, x)
        if w.shared is None:
            return mixed
        shared = linear(w.shared.down, self.gated(il, w.shared, x), f"ffn_shexp-{il}")
        return ops.add(mixed, shared, name=f"ffn_out-{il}")

    def mixed(self, il: int, w: Experts, x: Tensor) -> Tensor:
        """The experts' results of each token, added up by weight: [n_embd, n] to the same."""
        n_embd, n_tokens = x.ne[:2]
        ids, weights = self.routed(il, w, x)
        here = ids if self.own is None else self.own.numbered(il, ids)
        bent = self.bent(il, w, ops.reshape(x, n_embd, 1, n_tokens), here)
        down = of_experts(w.down, bent, here, f"ffn_moe_down-{il}")
        down = down if self.own is None else self.own.kept(il, down, ids)
        weighted = ops.mul(down, weights, name=f"ffn_moe_weighted-{il}")
        slots = [
            ops.view(weighted, (n_embd, n_tokens), weighted.nb[2:3], offs=i * weighted.nb[1]) for i in range(ids.ne[0])
        ]
        if len(slots) == 1:
            return ops.reshape(weighted, n_embd, n_tokens, name=f"ffn_moe_out-{il}")
        total = slots[0]
        for slot in slots[1:-1]:
            total = ops.add(total, slot)
        return ops.add(total, slots[-1], name=f"ffn_moe_out-{il}")

    def routed(self, il: int, w: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, i32 [used, n], the best first, and their weights, f32 [1, used, n]."""
        p = self.hp.experts
        assert p is not None
        n_tokens = x.ne[1]
        logits = linear(w.router, x, f"ffn_moe_logits_biased-{il}", f"ffn_moe_logits-{il}")
        if p.gating == "chosen":
            probs = logits
        elif p.gating == "softmax":
            probs = ops.soft_max(logits, name=f"ffn_moe_probs-{il}")
        else:
            probs = ops.unary(logits, "sigmoid", name=f"ffn_moe_probs-{il}")
        select = probs
        if w.choice_bias is not None:
            select = ops.add(probs, w.choice_bias, name=f"ffn_moe_probs_biased-{il}")
        if p.groups > 1:
            select = _of_best_groups(il, select, p)
        order = ops.argsort(select, descending=True, name=f"ffn_moe_argsort-{il}")
        ids = ops.view(order, (p.used, n_tokens), order.nb[1:2], name=f"ffn_moe_topk-{il}")
        picked = ops.get_rows(ops.reshape(probs, 1, p.n, n_tokens), ids, name=f"ffn_moe_weights-{il}")
        return ids, _shares(il, picked, p)

    def bent(self, il: int, w: Experts, x: Tensor, ids: Tensor) -> Tensor:
        """The activated gates times ups: x [n_embd, 1, n] to [n_ff, used, n]."""
        if w.gate is not None:
            gate = of_experts(w.gate, x, ids, f"ffn_moe_gate-{il}")
            return self.expert_glu(il, gate, of_experts(w.up, x, ids, f"ffn_moe_up-{il}"))
        both = of_experts(w.up, x, ids, f"ffn_moe_gate_up-{il}")
        n_ff = both.ne[0] // 2
        ne, row = (n_ff, *both.ne[1:3]), both.nb[1:3]
        gate = ops.view(both, ne, row, name=f"ffn_moe_gate-{il}")
        return self.expert_glu(il, gate, ops.view(both, ne, row, n_ff * both.nb[0], name=f"ffn_moe_up-{il}"))

    def expert_glu(self, il: int, gate: Tensor, up: Tensor) -> Tensor:
        kind = GLU_OF[self.activation]
        return ops.glu(gate, up, kind, name=f"ffn_moe_{kind}-{il}")


def of_experts(w: Affine, x: Tensor, ids: Tensor, name: str) -> Tensor:
    """The products with each token's experts, called `name`, and their biases added."""
    product = ops.mul_mat_id(w.weight, x, ids, name=name)
    if w.bias is None:
        return product
    prefix, _, il = name.partition("-")
    return ops.add_id(product, w.bias, ids, name=f"{prefix}_biased-{il}")


def _of_best_groups(il: int, select: Tensor, p: ExpertParams) -> Tensor:
    """-inf for experts outside of the best groups, by the sum of a group's two best: [n_expert, n] to the same."""
    n_tokens, size = select.ne[1], p.n // p.groups
    grouped = ops.reshape(select, size, p.groups, n_tokens)
    best = ops.top_k(grouped, 2)
    scores = ops.get_rows(ops.reshape(grouped, 1, size, p.groups, n_tokens), best)
    scores = ops.sum_rows(ops.reshape(scores, 2, p.groups, n_tokens))
    kept = ops.top_k(ops.reshape(scores, p.groups, n_tokens), p.groups_used, name=f"ffn_moe_group_topk-{il}")
    hidden = ops.fill(grouped, -math.inf)
    shown = ops.set_rows(ops.get_rows(grouped, kept), kept, hidden)
    return ops.reshape(shown, p.n, n_tokens, name=f"ffn_moe_probs_masked-{il}")


def _shares(il: int, picked: Tensor, p: ExpertParams) -> Tensor:
    """The chosen probabilities [1, used, n] as weights."""
    used, n_tokens = picked.ne[1:3]
    weights = picked
    if p.gating == "chosen":
        weights = ops.soft_max(ops.reshape(weights, used, n_tokens))
        weights = ops.reshape(weights, 1, used, n_tokens, name=f"ffn_moe_weights_softmax-{il}")
    if p.norm:
        weights = ops.reshape(weights, used, n_tokens)
        total = ops.sum_rows(weights, name=f"ffn_moe_weights_sum-{il}")
        total = ops.clamp(total, LEAST_SUM, math.inf, name=f"ffn_moe_weights_sum_clamped-{il}")
        weights = ops.div(weights, total, name=f"ffn_moe_weights_norm-{il}")
        weights = ops.reshape(weights, 1, used, n_tokens)
    return ops.scale(weights, p.scale, name=f"ffn_moe_weights_scaled-{il}") if p.scale != 1 else weights


# ---- keys


def read_experts(keys: Keys, mixture: Mixture, n_ff: int) -> ExpertParams:
    """What the keys of experts say. Raises ArchError for what contradicts itself or the family."""
    n, used = keys.count("expert_count"), keys.count("expert_used_count")
    if n > MAX_EXPERTS or used > n:
        raise ArchError(
            f"{keys.name('expert_count')} must be at most {MAX_EXPERTS}, and {keys.name('expert_used_count')} no more "
            f"than that, got {n} and {used}; the file is damaged"
        )
    groups, groups_used = _groups(keys, n, used)
    stated = {
        "expert_weights_norm": keys.get("expert_weights_norm", bool, mixture.norm),
        "expert_weights_scale": keys.amount("expert_weights_scale", 0.0) or 1.0,
        "expert_shared_count": keys.get("expert_shared_count", int, 0),
        "leading_dense_block_count": keys.get("leading_dense_block_count", int, 0),
    }
    for (key, value), fixed in zip(stated.items(), (mixture.norm, 1.0, 0, 0)):
        if value < 0 or (value != fixed and not mixture.stated):
            raise ArchError(f"{keys.name(key)} must be {fixed}, as {keys.arch} has it here, got {value}")
    norm, scale, n_shared, n_dense = stated.values()
    gating = _gating(keys, mixture)
    return ExpertParams(n, used, n_ff, gating, bool(norm), scale, int(n_shared), groups, groups_used, int(n_dense))


def _gating(keys: Keys, mixture: Mixture) -> str:
    number = keys.get("expert_gating_func", int, 0)
    if number == 0:  # the file is silent
        return mixture.gating
    known = GATINGS if mixture.stated else (mixture.gating,)
    if not 1 <= number <= len(GATINGS) or GATINGS[number - 1] not in known:
        named = ", ".join(f"{GATINGS.index(name) + 1} ({name})" for name in known)
        raise ArchError(
            f"{keys.name('expert_gating_func')} must be one of {named}, got {number}; this gating is not implemented"
        )
    return GATINGS[number - 1]


def _groups(keys: Keys, n: int, used: int) -> tuple[int, int]:
    groups, kept = keys.get("expert_group_count", int, 0), keys.get("expert_group_used_count", int, 0)
    if groups <= 1:
        return 1, 1
    size = n // groups
    if n % groups or size < 2 or not 1 <= kept < groups or used > kept * size:
        raise ArchError(
            f"{keys.name('expert_group_count')} must cut {n} experts into equal groups of at least 2, of which fewer "
            f"than all, with {used} experts or more, are used, got {groups} and {kept}; the file is damaged"
        )
    return groups, kept
