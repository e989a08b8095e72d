"""The forms of attention's gradients, by name. Needs no Triton."""

from __future__ import annotations

from graphrt.errors import BackendError

#: split: of q by one launch, of k and v by another, without atomics, the same bits each time; it is the default.
#: fused-q: one launch for all three, a program owns queries; of k and v it adds up in memory by atomics, in any order,
#: so that the last bits differ from run to run. fused-k: one launch, a program owns keys; what it adds to the gradient
#: of q in memory waits for its turn, in the order of keys: the same bits each time. Hopper's kernel of that
#: form waits for nobody and adds in any order.
FORMS = ("split", "fused-q", "fused-k")


def check_form(form: str) -> str:
    """The form. Raises BackendError for one that is unknown."""
    if form not in FORMS:
        raise BackendError(f"a form of attention's gradients must be one of {', '.join(FORMS)}, got {form[:40]!r}")
    return form
