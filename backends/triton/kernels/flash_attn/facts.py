"""An attention's plan in words: its kernel and why, tiles, schedule, mask, and what is to be merged."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.kernels.flash_attn.tile_plan import AttentionPlan
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import VarlenProblem
from graphrt.ops.attention_loops import block_sizes, standard_traffic, traffic_1, traffic_2
from graphrt.ops.decode_costs import split_costs
from graphrt.printing import count_text, human_bytes
from graphrt.program import Fact

#: Tiles that are listed one by one.
MOST_LISTED = 16


def attention_facts(plan: AttentionPlan) -> Iterator[Fact]:
    """Pairs of what it is of and a sentence."""
    yield from _kernel(plan)
    yield from _tiles(plan)
    yield from _mask(plan)
    yield from _schedule(plan)
    yield from _fixup(plan)


def _kernel(plan: AttentionPlan) -> Iterator[Fact]:
    c = plan.chosen
    shared = f", {human_bytes(c.shared)} of shared memory a program" if c.shared is not None else ""
    stages = f"{count_text(c.stages, 'k-block')} in flight"
    yield "kernel", f"{c.kernel} (kernels/flash_attn/{c.file}): {c.workers}, {stages}{shared}"
    for name, reason in c.refused.items():
        yield "why", f"not {name}: {reason}"
    score = getattr(c.problem.params, "score", "")
    if score:
        numbers = count_text(len(c.problem.params.score_numbers), "number")
        yield (
            "score",
            f"{score}, with {numbers}: compiled into the kernel; what the mask hides is skipped as without it",
        )
    portable = c.kernel in ("forward", "varlen")
    yield "why", "it serves everything the others do not" if portable else "it is the first that serves"
    if c.append:
        yield "append", c.append
    for other in c.beside:
        yield "beside", other


def _tiles(plan: AttentionPlan) -> Iterator[Fact]:
    t, p = plan.chosen.tiling, plan.chosen.problem
    if isinstance(p, VarlenProblem):
        yield from _listed_tiles(t, p)
        return
    heads = f"{t.pack} of the {count_text(p.gqa, 'head')} of a KV head"
    used = f"{p.n_q * t.pack} of {t.n_qt * t.block_m} rows in use"
    yield "tiles", f"{t.block_m} rows x {t.block_n} keys; rows are of {heads}, {used}"
    groups, sequences = count_text(t.n_groups, "group"), count_text(p.n_seq, "sequence")
    yield "tiles", f"{t.n_tiles} = {t.n_qt} along the queries x {groups} of heads x {sequences}"
    yield "tiles", f"{count_text(t.n_blocks, 'k-block')} each if none is hidden"


def _listed_tiles(t: Tiling, p: VarlenProblem) -> Iterator[Fact]:
    heads = f"{t.pack} of the {count_text(p.gqa, 'head')} of a KV head"
    tokens, groups = count_text(p.n_q, "token"), count_text(t.n_groups, "group")
    yield "tiles", f"{t.block_m} rows x {t.block_n} keys; rows are of {heads}, listed on the device in each run"
    yield "tiles", f"at most {t.n_tiles}: {t.n_qt} of {tokens} of {count_text(p.n_seq, 'sequence')} x {groups} of heads"
    yield (
        "tiles",
        f"{count_text(t.n_blocks, 'k-block')} each at most; figures below are for that many of both",
    )
    where = f"in pages of {p.page}, by the block table" if p.page else "packed, one sequence after the other"
    sees = ["its position and those before" if p.params.causal else "all"]
    sees += [f"the last {p.params.window} of them"] if p.params.window else []
    mask = p.explicit_t
    yield "keys", f"{where}; a query sees {', '.join(sees)}: {'no mask' if mask is None else 'a mask beside that'}"
    if mask is not None:
        columns = "a sequence's new tokens" if p.params.mask_new else "a sequence's keys"
        before = "those before them as without it" if p.params.mask_new else "all as blocks that are seen in part"
        yield "mask", f"{mask.ne[0]} columns of {columns}; k-blocks are those of positions, {before}"


def _mask(plan: AttentionPlan) -> Iterator[Fact]:
    if isinstance(plan.chosen.problem, VarlenProblem):
        return
    if plan.chosen.problem.mask_t is None:
        yield "mask", "none: every k-block counts"
    elif plan.kinds is None:
        yield "mask", "its values are not known here: figures are for no k-block hidden"
    else:
        k, t = plan.kinds, plan.chosen.tiling
        of = f"of {count_text(sum(k.values()), 'k-block')} of {count_text(t.n_mask_tiles, 'tile')} whose masks differ"
        yield (
            "mask",
            f"{of}: {k['skipped']} skipped (all hidden), {k['partial']} in parts, {k['full']} with nothing to add",
        )


def _schedule(plan: AttentionPlan) -> Iterator[Fact]:
    c, choice = plan.chosen, plan.chosen.choice
    yield "schedule", choice.summary()
    for reason in choice.reasons:
        yield "schedule", reason
    per = f"{count_text(choice.occupancy, 'program')} a multiprocessor: {plan.at_once} at once"
    persistent = choice.schedule == "tile" and c.programs < c.tiling.n_tiles
    yield "programs", per + (f"; {c.programs} persistent ones take tile after tile" if persistent else "")
    known = " if no k-block is hidden" if c.problem.mask_t is not None and plan.kinds is None else ""
    yield "programs", f"the longest visits {count_text(plan.longest, 'k-block')}{known}"
    yield (
        "efficiency",
        f"{plan.busy_percent:.0f} %: the share of the {plan.at_once} places, until the last program ends, in which "
        f"k-blocks are visited{known}",
    )
    if plan.idle_places:
        yield "efficiency", f"{plan.idle_places} of the {plan.at_once} places have no program"


def block_rule_facts(p: Problem, shared_memory: int) -> Iterator[Fact]:
    """What FlashAttention-1's rule would make of the device's shared memory, in bytes, and what its loop order and that
    of the kernels here move."""
    if isinstance(p, VarlenProblem) or p.out is None:
        return
    d, d_v, heads = p.k.d, p.v.d, p.n_head * p.n_seq
    rows, keys = block_sizes(shared_memory // 4, d)
    room = f"{human_bytes(shared_memory)} of shared memory, {shared_memory // 4} f32"
    yield "blocks", f"FlashAttention-1 would take blocks of {rows} rows x {keys} keys: {room} / (4 x {d})"
    first, second = traffic_1(p.n_q, p.n_kv, d, d_v, keys), traffic_2(p.n_q, p.n_kv, d, d_v, rows)
    kept = standard_traffic(p.n_q, p.n_kv, d, d_v)
    each = ", ".join(
        f"{name} {human_bytes(4 * heads * moved.total)}"
        for name, moved in (("scores in memory", kept), ("keys outside", first), ("queries outside", second))
    )
    yield "blocks", f"memory that such blocks read and write, all in f32, {count_text(heads, 'head')}: {each}"


def split_cost_facts(plan: AttentionPlan) -> Iterator[Fact]:
    """What the forms of a split would cost, where few query rows of a KV head see many keys (ops/decode_costs.py)."""
    c, p = plan.chosen, plan.chosen.problem
    if c.choice.schedule == "tile" or isinstance(p, VarlenProblem) or p.out is None or c.tiling.n_qt > 1:
        return
    parts, heads = max(2, c.programs // c.tiling.n_tiles), c.tiling.n_groups * p.n_seq
    key, value = (t.dtype.type_size / t.dtype.block_size for t in (p.k_t, p.out["v"]))
    yield "cost", f"of a split in {count_text(parts, 'part')} a tile, every key seen (ops/decode_costs.py):"
    for form, costs in split_costs(p.n_q * c.tiling.pack, p.n_kv, p.k.d, p.v.d, parts).items():
        cached, memory = (human_bytes(heads * n) for n in costs.nbytes(key, value))
        operations = f"{heads * costs.operations / 1e9:.4g} billion operations"
        yield "cost", f"{form}: {operations}, {cached} by the last cache, {memory} by memory"


def _fixup(plan: AttentionPlan) -> Iterator[Fact]:
    shared, c = plan.shared_tiles(), plan.chosen
    if not shared:
        yield "fixup", "none: each tile is one program's"
    else:
        by = {"fixup": "a launch of fixup.py", "kernel": "the last of a tile's programs, in the same launch"}[c.join]
        yield "fixup", f"{len(shared)} of {count_text(c.tiling.n_tiles, 'tile')}, {sum(shared.values())} parts, by {by}"
        listed = ", ".join(f"{tile} ({n})" for tile, n in list(shared.items())[:MOST_LISTED])
        more = f" and {len(shared) - MOST_LISTED} more" if len(shared) > MOST_LISTED else ""
        yield "fixup", f"tiles (parts): {listed}{more}"
    if c.choice.schedule == "stream_k":
        units = plan.unit_start[-1]
        low, high = units // c.programs, -(-units // c.programs)
        each = f"{low}" if low == high else f"{low} or {high}"
        yield "ranges", f"program i has k-blocks i * {units} // {c.programs} up to the next one's first: {each}"
    if c.choice.scratch_bytes:
        yield "scratch", f"{human_bytes(c.choice.scratch_bytes)} for parts of tiles"
    if c.repairs:
        yield "repair", "tiles with NaN, infinity or huge logits are flagged; the portable kernel does those again"
