"""gradients(): the derivatives of a loss as nodes of the same graph, by the rules that hang on the ops."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import op_spec
from graphrt.ops.copy import cont
from graphrt.ops.elementwise import add, fill
from graphrt.ops.recompute import Again, chosen, post_order
from graphrt.tensor import MAX_NAME, Tensor


def _dependent(order: Sequence[Tensor], wrt: Sequence[Tensor]) -> set[Tensor]:
    """The tensors whose values depend on one of `wrt`, those included; integers don't, nor what takes only a shape."""
    found = set(wrt)
    for node in order:
        if node.dtype.kind != "int" and node.op != "FILL" and any(s in found for s in node.sources()):
            found.add(node)
    return found


def _named(t: Tensor) -> str:
    return f"{t.name or 'a tensor'} ({t.describe()})"


def _check(loss: Tensor, wrt: Sequence[Tensor], d_loss: Tensor | None) -> None:
    if loss.dtype.name != "f32":
        raise GraphError(f"gradients are taken of f32, got {_named(loss)}; convert it with ops.cpy")
    if d_loss is None and loss.n_elements != 1:
        raise GraphError(
            f"a loss is one number, got {_named(loss)}; add it up with ops.sum_rows, or give d_loss, its gradient"
        )
    if d_loss is not None and (d_loss.dtype.name != "f32" or d_loss.ne != loss.ne):
        raise GraphError(f"d_loss must be f32 in the loss's shape {loss.describe()}, got {_named(d_loss)}")
    for t in wrt:
        if t.dtype.kind != "float":
            raise GraphError(f"gradients are of tensors of a plain float type, got {_named(t)}; leave it out of wrt")


@checked(GraphError)
def gradients(
    loss: Tensor, wrt: Sequence[Tensor], *, d_loss: Tensor | None = None, recompute: int | None = None
) -> list[Tensor]:
    """The gradient of `loss` by each tensor of `wrt`, in their order: nodes, to be put into a Graph with the loss.

    loss: f32 of one element, or of any shape with d_loss; wrt: leafs or nodes that the loss is made of, of a plain
    float type; d_loss: f32 in the loss's shape, the gradient of something by the loss, 1 if it is left out; recompute:
    the bytes that the results of forward and backward may take at once: parts of the forward are computed again in the
    backward instead of being kept, as few of them as fit; None keeps all that the backward reads. A gradient is f32,
    contiguous, and has its tensor's shape; it is called "grad for NAME", as in ggml. graphrt.ops.recompute's
    training_graph() puts loss and gradients in the order that needs the least memory, for which recompute counts.
    Raises GraphError for other types and shapes, for a tensor that the loss does not depend on, for a limit that
    nothing fits in, and, naming it, for an op on the way that has no gradient.
    """
    wrt = list(wrt)
    _check(loss, wrt, d_loss)
    order = post_order(loss)
    if recompute is None:
        return _built(order, (), loss, wrt, d_loss)
    return chosen(order, recompute, loss, lambda starts: _built(order, starts, loss, wrt, d_loss))


def _built(
    order: Sequence[Tensor], starts: Sequence[int], loss: Tensor, wrt: Sequence[Tensor], d_loss: Tensor | None
) -> list[Tensor]:
    """The gradients; starts: where segments begin that are computed again, see recompute.py."""
    dependent, again = _dependent(order, wrt), Again(order, starts)
    of: dict[Tensor, Tensor] = {loss: d_loss if d_loss is not None else fill(loss, 1.0)}
    for node in reversed(order):
        d = of.get(node)
        if d is not None and node in dependent:
            _through(node, again.of(node), d, dependent, of)
    missing = next((t for t in wrt if t not in of), None)
    if missing is not None:
        raise GraphError(f"the loss must depend on what its gradient is of, it does not on {_named(missing)}")
    return [_finished(of[t], t) for t in wrt]


def _through(node: Tensor, twin: Tensor, d: Tensor, dependent: set[Tensor], of: dict[Tensor, Tensor]) -> None:
    """Adds the gradients of a node's sources to `of`. twin: the node whose values the backward reads."""
    by_name = node.sources_by_name()
    wanted = frozenset(name for name, s in by_name.items() if s in dependent)
    if not wanted:
        return
    rule = op_spec(node.op).backward
    if isinstance(rule, str):
        names = ", ".join(sorted(wanted))
        raise GraphError(
            f"every op from the loss to wrt must have a gradient: {rule}; {_named(node)} has wrt in {names}"
        )
    for name, found in rule(twin, d, wanted).items():
        source = by_name[name]
        if source in dependent:
            of[source] = add(of[source], found) if source in of else found


def _finished(d: Tensor, t: Tensor) -> Tensor:
    """A gradient that nobody else has as his: a node of its own that is contiguous."""
    made = d if not d.is_leaf and d.view_src is None and d.is_contiguous and not d.name else cont(d)
    return made.named(f"grad for {t.name}"[: MAX_NAME - 1])
