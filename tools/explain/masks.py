"""The masks that a step's attentions would see: of a model from the positions, of a saved case from its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.session import Session
from graphrt.tools.inspect.subject import Subject
from graphrt.tools.profile.masks import made_mask
from graphrt.work import attended

Array = npt.NDArray[Any]


def masks_of(subject: Subject, depth: int | None) -> dict[str, npt.NDArray[np.float16]]:
    """By name, f16 [m3, m2, n_q, n_kv], of masks that are known: those of a model's step, or of a case's values.

    depth: tokens that a model's cache holds before the step, None for default_depth()'s. Raises SessionError for one
    that does not fit, or that a graph has no use for.
    """
    values = _values(subject, depth)
    found: dict[str, npt.NDArray[np.float16]] = {}
    for mask in {attended(node)[0] for node in subject.executable.graph.nodes} - {None}:
        assert mask is not None
        if mask.is_leaf and mask.name in values:
            found[mask.name] = np.asarray(values[mask.name], np.float16).reshape(mask.shape)
        elif mask.op == "KQ_MASK" and all(s.root.name in values for s in mask.sources()):
            given = [np.asarray(values[s.root.name]).reshape(s.shape) for s in mask.sources()]
            found[mask.name] = made_mask(mask, given).astype(np.float16)
    return found


def default_depth(subject: Subject) -> int:
    """A decode step ends a full context, a prefill begins an empty one."""
    if subject.session is None or subject.phase != "decode":
        return 0
    return subject.session.n_ctx - subject.n_tokens


def _values(subject: Subject, depth: int | None) -> dict[str, Array]:
    """Values of inputs by name, as far as they are known."""
    if subject.session is None:
        if depth is not None:
            raise SessionError(f"a depth is of a model's cache, {subject.title[:200]!r} is a graph; leave -d out")
        return {t.name: v for t, v in subject.inputs.values.items()} if subject.inputs is not None else {}
    return _after(subject.session, subject.n_tokens, default_depth(subject) if depth is None else depth)


def _after(session: Session, n: int, depth: int) -> dict[str, Array]:
    """What a step of n tokens after `depth` others is given. The session's cache stays as it is."""
    if depth + n > session.n_ctx:
        raise SessionError(
            f"the context holds {session.n_ctx} tokens, got {n} after {depth} (-d); raise it with -c or lower -d"
        )
    cache, saved = session.cache, session.cache.saved()
    cache.clear()
    for cells in cache.cells.values():
        if depth:
            cells.take(np.arange(max(0, depth - cells.size), depth)[None])
    places = session.prepared(n, 1).inputs.places(np.arange(depth, depth + n)[None])
    values = {leaf.name: value.reshape(-1).copy() for leaf, value in places}
    cache.restore(saved)
    return values
