"""Which sums over ranks are made in bands of tokens, beside the product that makes their parts."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backend import Group
from graphrt.backends.triton.kernels.products.fusions import is_product
from graphrt.fusion import Nodes
from graphrt.ops.overlap import Bands
from graphrt.tensor import Tensor


def why_not_by_bands(product: Tensor) -> str | None:
    """Why a MUL_MAT is not made band by band, None if it is."""
    return None if is_product(product) else "it takes one matrix of weights, and rows of f32 without gaps"


#: A sum over NCCL has two calls and a launch, some 30 us however small it is, in which a link of 300 GB/s carries 8 MB;
#: of whole tiles of the vendor's product, which have up to 256 tokens.
BANDS = Bands(8 << 20, 256, why_not_by_bands)


def overlapped_sums(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT, ADD of a bias if there is one, and the ALL_REDUCE of that over ranks, of many tokens, where bands are
    asked for."""
    return BANDS.sums(nodes)
