"""Whether a model's sizes are within the limits, and the context that a model gets where nobody asks for one."""

from __future__ import annotations

from graphrt.errors import ArchError
from graphrt.models.hparam_limits import (
    MAX_BESIDE,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_TIMES,
    MAX_USED,
    MAX_USED_IN_ALL,
)
from graphrt.models.hparams import HParams

DEFAULT_CTX = 4096

#: Bytes that the cache of a context nobody asked for may take at least, in a model whose weights are fewer.
MIN_CACHE = 64 << 20


def check_sizes(hp: HParams) -> None:
    """Raises ArchError for a size that no model has."""
    most = MAX_TIMES * hp.n_embd + MAX_BESIDE
    head, heads, used = max(hp.d_k, hp.d_v), max(*hp.n_head, *hp.n_head_kv), 0
    rows = {"a feed-forward": max(hp.n_ff), "all heads of a layer": head * heads}
    if hp.latent is not None:
        rows["a query's row"] = hp.latent.n_q
        rows["all heads of a layer"] = max(head, hp.latent.d_k, hp.latent.d_v) * heads
    if hp.experts is not None:
        used = hp.experts.used
        rows["a token's experts"] = max(used * hp.experts.n_ff, hp.experts.n_shared * hp.experts.n_ff)
    sizes = {
        "layers": (hp.n_layer, MAX_LAYERS),
        "heads in a layer": (heads, MAX_HEADS),
        "elements in a head": (head, MAX_HEAD_SIZE),
        "experts for a token": (used, MAX_USED),
        "experts for a token in all layers": (used * hp.n_layer, MAX_USED_IN_ALL),
    }
    sizes |= {f"elements in {row}, with an embedding of {hp.n_embd},": (n, most) for row, n in rows.items()}
    for what, (n, limit) in sizes.items():
        if n > limit:
            raise ArchError(f"{what} may be at most {limit} in a model, the file says {n}; it is damaged")


def default_ctx(hp: HParams) -> int:
    """The context where nobody asks for one: the model's own, at most DEFAULT_CTX, and fewer tokens where their cache
    would take more than MIN_CACHE and more than all weights would in f16, which no published model's does."""
    cell = 2 * sum(hp.n_head_kv) * (hp.d_k + (0 if hp.latent else hp.d_v))
    room = max(MIN_CACHE, 2 * _n_weights(hp))
    return max(1, min(hp.n_ctx_train, DEFAULT_CTX, room // cell))


def _n_weights(hp: HParams) -> int:
    """How many weights the matrices of such a model have, nearly: attention, one feed-forward a layer, the tokens."""
    layers = zip(hp.n_head, hp.n_head_kv, hp.n_ff)
    return hp.n_embd * (hp.n_vocab + sum((heads + kv) * (hp.d_k + hp.d_v) + 2 * n_ff for heads, kv, n_ff in layers))
