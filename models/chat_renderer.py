"""Compiles and renders one chat template in this process, by the limits of chat_environment.

It is what chat_child runs; chat.ChatTemplate uses it directly where the system can't limit a process.
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
from graphrt.models.chat_limits import Budget, LimitError, check_output

# What running template code can raise: it is Python code working on values of the wrong type. SyntaxError comes from
# compiling what Jinja generated ("too many statically nested blocks").
_FAULTS = (
    *(TemplateError, SyntaxError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError),
    *(RuntimeError, NameError),  # RuntimeError is RecursionError as well
)


class _Refusal(TemplateError):
    """The template called raise_exception: it does not take these messages."""


class Renderer:
    """A compiled chat template.

    source: the Jinja text; bos_token, eos_token: the texts that it may write for these tokens. seconds: how long one
    rendering may take by the clock. Raises ChatTemplateError if it can't be compiled, MemoryError for want of memory.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", seconds: float = 1.5,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        self.seconds, self._clock = seconds, clock
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._environment = BoundedEnvironment()
        self._environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            code = self._environment.compile(self._environment.instrumented(source))
            self._template = Template.from_code(self._environment, code, self._environment.globals)
        except _FAULTS as error:
            raise ChatTemplateError(f"the chat template can't be compiled: {_reason(error)}.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for messages. variables: what else the template may read. Raises ChatTemplateError,
        MemoryError."""
        with self._lock:
            self._environment.budget = Budget(self.seconds, self._clock)
            try:
                own = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self._tokens}
                return self._written({**(variables or {}), **own})
            except _Refusal as error:
                raise ChatTemplateError(f"the chat template refuses these messages: {_reason(error)}.") from error
            except LimitError as error:
                raise ChatTemplateError(f"the chat template was stopped: {_reason(error)}.") from error
            except _FAULTS as error:
                raise ChatTemplateError(f"the chat template failed: {_reason(error)}.") from error

    def _written(self, variables: Mapping[str, Any]) -> str:
        parts, n_characters = [], 0
        for part in self._template.generate(variables):
            n_characters += len(part)
            check_output(n_characters)  # blocks of macros and filters come here past the hooks
            parts.append(part)
        return "".join(parts)


def _reason(error: BaseException) -> str:
    """One line, at most 300 characters, with the template's line where it is known."""
    line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    text = " ".join(str(error)[:4000].split()) or type(error).__name__
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    # the sentence that it stands in ends with a point, which is the third of the three
    return line + (text.rstrip(".") if len(text) <= 300 else text[:297] + "..")


def _raise_exception(message: object = "") -> str:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    """Today, formatted. A format may not hold digits: as widths they could make a text of any length."""
    if len(form) > 100 or any(char.isdigit() for char in form):
        raise LimitError(f"strftime_now takes a format of 100 characters without digits, got {form[:40]!r}")
    return datetime.datetime.now().strftime(form)
