"""Attention as functions of torch tensors or NumPy arrays.

This package copies no input: the library gets the address, shape and strides of each, and results
are the memory it computed into. (A rank copies rows whose tokens, heads and elements are not
contiguous, or, with several ranks, tokens that are not consecutive; :func:`report` returns how many
bytes were read in place.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, TypeVar, Union

import numpy

from encke.options import Options, as_tuple, find, from_keywords

Tensor = TypeVar("Tensor")

# torch is imported at the first tensor that is not a NumPy array, so that it is optional.
_on_torch: Any = None


def _import_torch() -> Any:
    global _on_torch
    try:
        from encke import _torch
    except ImportError as missing:
        raise TypeError(
            "Encke takes NumPy arrays and torch tensors; torch is not installed"
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
    kv_heads, dim]``; ``kv_heads`` must divide ``heads``.

    The attention pattern:

    segment_lengths, dilation_rates
        The branches: each attends inside segments of that many tokens, to every rate-th token.
        Default: dense attention.
    mode
        ``"group"`` divides the heads into contiguous groups, one per branch; ``"mix"`` gives every
        head all branches under one softmax (LongNet); ``"fkodom"`` reproduces the results of
        fkodom's package.
    group_scale
        In group mode, ``"one"`` (default), or ``"groups"`` to divide the output by the number of
        branches.
    offsets
        In mix mode, the first token of a dilated segment for head h: ``"head-mod"`` (default, as in
        the paper) or ``"head-block"`` (as in torchscale).
    mixing_gradient
        In mix mode, ``"exact"`` (default), or ``"detached"`` to treat the mixing weights as
        constants.
    causal
        Whether a query attends only to keys at or before its own position.
    scale
        The softmax scale. Default: ``1 / sqrt(dim)``.

    How it is computed, which changes results only by rounding:

    ranks, sharding, queries
        The number of ranks (threads) that share the tokens, how the tokens are divided
        (``"contiguous"``, ``"zigzag"``, ``"striped"``, or the first token of each rank), and
        whether each rank has its own queries (``"sharded"``) or all of them (``"replicated"``).
        ``"auto"`` for ranks or sharding chooses the fastest for the shape by a model of this
        machine (see ``python -m encke tune``).
    memory_per_rank
        With ``ranks="auto"``, the most bytes that a rank may hold.
    precision
        The dtype of computation and output. Default: the dtype of the inputs.
    checkpoint
        ``"keep"`` saves out and lse for the backward pass; ``"recompute"`` saves only the inputs
        and runs the forward pass again.
    redundancy
        The number of other ranks that hold a copy of each rank's inputs; a call survives that many
        deaths.
    deadline
        Seconds an exchange waits for another rank before the call raises :class:`encke.RingError`.
    deterministic
        Whether every run gives the same bits. The CPU always does; False lets a GPU sum gradients
        in the fastest order.

    Returns out, shaped like ``q``, or with ``return_lse`` (out, lse): the lse is ``[batch, tokens,
    heads]``, float32 (float64 for float64), and minus infinity where a query has no keys.

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

    Errors name the offending values:

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
    """Gradients of a loss with respect to ``q``, ``k`` and ``v``, given those with respect to the
    output (``dout``) and, if the loss uses it, the lse (``dlse``): for NumPy, which has no
    autograd.

    With ``out`` and ``lse`` of the forward pass nothing is recomputed; without them the forward
    pass runs again. Options are those of :func:`attention`.

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 16, 2, 8))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = attention_backward(q, k, v, dout, out=out, lse=lse, causal=True)
    >>> dq.shape
    (1, 16, 2, 8)
    """
    found = find(tuple(from_keywords(options)))
    if found.splits_slots:
        # The outputs of single branches are not part of (out, lse).
        out = lse = None
    return found.backward(q, k, v, (out, lse, None, None), dout, dlse)


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
    """The plan of a call as text: what each rank would compute, send and hold. Nothing is computed
    or allocated; options are those of :func:`attention`.

    >>> text = explain(tokens=4096, heads=8, dim=64, ranks=2, causal=True)
    >>> print("\\n".join(text.splitlines()[:2]))
    forward: 4,096 tokens, 8 heads (8 key heads) of dim 64, batch 1, f32
    2 ranks (contiguous), sharded queries; group mode, causal
    """
    shape = (batch, tokens, heads, heads if kv_heads is None else kv_heads, dim)
    return find(tuple(from_keywords(options))).explain(shape, str(dtype), backward)


def report(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, Any]:
    """Runs a forward pass and returns its report: ``out``, ``lse``, the ``plan`` as text,
    ``sent_bytes``, for each of ``ranks`` the planned, allocated and borrowed bytes (inputs read in
    place), the ranks that ``died`` while the call survived, and the ``addresses`` of inputs and
    outputs.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8))
    >>> result = report(q, k, v, causal=True)
    >>> result["ranks"][0]["borrowed_bytes"] == q.nbytes + k.nbytes + v.nbytes
    True
    """
    return find(tuple(from_keywords(options))).report(q, k, v)


__all__ = ["Options", "as_tuple", "attention", "attention_backward", "explain", "report"]
