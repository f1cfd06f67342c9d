"""What attention over processes promises, each as one call that can be compared.

The decision here: a promise is data (sizes, options, types), so that the list can be read, and one
piece of code runs all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor


class Promise(NamedTuple):
    """One call, and what must hold of it."""

    name: str
    #: Tokens of the whole sequence for each rank; ``extra`` more are left over.
    tokens: int = 32
    extra: int = 0
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    dim: int = 16
    #: The type of all tensors; None for that of the function, float32 unless it says otherwise.
    dtype: Optional[torch.dtype] = None
    options: dict[str, Any] = {}
    #: Options that are made for the number of tokens or heads.
    documents: Optional[tuple[float, ...]] = None
    sinks: bool = False
    #: Factor of q and k: scores grow with its square.
    size: float = 1.0
    gradients: bool = False
    #: Times the usual tolerance.
    slack: float = 1.0
    #: Calls one after the other, the last of which is compared.
    calls: int = 1
    #: The rank that starts late, and whether bits must repeat.
    late: Optional[int] = None
    bits: bool = False
    strided: bool = False



# The largest difference allowed, relative to the largest expected value. That of float16 is less
# than the rounding of bfloat16, which some rings return in its place.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1.5e-3,
    torch.bfloat16: 2.5e-2,
}
CAUSAL = dict(options=dict(causal=True))

PROMISES = [
    Promise("forward"),
    Promise("forward, causal", **CAUSAL),
    Promise("gradients", gradients=True),
    Promise("gradients, causal", gradients=True, **CAUSAL),
    Promise("a scale of one's own", options=dict(scale=0.4)),
    Promise("grouped heads", kv_heads=2, gradients=True, **CAUSAL),
    Promise("one key head", kv_heads=1, gradients=True, **CAUSAL),
    Promise("a head dimension of 24", dim=24, gradients=True),
    Promise("a length that the ranks do not divide", extra=1, gradients=True, **CAUSAL),
    Promise("large scores", size=12.0, gradients=True, slack=32.0, **CAUSAL),
    Promise("float64", dtype=torch.float64, gradients=True, **CAUSAL),
    Promise("float16", dtype=torch.float16, gradients=True, **CAUSAL),
    Promise("bfloat16", dtype=torch.bfloat16, gradients=True, **CAUSAL),
    Promise("strided inputs", strided=True, gradients=True, **CAUSAL),
    Promise("window", options=dict(causal=True, window=(9, 0)), gradients=True),
    Promise("window on both sides", options=dict(window=(5, 7)), gradients=True),
    Promise("window longer than a shard", options=dict(causal=True, window=(40, 0))),
    Promise("documents", documents=(0.1, 0.55, 0.35), gradients=True, **CAUSAL),
    Promise("documents, not causal", documents=(0.3, 0.7), gradients=True),
    Promise("sinks", sinks=True, gradients=True, **CAUSAL),
    Promise("many calls in a row", calls=6, gradients=True, **CAUSAL),
    Promise("the same bits twice", calls=2, bits=True, gradients=True, **CAUSAL),
    Promise("a slow first rank", late=0, gradients=True, **CAUSAL),
    Promise("a slow last rank", late=-1, gradients=True, **CAUSAL),
]


def definition(
    q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], options: dict[str, Any]
) -> Tensor:
    """Attention of a whole sequence by its definition, in the type of its inputs."""
    tokens, heads = q.shape[1], q.shape[2]
    shared = heads // k.shape[2]
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    scale = options.get("scale") or q.shape[3] ** -0.5
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    at = torch.arange(tokens, device=q.device)
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    if options.get("causal"):
        seen &= at <= at[:, None]
    left, right = options.get("window") or (None, None)
    if left is not None:
        seen &= at[:, None] - at <= left
    if right is not None:
        seen &= at - at[:, None] <= right
    if options.get("documents"):
        lengths = torch.tensor(options["documents"], device=q.device)
        number = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
        seen &= number == number[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(q.shape[0], -1, tokens, 1)
        scores = torch.cat([scores, column], -1)
    shares = torch.softmax(scores, -1)[..., :tokens]
    return torch.einsum("bhij,bjhd->bihd", shares, v)


__all__ = ["PROMISES", "TOLERANCES", "Promise", "definition"]
