"""`graphrt memory --limit`: the longest context that fits, for one or several types of cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphrt.errors import SessionError

if TYPE_CHECKING:
    from graphrt.models.engine import SessionOptions
    from graphrt.models.longest import ContextNeeds
    from graphrt.models.session import Session

#: What the figures hold, said wherever they are shown.
COUNTED = (
    "counted: all weights, mapped ones too; the cache; the arenas of a prefill of a whole batch and of a decode step, "
    "which a session keeps. Not counted: kernels and their scratch, a prompt's shorter last batch, other backends"
)


@dataclass(frozen=True)
class Fit:
    """types: of the cache, "k/v" where they differ; needs: of the longest context, None where none fits; reason: why
    the model can't have these types, else ""; most: the model's own limit."""

    types: str
    needs: ContextNeeds | None
    most: int
    reason: str = ""


def fits(session: Session, limit: int, tried: Sequence[SessionOptions]) -> list[Fit]:
    """The longest context of at most `limit` bytes for each of some options. Of several, those that the model can't
    have carry the reason; of one it is raised, as SessionError."""
    from graphrt.models.longest import longest_context

    found = []
    for options in tried:
        types = options.type_k if options.type_k == options.type_v else f"{options.type_k}/{options.type_v}"
        most = session.decoder.hp.n_ctx_train
        try:
            needs = longest_context(session.decoder, session.backends, options, limit)
        except SessionError as error:
            if len(tried) == 1:
                raise
            found.append(Fit(types, None, most, str(error)))
        else:
            found.append(Fit(types, needs, most))
    return found
