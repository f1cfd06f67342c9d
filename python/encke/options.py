"""The options of a call as one hashable value, and the cache of attentions by their options.

Making an attention and its plan takes microseconds to milliseconds; both are cached, so a call with
options that were used before costs one dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

from encke import _encke


class Options(NamedTuple):
    """Every option of :func:`encke.attention`; the defaults are dense attention."""

    segment_lengths: Optional[tuple[int, ...]] = None
    dilation_rates: Optional[tuple[int, ...]] = None
    mode: str = "group"
    group_scale: Optional[str] = None
    offsets: Optional[str] = None
    mixing_gradient: Optional[str] = None
    causal: bool = False
    scale: Optional[float] = None
    ranks: Union[int, str, None] = None
    sharding: Union[str, tuple[int, ...]] = "contiguous"
    queries: str = "sharded"
    precision: Optional[str] = None
    checkpoint: str = "keep"
    redundancy: int = 0
    deadline: Optional[float] = None
    deterministic: bool = True
    memory_per_rank: Optional[int] = None


# Size of the cache. A model has one or two attentions for every kind of layer; a program with more
# than this generates options, and the cache is cleared.
_MAX_CACHED = 256
_cache: dict[tuple[Any, ...], _encke.Attention] = {}


def find(options: tuple[Any, ...]) -> _encke.Attention:
    """The attention with these options (the fields of :class:`Options`, in order)."""
    attention = _cache.get(options)
    if attention is None:
        attention = _encke.Attention(Options(*options)._asdict())
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        _cache[options] = attention
    return attention


def as_tuple(values: Optional[Sequence[int]]) -> Optional[tuple[int, ...]]:
    """A sequence as a hashable tuple."""
    return None if values is None else tuple(values)


def from_keywords(given: dict[str, Any]) -> Options:
    """Options from keyword arguments; unknown ones are a TypeError."""
    unknown = given.keys() - set(Options._fields)
    if unknown:
        known = ", ".join(Options._fields)
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; known: {known}")
    for name in ("segment_lengths", "dilation_rates"):
        if name in given:
            given[name] = as_tuple(given[name])
    if not isinstance(given.get("sharding", ""), str):
        given["sharding"] = tuple(given["sharding"])
    if given.get("precision") is not None:
        given["precision"] = str(given["precision"])
    return Options(**given)
