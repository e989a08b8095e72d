"""A rank's own experts, where ranks share them out whole: each token's experts are chosen among all, and a rank
computes those of them that it has. The others' rows are zeros, so that the sum over ranks has every expert once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphrt import ops
from graphrt.models.ranks.share import Span
from graphrt.models.weights import Weights
from graphrt.tensor import Tensor


@dataclass(frozen=True)
class OwnExperts:
    """numbers: i32 [1, n_expert], each expert's number among the rank's own, -1 for those of others; slots: i32 [1,
    n_expert, used], the slot that a token's expert stands in where it is the rank's own, else -1."""

    numbers: Tensor
    slots: Tensor

    @classmethod
    def of(cls, weights: Weights, own: Span, n_expert: int, used: int) -> OwnExperts:
        """Of a rank that has the experts own[0] to own[1] - 1."""
        all_of_them = np.arange(n_expert, dtype=np.int32)
        is_own = (own[0] <= all_of_them) & (all_of_them < own[1])
        numbers = np.where(is_own, all_of_them - own[0], -1).astype(np.int32)
        slots = np.where(is_own, np.arange(used, dtype=np.int32)[:, None], -1).astype(np.int32)
        return cls(
            weights.constant("ffn_moe_own_numbers", numbers[:, None]),
            weights.constant("ffn_moe_own_slots", slots[:, :, None]),
        )

    def numbered(self, il: int, ids: Tensor) -> Tensor:
        """Experts by their numbers among all as those among the rank's own: i32 [used, n_tokens]. MUL_MAT_ID reads
        nothing for the -1 of another rank's, and makes its row NaN."""
        used, n_tokens = ids.ne[:2]
        flat = ops.reshape(ops.cont(ids), used * n_tokens)
        return ops.reshape(ops.get_rows(self.numbers, flat), used, n_tokens, name=f"ffn_moe_own-{il}")

    def kept(self, il: int, rows: Tensor, ids: Tensor) -> Tensor:
        """The rows of the rank's own experts, and zeros in place of others: [n_embd, used, n_tokens] to the same. ids:
        by their numbers among all."""
        used, n_tokens = ids.ne[:2]
        by_slot = ops.cont(ops.transpose(ids))  # [n_tokens, used]: each slot has a table of its own
        slots = ops.reshape(ops.get_rows(self.slots, by_slot), n_tokens, used)
        zeros = ops.fill(rows, 0.0)
        return ops.set_rows(rows, ops.cont(ops.transpose(slots)), zeros, name=f"ffn_moe_kept-{il}")
