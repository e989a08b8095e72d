"""Engines over pages whose memory holds NaN, as a device's may."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphrt.models.engine_paged import PagedEngine


def poisoned(engine: PagedEngine) -> PagedEngine:
    """The engine, every byte of its pages 0xFF: what a step reads without having written it is NaN."""
    for layer in engine.cache.layers:
        for leaf in layer.leafs:
            assert leaf.buffer is not None
            leaf.buffer.write(0, np.full(leaf.nbytes, 0xFF, np.uint8))
    return engine
