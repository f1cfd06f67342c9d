"""Rules of the operators ``encke::attention`` and ``encke::attention_backward`` beside their
shapes and gradients: vmap, counts of floating-point operations, second order."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from encke._observed import refuse_second_order

# The tensors of each operator: those with a batch dimension come first, then masks.
_FORWARD, _BACKWARD = 3, 9


def register(forward: Any, backward: Any, masks: int) -> None:
    """Gives both operators their rules; ``masks`` is the number of tensors of the mask."""
    forward.register_vmap(vmapped(forward, _FORWARD, masks))
    backward.register_vmap(vmapped(backward, _BACKWARD, masks))
    backward.register_autograd(refuse_second_order)
    register_flop_formula(torch.ops.encke.attention)(_forward_flops)
    register_flop_formula(torch.ops.encke.attention_backward)(_backward_flops)


def vmapped(operator: Any, tensors: int, masks: int) -> Any:
    """Entries of the new dimension become entries of the batch; where each has masks of its own,
    there is a call for each."""

    def rule(info: Any, in_dims: Any, *given: Any) -> Any:
        size = info.batch_size
        if any(x is not None for x in given[tensors : tensors + masks]):
            return _one_by_one(operator, size, in_dims, given)
        rows = [_moved(x, dim, size) for x, dim in zip(given[:tensors], in_dims)]
        batch = rows[0].shape[1]
        # What is not saved is empty, and has no batch.
        flat = [None if x is None else x[0] if x.dim() == 2 else x.flatten(0, 1) for x in rows]
        found = operator(*flat, *given[tensors:])
        split = [x if x.dim() == 1 else x.unflatten(0, (size, batch)) for x in found]
        return tuple(split), tuple(None if x.dim() == 1 else 0 for x in split)

    return rule


def _moved(tensor: Any, dim: Any, size: int) -> Any:
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _one_by_one(operator: Any, size: int, in_dims: Any, given: Any) -> Any:
    calls = []
    for at in range(size):
        own = [x if dim is None else x.select(dim, at) for x, dim in zip(given, in_dims)]
        calls.append(operator(*own))
    return tuple(torch.stack(of) for of in zip(*calls)), (0,) * len(calls[0])


def _pairs(q: Any, k: Any, segments: Any, rates: Any, mode: str) -> int:
    """The pairs of all heads: those of the branches, without masks, as torch counts its own
    attention."""
    batch, queries, heads, _ = q
    keys = k[1]
    if segments is None:
        return batch * heads * queries * keys
    inside = [queries * min(segment, keys) // rate**2 for segment, rate in zip(segments, rates)]
    every = sum(inside) if mode == "mix" else sum(inside) // len(inside)
    return batch * heads * every


def _forward_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    segments, rates, mode = rest[5:8]
    return 2 * _pairs(q, k, segments, rates, mode) * (q[3] + v[3])


def _backward_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    # Scores and dv, the gradient of the weights, dq and dk.
    segments, rates, mode = rest[11:14]
    return 2 * _pairs(q, k, segments, rates, mode) * (3 * q[3] + 2 * v[3])
