"""State: what the routes of a server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from graphrt import __version__
from graphrt.models.model import Model
from graphrt.models.rerank import Ranker
from graphrt.tools.serve.errors import ApiError, of_runtime
from graphrt.tools.serve.events import Event, Text
from graphrt.tools.serve.inbox import Inbox
from graphrt.tools.serve.logs import ASKED
from graphrt.tools.serve.metrics import Metrics
from graphrt.tools.serve.texts import Maker
from graphrt.tools.serve.worker import Busy, Worker

T = TypeVar("T")
#: Vectors of texts, given as token ids.
Embed: TypeAlias = Callable[[Sequence[Sequence[int]]], list[Any]]


class Embedder(NamedTuple):
    """A model that gives vectors. ranker: what ranks texts by it, None where it has no head for that."""

    model: Model
    embed: Embed
    ranker: Ranker | None = None


@dataclass(frozen=True)
class Limits:
    """max_body: bytes of a request's body; body_seconds: in which it has to come, as a
    request's head has, and in which a client has to take something of its answer; max_waiting: texts that may wait for
    their turn; most_of_key: texts of one key, or address, that may wait or be made, 0 for any number."""

    max_body: int = 16 << 20
    body_seconds: float = 30.0
    max_waiting: int = 1024
    most_of_key: int = 0


@dataclass
class State:
    """A server's model under its names, the first of which answers say. maker: None where the model generates no
    text; any_name: requests may call it what they like; embed, own_ranker: what gives vectors of it, and ranks texts by
    it; embedders: other models that give vectors, by their names, the first of which does where a request names
    none."""

    model: Model
    names: Sequence[str]
    worker: Worker
    maker: Maker | None
    metrics: Metrics
    limits: Limits
    embed: Embed
    facts: dict[str, Any] = field(default_factory=dict)
    embedders: Mapping[str, Embedder] = field(default_factory=dict)
    any_name: bool = False
    own_ranker: Ranker | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "graphrt-serve-prepare"))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def fingerprint(self) -> str:
        """The build that answers; clients of llama-server look for a b at its beginning."""
        return f"build-graphrt-{__version__}"

    @property
    def all_names(self) -> list[str]:
        """What requests may name: the model, the model with an adapter, and models for vectors."""
        adapters = self.maker.adapters if self.maker is not None else None
        return [*self.names, *(adapters.as_models if adapters is not None else ()), *self.embedders]

    @property
    def listed(self) -> list[str]:
        """The same, each model by its first name alone, and each adapter by its own."""
        adapters = self.maker.adapters if self.maker is not None else None
        firsts = {id(each.model): name for name, each in reversed(list(self.embedders.items()))}
        return [self.name, *(adapters.listed if adapters is not None else ()), *firsts.values()]

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that isn't here, or that generates no text."""
        if name in self.embedders:
            raise ApiError(f"{name!r} gives vectors, for /v1/embeddings; ask {self.name!r} for text", param="model")
        self._check_known(name)

    def embedder(self, name: str | None) -> Embedder:
        """What gives vectors to a request that names this model. Raises ApiError for one that isn't here."""
        self._check_known(name)
        if name is None and self.embedders:
            return next(iter(self.embedders.values()))
        return self.embedders.get(name or "", Embedder(self.model, self.embed, self.own_ranker))

    def ranker(self, name: str | None) -> Embedder:
        """What ranks texts for a request that names this model: of several where it names none the first with a head
        for it, else the first that gives vectors. Raises ApiError for one that isn't here."""
        if name is None and self.own_ranker is not None:
            return Embedder(self.model, self.embed, self.own_ranker)
        return self.embedder(name)

    def _check_known(self, name: str | None) -> None:
        if name is not None and name not in self.all_names and not self.any_name:
            raise ApiError(
                f"the model must be {_listed(self.all_names)}, which this server has, got {name[:80]!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def generator(self) -> Maker:
        """Raises ApiError where the model generates no text."""
        if self.maker is None:
            arch = self.model.network.hp.arch
            raise ApiError(f"{arch} models are encoders and generate no text; use /v1/embeddings", param="model")
        return self.maker

    async def aside(self, work: Callable[[], T]) -> T:
        """Runs what takes a while beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def submit(self, texts: Sequence[Text]) -> Inbox:
        """Raises ApiError where too many wait, or whoever asks has too many."""
        self._check_key(texts)
        try:
            inbox = self.worker.submit(texts)
        except Busy:
            raise ApiError(
                f"{self.limits.max_waiting} texts may wait for their turn, and so many do; try again later",
                status=429,
                code="queue_full",
                headers={"retry-after": "1"},
            ) from None
        ASKED.get([]).extend(texts)
        return inbox

    def _check_key(self, texts: Sequence[Text]) -> None:
        most = self.limits.most_of_key
        if not most:
            return
        if len(texts) > most:
            said = (
                f"a request may ask for {most} texts here (--max-per-key), this one asks for {len(texts)}; send several"
            )
            raise ApiError(said, param="n")
        if self.worker.n_of_key(texts[0].key) + len(texts) > most:
            raise ApiError(
                f"one key may have {most} texts at a time, and this one has so many; try again when one has ended",
                status=429,
                code="key_limit",
                headers={"retry-after": "1"},
            )


def _listed(names: Sequence[str]) -> str:
    more = f" or {len(names) - 6} more" if len(names) > 6 else ""
    return " or ".join(map(repr, names[:6])) + more


async def events(texts: Sequence[Text], inbox: Inbox) -> AsyncIterator[tuple[int, Event]]:
    """(number of a text, what has become of it) until all have ended. Raises ApiError where one fails."""
    places = {text: i for i, text in enumerate(texts)}
    left = len(texts)
    while left:
        event = await inbox.get()
        if event.error is not None:
            raise of_runtime(event.error)
        left -= bool(event.piece and event.piece.finish)
        yield places[event.text], event


def key_of(request: Request) -> str:
    """Whose request it is, for a fair order: its API key's place, or where no key is asked for its address."""
    found = getattr(request.state, "key", None)
    return str(found) if found is not None else request.client.host if request.client else ""


def json_response(value: Any) -> JSONResponse:
    return JSONResponse(value)
