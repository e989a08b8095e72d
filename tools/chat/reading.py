"""What reads a conversation's tokens and chooses those behind them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from graphrt.models.choices import choices
from graphrt.models.generation import Pieces, TextRules
from graphrt.models.model import Model
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.session import Session
from graphrt.tools.chat.interrupts import Interrupts


class Reader:
    """A session of a model, and what ends an answer early. On one rank; rank_reader.py has several."""

    def __init__(self, model: Model, session: Session, interrupts: Interrupts | None = None) -> None:
        self.model, self.session = model, session
        self.interrupts = interrupts or Interrupts()

    def begin(self, params: SamplerParams, rules: TextRules) -> Pieces:
        """A new text: what makes pieces of its tokens. Raises SessionError for what can't be."""
        self.sampler, pieces = self.model.new_text(params, rules)
        return pieces

    def behind(self, tokens: Sequence[int], most: int) -> tuple[int, Generator[int, None, None]]:
        """How many of these tokens the session does not hold, and what reads them and gives those that the model puts
        behind: at most so many, -1 for no limit but the context, until Ctrl-C."""
        session = self.session
        unread = session.keep_prefix(tokens)
        n_read = len(tokens) - (session.n_past - len(session.unread))
        return n_read, self._chosen(unread, most)

    def _chosen(self, unread: list[int], most: int) -> Generator[int, None, None]:
        choose = lambda *given: self.model.next_token(*given)  # noqa: E731 (a test puts another one in its place)
        steps = choices(self.session, unread, most, self.sampler, choose)
        with closing(steps), closing(self.interrupts.between(steps)) as watched:
            yield from watched
