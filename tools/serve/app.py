"""The application: which route serves what, who may ask, and what every answer goes through."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from graphrt.errors import GraphrtError
from graphrt.tools.serve.errors import LEFT, ApiError, of_runtime
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.http import EventStream
from graphrt.tools.serve.ids import new_id
from graphrt.tools.serve.logs import ASKED, RequestLine
from graphrt.tools.serve.openapi import Endpoint, Served, description
from graphrt.tools.serve.origins import Origins
from graphrt.tools.serve.routes_count import CountRoutes
from graphrt.tools.serve.routes_invocations import InvocationsRoute
from graphrt.tools.serve.routes_messages import MessagesRoute
from graphrt.tools.serve.routes_native import NativeRoutes
from graphrt.tools.serve.routes_other import OtherRoutes
from graphrt.tools.serve.routes_rank import RankRoutes
from graphrt.tools.serve.routes_responses import ResponsesRoute
from graphrt.tools.serve.routes_text import TextRoutes
from graphrt.tools.serve.schemas import (
    AdapterScales,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    Invocation,
    TemplateRequest,
    TokenizeRequest,
)
from graphrt.tools.serve.schemas_messages import CountRequest, MessagesRequest
from graphrt.tools.serve.schemas_native import InfillRequest, NativeRequest
from graphrt.tools.serve.schemas_rank import RerankRequest, ScoreRequest
from graphrt.tools.serve.schemas_responses import ResponsesRequest
from graphrt.tools.serve.state import State, json_response

log = logging.getLogger("graphrt.serve")

_PAGE = Path(__file__).with_name("page.html")
#: The page talks to this server alone, and runs nothing but what is in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
#: What is served without /v1 too, as llama-server has it, for clients that were given an address without it.
_SHORT = {
    f"/v1/{name}": f"/{name}"
    for name in (
        *("chat/completions", "responses", "embeddings", "models", "models/{name:path}"),
        *("rerank", "reranking", "score", "chat/completions/input_tokens"),
    )
} | {"/completion": "/completions"}
#: What anybody may ask for.
PUBLIC = {"/", "/health", "/v1/health", "/ping"}


def application(
    state: State,
    api_keys: Sequence[str] = (),
    on_ready: Callable[[], None] = lambda: None,
    origins: Sequence[str] = (),
) -> Starlette:
    """The server as an ASGI application. api_keys: one of these must come with every request but those for health;
    none: nobody is asked; on_ready: called when requests are answered; origins: the other sites whose pages may ask."""
    served = routes_of(state)
    told = description(served)

    async def openapi(request: Request) -> Response:
        return json_response(told)

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE.read_bytes(), headers={"content-security-policy": _POLICY})

    served.append(Served("GET", "/openapi.json", openapi, "this description"))
    served.append(Served("GET", "/", page, "a page to chat with the model"))
    door = _Door(state, api_keys, Origins(origins))
    routes = [
        Route(path, door.guarded(each), methods=door.methods(each.method))
        for each in served
        for path in (each.path, _SHORT.get(each.path))
        if path is not None
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.worker.start(asyncio.get_running_loop())
        on_ready()
        try:
            yield
        finally:
            state.worker.stop()
            state.threads.shutdown(cancel_futures=True)

    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})


def routes_of(state: State) -> list[Served]:
    """What there is, but for its description."""
    text, other, responses, native = TextRoutes(state), OtherRoutes(state), ResponsesRoute(state), NativeRoutes(state)
    rank, count = RankRoutes(state), CountRoutes(state)
    invocations = InvocationsRoute(
        state,
        {"messages": text.chat, "prompt": text.completions, "input": other.embeddings, "query": rank.rerank}
        | dict.fromkeys(("text_1", "queries", "data_1"), rank.score),
    )
    anthropic, refused = MessagesRoute(state), ApiError.anthropic_response
    return [
        Served("POST", "/v1/chat/completions", text.chat, "an answer to a conversation", ChatRequest),
        Served("POST", "/v1/completions", text.completions, "texts after prompts", CompletionRequest),
        Served("POST", "/completion", native.completion, "the same in llama-server's own form", NativeRequest),
        Served("POST", "/infill", native.infill, "a text between two others, in that form", InfillRequest),
        Served("POST", "/v1/responses", responses.responses, "an answer, in the newer form", ResponsesRequest),
        Served("POST", "/v1/messages", anthropic.messages, "an answer in Anthropic's form", MessagesRequest, refused),
        Served("POST", "/v1/messages/count_tokens", count.messages, "how many its prompt has", CountRequest, refused),
        Served("POST", "/v1/responses/input_tokens", count.responses, "how many a prompt has", ResponsesRequest),
        Served("POST", "/v1/chat/completions/input_tokens", count.chat, "how many a prompt has", ChatRequest),
        Served("POST", "/v1/embeddings", other.embeddings, "vectors of texts", EmbeddingsRequest),
        Served("POST", "/v1/rerank", rank.rerank, "texts by how well they answer a query", RerankRequest),
        Served("POST", "/v1/reranking", rank.rerank, "the same, by llama-server's name", RerankRequest),
        Served("POST", "/v2/rerank", rank.rerank, "the same, by Cohere's name", RerankRequest),
        Served("POST", "/v1/score", rank.score, "how well texts go with others", ScoreRequest),
        Served("POST", "/invocations", invocations.invoked, "one of these, by what fields a request has", Invocation),
        Served("GET", "/v1/models", other.models, "the model's names"),
        Served("GET", "/v1/models/{name:path}", other.model, "what is known of it"),
        Served("POST", "/tokenize", other.tokenize, "the tokens of a text", TokenizeRequest),
        Served("POST", "/detokenize", other.detokenize, "the text of tokens", DetokenizeRequest),
        Served("POST", "/apply-template", other.apply_template, "a conversation as a prompt", TemplateRequest),
        Served("GET", "/lora-adapters", other.adapters, "the adapters, and their usual scales"),
        Served("POST", "/lora-adapters", other.set_adapters, "other usual scales", AdapterScales),
        Served("GET", "/health", other.health, "whether it works"),
        Served("GET", "/v1/health", other.health, "whether it works"),
        Served("GET", "/ping", other.health, "whether it works, by the name that some clouds ask for"),
        Served("GET", "/version", other.version, "the server's version"),
        Served("GET", "/metrics", other.metrics, "figures in Prometheus' form"),
        Served("GET", "/props", other.props, "settings"),
        Served("GET", "/slots", other.slots, "the texts that are made"),
    ]


#: What other servers' APIs have at these paths, and below them, is not here -> what to do instead.
_ELSEWHERE = {
    ("classify", "pooling"): "no model here sorts texts; /v1/embeddings gives vectors to compare, /rerank ranks texts",
    ("api",): "Ollama's own API is not here; give its client's OpenAI form the address of /v1",
    ("messages",): "of Anthropic's API there are /v1/messages and /v1/messages/count_tokens",
    ("audio", "images", "realtime"): "models read and write text alone",
    ("files", "batches", "assistants", "threads", "vector_stores", "conversations", "responses"): "nothing is stored "
    "here; send what a text needs with its request",
}


def _instead(path: str) -> str:
    """What to do in place of asking for a path that there is not."""
    first, *more = path.strip("/").split("/")
    name = more[0] if first in ("v1", "v2") and more else first
    return next((said for names, said in _ELSEWHERE.items() if name in names), "see docs/serving.md for what there is")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {
        404: f"there is no {request.url.path[:80]!r} here; {_instead(request.url.path)}",
        405: f"{request.url.path[:80]!r} is not for {request.method}",
    }
    message = said.get(error.status_code, error.detail)
    return ApiError(message, status=error.status_code, headers=error.headers).response()


class _Door:
    """Checks who asks, turns errors into answers, counts and logs."""

    def __init__(self, state: State, api_keys: Sequence[str], origins: Origins) -> None:
        self.state, self._origins = state, origins
        self._keys = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in api_keys]

    def methods(self, method: str) -> list[str]:
        """What a route is asked with: browsers ask before they ask for another site's page."""
        return [method, "OPTIONS"] if self._origins else [method]

    def guarded(self, served: Served) -> Endpoint:
        """Its endpoint behind the door. Requests are counted by its path."""
        path, endpoint = served.path, served.endpoint

        async def entered(request: Request) -> Response:
            origin, number, asked = None, new_id("req_", 8), list[Text]()
            ASKED.set(asked)
            line = RequestLine(request.method, path, number, asked)
            try:
                origin = self._origins.of(request)
                response = await self._answer(request, path, endpoint)
            except ClientDisconnect:
                response = Response(status_code=LEFT)
            except ApiError as error:
                response = served.refused(error)
            except GraphrtError as error:
                response = served.refused(of_runtime(error))
            except Exception:
                log.exception("%s %s failed", request.method, path)
                response = served.refused(ApiError("the server failed; its log says how", status=500))
            self._origins.let(origin, response)
            response.headers["x-request-id"] = number
            self.state.metrics.http.labels(path, response.status_code).inc()
            if isinstance(response, EventStream):
                response.on_end = partial(line.write, response.status_code)
            elif path not in PUBLIC:
                line.write(response.status_code)
            return response

        return entered

    async def _answer(self, request: Request, path: str, endpoint: Endpoint) -> Response:
        """Raises ApiError for who may not ask."""
        if request.method == "OPTIONS":  # which browsers send without a key
            return self._origins.asked_before(request)
        if path not in PUBLIC:
            request.state.key = self._key(request)
        return await endpoint(request)

    def _key(self, request: Request) -> int | None:
        """Which API key a request has, None where none is asked for. All keys are looked at, each in the same time,
        whatever the first difference. Raises ApiError for none and for an unknown one."""
        if not self._keys:
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        same = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(same):
            raise ApiError(
                'a request must have one of the server\'s API keys, as "Authorization: Bearer KEY"',
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return same.index(True)
