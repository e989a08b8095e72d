"""What bodies of requests to /rerank and /score may hold: llama-server's, vLLM's and text-embeddings-inference's
fields, which are also Cohere's and Jina's."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field, model_validator

from graphrt.models.key_reader import INT32_MAX
from graphrt.tools.serve.schemas import MAX_TEXTS, Loose, Truncated


class Document(Loose):
    text: str


Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class Ranking(Truncated):
    """What both may hold. is_raw: a score is the head's number, not brought between 0 and 1."""

    model: str | None = None
    user: str | None = None
    raw_scores: bool | None = None
    use_activation: bool | None = None  # vLLM's name for the opposite

    @property
    def is_raw(self) -> bool:
        return bool(self.raw_scores) or self.use_activation is False


class RerankRequest(Ranking):
    """/rerank. documents: in place of them `texts` asks for an answer in text-embeddings-inference's form."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # 0 for all
    return_documents: bool | None = None
    return_text: bool | None = None

    @property
    def listed(self) -> list[str]:
        given = self.texts if self.documents is None else self.documents
        return [each.text if isinstance(each, Document) else each for each in given or ()]

    @model_validator(mode="after")
    def _of_one_form(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("a request must have documents, or texts")
        return self


class ScoreRequest(Ranking):
    """/score: one text with each of several, or as many with as many."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = ([given] if isinstance(given, str) else given for given in (self.text_1, self.text_2))
        return list(zip(first * len(second) if len(first) == 1 else first, second))

    @model_validator(mode="after")
    def _as_many(self) -> ScoreRequest:
        first, second = (1 if isinstance(given, str) else len(given) for given in (self.text_1, self.text_2))
        if first not in (1, second):
            raise ValueError(f"there must be one text, or as many as others, got {first} and {second}")
        return self
