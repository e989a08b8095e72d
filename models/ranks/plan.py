"""The plan of tensor parallelism: for every tensor of a file how it is cut over ranks, as data.

Heads of attention, columns of a feed-forward and rows of the output matrix are shared out; what sums over them
(attn_output, ffn_down) is cut along what it sums over, so that every rank has a part of the sum and one ALL_REDUCE a
block of a layer adds them up (Megatron-LM, arXiv 1909.08053). The rest is whole on every rank. Cuts fall between
blocks of quantized types. Heads of k and v are repeated where there are fewer than ranks.

Ranks may be several stages of a pipeline, with as many ranks each, between which layers are shared out (stages.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from graphrt.errors import ArchError
from graphrt.models.arch.layout import Layout
from graphrt.models.gguf import TensorInfo
from graphrt.models.hparams import HParams
from graphrt.models.ranks.share import Share, Span
from graphrt.models.ranks.spans import LayerSpans, block_of, layer_spans, shared_out, width
from graphrt.models.ranks.stages import owners, stages_of

_LAYER = re.compile(r"blk\.([0-9]+)\.(.+)\.(weight|bias|scales)")
#: Ranks of one job.
MAX_RANKS = 64

#: What a layer's tensors, and those outside, are cut by. What is not here can't be cut, and a file that has it is
#: refused.
ROLES = {
    **dict.fromkeys(("attn_q", "attn_q_b", "attn_k_b", "attn_v_b", "attn_sinks"), "heads"),
    **dict.fromkeys(("attn_k", "attn_v"), "kv heads"),
    "attn_qkv": "heads of q, k and v",
    "attn_output": "sums over heads",
    **dict.fromkeys(("ffn_gate", "ffn_up", "ffn.act", "ffn_gate_shexp", "ffn_up_shexp"), "columns"),
    **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "sums over columns"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"), "columns of experts"),
    "ffn_down_exps": "sums over columns of experts",
    "output": "vocabulary",
    "attn_q_norm": "norm of heads",
    "attn_k_norm": "norm of kv heads",
    **dict.fromkeys(
        (
            *("attn_norm", "attn_norm_2", "ffn_norm", "post_attention_norm", "post_ffw_norm", "ffn_gate_inp"),
            *("exp_probs_b", "attn_q_a", "attn_q_a_norm", "attn_kv_a_mqa", "attn_kv_a_norm", "output_norm"),
            *("token_embd", "token_embd_norm", "position_embd", "rope_freqs", "rope_factors_long"),
            *("rope_factors_short", "cls.output"),
        ),
        "whole",
    ),
}  # fmt: skip


#: The same where experts are shared out whole.
WHOLE_EXPERTS = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps"), "experts")


@dataclass(frozen=True)
class Cut:
    """How a tensor is shared out. by: what it is cut by, of ROLES; "whole" for what every rank has, "rank 0" for what
    is added once, so that the others have zeros. dim: along which dimension; spans: what each rank has there, one
    after the other."""

    by: str
    dim: int = 0
    spans: tuple[tuple[Span, ...], ...] = ()

    def ne(self, ne: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        if not self.spans:
            return ne
        own = sum(map(width, self.spans[rank]))
        return tuple(own if i == self.dim else n for i, n in enumerate(ne))


@dataclass(frozen=True)
class RankPlan:
    """ranks: of a stage; hp: the whole model's; layers: what each rank has of them; experts: columns of every expert;
    vocab: rows of the output matrix; cuts: of each tensor of the file, and of "output.weight" where the embedding takes
    its place; stages: the layers of each; whole_experts: which experts each rank has whole, () where it has columns of
    every one. Methods take a rank's number among all."""

    ranks: int
    hp: HParams
    layers: tuple[LayerSpans, ...]
    experts: tuple[Span, ...]
    vocab: tuple[Span, ...]
    cuts: Mapping[str, Cut]
    stages: tuple[Span, ...]
    whole_experts: tuple[Span, ...] = ()

    @property
    def size(self) -> int:
        """All ranks."""
        return self.ranks * len(self.stages)

    def has(self, name: str, rank: int) -> bool:
        """The tensor of that name is of a rank's stage."""
        return rank // self.ranks in owners(name, self.stages)

    def hparams(self, rank: int) -> HParams:
        """The hyperparameters of a rank's part, as if it were a model, of all layers."""
        rank %= self.ranks

        def of(which: Callable[[LayerSpans], tuple[Span, ...]]) -> tuple[int, ...]:
            return tuple(width(which(layer)[rank]) for layer in self.layers)

        hp, experts = self.hp, self.hp.experts
        if experts is not None and self.whole_experts:
            shared = width(self.experts[rank]) * experts.n_shared if experts.n_shared else 0
            experts = replace(experts, held=width(self.whole_experts[rank]), shared_ff=shared)
        elif experts is not None:
            experts = replace(experts, n_ff=width(self.experts[rank]))
        heads, kv, columns = of(lambda x: x.heads), of(lambda x: x.kv), of(lambda x: x.columns)
        return replace(hp, n_head=heads, n_head_kv=kv, n_ff=columns, experts=experts)

    def share(self, rank: int) -> Share:
        heads = tuple(layer.heads for layer in self.layers)
        norms = {
            name: tuple(width(span) for (span,) in cut.spans)
            for name, cut in self.cuts.items() if cut.spans and cut.dim == 0 and name.endswith("_norm.weight")
        }  # fmt: skip
        stage, vocab = rank // self.ranks, tuple(width(span) for span in self.vocab)
        own = tuple(range(*self.stages[stage])) if len(self.stages) > 1 else ()
        return Share(
            self.ranks, rank % self.ranks, heads, vocab, norms, len(self.stages), stage, own, self.whole_experts
        )  # fmt: skip


def plan_ranks(
    hp: HParams, layout: Layout, tensors: Mapping[str, TensorInfo], ranks: int, stages: int = 1, ep: bool = False
) -> RankPlan:
    """The plan for so many ranks of a decoder's file, in so many stages. ep: a rank has some experts whole, and not a
    part of every one. Raises ArchError with a sentence for what can't be cut so."""
    if not 1 < ranks <= MAX_RANKS:
        raise ArchError(f"a model is cut for 2 to {MAX_RANKS} ranks, got {ranks}; give another number")
    if stages < 1 or ranks % stages:
        raise ArchError(f"stages must have as many ranks each, got {ranks} ranks in {stages}; use a divisor")
    spans, ranks = stages_of(tensors, hp.n_layer, stages), ranks // stages
    if ep and (hp.experts is None or ranks == 1):
        got = "this model has none" if hp.experts is None else "each stage has one"
        raise ArchError(f"experts are shared out over the ranks of a stage, {got}; leave --ep out")
    if ranks == 1:
        return _in_stages(hp, tensors, spans)
    layers = tuple(layer_spans(hp, tensors, il, ranks) for il in range(hp.n_layer))
    experts: tuple[Span, ...] = ()
    whole = shared_out("the experts", hp.experts.n, ranks, 1) if ep and hp.experts is not None else ()
    if hp.experts is not None and (hp.experts.n_shared or not ep):
        cut = (".ffn_down_shexp.",) if ep else (".ffn_down_exps.", ".ffn_down_shexp.")
        downs = [t for name, t in tensors.items() if any(part in name for part in cut)]
        shared = max(1, hp.experts.n_shared)
        step = math.lcm(*(t.dtype.block_size // math.gcd(t.dtype.block_size, shared) for t in downs), 1)
        experts = shared_out("an expert's columns", hp.experts.n_ff, ranks, max(step, block_of(downs)))
    vocab = shared_out("the vocabulary", hp.n_vocab, ranks, 1)
    plan = RankPlan(ranks, hp, layers, experts, vocab, {}, spans, whole)
    cutter = _Cutter(plan, layout)
    cuts = {name: cutter.cut(name, info.ne) for name, info in tensors.items()}
    if "output.weight" not in tensors:
        cuts["output.weight"] = cutter.cut("output.weight", tensors["token_embd.weight"].ne)
    return replace(plan, cuts=cuts)


def _in_stages(hp: HParams, tensors: Mapping[str, TensorInfo], spans: tuple[Span, ...]) -> RankPlan:
    """The plan of stages of one rank each: no tensor is cut."""
    layers = tuple(
        LayerSpans(((0, heads),), ((0, kv),), ((0, n_ff),)) for heads, kv, n_ff in zip(hp.n_head, hp.n_head_kv, hp.n_ff)
    )
    experts: tuple[Span, ...] = ((0, hp.experts.n_ff),) if hp.experts is not None else ()
    cuts = {name: Cut("whole") for name in (*tensors, "output.weight")}
    return RankPlan(1, hp, layers, experts, ((0, hp.n_vocab),), cuts, spans)


class _Cutter:
    """How each tensor is cut, given what each rank has."""

    def __init__(self, plan: RankPlan, layout: Layout) -> None:
        self.plan, self.layout = plan, layout

    def cut(self, name: str, ne: tuple[int, ...]) -> Cut:
        """Raises ArchError for a tensor of which nothing is known."""
        found = _LAYER.fullmatch(name)
        il, stem = (int(found[1]), found[2]) if found else (-1, name.rpartition(".")[0])
        kind = name.rpartition(".")[2]
        if stem == self.layout.ffn_norm_name and stem not in ROLES:
            return Cut("whole")
        by = WHOLE_EXPERTS.get(stem) if self.plan.whole_experts else None
        by = by or ROLES.get(stem)
        if by is None or not -1 <= il < self.plan.hp.n_layer:
            raise ArchError(f"tensor {name[:80]!r} has no rule how it is cut over ranks; run the model on one")
        if by == "whole":
            return Cut("whole")
        if by.startswith("sums over") and kind == "bias":
            return Cut("rank 0")
        return self._found(by, il, ne, kind)

    def _found(self, by: str, il: int, ne: tuple[int, ...], kind: str) -> Cut:
        plan, last = self.plan, len(ne) - 1
        if by == "vocabulary":
            return Cut(by, last, _alone(plan.vocab))
        layer = plan.layers[il]
        if by.startswith("norm of"):  # one row for every head is whole; a row a head, or of all, is cut with them
            if ne == (plan.hp.d_k,):
                return Cut("whole")
            by = by.removeprefix("norm of ")
        if by in ("heads", "kv heads"):
            n_head, spans = (plan.hp.n_head, layer.heads) if by == "heads" else (plan.hp.n_head_kv, layer.kv)
            return Cut(by, last, _of_unit(ne[last] // n_head[il], spans))
        if by == "sums over heads":
            return Cut(by, 0, _of_unit(ne[0] // plan.hp.n_head[il], layer.heads))
        if by == "heads of q, k and v":
            return Cut(by, last, self._fused(layer, il))
        if by == "experts":
            return Cut(by, last, _alone(plan.whole_experts))
        if by == "columns of experts":
            dim = 1 if kind == "weight" else 0
            return Cut(by, dim, self._columns(plan.experts, plan.hp.experts.n_ff if plan.hp.experts else 1, ne[dim]))
        if by == "sums over columns of experts":
            return Cut(by, 0, _alone(plan.experts))
        dim = 0 if by == "sums over columns" else last
        return Cut(by, dim, self._of_dense(layer, il, ne[dim]))

    def _of_dense(self, layer: LayerSpans, il: int, n: int) -> tuple[tuple[Span, ...], ...]:
        """Columns of a feed-forward, or of the one that every token is given beside its experts."""
        hp, experts = self.plan.hp, self.plan.hp.experts
        if experts is not None and il >= experts.n_dense:
            return _of_unit(max(1, experts.n_shared), self.plan.experts)
        return self._columns(layer.columns, hp.n_ff[il], n)

    def _columns(self, spans: tuple[Span, ...], n_ff: int, n: int) -> tuple[tuple[Span, ...], ...]:
        """Of gate and up in one tensor, n of them, a part of each."""
        if n != 2 * n_ff:
            return _alone(spans)
        return tuple(((a, b), (n_ff + a, n_ff + b)) for a, b in spans)

    def _fused(self, layer: LayerSpans, il: int) -> tuple[tuple[Span, ...], ...]:
        hp = self.plan.hp
        d_k, d_v = hp.d_k, hp.d_v
        k = d_k * hp.n_head[il]
        v = k + d_k * hp.n_head_kv[il]
        pairs = zip(layer.heads, layer.kv)
        return tuple(
            ((d_k * q[0], d_k * q[1]), (k + d_k * kv[0], k + d_k * kv[1]), (v + d_v * kv[0], v + d_v * kv[1]))
            for q, kv in pairs
        )


def _alone(spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], ...]:
    return tuple((span,) for span in spans)


def _of_unit(unit: int, spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], ...]:
    """The same in elements, `unit` of them to each."""
    return tuple(((unit * first, unit * stop),) for first, stop in spans)
