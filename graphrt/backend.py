"""The plugin interface: Backend, Buffer, Device, and how backends are found.

A third party ships a backend as a distribution with an entry point in the group `graphrt.backends`, whose name is the
backend's and whose value is a Backend subclass. Nothing else is needed: `graphrt devices` shows it, with its score or
the reason why it can't be used here, and `--backend NAME` or prepare(..., [NAME, "cpu"]) uses it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

from graphrt.arguments import checked
from graphrt.buffer import Buffer as Buffer  # here too, for those who write backends
from graphrt.buffer import Bytes as Bytes
from graphrt.buffer import Comparison as Comparison
from graphrt.buffer import Place as Place
from graphrt.buffer import Usage as Usage
from graphrt.errors import BackendError
from graphrt.program import Group as Group
from graphrt.program import Program as Program
from graphrt.tensor import Tensor

#: The version of this interface. A backend that was written for another one is refused by name. 2: compile() returns a
#: Program, which has what was Backend.redone(); a buffer's `backend` is its owner's id.
API_VERSION = 2
ENTRY_POINT_GROUP = "graphrt.backends"


@dataclass(frozen=True)
class Device:
    """One device: its name, what it is, and its memory in bytes (0 when unknown)."""

    name: str
    description: str
    memory_total: int = 0
    memory_free: int = 0


@dataclass(frozen=True)
class Elsewhere:
    """What must be known of a device to plan for it where it is not. arch: "sm_90", "gfx942"; sm_count: its
    multiprocessors; shared_memory: bytes that one program may use; l2: bytes of its last cache."""

    arch: str
    sm_count: int
    shared_memory: int
    l2: int


class Region:
    """A split's nodes in order, and what fusing must know of the graph around them."""

    def __init__(self, nodes: Sequence[Tensor], kept: Callable[[Tensor], bool]) -> None:
        self.nodes = list(nodes)
        self._kept = kept

    def kept(self, t: Tensor) -> bool:
        """`t` must be in memory after the run: an output, or read by another split."""
        return self._kept(t)


class Backend(ABC):
    """What runs nodes. Subclasses set `name` and `api_version`, and may take options in __init__, as keywords.

    A graph is prepared on instances. Several of one name (two GPUs) may share a graph if their ids differ.
    """

    name: ClassVar[str]
    api_version: ClassVar[int]
    #: Every tensor in an arena starts at a multiple of this many bytes.
    alignment: int = 64
    #: Two runs on equal inputs give equal bits. A backend that can't promise it (atomic additions) says False, and the
    #: conformance tool does not compare its runs.
    deterministic: bool = True
    #: run() returns before the work is done, so that a caller gains by queuing runs ahead of what it reads.
    asynchronous: bool = False
    #: Where a graph tells of what several sequences share, it is read once for all of them, in sums that are put
    #: together otherwise than those of each alone. A backend that makes nothing of it says False, and is not told.
    reads_shared_once: bool = False
    #: What was prepared before a fork runs in the forked process too. A GPU's memory and queues are its parent's alone.
    survives_fork: bool = True
    #: How far a model's logits may be from the CPU reference's: an NMSE. What `graphrt bench` checks a model by. A
    #: backend that rounds activations says what that costs.
    logits_nmse: float = 1e-6

    def __init__(self, *, exact: bool = True) -> None:  # noqa: B027 - optional, as its text says
        """(optional) exact, which the verbs and models pass to every backend, asks for reference forms; a backend that
        has one form of everything ignores it."""

    @property
    def id(self) -> str:
        """(optional) Tells instances apart: the name, or name:index for the further devices of a backend ("triton:1").
        Memory belongs to an id (Buffer.backend): instances with one id can use each other's buffers, others can't."""
        return self.name

    @property
    def device(self) -> Device | None:
        """(optional) The device that this instance runs on, None for one that is not here."""
        return next(iter(self.devices()), None)

    def compiling(self, threads: int) -> AbstractContextManager[None]:
        """(optional) What programs begin to compile inside (Program.compile_ahead()) is compiled by so many threads,
        and is done at its end."""
        return nullcontext()

    @classmethod
    @abstractmethod
    def unusable(cls) -> str | None:
        """None when the backend can work on this machine, else a sentence why not."""

    @classmethod
    @abstractmethod
    def score(cls) -> int:
        """How much this backend is preferred among usable ones; the CPU reference is 1."""

    @abstractmethod
    def devices(self) -> list[Device]:
        """The devices that it can use."""

    @abstractmethod
    def supports(self, node: Tensor) -> str | None:
        """None when the backend runs this node, else a sentence why not. Depends on types, shapes and strides only."""

    def rounds_activations(self, node: Tensor) -> str | None:
        """(optional) The type that this backend rounds a product's activations to on purpose, "int8" (in groups of 32,
        by the group's largest), None for none. The conformance tool then holds it to that rounding, and says so."""
        return None

    @abstractmethod
    def alloc(self, nbytes: int, usage: Usage) -> Buffer:
        """A new buffer. Raises MemoryPlanError, with the size, when there is no room."""

    def wrap_host(self, data: Bytes) -> Buffer | None:
        """(optional) A WEIGHTS buffer over host memory without a copy, or None when the backend can't do that."""
        return None

    def hold(self, weight: Tensor, data: Bytes) -> Buffer:
        """(optional) A WEIGHTS buffer with a weight's bytes. The backend may lay them out as its kernels want them, as
        long as read() gives them back as they were. Raises MemoryPlanError when there is no room."""
        buffer = self.alloc(data.size, Usage.WEIGHTS)
        buffer.write(0, data)
        return buffer

    def fuse(self, region: Region) -> list[Group]:
        """(optional) Cuts a region into groups, in order. Called before memory is planned: all tensors that a group
        reads stay alive until its end, and tensors that only live inside it get no memory."""
        return [Group([node]) for node in region.nodes]

    @abstractmethod
    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        """What runs the groups, given where each tensor lies. All that can be done once is done here. Program(groups,
        run) is enough; a subclass of Program can also tell what it launches and why."""

    @classmethod
    def elsewhere(cls, device: Elsewhere, **options: Any) -> Backend:
        """(optional) An instance that prepares graphs as on a device that need not be here, and can't run them. Raises
        BackendError where that can't be."""
        raise BackendError(f"backend {cls.name!r} plans for no device but those that are here; name another backend")

    def synchronize(self) -> None:
        """(optional) Waits for queued work."""
        return None

    def stopwatch(self) -> Callable[[], Callable[[], float]]:
        """(optional) Begins to measure work that is queued from now on, and gives what ends that. What that gives tells
        the seconds between, and waits until they are over."""
        began = time.perf_counter()

        def end() -> Callable[[], float]:
            seconds = time.perf_counter() - began
            return lambda: seconds

        return end


@dataclass(frozen=True)
class BackendInfo:
    """A backend as found: its class, or None with the reason; score 0 when it can't be used."""

    name: str
    cls: type[Backend] | None
    score: int
    reason: str | None


_REGISTERED: dict[str, type[Backend]] = {}


@checked(BackendError)
def register_backend(cls: type[Backend]) -> type[Backend]:
    """Adds a backend without an entry point (from a script or a test). Raises BackendError for a taken name."""
    if _REGISTERED.get(cls.name, cls) is not cls:
        raise BackendError(
            f"a backend's name is used once, {cls.name!r} is taken by {_REGISTERED[cls.name].__module__}"
        )
    _REGISTERED[cls.name] = cls
    return cls


def discover() -> dict[str, BackendInfo]:
    """Every backend that is installed or registered, the preferred first."""
    found: dict[str, BackendInfo] = {}
    builtin = importlib.import_module("graphrt.backends").BUILTIN
    loaders: dict[str, Callable[[], Any]] = {name: partial(_import, path) for name, path in builtin.items()}
    loaders.update({point.name: point.load for point in _installed()})
    loaders.update({name: partial(_itself, cls) for name, cls in _REGISTERED.items()})
    for name, load in loaders.items():
        found[name] = _inspect(name, load)
    return dict(sorted(found.items(), key=lambda item: -item[1].score))


@functools.cache
def _installed() -> tuple[EntryPoint, ...]:
    """Looked up once a process: it reads the metadata of every installed package, which takes milliseconds."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _itself(cls: type[Backend]) -> type[Backend]:
    return cls


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _inspect(name: str, load: Callable[[], Any]) -> BackendInfo:
    try:
        cls = load()
    except (ImportError, AttributeError, SyntaxError, OSError) as error:  # a broken plugin takes no other with it
        return BackendInfo(name, None, 0, f"it can't be imported: {error}")
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        return BackendInfo(name, None, 0, f"its entry point must name a graphrt.backend.Backend subclass, got {cls!r}")
    version = getattr(cls, "api_version", None)
    if version != API_VERSION:
        reason = f"it was written for backend API version {version}, this graphrt has {API_VERSION}"
        return BackendInfo(name, None, 0, f"{reason}; install a matching release of one of them")
    if inspect.isabstract(cls):
        return BackendInfo(name, None, 0, f"it must define {', '.join(sorted(cls.__abstractmethods__))}")
    own_name = getattr(cls, "name", None)
    if own_name != name:
        return BackendInfo(name, None, 0, f"its class must have the entry point's name, got {own_name!r}")
    unusable = cls.unusable()
    return BackendInfo(name, cls, 0 if unusable else cls.score(), unusable)


@checked(BackendError)
def get_backend(name: str = "auto", **options: Any) -> Backend:
    """A new backend instance by name; "auto" is the usable one with the highest score. "triton:1" is the backend's
    second device: the option device=1.

    Raises BackendError when it is unknown, unusable here, or does not take the options.
    """
    base, _, index = name.partition(":")
    if index:
        if not index.isdecimal():
            raise BackendError(f"behind a backend's name goes the number of a device, triton:1, got {name!r}")
        options = {"device": int(index), **options}
    cls = _usable(base)
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise BackendError(f"backend {name!r} does not take these options: {error}") from error
    return cls(**options)


def backend_elsewhere(name: str, device: Elsewhere, **options: Any) -> Backend:
    """An instance of the backend of that name that plans for a device which need not be here; it may be unusable on
    this machine. Raises BackendError as Backend.elsewhere() does."""
    info = _found(name)
    if info.cls is None:
        raise BackendError(f"backend {name!r} can't be asked: {info.reason}")
    return info.cls.elsewhere(device, **options)


def _usable(name: str) -> type[Backend]:
    info = _found(name)
    if info.cls is None or info.reason is not None:
        raise BackendError(f"backend {info.name!r} can't be used here: {info.reason}")
    return info.cls


def _found(name: str) -> BackendInfo:
    found = discover()
    info = found.get(next(iter(found)) if name == "auto" else name)
    if info is None:
        raise BackendError(f"a backend must be one of {', '.join(found)}, got {name!r}; `graphrt devices` lists them")
    return info


def numbered(name: str, device: int) -> str:
    """The id of a backend's instance for the device of that number: "triton", "triton:1", "triton:2"."""
    return f"{name}:{device}" if device else name


def distinct(backends: Sequence[Backend]) -> dict[str, Backend]:
    """By id, in order, each instance once. Raises BackendError for two instances with one id, whose memory and work
    nothing could tell apart."""
    found: dict[str, Backend] = {}
    for backend in backends:
        if found.setdefault(backend.id, backend) is not backend:
            raise BackendError(
                f"backends that share a graph must have ids of their own, two are {backend.id!r}; leave one out, or "
                f"give it another device ({backend.name}:1)"
            )
    return found
