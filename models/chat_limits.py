"""A Jinja environment in which no template can take much time or memory, or reach anything but its variables.

A chat template comes with a model file, so it may be hostile. Jinja's sandbox keeps it from Python's internals, but
not from `range(99999)` inside `range(99999)` or 'a' * 10**9. Here every step is counted: before compiling, the
template's syntax tree is rewritten so that loops, literals, `~`, comparisons, slices and output pass through the
environment; calls, filters and operators do so already. Each of them checks the deadline and the size of what it
is about to make, and only filters and methods whose result can be bounded beforehand are let in. So one step is
short, and the steps end at the deadline: no thread or process is needed to stop a template.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_VALUE = 4 << 20  # bytes of one value; a list counts everything in it, once per occurrence
MAX_TOTAL = 64 << 20  # bytes of all values that one rendering makes
MAX_OUTPUT = 8 << 20  # characters of the result
MAX_ARGUMENT = 10_000  # a number given to a filter or method: widths, counts
MAX_INT_BITS = 4096

_FILTERS = (
    *("abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string"),
    *("title", "trim", "unique", "upper", "wordcount"),
)
_STR_METHODS = (
    *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "join", "replace"),
    *("startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count"),
    *("lower", "upper", "title", "capitalize", "casefold", "swapcase", "zfill", "ljust", "rjust", "center"),
    *("isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum", "isspace", "isupper", "islower"),
)
_METHODS: dict[type, tuple[str, ...]] = {
    str: _STR_METHODS,
    dict: ("get", "items", "keys", "values", "copy"),
    list: ("index", "count", "copy"),
    tuple: ("index", "count"),
}
_WIDE_FORMAT = re.compile(r"%.*?(?:\d{4}|\*)", re.DOTALL)


class LimitError(TemplateRuntimeError):
    """The template exceeds a limit."""


class Budget:
    """What one rendering may still use: seconds, bytes, characters of output."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._total = self._output = 0

    def tick(self) -> None:
        """Raises LimitError past the deadline."""
        if time.monotonic() > self._deadline:
            raise LimitError(f"it may run for {self.seconds:g} s, and is not done")

    def make(self, value: Any, deep: bool = False) -> Any:
        """Counts a value just made, and returns it. deep: what a list holds was made with it."""
        self.tick()
        weight = weigh(value)
        self._total += weight if deep or not isinstance(value, (list, tuple, dict)) else 16 + 8 * len(value)
        if self._total > MAX_TOTAL:
            raise LimitError(f"it may make {MAX_TOTAL} bytes of values, and makes more")
        return value

    def emit(self, value: Any) -> str:
        """Counts what goes into the output or a captured block, as text."""
        weigh(value)
        text: str = self.make(str(value))
        self._output += len(text)
        if self._output > MAX_OUTPUT:
            raise LimitError(f"it may write {MAX_OUTPUT} characters, and writes more")
        return text


def weigh(value: Any) -> int:
    """Bytes of a value, the same object counted each time it occurs: what printing or comparing it would cost.

    Raises LimitError above MAX_VALUE. That bounds [x, x] nested fifty deep, which is small only until it is used.
    """
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += item.__sizeof__()
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += 16 + 8 * len(item)
            stack.extend(item)
        elif isinstance(item, dict):
            total += 64 + 16 * len(item)
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, Namespace):
            raise LimitError("a namespace may be read and set, not put in a list, printed or filtered")
        else:
            total += 8
        if total > MAX_VALUE:
            raise LimitError(f"one value may have {MAX_VALUE} bytes, and one has more")
    return total


def _expect(n_bytes: int) -> None:
    if n_bytes > MAX_VALUE:
        raise LimitError(f"one value may have {MAX_VALUE} bytes, and one would have {n_bytes}")


def _check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a filter or method call whose result could be far larger than what goes in. args[0]: the receiver."""
    for arg in (*args[1:], *kwargs.values()):
        if isinstance(arg, (int, float)) and not -MAX_ARGUMENT <= arg <= MAX_ARGUMENT:
            raise LimitError(f"a number given to {name} must be at most {MAX_ARGUMENT}, got {arg:.6g}")
    weights = [weigh(arg) for arg in (*args, *kwargs.values())]
    subject, rest = args[0], args[1:]
    if name == "replace" and len(rest) >= 2 and isinstance(subject, str):
        _expect(weights[0] + (len(subject) + 1 if not rest[0] else subject.count(str(rest[0]))) * weights[2])
    elif name == "join" and rest:
        items, gap = (rest[0], weights[0]) if isinstance(subject, str) else (subject, weights[1])
        _expect(weigh(items) + (len(items) if hasattr(items, "__len__") else MAX_ARGUMENT) * gap)
    elif name == "indent":
        width = next((arg for arg in (*rest, kwargs.get("width", 4)) if isinstance(arg, (int, str))), 4)
        step = len(width) if isinstance(width, str) else int(width)
        _expect(weights[0] + (str(subject).count("\n") + 1) * step * 4)
    elif name == "int" and isinstance(subject, str) and len(subject) > 1000:
        raise LimitError("a number may have 1000 digits")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """As in transformers: no HTML escapes, keys in order of insertion."""
    if indent is not None and not 0 <= indent <= 16:
        raise LimitError(f"tojson's indent must be 0 to 16, got {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


class _Instrument(NodeTransformer):
    """Sends what the sandbox does not see through the environment's hooks."""

    def _hook(self, name: str, node: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), [node], [], None, None, lineno=node.lineno)

    def _made(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return self._hook("made", node)

    visit_Concat = visit_Compare = visit_Test = visit_List = visit_Dict = _made

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._hook("made", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._hook("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._hook("counted", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [self._hook("emitted", _as_expression(child)) for child in node.nodes]
        return node


def _as_expression(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits. Set `budget` before each rendering; one rendering at a time."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        # no constant folding: it would evaluate filters while compiling, outside any budget
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], optimized=False)
        self.budget = Budget(0.0)
        self.filters = {name: self._guarded(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = self._guarded("tojson", _tojson)
        self.globals = {"range": self.globals["range"], "namespace": Namespace, "dict": dict}

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks its arguments and counts its result. A context that Jinja passes is skipped."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _check_arguments(name, args[skipped:], kwargs)
            return self.budget.make(function(*args, **kwargs), deep=isinstance(args[skipped], str))

        return checked

    def instrumented(self, source: str) -> nodes.Template:
        """The template's syntax tree with the hooks put in. Raises TemplateSyntaxError."""
        tree: nodes.Template = _Instrument().visit(self.parse(source))
        return tree.set_environment(self)  # type: ignore[return-value]

    def made(self, value: Any) -> Any:
        """Hook: a value made by an expression."""
        return self.budget.make(value)

    def emitted(self, value: Any) -> str:
        """Hook: a value that is written."""
        return self.budget.emit(value)

    def counted(self, values: Any) -> Iterator[Any]:
        """Hook: what a for loop goes through; the deadline is checked at every item."""
        for value in values:
            self.budget.tick()
            yield value

    def is_safe_callable(self, obj: Any) -> bool:
        """Macros, loop methods, the globals, our hooks, and methods of the list above; nothing else."""
        owner = getattr(obj, "__self__", None)
        if owner is self or isinstance(obj, (Macro, LoopContext)) or isinstance(owner, LoopContext):
            return True
        if type(owner) in _METHODS:
            return getattr(obj, "__name__", "") in _METHODS[type(owner)]
        return any(obj is known for known in self.globals.values())

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        """Every call in a template comes here."""
        __self.budget.tick()
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        if type(owner) in _METHODS:
            plain = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
            _check_arguments(__obj.__name__, (owner, *args), plain)
        value = super().call(__context, __obj, *args, **kwargs)
        return value if isinstance(value, Namespace) else __self.budget.make(value, deep=isinstance(owner, str))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every arithmetic operator comes here; the size of the result is known before it is made."""
        if operator == "%" and isinstance(left, str):
            if _WIDE_FORMAT.search(left):
                raise LimitError("a width in a % format may have 3 digits")
            _expect(weigh(left) * 4 + weigh(right) * (left.count("%") + 1))
        elif operator == "+":
            _expect(weigh(left) + weigh(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and _bits(left) * (abs(right) if isinstance(right, int) else 1) > MAX_INT_BITS:
            raise LimitError(f"a number may have {MAX_INT_BITS} bits")
        return self.budget.make(super().call_binop(context, operator, left, right))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_product(left: Any, right: Any) -> None:
    if _bits(left) + _bits(right) > MAX_INT_BITS:
        raise LimitError(f"a number may have {MAX_INT_BITS} bits")
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            _expect(weigh(sequence) * max(times, 0))

