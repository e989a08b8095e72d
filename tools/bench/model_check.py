"""Whether a model's logits are right, before its speed is told: a prompt's and single steps' against the CPU's.

Of a mixture of experts half of the prompt's rows and half of the steps must be right: see median_nmse().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphrt.dtypes import CACHES

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.models.engine import SessionOptions
    from graphrt.models.model import Model
    from graphrt.tools.bench.model import Source

#: A backend whose logits are to be within this NMSE of the reference's is compared with caches in f32.
LIMIT = 1e-6
#: Bytes of weights over which the whole model is too slow for the reference.
WHOLE = 2_000_000_000
LAYERS = 2
#: Rows of the prompt that are compared, and the most tokens that it has.
ROWS, MOST = 4, 512


@dataclass(frozen=True)
class Checked:
    """error: NMSE, infinity where logits are no numbers; what: was compared, as a report says it."""

    error: float
    limit: float
    what: str

    @property
    def right(self) -> bool:
        return self.error < self.limit


def check(source: Source, model: Model, backends: Sequence[Backend], options: SessionOptions, exact: bool) -> Checked:
    """Compares the logits of `model`, which is `source` on `backends`, with the CPU's.

    Of a large synthetic model the same recipe with two layers is compared, of a large file fewer tokens. The caches are
    f32 where the limit is a rounding of f32, else those that are measured. exact: what `backends` were made with.
    """
    from graphrt.backend import get_backend
    from graphrt.tools.bench.machine import on_gpu

    backend = backends[0]
    on_cpu = backend.name == "cpu"
    if on_cpu and exact:
        return Checked(0.0, LIMIT, "the reference itself")
    limit = backend.logits_nmse
    if limit <= LIMIT:
        options = replace(options, type_k="f32", type_v="f32")
    limit += sum(CACHES[kind.lower()].logits_nmse or 0.0 for kind in (options.type_k, options.type_v))
    large = source.nbytes > WHOLE
    layers = LAYERS if large and source.synthetic else None
    # A GPU's kernels for long prompts are others than those for short ones: a whole batch shows them.
    n_prompt, n_steps = (max(40, min(options.n_batch, MOST)) if on_gpu(backend) else 40), 3
    if large and layers is None:
        n_prompt, n_steps = 8, 1
    n_prompt = min(n_prompt, model.decoder.hp.n_ctx_train - n_steps)
    options = replace(options, n_ctx=n_prompt + n_steps)
    # The reference decodes all weights to f32. The CPU's fast form, which tests hold against it, reads blocks.
    reference = get_backend("cpu", exact=on_cpu or not large or layers is not None)
    ours = _logits(source.load(backends, layers) if layers else model, options, n_prompt, n_steps)
    ranks = model.ranks
    theirs = np.zeros_like(ours)
    if ranks is None or ranks.rank == 0:  # one of several ranks has the whole model beside its part
        theirs = _logits(source.load([reference], layers, whole=True), options, n_prompt, n_steps)
    what = (
        f"{min(ROWS, n_prompt)} rows of a prompt of {n_prompt} tokens and {n_steps} single step{'s'[: n_steps - 1]}, "
        f"{options.type_k} keys and {options.type_v} values"
        + (f", of the same recipe with {layers} layers" if layers else "")
    )
    if model.decoder.hp.experts is None:
        error = _nmse(ours, theirs)
    else:
        error, what = median_nmse(ours, theirs, n_steps), f"the medians of {what}"
    return Checked(error if ranks is None else ranks.told(error), limit, what)


def finite(model: Model, options: SessionOptions) -> bool:
    """Whether a whole model gives numbers, and not all the same."""
    logits = model.session(replace(options, n_ctx=8)).eval(range(8))
    return bool(np.isfinite(logits).all() and logits.std() > 0)


def _logits(model: Model, options: SessionOptions, n_prompt: int, n_steps: int) -> np.ndarray:
    ids = np.random.default_rng(1).integers(0, model.decoder.hp.n_vocab, n_prompt + n_steps).tolist()
    session = model.session(options)
    rows = session.eval_rows(ids[:n_prompt], max(n_prompt - ROWS, 0))
    return np.concatenate([rows, *(session.eval([i])[None].copy() for i in ids[n_prompt:])])


def median_nmse(ours: np.ndarray, theirs: np.ndarray, n_steps: int) -> float:
    """The middle one of the errors of a prompt's rows, or of the n_steps rows behind them: the larger of both.

    Where a token's experts are nearly equal, a rounding gives it others: its row is then off by about 0.1, and the rows
    beside it are not.
    """
    errors = [_nmse(a, b) for a, b in zip(ours, theirs)]
    return float(max(np.median(errors[:-n_steps]), np.median(errors[-n_steps:])))


def _nmse(ours: np.ndarray, theirs: np.ndarray) -> float:
    from graphrt.testing import nmse

    return nmse(ours, theirs) if np.isfinite(theirs).all() else float("inf")
