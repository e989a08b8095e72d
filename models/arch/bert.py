"""bert: BERT and what is made like it (bge, MiniLM, e5, ...): learned positions, a feed-forward without a gate."""

from __future__ import annotations

from graphrt.models.arch.encoder import Encoder


class Bert(Encoder):
    """The skeleton as it is."""
