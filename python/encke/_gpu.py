"""Passes on GPU tensors: torch allocates the results, and the extension enqueues the kernels.

The decision here: sinks are applied to the results of a pass, by a kernel of their own on the GPU,
as the library applies them on the host; the backward kernels need only the new out and lse.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from torch import Tensor

from encke import _cuda, _encke
from encke._gpu_mixing import GpuMixing, add_terms
from encke._readable import copied, is_empty, nothing, sinks_of_nothing
from encke.options import Options, find

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


_empty_like = torch.empty_like


def computed_in(q: Tensor, precision: Optional[str]) -> torch.dtype:
    """The type in which a call computes, and in which it returns."""
    if precision is None:
        return q.dtype
    short = precision.removeprefix("torch.")
    return _DTYPES.get(short) or getattr(torch, short)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and of the lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def outputs(q: Tensor, v: Tensor, precision: Optional[str]) -> tuple[Tensor, Tensor]:
    """Uninitialised out and lse."""
    cells = q.shape[:3]
    # Twice as fast as by a type and a device, where it is the same.
    if precision is None and q.is_contiguous() and v.shape[3] == q.shape[3]:
        out = _empty_like(q)
    else:
        out = q.new_empty((*cells, v.shape[3]), dtype=computed_in(q, precision))
    return out, q.new_empty(cells, dtype=summed_in(out.dtype))


def gradients(q: Tensor, k: Tensor, v: Tensor, precision: Optional[str]) -> list[Tensor]:
    """Uninitialised dq, dk and dv."""
    if precision is None and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return [_empty_like(q), _empty_like(k), _empty_like(v)]
    dtype = computed_in(q, precision)
    return [x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)]


def forward(
    found: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor] = None
) -> tuple[Any, ...]:
    """out and lse of all ranks on one GPU, and two None where the cpu has results by slot."""
    try:
        return _forward(found, q, k, v, sinks)
    except ValueError as error:
        if is_empty(q, k, v):
            of = None if sinks is None else sinks.tolist()
            return *nothing(q, v, of, found.precision), None, None
        copies = copied(error, q, k, v)
    return _forward(found, *copies, sinks)


def _forward(
    found: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor]
) -> tuple[Any, ...]:
    if sinks is not None and found.splits_slots:
        raise ValueError(
            "sinks and branches with a softmax of their own (detached mixing, fkodom) do not go "
            'together: a sink belongs to one softmax; use mixing_gradient="exact"'
        )
    if found.mixes:
        results = _mixing(found).forward(q, k, v)
    else:
        results = _attend(found, q, k, v)
    if sinks is not None:
        with_sinks(*results, sinks)
    return *results, None, None


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
    try:
        return _backward(found, q, k, v, saved, dout, dlse, sinks)
    except ValueError as error:
        if is_empty(q, k, v):
            of = None if sinks is None else sinks.tolist()
            of = sinks_of_nothing(dlse, of)
            dsinks = None if sinks is None else sinks.new_tensor(of)
            return *(torch.zeros_like(x) for x in (q, k, v)), dsinks
        q, k, v, dout, dlse, *saved = copied(error, q, k, v, dout, dlse, *saved)
    return _backward(found, q, k, v, saved, dout, dlse, sinks)


def _backward(
    found: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Any,
    dout: Tensor,
    dlse: Optional[Tensor],
    sinks: Optional[Tensor],
) -> tuple[Any, ...]:
    out, lse = saved[:2]
    if out is None:
        out, lse, _, _ = forward(found, q, k, v, sinks)
    if found.mixes:
        every = _mixing(found).backward(q, k, v, out, lse, dout, dlse)
    else:
        every = _differentiate(found, q, k, v, out, lse, dout, dlse)
    if sinks is None:
        return *every, None
    return *every, sink_gradient(sinks, out, lse, dout, dlse)


def _attend(
    found: Any, q: Tensor, k: Tensor, v: Tensor, clears: bool = True
) -> tuple[Tensor, Tensor]:
    """out and lse of one call of the kernels; rows that no head selects are 0 if it clears."""
    _cuda.prepare()
    out, lse = outputs(q, v, found.precision)
    _enqueue(found, (q, k, v), (out, lse), clears)
    return out, lse


def _differentiate(found: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """dq, dk and dv of one call of the kernels."""
    every = gradients(q, k, v, found.precision)
    _enqueue(found, (q, k, v, *rest), every)
    return every


def _enqueue(found: Any, inputs: Any, results: Any, clears: bool = True) -> None:
    """Calls the kernels on the current stream of the tensors' GPU."""
    gpu = inputs[0].get_device()
    stream = _cuda.current_stream(gpu)
    if _current_device() == gpu:
        _encke.enqueue(found, inputs, results, stream, clears)
        return
    with torch.cuda.device(gpu):
        _encke.enqueue(found, inputs, results, stream, clears)


# A tensor is on a GPU, so torch has started CUDA: without the function that sees to it.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class OneProcess:
    """Attention on a GPU, as :class:`GpuMixing` takes it."""

    def __init__(self, options: Options) -> None:
        # What is around the calls of the kernels is not their part.
        self._found = find(tuple(options._replace(padding=None)))
        self._padded = find(tuple(options))
        self._deltas_travel = (
            options.bits != "planned" or options.queries != "sharded" or options.redundancy > 0
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, clears: bool = True
    ) -> tuple[Tensor, Tensor]:
        """out and lse, without extra terms."""
        return _attend(self._found, q, k, v, clears)

    def differentiate(self, *inputs: Any) -> list[Tensor]:
        """dq, dk and dv."""
        return _differentiate(self._found, *inputs)

    def takes_deltas(self, q: Tensor, k: Tensor) -> bool:
        """Whether one call can differentiate all branches, given the delta of each."""
        return not self._deltas_travel and q.shape[1] == k.shape[1] and not self._found.precision

    def new_deltas(self, lse: Tensor) -> Tensor:
        """Uninitialised deltas of branches."""
        return lse.new_empty((*lse.shape[:2], self._found.delta_slots(lse.shape[2])))

    def add_delta(self, branch: int, deltas: tuple[Optional[Tensor], ...], own: Any) -> None:
        """Computes the delta of a branch, from what it alone computes or what the others left."""
        stream = _cuda.current_stream(deltas[2].get_device())
        _encke.add_delta(self._found, branch, deltas, own, stream)

    def phantoms(self, q: Tensor, k: Tensor, v: Tensor) -> Optional[bytes]:
        """The logarithms of the phantom keys."""
        sizes = (*k.shape[:2], q.shape[2], *k.shape[2:], q.shape[1], v.shape[3])
        return self._padded.phantoms(sizes)


@functools.lru_cache(maxsize=64)
def _mixing(found: Any) -> GpuMixing:
    return GpuMixing(Options(**found.options), OneProcess)


def with_sinks(out: Tensor, lse: Tensor, sinks: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse with a sink for each head, in place."""
    if sinks is not None:
        add_terms(out, lse, sinks.detach().to(lse).view(1, 1, -1))
    return out, lse


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
