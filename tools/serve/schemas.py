"""What bodies of requests may hold: OpenAI's fields, and llama-server's and vLLM's names for what OpenAI has not. A
field that changes the answer and isn't here is refused; those that don't are taken and not looked at
(foreign_fields.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel, field_validator, model_validator

from graphrt.models.key_reader import INT32_MAX
from graphrt.tools.serve.foreign_fields import is_taken

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_TOP_LOGPROBS = 20
MAX_TEXTS = 2048
MAX_GUESSED = 32

Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Id = Annotated[int, Field(ge=0, le=INT32_MAX)]
Ids = Annotated[list[Id], Field(min_length=1)]
Guessed = Annotated[int, Field(ge=0, le=MAX_GUESSED)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Annotated[str, Field(max_length=64)]
#: Texts, as themselves or as token ids.
Prompts = str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MAX_TEXTS)]
#: A token's id, or a text for all of its tokens, and what is added to their logits: false for never.
Bias = Annotated[list[bool | int | float | str], Field(min_length=2, max_length=2)]
Biases = dict[str, float] | list[Bias]
#: What is paid for where.
Tier = Literal["auto", "default", "flex", "priority", "scale", "fast"]
#: Texts of which an answer must be one.
Choice = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_TEXTS)]


def listed(given: Any) -> list[Any]:
    """Prompts, or the only one, as a list."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class Body(BaseModel):
    """Types are taken as they are: no number is made of a text. But 5.0 is 5, as some languages write all numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_the_unused(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: _whole(value) for name, value in given.items() if name in known or not is_taken(name, value)}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Loose(BaseModel):
    """What conversations and tools are made of: clients send back what they were given, by whatever server, and more
    than is read."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # a defence against who reads lengths of packets; none is made here
    continuous_usage_stats: bool | None = None  # vLLM's: with each piece what there is so far


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "json", "regex"]  # the last two are text-generation-inference's
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # llama-server's, of json_object
    value: dict[str, Any] | str | None = None  # text-generation-inference's place of what these types say


class StructuredOutputs(Body):
    """vLLM's newer name for what guided_json and its like say."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    json_object: bool | None = None


class AdapterScale(Body):
    id: int
    scale: float


class AdapterScales(RootModel[Annotated[list[AdapterScale], Field(max_length=MAX_CHOICES)]]):
    """/lora-adapters"""


class Sampling(Body):
    """How tokens are chosen, and where a text may end."""

    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
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
    min_keep: int | None = None
    # vLLM's
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: Biases | None) -> Biases | None:
        for name in value if isinstance(value, dict) else ():
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise ValueError("keys must be token ids, as {'15043': 1.5}")
        for token, bias in value if isinstance(value, list) else ():
            if isinstance(token, bool | float) or isinstance(bias, str) or bias is True:
                raise ValueError("pairs must be a token id, or a text, and a number, or false, as [15043, 1.5]")
        return value


class Generating(Sampling):
    """What requests that generate have in common. asked: the tokens that a text may have, -1 for any number, None
    where that isn't said."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    # taken and not looked at
    user: str | None = None
    cache_prompt: bool | None = None
    # llama-server's
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    speculative_n_max: Guessed | None = Field(default=None, alias="speculative.n_max")
    lora: Annotated[list[AdapterScale], Field(max_length=MAX_CHOICES)] | None = None
    n_predict: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    timings_per_token: bool | None = None
    # vLLM's
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    allowed_token_ids: Ids | None = None
    logprob_token_ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # SGLang's
    regex: str | None = None
    ebnf: str | None = None

    @property
    def asked(self) -> int | None:
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def n_texts(self) -> int:
        """That are made of each prompt."""
        return self.n or 1


class CompletionRequest(Generating):
    """/v1/completions"""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # 0 with echo
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None

    @property
    def n_texts(self) -> int:
        return self.best_of or self.n or 1


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: str | None = None  # none is made
    generate_summary: str | None = None  # its older name
    context: str | None = None  # taken and not looked at, as is the next one
    mode: str | None = None


class Function(Loose):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Loose):
    type: Literal["function"]
    function: Function


class NamedFunction(Loose):
    name: Name


class NamedTool(Loose):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Loose):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_CHOICES)]


class AllowedChoice(Loose):
    """Some of the tools, as if there were no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Loose):
    name: Name
    arguments: str


class ToolCall(Loose):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Part(BaseModel):
    """Parts of other types are refused by a sentence of their own."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


class Message(Loose):
    role: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]{0,63}$")]  # templates may know others than OpenAI's
    content: str | Annotated[list[Part], Field(max_length=MAX_TEXTS)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, validation_alias=AliasChoices("reasoning_content", "reasoning"))


class ChatRequest(Generating):
    """/v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1 << 16)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | Name | None = None  # TGI's: a name
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None  # templates may read it
    reasoning: ReasoningOptions | None = None  # Ollama's other place for it
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    separate_reasoning: bool | None = None  # SGLang's: false is reasoning_format "none"
    add_generation_prompt: bool | None = None  # vLLM's, as is the next one
    continue_final_message: bool | None = None
    echo: bool | None = None  # vLLM's: the message that goes on is told from its beginning
    # taken and not looked at
    prediction: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Tier | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class Truncated(Body):
    """vLLM's fields for texts that are too long."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class EmbeddingsRequest(Truncated):
    """/v1/embeddings"""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class Invocation(RootModel[ChatRequest | CompletionRequest | EmbeddingsRequest]):
    """/invocations, as it is described; what ranks texts may come there too."""


class TokenizeRequest(Body):
    """/tokenize: of llama-server's `content`, or of vLLM's `prompt` or `messages`, which have an answer of another
    form."""

    model: str | None = None  # taken and not looked at
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=1 << 16)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _of_one_text(self) -> TokenizeRequest:
        if sum(each is not None for each in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("a request must have one of content, prompt and messages")
        return self


class DetokenizeRequest(Body):
    """/detokenize"""

    model: str | None = None  # taken and not looked at
    tokens: list[Id]


class TemplateRequest(Body):
    """/apply-template"""

    model: str | None = None  # taken and not looked at
    messages: Annotated[list[Message], Field(min_length=1, max_length=1 << 16)]
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
