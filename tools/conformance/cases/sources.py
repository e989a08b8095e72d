"""Where cases come from: the ops' own sets, a model's graphs, or a file; and which of them a command line picks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphrt import ops  # noqa: F401  (registers every op)
from graphrt.backend import Backend, get_backend
from graphrt.errors import BackendError, GraphError
from graphrt.op import registered_ops
from graphrt.testing import Case, all_cases

#: Names for forms of backends that are not exact, with options: the CPU's native kernels, which round activations to 16
#: bits or (`--fast`) to 8, and the GPU's, which round some to 8.
FAST: dict[str, tuple[str, dict[str, int]]] = {
    "cpu-fast": ("cpu", {}), "cpu-int8": ("cpu", {"activation_bits": 8}), "triton-fast": ("triton", {})
}  # fmt: skip
#: Names for forms of attention's gradients, and of flash decoding, that are not the default, all else being exact.
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    f"triton-{form}": ("triton", {"backward": form}) for form in ("fused-q", "fused-k")
} | {
    f"triton-{form}": ("triton", {"schedule": form})
    for form in ("partial-wait", "partial-two", "global-wait", "global-two")
}  # fmt: skip
SETS = ("quick", "full", "ggml", "broken")


@dataclass(frozen=True)
class Source:
    """One place that cases come from. which: one of SETS: the ops' own cases, or "broken" for products with NaN and
    infinities in them, "grad" for those of `graphrt test grad`. It counts where none of the others is given: model, a
    model's file; file, a text file; module, a module that has a function cases(); graphs, a number of random graphs."""

    which: str = "quick"
    model: str | None = None
    file: str | None = None
    module: str | None = None
    graphs: int = 0

    def cases(self) -> Iterator[Case]:
        """Every case, each under its own string."""
        if self.module is not None:
            yield from _import(self.module, "a module of cases").cases()
        elif self.model is not None:
            from graphrt.tools.conformance.cases.model import model_cases

            yield from model_cases(Path(self.model))
        elif self.file is not None:
            from graphrt.tools.conformance.cases.test_file import file_cases

            yield from file_cases(Path(self.file))[0]
        elif self.graphs:
            from graphrt.tools.conformance.cases.graphs import graph_cases

            yield from graph_cases(self.graphs)
        elif self.which == "broken":
            from graphrt.tools.conformance.cases.fused import fused_cases

            yield from fused_cases()
        elif self.which == "grad":
            from graphrt.tools.conformance.run.grad import gradient_cases

            yield from gradient_cases()
        else:
            yield from all_cases(which=self.which)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def source_of(args: Any) -> Source:
    """What --set, --from-model, --test-file, --cases and --graphs ask for. Raises GraphError for two at once."""
    given = [str(x) for x in (args.from_model, args.test_file, args.cases, args.graphs) if x is not None]
    if len(given) > 1:
        raise GraphError(f"cases come from one place, got {' and '.join(given)}; give one of them")
    if args.graphs and args.mode != "test":
        raise GraphError(f"--graphs is for the mode test, got {args.mode}; leave one of them out")
    if args.mode == "grad":
        if given or args.set not in (None, "grad"):
            raise GraphError(
                "`graphrt test grad` has cases of its own, got another set or place of them; leave "
                "--set, --from-model, --test-file and --cases out"
            )
        return Source("grad")
    if args.set == "broken" and args.mode != "test":
        raise GraphError(f"--set broken is for the mode test, got {args.mode}; leave one of them out")
    model = args.from_model
    if model is not None:
        from graphrt.models import hub

        model = str(hub.resolve(model))
    return Source(args.set, model, args.test_file, args.cases, args.graphs or 0)


def pick(cases: Sequence[Case], op: str | None, params: str | None) -> list[Case]:
    """The cases that -o (an op's name, a whole case string, or a regex on the name) and -p (a regex on the parameters)
    leave. Raises GraphError for a bad regex, or when none is left."""
    found = list(cases)
    if op is not None:
        known = set(registered_ops()) | {c.op for c in found}
        exact = [c for c in found if str(c) == op]
        if exact:
            found = exact
        elif "(" in op and op.endswith(")") and op.partition("(")[0] in known:
            raise GraphError(
                f"a case must be in the set, there is no {op[:200]!r}; --list shows them, --set full has more"
            )
        elif op in known:
            found = [c for c in found if c.op == op]
        else:
            pattern = _regex(op, "-o")
            found = [c for c in found if pattern.fullmatch(c.op)]
    if params is not None:
        pattern = _regex(params, "-p")
        found = [c for c in found if pattern.search(str(c).partition("(")[2].removesuffix(")"))]
    if not found:
        raise GraphError(f"there must be a case to run, none fits -o {op or '.*'} -p {params or '.*'}; see --list")
    return found


def _regex(text: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise GraphError(
            f"{option} takes an op, a case or a regular expression, {text[:80]!r} is none: {error}"
        ) from None


def make_backend(name: str) -> Backend:
    """A backend by name ("triton:1" for its second device), or `module:Class` for one that isn't installed. FAST has
    names of backends' fast forms, FORMS of others."""
    base, colon, rest = name.partition(":")
    if base in FAST:
        plain, options = FAST[base]
        return get_backend(plain + colon + rest, exact=False, **options)
    if base in FORMS:
        plain, form = FORMS[base]
        return get_backend(plain + colon + rest, **form)
    if not colon or rest.isdecimal():
        return get_backend(name)
    module, _, attribute = name.partition(":")
    cls = getattr(_import(module, "a backend"), attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise BackendError(f"a backend as MODULE:CLASS must name a Backend subclass, {name!r} names {cls!r}")
    unusable = cls.unusable()
    if unusable is not None:
        raise BackendError(f"backend {name!r} can't be used here: {unusable}")
    return cls()


def _import(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError(f"{what} must be importable, {module!r} is not: {error}; check PYTHONPATH") from error
