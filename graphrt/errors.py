"""The one exception tree of graphrt.

    GraphrtError                 anything graphrt refuses; the command line prints it in 1 to 3 lines and exits with 2
      GraphError                 a tensor, an op's arguments or a graph breaks a rule
      BackendError               a backend is unknown, refused, or of another API version
        UnsupportedError         no backend takes a node; carries each backend's reason
      MemoryPlanError            a buffer is unbound, or does not fit
      ModelError                 a model file can't be used
        GGUFError                the file is not GGUF, damaged, or has a type that can't be read
        ArchError                the architecture is unknown, or its tensors and keys don't fit it
        TokenizerError           the vocabulary can't be used
        ChatTemplateError        the chat template fails, or breaks its limits
      SessionError               a prompt or a setting that the model can't serve (empty, too long, ...)
        CacheFullError           a cache has no pages for more tokens; nothing was changed
      RankError                  one of several ranks is missing, has gone, or differs from the others
      HubError                   a model can't be fetched or stored

A message states the rule, the actual value and the next step, in that order. Whatever a file's text in it holds, it is
printed escaped and cut (printing.py); names and values in it are cut where it is made.
"""

from __future__ import annotations

from graphrt.printing import message


class GraphrtError(Exception):
    """Base of every error that graphrt raises on purpose."""

    def __str__(self) -> str:
        return message(super().__str__())


class GraphError(GraphrtError):
    """A tensor, an op's arguments or a graph breaks a rule."""


class BackendError(GraphrtError):
    """A backend is unknown, refuses to work, or was written for another API version."""


class UnsupportedError(BackendError):
    """No backend supports a node; the message has each backend's reason."""


class MemoryPlanError(GraphrtError):
    """A tensor has no buffer where it needs one, or a buffer is too small."""


class ModelError(GraphrtError):
    """A model file can't be used."""


class GGUFError(ModelError):
    """The file is not GGUF, is damaged, or holds a type that can't be read."""


class ArchError(ModelError):
    """The architecture is unknown, or the file's tensors or keys do not fit it."""


class TokenizerError(ModelError):
    """The vocabulary can't be used."""


class ChatTemplateError(ModelError):
    """The chat template fails or exceeds its limits."""


class SessionError(GraphrtError):
    """The model can't serve this request: an empty or too long prompt, a bad setting."""


class CacheFullError(SessionError):
    """The pages of a cache are in use; what was asked for would need more of them. Nothing was changed."""


class RankError(GraphrtError):
    """A rank is missing, has gone, or differs from the others. lost: another rank has gone, and says itself why."""

    lost = False


class HubError(GraphrtError):
    """A model can't be fetched or stored."""
