"""Attentions of models by name: their heads, from the recipes of made-up files."""

from __future__ import annotations

from graphrt.errors import GraphError
from graphrt.models.synthetic_recipes import RECIPES


def heads_of(name: str) -> tuple[int, int, int, int]:
    """(n_head, n_head_kv, D_k, D_v) of a model's attention over its cache; of latent attention v lies in k.

    Raises GraphError for a name that is no recipe's.
    """
    if name not in RECIPES:
        raise GraphError(f"a model's name must be one of {', '.join(RECIPES)}, got {name[:40]!r}")
    keys = RECIPES[name].keys

    def number(key: str, otherwise: int) -> int:
        return int(keys.get(f"attention.{key}", otherwise))

    n_head = number("head_count", 1)
    head = int(keys["embedding_length"]) // n_head
    d_k = number("key_length", head)
    # A latent row is k; v is its beginning, as long as the compressed part.
    d_v = number("kv_lora_rank", 0) or number("value_length", head)
    return n_head, number("head_count_kv", n_head), d_k, d_v
