"""vLLM's truncate_prompt_tokens: of a long prompt its end is read, or with truncation_side "right" its beginning."""

from __future__ import annotations

from typing import NamedTuple

from graphrt.tools.serve.errors import ApiError

#: Contexts that a text may fill which is to be cut: it is made into tokens whole.
CONTEXTS = 16


class Cut(NamedTuple):
    """limit: the most tokens that a text may have before; most: those that are kept, None for all; at_end: the
    prompt's last ones are, not its first ones."""

    limit: int
    most: int | None = None
    at_end: bool = True

    def of(self, ids: list[int]) -> list[int]:
        """What is kept of a prompt."""
        if self.most is None or len(ids) <= self.most:
            return ids
        return ids[-self.most :] if self.at_end else ids[: self.most]


def cut_of(asked: int | None, side: str | None, limit: int, made: int = 0) -> Cut:
    """asked: tokens that are kept, -1 for as many as there is room for, None for all; limit: tokens of a context;
    made: that are to come behind the prompt. Raises ApiError for more than a context has, and for 0."""
    if asked is None:
        return Cut(limit)
    if asked == 0 or asked > limit:
        raise ApiError(f"truncate_prompt_tokens must be 1 to {limit}, the context's tokens, or -1 for as many as there "
                       f"is room for, got {asked}", param="truncate_prompt_tokens")  # fmt: skip
    return Cut(limit * CONTEXTS, asked if asked > 0 else max(1, limit - max(0, made)), side != "right")
