"""What was decided for an attention's gradients, in words and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

from graphrt.backends.triton.kernels.flash_attn.backward.forms import FORMS
from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackChosen
from graphrt.program import Fact

_FORMS = {
    "split": "of q by one launch, of k and v by another, without atomics",
    "fused-q": "one launch, programs own queries and add to the gradients of k and v in memory, by atomics",
    "fused-k": "one launch, programs own keys and add to the gradient of q in memory",
}


def gradient_facts(chosen: BackChosen) -> Iterator[Fact]:
    """Pairs of what it is of and a sentence."""
    p = chosen.problem
    others = ", ".join(form for form in FORMS if form != chosen.form)
    yield "form", f"{chosen.form}: {_FORMS[chosen.form]} (the backend's option `backward` takes {others} too)"
    for kernel in chosen.kernels:
        yield "kernel", f"{kernel.name} (kernels/flash_attn/{kernel.file}), for {', '.join(kernel.of)}: {kernel.tiles}"
    for name, reason in chosen.refused.items():
        yield "why", f"not {name}: {reason}"
    scaled = ", d_out and dS scaled by powers of two, found anew in each run" if p.kind == "f16" else ""
    yield "products", f"in {p.kind}, as k and v suggest{scaled}"
    score = getattr(p.params, "score", "")
    if score:
        yield "score", f"{score}: compiled into the kernels with its derivative"
    if p.dropout_p:
        yield "dropout", f"{p.dropout_p:g} of the weights, drawn again by sequence, head, query and key"
    mixed = [of for kernel in chosen.kernels for of in kernel.unordered]
    again = f"all but those of {' and '.join(mixed)}, whose sums have no order" if mixed else "all of them"
    yield "repeatable", f"{again}: the same inputs give the same bits"


def _config(config: object) -> dict[str, Any] | None:
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else None


def gradient_data(chosen: BackChosen) -> dict[str, Any]:
    """The same for machines."""
    return {
        "form": chosen.form, "products": chosen.problem.kind, "refused": dict(chosen.refused),
        "kernels": [
            {
                "name": kernel.name, "file": kernel.file, "of": list(kernel.of), "tiles": kernel.tiles,
                "repeatable": kernel.repeatable,
                "config": _config(kernel.config),
            }
            for kernel in chosen.kernels
        ],
    }  # fmt: skip
