"""Ring attention as operators of torch: what torch.compile keeps in its graph.

A graph holds no process groups, so a group is known by the name torch has registered it under, as its own
functional collectives do; "" is that of all processes. What the ranks have agreed on in the forward pass
comes to the backward pass as a tensor of how many rows each has: nobody is asked twice.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from encke._ring import Request, agreed, ring_of
from encke._torch import _computed_in, _summed_in
from encke._wire import wire_of
from encke.options import find

_REQUEST = """str group, int[]? segment_lengths, int[]? dilation_rates, str mode, str? group_scale,
    str? offsets, str? mixing_gradient, bool causal, float? scale, str sharding, str? precision,
    str checkpoint, int[]? sizes, bool grad, bool return_lse"""


def as_operator(
    q: Tensor, k: Tensor, v: Tensor, group: Optional[dist.ProcessGroup], request: Request
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows, as one operator of a graph."""
    name = "" if group is None else group.group_name
    out, lse, *_ = _operator(q, k, v, name, *request)
    return out, lse


def _group(name: str) -> Optional[dist.ProcessGroup]:
    return torch._C._distributed_c10d._resolve_process_group(name) if name else None


def _request(flat: tuple[Any, ...]) -> Request:
    """What an operator's arguments ask for; they come as lists."""
    return Request(*(tuple(x) if isinstance(x, (list, tuple)) else x for x in flat))


def _forward(q: Tensor, k: Tensor, v: Tensor, group: str, *flat: Any) -> tuple[Tensor, ...]:
    ring = agreed(wire_of(_group(group)), (q, k, v), _request(flat))
    out, lse, slot_out, slot_lse = ring.forward(q, k, v)
    if slot_out is None:
        slot_out, slot_lse = out.new_empty(0), lse.new_empty(0)
    return out, lse, slot_out, slot_lse, torch.tensor(ring.sizes)


_operator = torch.library.custom_op(
    "encke::ring_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_REQUEST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_operator.register_fake
def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, group: str, *flat: Any
) -> tuple[Tensor, ...]:
    request = _request(flat)
    # Whose rows these are makes no difference to the shapes.
    found = find(request.options()._replace(sharding="contiguous"))
    dtype = _computed_in(q, found.precision)
    sums = _summed_in(dtype)
    batch, rows, heads, dim = q.shape
    out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:3], dtype=sums)
    slot_out, slot_lse = out.new_empty(0), lse.new_empty(0)
    if found.splits_slots:
        by_slot = (batch, rows, found.slots(int(heads)))
        slot_out = q.new_empty((*by_slot, dim), dtype=sums)
        slot_lse = q.new_empty(by_slot, dtype=sums)
    ranks = dist.get_world_size(_group(group))
    return out, lse, slot_out, slot_lse, torch.empty(ranks, dtype=torch.int64)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slot_out: Tensor,
    slot_lse: Tensor,
    sizes: Tensor,
    dout: Tensor,
    dlse: Optional[Tensor],
    group: str,
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    request, wire = _request(flat), wire_of(_group(group))
    ring = ring_of(wire, (q, k, v), request, tuple(sizes.tolist()))
    saved: list[Optional[Tensor]] = [out, lse, slot_out, slot_lse]
    if ring.shard.recomputes:
        saved = [None] * 4
    elif ring.shard.splits_slots:
        saved[0] = None
    else:
        saved[2:] = [None, None]
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = ring.backward(q, k, v, *saved, dout=dout.contiguous(), dlse=dlse)
    return dq, dk, dv


_backward_operator = torch.library.custom_op(
    "encke::ring_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"""(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor slot_out, Tensor slot_lse,
        Tensor sizes, Tensor dout, Tensor? dlse, {_REQUEST}) -> (Tensor, Tensor, Tensor)""",
)


@_backward_operator.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    request = _request(rest[8:])
    dtype = _computed_in(q, find(request.options()._replace(sharding="contiguous")).precision)
    return tuple(x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *flat = inputs
    out, lse, slot_out, slot_lse, sizes = output
    ctx.flat = tuple(flat)
    request = _request(ctx.flat[1:])
    ctx.with_lse = request.return_lse
    if request.checkpoint == "recompute":
        out, lse = out.new_empty(0), lse.new_empty(0)
    ctx.save_for_backward(q, k, v, out, lse, slot_out, slot_lse, sizes)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, *_: Any) -> tuple[Any, ...]:
    # Whether the lse has a gradient is decided by what all ranks have agreed on, as without a graph.
    given = (dout, dlse if ctx.with_lse else None)
    gradients = _backward_operator(*ctx.saved_tensors, *given, *ctx.flat)
    inputs = ctx.saved_tensors[:3]
    kept = (gradient.to(x.dtype) for gradient, x in zip(gradients, inputs))
    return *kept, *(None,) * len(ctx.flat)


torch.library.register_autograd("encke::ring_attention", _differentiate, setup_context=_setup)
