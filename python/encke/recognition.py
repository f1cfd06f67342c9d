"""Recognises boolean masks: the options of :func:`encke.attention` that show the same pairs.

The decision here: patterns are read off a few rows and columns of the mask, and then every pair of
the mask is compared with the pattern. So an answer is never wrong; where no pattern is equal, the
one that agrees longest, in the order of the pairs, gives the pair to blame.

Why a few rows are enough: all documents show the pairs of the longest one, cut off. In it, the
prefix may be taken to be all leading columns that are visible to every query, because showing them
again changes nothing; the first other column shows how far the window reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import numpy


class MaskError(ValueError):
    """A mask that no options describe; ``pair`` is the first (query, key) that differs from the
    nearest pattern, with the batch entry before it if the mask has several."""

    def __init__(self, message: str, pair: tuple[int, ...]) -> None:
        super().__init__(message)
        self.pair = pair

    def __reduce__(self) -> Any:
        # As arguments of another process's call: exceptions are made again from their message only.
        return type(self), (str(self), self.pair)


class _Pattern(NamedTuple):
    """Options of the mask, in the form of :func:`encke.attention`."""

    causal: bool = False
    left: Optional[int] = None
    right: Optional[int] = None
    prefix: int = 0
    documents: Optional[tuple[int, ...]] = None
    query_offset: Optional[int] = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments, without defaults."""
        given: dict[str, Any] = {}
        if self.causal:
            given["causal"] = True
        if self.left is not None or self.right is not None:
            given["window"] = (self.left, self.right)
            if self.prefix:
                given["prefix"] = self.prefix
        if self.documents is not None:
            given["documents"] = list(self.documents)
        if self.query_offset is not None:
            given["query_offset"] = self.query_offset
        return given

    def firsts(self, tokens: int) -> numpy.ndarray:
        """The first token of the document of each token."""
        lengths = self.documents or (tokens,)
        return numpy.repeat(numpy.cumsum((0, *lengths))[:-1], lengths)

    def mask(self, queries: int, tokens: int) -> numpy.ndarray:
        """Which query sees which key: [queries, tokens]."""
        firsts = self.firsts(tokens)
        key = numpy.arange(tokens)
        offset = tokens - queries if self.query_offset is None else self.query_offset
        query = offset + numpy.arange(queries)[:, None]
        seen = numpy.ones((queries, tokens), dtype=bool)
        if self.left is not None:
            seen &= query - key <= self.left
        if self.right is not None:
            seen &= key - query <= self.right
        seen |= key < firsts + self.prefix
        if self.causal:
            seen &= key <= query
        return seen & (firsts == firsts[query])


def pattern_of(mask: Any) -> dict[str, Any]:
    """The keyword arguments of :func:`encke.attention` that show the pairs of a boolean ``mask``,
    True where a query sees a key: ``[queries, tokens]``, or ``[batch, queries, tokens]`` or
    ``[batch, 1, queries, tokens]``, a torch tensor or a NumPy array.

    Causal masks, windows, prefixes and documents are recognised, for all tokens or for some queries
    of them, and batches that differ by their lengths. Any other mask is a
    :class:`encke.MaskError`, which names the first pair that is not of the nearest pattern.

    >>> import numpy as np
    >>> query, key = np.ogrid[:8, :8]
    >>> pattern_of(key <= query)
    {'causal': True}
    >>> pattern_of((key <= query) & (query - key < 3) & (query // 4 == key // 4))
    {'causal': True, 'window': (2, None), 'documents': [4, 4]}
    >>> pattern_of((key <= query) | (key == 5) & (query == 2))
    Traceback (most recent call last):
    ...
    encke.recognition.MaskError: query 2 sees key 5, which the nearest pattern, causal=True, \
hides; encke.attention has causal masks, windows, prefixes and documents
    """
    shape = tuple(mask.shape)
    if not isinstance(mask, numpy.ndarray):
        mask = mask.detach().cpu().numpy()
    if mask.dtype != numpy.bool_:
        raise TypeError(f"mask is of type {mask.dtype}; it must be boolean, True for a visible key")
    if mask.ndim == 4 and shape[1] == 1:
        mask = mask[:, 0]
    if mask.ndim not in (2, 3) or mask.shape[-1] < mask.shape[-2] or 0 in shape:
        raise ValueError(
            f"mask has shape {list(shape)}; it must be [queries, tokens], [batch, queries, tokens] "
            "or [batch, 1, queries, tokens], with at most as many queries as tokens"
        )
    square = mask.shape[-1] == mask.shape[-2]
    if mask.ndim == 2 or (mask == mask[0]).all() or not square:
        whole = mask if mask.ndim == 2 else mask[0]
        found, first = _nearest(whole)
        if first is not None and (mask.ndim == 2 or not square):
            raise _error(found.options(), whole, first)
        for entry in mask if mask.ndim == 3 and first is None else ():
            # Entries of other lengths are recognised only with a query for every token.
            other = _first_difference(entry, whole)
            if other is not None:
                raise _error(found.options(), entry, other)
        if first is None:
            return found.options()
    return _padded(mask)


def _padded(mask: numpy.ndarray) -> dict[str, Any]:
    """The options of a batch whose entries differ by their lengths."""
    tokens = mask.shape[1]
    seen = mask.any(1) | mask.any(2)
    lengths = [int(tokens - row[::-1].argmax()) if row.any() else 0 for row in seen]
    longest = int(numpy.argmax(lengths))
    length = lengths[longest]
    found, _ = _nearest(mask[longest, :length, :length]) if length else (_Pattern(), None)
    if found.documents is not None and length < tokens:
        *before, last = found.documents
        found = found._replace(documents=(*before, last + tokens - length))
    options = found.options()
    if any(length < tokens for length in lengths):
        options["key_lengths"] = lengths
    shown = found.mask(tokens, tokens)
    for entry, length in enumerate(lengths):
        expected = shown.copy()
        expected[length:] = False
        expected[:, length:] = False
        first = _first_difference(mask[entry], expected)
        if first is not None:
            raise _error(options, mask[entry], first, entry)
    return options


def _error(
    options: dict[str, Any], mask: numpy.ndarray, pair: tuple[int, int], entry: Optional[int] = None
) -> MaskError:
    query, key = pair
    sees = mask[query, key]
    words = ", ".join(f"{name}={value}" for name, value in options.items()) or "no mask at all"
    message = (
        f"query {query} {'sees' if sees else 'does not see'} key {key}, which the nearest pattern, "
        f"{words}, {'hides' if sees else 'shows'}; encke.attention has causal masks, windows, "
        "prefixes and documents"
    )
    if entry is None:
        return MaskError(message, pair)
    message = f"entry {entry} of the batch: {message}, and key_lengths"
    return MaskError(message, (entry, *pair))


def _nearest(mask: numpy.ndarray) -> tuple[_Pattern, Optional[tuple[int, int]]]:
    """The pattern that is equal, or the one that agrees longest and the first pair that differs."""
    best: Optional[tuple[_Pattern, tuple[int, int]]] = None
    square = mask.shape[0] == mask.shape[1]
    for pattern in _candidates(mask) if square else _candidates_of_some_queries(mask):
        first = _first_difference(mask, pattern.mask(*mask.shape))
        if first is None:
            return pattern, None
        if best is None or first > best[1]:
            best = pattern, first
    assert best is not None, "there is always a candidate"
    return best


def _first_difference(
    mask: numpy.ndarray, expected: numpy.ndarray
) -> Optional[tuple[int, int]]:
    different = mask != expected
    if not different.any():
        return None
    query, key = divmod(int(different.argmax()), mask.shape[1])
    return query, key


def _candidates(mask: numpy.ndarray) -> Iterator[_Pattern]:
    """Patterns to compare with the mask, the simplest first."""
    tokens = len(mask)
    for documents in _divisions(mask):
        lengths = documents or (tokens,)
        longest = int(numpy.argmax(lengths))
        first, length = sum(lengths[:longest]), lengths[longest]
        block = mask[first : first + length, first : first + length]
        # Where nothing ahead is visible, causal hides nothing more, and is the simplest word.
        for causal in (True, False):
            for left, right, prefix in _windows(block, causal):
                yield _Pattern(causal, left, right, prefix, documents)


def _divisions(mask: numpy.ndarray) -> Iterator[Optional[tuple[int, ...]]]:
    """Documents to try: none; cuts that no visible pair crosses; cuts between neighbours that do
    not see each other."""
    yield None
    tokens = len(mask)
    key = numpy.arange(tokens)
    last = numpy.maximum.accumulate(numpy.where(mask, key, -1).max(1))
    first = numpy.minimum.accumulate(numpy.where(mask, key, tokens).min(1)[::-1])[::-1]
    after = numpy.arange(1, tokens)
    uncrossed = (last[:-1] < after) & (first[1:] >= after)
    apart = ~mask[after, after - 1] & ~mask[after - 1, after]
    for cuts in (uncrossed, apart):
        if cuts.any():
            bounds = [0, *(numpy.flatnonzero(cuts) + 1).tolist(), tokens]
            yield tuple(end - begin for begin, end in zip(bounds, bounds[1:]))


def _windows(
    block: numpy.ndarray, causal: bool
) -> Iterator[tuple[Optional[int], Optional[int], int]]:
    """(left, right, prefix) to try for one document."""
    length = len(block)
    visible_to_all = numpy.tril(~block).any(0) if causal else (~block).any(0)
    leading = int(visible_to_all.argmax()) if visible_to_all.any() else length
    if leading == length:
        yield None, None, 0
        return
    for prefix in (0, leading):
        left = _run(block[prefix + 1 :, prefix])
        above = _run(block[:prefix, prefix][::-1])
        right = above if above < prefix else prefix + _run(block[0, prefix + 1 :])
        query, key = numpy.nonzero(block[:, prefix:])
        furthest = key + prefix - query if len(key) else numpy.zeros(1, dtype=int)
        reaches = ((left, right), (max(0, -int(furthest.min())), max(0, int(furthest.max()))))
        for left, right in reaches:
            limit_left = None if left >= length - 1 - prefix else left
            limit_right = None if causal or right >= length - 1 else right
            bounded = limit_left is not None or limit_right is not None
            yield limit_left, limit_right, prefix if bounded else 0
    yield None, None, 0


# How many positions of the first query are tried, of those at which every query sees itself.
_MAX_OFFSETS = 64


def _candidates_of_some_queries(mask: numpy.ndarray) -> Iterator[_Pattern]:
    """Patterns to compare with a mask that has fewer queries than tokens."""
    queries, tokens = mask.shape
    usual = tokens - queries
    # Where nothing after a query is visible, the last key that one sees is its own position.
    key = numpy.arange(tokens)
    last = numpy.where(mask, key, -1).max(1) - numpy.arange(queries)
    offsets = [usual, int(last[0]), int(last[-1])]
    own = numpy.arange(queries)
    for offset in range(usual, -1, -1):
        if mask[own, own + offset].all():
            offsets.append(offset)
        if len(offsets) > _MAX_OFFSETS:
            break
    for offset in dict.fromkeys(at for at in offsets if 0 <= at <= usual):
        given = None if offset == usual else offset
        for documents in _divisions_of_some_queries(mask, offset):
            for causal in (True, False):
                base = _Pattern(causal, documents=documents, query_offset=given)
                yield from _windows_of_some_queries(mask, base, offset)


def _divisions_of_some_queries(
    mask: numpy.ndarray, offset: int
) -> Iterator[Optional[tuple[int, ...]]]:
    """Documents to try: none, and the cuts around and between queries that no pair crosses."""
    yield None
    queries, tokens = mask.shape
    key, query = numpy.arange(tokens), offset + numpy.arange(queries)
    crossed = numpy.zeros(tokens + 1, dtype=int)
    low = numpy.minimum(numpy.where(mask, key, tokens).min(1), query)
    high = numpy.maximum(numpy.where(mask, key, -1).max(1), query)
    # The cuts from low + 1 to high are crossed.
    numpy.add.at(crossed, low + 1, 1)
    numpy.add.at(crossed, high + 1, -1)
    cuts = numpy.flatnonzero(numpy.cumsum(crossed)[1:tokens] == 0) + 1
    # Documents without queries may be one.
    before, after = cuts[cuts <= query[0]], cuts[cuts > query[-1]]
    between = cuts[(cuts > query[0]) & (cuts <= query[-1])]
    kept = [*before[-1:].tolist(), *between.tolist(), *after[:1].tolist()]
    if kept:
        bounds = [0, *kept, tokens]
        yield tuple(end - begin for begin, end in zip(bounds, bounds[1:]))


def _windows_of_some_queries(
    mask: numpy.ndarray, base: _Pattern, offset: int
) -> Iterator[_Pattern]:
    """The pattern with the windows and prefixes to try, from all pairs of a document."""
    queries, tokens = mask.shape
    firsts = base.firsts(tokens)
    key, query = numpy.arange(tokens), offset + numpy.arange(queries)[:, None]
    within = firsts == firsts[query]
    if base.causal:
        within &= key <= query
    hidden = within & ~mask
    # Positions of keys in their documents that some query does not see.
    places = (key - firsts)[hidden.any(0)]
    if not len(places):
        yield base
        return
    for prefix in dict.fromkeys((0, int(places.min()))):
        shown = within & mask & (key - firsts >= prefix)
        distance = query - key
        left = right = None
        if (hidden & (distance > 0)).any():
            left = int(distance[shown].max(initial=0))
        if (hidden & (distance < 0)).any():
            right = int((-distance)[shown].max(initial=0))
        yield base._replace(left=left, right=right, prefix=prefix)


def _run(seen: numpy.ndarray) -> int:
    """How many of the first ones are True."""
    return int((~seen).argmax()) if not seen.all() else len(seen)


__all__ = ["MaskError", "pattern_of"]
