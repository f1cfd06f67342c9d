"""A described mask under torch.compile: one operator, ``encke::described_attention``.

The description is read when the graph runs, so that one graph serves all batches of a shape. The
backward operator runs the forward pass again: what it would save depends on the description.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor

from encke._observed import refuse_gradients_in_graph, refuse_second_order
from encke.integrations.pieces import attend, attend_sequences
from encke.integrations.visibility import packed, read

_SCORES = "Tensor? sinks, Tensor? seed, float? scale, float? softcap, float dropout"
_PLACES = "Tensor? positions, Tensor? of_queries, Tensor? of_keys"
# Sinks follow q, k and v after so many others.
_SINKS = 4
_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor description, {_PLACES}, {_SCORES}"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    description: Tensor,
    positions: Optional[Tensor],
    of_queries: Optional[Tensor],
    of_keys: Optional[Tensor],
    *,
    scale: Optional[float],
    softcap: Optional[float],
    sinks: Optional[Tensor],
    dropout: float,
) -> Tensor:
    """As one operator of the graph that is compiled; ``of_queries`` and ``of_keys`` are the bounds
    of sequences in a batch without padding."""
    refuse_gradients_in_graph(q, k, v, sinks)
    seed = torch.randint(2**63 - 1, (), device="cpu") if dropout else None
    if positions is not None and positions.dim() != 2:
        positions = None
    places = (positions, of_queries, of_keys)
    scores = (scale, softcap, float(dropout))
    return _forward(q, k, v, description, *places, sinks, seed, *scores)


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """Operators run below autograd; inside this, operations are recorded as usual."""
    keys = torch._C.DispatchKey
    with contextlib.ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    description: Tensor,
    positions: Optional[Tensor],
    of_queries: Optional[Tensor],
    of_keys: Optional[Tensor],
    sinks: Optional[Tensor],
    seed: Optional[Tensor],
    *scores: Any,
) -> Tensor:
    seen = read(description)
    scale, softcap, dropout = scores
    options = dict(scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed)
    if of_queries is not None and of_keys is not None:
        return attend_sequences(q, k, v, seen, of_queries, of_keys, **options)
    if seen.documents is None and seen.causal and q.shape[1] == k.shape[1] and not seen.offset:
        seen = seen._replace(documents=packed(positions, q.shape[1]))
    return attend(q, k, v, seen, **options)


@torch.library.custom_op(
    "encke::described_attention", mutates_args=(), schema=f"({_INPUTS}) -> Tensor"
)
def _forward(*given: Any) -> Tensor:
    return _attend(*given).contiguous().clone()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.custom_op(
    "encke::described_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {_INPUTS}) -> Tensor[]",
)
def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    sinks = rest[_SINKS]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    of_sinks = [] if sinks is None else [sinks.detach().requires_grad_()]
    with torch.enable_grad(), _recorded():
        out = _attend(*inputs, *rest[:_SINKS], *(of_sinks or [None]), *rest[_SINKS + 1 :])
    found = torch.autograd.grad(out, [*inputs, *of_sinks], dout, allow_unused=True)
    given = [*inputs, *of_sinks]
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(given, found)]


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    given = (q, k, v) if rest[_SINKS] is None else (q, k, v, rest[_SINKS])
    return [x.new_empty(x.shape) for x in given]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-3])
    ctx.scores = inputs[-3:]


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dq, dk, dv, *dsinks = _backward(dout, *ctx.saved_tensors, *ctx.scores)
    places = (None,) * _SINKS
    return dq, dk, dv, *places, *(dsinks or [None]), None, *(None,) * len(ctx.scores)


_forward.register_autograd(_differentiate, setup_context=_setup)
_backward.register_autograd(refuse_second_order)
