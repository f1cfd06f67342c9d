"""A ring over the processes of a torch.distributed group: each holds its shard of the sequence.

Nothing has to be set up but what torchrun and ``init_process_group`` already have. Every process calls
:func:`ring_attention` with its own rows of q, k and v and gets its own rows of the output; what is
computed is what :func:`encke.attention` computes of the whole sequence. Keys and values that others
need travel while those that are here are computed with, and only the rows that the pattern selects.

All ranks of the group take part in every call, forward and backward, in the same order: a rank whose
loss does not depend on its output still has to run its backward pass (add ``0 * out.sum()``). Ranks
that ask for different things are refused before anything is computed, with the same
:class:`Disagreement` on all of them. A process that dies, or does not answer within the group's timeout,
ends the call on every other one with :class:`encke.RingError`, which names it; the group is of no use
after that.

Tensors are on the CPU, or on a GPU for each process (several processes may share one): then the GPU
computes, and hops go through the host's memory over the group's CPU backend (gloo). NCCL is not used, so
that a group of NCCL alone is refused; ``init_process_group("cpu:gloo,cuda:nccl")`` makes one of both.

Nothing but plans and buffers is kept between calls, and parameters are nobody's business here, so
DistributedDataParallel and FSDP go on top as always. Gradients are those of the rank's own rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from encke import _cuda, _encke
from encke._encke import RingError
from encke._torch import _autocast, _computed_in, _summed_in
from encke._wire import Disagreement, Wire, wire_of
from encke.options import Options

__all__ = [
    "Disagreement",
    "RingDilatedAttention",
    "ring_attention",
    "shard",
    "sizes_of",
    "unshard",
]

Group = Optional[dist.ProcessGroup]


@torch.compiler.disable
def ring_attention(
    q_local: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    *,
    group: Group = None,
    sharding: str = "contiguous",
    sizes: Optional[Sequence[int]] = None,
    segment_lengths: Optional[Sequence[int]] = None,
    dilation_rates: Optional[Sequence[int]] = None,
    mode: str = "group",
    group_scale: Optional[str] = None,
    offsets: Optional[str] = None,
    mixing_gradient: Optional[str] = None,
    causal: bool = False,
    scale: Optional[float] = None,
    precision: Any = None,
    checkpoint: str = "keep",
    return_lse: bool = False,
) -> Any:
    """Attention of this rank's rows ``[batch, rows, heads, dim]`` over the keys of all ranks.

    group
        The process group; None is all processes. Its timeout is the one that holds.
    sharding
        Whose tokens these rows are: ``"contiguous"`` (any number for each rank, none included),
        ``"zigzag"`` or ``"striped"``, as :func:`shard` cuts them.
    sizes
        How many rows each rank has. Where it is None the ranks ask each other in every call, which is
        one small message to each; where it is given that is done once for each set of options.

    The other options are those of :func:`encke.attention`. Returns out, or (out, lse) with
    ``return_lse``. torch.compile leaves this function alone (a graph break).
    """
    q, k, v = q_local, k_local, v_local
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    options = Options(
        segment_lengths=None if segment_lengths is None else tuple(segment_lengths),
        dilation_rates=None if dilation_rates is None else tuple(dilation_rates),
        mode=mode,
        group_scale=group_scale,
        offsets=offsets,
        mixing_gradient=mixing_gradient,
        causal=causal,
        scale=scale,
        sharding=sharding,
        precision=None if precision is None else str(precision),
        checkpoint=checkpoint,
    )
    wire = wire_of(group)
    wire.check()
    given = (q, k, v)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    ring = _agreed(wire, given, options, None if sizes is None else tuple(sizes), grad, return_lse)
    if grad:
        out, lse = _RingAttention.apply(q, k, v, ring, return_lse)
    else:
        out, lse, _, _ = ring.forward(q, k, v)
    return (out, lse) if return_lse else out


class _Ring(NamedTuple):
    """What the ranks have agreed on: this rank's part of it, and the words that name it."""

    wire: Wire
    shard: _encke.Shard
    tokens: int
    precision: Optional[str]
    words: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """out, lse, and by slot where branches keep slots of their own."""
        call = self.wire.call(f"forward {self.words}")
        with _telling(self.wire):
            if not q.is_cuda:
                return self.shard.forward(self.tokens, q, k, v, call)
            _cuda.prepare()
            dtype = _computed_in(q, self.precision)
            with torch.cuda.device(q.device):
                out = torch.empty(q.shape, dtype=dtype, device=q.device)
                lse = torch.empty(q.shape[:3], dtype=_summed_in(dtype), device=q.device)
                stream = torch.cuda.current_stream().cuda_stream
                given = (self.shard, self.tokens, q, k, v, out, lse, stream, call)
                _encke.forward_shard_gpu(*given)
            return out, lse, None, None

    def backward(self, *saved: Optional[Tensor], dout: Tensor, dlse: Optional[Tensor]) -> Any:
        """dq, dk, dv."""
        call = self.wire.call(f"backward {self.words}")
        q, k, v, out, lse = saved[:5]
        with _telling(self.wire):
            if not q.is_cuda:
                return self.shard.backward(self.tokens, *saved, dout, dlse, call)
            dtype = _computed_in(q, self.precision)
            with torch.cuda.device(q.device):
                gradients = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v)]
                stream = torch.cuda.current_stream().cuda_stream
                given = (self.shard, self.tokens, q, k, v, out, lse, dout, dlse)
                _encke.backward_shard_gpu(*given, *gradients, stream, call)
            return gradients


class _telling:
    """Whatever a rank fails of, the others are told before it is raised."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if error is not None:
            self._wire.fail(f"{type(error).__name__}: {error}")


class _RingAttention(torch.autograd.Function):
    """Ring attention with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, slot_out, slot_lse = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.with_lse = return_lse
        if not return_lse:
            ctx.mark_non_differentiable(lse)
        if ring.shard.recomputes:
            ctx.save_for_backward(q, k, v, None, None, None, None)
        elif ring.shard.splits_slots:
            ctx.save_for_backward(q, k, v, None, lse, slot_out, slot_lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, None, None)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        # Whether the lse has a gradient is decided by what all ranks have agreed on, not by what this
        # rank's loss makes of it: the messages are others.
        dlse = dlse.contiguous() if ctx.with_lse else None
        dq, dk, dv = ctx.ring.backward(*ctx.saved_tensors, dout=dout.contiguous(), dlse=dlse)
        need_q, need_k, need_v = ctx.needs_input_grad[:3]
        kept = (x if need else None for x, need in ((dq, need_q), (dk, need_k), (dv, need_v)))
        return *kept, None, None


def _agreed(
    wire: Wire,
    given: tuple[Tensor, Tensor, Tensor],
    options: Options,
    sizes: Optional[tuple[int, ...]],
    grad: bool,
    return_lse: bool,
) -> _Ring:
    """The ring for a call, once all ranks have asked for the same one."""
    shapes = tuple((x.shape[0], *x.shape[2:]) for x in given)
    rows = given[0].shape[1] if given[0].dim() == 4 else -1
    key = (options, shapes, rows, given[0].dtype, given[0].device, sizes, grad, return_lse)
    known = wire.agreed.get(key) if sizes is not None else None
    if known is not None:
        return known
    words = {"version": _encke.__version__, **options._asdict(), "sizes": sizes, "grad": grad}
    words.update(device=given[0].device.type, return_lse=return_lse, dtypes=[str(x.dtype) for x in given], shapes=shapes)
    refusal: Optional[Exception] = None
    try:
        _check(given)
    except (TypeError, ValueError) as error:
        refusal = error
    every = _ask(wire, words, rows, refusal)
    if sizes is not None and tuple(every) != sizes:
        raise Disagreement(f"sizes says {list(sizes)} rows, but the ranks have {every}")
    # From here on every rank has the same words and comes to the same end.
    known = wire.agreed.get((options, tuple(every)))
    if known is None:
        known = _shard(wire, options, every)
        if len(wire.agreed) >= 1024:
            wire.agreed.clear()
        wire.agreed[options, tuple(every)] = known
    q, k, _ = given
    if q.is_cuda and (0 in every or known.splits_slots or options.checkpoint != "keep"):
        raise ValueError(
            "on GPUs every rank has rows, branches are combined under one softmax "
            f'(mixing_gradient="exact") and checkpoint is "keep"; the rows are {every}'
        )
    tokens = sum(every)
    shape = (q.shape[0], tokens, q.shape[2], k.shape[2], q.shape[3])
    known.check(shape, options.precision or str(q.dtype))
    ring = _Ring(wire, known, tokens, options.precision, json.dumps([words, every], default=str))
    if sizes is not None:
        wire.agreed[key] = ring
    return ring


def _check(given: tuple[Tensor, Tensor, Tensor]) -> None:
    """Refuses tensors that cannot be a shard's."""
    for name, tensor in zip("qkv", given):
        if tensor.dim() != 4:
            shape = list(tensor.shape)
            raise ValueError(f"{name} has shape {shape}; a shard is [batch, rows, heads, dim]")
        if tensor.device != given[0].device or tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{name} is on {tensor.device} and q on {given[0].device}; Encke computes on the cpu "
                "and on cuda, and wants all in one place"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name}: the last dimension has stride {tensor.stride(-1)}; it must be contiguous "
                "(stride 1): make a contiguous copy"
            )
        if tensor.dtype != given[0].dtype:
            raise TypeError(f"{name} is {tensor.dtype} but q is {given[0].dtype}; convert one of them")
        if tensor.shape[1] != given[0].shape[1]:
            rows = given[0].shape[1]
            raise ValueError(f"{name} has {tensor.shape[1]} rows but q has {rows}")


def _ask(wire: Wire, words: dict[str, Any], rows: int, refusal: Optional[Exception]) -> list[int]:
    """Everyone's rows, or the same error on all ranks where they do not ask for the same."""
    text = json.dumps(words, default=str, sort_keys=True)
    name = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    if refusal is not None:
        text = json.dumps({"refusal": str(refusal)})
    said = text.encode()
    own = torch.tensor([name, rows, len(said), int(refusal is not None)])
    every = torch.stack(wire.gather("asking the others", own, [4] * wire.size)).tolist()
    if all(there[0] == name and not there[3] for there in every):
        return [there[1] for there in every]
    own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    texts = wire.gather("asking the others", own, [there[2] for there in every])
    if refusal is not None:
        raise refusal
    everyone = [json.loads(bytes(there.numpy())) for there in texts]
    for rank, there in enumerate(everyone):
        if "refusal" in there:
            raise Disagreement(f"rank {rank} cannot take part: {there['refusal']}")
    for option in everyone[0]:
        asked = [there.get(option) for there in everyone]
        if any(there != asked[0] for there in asked):
            different = "; ".join(f"rank {rank}: {there}" for rank, there in enumerate(asked))
            raise Disagreement(f"the ranks do not agree on {option}: {different}")
    raise Disagreement("the ranks do not agree, and cannot say on what")


def _shard(wire: Wire, options: Options, sizes: list[int]) -> _encke.Shard:
    """This rank with these options."""
    _encke.use_threads(torch.get_num_threads())
    cut = _cut(options.sharding, sizes)
    return _encke.Shard({**options._asdict(), "ranks": wire.size, "sharding": cut}, wire.rank)


def _cut(sharding: Any, sizes: Sequence[int]) -> Union[str, list[int]]:
    """How shards of these sizes are cut, as the library has it."""
    if sharding != "contiguous":
        expected = sizes_of(sum(sizes), ranks=len(sizes), sharding=sharding)
        if list(sizes) != expected:
            raise ValueError(
                f"{sharding} sharding of {sum(sizes)} tokens gives the ranks {expected} rows, but "
                f"they have {list(sizes)}; cut the sequence with encke.distributed.shard"
            )
        return sharding
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def sizes_of(
    tokens: int, *, group: Group = None, sharding: str = "contiguous", ranks: Optional[int] = None
) -> list[int]:
    """How many of so many tokens each rank has, where nobody says otherwise.

    >>> sizes_of(10, ranks=4)
    [3, 3, 2, 2]
    >>> sizes_of(10, ranks=4, sharding="zigzag")
    [3, 3, 2, 2]
    """
    ranks = dist.get_world_size(group) if ranks is None else ranks
    runs = (_encke.runs(sharding, ranks, tokens, rank) for rank in range(ranks))
    return [sum(count for _, _, count in of_rank) for of_rank in runs]


def shard(
    sequence: Tensor,
    *,
    group: Group = None,
    sharding: str = "contiguous",
    sizes: Optional[Sequence[int]] = None,
    dim: int = 1,
    ranks: Optional[int] = None,
    rank: Optional[int] = None,
) -> Tensor:
    """This rank's rows of a sequence that every rank has; ``dim`` is that of the tokens. Where they lie
    together it is a view. Gradients go to these rows of ``sequence`` and no others.

    ``sizes`` cuts contiguous shards otherwise than evenly. ``shard(torch.arange(n), dim=0)`` are the
    positions of the rows. ``ranks`` and ``rank`` are the group's unless given.

    >>> shard(torch.arange(10), dim=0, sharding="zigzag", ranks=2, rank=0)
    tensor([0, 1, 2, 8, 9])
    >>> shard(torch.arange(10), dim=0, sizes=[7, 0, 3], ranks=3, rank=2)
    tensor([7, 8, 9])
    """
    if ranks is None or rank is None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    runs = _runs(sequence.shape[dim], sharding, sizes, ranks, rank)
    pieces = [_piece(sequence, dim, *run) for run in runs]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, dim) if pieces else sequence.narrow(dim, 0, 0)


def unshard(
    local: Tensor,
    *,
    group: Group = None,
    sharding: str = "contiguous",
    dim: int = 1,
) -> Tensor:
    """The sequence whose shards the ranks have, at every rank. To look at: no gradients flow."""
    wire = wire_of(group)
    local = local.detach()
    words = {"unshard": str(local.dtype), "sharding": sharding, "dim": dim}
    words["shape"] = [size for at, size in enumerate(local.shape) if at != dim % local.dim()]
    sizes = _ask(wire, words, local.shape[dim], None)
    _cut(sharding, sizes)
    row = local.numel() // max(1, local.shape[dim])
    if local.shape[dim] == 0:
        row = functools.reduce(int.__mul__, words["shape"], 1)
    flat = local.movedim(dim, 0).contiguous().reshape(-1)
    shards = wire.gather("unshard", flat.view(torch.uint8), [
        size * row * local.element_size() for size in sizes
    ])
    whole = local.new_empty((sum(sizes), *words["shape"]))
    for rank, bytes_of_rank in enumerate(shards):
        rows = bytes_of_rank.view(local.dtype).reshape(sizes[rank], *words["shape"])
        at = 0
        for first, stride, count in _runs(sum(sizes), sharding, sizes, wire.size, rank):
            _piece(whole, 0, first, stride, count).copy_(rows[at : at + count])
            at += count
    return whole.movedim(0, dim)


def _runs(
    tokens: int, sharding: str, sizes: Optional[Sequence[int]], ranks: int, rank: int
) -> list[tuple[int, int, int]]:
    """(first, stride, count) of the tokens of a rank."""
    if sizes is None:
        return _encke.runs(sharding, ranks, tokens, rank)
    if len(sizes) != ranks or sum(sizes) != tokens:
        raise ValueError(
            f"sizes {list(sizes)} are {sum(sizes)} rows of {len(sizes)} ranks, but there are {tokens} "
            f"tokens and {ranks} ranks"
        )
    return _encke.runs(_cut(sharding, sizes), ranks, tokens, rank)


def _piece(sequence: Tensor, dim: int, first: int, stride: int, count: int) -> Tensor:
    index = [slice(None)] * sequence.dim()
    index[dim] = slice(first, first + (count - 1) * stride + 1, stride)
    return sequence[tuple(index)]


class RingDilatedAttention(torch.nn.Module):
    """:func:`ring_attention` with fixed options, as a module without parameters.

    ``forward(q, k, v, is_causal=False, sizes=None)`` takes this rank's rows. Options are those of
    :func:`ring_attention`.
    """

    def __init__(
        self,
        segment_lengths: Optional[Sequence[int]] = None,
        dilation_rates: Optional[Sequence[int]] = None,
        softmax_scale: Optional[float] = None,
        attention_dropout: float = 0.0,
        *,
        group: Group = None,
        sharding: str = "contiguous",
        **options: Any,
    ) -> None:
        super().__init__()
        if attention_dropout != 0.0:
            raise ValueError(
                f"attention_dropout is {attention_dropout}; Encke computes attention exactly, without "
                "dropout: use 0.0, and dropout after the attention"
            )
        self.group = group
        self.options = dict(
            options,
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            scale=softmax_scale,
            sharding=sharding,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        sizes: Optional[Sequence[int]] = None,
    ) -> Tensor:
        """Attention of this rank's rows."""
        options = dict(self.options, causal=is_causal or self.options.get("causal", False))
        return ring_attention(query, key, value, group=self.group, sizes=sizes, **options)

    def extra_repr(self) -> str:
        """The options that were given."""
        given = self.options.items()
        return ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
