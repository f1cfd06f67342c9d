"""torch support: autograd, autocast, and custom operators for torch.compile.

Ordinary tensors go through an autograd function, which costs a few microseconds; where something
looks (:mod:`encke._observed`: torch.compile, torch.func, modes, profilers), calls are the custom
operators ``encke::attention`` and ``encke::attention_backward``, whose fake implementations return
the shapes.

Gradients are of first order. The inputs, out and lse are saved for the backward pass.

The decision here: what varies from batch to batch (sinks, packings, lengths) is a tensor input of
the operators, so that a compiled graph is valid for all batches; in eager mode packings and lengths
become options at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from encke import _gpu, _readable, _rules
from encke._gpu import computed_in as _computed_in, summed_in as _summed_in
from encke._observed import (
    PLAIN,
    in_gradients,
    dispatched,
    is_batched,
    is_plain,
    observed,
    refuse_second_order,
    refuse_tangents,
    transformed,
)
from encke._unusual import refuse_tensor, refuse_unusual
from encke.masks import (
    boundaries,
    documents_of,
    key_lengths_of,
    numbers,
    refuse_learned_slopes,
    seed_of,
    slopes_of,
)
from encke.options import SLOPES, Options, find, with_masks
from encke.padding import PaddedAttention, find_padded

_SHARDING = Options._fields.index("sharding")
_RANKS = Options._fields.index("ranks")
_WINDOW = Options._fields.index("window")
_DROPOUT = Options._fields.index("dropout")
_MIXING_GRADIENT = Options._fields.index("mixing_gradient")
# Whether autocast is on for any device: faster than asking for one device.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], return_lse: bool = True
) -> tuple[Tensor, Optional[Tensor]]:
    """out and, with return_lse, lse."""
    # As is_plain, in the place where a microsecond counts.
    plain = type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
    if not plain:
        _refuse_others(q=q, k=k, v=v)
    if _any_autocast() and under_autocast(q):
        q, k, v = _autocast(q, k, v)
    if not plain or torch.compiler.is_compiling() or observed():
        return _through_operator(q, k, v, options, MaskTensors())
    if forward_ad._current_level >= 0:
        refuse_tangents(q=q, k=k, v=v)
    found = find(options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if return_lse:
            return _Attention.apply(q, k, v, None, found, (options, _NO_MASKS))
        return _out(q, k, v, found, options), None
    out, lse, _, _ = _forward(_for_inference(found, options), q, k, v)
    return out, lse


def _for_inference(found: Any, options: tuple[Any, ...]) -> Any:
    """An attention with the same outputs that keeps no slots for a backward pass."""
    if not found.splits_slots or options[_MIXING_GRADIENT] is None:
        return found
    return find((*options[:_MIXING_GRADIENT], None, *options[_MIXING_GRADIENT + 1 :]))


class BatchMasks(NamedTuple):
    """What a call may vary from batch to batch, as the caller gave it."""

    sinks: Any = None
    documents: Any = None
    cu_seqlens: Any = None
    alibi_slopes: Any = None
    key_lengths: Any = None
    seed: Any = None


_NO_MASKS = BatchMasks()


def attention_with(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], given: BatchMasks
) -> tuple[Tensor, Tensor]:
    """out and lse of a call with any of ``given``."""
    _refuse_others(q=q, k=k, v=v)
    touched = given.key_lengths is not None or given.sinks is not None
    if touched and not torch.compiler.is_compiling():
        refuse_unusual(q=q, k=k, v=v)
    sinks = None if given.sinks is None else _sinks(given.sinks, q)
    if under_autocast(q):
        q, k, v = _autocast(q, k, v)
    if given.seed is None and options[_DROPOUT]:
        given = given._replace(seed=torch.randint(2**63 - 1, (), device="cpu"))
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if not is_plain(*inputs) or torch.compiler.is_compiling() or observed():
        options, tensors = _as_tensors(options, given)
        return _through_operator(q, k, v, options, tensors._replace(sinks=sinks))
    refuse_tangents(q=q, k=k, v=v, sinks=sinks)
    masked = with_masks(
        options, given.documents, given.cu_seqlens, given.alibi_slopes, given.seed
    )
    lengths = key_lengths_of(given.key_lengths)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        found = find_padded(tuple(masked), lengths)
        return _Attention.apply(q, k, v, sinks, found, (options, given))
    if sinks is None and masked.mixing_gradient == "detached":
        # Without a backward pass branches need no slots.
        masked = masked._replace(mixing_gradient=None)
    found = find_padded(tuple(masked), lengths)
    out, lse, _, _ = _forward(found, q, k, v, sinks)
    return out, lse


def _sinks(sinks: Any, q: Tensor) -> Tensor:
    """The sinks as a tensor of one dimension."""
    if not isinstance(sinks, torch.Tensor):
        sinks = torch.tensor(numbers("sinks", sinks), dtype=torch.float64, device="cpu")
    if sinks.dim() != 1 or q.dim() == 4 and sinks.shape[0] != q.shape[2]:
        heads = q.shape[2] if q.dim() == 4 else "heads"
        raise ValueError(f"sinks has shape {list(sinks.shape)}, expected [{heads}]")
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks is {sinks.dtype}; it must have a floating-point type")
    return sinks


def _refuse_others(**given: Any) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; Encke takes torch tensors and NumPy arrays, "
                "and all of one kind"
            )


def _autocast(*tensors: Tensor) -> Any:
    """As for torch's own attention: the autocast dtype for inputs of real numbers but float64."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    if not torch.compiler.is_compiling():
        for name, x in zip("qkv", tensors):
            refuse_tensor(name, x)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def under_autocast(q: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor, if that has any."""
    kind = q.device.type
    return bool(_any_autocast()) and kind != "meta" and torch.is_autocast_enabled(kind)


def _forward(
    found: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor] = None
) -> tuple[Any, ...]:
    """out, lse, and both by slot where branches keep slots of their own."""
    if not q.is_cuda:
        return _readable.forward(found, q, k, v, None if sinks is None else sinks.tolist())
    if isinstance(found, PaddedAttention):
        return found.forward(q, k, v, sinks, _gpu.forward)
    return _gpu.forward(found, q, k, v, sinks)


def _forward_and_save(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], found: Any, request: Any
) -> Any:
    """out and lse; saves what the backward pass needs, and what its operator does: ``request``."""
    out, lse, slot_out, slot_lse = _forward(found, q, k, v, sinks)
    ctx.found, ctx.request = found, request
    if found.recomputes:
        saved = (q, k, v, None, None, None, None, sinks)
    elif slot_out is not None:
        saved = (q, k, v, None, lse, slot_out, slot_lse, sinks)
    else:
        saved = (q, k, v, out, lse, None, None, sinks)
    ctx.save_for_backward(*saved)
    return out, lse


class _Out(torch.autograd.Function):
    """Attention with its gradient, without the lse: autograd has one output less to track."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: Any, options: tuple[Any, ...]
    ) -> Tensor:
        return _forward_and_save(ctx, q, k, v, None, found, (options, _NO_MASKS))[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        dq, dk, dv, _ = _gradients(ctx, dout, None)
        return dq, dk, dv, None, None


# What apply calls where no functorch transform is active, without its checks.
_out = super(torch.autograd.Function, _Out).apply


class _Attention(torch.autograd.Function):
    """The same with the lse as a differentiable output, and with sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Optional[Tensor],
        found: Any,
        request: tuple[tuple[Any, ...], BatchMasks],
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward_and_save(ctx, q, k, v, sinks, found, request)
        ctx.set_materialize_grads(False)
        ctx.out_like = (out.dtype, out.shape)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        if dout is None:
            dtype, shape = ctx.out_like
            dout = dlse.new_zeros(shape, dtype=dtype)
        return *_gradients(ctx, dout, dlse), None, None


def _gradients(ctx: Any, dout: Tensor, dlse: Optional[Tensor]) -> tuple[Any, ...]:
    """dq, dk, dv and dsinks, where they are needed."""
    if observed() or _is_unusual(dout) or dlse is not None and _is_unusual(dlse):
        every = _gradients_through_operator(ctx, dout, dlse)
    else:
        gradients = _backward if not torch.is_grad_enabled() else _Gradients.apply
        every = gradients(ctx.found, *ctx.saved_tensors, dout, dlse)
    # Without sinks the fourth input is not a tensor, and its gradient None.
    needed = ctx.needs_input_grad[:4]
    if all(needed[:3]) and every[3] is None:
        return tuple(every)
    return tuple(gradient if need else None for gradient, need in zip(every, needed))


def _is_unusual(gradient: Tensor) -> bool:
    """Whether a gradient is of a class of its own, or one of several."""
    return type(gradient) not in PLAIN or is_batched(gradient)


def _gradients_through_operator(
    ctx: Any, dout: Tensor, dlse: Optional[Tensor]
) -> tuple[Optional[Tensor], ...]:
    """The same where something looks at the backward pass that did not at the forward pass."""
    options, tensors = _as_tensors(*ctx.request)
    *saved, sinks = ctx.saved_tensors
    # An operator takes tensors only: what is not saved is empty.
    saved = [dout.new_empty(0) if x is None else x for x in saved]
    given = (*saved, dout, dlse, *tensors._replace(sinks=sinks), *operator_arguments(options))
    operator = _TransformedBackward.apply if transformed() else _backward_operator
    dq, dk, dv, dsinks = dispatched(lambda: operator(*given), dout=dout)
    return dq, dk, dv, None if sinks is None else dsinks


class _Gradients(torch.autograd.Function):
    """The backward pass under create_graph=True; it has no gradient itself."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Optional[Tensor], ...]:
        return _backward(*given)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_order()


def _backward(
    found: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Optional[Tensor],
    lse: Optional[Tensor],
    slot_out: Optional[Tensor],
    slot_lse: Optional[Tensor],
    sinks: Optional[Tensor],
    dout: Tensor,
    dlse: Optional[Tensor],
) -> tuple[Optional[Tensor], ...]:
    """dq, dk, dv and, with sinks, their gradient."""
    # The gradient of a sum has stride 0, which the library does not read.
    if dout.layout is not torch.strided or dout.stride(-1) != 1:
        refuse_tensor("dout", dout)
        dout = dout.contiguous()
    saved = (out, lse, slot_out, slot_lse)
    if not q.is_cuda:
        of = None if sinks is None else sinks.tolist()
        dq, dk, dv, dsinks = _readable.backward(found, q, k, v, saved, dout, dlse, of)
        return dq, dk, dv, None if sinks is None else sinks.new_tensor(dsinks)
    if isinstance(found, PaddedAttention):
        return found.backward(q, k, v, saved, dout, dlse, sinks, _gpu.backward)
    return _gpu.backward(found, q, k, v, saved, dout, dlse, sinks)


# The custom operators. Sharding, ranks, window and slopes are two arguments each, because a schema
# has no unions.

MASK_TENSORS = """Tensor? sinks, Tensor? cu_seqlens, Tensor? slopes, Tensor? seed,
    Tensor? key_lengths"""
MASK_OPTIONS = """int? window_left, int? window_right, int prefix, float? softcap, bool alibi,
    int? query_offset, float dropout, str? padding, str bits"""
_OPTIONS = f"""int[]? segment_lengths, int[]? dilation_rates, str mode, str? group_scale,
    str? offsets, str? mixing_gradient, bool causal, float? scale, int? ranks, str sharding,
    str queries, str? precision, str checkpoint, int redundancy, float? deadline,
    bool deterministic, int? memory_per_rank, {MASK_OPTIONS}, int[]? firsts, bool auto"""


# The number of tensors.
_COUNT = MASK_TENSORS.count(",") + 1


class MaskTensors(NamedTuple):
    """The tensors of an operator beside q, k and v."""

    sinks: Optional[Tensor] = None
    cu_seqlens: Optional[Tensor] = None
    slopes: Optional[Tensor] = None
    seed: Optional[Tensor] = None
    key_lengths: Optional[Tensor] = None

    def masks(self, options: Options) -> Options:
        """The options with these documents, slopes and seed."""
        if self.cu_seqlens is not None:
            options = options._replace(documents=documents_of(None, self.cu_seqlens))
        if self.slopes is not None:
            options = options._replace(alibi_slopes=slopes_of(self.slopes))
        if self.seed is not None and options.dropout:
            options = options._replace(seed=seed_of(self.seed))
        return options


def _as_tensors(
    options: tuple[Any, ...], given: BatchMasks
) -> tuple[tuple[Any, ...], MaskTensors]:
    """What the caller gave as tensors, which a graph can hold without knowing their values."""
    cu_seqlens, slopes, lengths = given.cu_seqlens, given.alibi_slopes, given.key_lengths
    if given.documents is not None:
        if cu_seqlens is not None:
            documents_of(given.documents, cu_seqlens)
        if isinstance(given.documents, torch.Tensor):
            cu_seqlens = torch.nn.functional.pad(given.documents.cumsum(0), (1, 0))
        else:
            cu_seqlens = boundaries(documents_of(given.documents, None))
    if slopes is None or isinstance(slopes, bool):
        alibi, slopes = slopes or None, None
    else:
        refuse_learned_slopes(slopes)
        alibi, slopes = None, _as_tensor(slopes, torch.float64)
    options = (*options[:SLOPES], alibi, *options[SLOPES + 1 :])
    seed = given.seed
    if seed is not None and not isinstance(seed, torch.Tensor):
        # A tensor holds 64 bits with a sign.
        seed = seed_of(seed)
        seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device="cpu")
    whole = torch.int64
    return options, MaskTensors(
        None, _as_tensor(cu_seqlens, whole), slopes, seed, _as_tensor(lengths, whole)
    )


def _as_tensor(values: Any, dtype: torch.dtype) -> Optional[Tensor]:
    if values is None or isinstance(values, torch.Tensor):
        return values
    # Not where torch.set_default_device says: these are options, which are read on the host.
    return torch.tensor(list(values), dtype=dtype, device="cpu")


def flatten_masks(options: tuple[Any, ...]) -> list[Any]:
    """The arguments MASK_OPTIONS of an operator."""
    options = Options(*options)
    left, right = options.window or (None, None)
    alibi = options.alibi_slopes is True
    scores = [options.prefix, options.softcap, alibi]
    rest = [options.query_offset, float(options.dropout), options.padding, options.bits]
    return [left, right, *scores, *rest]


def unflatten_masks(left: Any, right: Any, *rest: Any) -> list[Any]:
    """The inverse: the fields of :class:`Options` from the window on."""
    prefix, softcap, alibi, query_offset, dropout, padding, bits = rest
    window = None if left is None and right is None else (left, right)
    scores = [window, prefix, softcap, alibi or None, None]
    return [*scores, query_offset, dropout, None, padding, bits]


def operator_arguments(options: tuple[Any, ...]) -> list[Any]:
    """The arguments _OPTIONS of an operator; documents and given slopes are tensors."""
    sharding = options[_SHARDING]
    firsts = None
    if not isinstance(sharding, str):
        firsts, sharding = sharding, "contiguous"
    ranks = options[_RANKS]
    auto = isinstance(ranks, str)
    flat = [*options[:_WINDOW], *flatten_masks(options), firsts, auto]
    flat[_SHARDING], flat[_RANKS] = sharding, None if auto else ranks
    return flat


def _through_operator(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], tensors: MaskTensors
) -> tuple[Tensor, Tensor]:
    given = (q, k, v, *tensors, *operator_arguments(options))
    if torch.compiler.is_compiling():
        in_graph = _attention_operator
        if in_gradients(q, k, v, tensors.sinks):
            in_graph = transformed_operator
        out, lse, _, _ = in_graph(*given)
    else:
        named = dict(q=q, k=k, v=v, sinks=q if tensors.sinks is None else tensors.sinks)
        operator = _Transformed.apply if transformed() else _attention_operator
        out, lse, _, _ = dispatched(lambda: operator(*given), **named)
    return out, lse


def _options(flat: tuple[Any, ...]) -> Options:
    """The options of an operator's arguments; torch passes sequences as lists."""
    *options, firsts, auto = (tuple(x) if isinstance(x, (list, tuple)) else x for x in flat)
    options[_WINDOW:] = unflatten_masks(*options[_WINDOW:])
    if firsts is not None:
        options[_SHARDING] = firsts
    if auto:
        options[_RANKS] = "auto"
    return Options(*options)


def _unmasked(flat: tuple[Any, ...]) -> Any:
    """The attention without the values of tensors, for shapes and types of results."""
    return find(tuple(_options(flat)._replace(dropout=0.0)))


def _found(tensors: MaskTensors, flat: tuple[Any, ...]) -> Any:
    """The attention of an operator's call."""
    options = tensors.masks(_options(flat))
    return find_padded(tuple(options), key_lengths_of(tensors.key_lengths))


def _operator_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tensors, flat = MaskTensors(*rest[:_COUNT]), rest[_COUNT:]
    return _without_none(*_forward(_found(tensors, flat), q, k, v, tensors.sinks))


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
    schema=f"""(Tensor q, Tensor k, Tensor v, {MASK_TENSORS},
        {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)""",
)


@_attention_operator.register_fake
def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return fake_outputs(_unmasked(rest[_COUNT:]), q, v)


def fake_outputs(found: Any, q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised out, lse, slot_out and slot_lse of a forward pass."""
    dtype = _computed_in(q, found.precision)
    sums = _summed_in(dtype)
    (batch, queries, heads, _), dim = q.shape, v.shape[3]
    lse = q.new_empty((batch, queries, heads), dtype=sums)
    out = q.new_empty((batch, queries, heads, dim), dtype=dtype)
    # On a GPU branches have no slots; see `_gpu_mixing`.
    if not found.splits_slots or q.is_cuda:
        return _without_none(out, lse, None, None)
    by_slot = (batch, queries, found.slots(int(heads)))
    return out, lse, q.new_empty((*by_slot, dim), dtype=sums), q.new_empty(by_slot, dtype=sums)


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
    *rest: Any,
) -> tuple[Tensor, ...]:
    tensors, flat = MaskTensors(*rest[:_COUNT]), rest[_COUNT:]
    saved = [None if x is None or x.numel() == 0 else x for x in (out, lse, slot_out, slot_lse)]
    *gradients, dsinks = _backward(
        _found(tensors, flat), q, k, v, *saved, tensors.sinks, dout, dlse
    )
    return *gradients, q.new_empty(0) if dsinks is None else dsinks


_backward_operator = torch.library.custom_op(
    "encke::attention_backward",
    _operator_backward,
    mutates_args=(),
    schema=f"""(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor slot_out,
        Tensor slot_lse, Tensor dout, Tensor? dlse, {MASK_TENSORS},
        {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)""",
)


@_backward_operator.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype = _computed_in(q, _unmasked(rest[6 + _COUNT :]).precision)
    return *(x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)), fake_dsinks(q, rest[6])


def fake_dsinks(q: Tensor, sinks: Optional[Tensor]) -> Tensor:
    """The uninitialised gradient of the sinks; empty without any."""
    return q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *tensors = inputs[: 3 + _COUNT]
    out, lse, slot_out, slot_lse = output
    ctx.flat = tuple(inputs[3 + _COUNT :])
    ctx.set_materialize_grads(False)
    if _unmasked(ctx.flat).recomputes:
        out, lse = out.new_empty(0), lse.new_empty(0)
    ctx.save_for_backward(q, k, v, out, lse, slot_out, slot_lse, *tensors)


def _differentiate(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (_COUNT - 1 + len(ctx.flat))
    if dout is None and dlse is None:
        return None, None, None, None, *nothing
    # Read once: checkpointing recomputes them for the first reader.
    kept = ctx.saved_tensors
    saved, tensors = kept[:7], kept[7:]
    q, k, v = saved[:3]
    if dout is None:
        dtype = _computed_in(q, _unmasked(ctx.flat).precision)
        dout = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    operator = _TransformedBackward.apply if transformed() else _backward_operator
    dq, dk, dv, dsinks = operator(*saved, dout, dlse, *tensors, *ctx.flat)
    of_sinks = None if tensors[0] is None else dsinks
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, *nothing


torch.library.register_autograd("encke::attention", _differentiate, setup_context=_setup)


class _Transformed(torch.autograd.Function):
    """The operator under torch.func, which takes only autograd functions of this form."""

    forward = staticmethod(lambda *given: _attention_operator(*given))
    setup_context = staticmethod(_setup)
    backward = staticmethod(_differentiate)
    vmap = staticmethod(lambda *given: _rules.vmapped(_Transformed.apply, 3, _COUNT)(*given))


def transformed_operator(*given: Any) -> tuple[Tensor, ...]:
    """The same as one node of a graph, which torch.compile does not look into."""
    return _Transformed.apply(*given)


class _TransformedBackward(torch.autograd.Function):
    """The same of its backward pass."""

    forward = staticmethod(lambda *given: _backward_operator(*given))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(refuse_second_order)

    @staticmethod
    def vmap(*given: Any) -> Any:
        return _rules.vmapped(_TransformedBackward.apply, 9, _COUNT)(*given)


_rules.register(_attention_operator, _backward_operator, _COUNT)
