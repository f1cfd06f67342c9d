"""Ring attention as custom operators, for torch.compile.

A graph holds no process groups, so a group is passed by its registered name, as in torch's
functional collectives; "" is the default group. The rows of each rank, agreed on in the forward
pass, are saved as a tensor for the backward pass, which does not agree again.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from encke._ring import Request, agreed, ring_of
from encke._torch import _computed_in, _without_none, fake_outputs
from encke._wire import wire_of
from encke.options import Options, find

# The options of a ring over processes, in the order of the schema.
_FIELDS = (
    "segment_lengths",
    "dilation_rates",
    "mode",
    "group_scale",
    "offsets",
    "mixing_gradient",
    "causal",
    "scale",
    "sharding",
    "precision",
    "checkpoint",
)
_REQUEST = """str group, int[]? segment_lengths, int[]? dilation_rates, str mode, str? group_scale,
    str? offsets, str? mixing_gradient, bool causal, float? scale, str sharding, str? precision,
    str checkpoint, int[]? sizes, bool grad, bool return_lse"""


def as_operator(
    q: Tensor, k: Tensor, v: Tensor, group: Optional[dist.ProcessGroup], request: Request
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows, as one operator of the graph."""
    name = "" if group is None else group.group_name
    options, *rest = request
    flat = [getattr(options, field) for field in _FIELDS]
    out, lse, *_ = _operator(q, k, v, name, *flat, *rest)
    return out, lse


def _group(name: str) -> Optional[dist.ProcessGroup]:
    return torch._C._distributed_c10d._resolve_process_group(name) if name else None


def _request(flat: tuple[Any, ...]) -> Request:
    """The request of an operator's arguments; torch passes sequences as lists."""
    values = [tuple(x) if isinstance(x, (list, tuple)) else x for x in flat]
    options = Options(**dict(zip(_FIELDS, values)))
    return Request(options, *values[len(_FIELDS) :])


def _fake_attention(request: Request) -> Any:
    """An attention for the shapes of the results, which do not depend on the sharding."""
    return find(request.options._replace(sharding="contiguous"))


def _forward(q: Tensor, k: Tensor, v: Tensor, group: str, *flat: Any) -> tuple[Tensor, ...]:
    ring = agreed(wire_of(_group(group)), (q, k, v), _request(flat))
    return (*_without_none(*ring.forward(q, k, v)), torch.tensor(ring.sizes))


_operator = torch.library.custom_op(
    "encke::ring_attention",
    _forward,
    mutates_args=(),
    schema=f"""(Tensor q, Tensor k, Tensor v,
        {_REQUEST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)""",
)


@_operator.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, group: str, *flat: Any) -> tuple[Tensor, ...]:
    ranks = dist.get_world_size(_group(group))
    sizes = torch.empty(ranks, dtype=torch.int64)
    return (*fake_outputs(_fake_attention(_request(flat)), q), sizes)


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
    schema=f"""(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor slot_out,
        Tensor slot_lse, Tensor sizes, Tensor dout, Tensor? dlse,
        {_REQUEST}) -> (Tensor, Tensor, Tensor)""",
)


@_backward_operator.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype = _computed_in(q, _fake_attention(_request(rest[8:])).precision)
    return tuple(x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *flat = inputs
    out, lse, slot_out, slot_lse, sizes = output
    ctx.flat = tuple(flat)
    request = _request(ctx.flat[1:])
    ctx.with_lse = request.return_lse
    if request.options.checkpoint == "recompute":
        out, lse = out.new_empty(0), lse.new_empty(0)
    ctx.save_for_backward(q, k, v, out, lse, slot_out, slot_lse, sizes)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, *_: Any) -> tuple[Any, ...]:
    # As in eager mode, whether the lse has a gradient depends on the agreed request.
    given = (dout, dlse if ctx.with_lse else None)
    gradients = _backward_operator(*ctx.saved_tensors, *given, *ctx.flat)
    inputs = ctx.saved_tensors[:3]
    converted = (gradient.to(x.dtype) for gradient, x in zip(gradients, inputs))
    return *converted, *(None,) * len(ctx.flat)


torch.library.register_autograd("encke::ring_attention", _differentiate, setup_context=_setup)
