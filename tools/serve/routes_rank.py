"""/rerank and /score: how well texts answer a query. A model with a head for that reads both as one text; of another
one that gives vectors it is the cosine of theirs, as vLLM has it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from graphrt.errors import SessionError
from graphrt.tools.serve.batches import batches
from graphrt.tools.serve.errors import of_runtime
from graphrt.tools.serve.http import body_of
from graphrt.tools.serve.ids import new_id
from graphrt.tools.serve.schemas_rank import Ranking, RerankRequest, ScoreRequest
from graphrt.tools.serve.state import Embedder, State, json_response
from graphrt.tools.serve.truncation import Cut, cut_of

Asked = TypeVar("Asked", RerankRequest, ScoreRequest)


class RankRoutes:
    """The routes."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def rerank(self, request: Request) -> Response:
        body = await self._body(request, RerankRequest)
        texts = body.listed
        scores, n = await self._scores(body, [(body.query, text) for text in texts])
        places = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
        if body.texts is not None:
            told = [{"index": i, "score": scores[i]} | ({"text": texts[i]} if body.return_text else {}) for i in places]
            return json_response(told)
        results = [
            {"index": i, "relevance_score": scores[i]}
            | ({} if body.return_documents is False else {"document": {"text": texts[i]}})
            for i in places
        ]
        return json_response(self._head("rerank", body, n) | {"results": results})

    async def score(self, request: Request) -> Response:
        body = await self._body(request, ScoreRequest)
        scores, n = await self._scores(body, body.pairs)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return json_response(self._head("score", body, n) | {"data": data})

    async def _body(self, request: Request, kind: type[Asked]) -> Asked:
        limits = self.state.limits
        return await body_of(request, kind, limits.max_body, limits.body_seconds)

    def _head(self, prefix: str, body: Ranking, n: int) -> dict[str, Any]:
        return {
            "id": new_id(f"{prefix}-"), "object": "list", "created": int(time.time()),
            "model": body.model or self.state.name, "usage": {"prompt_tokens": n, "total_tokens": n},
        }  # fmt: skip

    async def _scores(self, body: Ranking, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], int]:
        """Those of (query, text), and how many tokens were read. Raises ApiError."""
        found = self.state.ranker(body.model)
        most = found.model.network.hp.n_ctx_train
        cut = cut_of(body.truncate_prompt_tokens, body.truncation_side or "right", most)
        try:
            if found.ranker is None:
                return await self._cosines(found, pairs, cut)
            ranker = found.ranker
            ids = await self.state.aside(lambda: [cut.of(ranker.pair(*pair)) for pair in pairs])
            scores = [
                score for part in batches(ids) for score in await self.state.worker.do(partial(ranker.scores, part))
            ]
        except SessionError as error:
            raise of_runtime(error, "documents" if isinstance(body, RerankRequest) else "text_2") from error
        return scores if body.is_raw else list(map(_between_0_and_1, scores)), sum(map(len, ids))

    async def _cosines(self, found: Embedder, pairs: Sequence[tuple[str, str]], cut: Cut) -> tuple[list[float], int]:
        """Raises SessionError."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        model = found.model
        ids = await self.state.aside(lambda: [cut.of(model.prompt_tokens(text, n_ctx=cut.limit)) for text in texts])
        rows = [row for part in batches(ids) for row in await self.state.worker.do(partial(found.embed, part))]
        known = {text: (np.asarray(row, np.float64), len(tokens)) for text, row, tokens in zip(texts, rows, ids)}
        scores = [float(known[query][0] @ known[text][0]) for query, text in pairs]
        return scores, sum(known[query][1] + known[text][1] for query, text in pairs)


def _between_0_and_1(score: float) -> float:
    """As probabilities are made of such numbers."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else 1 - 1 / (1 + math.exp(score))
