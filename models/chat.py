"""Chat templates: messages to the text of a prompt, by the Jinja template in the model file.

The template is taken as hostile: chat_environment bounds each of its steps, and the whole runs in a process with
limits that the system keeps (chat_process). Where the system has none, as on Windows, it runs in this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphrt.errors import ChatTemplateError
from graphrt.models.chat_process import CHAT_PROCESS, available
from graphrt.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from graphrt.models.chat_renderer import Renderer

MAX_SOURCE = 128 << 10  # characters; the longest published templates have about 30 thousand
KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A chat template that can be compiled.

    source: the Jinja text; bos_token, eos_token: the texts that it may write for these tokens. seconds: how long one
    rendering may compute. Raises ChatTemplateError if the source is too long or can't be compiled.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "", seconds: float = 1.5) -> None:
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"a chat template may have {MAX_SOURCE} characters, this one has {len(source)}.")
        self.source = source
        self._request = {"source": source, "bos_token": bos_token, "eos_token": eos_token, "seconds": seconds}
        self._renderer: Renderer | None = None
        if available():
            CHAT_PROCESS.ask(self._request)
        else:
            from graphrt.models.chat_renderer import Renderer

            try:
                self._renderer = Renderer(**self._request)  # type: ignore[arg-type]
            except MemoryError as error:
                raise _out_of_memory() from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for messages [{"role": ..., "content": ...}, ...].

        add_generation_prompt: end with the words that open the assistant's turn; variables: what else the template may
        read, such as "tools", by name. The text holds special tokens as
        text, BOS among them if the template writes it: tokenize it with parse_special=True and add_bos=False.
        Raises ChatTemplateError if the template refuses the messages, fails, or exceeds its limits.
        """
        plain = [_plain_message(message) for message in messages]
        if self._renderer is None:
            given = {
                "messages": plain,
                "add_generation_prompt": add_generation_prompt,
                "variables": {**(variables or {})},
            }
            return CHAT_PROCESS.ask(self._request | given)
        try:
            return self._renderer.render(plain, add_generation_prompt, variables or {})
        except MemoryError as error:
            raise _out_of_memory() from error


def from_metadata(md: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a GGUF file, or None if it has none. Raises ChatTemplateError if it can't be used."""
    source = md.get(KEY)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ChatTemplateError(f"{KEY} must be a string, got {type(source).__name__}.")
    bos, eos = ("" if i is None else tokenizer.texts[i] for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatTemplate(source, bos, eos)


def start_soon(md: Mapping[str, Any]) -> None:
    """Starts the process that a file's template will need, so that it is ready when the tokenizer is.

    Raises ChatTemplateError if it can't be started.
    """
    if isinstance(md.get(KEY), str) and available():
        CHAT_PROCESS.start()


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise ChatTemplateError(f"a message must be a mapping with role and content, got {str(message)[:80]!r}.")
    return dict(message)


def _out_of_memory() -> ChatTemplateError:
    return ChatTemplateError("the chat template was stopped: it needs more memory than there is.")
