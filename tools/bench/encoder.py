"""What `graphrt bench MODEL` measures of an encoder: texts of any lengths embedded together, packed one after the
other, beside the dense form, where every token of a run is held against all others under a mask."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt import ops
from graphrt.errors import SessionError
from graphrt.execute import Executable, prepare
from graphrt.models.arch.encoder import Encoder, Texts
from graphrt.models.embed import HOST_BATCH, Embedder
from graphrt.models.hparams import HParams
from graphrt.models.model import Model
from graphrt.tensor import Tensor, new_input
from graphrt.tools.bench.model import seconds
from graphrt.tools.bench.workload import Batch

#: Texts of token ids by the name of their test.
Tests = dict[str, list[list[int]]]
#: A text of which the embedding is held against the reference's.
CHECKED = 64


@dataclass(frozen=True)
class DenseTexts(Texts):
    """mask: f16 [n_tokens, n_tokens], 0 where the token of a row sees that of a column, else -inf."""

    mask: Tensor

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, name: str) -> Tensor:
        return ops.flash_attn_ext(q, k, v, self.mask, scale, name=name)


class DenseEmbedder(Embedder):
    """An encoder's texts under a mask."""

    def executable(self, n_tokens: int, n_texts: int, pooling: str) -> Executable:
        def make() -> Executable:
            inputs = Texts.of(n_tokens, n_texts)
            mask = new_input("f16", n_tokens, n_tokens, name="attn_inp_kq_mask")
            texts = DenseTexts(inputs.tokens, inputs.positions, inputs.starts, mask)
            return prepare(self.encoder.graph_of(texts, n_texts, pooling), self.backends)

        return self._prepared.made((n_tokens, n_texts, pooling), make)

    def values(
        self, texts: Sequence[Sequence[int]], starts: npt.NDArray[np.int32], n_tokens: int, n_texts: int, pooling: str
    ) -> dict[str, npt.NDArray[np.generic]]:
        values = super().values(texts, starts, n_tokens, n_texts, pooling)
        owner = np.repeat(np.arange(len(texts)), np.diff(starts))
        sees = owner[:, None] == owner
        if self.encoder.hp.causal:
            sees &= np.tri(len(owner), dtype=bool)
        mask = np.full((n_tokens, n_tokens), -np.inf, np.float16)
        mask[: len(owner), : len(owner)][sees] = 0
        values["attn_inp_kq_mask"] = mask
        return values


def texts_of(batches: Sequence[Batch], n_prompt: Sequence[int], hp: HParams) -> Tests:
    """The tests of an encoder by name: texts of a batch's lengths or, where it has none, of each of n_prompt tokens.
    Raises SessionError for one that is too long for the model."""
    rng, found = np.random.default_rng(0), Tests()
    for batch in batches:
        for n in [0] if batch.lengths else n_prompt:
            lengths = batch.lengths or (n,) * batch.n
            if max(lengths) > hp.n_ctx_train or min(lengths) < 1:
                raise SessionError(
                    f"a text must have 1 to {hp.n_ctx_train} tokens, the model's own limit, got {max(lengths)}; give "
                    f"others by --batch or -p"
                )
            name = f"embed{n or ''}{batch}"
            found[name] = [rng.integers(0, hp.n_vocab, length).tolist() for length in lengths]
    return found


def check(embedder: Embedder, reference: Encoder) -> float:
    """The NMSE of two texts' embeddings against those of the same encoder on the CPU, infinity where they are no
    numbers."""
    from graphrt.backend import get_backend
    from graphrt.testing import nmse

    hp, rng = reference.hp, np.random.default_rng(1)
    n = min(CHECKED, hp.n_ctx_train)
    texts = [rng.integers(0, hp.n_vocab, length).tolist() for length in (n, n // 2 + 1)]
    ours = np.stack(embedder.embed(texts, _pooling(hp)))
    theirs = np.stack(Embedder(reference, [get_backend("cpu")]).embed(texts, _pooling(hp)))
    return nmse(ours, theirs) if np.isfinite(ours).all() else float("inf")


def rows(model: Model, embedder: Embedder, tests: Tests, repetitions: int) -> list[dict[str, Any]]:
    """A row for each test: tokens/s packed, and dense in turn with it, in runs of as many tokens as it had when it was
    the only form."""
    encoder = embedder.encoder
    dense = DenseEmbedder(encoder, embedder.backends, HOST_BATCH)
    found = []
    for name, texts in tests.items():
        n = sum(map(len, texts))
        forms: dict[str, list[float]] = {"packed": [], "dense": []}
        for repetition in range(repetitions + 1):
            for form, runs in (("packed", embedder), ("dense", dense)):
                took = seconds(lambda runs=runs, texts=texts: runs.embed(texts, _pooling(encoder.hp)))  # type: ignore[misc]
                if repetition:  # the first one prepares, compiles and captures
                    forms[form].append(n / took)
        packed, masked = forms["packed"], statistics.median(forms["dense"])
        rate = statistics.median(packed)
        found.append(
            {
                "test": name, "kind": "embed", "n": n, "texts": len(texts), "tokens_per_s": rate,
                "deviation": statistics.stdev(packed) if len(packed) > 1 else 0.0, "n_batch": embedder.n_batch,
                "texts_per_s": rate * len(texts) / n, "gflop_per_s": rate * _flops(model, texts) / 1e9,
                "dense": {"tokens_per_s": masked, "n_batch": dense.n_batch}, "dense_ratio": rate / masked,
            }
        )  # fmt: skip
    return found


def _flops(model: Model, texts: Sequence[Sequence[int]]) -> float:
    """Of a token: the layers' matrices, and the attention to all tokens of its text."""
    hp = model.network.hp
    layers = (t for t in model.weights.loaded.values() if t.name.startswith("blk.") and t.n_dims >= 2)
    products = 2 * sum(t.n_elements for t in layers)
    seen = sum(len(ids) ** 2 for ids in texts) / sum(map(len, texts))
    return products + sum(2 * n * (hp.d_k + hp.d_v) * seen for n in hp.n_head)


def _pooling(hp: HParams) -> str:
    return hp.pooling or "mean"
