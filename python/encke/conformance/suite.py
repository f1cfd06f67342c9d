"""Runs the cases of promises on a function, on every rank of a launch, and compares.

The decision here: every rank makes the whole inputs from one seed and computes the reference by
itself, so that comparing needs no communication of the function under test; only verdicts are
exchanged. An error may be twice that of a dense computation in the same type, plus a floor.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from encke.conformance import reference
from encke.conformance.promises import Case, Promise
from encke.distributed import positions, shard, sizes_of

_SHARDINGS = ("contiguous", "zigzag", "striped")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
# What is allowed beside twice the error of a dense computation, of the largest element.
_FLOORS = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


class Offer(NamedTuple):
    """A function and what it says of itself."""

    function: Callable[..., Any]
    arguments: frozenset[str]
    shardings: tuple[str, ...]
    dtypes: tuple[str, ...]
    even: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> Offer:
        """What the function's arguments and attributes say."""
        arguments = frozenset(inspect.signature(function).parameters)
        usual = _SHARDINGS if "sharding" in arguments else _SHARDINGS[:1]
        shardings = getattr(function, "shardings", usual)
        dtypes = getattr(function, "dtypes", _DTYPES)
        even = getattr(function, "even", False)
        return Offer(function, arguments, tuple(shardings), tuple(dtypes), even)

    def missing(self, case: Case, ranks: int) -> Optional[str]:
        """Why the case is not offered; None if it is."""
        lacking = sorted(case.needs() - self.arguments)
        if lacking:
            return f"no argument {lacking[0]}"
        if case.dtype is not None and case.dtype not in self.dtypes:
            return case.dtype
        if case.sharding is not None and case.sharding not in self.shardings:
            return case.sharding
        sizes = sizes_of(
            case.tokens(ranks), ranks=ranks, sharding=case.sharding or self.shardings[0]
        )
        if self.even and len(set(sizes)) > 1:
            return "other lengths than multiples of the ranks"
        return None


class Outcome(NamedTuple):
    """What became of a promise: ``holds``, ``fails``, ``raises``, ``not offered``, or ``ends``
    where the ranks lost each other, and no more can be run."""

    promise: str
    verdict: str
    text: str


def run(offer: Offer, promises: Any, device: str = "cpu") -> Iterator[Outcome]:
    """The outcome of each promise, the same on all ranks; ends where ranks lose each other."""
    for promise in promises:
        outcome = _hold(offer, promise, device)
        yield outcome
        if outcome.verdict == "ends":
            return


def _hold(offer: Offer, promise: Promise, device: str) -> Outcome:
    ranks = dist.get_world_size()
    ran, skipped = 0, []
    for case in promise.cases:
        reason = offer.missing(case, ranks)
        if reason is not None:
            skipped.append(reason)
            continue
        verdict, text = "fails", None
        try:
            text = _compare(offer, case, device)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            verdict, text = "raises", f"{type(error).__name__}: {lines[0][:160]}"
        found: list[Any] = [None] * ranks
        try:
            dist.all_gather_object(found, (verdict, text))
        except RuntimeError:
            # Another rank waits in the function, or has given up waiting.
            return Outcome(promise.name, "ends", f"{text or 'another rank did not answer'}")
        wrong = [(rank, *of) for rank, of in enumerate(found) if of[1] is not None]
        if wrong:
            rank, verdict, text = wrong[0]
            return Outcome(promise.name, verdict, f"rank {rank}, {text} ({case.to_text(ranks)})")
        ran += 1
    besides = f", without {'; '.join(sorted(set(skipped)))}" if skipped else ""
    if not ran:
        return Outcome(promise.name, "not offered", "; ".join(sorted(set(skipped))))
    return Outcome(promise.name, "holds", f"{ran} cases{besides}")


def _compare(offer: Offer, case: Case, device: str) -> Optional[str]:
    """The first mistake of this rank's rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens = case.tokens(ranks)
    dtype = case.dtype or offer.dtypes[0]
    sharding = case.sharding or offer.shardings[0]
    cut = dict(sharding=sharding, ranks=ranks, rank=rank)
    whole = _inputs(case, tokens, getattr(torch, dtype), device)
    options = dict(case.options)
    if case.shares is not None:
        options["documents"] = _documents(case.shares, tokens)
    given = _arguments(offer, options, sharding, tokens)
    exact = _whole(reference.attention, [x.double() for x in whole], case, options)
    dense = _whole(reference.attention, whole, case, options)
    where = positions(tokens, **cut)
    first: Optional[list[Tensor]] = None
    for _ in range(case.repeats):
        local = [shard(x, **cut).clone() for x in whole[:4]] + whole[4:]
        found = _whole(offer.function, local, case, given, rank == 0)
        if case.sinks and case.backward and found[4] is not None:
            # The gradient of this rank's rows; those of all ranks add up.
            dist.all_reduce(found[4])
        mistake = _first_mistake(found, exact, dense, dtype, where, cut)
        if mistake is not None:
            return mistake
        if first is not None and not all(torch.equal(a, b) for a, b in zip(first, found)):
            return "a second call gives other bits"
        first = found
    return None


def _inputs(case: Case, tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v, the gradient of the output and, if there are any, sinks; the same on all ranks."""
    generator = torch.Generator().manual_seed(1 + tokens)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    rows = [
        torch.randn(case.batch, tokens, h, case.dim, generator=generator, dtype=torch.float64)
        for h in heads
    ]
    rows[0], rows[1] = rows[0] * case.factor, rows[1] * case.factor
    if case.sinks:
        rows.append(torch.randn(case.heads, generator=generator, dtype=torch.float64))
    return [x.to(device=device, dtype=dtype) for x in rows]


def _documents(shares: tuple[float, ...], tokens: int) -> list[int]:
    lengths = [max(1, int(share * tokens)) for share in shares]
    return [*lengths, tokens - sum(lengths)]


def _arguments(
    offer: Offer, options: dict[str, Any], sharding: str, tokens: int
) -> dict[str, Any]:
    given = dict(options)
    if "sharding" in offer.arguments:
        given["sharding"] = sharding
    if "sizes" in offer.arguments:
        given["sizes"] = sizes_of(tokens, ranks=dist.get_world_size(), sharding=sharding)
    if "group" in offer.arguments:
        given["group"] = None
    return given


def _whole(
    function: Callable[..., Any],
    tensors: list[Tensor],
    case: Case,
    options: dict[str, Any],
    late: bool = False,
) -> list[Tensor]:
    """out, and with a backward pass dq, dk, dv and the gradient of the sinks."""
    inputs = [x.detach().clone().requires_grad_() for x in (*tensors[:3], *tensors[4:])]
    if case.sinks:
        options = dict(options, sinks=inputs[3])
    if late:
        time.sleep(case.late)
    out = function(*inputs[:3], **options)
    out = out[0] if isinstance(out, tuple) else out
    if not case.backward:
        return [out.detach()]
    if late:
        time.sleep(case.late)
    out.backward(tensors[3].to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs)]


_NAMES = ("out", "dq", "dk", "dv", "dsinks")


def _first_mistake(
    found: list[Any],
    exact: list[Tensor],
    dense: list[Tensor],
    dtype: str,
    where: Tensor,
    cut: dict[str, Any],
) -> Optional[str]:
    """In words: which element is further from the reference than is allowed."""
    for name, got, right, beside in zip(_NAMES, found, exact, dense):
        allowed = 2 * (beside.double() - right).abs().max()
        allowed = allowed + _FLOORS[dtype] * right.abs().max().clamp(min=1.0)
        if got is None:
            return f"{name} has no gradient"
        mine = right if name == "dsinks" else shard(right, **cut)
        if got.shape != mine.shape:
            return f"{name} has shape {list(got.shape)}, not {list(mine.shape)}"
        wrong = ~((got.double() - mine).abs() <= allowed)
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            value, wanted = got[tuple(at)].item(), mine[tuple(at)].item()
            place = f"head {at[0]}"
            if name != "dsinks":
                batch, row, head, element = at
                token = where[row].item()
                place = f"batch {batch}, token {token}, head {head}, element {element}"
            share = wrong.double().mean().item()
            return f"{name} at {place}: {value:.6g}, not {wanted:.6g}; {share:.0%} are wrong"
    return None
