"""A product and its sum over ranks in bands of tokens: NCCL has one band while the next is multiplied."""

from __future__ import annotations

from graphrt.backends.triton.beside import Begun, Joined, side_stream
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.collectives import sum_by_pieces
from graphrt.backends.triton.kernels.overlapped_fusions import overlapped_sums
from graphrt.backends.triton.kernels.products.bands import product_by_bands
from graphrt.backends.triton.kernels.products.plan import plan_of
from graphrt.fusion import Fusion
from graphrt.ops.overlap import OverlappedSum, described
from graphrt.program import Choice


def lower_overlapped(found: OverlappedSum, ctx: Context) -> list[Step]:
    """A band's sum begins when the band is multiplied; behind the last one all are waited for."""
    part, total = (ctx.view(t).torch()[0, 0] for t in (found.part, found.total))
    side, steps, begun = side_stream(ctx), list[Step](), list[Begun]()
    made = product_by_bands(plan_of(ctx).of(found.product), part, found.bands, ctx)
    for (start, stop), multiply in zip(found.bands, made, strict=True):
        sums = sum_by_pieces(part[start:stop].view(-1), total[start:stop].view(-1), found.total.params.ranks, ctx)
        begun.append(Begun(f"begin the sum of tokens {start} to {stop - 1}", side, sums))
        steps += [*multiply, begun[-1]]
    ctx.choices[found.product] = Choice("all_to_all and all_gather (NCCL)", [described(found.bands)])
    return [*steps, Joined(begun, ctx)]


OVERLAPPED_SUM = Fusion("overlapped_sum", overlapped_sums, lower_overlapped)
