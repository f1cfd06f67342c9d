"""Attention as functions of tensors. What is said here is said of torch tensors and NumPy arrays alike.

No input is copied by this package: the library is given the address, shape and strides of each, and
results are the memory it computed into. (A rank copies rows that do not lie as it reads them, that is
where tokens, heads and numbers are not contiguous, or where there are several ranks and they do not
follow one another; :func:`report` tells how many bytes were read in place.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, TypeVar, Union

import numpy

from encke.options import Options, as_tuple, find, gathered

Tensor = TypeVar("Tensor")

# torch is imported when the first tensor of it comes along: who has NumPy alone need not have torch.
_on_torch: Any = None


def _import_torch() -> Any:
    global _on_torch
    try:
        from encke import _torch
    except ImportError as missing:
        raise TypeError(
            "Encke takes NumPy arrays and torch tensors; torch is not installed here"
        ) from missing
    _on_torch = _torch.attention
    return _on_torch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Optional[Sequence[int]] = None,
    dilation_rates: Optional[Sequence[int]] = None,
    mode: str = "group",
    group_scale: Optional[str] = None,
    offsets: Optional[str] = None,
    mixing_gradient: Optional[str] = None,
    causal: bool = False,
    scale: Optional[float] = None,
    ranks: Union[int, str, None] = None,
    sharding: Union[str, Sequence[int]] = "contiguous",
    queries: str = "sharded",
    precision: Any = None,
    checkpoint: str = "keep",
    redundancy: int = 0,
    deadline: Optional[float] = None,
    deterministic: bool = True,
    memory_per_rank: Optional[int] = None,
    return_lse: bool = False,
) -> Any:
    """Attention of ``q`` ``[batch, tokens, heads, dim]`` over ``k`` and ``v`` ``[batch, tokens,
    kv_heads, dim]``; the key heads divide the query heads.

    Which query sees which key:

    segment_lengths, dilation_rates
        One of each for every branch: attention inside segments of so many tokens, every so-many-th
        token of each. None: dense.
    mode
        ``"group"`` cuts heads into contiguous groups, one for each branch; ``"mix"`` gives every head
        all branches under one softmax (LongNet); ``"fkodom"`` reproduces the numbers of one package.
    group_scale
        In group mode, ``"one"`` (default) or ``"groups"``: the output is divided by the branches.
    offsets
        In mix mode, which tokens of a dilated segment head h begins with: ``"head-mod"`` (default, the
        paper) or ``"head-block"`` (torchscale).
    mixing_gradient
        In mix mode, ``"exact"`` (default) or ``"detached"``: mixing weights taken as constants.
    causal
        Each query sees only keys at or before its own position.
    scale
        The softmax scale, instead of ``1 / sqrt(dim)``.

    How it is computed, which changes nothing but the last bits:

    ranks, sharding, queries
        How many ranks (threads here) share the tokens, how these are cut (``"contiguous"``,
        ``"zigzag"``, ``"striped"``, or the first token of each rank), and whether each rank has its own
        queries (``"sharded"``) or all of them (``"replicated"``). ``"auto"`` for ranks or sharding takes
        what a clock of this machine (see ``python -m encke tune``) finds fastest for the shape.
    memory_per_rank
        With ``ranks="auto"``, the most bytes that a rank may hold.
    precision
        The type numbers are computed in and returned as, instead of that of the inputs.
    checkpoint
        ``"keep"`` keeps out and lse for the backward pass; ``"recompute"`` keeps nothing but the inputs
        and runs the forward pass again.
    redundancy
        How many other ranks keep each rank's inputs, so that as many may die in a call.
    deadline
        Seconds an exchange waits for another rank before the call ends with :class:`encke.RingError`.
    deterministic
        The same bits from run to run. The CPU always has that; False lets a GPU sum gradients in
        whatever order is fastest.

    Returns out, like ``q``, or with ``return_lse`` (out, lse): the lse is ``[batch, tokens, heads]``,
    float32 (float64 for float64), and minus infinity where a query sees nothing.

    >>> import torch
    >>> q, k, v = (torch.randn(2, 32, 4, 8, requires_grad=True) for _ in range(3))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 32, 4, 8]), torch.Size([2, 32, 4]))
    >>> (out.square().sum() + lse.sum()).backward()
    >>> q.grad.shape
    torch.Size([2, 32, 4, 8])

    Keys may have fewer heads:

    >>> attention(q, k[:, :, :2], v[:, :, :2]).shape
    torch.Size([2, 32, 4, 8])

    What cannot be done is said with the numbers that were wrong:

    >>> attention(q, k, v, segment_lengths=[8, 16], dilation_rates=[1])
    Traceback (most recent call last):
    ...
    ValueError: 2 segment lengths but 1 dilation rates; give one rate for each length
    """
    options = (
        None if segment_lengths is None else tuple(segment_lengths),
        None if dilation_rates is None else tuple(dilation_rates),
        mode,
        group_scale,
        offsets,
        mixing_gradient,
        causal,
        scale,
        ranks,
        sharding if isinstance(sharding, str) else tuple(sharding),
        queries,
        None if precision is None else str(precision),
        checkpoint,
        redundancy,
        deadline,
        deterministic,
        memory_per_rank,
    )
    if isinstance(q, numpy.ndarray):
        out, lse, _, _ = find(options).forward(q, k, v)
    else:
        out, lse = (_on_torch or _import_torch())(q, k, v, options, return_lse)
    return (out, lse) if return_lse else out


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Optional[Tensor] = None,
    *,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a loss with respect to ``q``, ``k`` and ``v``, given those with respect to the output
    (``dout``) and, if the loss uses it, the lse (``dlse``): for NumPy, which has no autograd.

    With ``out`` and ``lse`` of the forward pass nothing is recomputed; without them it is run again.
    Options are those of :func:`attention`.

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 16, 2, 8))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = attention_backward(q, k, v, dout, out=out, lse=lse, causal=True)
    >>> dq.shape
    (1, 16, 2, 8)
    """
    found = find(tuple(gathered(options)))
    if found.splits_slots:
        # Outputs of single branches are not part of (out, lse).
        out = lse = None
    return found.backward(q, k, v, out, lse, None, None, dout, dlse)


def explain(
    *,
    tokens: int,
    heads: int,
    dim: int,
    batch: int = 1,
    kv_heads: Optional[int] = None,
    dtype: Any = "float32",
    backward: bool = False,
    **options: Any,
) -> str:
    """What a call would compute, send and hold on each rank, in words, without doing it. Sizes may be
    those of any machine; options are those of :func:`attention`.

    >>> text = explain(tokens=4096, heads=8, dim=64, ranks=2, causal=True)
    >>> print("\\n".join(text.splitlines()[:2]))
    forward: 4,096 tokens x 8 heads (8 key heads) x 64 numbers, batch 1, f32
    2 ranks (contiguous), each holding its own queries; group mode, causal
    """
    shape = (batch, tokens, heads, heads if kv_heads is None else kv_heads, dim)
    return find(tuple(gathered(options))).explain(shape, str(dtype), backward)


def report(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, Any]:
    """Runs a forward pass and tells what it did: ``out``, ``lse``, the ``plan`` in words, ``sent_bytes``,
    for each of ``ranks`` the bytes planned, allocated, and lent by the caller because they were read in
    place, the ranks that ``died`` and were survived, and the ``addresses`` of inputs and outputs as the
    library saw them.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8))
    >>> told = report(q, k, v, causal=True)
    >>> told["ranks"][0]["borrowed_bytes"] == q.nbytes + k.nbytes + v.nbytes
    True
    """
    return find(tuple(gathered(options))).report(q, k, v)


__all__ = ["Options", "as_tuple", "attention", "attention_backward", "explain", "report"]
