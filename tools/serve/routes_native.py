"""/completion and /infill, llama-server's own routes to texts after prompts and between texts, in its form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from graphrt.models.generation import Piece
from graphrt.tools.serve import answers
from graphrt.tools.serve.answered import answered
from graphrt.tools.serve.errors import ApiError
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.http import body_of, encoded
from graphrt.tools.serve.inbox import Inbox
from graphrt.tools.serve.schemas_native import InfillRequest, NativeGenerating, NativeRequest
from graphrt.tools.serve.spelling import Spelling
from graphrt.tools.serve.state import State, events, key_of
from graphrt.tools.serve.texts import Maker, fields_of

Asked = TypeVar("Asked", NativeRequest, InfillRequest)

#: Piece.finish -> stop_type.
_STOPPED = {"eog": "eos", "stop": "word", "length": "limit", "context": "limit"}


class NativeRoutes:
    """The routes."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def completion(self, request: Request) -> Response:
        return await self._made(request, NativeRequest, Maker.native)

    async def infill(self, request: Request) -> Response:
        return await self._made(request, InfillRequest, Maker.infill)

    async def _made(
        self, request: Request, form: type[Asked], make: Callable[[Maker, Asked, str], list[Text]]
    ) -> Response:
        limits, maker = self.state.limits, self.state.generator()
        body = await body_of(request, form, limits.max_body, limits.body_seconds)
        self.state.check_model(body.model)
        key = key_of(request)
        texts = await self.state.aside(lambda: make(maker, body, key))
        answer = Answer(self.state, body, texts)

        async def whole(inbox: Inbox) -> list[dict[str, Any]] | dict[str, Any]:
            found = await answer.whole(inbox)
            return found if body.is_list else found[0]

        return await answered(self.state, request, texts, whole, answer.stream if body.stream else None)


class Answer:
    """Texts after prompts, one for each. What says no number of tokens goes on to the context's end; with a number of
    0 a prompt is read, and nothing told."""

    def __init__(self, state: State, body: NativeGenerating, texts: Sequence[Text]) -> None:
        self.state, self.body, self.texts = state, body, texts
        self._shown, self._finish, self._word = [""] * len(texts), [""] * len(texts), [""] * len(texts)
        self._made: list[list[int]] = [[] for _ in texts]

    def _read(self, i: int, piece: Piece) -> None:
        self._shown[i] += piece.text
        self._finish[i], self._word[i] = piece.finish, piece.word
        self._made[i].append(piece.token)

    async def whole(self, inbox: Inbox) -> list[dict[str, Any]]:
        """All of them."""
        pieces: list[list[Piece]] = [[] for _ in self.texts]
        async for i, event in events(self.texts, inbox):
            assert event.piece is not None
            pieces[i].append(event.piece)
            self._read(i, event.piece)
        return [self._chosen(self._ended(i, made)) for i, made in enumerate(pieces)]

    async def stream(self, inbox: Inbox) -> AsyncIterator[str]:
        """Piece by piece."""
        try:
            async for i, event in events(self.texts, inbox):
                piece = event.piece
                assert piece is not None
                self._read(i, piece)
                if self.body.asked != 0:
                    yield encoded(self._going(i, piece))
                if piece.finish:
                    yield encoded(self._chosen(self._ended(i, [])))
        except ApiError as error:
            yield encoded(error.body())

    def _going(self, i: int, piece: Piece) -> dict[str, Any]:
        """A token, and what became complete with it."""
        text = self.texts[i]
        found = {
            "index": i, "content": piece.text, "tokens": [piece.token], "stop": False, "id_slot": text.seq,
            "tokens_predicted": len(self._made[i]), "tokens_evaluated": len(text.prompt),
        }  # fmt: skip
        return found | self._probabilities([piece])

    def _ended(self, i: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole of a text. pieces: what it is made of, none where they were told before."""
        text, tokenizer, silent = self.texts[i], self.state.model.tokenizer, self.body.asked == 0
        made, finish = self._made[i], self._finish[i]
        return {
            "index": i,
            "content": "" if silent or not pieces else self._shown[i],
            "tokens": [piece.token for piece in pieces] if self.body.return_tokens and not silent else [],
            "id_slot": text.seq,
            "stop": True,
            "model": self.state.name,
            "tokens_predicted": 0 if silent else len(made),
            "tokens_evaluated": len(text.prompt),
            "generation_settings": self._settings(text),
            "prompt": b"".join(map(tokenizer.piece, text.prompt)).decode("utf-8", "replace"),
            "has_new_line": "\n" in self._shown[i],
            "truncated": finish == "context",
            "stop_type": _STOPPED[finish],
            "stopping_word": self._word[i],
            "tokens_cached": len(text.prompt) + len(made),
            "timings": answers.timings([text]),
        } | (self._probabilities(pieces) if pieces and not silent else {})

    def _probabilities(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Those of tokens, where they were asked for."""
        spelling = Spelling(self.state.model.tokenizer)
        after = bool(self.body.post_sampling_probs)
        told = [answers.native_logprobs(piece, spelling, after=after) for piece in pieces if piece.logprobs]
        return {"completion_probabilities": told} if told else {}

    def _settings(self, text: Text) -> dict[str, Any]:
        """How a text was made, by the names of a request's fields."""
        found = fields_of(text.sampler.params) | {"seed": text.sampler.seed % (1 << 32)}
        more = {
            "n_predict": text.most,
            "max_tokens": text.most,
            "stop": self.body.stops,
            "stream": bool(self.body.stream),
        }
        return found | more | {"n_probs": self.body.n_probs or 0, "ignore_eos": bool(self.body.ignore_eos)}

    def _chosen(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Of an answer what response_fields name, by "a/b" for b of a; all where they name nothing."""
        chosen: dict[str, Any] = {}
        for field in self.body.response_fields or ():
            value: Any = found
            for name in field.split("/"):
                value = value.get(name) if isinstance(value, Mapping) else None
            if value is not None:
                chosen[field] = value
        return chosen or dict(found)
