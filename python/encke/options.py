"""The options of a call as one value: what attentions are kept by, and how they are made.

Making an attention takes microseconds and making its plan more; both are kept with it, so a call with
options that were seen before finds them by one lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

from encke import _encke


class Options(NamedTuple):
    """Every option that decides what is computed and how; the defaults are dense attention."""

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


# How many attentions are kept. A model has one or two for every kind of layer; more than this is a
# program that makes up options as it goes, and all of them are forgotten.
_MOST = 256
_kept: dict[tuple[Any, ...], _encke.Attention] = {}


def find(options: tuple[Any, ...]) -> _encke.Attention:
    """The attention with these options (the fields of :class:`Options`, in order)."""
    attention = _kept.get(options)
    if attention is None:
        attention = _encke.Attention(Options(*options)._asdict())
        if len(_kept) >= _MOST:
            _kept.clear()
        _kept[options] = attention
    return attention


def as_tuple(numbers: Optional[Sequence[int]]) -> Optional[tuple[int, ...]]:
    """A sequence as something that can be looked up."""
    return None if numbers is None else tuple(numbers)


def gathered(given: dict[str, Any]) -> Options:
    """Options from keywords, for functions that pass them on; unknown ones are refused."""
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
