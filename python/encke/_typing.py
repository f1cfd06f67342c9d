"""Types for type checkers: options of functions as keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, TypedDict, Union


class CommonOptions(TypedDict, total=False):
    """The pattern, the scores and the arithmetic, in one process or in several."""

    segment_lengths: Optional[Sequence[int]]
    dilation_rates: Optional[Sequence[int]]
    mode: str
    group_scale: Optional[str]
    offsets: Optional[str]
    mixing_gradient: Optional[str]
    padding: Optional[str]
    causal: bool
    window: Optional[tuple[Optional[int], Optional[int]]]
    prefix: int
    documents: Any
    cu_seqlens: Any
    scale: Optional[float]
    softcap: Optional[float]
    alibi_slopes: Any
    sinks: Any
    query_offset: Optional[int]
    dropout: float
    seed: Any
    precision: Any
    checkpoint: str
    bits: str


class AttentionOptions(CommonOptions, total=False):
    """Every option of :func:`encke.attention` but ``return_lse``, which decides what it returns."""

    key_lengths: Any
    ranks: Union[int, str, None]
    sharding: Union[str, Sequence[int]]
    queries: str
    redundancy: int
    deadline: Optional[float]
    deterministic: bool
    memory_per_rank: Optional[int]


class RingOptions(CommonOptions, total=False):
    """The same of :func:`encke.distributed.ring_attention`."""

    group: Any
    sharding: str
    sizes: Optional[Sequence[int]]
    query_tokens: Optional[int]
