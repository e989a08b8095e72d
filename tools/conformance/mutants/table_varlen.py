"""The planted bugs of paging and of lengths: a page too far, a stale entry, a length of somebody else.

The default cases of FLASH_ATTN_VARLEN and FLASH_ATTN_VARLEN_LSE must see each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from graphrt.tensor import Tensor
from graphrt.tools.conformance.mutants.memory import Index, Operand
from graphrt.tools.conformance.mutants.pieces import Mutant, Pieces, mask_heads, masked
from graphrt.tools.conformance.mutants.varlen import BLOCK, NEG_INF, TOKENS, Varlen

VA, LSE = "FLASH_ATTN_VARLEN", "FLASH_ATTN_VARLEN_LSE"


def _paged(node: Tensor) -> bool:
    return node["block_table"] is not None


def _packed(node: Tensor) -> bool:
    return node["k_starts"] is not None


def _windowed(node: Tensor) -> bool:
    return bool(node.params.window)


def _causal(node: Tensor) -> bool:
    return bool(node.params.causal)


def _with_sinks(node: Tensor) -> bool:
    return node["sinks"] is not None


def _alibi(node: Tensor) -> bool:
    return bool(node.params.max_bias)


def _scored(node: Tensor) -> bool:
    return bool(node.params.score)


def _shared_groups(k: Varlen) -> list[tuple[int, int, int]]:
    """Groups share keys although a score function asks for positions."""
    kept, k.p = k.p, replace(k.p, score="", score_numbers=())
    found = Varlen.groups(k)
    k.p = kept
    return found


def _sharing(node: Tensor) -> bool:
    return node["prefixes"] is not None and not _windowed(node) and not _alibi(node) and not _scored(node)


def _of_keys(node: Tensor) -> bool:
    return masked(node) and not node.params.mask_new


def _of_new(node: Tensor) -> bool:
    return masked(node) and bool(node.params.mask_new)


def _small(node: Tensor) -> bool:
    """Several pages in a k-block."""
    return _paged(node) and node["k"].ne[1] < BLOCK


def _large(node: Tensor) -> bool:
    return _paged(node) and node["k"].ne[1] > BLOCK


class _First:
    """What the first call found, ever after: as a kernel that keeps what it should read each time."""

    def __init__(self, found: Callable[..., object]) -> None:
        self.found = found

    def __call__(self, k: Varlen, *args: object) -> object:
        kept = k.__dict__.setdefault("_kept", {})
        return kept.setdefault(self.found.__name__, self.found(k, *args))


def _v_by_ks_page(k: Varlen, x: Operand, seq: int, kv_head: int, key: Index) -> Index:
    apart = k.k.t.nb[3] - x.t.nb[3] if x is k.v else 0
    return np.asarray(Varlen.key_rows(k, x, seq, kv_head, key) + k.page_of(seq, key) * apart)


def _table_bug(name: str, what: str, pieces: Pieces, active: Callable[[Tensor], bool] = _paged) -> Mutant:
    return Mutant(name, VA, what, pieces, active)


VARLEN_MUTANTS = [
    # pages
    _table_bug("page_next", "a key is looked for in the page behind its own",
               {"page_of": lambda k, s, key: k.entry(s, key // k.page + 1)}),
    _table_bug("page_in_order", "pages are taken to lie in order", {"entry": lambda k, s, block: block}),
    _table_bug("page_of_first_sequence", "every sequence has the first one's pages",
               {"page_of": lambda k, s, key: k.entry(0, key // k.page)}),
    _table_bug("page_of_block", "a k-block lies in the page of its first key", {
        "page_of": lambda k, s, key: k.entry(s, key * 0 + key[0] // k.page)}, _small),
    _table_bug("page_by_block", "the table is looked up by k-blocks and not by pages",
               {"page_of": lambda k, s, key: k.entry(s, key // BLOCK)}, _large),
    _table_bug("page_rounded_up", "the page is that of the key behind",
               {"page_of": lambda k, s, key: k.entry(s, (key + 1) // k.page)}),
    _table_bug("page_rounded_down", "the page is that of the key before",
               {"page_of": lambda k, s, key: k.entry(s, np.maximum(key - 1, 0) // k.page)}),
    _table_bug("page_stale", "entries of the table are kept from the tile before",
               {"entry": lambda k, s, block: k.__dict__.setdefault("_entries", {}).setdefault(
                   (len(block), int(block[0])), Varlen.entry(k, s, block))}),
    _table_bug("table_stride", "rows of the table are taken to be as long as the sequence",
               {"entry": lambda k, s, block: k.read_ints(
                   k.table, k.table.base + s * 4 * -(-max(1, k.length(s)) // k.page) + block * 4)}),
    _table_bug("table_transposed", "the table is read by columns",
               {"entry": lambda k, s, block: k.read_ints(k.table, k.table.base + (block * k.n_seq + s) * 4)}),
    _table_bug("slot_zero", "every key is a page's first", {"slot_of": lambda k, key: key * 0}),
    _table_bug("slot_next", "slots begin with the second", {"slot_of": lambda k, key: (key + 1) % k.page}),
    _table_bug("slot_of_block", "a key's slot is its place in the k-block",
               {"slot_of": lambda k, key: key % BLOCK}, _large),
    _table_bug("slot_of_16", "pages are taken to have 16 tokens", {"slot_of": lambda k, key: key % 16},
               lambda node: _paged(node) and node["k"].ne[1] > 16),
    _table_bug("v_by_strides_of_k", "V's pages are as far apart as K's", {"key_rows": _v_by_ks_page},
               lambda node: _paged(node) and node["v"].nb[3] != node["k"].nb[3]),
    _table_bug("last_page_whole", "the last page is read, and counted, to its end", {
        "length": lambda k, s: -(-Varlen.length(k, s) // k.page) * k.page}),
    _table_bug("last_page_left_out", "a last page that is not full is left out", {
        "length": lambda k, s: Varlen.length(k, s) // k.page * k.page}),
    _table_bug("page_past_the_end_read", "rows behind the end are read: NaN of a freed page meets a weight of 0",
               {"loaded": lambda k, key, first, end: (key >= first) & (key < -(-end // 16) * 16)}),
    _table_bug("page_out_of_window_read", "rows before the window are read, of a page that was given back", {
        "loaded": lambda k, key, first, end: key < end, "entry": lambda k, s, block: np.maximum(
            Varlen.entry(k, s, block), 0)}, lambda node: _paged(node) and _windowed(node)),
    # lengths and sequences
    Mutant("length_one_short", VA, "the last key is left out", {"length": lambda k, s: Varlen.length(k, s) - 1}),
    Mutant("length_one_long", VA, "a key behind the end counts", {"length": lambda k, s: Varlen.length(k, s) + 1}),
    Mutant("length_of_next", VA, "a sequence has the next one's length",
           {"length": lambda k, s: Varlen.length(k, min(s + 1, k.n_seq - 1))}),
    Mutant("length_of_first", VA, "all sequences are as long as the first", {"length": _First(Varlen.length)}),
    Mutant("length_before_append", VA, "a length is read before the new tokens are counted",
           {"length": lambda k, s: max(0, Varlen.length(k, s) - (k.start_of(s + 1) - k.start_of(s)))}),
    Mutant("length_without_keys_is_one", VA, "a sequence without keys is given one",
           {"length": lambda k, s: max(1, Varlen.length(k, s))}),
    Mutant("starts_late", VA, "a sequence's queries are taken one too early",
           {"start_of": lambda k, s: max(0, Varlen.start_of(k, s) - (0 < s <= k.n_seq))}),
    Mutant("nobody_left_out", VA, "queries of nobody are left as they lie in memory",
           {"sequences": lambda k: k.n_seq}, lambda node: True),
    Mutant("nobody_of_last", VA, "queries of nobody are the last sequence's",
           {"start_of": lambda k, s: k.n_tokens if s == k.n_seq else Varlen.start_of(k, s)}),
    Mutant("last_sequence_left_out", VA, "the last sequence has no tiles", {"tiles": lambda k: (
        t for t in Varlen.tiles(k) if t[0] != k.n_seq - 1)}),
    Mutant("one_tile_each", VA, "a sequence has one tile, however many queries", {"tiles": lambda k: (
        t for t in Varlen.tiles(k) if t[1] == 0)}),
    Mutant("tile_rows_unshifted", VA, "later tiles begin with the sequence's first query", {"tiles": lambda k: (
        (s, first * (first < TOKENS), n) for s, first, n in Varlen.tiles(k))}),
    # positions
    Mutant("aligned_at_start", VA, "a sequence's first query stands at its first key",
           {"position": lambda k, i, n, length: i}, _causal),
    Mutant("position_one_back", VA, "a query does not see its own key",
           {"before": lambda k, key, p: key < p[:, None]}, _causal),
    Mutant("position_one_on", VA, "a query sees the key behind it",
           {"before": lambda k, key, p: key <= p[:, None] + 1}, _causal),
    Mutant("position_of_tile", VA, "all queries of a tile see what the last one sees",
           {"before": lambda k, key, p: key <= p[-1:, None]}, _causal),
    Mutant("blocks_of_first_row", VA, "a tile visits what its first query sees",
           {"end_key": lambda k, last, length: Varlen.end_key(k, max(0, last - TOKENS + 1), length)}, _causal),
    Mutant("never_causal", VA, "later keys are seen", {"before": lambda k, key, p: np.full((len(p), len(key)), True),
                                                       "end_key": lambda k, last, length: length}, _causal),
    Mutant("window_one_wide", VA, "a window has a key more", {"near": lambda k, key, p: (
        key >= p[:, None] - k.p.window), "first_key": lambda k, first, end: max(0, first - k.p.window)}, _windowed),
    Mutant("window_one_narrow", VA, "a window has a key less",
           {"near": lambda k, key, p: key > p[:, None] - k.p.window + 1}, _windowed),
    Mutant("window_of_length", VA, "a window is counted from the last key",
           {"first_key": lambda k, first, end: min(end, max(0, end - k.p.window))}, _windowed),
    Mutant("window_ignored_in_blocks", VA, "only blocks are left out by a window", {
        "near": lambda k, key, p: np.full((len(p), len(key)), True)}, _windowed),
    Mutant("alibi_from_start", VA, "ALiBi's distance is from the first key",
           {"distance": lambda k, key, p: key + p[:, None] * 0}, _alibi),
    Mutant("alibi_one_sided", VA, "keys behind a query are nearer than none",
           {"distance": lambda k, key, p: p[:, None] - key}, lambda node: _alibi(node) and not _causal(node)),
    # score functions
    Mutant("varlen_score_dropped", VA, "the score function is not applied", {"scored": lambda k, s, *at: s}, _scored),
    Mutant("varlen_score_of_token", VA, "queries count from the sequence's first new token", {
        "symbols": lambda k, *at: Varlen.symbols(k, *at) | {"i": (at[2] - at[2].min())[:, None]}}, _scored),
    Mutant("varlen_score_of_sequence_0", VA, "it gets no sequence", {"symbols": lambda k, *at: (
        Varlen.symbols(k, 0, *at[1:]))}, _scored),
    Mutant("varlen_score_key_in_page", VA, "keys count from their page's first", {
        "symbols": lambda k, seq, head, i, j: Varlen.symbols(k, seq, head, i, j % k.page),
    }, lambda node: _scored(node) and _paged(node)),
    Mutant("varlen_score_in_shared_part", VA, "shared keys are scored as if they were the group's first sequence's", {
        "groups": _shared_groups}, lambda node: _scored(node) and node["prefixes"] is not None),
    # shared pages
    Mutant("prefix_twice", VA, "a sequence's own part begins with the keys that it shares",
           {"own_start": lambda k, start, shared: start}, _sharing),
    Mutant("prefix_page_short", VA, "the last shared page is in neither part",
           {"shared_end": lambda k, shared: shared - k.page}, _sharing),
    Mutant("prefix_own_early", VA, "the last shared page is in both parts",
           {"own_start": lambda k, start, shared: max(start, shared - k.page)}, _sharing),
    Mutant("prefix_of_the_next", VA, "the sequence behind a group is taken for one of it",
           {"is_member": lambda k, seq, first, count: first <= seq <= first + count}, _sharing),
    Mutant("prefix_of_the_first_group", VA, "every sequence has the first group's pages",
           {"is_member": lambda k, seq, first, count: True}, _sharing),
    Mutant("prefix_of_sequence_0", VA, "shared keys are those of the first sequence of all",
           {"group_of": lambda k, seq: (0, Varlen.group_of(k, seq)[1])}, _sharing),
    Mutant("prefix_lost", VA, "the shared part is not joined", {"join": lambda k, shared, own: own}, _sharing),
    Mutant("prefix_alone", VA, "the own part is not joined", {"join": lambda k, shared, own: shared}, _sharing),
    Mutant("prefix_unscaled", VA, "parts are joined as if their maxima were equal", {"join": lambda k, a, b: (
        np.maximum(a[0], b[0]), a[1] + b[1], a[2] + b[2])}, _sharing),
    Mutant("prefix_stale", VA, "groups are those of the first tile", {"group_of": _First(Varlen.group_of)}, _sharing),
    # packed keys
    Mutant("packed_from_zero", VA, "every sequence's keys begin at the first",
           {"packed_row": lambda k, s, key: key}, _packed),
    Mutant("packed_by_queries", VA, "keys begin where queries do",
           {"packed_row": lambda k, s, key: k.start_of(s) + key}, _packed),
    # explicit masks
    Mutant("mask_dropped", VA, "the mask is not added", {"has_column": lambda k, c: c != c}, masked),
    Mutant("mask_row_of_sequence", VA, "rows of the mask begin anew with each sequence",
           {"mask_row": lambda k, tokens, first: tokens - first}, masked),
    Mutant("mask_row_of_the_next", VA, "a query has the row of the one behind it",
           {"mask_row": lambda k, tokens, first: np.minimum(tokens + 1, k.n_tokens - 1)}, masked),
    Mutant("mask_row_of_tile", VA, "all queries of a tile have the first one's row",
           {"mask_row": lambda k, tokens, first: tokens * 0 + tokens[0]}, masked),
    Mutant("mask_column_a_page_on", VA, "columns are those of keys a page on",
           {"column": lambda k, key, c0: key - c0 + k.page}, lambda node: _of_keys(node) and _paged(node)),
    Mutant("mask_column_in_page", VA, "columns count from a page's first key",
           {"column": lambda k, key, c0: key % k.page}, lambda node: _of_keys(node) and _paged(node)),
    Mutant("mask_column_one_on", VA, "a key has the next one's column",
           {"column": lambda k, key, c0: key - c0 + 1}, masked),
    Mutant("mask_of_keys_taken_for_new", VA, "a mask over keys is laid over the new tokens",
           {"column0": lambda k, n, length: length - n}, _of_keys),
    Mutant("mask_of_new_taken_for_keys", VA, "a mask over new tokens is laid over the first keys",
           {"column0": lambda k, n, length: 0}, _of_new),
    Mutant("mask_past_length", VA, "columns of keys that there are not are read, and count", {
        "read_mask": lambda k, seen: seen | True, "seen": lambda k, position, key, length: np.broadcast_to(
            key < -(-length // 16) * 16, (len(position), len(key)))}, lambda node: masked(node) and not _causal(node)),
    Mutant("mask_hides_without_column", VA, "keys without a column are hidden",
           {"without_column": lambda k: NEG_INF}, masked),
    Mutant("mask_without_slope", VA, "ALiBi's slope is not on the mask", {"mask_slope": lambda k, h: np.float32(1)},
           lambda node: masked(node) and _alibi(node)),
    Mutant("mask_of_head_0", VA, "all heads have the first one's mask", {"matrix": lambda k, h: 0},
           mask_heads),
    Mutant("mask_of_kv_head", VA, "heads of one KV head have one mask", {"matrix": lambda k, h: k.kv_head(h)
           % k.mask.t.ne[2]}, mask_heads),
    Mutant("mask_hidden_keys_read", VA, "keys that it hides from all are read: NaN meets a weight of 0",
           {"shown": lambda k, seen: seen.any(0) | True}, _of_keys),
    Mutant("mask_dead_block_of_first_row", VA, "blocks that the tile's first query does not see are skipped",
           {"visited": lambda k, blocks, tokens: [b for b in blocks if not (
               k.mask is not None and tokens[0] < tokens[-1] and b)]}, _of_keys),
    Mutant("mask_blocks_full_before_new", VA, "a block counts as free of the mask if its first key is", {
        "column": lambda k, key, c0: np.where(key[0] < c0, -1, key - c0)}, _of_new),
    # ends
    Mutant("sink_in_each_part", VA, "each part of a tile has the sink", {"merge": lambda k, a, b: Varlen.merge(
        k, a, (np.maximum(b[0], 1), b[1] * np.exp(b[0] - np.maximum(b[0], 1)) + 1,
               b[2] * np.exp(b[0] - np.maximum(b[0], 1))[:, None]))}, _with_sinks),
    Mutant("part_lost", VA, "the first part of a tile is not joined", {"merge": lambda k, a, b: b}),
    Mutant("kv_head_in_turn", VA, "heads share KV heads in turn", {"kv_head": lambda k, h: h % k.k.t.ne[2]}),
    Mutant("result_by_heads", VA, "the result lies with tokens inside heads", {"out_rows": lambda k, tokens, head: (
        k.out.base + (head * k.n_tokens + tokens) * k.out.t.nb[1])}),
    # the log of denominators
    Mutant("lse_nobody_has_sink", LSE, "queries of nobody have the sink", {"has_sink": lambda k, s: True}, _with_sinks),
    Mutant("lse_length_one_short", LSE, "the last key is left out", {"length": lambda k, s: Varlen.length(k, s) - 1}),
    Mutant("lse_mask_dropped", LSE, "the mask is not added", {"has_column": lambda k, c: c != c}, masked),
    Mutant("lse_part_lost", LSE, "the first part of a tile is not joined", {"merge": lambda k, a, b: b}),
    Mutant("lse_of_nothing", LSE, "a query that sees nothing has a finite number", {"merge": lambda k, a, b: (
        np.where(np.maximum(a[0], b[0]) == NEG_INF, np.float32(0), Varlen.merge(k, a, b)[0]),
        *(np.maximum(x, np.float32(1e-30)) for x in Varlen.merge(k, a, b)[1:]))}),
]  # fmt: skip
