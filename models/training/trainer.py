"""Trainer: a step of fine-tuning as one prepared graph, forward, backward and the optimizer's step in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.arguments import check_fields, checked
from graphrt.errors import SessionError
from graphrt.execute import Executable, prepare
from graphrt.models.engine import Engine, SessionOptions
from graphrt.models.model import Model
from graphrt.models.placement import for_weights
from graphrt.models.step import StepInputs
from graphrt.models.training.lora import Adapter, LoraOptions, adapted, new_adapter, save, state
from graphrt.ops.gradients import gradients
from graphrt.ops.opt_step import adamw_moments
from graphrt.ops.recompute import training_graph
from graphrt.tensor import Tensor, new_input

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AdamW:
    """lr: the learning rate unless a step has its own; beta1, beta2: of the running means; eps; weight_decay."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, SessionError)

    def numbers(self, step: int, lr: float | None) -> npt.NDArray[np.float32]:
        """What OPT_STEP_ADAMW reads in step 1, 2, ...: f32 [5]."""
        means = 1 / (1 - self.beta1**step), 1 / (1 - self.beta2**step)
        return np.array([self.lr if lr is None else lr, self.eps, self.weight_decay, *means], np.float32)


class Trainer:
    """Trains adapters of a decoder on texts of n_tokens tokens each, n_seq of them a step.

    The loss is the mean cross entropy of each token's logits with the next token. The model's weights stay as they are.
    optimizer: its numbers; recompute: the bytes that results of forward and backward may take, as gradients() has it;
    type_kv: keys and values are rounded to it, as in a cache. adapters: what is trained; exe: the prepared step.
    Raises SessionError for numbers that can't be and a model without linear layers, and GraphError as gradients() does.
    """

    @checked(SessionError)
    def __init__(
        self,
        model: Model,
        n_tokens: int,
        *,
        lora: LoraOptions = LoraOptions(),
        optimizer: AdamW = AdamW(),
        n_seq: int = 1,
        recompute: int | None = None,
        type_kv: str = "f16",
    ) -> None:
        if n_tokens < 2:
            raise SessionError(f"a text must have two tokens or more, one to read and one to foretell, got {n_tokens}")
        self.model, self.lora, self.optimizer, self.n_seq, self.n_tokens = model, lora, optimizer, n_seq, n_tokens
        self.steps = 0
        n = n_tokens * n_seq
        options = SessionOptions(n_ctx=n_tokens, n_batch=n, type_k=type_kv, type_v=type_kv)
        engine = model.engine(n_seq, options)
        assert isinstance(engine, Engine)
        self._inputs = model.decoder.inputs(n_tokens, n, engine.cache)
        home = for_weights(model.backends)
        made = adapted(
            model.decoder.result(self._inputs),
            lambda weight: new_adapter(weight, lora, home),
            lora.targets,
            lora.alpha / lora.rank,
        )
        self.adapters: list[Adapter] = made.adapters
        self._labels, self._counts = new_input("i64", n, name="labels"), new_input("f32", n, name="counts")
        self.loss = ops.cross_entropy_loss(made.result, _one_hot(made.result, self._labels, self._counts), name="loss")
        self._hyper = new_input("f32", 5, name="hyper")
        trained = [leaf for adapter in self.adapters for leaf in (adapter.a, adapter.b)]
        self.gradients = gradients(self.loss, trained, recompute=recompute)
        self.graph = training_graph(self.loss, self.gradients)
        self._add_steps(trained)
        self.exe: Executable = prepare(self.graph, model.backends)
        self._place()

    def _add_steps(self, trained: Sequence[Tensor]) -> None:
        """The optimizer's, after all gradients, which are made of the weights that it overwrites."""
        home, by = for_weights(self.model.backends), self.optimizer
        for leaf, grad in zip(trained, self.gradients):
            m, v = (state(leaf.ne, f"{leaf.name[:50]}.{name}", home) for name in ("m", "v"))
            moments = adamw_moments(grad, m, v, by.beta1, by.beta2)
            self.graph.expand(ops.cpy(ops.opt_step_adamw(leaf, *moments, self._hyper), leaf))

    def _place(self) -> None:
        """Writes what is the same in all steps: where tokens stand, and that all logits are wanted."""
        n = self.n_tokens * self.n_seq
        positions = np.tile(np.arange(self.n_tokens), (self.n_seq, 1))
        inputs = self._inputs
        assert isinstance(inputs, StepInputs)
        asked = set(self.graph.inputs)
        values = {leaf: np.asarray(given).reshape(-1) for leaf, given in inputs.places(positions)}
        values[inputs.rows] = np.arange(n, dtype=np.int32)
        self.exe.write_all({leaf: given for leaf, given in values.items() if leaf in asked})

    @checked(SessionError)
    def step(
        self,
        tokens: Sequence[int] | Ids,
        *,
        lr: float | None = None,
        weights: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> float:
        """One step on n_seq texts of n_tokens tokens, one after the other: the loss before it.

        lr: the learning rate, the optimizer's unless given; weights: how much each token counts that is to be foretold,
        one for each of `tokens`; the first of a text is never. 0 leaves a token out: the prompt before an answer.
        Raises SessionError for another number of tokens and unknown ones, and for weights that are no numbers from 0 on
        or all 0.
        """
        self.write(tokens, lr=lr, weights=weights)
        self.steps += 1
        self.exe.run()
        return float(np.asarray(self.exe.read(self.loss)).reshape(()))

    def write(
        self,
        tokens: Sequence[int] | Ids,
        *,
        lr: float | None = None,
        weights: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Writes the inputs of the next step, as step() takes them, and runs nothing."""
        ids, shape = np.asarray(tokens, np.int32).reshape(-1), (self.n_seq, self.n_tokens)
        n_vocab = self.model.decoder.hp.n_vocab
        if ids.size != shape[0] * shape[1] or ids.min() < 0 or ids.max() >= n_vocab:
            raise SessionError(
                f"a step takes {shape[0] * shape[1]} tokens from 0 to {n_vocab - 1}, got {ids.size} from "
                f"{ids.min(initial=0)} to {ids.max(initial=0)}"
            )
        counts = np.ones(shape, np.float32) if weights is None else np.asarray(weights, np.float32).reshape(-1)
        if counts.size != ids.size or not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise SessionError(f"there must be a weight from 0 on for each of {ids.size} tokens, got {counts.size}")
        counts = np.roll(counts.reshape(shape), -1, 1)
        counts[:, -1] = 0.0  # nothing is known to come after a text's last token
        if not counts.any():
            raise SessionError("some token after a text's first must count, got weights that are all 0")
        wanted = np.roll(ids.reshape(shape), -1, 1).astype(np.int64)
        places = np.arange(ids.size, dtype=np.int64) * n_vocab + wanted.reshape(-1)
        counts *= ids.size / counts.sum()
        self.exe.write_all({
            self._inputs.tokens: ids, self._labels: places, self._counts: counts.reshape(-1),
            self._hyper: self.optimizer.numbers(self.steps + 1, lr),
        })  # fmt: skip

    @checked(SessionError)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the adapters as a GGUF file, which llama.cpp's --lora reads. Raises GGUFError where it can't."""
        save(Path(path), self.adapters, self.model.decoder.hp.arch, self.lora.alpha)


def _one_hot(logits: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """Labels in the logits' shape, [n_vocab, n]: 0 but for counts, f32 [n], at places, i64 [n], counted from the first
    element. Made anew in each run, on the device."""
    n = logits.ne[1]
    zeros = ops.reshape(ops.fill(logits, 0.0), 1, logits.n_elements)
    return ops.reshape(ops.set_rows(ops.reshape(counts, 1, n), places, zeros), *logits.ne)
