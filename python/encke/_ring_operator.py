"""Ring attention as custom operators, for torch.compile.

A graph holds no process groups, so a group is passed by its registered name, as in torch's
functional collectives; "" is the default group. The rows of each rank, agreed on in the forward
pass, and the number of queries, are saved as a tensor for the backward pass, which does not agree
again. Sinks, packings and
slopes are tensors of the graph, as in :mod:`encke._torch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from encke import _rules
from encke._observed import refuse_second_order, transformed
from encke._readable import readable
from encke._ring import Request, Ring, agreed, ring_of
from encke._torch import (
    MASK_OPTIONS,
    BatchMasks,
    MaskTensors,
    _as_tensors,
    _computed_in,
    _without_none,
    fake_dsinks,
    fake_outputs,
    flatten_masks,
    unflatten_masks,
)
from encke._wire import wire_of
from encke.options import Options, find

_TENSORS = "Tensor? sinks, Tensor? cu_seqlens, Tensor? slopes, Tensor? seed"
# The number of tensors, and of options of the mask.
_TENSOR_COUNT, _MASK_COUNT = _TENSORS.count(",") + 1, MASK_OPTIONS.count(",") + 1
# The options of a ring over processes, in the order of the schema; then those of the mask.
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
_MASK_FIELDS = Options._fields[Options._fields.index("window") :]
_REQUEST = """str group, int[]? segment_lengths, int[]? dilation_rates, str mode, str? group_scale,
    str? offsets, str? mixing_gradient, bool causal, float? scale, str sharding, str? precision,
    str checkpoint, MASK_OPTIONS, int[]? sizes, bool grad, bool return_lse, bool with_sinks,
    int? query_tokens"""
_REQUEST = _REQUEST.replace("MASK_OPTIONS", MASK_OPTIONS)


def as_operator(
    qkv: tuple[Tensor, Tensor, Tensor],
    given: BatchMasks,
    group: Optional[dist.ProcessGroup],
    request: Request,
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows, as one operator of the graph."""
    operator = _Transformed.apply if _is_transformed() else _operator
    out, lse, *_ = operator(*qkv, *_arguments(given, group, request))
    return out, lse


def backward_as_operator(
    ring: Ring,
    request: Request,
    saved: Sequence[Optional[Tensor]],
    dout: Tensor,
    dlse: Optional[Tensor],
) -> tuple[Optional[Tensor], ...]:
    """dq, dk, dv and the gradient of the sinks, where something looks at the backward pass that did
    not at the forward pass."""
    *tensors, sinks = saved
    options = request.options
    given = BatchMasks(
        sinks, options.documents, alibi_slopes=options.alibi_slopes, seed=options.seed
    )
    # The messages of all ranks match those of this request, also where only one rank is observed.
    request = request._replace(
        options=options._replace(documents=None, alibi_slopes=None, seed=None)
    )
    kept = [dout.new_empty(0) if x is None else x for x in tensors]
    arguments = _arguments(given, ring.wire.group, request)
    operator = _TransformedBackward.apply if transformed() else _backward_operator
    *gradients, dsinks = operator(*kept, _rows(ring), dout, dlse, *arguments)
    return *gradients, None if sinks is None else dsinks


def _rows(ring: Ring) -> Tensor:
    """The rows of every rank, and the queries of all: what a backward pass knows a ring by."""
    return torch.tensor([*ring.sizes, ring.queries], device="cpu")


def _arguments(
    given: BatchMasks, group: Optional[dist.ProcessGroup], request: Request
) -> tuple[Any, ...]:
    """The arguments of an operator after its tensors with rows."""
    name = "" if group is None else group.group_name
    options, *rest = request
    options, tensors = _as_tensors(tuple(options), given)
    named = Options(*options)
    flat = [getattr(named, field) for field in _FIELDS]
    masks = flatten_masks(options)
    tensors = (given.sinks, tensors.cu_seqlens, tensors.slopes, tensors.seed)
    return *tensors, name, *flat, *masks, *rest


def group_of(name: str) -> Optional[dist.ProcessGroup]:
    """The group of a registered name; "" is the default group."""
    return torch._C._distributed_c10d._resolve_process_group(name) if name else None


def _request(flat: tuple[Any, ...]) -> Request:
    """The request of an operator's arguments; torch passes sequences as lists."""
    values = [tuple(x) if isinstance(x, (list, tuple)) else x for x in flat]
    masks, rest = len(_FIELDS), len(_FIELDS) + _MASK_COUNT
    given = dict(zip(_FIELDS, values))
    given.update(zip(_MASK_FIELDS, unflatten_masks(*values[masks:rest])))
    return Request(Options(**given), *values[rest:])


def _split(rest: tuple[Any, ...]) -> tuple[MaskTensors, str, Request]:
    """The tensors, the group and the request of an operator's arguments after the others."""
    tensors = MaskTensors(*rest[:_TENSOR_COUNT])
    group, *flat = rest[_TENSOR_COUNT:]
    return tensors, group, _request(tuple(flat))


def _masked(tensors: MaskTensors, request: Request) -> Request:
    """The request with the documents, slopes and seed of the tensors."""
    return request._replace(options=tensors.masks(request.options))


def _fake_attention(request: Request) -> Any:
    """An attention for the shapes of the results, which do not depend on the sharding."""
    return find(request.options._replace(sharding="contiguous", dropout=0.0))


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tensors, group, request = _split(rest)
    ring = agreed(wire_of(group_of(group)), (q, k, v), _masked(tensors, request))
    return (*_without_none(*ring.forward(q, k, v, tensors.sinks)), _rows(ring))


_operator = torch.library.custom_op(
    "encke::ring_attention",
    _forward,
    mutates_args=(),
    schema=f"""(Tensor q, Tensor k, Tensor v, {_TENSORS},
        {_REQUEST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)""",
)


@_operator.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, group, request = _split(rest)
    ranks = dist.get_world_size(group_of(group))
    rows = torch.empty(ranks + 1, dtype=torch.int64, device="cpu")
    return (*fake_outputs(_fake_attention(request), q, v), rows)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slot_out: Tensor,
    slot_lse: Tensor,
    rows: Tensor,
    dout: Tensor,
    dlse: Optional[Tensor],
    *rest: Any,
) -> tuple[Tensor, ...]:
    tensors, group, request = _split(rest)
    request, wire = _masked(tensors, request), wire_of(group_of(group))
    *sizes, queries = rows.tolist()
    ring = ring_of(wire, (q, k, v), request, tuple(sizes), queries)
    saved: list[Optional[Tensor]] = [out, lse, slot_out, slot_lse]
    if ring.shard.recomputes:
        saved = [None] * 4
    elif ring.shard.splits_slots and not q.is_cuda:
        saved[0] = None
    else:
        saved[2:] = [None, None]
    dlse = None if dlse is None else readable(dlse).contiguous()
    dout = readable(dout).contiguous()
    saved.append(tensors.sinks)
    *gradients, dsinks = ring.backward(q, k, v, *saved, dout=dout, dlse=dlse)
    return *gradients, q.new_empty(0) if dsinks is None else dsinks


_backward_operator = torch.library.custom_op(
    "encke::ring_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"""(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor slot_out,
        Tensor slot_lse, Tensor rows, Tensor dout, Tensor? dlse, {_TENSORS},
        {_REQUEST}) -> (Tensor, Tensor, Tensor, Tensor)""",
)


@_backward_operator.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tensors, _, request = _split(rest[7:])
    dtype = _computed_in(q, _fake_attention(request).precision)
    gradients = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    return *gradients, fake_dsinks(q, tensors.sinks)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *rest = inputs
    out, lse, slot_out, slot_lse, rows = output
    tensors, ctx.flat = rest[:_TENSOR_COUNT], tuple(rest[_TENSOR_COUNT:])
    request = _request(ctx.flat[1:])
    ctx.with_lse = request.return_lse
    if request.options.checkpoint == "recompute":
        out, lse = out.new_empty(0), lse.new_empty(0)
    ctx.save_for_backward(q, k, v, out, lse, slot_out, slot_lse, rows, *tensors)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, *_: Any) -> tuple[Any, ...]:
    # As in eager mode, whether the lse has a gradient depends on the agreed request.
    given = (dout, dlse if ctx.with_lse else None)
    kept = ctx.saved_tensors
    saved, tensors = kept[:8], kept[8:]
    operator = _TransformedBackward.apply if _is_transformed() else _backward_operator
    *gradients, dsinks = operator(*saved, *given, *tensors, *ctx.flat)
    converted = (gradient.to(x.dtype) for gradient, x in zip(gradients, saved))
    of_sinks = None if tensors[0] is None else dsinks
    return *converted, of_sinks, *(None,) * (_TENSOR_COUNT - 1 + len(ctx.flat))


def _is_transformed() -> bool:
    return not torch.compiler.is_compiling() and transformed()


torch.library.register_autograd("encke::ring_attention", _differentiate, setup_context=_setup)
_backward_operator.register_autograd(refuse_second_order)

# The tensors with rows of each operator, as in `_rules`; all ranks map over as many.
_FORWARD_ROWS, _BACKWARD_ROWS = 3, 10
_operator.register_vmap(_rules.vmapped(_operator, _FORWARD_ROWS, _TENSOR_COUNT))
_backward_operator.register_vmap(
    _rules.vmapped(_backward_operator, _BACKWARD_ROWS, _TENSOR_COUNT)
)


class _Transformed(torch.autograd.Function):
    """The operator under torch.func, which takes only autograd functions of this form."""

    forward = staticmethod(lambda *given: _operator(*given))
    setup_context = staticmethod(_setup)
    backward = staticmethod(_differentiate)

    @staticmethod
    def vmap(*given: Any) -> Any:
        return _rules.vmapped(_Transformed.apply, _FORWARD_ROWS, _TENSOR_COUNT)(*given)


class _TransformedBackward(torch.autograd.Function):
    """The same of its backward pass."""

    forward = staticmethod(lambda *given: _backward_operator(*given))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(refuse_second_order)

    @staticmethod
    def vmap(*given: Any) -> Any:
        return _rules.vmapped(_TransformedBackward.apply, _BACKWARD_ROWS, _TENSOR_COUNT)(*given)
