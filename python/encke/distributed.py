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

Tensors are on the CPU, or on a GPU for each process: then the GPU computes, and hops go from GPU to GPU
over the group's NCCL. A group of NCCL alone is enough; what little the ranks say to each other beside rows
goes by way of the group's store then, or through gloo in one of both (``"cpu:gloo,cuda:nccl"``). Over gloo
alone, hops of GPUs go through the host's memory, and several processes may share a GPU.

Under torch.compile a call is one operator, ``encke::ring_attention``, without a graph break.

Nothing but plans and buffers is kept between calls, and parameters are nobody's business here, so
DistributedDataParallel and FSDP go on top as always. Gradients are those of the rank's own rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from encke import _encke
from encke._ring import Request, ask, attend, cut_of, expected_sizes
from encke._ring_operator import as_operator
from encke._torch import _autocast
from encke._wire import Disagreement, wire_of

__all__ = [
    "Disagreement",
    "RingDilatedAttention",
    "ring_attention",
    "shard",
    "sizes_of",
    "unshard",
]

Group = Optional[dist.ProcessGroup]


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
    ``return_lse``.
    """
    q, k, v = q_local, k_local, v_local
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    request = Request(
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
        sizes=None if sizes is None else tuple(sizes),
        grad=grad,
        return_lse=return_lse,
    )
    if torch.compiler.is_compiling():
        out, lse = as_operator(q, k, v, group, request)
    else:
        out, lse = attend(q, k, v, group, request)
    return (out, lse) if return_lse else out


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
    return expected_sizes(tokens, ranks, sharding)


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
    wire.refuse(local.device)
    local = local.detach()
    words = {"unshard": str(local.dtype), "sharding": sharding, "dim": dim}
    words["shape"] = [size for at, size in enumerate(local.shape) if at != dim % local.dim()]
    sizes = ask(wire, words, local.shape[dim], None)
    cut_of(sharding, sizes)
    row = local.numel() // max(1, local.shape[dim])
    if local.shape[dim] == 0:
        row = functools.reduce(int.__mul__, words["shape"], 1)
    flat = local.movedim(dim, 0).contiguous().reshape(-1)
    bytes_of_rows = [size * row * local.element_size() for size in sizes]
    if local.is_cuda and wire.gpu is not None:
        shards = wire.gpu.gather("unshard", flat.view(torch.uint8), bytes_of_rows)
    else:
        shards = wire.gather("unshard", flat.view(torch.uint8).cpu(), bytes_of_rows)
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
    return _encke.runs(cut_of(sharding, sizes), ranks, tokens, rank)


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
