"""What bodies of requests may hold: OpenAI's fields, and llama-server's names for what OpenAI has not. A field that
changes the answer and isn't here is refused; those that don't are taken and not looked at."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

from graphrt.models.key_reader import INT32_MAX

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_TOP_LOGPROBS = 20
MAX_TEXTS = 2048
MAX_GUESSED = 32

Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1)]
Guessed = Annotated[int, Field(ge=0, le=MAX_GUESSED)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """Types are taken as they are: no number is made of a text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # a defence against who reads lengths of packets; none is made here


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # llama-server's, of json_object


class AdapterScale(Body):
    id: int
    scale: float


class AdapterScales(RootModel[Annotated[list[AdapterScale], Field(max_length=MAX_CHOICES)]]):
    """/lora-adapters"""


class Generating(Body):
    """What requests that generate have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    # taken and not looked at
    user: str | None = None
    cache_prompt: bool | None = None
    # llama-server's
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    speculative_n_max: Guessed | None = Field(default=None, alias="speculative.n_max")
    lora: Annotated[list[AdapterScale], Field(max_length=MAX_CHOICES)] | None = None
    # vLLM's
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    # our own
    regex: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token in value or ():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError("keys must be token ids, as {'15043': 1.5}")
        return value


class CompletionRequest(Generating):
    """/v1/completions"""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_TEXTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # 0 with echo
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    name: Name
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Part(BaseModel):
    """Parts of other types are refused by a sentence of their own."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=MAX_TEXTS)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Generating):
    """/v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1 << 16)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None  # templates may read it
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    # taken and not looked at
    prediction: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: str | None = None  # none is made


class Item(BaseModel):
    """Items of other types are refused by a sentence of their own."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | Annotated[list[Part], Field(max_length=MAX_TEXTS)] | None = None


class ResponsesRequest(Body):
    """/v1/responses"""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=1 << 16)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    # taken and not looked at: nothing is stored, and no tools are called
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class EmbeddingsRequest(Body):
    """/v1/embeddings"""

    model: str | None = None
    input: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """/tokenize"""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """/detokenize"""

    tokens: list[Annotated[int, Field(ge=0, le=INT32_MAX)]]


class TemplateRequest(Body):
    """/apply-template"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1 << 16)]
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
