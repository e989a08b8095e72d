"""From a request that has the right form to Texts for the scheduler. Nothing here waits for the engine; it runs on
threads beside the event loop, as a long prompt takes a while to tokenize."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphrt.errors import ChatTemplateError, SessionError
from graphrt.models.generation import TextRules
from graphrt.models.model import Model
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.serve import tool_calls
from graphrt.tools.serve.adapters import ServedAdapters
from graphrt.tools.serve.errors import ApiError, of_runtime
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.forms import Form, form_of
from graphrt.tools.serve.infill import Chunk, Infill
from graphrt.tools.serve.said import PLAIN, Marks, marks_of
from graphrt.tools.serve.schemas import (
    AllowedChoice,
    Biases,
    ChatRequest,
    CompletionRequest,
    Generating,
    Message,
    NamedTool,
    Tool,
    listed,
)
from graphrt.tools.serve.schemas_native import InfillRequest, NativeGenerating, NativeRequest
from graphrt.tools.serve.truncation import Cut, cut_of

#: Fields of a request -> SamplerParams'.
_SAMPLERS = {
    "temperature": "temp",
    "dry_sequence_breakers": "dry_sequence_breaker",
    "dynatemp_exponent": "dynatemp_exp",
    "mirostat_tau": "mirostat_ent",
    "mirostat_eta": "mirostat_lr",
} | {
    name: name
    for name in (
        *("top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p", "typical_p", "top_n_sigma"),
        *("repeat_penalty", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "xtc_probability", "xtc_threshold", "dynatemp_range", "mirostat", "min_keep"),
    )
}
#: Tokens of a completion that says no number, as OpenAI has it.
COMPLETION_TOKENS = 16
#: Tokens of a conversation that are counted, whatever the model takes.
MOST_COUNTED = 1 << 20


@dataclass
class Maker:
    """Makes texts of requests. defaults: of the sampling parameters that a request leaves out; most: tokens of a text
    with its prompt; most_made: tokens that a text may be asked for, -1 for no limit; most_texts: of a request;
    adapters: those of the model, None of one without any; variables: what a template may read unless a request says
    otherwise."""

    model: Model
    defaults: SamplerParams
    most: int
    most_made: int = -1
    most_texts: int = 1024
    adapters: ServedAdapters | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grammars = threading.Lock()

    # ---- prompts ----

    def completion(self, request: CompletionRequest, key: str) -> list[Text]:
        """n texts of each prompt, one prompt after the other. Raises ApiError."""
        chosen = request.n_texts != (request.n or 1)
        if chosen and (request.stream or request.n_texts < (request.n or 1)):
            raise ApiError("best_of must be n or more, and n in a stream: of so many texts the best n are told, which "
                           f"is known at their end, got {request.best_of}", param="best_of")  # fmt: skip
        if request.asked == 0 and not request.echo:
            raise ApiError("max_tokens may be 0 where echo tells the prompt; ask for 1 or more", param="max_tokens")
        # a token that nobody asked for comes with the prompt's, and isn't told
        n = self._limit(COMPLETION_TOKENS if request.asked is None else request.asked or 1)
        scored = _scored(request, request.logprobs if request.echo else None)
        rules = self._rules(request, n, 0 if chosen and request.logprobs is None else request.logprobs)
        cut = self._cut(request, n)
        prompts = self._between(request) if request.suffix else self.prompts(listed(request.prompt), cut)
        self._check_count(len(prompts) * request.n_texts)
        return [text for ids in prompts for text in self._texts(request, ids, n, rules, key, scored)]

    def _between(self, request: CompletionRequest) -> list[list[int]]:
        """The prompts of texts that come before a suffix. Raises ApiError."""
        if request.echo:
            raise ApiError("a text with a suffix stands between that and the prompt, which echo can't tell as one; "
                           "leave one of them out", param="suffix")  # fmt: skip
        infill = Infill(self.model.tokenizer, self.most, "suffix")
        prefixes = [prompt if isinstance(prompt, str) else self._known(prompt) for prompt in listed(request.prompt)]
        return [infill.prompt(prefix, request.suffix or "") for prefix in prefixes]

    def infill(self, request: InfillRequest, key: str) -> list[Text]:
        """A text between two others. Raises ApiError."""
        n, rules = self._native_rules(request)
        chunks = [Chunk(each.filename, each.text) for each in request.input_extra or ()]
        infill = Infill(self.model.tokenizer, self.most, "input_prefix")
        ids = infill.prompt(request.input_prefix + (request.prompt or ""), request.input_suffix, chunks)
        return self._texts(request, ids, n, rules, key)

    def native(self, request: NativeRequest, key: str) -> list[Text]:
        """A text of each prompt. Raises ApiError."""
        n, rules = self._native_rules(request)
        self._check_count(len(request.prompts))
        prompts = [self._ids(each) if isinstance(each, str) else self._mixed(each) for each in request.prompts]
        return [text for ids in prompts for text in self._texts(request, ids, n, rules, key)]

    def _native_rules(self, request: NativeGenerating) -> tuple[int, TextRules]:
        """How many tokens a text may have, any number where none is given, and how it is made."""
        # of no tokens one is made, and isn't told: the cache has the prompt then
        n = self._limit(-1 if request.asked is None else request.asked or 1)
        return n, self._rules(request, n, request.n_probs or None)

    def _mixed(self, parts: Sequence[int | str]) -> list[int]:
        """Of texts and ids one after the other: what begins a text begins the first one alone."""
        encode = self.model.tokenizer.encode
        found: list[int] = []
        for i, part in enumerate(parts):
            add_bos = None if i == 0 else False
            found += self._known([part]) if isinstance(part, int) else encode(part, add_bos, True)
        return found

    def _check_count(self, n: int) -> None:
        if n > self.most_texts:
            raise ApiError(f"a request may ask for {self.most_texts} texts, got one for {n}; send several", param="n")

    def prompts(self, given: Sequence[str | list[int]], cut: Cut) -> list[list[int]]:
        """Their ids. Raises ApiError."""
        return [cut.of(self._ids(each, cut.limit) if isinstance(each, str) else self._known(each)) for each in given]

    def _cut(self, request: Generating, n: int) -> Cut:
        return cut_of(request.truncate_prompt_tokens, request.truncation_side, self.most, n)

    def _ids(self, text: str, limit: int = 0) -> list[int]:
        try:
            return self.model.prompt_tokens(text, n_ctx=limit or self.most)
        except SessionError as error:
            raise _too_long(error, "prompt") from error

    def _known(self, ids: Sequence[Any], param: str = "prompt") -> list[int]:
        bad = next((i for i in ids if i >= self.model.network.hp.n_vocab), None)
        if bad is not None:
            raise ApiError(
                f"a token id must be 0 to {self.model.network.hp.n_vocab - 1}, got {bad}; see /tokenize", param=param
            )
        return list(ids)

    def chat(self, request: ChatRequest, key: str) -> tuple[list[Text], Marks]:
        """n answers to a conversation, and how they tell what they think. Raises ApiError."""
        wanted = tools_of(request)
        n = self._limit(request.max_completion_tokens or (-1 if request.asked is None else request.asked))
        if n == 0:
            raise ApiError("n_predict must be at least 1, or -1 for no limit, got 0", param="n_predict")
        if request.top_logprobs and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs: true; give both", param="top_logprobs")
        best = (request.top_logprobs or 0) if request.logprobs else None
        several = bool(request.parallel_tool_calls)
        rules = self._rules(request, n, best, tool_calls.schema_of(*wanted, several=several))
        self._check_count(request.n or 1)
        prompt = self.prompt_of(request)
        template = self.model.chat_template
        assert template is not None
        # a text that follows a grammar is an answer from its first token on
        reads = rules.is_free and request.reasoning_format != "none" and request.separate_reasoning is not False
        marks = marks_of(template.source, prompt) if reads else PLAIN
        cut = self._cut(request, n)
        ids = cut.of(self.chat_ids(prompt, cut.limit))
        return self._texts(request, ids, n, rules, key, _scored(request)), marks

    def prompt_of(self, request: ChatRequest) -> str:
        """A conversation that is asked about, by the model's template. Raises ApiError."""
        more = dict(request.chat_template_kwargs or {})
        effort = request.reasoning_effort or (request.reasoning.effort if request.reasoning is not None else None)
        if effort is not None:
            more.setdefault("reasoning_effort", effort)
        if effort == "none":
            more.setdefault("enable_thinking", False)
        goes_on = bool(request.continue_final_message)
        if goes_on and request.add_generation_prompt:
            raise ApiError("a message goes on or a new one begins: give one of add_generation_prompt and "
                           "continue_final_message", param="continue_final_message")  # fmt: skip
        if request.echo and not goes_on:
            raise ApiError("echo tells the message that goes on: give continue_final_message too", param="echo")
        answers = not goes_on and request.add_generation_prompt is not False
        return self.rendered(request.messages, tools_of(request)[0], more, answers=answers, goes_on=goes_on)

    def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        more: Mapping[str, Any] | None = None,
        *,
        answers: bool = True,
        goes_on: bool = False,
    ) -> str:
        """A conversation by the model's template. more: what else the template may read; answers: the assistant's
        turn begins at the end; goes_on: the last message isn't closed. Raises ApiError."""
        template = self.model.chat_template
        if template is None:
            raise ApiError("a conversation needs a chat template, this model has none; use /v1/completions")
        variables = {**self.variables, **(more or {})}
        if tools:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        try:
            prompt = template.render([_plain(i, m) for i, m in enumerate(messages)], answers, variables)
            return _open_end(prompt, messages[-1], len(messages) - 1) if goes_on else prompt
        except ChatTemplateError as error:
            raise of_runtime(error, "messages") from error

    def chat_ids(self, text: str, limit: int = 0) -> list[int]:
        """The ids of what a template has written, of so many at most. Raises ApiError."""
        try:
            return self.model.rendered_tokens(text, limit or self.most)
        except SessionError as error:
            raise _too_long(error, "messages") from error

    # ---- how texts are made ----

    def _limit(self, n: int) -> int:
        """The tokens that a text may have of those that are asked for, -1 for any number."""
        if self.most_made < 0:
            return n
        return self.most_made if n < 0 else min(n, self.most_made)

    def _rules(
        self, request: Generating, n: int, best: int | None, of_tools: Mapping[str, Any] | None = None
    ) -> TextRules:
        form = form_of(request)
        if of_tools is not None:
            if form.field is not None:
                raise ApiError("a text must be a call (tool_choice) or of a form (response_format, grammar), not both",
                               param="tool_choice")  # fmt: skip
            form = Form(schema=dict(of_tools))
        try:
            stop = () if request.stop is None else request.stop
            least = _least(request, n)
            # a text that nothing ends before its last token has no end: a device can choose its tokens
            fixed = 0 < n == least and not (stop or request.stop_token_ids)
            never_ends, least = bool(request.ignore_eos) or fixed, 0 if fixed else least
            return TextRules(
                n, stop, request.stop_token_ids or (), never_ends, form.grammar, form.schema, best, form.regex,
                least, bool(request.include_stop_str_in_output), request.skip_special_tokens is False,
                request.allowed_token_ids, request.bad_words or (),
                isinstance(request, NativeGenerating) and bool(request.post_sampling_probs), self._named(request, best),
            )  # fmt: skip
        except SessionError as error:
            raise of_runtime(error, _rule_of(request, error)) from error

    def _named(self, request: Generating, best: int | None) -> list[int]:
        """The tokens that log-probabilities are told of, none for the likeliest. Raises ApiError."""
        if request.logprob_token_ids is None:
            return []
        if best is None:
            raise ApiError("logprob_token_ids says of which tokens log-probabilities are told: give logprobs too",
                           param="logprob_token_ids")  # fmt: skip
        return self._known(request.logprob_token_ids, "logprob_token_ids")

    def sampling(self, request: Generating) -> SamplerParams:
        """The parameters that a request asks for. Raises ApiError."""
        given = {ours: getattr(request, theirs) for theirs, ours in _SAMPLERS.items()}
        changed = {name: value for name, value in given.items() if value is not None}
        if request.seed is not None:
            changed["seed"] = request.seed % (1 << 64) if request.seed != -1 else -1
        if request.repetition_penalty is not None:  # vLLM's, of all tokens
            changed.setdefault("repeat_penalty", request.repetition_penalty)
            changed.setdefault("repeat_last_n", -1)
        if request.logit_bias:
            changed["logit_bias"] = self._biases(request.logit_bias)
        try:
            return self.defaults.changed(changed)
        except SessionError as error:
            raise of_runtime(error) from error

    def _biases(self, given: Biases) -> dict[int, float]:
        """Those of token ids. A text stands for all of its tokens, as llama-server has it."""
        if isinstance(given, dict):
            return {int(token): bias for token, bias in given.items()}
        found: dict[int, float] = {}
        for token, bias in given:
            ids = self.model.tokenizer.encode(token, False, True) if isinstance(token, str) else [int(token)]
            found |= dict.fromkeys(ids, -math.inf if bias is False else float(bias))
        return found

    def _texts(
        self, request: Generating, ids: list[int], n: int, rules: TextRules, key: str, scored: int | None = None
    ) -> list[Text]:
        """The choices of one prompt; all but the first wait until that has read it. scored: of how many of the
        likeliest tokens its log-probabilities are told, None for none of them."""
        if len(ids) > self.most:
            raise ApiError(f"a text may have {self.most} tokens with its prompt, the prompt has {len(ids)}; shorten it",
                           param="prompt", code="context_length_exceeded")  # fmt: skip
        if request.lora and self.adapters is None:
            raise ApiError("adapters are those that the server was started with (--lora), it has none", param="lora")
        adapters = None if self.adapters is None else self.adapters.of(request)
        found: list[Text] = []
        for params in self.sampling(request).seeds(request.n_texts):
            try:
                with self._grammars:
                    sampler, pieces = self.model.new_text(params, rules)
            except SessionError as error:
                raise of_runtime(error, _rule_of(request, error)) from error
            leader = found[0] if found else None
            most = request.speculative_n_max
            score = scored if leader is None else None
            text = Text(ids, n, sampler, pieces, key, leader, most, adapters, rules, score, request.n_texts)
            found.append(text)
        return found


def tools_of(request: ChatRequest) -> tuple[list[Tool], str | None]:
    """The tools that a template is told of, and the name that a call must have: "" for any of them, None where the text
    need not be a call. Raises ApiError."""
    tools, choice = request.tools or [], request.tool_choice
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("a tool_choice that asks for a call needs tools, got none; give some", param="tool_choice")
        return [], None
    if isinstance(choice, AllowedChoice):
        names = [_name(each, tools, "allowed_tools") for each in choice.allowed_tools.tools]
        allowed = [tool for tool in tools if tool.function.name in names]
        return allowed, "" if choice.allowed_tools.mode == "required" else None
    if isinstance(choice, NamedTool):
        return tools, _name(choice, tools, "function.name")
    if choice in (None, "auto"):
        return tools, None
    return tools, "" if choice == "required" else _known_name(choice, tools, "tool_choice")


def _name(choice: NamedTool, tools: Sequence[Tool], place: str) -> str:
    return _known_name(choice.function.name, tools, f"tool_choice.{place}")


def _known_name(name: str, tools: Sequence[Tool], place: str) -> str:
    """The name of a tool that there is. Raises ApiError."""
    if name not in [tool.function.name for tool in tools]:
        raise ApiError("tool_choice must name tools that there are, or be one of none, auto and required", param=place)
    return name


def fields_of(params: SamplerParams) -> dict[str, Any]:
    """Sampling parameters by the names of a request's fields."""
    return {theirs: getattr(params, ours) for theirs, ours in _SAMPLERS.items()}


def _least(request: Generating, n: int) -> int:
    """The tokens that a text must have (vLLM's min_tokens). Raises ApiError for more than it may have."""
    least = request.min_tokens or 0
    if 0 <= n < least:
        raise ApiError(f"min_tokens must be max_tokens or fewer, got {least} and {n}", param="min_tokens")
    return least


def _scored(request: Generating, echoed: int | None = None) -> int | None:
    """Of how many of the likeliest tokens a prompt's log-probabilities are told, None for none of them. echoed: of how
    many echo asks for. Raises ApiError for a stream of them."""
    if request.prompt_logprobs is None:
        return echoed
    if request.stream:
        raise ApiError("prompt_logprobs are told in whole answers, not in streams; leave stream out, or use echo with "
                       "logprobs", param="prompt_logprobs")  # fmt: skip
    return max(request.prompt_logprobs, echoed or 0)


#: What the runtime's sentences say -> the field that they are about.
_PLACES = {
    "a stop must": "stop",
    "a stop id": "stop_token_ids",
    "got at least": "min_tokens",
    "allowed ids must": "allowed_token_ids",
    "a bad word": "bad_words",
    "after sampling": "post_sampling_probs",
}


def _rule_of(request: Generating, error: SessionError) -> str | None:
    """The field that an error is about: what its sentence says, or a grammar's."""
    place = next((name for said, name in _PLACES.items() if said in str(error)), None)
    if place is not None:
        return place
    form = form_of(request).field
    if form is not None:
        return form
    return next((name for name in ("stop_token_ids", "logit_bias") if getattr(request, name) is not None), None)


def _plain(index: int, message: Message) -> dict[str, Any]:
    """A message as templates know them: content is a text, whose parts are lines, and arguments of calls are
    mappings."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise ApiError("a part of a message must be a text: models read text alone",
                               param=f"messages[{index}].content[{i}].type")  # fmt: skip
        content = "\n".join(part.text or "" for part in content)
    if content is None and message.role != "assistant":
        raise ApiError(f"a message of role {message.role} must have content, got none",
                       param=f"messages[{index}].content")  # fmt: skip
    found["content"] = content or ""
    if message.tool_calls:
        found["tool_calls"] = [tool_calls.plain(call, index, i) for i, call in enumerate(message.tool_calls)]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    return found


def said_before(last: Message, index: int = 0) -> str:
    """What a message that goes on has said. Raises ApiError."""
    found: str = _plain(index, last)["content"].strip()
    return found


def _open_end(prompt: str, last: Message, index: int) -> str:
    """A prompt without what its template writes behind the last message, which goes on. Raises ApiError."""
    said = said_before(last, index)
    at = prompt.rfind(said) if said else -1
    if at < 0:
        raise ApiError("the last message must have a text that the chat template writes as it is, to go on with",
                       param=f"messages[{index}].content")  # fmt: skip
    return prompt[: at + len(said)]


def _too_long(error: SessionError, param: str) -> ApiError:
    found = of_runtime(error, param)
    found.code = "context_length_exceeded" if "too long" in found.message else None
    return found
