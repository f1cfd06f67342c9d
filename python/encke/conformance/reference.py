"""Attention by its definition, pair by pair, in the type of its inputs: the reference in float64,
and the measure of what another type can do."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor


def visible(
    tokens: int,
    causal: bool = False,
    window: Optional[tuple[Optional[int], Optional[int]]] = None,
    documents: Optional[list[int]] = None,
) -> Tensor:
    """Which query sees which key, ``[tokens, tokens]``.

    >>> visible(4, causal=True, window=(1, 0), documents=[3, 1]).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    shown = torch.ones(tokens, tokens, dtype=torch.bool)
    if causal:
        shown &= key <= query
    left, right = window or (None, None)
    if left is not None:
        shown &= query - key <= left
    if right is not None:
        shown &= key - query <= right
    if documents is not None:
        number = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
        shown &= number[:, None] == number
    return shown


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    sinks: Optional[Tensor] = None,
    **mask: Any,
) -> Tensor:
    """Attention of a whole sequence ``[batch, tokens, heads, dim]``, with gradients by autograd."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(q.shape[1], **mask).to(q.device), -torch.inf)
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[1], 1)
        scores = torch.cat([scores, extra], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v)
