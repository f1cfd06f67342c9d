"""torch support: autograd, autocast, and custom operators for torch.compile.

Ordinary tensors go through an autograd function, which costs a few microseconds; tensors under
torch.compile, torch.export or fake tensor mode go through the custom operators ``encke::attention``
and ``encke::attention_backward``, whose fake implementations return the shapes.

Gradients are of first order. The inputs, out and lse are saved for the backward pass.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from encke import _cuda, _encke
from encke.options import Options, find

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SHARDING = Options._fields.index("sharding")
_RANKS = Options._fields.index("ranks")
# Whether autocast is on for any device: faster than asking for one device.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], return_lse: bool = True
) -> tuple[Tensor, Optional[Tensor]]:
    """out and, with return_lse, lse."""
    plain = type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN
    if not plain:
        _refuse_others(q=q, k=k, v=v)
    if _any_autocast() and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    if not plain or torch.compiler.is_compiling():
        return _through_operator(q, k, v, options)
    found = find(options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if return_lse or torch._C._are_functorch_transforms_active():
            return _Attention.apply(q, k, v, found)
        return _out(q, k, v, found), None
    out, lse, _, _ = found.forward(q, k, v) if q.is_cpu else _forward_gpu(found, q, k, v)
    return out, lse


def _refuse_others(**given: Any) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; Encke takes torch tensors and NumPy arrays, "
                "and all of one kind"
            )


def _autocast(*tensors: Tensor) -> Any:
    """As for torch's own attention: the autocast dtype for all inputs but float64."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _forward(found: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """out, lse, and both by slot where branches keep slots of their own."""
    return found.forward(q, k, v) if q.is_cpu else _forward_gpu(found, q, k, v)


def _forward_gpu(found: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The same on a GPU; the extension refuses tensors on other devices."""
    if not q.is_cuda:
        return found.forward(q, k, v)
    _cuda.prepare()
    dtype = _computed_in(q, found.precision)
    with torch.cuda.device(q.device):
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=_summed_in(dtype), device=q.device)
        stream = torch.cuda.current_stream().cuda_stream
        _encke.enqueue(found, (q, k, v), (out, lse), stream)
    return out, lse, None, None


def _forward_and_save(ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: Any) -> Any:
    """out and lse; saves what the backward pass needs."""
    out, lse, slot_out, slot_lse = (
        found.forward(q, k, v) if q.is_cpu else _forward_gpu(found, q, k, v)
    )
    ctx.found = found
    if found.recomputes:
        ctx.save_for_backward(q, k, v)
    elif slot_out is not None:
        ctx.save_for_backward(q, k, v, None, lse, slot_out, slot_lse)
    else:
        ctx.save_for_backward(q, k, v, out, lse)
    return out, lse


class _Out(torch.autograd.Function):
    """Attention with its gradient, without the lse: autograd has one output less to track."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: Any) -> Tensor:
        return _forward_and_save(ctx, q, k, v, found)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return _gradients(ctx, dout, None)


# What apply calls where no functorch transform is active, without its checks.
_out = super(torch.autograd.Function, _Out).apply


class _Attention(torch.autograd.Function):
    """The same with the lse as a differentiable output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: Any) -> tuple[Tensor, Tensor]:
        out, lse = _forward_and_save(ctx, q, k, v, found)
        ctx.set_materialize_grads(False)
        ctx.out_like = (out.dtype, out.shape)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return None, None, None, None
        if dout is None:
            dtype, shape = ctx.out_like
            dout = ctx.saved_tensors[0].new_zeros(shape, dtype=dtype)
        return _gradients(ctx, dout, dlse)


def _gradients(ctx: Any, dout: Tensor, dlse: Optional[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gradients = _backward if not torch.is_grad_enabled() else _Gradients.apply
    saved = (*saved, *(None,) * (7 - len(saved)))
    dq, dk, dv = gradients(ctx.found, *saved, dout, dlse)
    need_q, need_k, need_v, _ = ctx.needs_input_grad
    return dq if need_q else None, dk if need_k else None, dv if need_v else None, None


class _Gradients(torch.autograd.Function):
    """The backward pass under create_graph=True; it has no gradient itself."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(*given)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "encke.attention has gradients of first order only, but was differentiated twice "
            "(create_graph=True, then through the gradients); detach the gradients, or use "
            "torch.nn.functional.scaled_dot_product_attention where second order is needed"
        )


def _backward(
    found: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Optional[Tensor],
    lse: Optional[Tensor],
    slot_out: Optional[Tensor],
    slot_lse: Optional[Tensor],
    dout: Tensor,
    dlse: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    # The gradient of a sum has stride 0, which the library does not read.
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if not q.is_cuda:
        return found.backward(q, k, v, (out, lse, slot_out, slot_lse), dout, dlse)
    if out is None:
        out, lse, _, _ = _forward(found, q, k, v)
    dtype = _computed_in(q, found.precision)
    with torch.cuda.device(q.device):
        gradients = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v)]
        stream = torch.cuda.current_stream().cuda_stream
        _encke.enqueue(found, (q, k, v, out, lse, dout, dlse), gradients, stream)
    return tuple(gradients)


# The custom operators. Sharding and ranks are two arguments each, because a schema has no unions.

_OPTIONS = """int[]? segment_lengths, int[]? dilation_rates, str mode, str? group_scale,
    str? offsets, str? mixing_gradient, bool causal, float? scale, int? ranks, str sharding,
    str queries, str? precision, str checkpoint, int redundancy, float? deadline,
    bool deterministic, int? memory_per_rank, int[]? firsts, bool auto"""


def _through_operator(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    sharding = options[_SHARDING]
    firsts = None
    if not isinstance(sharding, str):
        firsts, sharding = sharding, "contiguous"
    ranks = options[_RANKS]
    auto = isinstance(ranks, str)
    flat = [*options, firsts, auto]
    flat[_SHARDING], flat[_RANKS] = sharding, None if auto else ranks
    out, lse, _, _ = _attention_operator(q, k, v, *flat)
    return out, lse


def _found(flat: tuple[Any, ...]) -> Any:
    """The attention with an operator's arguments; torch passes sequences as lists."""
    *options, firsts, auto = (tuple(x) if isinstance(x, (list, tuple)) else x for x in flat)
    if firsts is not None:
        options[_SHARDING] = firsts
    if auto:
        options[_RANKS] = "auto"
    return find(tuple(options))


def _operator_forward(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    return _without_none(*_forward(_found(flat), q, k, v))


def _without_none(
    out: Tensor, lse: Tensor, slot_out: Optional[Tensor], slot_lse: Optional[Tensor]
) -> tuple[Tensor, ...]:
    """An operator returns tensors only: missing slots are empty."""
    if slot_out is None:
        slot_out, slot_lse = out.new_empty(0), lse.new_empty(0)
    return out, lse, slot_out, slot_lse


_attention_operator = torch.library.custom_op(
    "encke::attention",
    _operator_forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_attention_operator.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    return fake_outputs(_found(flat), q)


def fake_outputs(found: Any, q: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised out, lse, slot_out and slot_lse of a forward pass."""
    dtype = _computed_in(q, found.precision)
    sums = _summed_in(dtype)
    out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:3], dtype=sums)
    if not found.splits_slots:
        return _without_none(out, lse, None, None)
    batch, tokens, heads, dim = q.shape
    by_slot = (batch, tokens, found.slots(int(heads)))
    return out, lse, q.new_empty((*by_slot, dim), dtype=sums), q.new_empty(by_slot, dtype=sums)


def _computed_in(q: Tensor, precision: Optional[str]) -> torch.dtype:
    return q.dtype if precision is None else _DTYPES[precision]


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _operator_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slot_out: Tensor,
    slot_lse: Tensor,
    dout: Tensor,
    dlse: Optional[Tensor],
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    saved = [None if x is None or x.numel() == 0 else x for x in (out, lse, slot_out, slot_lse)]
    return _backward(_found(flat), q, k, v, *saved, dout, dlse)


_backward_operator = torch.library.custom_op(
    "encke::attention_backward",
    _operator_backward,
    mutates_args=(),
    schema=f"""(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor slot_out,
        Tensor slot_lse, Tensor dout, Tensor? dlse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)""",
)


@_backward_operator.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype = _computed_in(q, _found(rest[6:]).precision)
    return tuple(x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *flat = inputs
    out, lse, slot_out, slot_lse = output
    ctx.flat = tuple(flat)
    ctx.set_materialize_grads(False)
    if _found(ctx.flat).recomputes:
        out, lse = out.new_empty(0), lse.new_empty(0)
    ctx.save_for_backward(q, k, v, out, lse, slot_out, slot_lse)


def _differentiate(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * len(ctx.flat)
    if dout is None and dlse is None:
        return None, None, None, *nothing
    q, k, v, *_ = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(q, dtype=_computed_in(q, _found(ctx.flat).precision))
    dq, dk, dv = _backward_operator(*ctx.saved_tensors, dout, dlse, *ctx.flat)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *nothing


torch.library.register_autograd("encke::attention", _differentiate, setup_context=_setup)
