"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from graphrt.models.generation import Piece
from graphrt.tools.serve import answers
from graphrt.tools.serve.answered import answered
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.events import Event, Text
from graphrt.tools.serve.http import HERE, Chunks, body_of, encoded, together
from graphrt.tools.serve.inbox import Inbox
from graphrt.tools.serve.said import Marks, Reader, Said
from graphrt.tools.serve.schemas import ChatRequest, CompletionRequest, Generating, StreamOptions, listed
from graphrt.tools.serve.state import State, events, key_of
from graphrt.tools.serve.texts import said_before, tools_of
from graphrt.tools.serve.token_fields import TokenFields

Asked = TypeVar("Asked", ChatRequest, CompletionRequest)


class TextRoutes:
    """Routes that generate text."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def chat(self, request: Request) -> Response:
        body, maker, key = await self._body(request, ChatRequest), self.state.generator(), key_of(request)
        texts, marks = await self.state.aside(lambda: maker.chat(body, key))
        return await self._answer(request, body, texts, Chat(self.state, body, texts, marks))

    async def completions(self, request: Request) -> Response:
        body, maker, key = await self._body(request, CompletionRequest), self.state.generator(), key_of(request)
        texts = await self.state.aside(lambda: maker.completion(body, key))
        return await self._answer(request, body, texts, Completion(self.state, body, texts))

    async def _body(self, request: Request, form: type[Asked]) -> Asked:
        """What a request asks for. Raises ApiError for what can't be done, or not by this model."""
        limits = self.state.limits
        body = await body_of(request, form, limits.max_body, limits.body_seconds)
        _check(body)
        self.state.check_model(body.model)
        return body

    async def _answer(
        self, request: Request, body: Generating, texts: Sequence[Text], answer: Chat | Completion
    ) -> Response:
        stream = partial(answer.stream, usage=Usage.of(body.stream_options)) if body.stream else None
        return await answered(self.state, request, texts, answer.whole, stream, last="[DONE]")


class Usage(Enum):
    """What a stream tells of it: nothing, all at its end, or with each piece what there is so far too."""

    NONE, LAST, EACH = range(3)

    @classmethod
    def of(cls, options: StreamOptions | None) -> Usage:
        if options is None or not options.include_usage:
            return cls.NONE
        return cls.EACH if options.continuous_usage_stats else cls.LAST


def _check(body: Generating) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options is for streams: set stream to true, or leave it out", param="stream_options")


def reader_of(body: ChatRequest, marks: Marks) -> Reader:
    """What reads a text of an answer. marks: of what it thinks."""
    tools, name = tools_of(body)
    return Reader(marks, tools, one_call=body.parallel_tool_calls is False, must_call=name is not None)


class Chat:
    """An answer to a conversation."""

    def __init__(self, state: State, body: ChatRequest, texts: Sequence[Text], marks: Marks) -> None:
        self.state, self.texts, self._timed = state, texts, bool(body.timings_per_token)
        self._readers = [reader_of(body, marks) for _ in texts]
        self._head = answers.head("chat.completion", "chatcmpl", state.name, state.fingerprint)
        self._tokens = TokenFields(body, state.model.tokenizer)
        self._echo = said_before(body.messages[-1]) if body.echo else ""
        #: Of a stream's first delta. A text that must be a call has none.
        self._begun = None if tools_of(body)[1] is not None else self._echo

    async def whole(self, inbox: Inbox) -> dict[str, Any]:
        """All of it."""
        pieces: list[list[Piece]] = [[] for _ in self.texts]
        async for i, event in events(self.texts, inbox):
            assert event.piece is not None
            pieces[i].append(event.piece)
        choices = [self._choice(i, made) for i, made in enumerate(pieces)]
        return self._head | {"choices": choices} | self._counts() | self._tokens.of_prompt(self.texts[0])

    def _counts(self) -> dict[str, Any]:
        usage = answers.usage(self.texts, sum(reader.n_reasoning for reader in self._readers))
        return {"usage": usage} | ({"timings": answers.timings(self.texts)} if self._timed else {})

    def _choice(self, i: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        reader, finish = self._readers[i], pieces[-1].finish
        said = [*(reader.push(piece.text) for piece in pieces), reader.end(cut=finish in answers.CUT)]
        reasoning, content = ("".join(parts) for parts in zip(*((each.reasoning, each.content) for each in said)))
        content = self._echo + content
        message: dict[str, Any] = {
            "role": "assistant", "content": content, "refusal": None, **_thought(reasoning or None),
        }  # fmt: skip
        if reader.calls:
            message |= {"content": content or None, "tool_calls": [call.told for call in reader.calls]}
        return {
            "index": i,
            "message": message,
            "logprobs": answers.chat_logprobs(pieces, self._tokens.spelling),
            "finish_reason": "tool_calls" if reader.calls_end_it else answers.FINISH[finish],
            **answers.ended_by(pieces[-1]),
            **self._tokens.of_text(pieces),
        }

    async def stream(self, inbox: Inbox, usage: Usage) -> AsyncIterator[str]:
        """Piece by piece."""
        head = self._head | {"object": "chat.completion.chunk"} | ({"usage": None} if usage is Usage.LAST else {})
        made = [0] * len(self.texts)
        chunk = Chunks(head, (lambda: answers.usage_so_far(self.texts, made)) if usage is Usage.EACH else None)
        for i in range(len(self.texts)):
            told = self._tokens.first_of(self.texts[i]) if i == 0 else {}
            yield chunk(_delta(i, {"role": "assistant", "content": self._begun}), **told)
        plain = [
            (chunk.form(_delta(i, {"content": HERE})), chunk.form(_delta(i, _thought(HERE))))
            for i in range(len(self.texts))
        ]
        places = {text: i for i, text in enumerate(self.texts)}

        def usual(event: Event) -> str | None:
            piece = event.piece
            if piece is None or piece.finish or piece.logprobs is not None or usage is Usage.EACH or self._tokens.by_id:
                return None
            i = places[event.text]
            said = self._readers[i].push(piece.text)
            if said.calls or (said.reasoning and said.content):
                return together(chunk(_delta(i, delta)) for delta in _deltas(said))
            return plain[i][bool(said.reasoning)](said.reasoning or said.content) if any(said) else ""

        inbox.form = usual
        try:
            async for i, event in events(self.texts, inbox):
                assert event.piece is not None
                made[i] += 1
                value = usual(event)
                if value is not None:
                    if value:
                        yield value
                    continue
                for choice in self._pieces(i, event.piece):
                    yield chunk(choice)
        except ApiError as error:
            yield encoded(error.body())
            return
        if usage is not Usage.NONE:
            yield encoded(head | {"choices": []} | self._counts())

    def _pieces(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        reader = self._readers[i]
        said = reader.push(piece.text)
        if piece.finish:
            said += reader.end(cut=piece.finish in answers.CUT)
        told, deltas = answers.chat_logprobs([piece], self._tokens.spelling), _deltas(said)
        ids = self._tokens.ids([piece])
        if (told or (ids and not piece.finish)) and not deltas:
            deltas = [{"content": ""}]
        found = [_delta(i, delta, told if n == 0 else None) for n, delta in enumerate(deltas)]
        if piece.finish:
            ended = "tool_calls" if reader.calls_end_it else answers.FINISH[piece.finish]
            # clients of models that think read this of every delta that has no content
            found.append(_delta(i, _thought(None), None, ended) | answers.ended_by(piece))
        found[0:1] = [each | ids for each in found[0:1]]
        return found


def _thought(text: str | None) -> dict[str, Any]:
    """By DeepSeek's name, which llama-server has, and by that of OpenRouter, Ollama and newer vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def _deltas(said: Said) -> list[dict[str, Any]]:
    """What is new, as streams have it: of a call first its name, then its arguments."""
    text: dict[str, Any] = _thought(said.reasoning) if said.reasoning else {}
    text |= {"content": said.content} if said.content else {}
    found: list[dict[str, Any]] = [text] if text else []
    for part in said.calls:
        if part.name:
            named = {"name": part.name, "arguments": ""}
            found.append({"tool_calls": [{"index": part.number, "id": part.id, "type": "function", "function": named}]})
        if part.arguments:
            found.append({"tool_calls": [{"index": part.number, "function": {"arguments": part.arguments}}]})
    return found


def _delta(i: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


class Completion:
    """What comes after prompts, one text after the other."""

    def __init__(self, state: State, body: CompletionRequest, texts: Sequence[Text]) -> None:
        self.state, self.texts, self._timed = state, texts, bool(body.timings_per_token)
        self._n_told, self._n_made = body.n or 1, body.n_texts
        self._echo = [""] * len(texts)
        if body.echo:
            said = [p if isinstance(p, str) else state.model.tokenizer.decode(p) for p in listed(body.prompt)]
            self._echo = [said[i // self._n_made] for i in range(len(texts))]
        self._tells_logprobs = body.logprobs is not None
        self._scored = bool(body.echo) and self._tells_logprobs
        self._silent = body.asked == 0
        self._head = answers.head("text_completion", "cmpl", state.name, state.fingerprint)
        self._tokens, self._best_told = TokenFields(body, state.model.tokenizer), body.logprobs or 0

    async def whole(self, inbox: Inbox) -> dict[str, Any]:
        """All of it."""
        pieces: list[list[Piece]] = [[] for _ in self.texts]
        async for i, event in events(self.texts, inbox):
            assert event.piece is not None
            pieces[i].append(event.piece)
        choices = [self._whole(i, pieces[i]) | {"index": place} for place, i in enumerate(self._best(pieces))]
        return self._head | {"choices": choices} | self._counts()

    def _whole(self, i: int, made: list[Piece]) -> dict[str, Any]:
        text = self._echo[i] + self._shown(made)
        found = self._choice(i, text, self._told(made), made[-1].finish, prompt=self._scored)
        first = self.texts[i].leader or self.texts[i]
        return (
            found | answers.ended_by(made[-1]) | self._tokens.of_text(self._told(made)) | self._tokens.of_prompt(first)
        )

    def _best(self, pieces: Sequence[Sequence[Piece]]) -> list[int]:
        """Of each prompt's texts those that are told, by their places: of more than are told the likeliest first."""
        found: list[int] = []
        for first in range(0, len(pieces), self._n_made):
            places = list(range(first, first + self._n_made))
            if self._n_made > self._n_told:
                places.sort(key=lambda i: -answers.mean_logprob(pieces[i]))
            found += places[: self._n_told]
        return found

    def _told(self, pieces: list[Piece]) -> list[Piece]:
        return [] if self._silent else pieces

    def _shown(self, pieces: list[Piece]) -> str:
        return "".join(piece.text for piece in self._told(pieces))

    def _counts(self) -> dict[str, Any]:
        usage = answers.usage(self.texts)
        if self._silent:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {"usage": usage} | ({"timings": answers.timings(self.texts)} if self._timed else {})

    def _choice(
        self, i: int, text: str, pieces: Sequence[Piece], finish: str, offset: int = 0, *, prompt: bool = False
    ) -> dict[str, Any]:
        """prompt: its log-probabilities come first."""
        said = (self.texts[i].leader or self.texts[i]) if prompt else None
        if said is not None:
            offset = len(self._echo[i]) - answers.length(said.prompt, self._tokens.spelling)
        shown = pieces if self._tells_logprobs else ()
        logprobs = answers.completion_logprobs(shown, self._tokens.spelling, offset, said, self._best_told)
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": answers.FINISH.get(finish)}

    async def stream(self, inbox: Inbox, usage: Usage) -> AsyncIterator[str]:
        """Piece by piece."""
        head = self._head | ({"usage": None} if usage is Usage.LAST else {})
        offsets, made = [len(text) for text in self._echo], [0] * len(self.texts)
        chunk = Chunks(head, (lambda: answers.usage_so_far(self.texts, made)) if usage is Usage.EACH else None)
        for i, text in enumerate(self._echo):
            if text and not self._scored:
                yield chunk(self._choice(i, text, [], ""))
        begun = set[int]()
        plain = [chunk.form(self._choice(i, HERE, [], "")) for i in range(len(self.texts))]
        places = {text: i for i, text in enumerate(self.texts)}

        def usual(event: Event) -> str | None:
            piece, i = event.piece, places[event.text]
            if piece is None or piece.finish or piece.logprobs is not None or self._silent:
                return None
            if usage is Usage.EACH or self._tokens.by_id or (self._scored and i not in begun):
                return None
            return plain[i](piece.text) if piece.text else ""

        inbox.form = usual
        try:
            async for i, event in events(self.texts, inbox):
                piece = event.piece
                assert piece is not None
                made[i] += not self._silent
                if self._scored and i not in begun:
                    begun.add(i)
                    yield chunk(self._choice(i, self._echo[i], [], "", prompt=True))
                value = usual(event)
                if value is not None:
                    if value:
                        yield value
                    continue
                shown = self._told([piece])
                choice = self._choice(i, self._shown(shown), shown, piece.finish, offsets[i])
                told, ids = choice["logprobs"], self._tokens.ids(shown)
                offsets[i] += len(self._tokens.spelling.text(piece.token)) if told else 0
                if ids and made[i] == 1:
                    ids |= self._tokens.first_of(self.texts[i])
                if piece.text or piece.finish or told or ids:
                    yield chunk(choice | ids | (answers.ended_by(piece) if piece.finish else {}))
        except ApiError as error:
            yield encoded(error.body())
            return
        if usage is not Usage.NONE:
            yield encoded(head | {"choices": []} | self._counts())
