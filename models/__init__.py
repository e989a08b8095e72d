"""GGUF models: load one, generate text with it, take its logits.

    model = graphrt.models.load("model.gguf")
    for piece in model.generate("Once upon a time", n=64):
        print(piece.text, end="")
    model.logits([1, 2, 3])                                   # float32 [n_tokens, n_vocab]
"""

from graphrt.models.model import Model, Piece, load
from graphrt.models.sampling import SamplerParams

__all__ = ["Model", "Piece", "SamplerParams", "load"]
