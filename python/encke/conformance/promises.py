"""What a context-parallel attention may promise, as data: cases that each must be right."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional


class Case(NamedTuple):
    """One call: a shape (tokens for each rank, and some more), options, and circumstances."""

    rows: int = 8
    more: int = 0
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    dtype: Optional[str] = None
    sharding: Optional[str] = None
    options: dict[str, Any] = {}
    # Documents as shares of the sequence; the last takes the rest.
    shares: Optional[tuple[float, ...]] = None
    sinks: bool = False
    backward: bool = False
    # The inputs are multiplied by it.
    factor: float = 1.0
    repeats: int = 1
    # Seconds that one rank is late in each pass.
    late: float = 0.0

    def tokens(self, ranks: int) -> int:
        """The length of the sequence."""
        return self.rows * ranks + self.more

    def needs(self) -> set[str]:
        """The arguments that a function must have for it."""
        named = set(self.options)
        if self.shares is not None:
            named.add("documents")
        if self.sinks:
            named.add("sinks")
        return named

    def to_text(self, ranks: int) -> str:
        """The case in words."""
        words = [f"{self.tokens(ranks)} tokens", f"{self.heads} heads"]
        if self.kv_heads != self.heads:
            words.append(f"{self.kv_heads} key heads")
        words += [f"{name}={value}" for name, value in self.options.items()]
        if self.shares is not None:
            words.append(f"{len(self.shares) + 1} documents")
        words += [word for word in (self.sharding, self.dtype) if word]
        return ", ".join(words)


class Promise(NamedTuple):
    """A name and the cases that must be right."""

    name: str
    cases: tuple[Case, ...]


_CAUSAL = dict(causal=True)
_BOTH = dict(backward=True)
_SHARES = (0.13, 0.04, 0.5)

PROMISES = (
    Promise("forward", (Case(), Case(rows=1), Case(batch=1, heads=1, kv_heads=1, dim=16))),
    Promise("gradients", (Case(**_BOTH), Case(rows=3, batch=1, **_BOTH))),
    Promise("causal", (Case(options=_CAUSAL, **_BOTH), Case(rows=33, options=_CAUSAL, **_BOTH))),
    Promise("lengths", tuple(Case(rows=5, more=more, **_BOTH) for more in (1, 3))),
    Promise(
        "grouped heads",
        tuple(Case(kv_heads=n, options=_CAUSAL, **_BOTH) for n in (2, 1)),
    ),
    Promise("scale", (Case(options=dict(scale=0.7), **_BOTH),)),
    Promise(
        "windows",
        tuple(
            Case(options=dict(causal=True, window=(left, 0)), **_BOTH) for left in (0, 3, 7, 11)
        )
        + (Case(options=dict(window=(5, 2)), **_BOTH),),
    ),
    Promise(
        "documents",
        (
            Case(rows=16, shares=_SHARES, options=_CAUSAL, **_BOTH),
            Case(rows=16, shares=_SHARES, **_BOTH),
            Case(rows=16, shares=(0.5,), options=_CAUSAL, **_BOTH),
        ),
    ),
    Promise("sinks", (Case(sinks=True, options=_CAUSAL, **_BOTH),)),
    Promise("softcap", (Case(options=dict(softcap=1.5), factor=2.0, **_BOTH),)),
    Promise(
        "shardings",
        tuple(
            Case(sharding=name, options=_CAUSAL, **_BOTH)
            for name in ("contiguous", "zigzag", "striped")
        ),
    ),
    Promise("large scores", (Case(factor=12.0, options=_CAUSAL, **_BOTH),)),
    Promise(
        "dtypes",
        tuple(
            Case(dtype=name, options=_CAUSAL, dim=16, **_BOTH)
            for name in ("float64", "float32", "bfloat16", "float16")
        ),
    ),
    Promise("determinism", (Case(rows=40, dtype="float32", repeats=4, **_BOTH),)),
    Promise("a slow rank", (Case(options=_CAUSAL, late=0.4, **_BOTH),)),
)
