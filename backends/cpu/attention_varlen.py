"""FLASH_ATTN_VARLEN and FLASH_ATTN_VARLEN_LSE: the definition, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphrt.backends.cpu.attention import NEG_INF, attend, log_sum_exp
from graphrt.backends.cpu.blocks import decode
from graphrt.backends.cpu.reference import reference
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams
from graphrt.tensor import Tensor

Numbers = torch.Tensor | None


def _mask(p: FlashAttnVarlenParams, n: int, length: int, like: torch.Tensor) -> torch.Tensor:
    """What n queries at the end of `length` keys add to their logits: -inf where they don't see a key, else minus its
    distance, which counts with ALiBi alone. [1, 1, n, length], at least one key, which nobody sees if there is none."""
    position = length - n + torch.arange(n)[:, None]
    key = torch.arange(max(length, 1))
    seen = (key < length).expand(n, -1)
    if p.causal:
        seen = seen & (key <= position)
    if p.window:
        seen = seen & (key > position - p.window)
    near = -(key - position).abs().to(like.dtype) if p.max_bias else torch.zeros((), dtype=like.dtype)
    return torch.where(seen, near, NEG_INF)[None, None]


def _added(p: FlashAttnVarlenParams, rule: torch.Tensor, mask: Numbers, queries: slice, length: int) -> torch.Tensor:
    """What _mask() made, with an explicit mask beside it: [1, m2, n, keys]. queries: of the sequence."""
    if mask is None:
        return rule
    rows, n = mask[:, :, queries], queries.stop - queries.start
    column = torch.arange(rule.shape[-1]) - (length - n if p.mask_new else 0)
    there = (column >= 0) & (column < rows.shape[-1])
    added = torch.where(there, rows[..., column.clamp(0, rows.shape[-1] - 1)], 0.0)
    return torch.where(rule == NEG_INF, NEG_INF, rule + added)


def _rows(cache: torch.Tensor, of: Tensor, start: int, length: int, pages: Numbers, like: torch.Tensor) -> torch.Tensor:
    """The keys or values of one sequence, [1, n_head_kv, max(length, 1), D], decoded. pages: its row of the table, None
    for packed keys, which begin at `start`. cache: as it lies in memory; a page that is not there is NaN."""
    key = torch.arange(max(length, 1))
    if pages is None:
        return decode(cache[:, :, (start + key).clamp(max=cache.shape[2] - 1)], of.dtype, like.dtype)
    page = pages[key // cache.shape[2]]
    outside = (page < 0) | (page >= cache.shape[0])
    found = decode(cache[page.masked_fill(outside, 0), :, key % cache.shape[2]], of.dtype, like.dtype)
    return found.masked_fill(outside[:, None, None], torch.nan).transpose(0, 1)[None]


def _sequences(
    node: Tensor, q: torch.Tensor, k: torch.Tensor, q_starts: torch.Tensor, lengths: Numbers, block_table: Numbers,
    k_starts: Numbers, mask: Numbers,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, tuple[int, int, Numbers], tuple[int, int]]]:  # fmt: skip
    """(queries, their keys, mask, where its rows are, its number and its first query's position) of each sequence that
    has queries."""
    starts = q_starts.flatten().clamp(0, q.shape[2]).tolist()
    for i, (first, end) in enumerate(zip(starts, starts[1:])):
        if first >= end:
            continue
        if lengths is not None and block_table is not None:
            pages = block_table[0, 0, i]
            start, length = 0, min(max(int(lengths[0, 0, 0, i]), 0), len(pages) * k.shape[2])
        else:
            assert k_starts is not None
            pages = None
            start, stop = k_starts[0, 0, 0, i : i + 2].clamp(0, k.shape[2]).tolist()
            length = max(stop - start, 0)
        rows = (start, length, pages)
        keys, queries = _rows(k, node["k"], *rows, q), slice(first, end)
        seen = _added(node.params, _mask(node.params, end - first, length, q), mask, queries, length)
        yield queries, keys, seen, rows, (i, length - (end - first))


def sequences(
    p: FlashAttnVarlenParams, q: torch.Tensor, q_starts: torch.Tensor, k_starts: Numbers, n_keys: int
) -> Iterator[tuple[slice, int, int, torch.Tensor]]:
    """(queries, first key, number of keys, mask) of each sequence that has queries, over packed keys."""
    assert k_starts is not None
    firsts = k_starts.flatten().clamp(0, n_keys).tolist()
    starts = q_starts.flatten().clamp(0, q.shape[2]).tolist()
    for i, (first, end) in enumerate(zip(starts, starts[1:])):
        if first < end:
            length = max(firsts[i + 1] - firsts[i], 0)
            yield slice(first, end), firsts[i], length, _mask(p, end - first, length, q)


@reference("FLASH_ATTN_VARLEN", stored=("k", "v"))
def flash_attn_varlen(
    node: Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_starts: torch.Tensor, lengths: Numbers = None,
    block_table: Numbers = None, k_starts: Numbers = None, sinks: torch.Tensor | None = None,
    prefixes: Numbers = None, mask: Numbers = None,
) -> torch.Tensor:  # fmt: skip
    out = torch.zeros(node.shape, dtype=q.dtype)
    for queries, keys, seen, rows, at in _sequences(node, q, k, q_starts, lengths, block_table, k_starts, mask):
        values = _rows(v, node["v"], *rows, q)
        out[:, queries] = attend(node, q[:, :, queries], keys, values, seen, sinks, first=at)
    return out


@reference("FLASH_ATTN_VARLEN_LSE", stored=("k",))
def flash_attn_varlen_lse(
    node: Tensor, q: torch.Tensor, k: torch.Tensor, q_starts: torch.Tensor, lengths: Numbers = None,
    block_table: Numbers = None, k_starts: Numbers = None, sinks: torch.Tensor | None = None,
    prefixes: Numbers = None, mask: Numbers = None,
) -> torch.Tensor:  # fmt: skip
    out = torch.full(node.shape, NEG_INF, dtype=q.dtype)
    for queries, keys, seen, _, at in _sequences(node, q, k, q_starts, lengths, block_table, k_starts, mask):
        out[0, 0, queries] = log_sum_exp(node, q[:, :, queries], keys, seen, sinks, first=at)[0].T
    return out
