"""Attention with hidden keys and documents by calls of :func:`encke.attention` on the rows that
count.

Encke's queries stand at positions of its keys. Here a batch entry may have keys of its own
(padding, caches), and queries may be more than keys (cross attention). The decision here: a call is
divided into pieces, each of which is one exact call: all rows that count, packed one after the
other, if every token has a query; otherwise one piece for each set of batch entries with equal
keys. Queries without a key get 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy
import torch
from torch import Tensor

import encke
from encke.integrations.visibility import UnsupportedMask, Visibility


class _Piece(NamedTuple):
    """One call: entries of the batch (None for all), their queries and keys (slices where they are
    consecutive, which costs no copy), and the place of the first query among the keys."""

    entries: Any
    queries: Any
    keys: Any
    offset: int = 0


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, **options: Any) -> Tensor:
    """Attention of ``[batch, tokens, heads, dim]``; options are those of the scores."""
    queries, keys = q.shape[1], k.shape[1]
    if q.shape[0] == 1 != k.shape[0]:
        q = q.expand(k.shape[0], -1, -1, -1)
    rows = None if seen.documents is None else seen.documents[:, :keys]
    if rows is not None and rows.shape[1] < keys:
        raise UnsupportedMask(
            f"attention_mask is for {rows.shape[1]} keys, but there are {keys}; a model that cuts "
            'or extends its masks needs attn_implementation="eager" or "sdpa"'
        )
    if rows is not None and rows.shape[0] == 1 != q.shape[0]:
        rows = rows.repeat(q.shape[0], 0)
    free = not seen.causal and seen.window is None
    if rows is None or (rows == 1).all():
        if free:
            return free_attention(q, k, v, **options)
        return _positioned(q, k, v, seen, seen.offset, options)
    if free and rows.max() <= 1:
        return _without_hidden_keys(q, k, v, rows, options)
    if queries == keys and seen.offset == 0:
        return _packed(q, k, v, rows, seen, options)
    return _by_entry(q, k, v, rows, seen, options)


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Visibility,
    of_queries: Tensor,
    of_keys: Tensor,
    **scores: Any,
) -> Tensor:
    """Sequences of a batch without padding, by the bounds of their queries and keys; queries are
    the last tokens of theirs."""
    q_bounds, k_bounds = (torch.as_tensor(x).tolist() for x in (of_queries, of_keys))
    flat = [x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v)]
    if q_bounds == k_bounds and q_bounds[-1] == flat[0].shape[1] == flat[1].shape[1]:
        lengths = numpy.diff(q_bounds)
        numbers = numpy.repeat(numpy.arange(len(lengths)) + 1, lengths)
        seen = seen._replace(offset=0, documents=numbers[None])
        return attend(*flat, seen, **scores).reshape(*q.shape[:3], v.shape[3])
    outs = []
    for i in range(len(q_bounds) - 1):
        mine, among = (slice(*bounds[i : i + 2]) for bounds in (q_bounds, k_bounds))
        rows = (flat[0][:, mine], flat[1][:, among], flat[2][:, among])
        offset = rows[1].shape[1] - rows[0].shape[1]
        outs.append(attend(*rows, seen._replace(offset=offset, documents=None), **scores))
    return torch.cat(outs, 1).reshape(*q.shape[:3], v.shape[3])


def free_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Every query sees every key; there may be more queries than keys.

    Then queries are folded into heads, several of which share the heads of the keys.
    """
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    if keys == 0:
        return q.new_zeros(batch, queries, heads, v.shape[3])
    if queries <= keys:
        return encke.attention(q, k, v, **options)
    folds = -(-queries // keys)
    rows = -(-queries // folds)
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, folds * rows - queries))
    q = q.unflatten(1, (folds, rows)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].repeat_interleave(folds)
    out = encke.attention(q, k, v, **options).unflatten(2, (heads, folds))
    return out.permute(0, 3, 1, 2, 4).flatten(1, 2)[:, :queries]


def _positioned(
    q: Tensor, k: Tensor, v: Tensor, seen: Visibility, offset: int, options: dict[str, Any]
) -> Tensor:
    """One document, in which query i stands at ``offset + i``."""
    queries, keys = q.shape[1], k.shape[1]
    if offset < 0 or offset + queries > keys:
        raise UnsupportedMask(
            f"{queries} queries from position {offset} on have no place among {keys} keys; is the "
            "cache's length that of the mask?"
        )
    at = {} if queries == keys else dict(query_offset=offset)
    return encke.attention(q, k, v, causal=seen.causal, window=seen.window, **at, **options)


def _without_hidden_keys(
    q: Tensor, k: Tensor, v: Tensor, rows: numpy.ndarray, options: dict[str, Any]
) -> Tensor:
    """Encoders and cross attention: every query, over the keys that count."""
    everything = slice(0, q.shape[1])
    groups = _equal_rows(rows)
    pieces = [_Piece(of, everything, _run(numpy.flatnonzero(row))) for of, row in groups]
    return _joined(q, k, v, pieces, lambda q, k, v, _: free_attention(q, k, v, **options))


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: numpy.ndarray,
    seen: Visibility,
    options: dict[str, Any],
) -> Tensor:
    """A query for each key: rows that count, one after the other, in one call."""
    options = dict(options, causal=seen.causal, window=seen.window)
    if (rows == rows[0]).all() and rows.all():
        return encke.attention(q, k, v, documents=run_lengths(rows[0]), **options)
    batch, tokens = rows.shape
    index, documents = [], []
    for entry, row in enumerate(rows):
        counted = numpy.flatnonzero(row)
        _refuse_holes(row, seen)
        index.append(counted + entry * tokens)
        documents += run_lengths(row[counted])
    where = torch.from_numpy(numpy.concatenate(index)).to(q.device)
    if not documents:
        return q.new_zeros(batch, tokens, q.shape[2], v.shape[3])
    q, k, v = (x.flatten(0, 1)[where][None] for x in (q, k, v))
    out = encke.attention(q, k, v, documents=documents, **options)[0]
    whole = out.new_zeros(batch * tokens, *out.shape[1:])
    return whole.index_copy(0, where, out).unflatten(0, (batch, tokens))


def _by_entry(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: numpy.ndarray,
    seen: Visibility,
    options: dict[str, Any],
) -> Tensor:
    """Queries of a cache: one call for each document that has any, of entries with equal keys."""
    queries, keys = q.shape[1], k.shape[1]
    if seen.offset < 0 or seen.offset + queries > keys:
        # The same refusal as without documents.
        return _positioned(q, k, v, seen, seen.offset, options)
    pieces = []
    for entries, row in _equal_rows(rows):
        _refuse_holes(row, seen)
        own = row[seen.offset : seen.offset + queries]
        for document in numpy.unique(own[own > 0]):
            among = numpy.flatnonzero(row == document)
            mine = numpy.flatnonzero(own == document)
            first = int(numpy.searchsorted(among, seen.offset + mine[0]))
            pieces.append(_Piece(entries, _run(mine), _run(among), first))

    def call(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
        return _positioned(q, k, v, seen, offset, options)

    return _joined(q, k, v, pieces, call)


def _joined(
    q: Tensor, k: Tensor, v: Tensor, pieces: list[_Piece], call: Callable[..., Tensor]
) -> Tensor:
    """The results of the pieces in their places; 0 elsewhere."""
    shape = (*q.shape[:3], v.shape[3])
    everything = slice(0, shape[1])
    out = None
    for entries, mine, among, offset in pieces:
        of = [x if entries is None else x[entries] for x in (q, k, v)]
        found = call(of[0][:, mine], of[1][:, among], of[2][:, among], offset)
        if entries is None and isinstance(mine, slice) and mine == everything:
            return found
        if out is None:
            out = found.new_zeros(shape)
        if entries is None:
            out[:, mine] = found
        elif isinstance(entries, slice) or isinstance(mine, slice):
            out[entries, mine] = found
        else:
            out[torch.tensor(entries)[:, None], mine] = found
    return q.new_zeros(shape) if out is None else out


def _equal_rows(rows: numpy.ndarray) -> list[tuple[Any, numpy.ndarray]]:
    """Batch entries with equal keys; None for all of them."""
    groups: dict[bytes, list[int]] = {}
    for entry, row in enumerate(rows):
        groups.setdefault(row.tobytes(), []).append(entry)
    if len(groups) == 1:
        return [(None, rows[0])]
    found = []
    for entries in groups.values():
        consecutive = entries[-1] - entries[0] + 1 == len(entries)
        of = slice(entries[0], entries[-1] + 1) if consecutive else entries
        found.append((of, rows[entries[0]]))
    return found


def _run(index: numpy.ndarray) -> Any:
    """A slice where the numbers are consecutive, which costs no copy."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


def run_lengths(labels: numpy.ndarray) -> list[int]:
    """The lengths of runs of equal labels."""
    if not len(labels):
        return []
    ends = numpy.flatnonzero(numpy.diff(labels)) + 1
    return numpy.diff([0, *ends, len(labels)]).tolist()


def _refuse_holes(row: numpy.ndarray, seen: Visibility) -> None:
    """Windows count positions, which hidden keys between others would shift."""
    if seen.window is None:
        return
    for document in numpy.unique(row[row > 0]):
        where = numpy.flatnonzero(row == document)
        if where[-1] - where[0] + 1 != len(where):
            hole = int(where[(numpy.diff(where) > 1).argmax()]) + 1
            raise UnsupportedMask(
                f"padding at token {hole} lies between tokens that count, and this layer has a "
                "sliding window: pad on the left or on the right"
            )
