"""The options of a call as one hashable value, and the cache of attentions by their options.

Making an attention and its plan takes microseconds to milliseconds; both are cached, so a call with
options that were used before costs one dictionary lookup. Attentions of packed documents have a
smaller cache of their own: the next batch mostly has another packing. Attentions that differ in the
seed alone share their plans and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

from encke import _encke
from encke.masks import (
    Slopes,
    documents_of,
    offset_of,
    prefix_of,
    rate_of,
    seed_of,
    slopes_of,
    window_of,
)


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
    window: Optional[tuple[Optional[int], Optional[int]]] = None
    prefix: int = 0
    softcap: Optional[float] = None
    alibi_slopes: Slopes = None
    # Of packed rows of a padded batch, those of each entry.
    documents: Union[None, tuple[int, ...], tuple[tuple[int, ...], ...]] = None
    query_offset: Optional[int] = None
    dropout: float = 0.0
    seed: Optional[int] = None
    padding: Optional[str] = None
    bits: str = "planned"


DOCUMENTS = Options._fields.index("documents")
SEED = Options._fields.index("seed")
SLOPES = Options._fields.index("alibi_slopes")

# Size of the cache. A model has one or two attentions for every kind of layer; a program with more
# than this generates options, and the cache is cleared.
_MAX_CACHED = 256
_cache: dict[tuple[Any, ...], _encke.Attention] = {}
# Attentions of packed documents, the latest last.
_MAX_PACKED = 8
_packed: dict[tuple[Any, ...], _encke.Attention] = {}


def find(options: tuple[Any, ...]) -> _encke.Attention:
    """The attention with these options (the fields of :class:`Options`, in order)."""
    seed = options[SEED]
    if seed:
        return find((*options[:SEED], 0, *options[SEED + 1 :])).with_seed(seed)
    attention = _cache.get(options)
    if attention is not None:
        return attention
    if options[DOCUMENTS] is not None:
        return _find_packed(options)
    attention = _made(options)
    if len(_cache) >= _MAX_CACHED:
        _cache.clear()
    _cache[options] = attention
    return attention


def _made(options: tuple[Any, ...]) -> _encke.Attention:
    given = Options(*options)
    for name in ("segment_lengths", "dilation_rates"):
        _refuse_lengths(name, getattr(given, name))
    refuse_swapped(given.segment_lengths, given.dilation_rates)
    return _encke.Attention(given._asdict())


def _refuse_lengths(name: str, values: Any) -> None:
    """Refuses what counts no tokens."""
    for index, value in enumerate(values or ()):
        whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if not whole or value < 1:
            raise (ValueError if whole else TypeError)(
                f"{name}[{index}] is {value!r}; it must be a whole number of tokens, at least 1"
            )


def refuse_swapped(lengths: Any, rates: Any) -> None:
    """Packages differ in the order of the two, and swapped ones would run, on the wrong pattern.

    >>> refuse_swapped((1, 4), (2048, 8192))
    Traceback (most recent call last):
    ...
    ValueError: segment_lengths [1, 4] are all shorter than dilation_rates [2048, 8192]: a segment \
would have one token. Are the two swapped? (encke.nn.MultiheadDilatedAttention takes rates first)
    """
    if not lengths or not rates or len(lengths) != len(rates):
        return
    if all(length < rate for length, rate in zip(lengths, rates)):
        raise ValueError(
            f"segment_lengths {list(lengths)} are all shorter than dilation_rates {list(rates)}: a "
            "segment would have one token. Are the two swapped? "
            "(encke.nn.MultiheadDilatedAttention takes rates first)"
        )


# What a call may give beside the fields of Options.
_OF_A_CALL = ("sinks", "key_lengths", "return_lse")


def refuse_wrong(given: dict[str, Any]) -> None:
    """Refuses options of a module when it is made, as its first call would."""
    fixed = {name: value for name, value in given.items() if name not in _OF_A_CALL}
    softcap, scale = fixed.get("softcap"), fixed.get("scale")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it must be a positive, finite number")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")
    if fixed.get("documents") is not None and fixed.get("cu_seqlens") is not None:
        documents_of(fixed["documents"], fixed["cu_seqlens"])
    # What depends on the tensors of a call, or is drawn for it, is not checked here.
    for name in ("documents", "cu_seqlens", "query_offset"):
        fixed.pop(name, None)
    if fixed.get("seed") is None:
        fixed.pop("dropout", None)
    find(tuple(from_keywords(fixed)))


def refuse_two_names(given: dict[str, Any], **names: str) -> None:
    """Refuses options that a module has under a name of its own."""
    for name, own in names.items():
        if name in given:
            raise TypeError(f"{name} and {own} are two names of one option here; give {own}")


def _find_packed(options: tuple[Any, ...]) -> _encke.Attention:
    attention = _packed.pop(options, None)
    if attention is None:
        attention = _made(options)
    _packed[options] = attention
    for oldest in list(_packed)[:-_MAX_PACKED]:
        _packed.pop(oldest, None)
    return attention


def with_masks(
    options: tuple[Any, ...],
    documents: Any,
    cu_seqlens: Any,
    slopes: Any,
    seed: Optional[int] = None,
) -> Options:
    """The options with documents, slopes and seed in the library's form."""
    given = Options(*options)
    return given._replace(
        documents=documents_of(documents, cu_seqlens),
        alibi_slopes=slopes_of(slopes),
        # Without dropout a seed has no effect; the same attention serves all of them.
        seed=seed_of(seed) if given.dropout else None,
    )


def as_tuple(values: Optional[Sequence[int]]) -> Optional[tuple[int, ...]]:
    """A sequence as a hashable tuple."""
    return None if values is None else tuple(values)


def from_keywords(given: dict[str, Any]) -> Options:
    """Options from keyword arguments; unknown ones are a TypeError."""
    documents, cu_seqlens = given.pop("documents", None), given.pop("cu_seqlens", None)
    unknown = given.keys() - set(Options._fields)
    if unknown:
        known = ", ".join((*Options._fields, "cu_seqlens"))
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; known: {known}")
    for name in ("segment_lengths", "dilation_rates"):
        if name in given:
            given[name] = as_tuple(given[name])
    if not isinstance(given.get("sharding", ""), str):
        given["sharding"] = tuple(given["sharding"])
    if given.get("precision") is not None:
        given["precision"] = str(given["precision"])
    given["window"] = window_of(given.get("window"))
    given["prefix"] = prefix_of(given.get("prefix", 0))
    given["query_offset"] = offset_of(given.get("query_offset"))
    given["dropout"] = rate_of(given.get("dropout", 0.0))
    slopes, seed = given.get("alibi_slopes"), given.get("seed")
    return with_masks(Options(**given), documents, cu_seqlens, slopes, seed)
