"""A ring under torch.compile: which rows a rank has, the documents of a batch, and attention, as
operators of a model's graph.

The decision here: what differs from batch to batch (padding, packing) is read when the graph runs,
so that one graph serves all batches of a shape. A group is passed by its name, as in
:mod:`encke._ring_operator`. The rows of each rank, agreed on in the forward pass, are saved for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

import numpy
import torch
from torch import Tensor

from encke._gpu import summed_in
from encke._observed import refuse_gradients_in_graph, refuse_second_order
from encke._readable import readable
from encke._ring import Request, Ring, agreed, expected_sizes, ring_of
from encke._ring_operator import group_of
from encke._wire import wire_of
from encke.distributed import shard
from encke.integrations.pieces import run_lengths
from encke.integrations.visibility import UnsupportedMask, Visibility, packed, read
from encke.masks import seed_of
from encke.options import Options

_SCORES = """Tensor? sinks, Tensor? seed, str group, str sharding, float? scale, float? softcap,
    float dropout"""
_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor description, {_SCORES}"


@torch.library.custom_op("encke::rows_of_rank", mutates_args=())
def rows_of_rank(tokens: int, sharding: str, ranks: int, rank: int) -> Tensor:
    """Which rows of a sequence a rank has."""
    every = torch.arange(tokens, device="cpu")
    return shard(every, dim=0, sharding=sharding, ranks=ranks, rank=rank).clone()


@rows_of_rank.register_fake
def _(tokens: int, sharding: str, ranks: int, rank: int) -> Tensor:
    # A graph is for one number of tokens: the rows of a rank are no formula of it.
    rows = expected_sizes(int(tokens), ranks, sharding)[rank]
    return torch.empty(rows, dtype=torch.int64, device="cpu")


@torch.library.custom_op("encke::documents", mutates_args=())
def documents(
    padding: Optional[Tensor],
    positions: Optional[Tensor],
    bounds: Optional[Tensor],
    entries: int,
    tokens: int,
) -> Tensor:
    """The number of each token's document, ``[entries, tokens]``, from 1 on. Padding is a document
    of its own, which no other token sees."""
    found = numpy.ones((1, tokens), dtype=numpy.int64)
    if bounds is not None:
        lengths = numpy.diff(bounds.cpu().numpy())
        found = numpy.repeat(numpy.arange(len(lengths)) + 1, lengths)[None]
    elif padding is None:
        of_positions = packed(positions, tokens)
        found = found if of_positions is None else of_positions
    if padding is not None:
        found = padding.detach().cpu().numpy().astype(bool).astype(numpy.int64) + 1
        if (numpy.diff(found) != 0).sum(-1).max(initial=0) > 1:
            raise UnsupportedMask(
                "padding lies between tokens that count; pad on the left or on the right"
            )
        found = numpy.ones_like(found) if (found == 2).all() else found
    return torch.from_numpy(numpy.broadcast_to(found, (entries, tokens)).copy())


@documents.register_fake
def _(padding: Any, positions: Any, bounds: Any, entries: int, tokens: int) -> Tensor:
    return torch.empty((entries, tokens), dtype=torch.int64, device="cpu")


def by_documents(seen: Visibility, entries: int) -> Iterator[tuple[slice, Optional[list[int]]]]:
    """The calls of a batch: entries with equal documents, and their lengths."""
    rows = seen.documents
    if rows is None:
        yield slice(None), None
    elif (rows == rows[0]).all():
        yield slice(None), run_lengths(rows[0])
    else:
        yield from ((slice(i, i + 1), run_lengths(rows[i])) for i in range(entries))


def _request(seen: Visibility, lengths: Optional[list[int]], *scores: Any) -> Request:
    sinks, seed, _, sharding, scale, softcap, dropout = scores
    options = Options(
        causal=seen.causal, window=seen.window, sharding=sharding, scale=scale, softcap=softcap,
        documents=None if lengths is None else tuple(lengths), dropout=dropout,
        seed=seed_of(seed) if dropout else None,
    )
    return Request(options, sinks=sinks is not None)


@torch.library.custom_op(
    "encke::described_ring_attention",
    mutates_args=(),
    schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, description: Tensor, *scores: Any) -> Any:
    seen, wire = read(description), wire_of(group_of(scores[2]))
    q, k, v = (readable(x) for x in (q, k, v))
    parts, sizes = [], ()
    for of, lengths in by_documents(seen, q.shape[0]):
        given = (q[of], k[of], v[of])
        ring = agreed(wire, given, _request(seen, lengths, *scores))
        parts.append(ring.forward(*given, scores[0])[:2])
        sizes = ring.sizes
    out, lse = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*parts))
    return out.contiguous(), lse.contiguous(), torch.tensor(sizes, device="cpu")


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, description: Tensor, *scores: Any) -> Any:
    ranks = torch.distributed.get_world_size(group_of(scores[2]))
    lse = q.new_empty(q.shape[:3], dtype=summed_in(q.dtype))
    rows = torch.empty(ranks, dtype=torch.int64, device="cpu")
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, rows


@torch.library.custom_op(
    "encke::described_ring_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, Tensor rows, {_INPUTS}) -> Tensor[]",
)
def _backward(
    dout: Tensor, out: Tensor, lse: Tensor, rows: Tensor, q: Tensor, k: Tensor, v: Tensor,
    description: Tensor, *scores: Any,
) -> list[Tensor]:
    seen, wire, sinks = read(description), wire_of(group_of(scores[2])), scores[0]
    q, k, v, dout = (readable(x) for x in (q, k, v, dout.contiguous()))
    parts: list[Any] = []
    for of, lengths in by_documents(seen, q.shape[0]):
        given = (q[of], k[of], v[of])
        request = _request(seen, lengths, *scores)
        sizes = tuple(rows.tolist())
        ring: Ring = ring_of(wire, given, request, sizes, queries=sum(sizes))
        saved = (*given, out[of], lse[of], None, None, sinks)
        parts.append(ring.backward(*saved, dout=dout[of], dlse=None))
    *of_rows, of_sinks = zip(*parts)
    found = [torch.cat(x).contiguous() for x in of_rows]
    return found if sinks is None else [*found, sum(of_sinks)]


@_backward.register_fake
def _(
    dout: Tensor, out: Tensor, lse: Tensor, rows: Tensor, q: Tensor, k: Tensor, v: Tensor,
    description: Tensor, sinks: Optional[Tensor], *_: Any,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in ((q, k, v) if sinks is None else (q, k, v, sinks))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.mark_non_differentiable(*output[1:])
    ctx.scores = inputs[6:]


def _differentiate(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    dq, dk, dv, *dsinks = _backward(dout, *ctx.saved_tensors, *ctx.scores)
    return dq, dk, dv, None, *(dsinks or [None]), None, *(None,) * len(ctx.scores)


_forward.register_autograd(_differentiate, setup_context=_setup)
_backward.register_autograd(refuse_second_order)


def attention(*given: Any) -> Tensor:
    """The rows of this rank; arguments are those of the operator."""
    refuse_gradients_in_graph(*given[:3], given[4])
    return _forward(*given)[0]
