"""A server of an encoder: vectors, and no text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from support import tiny_archs as tiny_archs
from support.tiny import write_model

from graphrt.models import load
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.cli import verb_parser
from graphrt.tools.serve.app import application
from graphrt.tools.verbs import serve


def test_an_encoder_gives_vectors_alone(tmp_path: Path) -> None:
    path = write_model(tmp_path / "encoder.gguf", "bert")
    model = load(path, "cpu")
    args = verb_parser("serve", serve).parse_args([str(path), "--pooling", "mean"])
    texts = [[5, 6, 7], [9] * 20]

    async def asked() -> list[Any]:
        app = application(serve.made_state(model, args, SamplerParams()))
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://x") as http,
        ):
            return [
                await http.post("/v1/embeddings", json={"input": texts}),
                await http.post("/v1/completions", json={"prompt": "a"}),
                await http.post("/v1/embeddings", json={"input": [10**6]}),
                await http.get("/slots"),
                await http.get("/metrics"),
                await http.get("/health"),
            ]

    vectors, text, unknown, *others = asyncio.run(asked())
    found = [each["embedding"] for each in vectors.json()["data"]]
    np.testing.assert_allclose(found, model.embed(texts, "mean"), atol=1e-6)
    assert vectors.json()["usage"]["total_tokens"] == 23
    assert text.status_code == 400 and "encoders" in text.json()["error"]["message"]
    assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "input"
    assert [answer.status_code for answer in others] == [200] * 3
