"""What bodies of requests to llama-server's own /completion and /infill may hold."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from graphrt.models.key_reader import INT32_MAX
from graphrt.tools.serve.schemas import MAX_CHOICES, MAX_TEXTS, MAX_TOP_LOGPROBS, Body, Generating, Id, Loose


class NativePrompt(Body):
    prompt_string: str


Mixed = Annotated[list[Id | str], Field(min_length=1)]


class NativeGenerating(Generating):
    """What both may hold. is_list: it has several prompts; stops: the texts that end one."""

    # llama-server takes what it does not know, and its clients send samplers of every other server too
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _as_pairs(cls, given: Any) -> Any:
        """A mapping may name texts here."""
        if not isinstance(given, dict):
            return given
        return [[int(token) if token.isascii() and token.isdigit() else token, bias] for token, bias in given.items()]

    @property
    def is_list(self) -> bool:
        return False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Chunk(Loose):
    """A file, or a part of one, beside the one that is filled in."""

    filename: str = "tmp"
    text: str


class InfillRequest(NativeGenerating):
    """/infill. prompt: comes behind the prefix, as editors send a file's lines and then the beginning of one."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Chunk], Field(max_length=MAX_TEXTS)] | None = None
    prompt: str | None = None


class NativeRequest(NativeGenerating):
    """/completion. prompts: each a text, or texts and ids one after the other."""

    prompt: str | NativePrompt | Annotated[list[Id | str | Mixed | NativePrompt], Field(min_length=1)]

    @property
    def is_list(self) -> bool:
        return isinstance(self.prompt, list) and not any(isinstance(part, int) for part in self.prompt)

    @property
    def prompts(self) -> list[str | list[int | str]]:
        given: list[Any] = [self.prompt]
        if isinstance(self.prompt, list) and self.is_list:
            given = self.prompt
        return [each.prompt_string if isinstance(each, NativePrompt) else each for each in given]

    @model_validator(mode="after")
    def _of_one_kind(self) -> NativeRequest:
        if len(self.prompts) > MAX_TEXTS:
            raise ValueError(f"a request may have {MAX_TEXTS} prompts, got {len(self.prompts)}")
        if (
            isinstance(self.prompt, list)
            and not self.is_list
            and any(not isinstance(p, int | str) for p in self.prompt)
        ):
            raise ValueError(
                "a prompt must be texts and token ids, or there must be a list of prompts, not both in one"
            )
        return self
