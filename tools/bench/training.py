"""What `graphrt bench MODEL --train` measures: one step that trains adapters of all linear layers, prepared and run as
one graph, beside the same step in plain torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrt.models.training.lora import Adapter, LoraOptions, values_of
from graphrt.models.training.trainer import AdamW, Trainer
from graphrt.tools.bench.machine import on_gpu
from graphrt.tools.bench.model import WARM_UP_STEPS, Source, seconds
from graphrt.tools.bench.model_check import WHOLE, Checked
from graphrt.tools.memory.lifetimes import arenas_of
from graphrt.tools.memory.report import arena_report, kept_by_backend

if TYPE_CHECKING:
    from graphrt.models.model import Model
    from graphrt.tools.bench.torch_lora import PlainLlama

#: Of the model whose gradients are held against the reference's: layers, and tokens of its text.
LAYERS, TOKENS = 2, 320
#: The same of a file that is too large for the reference to read many.
FEW_TOKENS = 16


def scattered(adapters: Sequence[Adapter]) -> None:
    """Gives adapters' b, which begin at 0, random values that depend on their names alone, so that every gradient is
    one of numbers."""
    for adapter in adapters:
        rng = np.random.default_rng(len(adapter.weight.name) + adapter.weight.ne[1])
        values = rng.normal(0.0, 0.05 / math.sqrt(adapter.b.ne[0]), adapter.b.n_elements).astype(np.float32)
        assert adapter.b.buffer is not None
        adapter.b.buffer.write(adapter.b.offset, values.view(np.uint8))


def check(source: Source, model: Model, lora: LoraOptions) -> Checked:
    """Holds the loss and all gradients of a short step against the CPU's reference; of a synthetic model those of the
    same recipe with two layers. The error is the gradients' NMSE, infinite where the loss is off by more than its
    root."""
    from graphrt.backend import get_backend

    layers, hp = LAYERS if source.synthetic else None, model.decoder.hp
    n = min(FEW_TOKENS if layers is None and source.nbytes > WHOLE else TOKENS, hp.n_ctx_train)
    ids = np.random.default_rng(2).integers(0, hp.n_vocab, n).astype(np.int32)
    found = []
    for backends in (list(model.backends), [get_backend("cpu")]):
        same = layers is None and backends == model.backends
        trainer = Trainer(model if same else source.load(backends, layers), n, lora=lora)
        scattered(trainer.adapters)
        loss = trainer.step(ids, lr=0.0)
        grads = [np.asarray(trainer.exe.read(g), np.float64).reshape(-1) for g in trainer.gradients]
        found.append((loss, np.concatenate(grads)))
    (loss, ours), (expected, theirs) = found
    error = float(((ours - theirs) ** 2).sum() / (theirs**2).sum())
    limit = model.backends[0].logits_nmse
    if not (np.isfinite(theirs).all() and abs(loss - expected) <= math.sqrt(limit) * abs(expected)):
        error = math.inf
    what = f"all gradients of a step of {n} tokens" + (f", of the same recipe with {layers} layers" if layers else "")
    return Checked(error, limit, what)


def memory_of(model: Model, trainer: Trainer) -> dict[str, int]:
    """Bytes of the weights, of those kept in f16 beside them, of what is trained with the optimizer's state, and of the
    arenas of a step."""
    arenas = [arena_report(arena) for arena in arenas_of(trainer.exe)]
    trained = sum(3 * leaf.nbytes for x in trainer.adapters for leaf in (x.a, x.b))
    return {
        "weights": model.weights.nbytes, "trained": trained, "arenas": sum(x.arena.nbytes for x in arenas),
        "kept": sum(kept_by_backend(trainer.exe).values()), "without_reuse": sum(x.alone for x in arenas),
    }  # fmt: skip


def rows(
    model: Model, lora: LoraOptions, lengths: Sequence[int], repetitions: int, recompute: int | None
) -> list[dict[str, Any]]:
    """A row for each length of text: our step and plain torch's, in turn."""
    return [_row(model, lora, n, repetitions, recompute) for n in lengths]


def _row(model: Model, lora: LoraOptions, n: int, repetitions: int, recompute: int | None) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, model.decoder.hp.n_vocab, n).astype(np.int32)
    trainer = Trainer(model, n, lora=lora, optimizer=AdamW(lr=1e-5), recompute=recompute)
    row: dict[str, Any] = {
        "test": f"lora:{lora.rank} pp{n}", "kind": "train", "n": n, "splits": len(trainer.exe.splits),
        "steps": sum(len(split.groups) for split in trainer.exe.splits), "memory": memory_of(model, trainer),
    }  # fmt: skip
    peer = _peer(model, trainer)
    losses = [trainer.step(ids) for _ in range(WARM_UP_STEPS)]
    theirs: list[float] = []
    if peer is not None:
        row["peer_loss"] = [peer.step(ids) for _ in range(WARM_UP_STEPS)]
    row["loss"] = losses
    ours = []
    for _ in range(repetitions):  # in turn, so that both meet the same machine
        ours.append(n / seconds(lambda: trainer.step(ids)))
        if peer is not None:
            theirs.append(n / seconds(lambda: peer.step(ids)))
    row |= {"tokens_per_s": statistics.median(ours), "deviation": statistics.stdev(ours) if repetitions > 1 else 0.0}
    row["ms"] = 1e3 * n / row["tokens_per_s"]
    if theirs:
        row["peer"] = {"tokens_per_s": statistics.median(theirs), "what": peer.what if peer is not None else ""}
        row["ratio"] = row["tokens_per_s"] / row["peer"]["tokens_per_s"]
    row["gflop_per_s"] = row["tokens_per_s"] * flops(model, n) / 1e9
    return row


def _peer(model: Model, trainer: Trainer) -> PlainLlama | None:
    """Plain torch's step from the same weights and adapters, None where there is none: it is a llama on a GPU."""
    from graphrt.tools.bench.torch_lora import PlainLlama, why_not

    if not on_gpu(model.backends[0]) or why_not(model) is not None:
        return None
    given = {x.weight.name: (values_of(x.a), values_of(x.b)) for x in trainer.adapters}
    return PlainLlama(model, given, trainer.lora, trainer.optimizer)


def flops(model: Model, n: int) -> float:
    """Of a token of a text of n: each matrix is multiplied with forward and backward, adapters' too little to count;
    attention, causal, takes 3.5 times its forward's work in both."""
    decoder, hp = model.decoder, model.decoder.hp
    weights = [t for t in model.weights.loaded.values() if t.n_dims >= 2 and t is not decoder.token_embd]
    weights += [decoder.output] if decoder.output is decoder.token_embd else []
    products = 4 * sum(t.n_elements * decoder.share_of_token(t) for t in weights)
    seen = (n + 1) / 2
    return products + 3.5 * sum(2 * heads * (hp.d_k + hp.d_v) * seen for heads in hp.n_head)
