"""Ring attention over the processes of a torch.distributed group, each with its shard of the
sequence.

No setup is needed beyond torchrun and ``init_process_group``. Every process calls
:func:`ring_attention` with its rows of q, k and v and gets its rows of the output, which equal
those of :func:`encke.attention` on the whole sequence. Keys and values are sent while others are
computed with, and only the rows that the pattern selects.

Every call, forward and backward, is collective: all ranks of the group must make it, in the same
order. A rank whose loss does not depend on its output must still run its backward pass (add ``0 *
out.sum()``). If the ranks' requests differ, all of them raise the same :class:`Disagreement` before
anything is computed. If a process dies, or does not answer within the group's timeout, every other
one raises :class:`encke.RingError`, which names it; the group cannot be used after that.

Tensors are on the CPU, or on one GPU per process, with hops from GPU to GPU over the group's NCCL.
A group with NCCL alone is enough: control messages then go through the group's store; with
``"cpu:gloo,cuda:nccl"`` they go through gloo. With gloo alone, hops between GPUs go through host
memory, and several processes may share a GPU.

Under torch.compile a call is one operator, ``encke::ring_attention``, without a graph break.

Only plans and buffers are cached between calls, and there are no parameters, so
DistributedDataParallel and FSDP can wrap the model as usual. Gradients are those of the rank's own
rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Optional, overload

import torch
import torch.distributed as dist
from torch import Tensor

from encke import _encke
from encke._ring import (
    Request,
    agree,
    attend,
    cut_of,
    expected_sizes,
    refuse_on_all,
    refusing_on_all,
)
from encke._ring_operator import as_operator
from encke._observed import (
    dispatched,
    is_plain,
    observed,
    refuse_gradients_in_graph,
    refuse_tangents,
)
from encke._readable import readable
from encke._torch import BatchMasks, _autocast, _refuse_others, _sinks, under_autocast
from encke._unusual import refuse_unusual
from encke._wire import Disagreement, wire_of
from encke.masks import boundaries, documents_of, offset_of, prefix_of, rate_of, window_of
from encke.options import (
    Options,
    as_tuple,
    from_keywords,
    refuse_two_names,
    refuse_wrong,
    with_masks,
)

__all__ = [
    "Disagreement",
    "RingDilatedAttention",
    "context_parallel",
    "document_lengths",
    "positions",
    "ring_attention",
    "shard",
    "sizes_of",
    "unshard",
]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from encke._typing import RingOptions
    from encke.integrations.context import ContextParallel

Group = Optional[dist.ProcessGroup]


@overload
def ring_attention(
    q_local: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[RingOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q_local: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RingOptions],
) -> Tensor: ...
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
    padding: Optional[str] = None,
    causal: bool = False,
    window: Optional[tuple[Optional[int], Optional[int]]] = None,
    prefix: int = 0,
    documents: Any = None,
    cu_seqlens: Any = None,
    query_offset: Optional[int] = None,
    query_tokens: Optional[int] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    precision: Any = None,
    checkpoint: str = "keep",
    bits: str = "planned",
    return_lse: bool = False,
) -> Any:
    """Attention of this rank's rows ``[batch, rows, heads, dim]`` over the keys of all ranks.

    group
        The process group. Default: all processes. Its timeout applies.
    sharding
        Which tokens these rows are: ``"contiguous"`` (any number per rank, also 0), ``"zigzag"``,
        ``"striped"``, ``"balanced"`` (contiguous, with equal work), or ``"documents"`` (long
        documents in zigzag, short ones whole), as made by :func:`shard`.
    sizes
        The number of rows of each rank. By default the ranks exchange it in every call, which is
        one small message to each; if given, the ranks compare it once for each set of options.
    documents, cu_seqlens
        The documents of the whole sequence, the same on all ranks; shards may cut them anywhere.
    query_offset, query_tokens
        The whole sequence may have fewer queries than keys, on the CPU: those of its last tokens,
        or of the tokens from ``query_offset`` on. A query is on the rank that has the key at its
        position (:func:`shard` with ``tokens``), so some ranks may have none. ``query_tokens``, the
        number of all queries, is needed only with ``sizes``.
    sinks
        The same on all ranks. The gradient is that of this rank's rows, as for every parameter
        that all ranks have: DistributedDataParallel, or an all-reduce, adds up those of all ranks.
    dropout, seed
        A seed is needed, the same on all ranks and another one in every call. Where dropout is
        0, as in evaluation, it has no effect.
    bits
        With ``"invariant"`` the same bits on every ring: shards are contiguous, and
        begin at multiples of 512 rows of every segment (``"invariant:32"``: of 32).

    The other options are those of :func:`encke.attention`. Returns out, or (out, lse) with
    ``return_lse``.
    """
    q, k, v = q_local, k_local, v_local
    if torch.compiler.is_compiling():
        _refuse_others(q_local=q, k_local=k, v_local=v)
    else:
        try:
            _refuse_others(q_local=q, k_local=k, v_local=v)
            refuse_unusual(q_local=q, k_local=k, v_local=v)
        except (TypeError, ValueError) as error:
            refuse_on_all(group, error)
    if under_autocast(q):
        q, k, v = _autocast(q, k, v)
    options = Options(
        segment_lengths=as_tuple(segment_lengths),
        dilation_rates=as_tuple(dilation_rates),
        mode=mode,
        group_scale=group_scale,
        offsets=offsets,
        mixing_gradient=mixing_gradient,
        causal=causal,
        scale=scale,
        sharding=sharding,
        precision=None if precision is None else str(precision),
        checkpoint=checkpoint,
        softcap=softcap,
        padding=padding,
        bits=bits,
    )
    refusal: Optional[Exception] = None
    try:
        sinks = None if sinks is None else _sinks(sinks, q)
        options = options._replace(
            window=window_of(window),
            prefix=prefix_of(prefix),
            dropout=rate_of(dropout),
            query_offset=offset_of(query_offset),
        )
        if options.dropout and seed is None:
            raise ValueError(f"dropout is {dropout}, and needs a seed, the same on all ranks")
        if not torch.compiler.is_compiling():
            options = with_masks(options, documents, cu_seqlens, alibi_slopes, seed)
    except (TypeError, ValueError) as error:
        # The other ranks are told before it is raised.
        refusal, sinks = error, None
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    with_sinks = sinks is not None
    request = Request(options, as_tuple(sizes), grad, return_lse, with_sinks, query_tokens)
    masks = BatchMasks(sinks, documents, cu_seqlens, alibi_slopes, seed=seed)
    if torch.compiler.is_compiling():
        if refusal is not None:
            raise refusal
        refuse_gradients_in_graph(q, k, v, sinks)
        out, lse = as_operator((q, k, v), masks, group, request)
    elif refusal is None and (observed() or not is_plain(*inputs)):
        named = dict(zip(("q_local", "k_local", "v_local", "sinks"), inputs))
        given = request._replace(options=options._replace(documents=None, seed=None))
        with refusing_on_all(group):
            out, lse = dispatched(lambda: as_operator((q, k, v), masks, group, given), **named)
    else:
        try:
            refuse_tangents(q_local=q, k_local=k, v_local=v, sinks=sinks)
        except NotImplementedError as error:
            refuse_on_all(group, error)
        qkv = (q, k, v) if refusal is not None else tuple(map(readable, (q, k, v)))
        out, lse = attend(qkv, sinks, group, request, refusal)
    return (out, lse) if return_lse else out


def context_parallel(
    group: Group = None,
    *,
    sharding: str = "zigzag",
    model: Any = None,
    gradients: str = "mean",
) -> ContextParallel:
    """Context parallelism for a model of transformers, as a context:

    .. code-block:: python

        with encke.distributed.context_parallel(group, sharding="zigzag", model=model):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()

    Every rank of the group gives the model the same whole batch. The model gets this rank's rows of
    tokens, positions and labels, computes attention over the rows of all ranks (as
    ``attn_implementation="encke_ring"``, which is set), and returns the loss of the whole batch.
    Padding and packed documents are those of the whole sequence, too.

    gradients
        ``"mean"``: gradients of parameters will be averaged over ranks, as
        DistributedDataParallel and FSDP do; ``"sum"``: they will be added up.
    model
        Without one, cut batches with ``shard(batch)`` and losses with ``loss(local)`` of the object
        that the context gives, and set the attention of the model yourself.

    Backward passes, also those of checkpointing, run inside the context.
    """
    from encke.integrations.context import ContextParallel

    return ContextParallel(group, sharding=sharding, model=model, gradients=gradients)


def sizes_of(
    tokens: int,
    *,
    group: Group = None,
    sharding: str = "contiguous",
    ranks: Optional[int] = None,
    heads: Optional[int] = None,
    **pattern: Any,
) -> list[int]:
    """The default number of rows of each rank.

    ``"balanced"`` gives contiguous shards with equal work, so it depends on the mask: give the
    options ``causal``, ``window``, ``documents``, ... of the attention, and its number of ``heads``
    if it has branches. ``"documents"`` depends on the documents alone; it is ``"zigzag"`` without.
    Other shardings do not depend on them.

    >>> sizes_of(10, ranks=4)
    [3, 3, 2, 2]
    >>> sizes_of(10, ranks=4, sharding="zigzag")
    [3, 3, 2, 2]
    >>> sizes_of(10_000, ranks=2, sharding="balanced", causal=True)
    [7040, 2960]
    >>> sizes_of(10, ranks=2, sharding="documents", documents=[6, 4])
    [5, 5]
    """
    ranks = dist.get_world_size(group) if ranks is None else ranks
    return expected_sizes(tokens, ranks, _cut(tokens, sharding, ranks, heads, pattern))


def shard(
    sequence: Tensor,
    *,
    group: Group = None,
    sharding: str = "contiguous",
    sizes: Optional[Sequence[int]] = None,
    dim: int = 1,
    ranks: Optional[int] = None,
    rank: Optional[int] = None,
    heads: Optional[int] = None,
    tokens: Optional[int] = None,
    query_offset: Optional[int] = None,
    **pattern: Any,
) -> Tensor:
    """This rank's rows of a sequence that every rank has; ``dim`` is the dimension of the tokens. A
    view where the rows are contiguous. Gradients flow to these rows of ``sequence`` only.

    ``sizes`` gives contiguous shards of other than equal sizes. :func:`positions` gives the
    positions of the rows. ``ranks`` and ``rank`` default to the group's. ``"balanced"`` and
    ``"documents"`` sharding need the options of the mask, as :func:`sizes_of` does.

    Where there are fewer queries than keys, give ``tokens``, the number of keys, to shard q: its
    rows are those of the last tokens, or of the tokens from ``query_offset`` on, and each goes to
    the rank of the token at its position.

    >>> shard(torch.arange(10), dim=0, sharding="zigzag", ranks=2, rank=0)
    tensor([0, 1, 2, 8, 9])
    >>> shard(torch.arange(10), dim=0, sizes=[7, 0, 3], ranks=3, rank=2)
    tensor([7, 8, 9])
    >>> shard(torch.arange(4), dim=0, tokens=10, sharding="zigzag", ranks=2, rank=0)
    tensor([2, 3])
    """
    if ranks is None or rank is None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = sequence.shape[dim]
    tokens = rows if tokens is None else tokens
    first = _first_query(tokens, rows, query_offset)
    if sizes is None:
        cut = _cut(tokens, sharding, ranks, heads, pattern)
    else:
        cut = _cut_of_sizes(tokens, sharding, sizes, ranks, pattern)
    runs = _encke.query_runs(cut, ranks, tokens, rank, first, rows)
    parts = [_strided(sequence, dim, *run) for run in runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else sequence.narrow(dim, 0, 0)


def positions(
    tokens: int,
    *,
    documents: Any = None,
    cu_seqlens: Any = None,
    device: Any = None,
    query_tokens: Optional[int] = None,
    query_offset: Optional[int] = None,
    **cut: Any,
) -> Tensor:
    """The position of each of this rank's rows in the sequence of ``tokens`` tokens or, with
    documents, in its document: what rotary embeddings need. With ``query_tokens`` those of the rows
    of q, where there are fewer queries than keys. ``cut`` are the options of :func:`shard`.

    >>> positions(10, sharding="zigzag", ranks=2, rank=1)
    tensor([3, 4, 5, 6, 7])
    >>> positions(10, documents=[4, 6], sharding="zigzag", ranks=2, rank=1)
    tensor([3, 0, 1, 2, 3])
    """
    lengths = _documents(tokens, documents, cu_seqlens)
    where = torch.arange(tokens, device=device)
    if lengths is not None:
        of_document = torch.tensor(lengths, device=device)
        firsts = torch.tensor(boundaries(lengths)[:-1], device=device)
        where = where - firsts.repeat_interleave(of_document)
        cut["documents"] = lengths
    return _shard_queries(where, query_tokens, query_offset, cut)


def document_lengths(
    documents: Any,
    *,
    query_tokens: Optional[int] = None,
    query_offset: Optional[int] = None,
    **cut: Any,
) -> list[int]:
    """How many of this rank's rows each document has, in order; 0 for documents of other ranks. The
    rows of a document are consecutive under every sharding, so ``rows.split(lengths)`` divides them
    by document. The other options are those of :func:`positions`.

    >>> document_lengths([4, 6], sharding="striped", ranks=3, rank=0)
    [2, 2]
    >>> document_lengths([4, 6], ranks=3, rank=2)
    [0, 3]
    """
    lengths = documents_of(documents, None)
    whole = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    mine = _shard_queries(whole, query_tokens, query_offset, dict(cut, documents=lengths))
    return torch.bincount(mine, minlength=len(lengths)).tolist()


def _shard_queries(
    whole: Tensor, queries: Optional[int], offset: Optional[int], cut: dict[str, Any]
) -> Tensor:
    """This rank's rows of what every token has, or those of its tokens that have a query."""
    tokens = len(whole)
    queries = tokens if queries is None else queries
    first = _first_query(tokens, queries, offset)
    return shard(whole[first : first + queries], dim=0, tokens=tokens, query_offset=first, **cut)


def _first_query(tokens: int, queries: int, offset: Optional[int]) -> int:
    """The position of the first query."""
    first = tokens - queries if offset is None else offset_of(offset)
    if not 0 <= first <= tokens - queries:
        raise ValueError(
            f"{queries} queries from position {first} on are not among {tokens} tokens; tokens is "
            "the number of keys"
        )
    return first


def _documents(tokens: int, documents: Any, cu_seqlens: Any) -> Optional[tuple[int, ...]]:
    lengths = documents_of(documents, cu_seqlens)
    if lengths is not None and sum(lengths) != tokens:
        raise ValueError(
            f"the documents have {sum(lengths)} tokens together, but the sequence has {tokens}; "
            "give lengths that add up to it"
        )
    return lengths


def _cut(
    tokens: int, sharding: Any, ranks: int, heads: Optional[int], pattern: dict[str, Any]
) -> Any:
    """The library's cut: for balanced shards the first token of each rank, by the pattern."""
    options = from_keywords(dict(pattern))
    if sharding == "documents":
        return _encke.by_document(options.documents, ranks, tokens)
    if sharding != "balanced":
        return sharding
    if heads is None:
        heads = len(options.segment_lengths or (1,))
    return _encke.balanced(options._asdict(), ranks, tokens, heads)


def unshard(
    local: Tensor,
    *,
    group: Group = None,
    sharding: str = "contiguous",
    dim: int = 1,
    tokens: Optional[int] = None,
    query_offset: Optional[int] = None,
    documents: Any = None,
    cu_seqlens: Any = None,
) -> Tensor:
    """The whole sequence on every rank, gathered from its shards, without gradients. ``tokens`` and
    ``query_offset`` are those of :func:`shard`, where there are fewer queries than keys, and
    ``documents`` those of a ``"documents"`` sharding.
    """
    lengths = documents_of(documents, cu_seqlens)
    wire = wire_of(group)
    wire.check_device(local.device)
    local = local.detach()
    shape = [size for at, size in enumerate(local.shape) if at != dim % local.dim()]
    description = {"unshard": str(local.dtype), "sharding": sharding, "dim": dim, "shape": shape}
    description["documents"] = lengths
    sizes = [rows for rows, _ in agree(wire, description, (local.shape[dim],) * 2, None)]
    runs = _gathered_runs(sizes, sharding, tokens, query_offset, lengths)
    row = math.prod(shape)
    flat = local.movedim(dim, 0).contiguous().reshape(-1)
    bytes_of_rows = [size * row * local.element_size() for size in sizes]
    if local.is_cuda and wire.gpu is not None:
        shards = wire.gpu.gather("unshard", flat.view(torch.uint8), bytes_of_rows)
    else:
        shards = wire.gather("unshard", flat.view(torch.uint8).cpu(), bytes_of_rows)
    whole = local.new_empty((sum(sizes), *shape))
    for rank, bytes_of_rank in enumerate(shards):
        rows = bytes_of_rank.view(local.dtype).reshape(sizes[rank], *shape)
        at = 0
        for first, stride, count in runs[rank]:
            _strided(whole, 0, first, stride, count).copy_(rows[at : at + count])
            at += count
    return whole.movedim(0, dim)


def _gathered_runs(
    sizes: list[int],
    sharding: str,
    tokens: Optional[int],
    query_offset: Optional[int],
    documents: Optional[tuple[int, ...]],
) -> list[list[tuple[int, int, int]]]:
    """(first, stride, count) of the rows of each rank, of which there are so many."""
    rows, ranks = sum(sizes), len(sizes)
    if tokens is None or sharding in ("contiguous", "balanced"):
        # Contiguous shards follow one another, whichever tokens have a query.
        cut = cut_of(sharding, sizes, documents)
        return [_encke.runs(cut, ranks, rows, rank) for rank in range(ranks)]
    first = _first_query(tokens, rows, query_offset)
    cut = sharding
    if sharding == "documents":
        cut = _encke.by_document(documents, ranks, tokens)
    of = [_encke.query_runs(cut, ranks, tokens, rank, first, rows) for rank in range(ranks)]
    expected = [sum(count for _, _, count in runs) for runs in of]
    if sizes != expected:
        raise ValueError(
            f"{sharding} sharding of the {rows} queries from position {first} on gives the ranks "
            f"{expected} rows, but they have {sizes}; cut them with encke.distributed.shard"
        )
    return of


def _cut_of_sizes(
    tokens: int, sharding: Any, sizes: Sequence[int], ranks: int, pattern: dict[str, Any]
) -> Any:
    """The library's cut for shards of these sizes."""
    options = from_keywords(dict(pattern))
    if len(sizes) != ranks or sum(sizes) != tokens:
        raise ValueError(
            f"sizes {list(sizes)} are {sum(sizes)} rows of {len(sizes)} ranks, but there are "
            f"{tokens} tokens and {ranks} ranks"
        )
    return cut_of(sharding, sizes, options.documents)


def _strided(sequence: Tensor, dim: int, first: int, stride: int, count: int) -> Tensor:
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
        refuse_two_names(options, scale="softmax_scale")
        if attention_dropout != 0.0:
            raise ValueError(
                f"attention_dropout is {attention_dropout}; on a ring dropout needs a seed that "
                "all ranks have, another one in every call: use 0.0, or ring_attention with "
                "dropout and seed"
            )
        self.group = group
        self.options = dict(
            options,
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            scale=softmax_scale,
            sharding=sharding,
        )
        refuse_wrong(self.options)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> RingDilatedAttention:
        # A group is the same thing in every copy; it cannot be copied.
        memo[id(self.group)] = self.group
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def extra_repr(self) -> str:
        """The options given."""
        given = self.options.items()
        return ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
