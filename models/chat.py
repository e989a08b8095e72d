"""Chat templates: messages to the text of a prompt, by the Jinja template in the model file.

The template is taken as hostile: chat_environment renders it with bounds on time, memory and output.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from graphrt.errors import ChatTemplateError
from graphrt.models.chat_environment import BoundedEnvironment
from graphrt.models.chat_limits import Budget, LimitError
from graphrt.models.tokenizer import Tokenizer

MAX_SOURCE = 128 << 10  # characters; the longest published templates have about 30 thousand
KEY = "tokenizer.chat_template"

# What running template code can raise: it is Python code working on values of the wrong type. SyntaxError comes from
# compiling what Jinja generated ("too many statically nested blocks").
_FAULTS = (
    *(TemplateError, SyntaxError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError),
    *(RecursionError, MemoryError, NameError),
)


class _Refusal(TemplateError):
    """The template called raise_exception: it does not take these messages."""


class ChatTemplate:
    """A compiled chat template.

    source: the Jinja text; bos_token, eos_token: the texts that it may write for these tokens. seconds: how long one
    rendering may take by the clock. Raises ChatTemplateError if the source is too long or is not valid Jinja.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", seconds: float = 1.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"a chat template may have {MAX_SOURCE} characters, this one has {len(source)}.")
        self.source, self.seconds, self._clock = source, seconds, clock
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._environment = BoundedEnvironment()
        self._environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            code = self._environment.compile(self._environment.instrumented(source))
            self._template = Template.from_code(self._environment, code, self._environment.globals)
        except _FAULTS as error:
            raise ChatTemplateError(f"the chat template can't be compiled: {_reason(error)}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for messages [{"role": ..., "content": ...}, ...].

        add_generation_prompt: end with the words that open the assistant's turn. The text holds special tokens as
        text, BOS among them if the template writes it: tokenize it with parse_special=True and add_bos=False.
        Raises ChatTemplateError if the template refuses the messages, fails, or exceeds its limits.
        """
        plain = [_plain_message(message) for message in messages]
        with self._lock:
            self._environment.budget = Budget(self.seconds, self._clock)
            try:
                parts = self._template.generate(
                    messages=plain, add_generation_prompt=add_generation_prompt, **self._tokens
                )
                return "".join(parts)
            except _Refusal as error:
                raise ChatTemplateError(f"the chat template refuses these messages: {_reason(error)}.") from error
            except LimitError as error:
                raise ChatTemplateError(f"the chat template was stopped: {_reason(error)}.") from error
            except _FAULTS as error:
                raise ChatTemplateError(f"the chat template failed: {_reason(error)}.") from error


def from_metadata(md: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a GGUF file, or None if it has none. Raises ChatTemplateError if it can't be used."""
    source = md.get(KEY)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ChatTemplateError(f"{KEY} must be a string, got {type(source).__name__}.")
    bos, eos = ("" if i is None else tokenizer.texts[i] for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatTemplate(source, bos, eos)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise ChatTemplateError(f"a message must be a mapping with role and content, got {str(message)[:80]!r}.")
    return dict(message)


def _reason(error: BaseException) -> str:
    """One line, at most 300 characters, with the template's line where it is known."""
    line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    text = " ".join(str(error).split()) or type(error).__name__
    # the sentence that it stands in ends with a point, which is the third of the three
    return line + (text.rstrip(".") if len(text) <= 300 else text[:297] + "..")


def _raise_exception(message: object = "") -> str:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    """Today, formatted. A format may not hold digits: as widths they could make a text of any length."""
    if len(form) > 100 or any(char.isdigit() for char in form):
        raise LimitError(f"strftime_now takes a format of 100 characters without digits, got {form[:40]!r}")
    return datetime.datetime.now().strftime(form)
