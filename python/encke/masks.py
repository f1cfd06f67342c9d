"""Masks and score options as the library takes them: windows, documents, slopes, key lengths.

Everything is checked here, by name and with the offending number, before a tensor is read; what
depends on the shape of the tensors (do the documents add up to the sequence?) is checked by the
library. Values become hashable, because options are the key of the cache of attentions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

Slopes = Union[None, bool, tuple[float, ...]]


def window_of(window: Any) -> Optional[tuple[Optional[int], Optional[int]]]:
    """(left, right), or None for a window that hides nothing.

    >>> window_of((3, None))
    (3, None)
    >>> window_of(4)
    Traceback (most recent call last):
    ...
    TypeError: window is 4; it must be (left, right), the keys seen before and after a query's own \
position, None for no limit: a sliding window of 4 tokens that ends at the query is (3, 0)
    """
    if window is None:
        return None
    if isinstance(window, int):
        raise TypeError(
            f"window is {window}; it must be (left, right), the keys seen before and after a "
            "query's own position, None for no limit: a sliding window of "
            f"{window} tokens that ends at the query is ({window - 1}, 0)"
        )
    sides = tuple(window)
    if len(sides) != 2:
        raise ValueError(f"window has {len(sides)} numbers, {sides}; it must be (left, right)")
    left, right = (None if side is None else operator.index(side) for side in sides)
    for side in (left, right):
        if side is not None and side < 0:
            raise ValueError(
                f"window is {(left, right)}; a side must be 0 or more, or None for no limit"
            )
    return None if left is None and right is None else (left, right)


def prefix_of(prefix: Any) -> int:
    """A number of tokens."""
    prefix = operator.index(prefix)
    if prefix < 0:
        raise ValueError(f"prefix is {prefix}; it must be 0 or more tokens")
    return prefix


def offset_of(query_offset: Any) -> Optional[int]:
    """The position of the first query."""
    if query_offset is None:
        return None
    offset = operator.index(query_offset)
    if offset < 0:
        raise ValueError(f"query_offset is {offset}; it must be 0 or more")
    return offset


def rate_of(dropout: Any) -> float:
    """The probability that a pair is dropped."""
    rate = float(dropout)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout is {rate}; it must be at least 0 and below 1")
    return rate


def seed_of(seed: Any) -> Optional[int]:
    """A number of 64 bits without a sign; a tensor has it with one."""
    if seed is None:
        return None
    if hasattr(seed, "item"):
        return int(seed.item()) % 2**64
    number = operator.index(seed)
    if not 0 <= number < 2**64:
        raise ValueError(f"seed is {number}; it must be from 0 to 2**64 - 1")
    return number


def documents_of(documents: Any, cu_seqlens: Any) -> Optional[tuple[int, ...]]:
    """The lengths of the documents, given as such or by the tokens at which they begin and end.

    >>> documents_of(None, [0, 3, 3, 10])
    (3, 0, 7)
    """
    if documents is not None and cu_seqlens is not None:
        raise ValueError("documents and cu_seqlens are two forms of one thing; give one of them")
    if cu_seqlens is None:
        return None if documents is None else _lengths("documents", documents)
    bounds = _integers("cu_seqlens", cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0:
        raise ValueError(
            f"cu_seqlens is {_shortened(bounds)}; it must have at least two numbers and begin with "
            "0: the first token of each document, and the length of the sequence"
        )
    for at in range(1, len(bounds)):
        if bounds[at] < bounds[at - 1]:
            raise ValueError(
                f"cu_seqlens[{at}] is {bounds[at]}, after {bounds[at - 1]}; it must not decrease"
            )
    return tuple(bounds[at] - bounds[at - 1] for at in range(1, len(bounds)))


def slopes_of(alibi_slopes: Any) -> Slopes:
    """True for the usual slopes, or the slope of each head."""
    if alibi_slopes is None or isinstance(alibi_slopes, bool):
        return alibi_slopes or None
    refuse_learned_slopes(alibi_slopes)
    return numbers("alibi_slopes", alibi_slopes)


def refuse_learned_slopes(slopes: Any) -> None:
    """Slopes have no gradient, which training would not notice."""
    if getattr(slopes, "requires_grad", False):
        raise ValueError(
            "alibi_slopes requires a gradient, which Encke does not compute; give "
            "alibi_slopes.detach()"
        )


def key_lengths_of(key_lengths: Any) -> Optional[tuple[int, ...]]:
    """The number of tokens of each batch entry."""
    return None if key_lengths is None else _lengths("key_lengths", key_lengths)


def numbers(name: str, values: Any) -> tuple[float, ...]:
    """A sequence, an array or a tensor of one dimension as floats."""
    values = _listed(name, values)
    return tuple(float(value) for value in values)


def boundaries(lengths: Sequence[int]) -> list[int]:
    """The inverse of cu_seqlens: the sums of all documents before each, and of all.

    >>> boundaries((3, 0, 7))
    [0, 3, 3, 10]
    """
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def _lengths(name: str, values: Any) -> tuple[int, ...]:
    lengths = _integers(name, values)
    for at, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name}[{at}] is {length}; a length must be 0 or more")
    return tuple(lengths)


def _integers(name: str, values: Any) -> list[int]:
    values = _listed(name, values)
    for at, value in enumerate(values):
        if isinstance(value, (float, bool)):
            raise TypeError(f"{name}[{at}] is {value}; it must be a whole number")
    return [operator.index(value) for value in values]


def _listed(name: str, values: Any) -> list[Any]:
    """A list, from a sequence, an array or a tensor."""
    if hasattr(values, "filled") and hasattr(values, "mask"):
        raise TypeError(
            f"{name} is a masked array, whose mask Encke would ignore; give {name}.filled()"
        )
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise TypeError(f"{name} is {values!r}; it must be a sequence of numbers")
    listed = list(listed)
    if any(isinstance(value, (list, tuple)) for value in listed):
        shape = list(getattr(values, "shape", ()))
        raise ValueError(f"{name} has shape {shape}; it must have one dimension")
    return listed


def _shortened(values: Sequence[int]) -> str:
    """A list in an error, of which only the beginning matters."""
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
