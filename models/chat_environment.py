"""A Jinja environment in which no template can take much time or memory, or reach anything but its variables.

A chat template comes with a model file, so it may be hostile. Jinja's sandbox keeps it from Python's internals, but
not from `range(99999)` inside `range(99999)` or 'a' * 10**9. Here every step is counted: before compiling, the
template's syntax tree is rewritten so that loops, literals, `~`, comparisons, slices and output pass through the
environment; calls, filters, tests and operators do so already. Each of them checks the deadline and the size of what
it is about to make, and only filters and methods whose result can be bounded beforehand are let in. So one step is
short, and the steps end at the deadline. What that overlooks, the limits of the process end (chat_child).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from graphrt.models.chat_arguments import check_arguments, check_format, check_percent
from graphrt.models.chat_limits import (
    MAX_NODES,
    Budget,
    LimitError,
    check_power,
    check_product,
    expect,
    weigh,
    weigh_each,
)

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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: no HTML escapes, keys in order of insertion."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's words for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS = ["jinja2.ext.loopcontrols", _Generation]


class _Format:
    """A bound str.format."""

    def __init__(self, form: str, function: Callable[..., str]) -> None:
        self._form, self._function = form, function

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        check_format(self._form, (*args, *kwargs.values()))
        return self._function(*args, **kwargs)


class _Instrument(NodeTransformer):
    """Sends what the sandbox does not see through the environment's hooks."""

    def _hook(self, name: str, *args: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=args[0].lineno)

    def _made(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return self._hook("made", node)

    visit_List = visit_Dict = _made

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._compared(node.expr)
        for operand in node.ops:
            operand.expr = self._compared(operand.expr)
        return node

    def _compared(self, node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else self._hook("compared", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._hook("concatenated", *map(_as_expression, node.nodes))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._hook("made", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._hook("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._hook("counted", _as_expression(node.iter))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [self._hook("emitted", _as_expression(child)) for child in node.nodes]
        return node


def _as_expression(node: Any) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData):
        return nodes.Const(node.data, lineno=node.lineno)
    assert isinstance(node, nodes.Expr)
    return node


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits. Set `budget` before each rendering; one rendering at a time."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        # no constant folding: it would evaluate filters while compiling, outside any budget
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS, optimized=False)
        self.budget = Budget(0.0)
        self.filters = {name: self._guarded(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = self._guarded("tojson", _tojson)
        self.tests = {name: self._guarded_test(test) for name, test in self.tests.items()}
        self.globals = {"range": self.globals["range"], "namespace": Namespace, "dict": dict}

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks its arguments and counts its result. A context that Jinja passes is skipped."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check_arguments(name, args[skipped:], kwargs)
            value = function(*args, **kwargs)
            if isinstance(value, Iterator):
                return self.budget.drain(value)
            return self.budget.make(value, deep=isinstance(args[skipped], str))

        return checked

    def _guarded_test(self, function: Any) -> Callable[..., Any]:
        """A test that takes its time from the budget; filters like select run many."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            weigh_each((*args[skipped:], *kwargs.values()))
            return function(*args, **kwargs)

        return checked

    def instrumented(self, source: str) -> nodes.Template:
        """The template's syntax tree with the hooks put in. Raises TemplateSyntaxError, LimitError."""
        parsed = self.parse(source)
        count = sum(1 for _ in parsed.find_all(nodes.Node))
        if count > MAX_NODES:
            raise LimitError(f"it may have {MAX_NODES} expressions and statements, and has {count}")
        tree: nodes.Template = _Instrument().visit(parsed)
        return tree.set_environment(self)  # type: ignore[return-value]

    def made(self, value: Any) -> Any:
        """Hook: a value made by an expression."""
        return self.budget.make(value)

    def compared(self, value: Any) -> Any:
        """Hook: what is about to be compared."""
        self.budget.tick()
        weigh_each((value,))
        return value

    def emitted(self, value: Any) -> str:
        """Hook: a value that is written."""
        return self.budget.emit(value)

    def concatenated(self, *values: Any) -> str:
        """Hook: the operator ~."""
        expect(sum(map(weigh, values)))
        text: str = self.budget.make("".join(map(str, values)))
        return text

    def counted(self, values: Any) -> Iterator[Any]:
        """Hook: what a for loop goes through; the deadline is checked at every item."""
        for value in values:
            self.budget.tick()
            yield value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Every obj[argument], and each step of an attribute's path that a filter is given."""
        self.budget.tick()
        weigh(argument)  # it is hashed or compared
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> _Format | None:
        """str.format, which the sandbox makes safe, made small as well."""
        function = super().wrap_str_format(value)
        return None if function is None else _Format(value.__self__, function)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """An attribute that the sandbox hides: an error at once, where Jinja gives an undefined that prints as ""."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} may not be used")

    def is_safe_callable(self, obj: Any) -> bool:
        """Macros, loop methods, the globals, our hooks, and methods of the list above; nothing else."""
        owner = getattr(obj, "__self__", None)
        if owner is self or isinstance(obj, (Macro, LoopContext, _Format)) or isinstance(owner, LoopContext):
            return True
        if type(owner) in _METHODS:
            return getattr(obj, "__name__", "") in _METHODS[type(owner)]
        return any(obj is known for known in self.globals.values())

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes here."""
        __self.budget.tick()
        if not __self.is_safe_callable(__obj):
            # Jinja's message would hold the repr of the object, of any length
            raise SecurityError(f"{getattr(__obj, '__name__', type(__obj).__name__)} may not be called")
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        plain = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
        weigh_each((*args, *plain.values()))
        if type(owner) in _METHODS:
            check_arguments(__obj.__name__, (owner, *args), plain)
        value = super().call(__context, __obj, *args, **kwargs)
        return value if isinstance(value, Namespace) else __self.budget.make(value, deep=isinstance(owner, str))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every arithmetic operator comes here; the size of the result is known before it is made."""
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
        elif operator == "+":
            expect(weigh(left) + weigh(right))
        elif operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        return self.budget.make(super().call_binop(context, operator, left, right))
