"""Rows that torchscale writes to places that are not theirs.

Torchscale cuts a sequence into segments of w tokens, fills each up with zeros to g tokens, the next
multiple of its rate, and writes segment s from place s g on instead of s w. That is attention with
segments of g tokens over the sequence with the zeros in it, so such a branch is computed on that
sequence. The decision here: only these branches are copied; the others are one call, and branches
are mixed by their lse, whose weights have no gradient in torchscale.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

import encke


def with_misplaced_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    **options: Any,
) -> Tensor:
    """Attention with torchscale's padding, and with its misplaced rows where there are any."""
    tokens = q.shape[1]
    branches = list(zip(segment_lengths, dilation_rates))
    misplaced = [(w, r) for w, r in branches if w % r and tokens > w]
    others = [branch for branch in branches if branch not in misplaced]
    options = dict(options, return_lse=bool(misplaced))
    parts = []
    if others:
        lengths, rates = zip(*others)
        parts.append(
            encke.attention(q, k, v, segment_lengths=lengths, dilation_rates=rates, **options)
        )
    if not misplaced:
        return parts[0]
    for segment, rate in misplaced:
        filled = -(-segment // rate) * rate
        spread = [_spread(x, segment, filled) for x in (q, k, v)]
        out, lse = encke.attention(
            *spread, segment_lengths=[filled], dilation_rates=[rate], **options
        )
        parts.append((out[:, :tokens], lse[:, :tokens]))
    return _mixed(parts)


def _spread(x: Tensor, segment: int, filled: int) -> Tensor:
    """The sequence with zeros after each segment, so that segments have ``filled`` tokens."""
    batch, tokens, heads, dim = x.shape
    segments = -(-tokens // segment)
    whole = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, segments * segment - tokens))
    cut = whole.reshape(batch, segments, segment, heads, dim)
    cut = torch.nn.functional.pad(cut, (0, 0, 0, 0, 0, filled - segment))
    return cut.reshape(batch, segments * filled, heads, dim)


def _mixed(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The outputs, weighted by their shares of one softmax; the weights have no gradient."""
    with torch.no_grad():
        every = torch.stack([lse for _, lse in parts])
        # A row that no branch selects has no share in any; its output is 0.
        shares = torch.softmax(every, 0).nan_to_num(0.0)
    mixed = sum(out * share[..., None].to(out.dtype) for (out, _), share in zip(parts, shares))
    return mixed


__all__ = ["with_misplaced_rows"]
