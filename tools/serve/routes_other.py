"""Routes that generate no text: embeddings, tokens, templates, and what a server tells of itself."""

from __future__ import annotations

import base64
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from graphrt import __version__
from graphrt.errors import SessionError
from graphrt.models.model import Model
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.serve.batches import batches
from graphrt.tools.serve.errors import ApiError, of_runtime
from graphrt.tools.serve.http import body_of
from graphrt.tools.serve.schemas import (
    AdapterScales,
    DetokenizeRequest,
    EmbeddingsRequest,
    TemplateRequest,
    TokenizeRequest,
    listed,
)
from graphrt.tools.serve.spelling import Spelling
from graphrt.tools.serve.state import State, json_response
from graphrt.tools.serve.texts import MOST_COUNTED, fields_of
from graphrt.tools.serve.truncation import cut_of


class OtherRoutes:
    """Routes that generate no text."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        limits = self.state.limits
        return await body_of(request, kind, limits.max_body, limits.body_seconds)

    async def embeddings(self, request: Request) -> Response:
        state, body = self.state, await self._body(request, EmbeddingsRequest)
        found = state.embedder(body.model)
        model, embed = found.model, found.embed
        n_embd = model.network.hp.n_embd
        if body.dimensions not in (None, n_embd):
            raise ApiError(f"dimensions must be {n_embd}, the model's own, got {body.dimensions}", param="dimensions")
        cut = cut_of(body.truncate_prompt_tokens, body.truncation_side, self._most(model))
        several = listed(body.input)

        def tokens(one: str | list[int]) -> list[int]:
            return cut.of(model.prompt_tokens(one, n_ctx=cut.limit) if isinstance(one, str) else one)

        try:
            ids = await state.aside(lambda: [tokens(one) for one in several])
            rows = [row for part in batches(ids) for row in await state.worker.do(partial(embed, part))]
        except SessionError as error:
            raise of_runtime(error, "input") from error
        packed = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": i, "embedding": _packed(row) if packed else row.tolist()}
            for i, row in enumerate(rows)
        ]
        n = sum(map(len, ids))
        usage = {"prompt_tokens": n, "total_tokens": n}
        name = next((name for name, each in state.embedders.items() if each.model is model), state.name)
        return json_response({"object": "list", "data": data, "model": name, "usage": usage})

    async def tokenize(self, request: Request) -> Response:
        body, tokenizer = await self._body(request, TokenizeRequest), self.state.model.tokenizer
        if body.content is None:
            return await self._counted(body)
        add_bos, content = None if body.add_special else False, body.content
        ids = await self.state.aside(lambda: tokenizer.encode(content, add_bos, body.parse_special))
        if not body.with_pieces:
            return json_response({"tokens": ids})
        return json_response({"tokens": [{"id": i, "piece": _piece(tokenizer.piece(i))} for i in ids]})

    async def _counted(self, body: TokenizeRequest) -> Response:
        """A prompt's tokens in vLLM's form. What begins a text is added unless add_special_tokens says otherwise, for
        messages where their template writes none."""
        state, tokenizer = self.state, self.state.model.tokenizer

        def ids() -> list[int]:
            text = body.prompt
            if body.messages is None:
                return tokenizer.encode(text or "", None if body.add_special_tokens is not False else False, True)
            text = state.generator().rendered(
                body.messages, body.tools or (), body.chat_template_kwargs,
                answers=body.add_generation_prompt and not body.continue_final_message,
                goes_on=body.continue_final_message,
            )  # fmt: skip
            if body.add_special_tokens is None:
                return state.model.rendered_tokens(text, MOST_COUNTED)
            return tokenizer.encode(text, None if body.add_special_tokens else False, True)

        found = await state.aside(ids)
        names = [Spelling(tokenizer).text(token) for token in found] if body.return_token_strs else None
        most = self._most(state.model)
        return json_response({"count": len(found), "max_model_len": most, "tokens": found, "token_strs": names})

    async def detokenize(self, request: Request) -> Response:
        body, tokenizer = await self._body(request, DetokenizeRequest), self.state.model.tokenizer
        bad = next((i for i in body.tokens if i >= tokenizer.n_vocab), None)
        if bad is not None:
            raise ApiError(f"a token id must be 0 to {tokenizer.n_vocab - 1}, got {bad}", param="tokens")
        text = tokenizer.decode(body.tokens, special=True)
        return json_response({"content": text, "prompt": text})  # llama-server's name, and vLLM's

    async def apply_template(self, request: Request) -> Response:
        body, maker = await self._body(request, TemplateRequest), self.state.generator()
        prompt = await self.state.aside(
            lambda: maker.rendered(
                body.messages, body.tools or (), body.chat_template_kwargs, answers=body.add_generation_prompt
            )
        )
        return json_response({"prompt": prompt})

    # ---- about the server ----

    async def health(self, request: Request) -> Response:
        if not self.state.worker.is_alive:
            return JSONResponse({"status": "error"}, 503)
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self.state.listed]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.state.embedder(name)
        return json_response(self._model(name))

    def _most(self, model: Model) -> int:
        """The most tokens of one of its texts."""
        maker = self.state.maker
        return model.network.hp.n_ctx_train if maker is None or model is not self.state.model else maker.most

    def _model(self, name: str) -> dict[str, Any]:
        model = self.state.embedder(name).model
        hp, most = model.network.hp, self._most(model)
        meta = {
            "n_vocab": hp.n_vocab,
            "n_ctx": most,
            "n_ctx_train": hp.n_ctx_train,
            "n_embd": hp.n_embd,
            "arch": hp.arch,
        }
        state = self.state
        adapted = name not in (*state.names, *state.embedders)
        about = {
            "created": state.created,
            "owned_by": "graphrt",
            # vLLM's: what a model was made of
            "max_model_len": most,
            "root": state.name if adapted else name,
            "parent": state.name if adapted else None,
            # llama-server's
            "aliases": list(state.names) if name in state.names else [name],
            "meta": meta,
        }
        return {"id": name, "object": "model", **about}

    async def adapters(self, request: Request) -> Response:
        known = self.state.maker.adapters if self.state.maker is not None else None
        return json_response([] if known is None else known.told())

    async def set_adapters(self, request: Request) -> Response:
        body, known = await self._body(request, AdapterScales), self.state.generator().adapters
        if known is None:
            raise ApiError("adapters are those that the server was started with (--lora), it has none")
        known.usual = known.scales(body.root)
        return json_response({"success": True})

    async def metrics(self, request: Request) -> Response:
        return Response(self.state.metrics.text(self.state.worker.scheduler), media_type=CONTENT_TYPE_LATEST)

    async def props(self, request: Request) -> Response:
        state, model = self.state, self.state.model
        tokenizer, scheduler = model.tokenizer, state.worker.scheduler
        template = model.chat_template if state.maker is not None else None
        ends = {
            name: None if i is None else _piece(tokenizer.piece(i))
            for name, i in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }
        defaults = state.maker.defaults if state.maker is not None else SamplerParams()
        params = fields_of(defaults) | {"seed": defaults.seed}
        n_ctx = scheduler.most_tokens if scheduler is not None else model.network.hp.n_ctx_train
        return json_response(
            {
                "default_generation_settings": {"n_ctx": n_ctx, "params": params},
                "total_slots": scheduler.engine.n_seq if scheduler is not None else 0,
                "model_alias": state.name,
                "model_path": Path(model.file.paths[0]).name if model.file.paths else "",  # where it lies is not told
                "modalities": {"vision": False, "audio": False},
                "chat_template": template.source if template is not None else "",
                "build_info": f"graphrt {__version__}",
                **ends,
                **state.facts,
            }
        )

    async def slots(self, request: Request) -> Response:
        scheduler = self.state.worker.scheduler
        running = {} if scheduler is None else dict(scheduler.running)
        n_seq = 0 if scheduler is None else scheduler.engine.n_seq
        found: list[dict[str, Any]] = []
        for i in range(n_seq):
            text = running.get(i)
            slot: dict[str, Any] = {"id": i, "n_ctx": self.state.generator().most, "is_processing": text is not None}
            if text is not None:
                slot |= {"state": text.state, "n_prompt_tokens": len(text.prompt), "n_decoded": text.n_made}
            found.append(slot)
        return json_response(found)


def _packed(row: Any) -> str:
    return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()


def _piece(spelled: bytes) -> str | list[int]:
    """A token's text; its bytes where these are no text, as llama-server has it."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)
