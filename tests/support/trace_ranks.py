"""What ranks do in tests/tools/test_ranked_tools.py: they trace, and the second one is off at one of its sums."""

from __future__ import annotations

import argparse

import torch

from graphrt.ranks import Ranks
from graphrt.tools.verbs.trace import traced


def off(args: argparse.Namespace, given: str) -> int:
    """given: the prompt, and behind its last word which sum of each step is off, 0 for none."""
    torch.set_num_threads(1)
    prompt, _, at = given.rpartition(" ")
    summed, calls = Ranks.summed, [0]

    def wrong(ranks: Ranks, part: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        found = summed(ranks, part)
        if (calls[0] - 1) % 4 == int(at) - 1:
            found = found.clone()
            found.view(-1)[3] += 0.25
        return found

    if args.as_ranks.rank == 1:
        Ranks.summed = wrong  # type: ignore[method-assign]
    return traced(args, prompt)
