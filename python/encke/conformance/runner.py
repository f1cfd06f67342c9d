"""Runs promises on the processes of a group, and compares."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from encke._ring import expected_sizes
from encke.conformance.promises import PROMISES, TOLERANCES, Promise, definition
from encke.distributed import shard

# Options that are tried only if the function's signature has them.
_OFFERED = ("causal", "window", "documents", "sinks", "scale", "group")
_LATE_SECONDS = 0.3


class Outcome(NamedTuple):
    """What came of one promise: holds, wrong, refused, not offered or failed, and why."""

    promise: str
    verdict: str
    detail: str = ""


def check(
    function: Callable[..., Any],
    device: torch.device,
    group: Optional[dist.ProcessGroup] = None,
    promises: Iterable[Promise] = PROMISES,
) -> list[Outcome]:
    """The outcome of each promise, the same on all ranks; every rank of the group calls it."""
    outcomes = []
    for promise in promises:
        own = _one(function, promise, device, group)
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, own, group=group)
        outcomes.append(_worst(every))
    return outcomes


def _worst(every: list[Outcome]) -> Outcome:
    """The outcome of the first rank for which it is the gravest."""
    gravest = ["failed", "wrong", "refused", "not offered", "holds"]
    rank = min(range(len(every)), key=lambda rank: gravest.index(every[rank].verdict))
    found = every[rank]
    detail = f"rank {rank}: {found.detail}" if found.verdict in gravest[:2] else found.detail
    return found._replace(detail=detail)


class _Call(NamedTuple):
    """The inputs of one promise, of the whole sequence, and the rows of this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Optional[Tensor]
    options: dict[str, Any]
    mine: Callable[[Tensor], Tensor]


def _one(
    function: Callable[..., Any], promise: Promise, device: torch.device, group: Any
) -> Outcome:
    if promise.dtype is None:
        promise = promise._replace(dtype=getattr(function, "dtype", torch.float32))
    accepted = inspect.signature(function).parameters
    flexible = any(of.kind is of.VAR_KEYWORD for of in accepted.values())
    call = _call(promise, device, group, getattr(function, "sharding", "contiguous"))
    given = dict(call.options)
    if call.sinks is not None:
        given["sinks"] = call.sinks
    if "group" in accepted:
        given["group"] = group
    missing = [name for name in given if name in _OFFERED and not flexible and name not in accepted]
    if missing:
        return Outcome(promise.name, "not offered", f"the function has no {missing[0]}")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    results = []
    try:
        for _ in range(promise.calls):
            if promise.late is not None and rank == promise.late % ranks:
                time.sleep(_LATE_SECONDS)
            results.append(_results(function, promise, call, given))
    except NotImplementedError as error:
        return Outcome(promise.name, "not offered", _sentence(error))
    except (ValueError, TypeError, AssertionError) as error:
        return Outcome(promise.name, "refused", _sentence(error))
    except Exception as error:
        return Outcome(promise.name, "failed", f"{type(error).__name__}: {_sentence(error)}")
    if promise.bits and any(not torch.equal(x, y) for x, y in zip(*(r.values() for r in results))):
        return Outcome(promise.name, "wrong", "the bits of two equal calls differ")
    return _compared(promise, call, results[-1], rank, group)


def _sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _call(promise: Promise, device: torch.device, group: Any, sharding: str) -> _Call:
    ranks = dist.get_world_size(group)
    tokens = promise.tokens * ranks + promise.extra
    generator = torch.Generator().manual_seed(sum(promise.name.encode()))
    dtype = promise.dtype or torch.float32

    def random(heads: int) -> Tensor:
        drawn = torch.randn(
            promise.batch, tokens, heads, promise.dim, generator=generator, dtype=torch.float64
        )
        return drawn.to(dtype)

    q, k = promise.size * random(promise.heads), promise.size * random(promise.kv_heads)
    v, dout = random(promise.kv_heads), random(promise.heads)
    options = dict(promise.options)
    if promise.documents is not None:
        lengths = [int(share * tokens) for share in promise.documents[:-1]]
        options["documents"] = [*lengths, tokens - sum(lengths)]
    sinks = None
    if promise.sinks:
        sinks = torch.randn(promise.heads, generator=generator, dtype=torch.float64)
        sinks = sinks.to(dtype).to(device)
    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))

    def mine(x: Tensor) -> Tensor:
        sizes = expected_sizes(tokens, ranks, sharding) if sharding == "contiguous" else None
        return shard(x, group=group, sharding=sharding, sizes=sizes)

    return _Call(q, k, v, dout, sinks, options, mine)


def _results(
    function: Callable[..., Any], promise: Promise, call: _Call, given: dict[str, Any]
) -> dict[str, Tensor]:
    """Outputs and gradients of this rank's rows."""
    inputs = []
    for x in (call.q, call.k, call.v):
        own = call.mine(x).clone()
        if promise.strided:
            # As a slice of one fused projection.
            own = torch.stack([own, torch.full_like(own, torch.nan)], 2)[:, :, 0]
        inputs.append(own.detach().requires_grad_(promise.gradients))
    before = [x.detach().clone() for x in inputs]
    given = dict(given)
    if call.sinks is not None:
        given["sinks"] = call.sinks.clone().requires_grad_(promise.gradients)
    out = function(*inputs, **given)
    out = out[0] if isinstance(out, tuple) else out
    found = {"out": out.detach()}
    if promise.gradients:
        out.backward(call.mine(call.dout).to(out.dtype))
        found.update(zip(("dq", "dk", "dv"), (x.grad for x in inputs)))
        if call.sinks is not None:
            found["dsinks"] = given["sinks"].grad
    for name, x, old in zip("qkv", inputs, before):
        if not torch.equal(x.detach(), old):
            raise RuntimeError(f"the function changed its input {name}")
    missing = [name for name, x in found.items() if x is None]
    if missing:
        raise RuntimeError(f"{missing[0]} is missing: no gradient came back")
    return found


def _compared(
    promise: Promise, call: _Call, got: dict[str, Tensor], rank: int, group: Any
) -> Outcome:
    inputs = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
    sinks = None if call.sinks is None else call.sinks.double().requires_grad_()
    out = definition(*inputs, sinks, call.options)
    expected = {"out": out.detach()}
    if promise.gradients:
        out.backward(call.dout.double())
        expected.update(zip(("dq", "dk", "dv"), (x.grad for x in inputs)))
    largest = {name: x.abs().max() for name, x in expected.items()}
    expected = {name: call.mine(x) for name, x in expected.items()}
    if "dsinks" in got and sinks is not None:
        # Every rank has the share of its own rows.
        got["dsinks"] = got["dsinks"].clone()
        dist.all_reduce(got["dsinks"], group=group)
        expected["dsinks"], largest["dsinks"] = sinks.grad, sinks.grad.abs().max()
    for name, x in expected.items():
        y = got[name]
        if y.shape != x.shape:
            wrong = f"{name} is {list(y.shape)}, not {list(x.shape)}"
            return Outcome(promise.name, "wrong", wrong)
        x_type = promise.dtype or torch.float32
        if y.dtype != x_type:
            return Outcome(promise.name, "wrong", f"{name} is {y.dtype}, not {x_type}")
        # NaN is not within a tolerance.
        off = ~((y.double() - x).abs() <= promise.slack * TOLERANCES[x_type] * largest[name])
        if off.any():
            first = [int(index) for index in off.nonzero()[0]]
            at = tuple(first)
            wrong = (
                f"{name}{first} of this rank's rows is {y[at].item():.6g}, not {x[at].item():.6g} "
                f"({int(off.sum())} of {off.numel()} elements are wrong)"
            )
            return Outcome(promise.name, "wrong", wrong)
    return Outcome(promise.name, "holds")


__all__ = ["Outcome", "check"]
