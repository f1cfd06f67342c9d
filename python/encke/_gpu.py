"""Passes on GPU tensors: torch allocates the results, and the extension enqueues the kernels.

The decision here: sinks are applied to the results of a pass, with torch's own operations on the
GPU, as the library applies them on the host; the backward kernels need only the new out and lse.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from encke import _cuda, _encke

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


def computed_in(q: Tensor, precision: Optional[str]) -> torch.dtype:
    """The type in which a call computes, and in which it returns."""
    return q.dtype if precision is None else _DTYPES[precision]


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and of the lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def outputs(q: Tensor, v: Tensor, precision: Optional[str]) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse."""
    dtype, cells = computed_in(q, precision), q.shape[:3]
    out = torch.empty((*cells, v.shape[3]), dtype=dtype, device=q.device)
    return out, torch.empty(cells, dtype=summed_in(dtype), device=q.device)


def gradients(q: Tensor, k: Tensor, v: Tensor, precision: Optional[str]) -> list[Tensor]:
    """Uninitialised dq, dk and dv."""
    dtype = computed_in(q, precision)
    return [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v)]


def forward(
    found: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor] = None
) -> tuple[Any, ...]:
    """out and lse of all ranks on one GPU, and two None where the cpu has results by slot."""
    _cuda.prepare()
    with torch.cuda.device(q.device):
        out, lse = outputs(q, v, found.precision)
        stream = torch.cuda.current_stream().cuda_stream
        _encke.enqueue(found, (q, k, v), (out, lse), stream)
        return *with_sinks(out, lse, sinks), None, None


def backward(
    found: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: tuple[Any, ...],
    dout: Tensor,
    dlse: Optional[Tensor],
    sinks: Optional[Tensor] = None,
) -> tuple[Any, ...]:
    """dq, dk, dv and, with sinks, their gradient; ``saved`` begins with out and lse, or None."""
    out, lse = saved[:2]
    if out is None:
        out, lse, _, _ = forward(found, q, k, v, sinks)
    with torch.cuda.device(q.device):
        every = gradients(q, k, v, found.precision)
        stream = torch.cuda.current_stream().cuda_stream
        _encke.enqueue(found, (q, k, v, out, lse, dout, dlse), every, stream)
        return *every, sink_gradient(sinks, out, lse, dout, dlse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse with a sink for each head: out shrinks, lse grows. A row that sees no key keeps
    out = 0 and gets the sink as its lse."""
    if sinks is None:
        return out, lse
    grown = torch.logaddexp(lse, sinks.detach().to(lse))
    factor = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - grown))
    return (out * factor.unsqueeze(-1)).to(out.dtype), grown


def sink_gradient(
    sinks: Optional[Tensor], out: Tensor, lse: Tensor, dout: Tensor, dlse: Optional[Tensor]
) -> Optional[Tensor]:
    """-sum of exp(sink - lse) (dout.out - dlse) over all rows of a head; out and lse with sinks."""
    if sinks is None:
        return None
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    own = sinks.detach().to(lse)
    share = torch.where(own == -torch.inf, 0.0, torch.exp(own - lse))
    return -(share * delta).sum((0, 1)).to(sinks)
