"""GGUF models: load one, generate text with it, take its logits.

model = graphrt.models.load("model.gguf")
for piece in model.generate("Once upon a time", n=64):
    print(piece.text, end="")
model.logits([1, 2, 3])                                   # float32 [n_tokens, n_vocab]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.models.generation import Piece
    from graphrt.models.model import Model, load
    from graphrt.models.sampling_params import SamplerParams

__all__ = ["Model", "Piece", "SamplerParams", "load"]

_WHERE = {"Model": "model", "Piece": "generation", "load": "model", "SamplerParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    """The public names on first use: reading a file's keys needs no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
