"""KQ_MASK."""

from __future__ import annotations

import torch

from graphrt.backends.cpu.reference import reference
from graphrt.tensor import Tensor

#: Tokens at a time, so that what is compared stays in the cache.
_ROWS = 16


@reference("KQ_MASK", stored=("cells", "pos"))
def kq_mask(node: Tensor, cells: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Its sources as they are: no temporary is as large as the result."""
    out = torch.empty(node.shape, dtype=torch.float16)
    seen, hidden = (torch.tensor(x, dtype=torch.float16) for x in (0.0, -torch.inf))
    for rows, held, at in zip(out[:, 0], cells[0, 0], pos[0, 0]):
        first = first_seen(at, node.params.window)
        for start in range(0, len(at), _ROWS):
            part = slice(start, start + _ROWS)
            sees = (held >= first[part, None]).logical_and_(held <= at[part, None])
            near = (held - at[part, None]).half() if node.params.alibi else seen
            torch.where(sees, near, hidden, out=rows[part])
    return out


def first_seen(at: torch.Tensor, window: int) -> torch.Tensor:
    """The first position that tokens at `at`, i32, see. No less than 0, so that an empty cell, -1, lies before it."""
    first = at.long() - window + 1 if window else torch.zeros_like(at)
    return first.clamp(min=0).int()
