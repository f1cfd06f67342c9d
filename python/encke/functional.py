"""Attention as functions of torch tensors or NumPy arrays.

This package copies no input: the library gets the address, shape and strides of each, and results
are the memory it computed into. (A rank copies rows whose tokens, heads and elements are not
contiguous, or, with several ranks, tokens that are not consecutive; :func:`report` returns how many
bytes were read in place.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Optional, TypeVar, Union, overload

import numpy

from encke import _readable
from encke._unusual import refuse_dimensions, refuse_unusual, refuse_wrappers
from encke.masks import (
    documents_of,
    key_lengths_of,
    numbers,
    offset_of,
    prefix_of,
    rate_of,
    window_of,
)
from encke.options import Options, as_tuple, find, from_keywords, with_masks
from encke.padding import find_padded

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from encke._typing import AttentionOptions

Tensor = TypeVar("Tensor")

# torch is imported at the first tensor that is not a NumPy array, so that it is optional.
_on_torch: Any = None
_torch_module: Any = None


# Lengths: a sequence, a NumPy array or a torch tensor of whole numbers.
Integers = Any
Window = tuple[Optional[int], Optional[int]]


def _import_torch() -> Any:
    global _on_torch, _torch_module
    try:
        from encke import _torch
    except ImportError as missing:
        raise TypeError(
            "Encke takes NumPy arrays and torch tensors; torch is not installed"
        ) from missing
    _on_torch, _torch_module = _torch.attention, _torch
    return _on_torch


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
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
    padding: Optional[str] = None,
    causal: bool = False,
    window: Optional[Window] = None,
    prefix: int = 0,
    documents: Optional[Integers] = None,
    cu_seqlens: Optional[Integers] = None,
    key_lengths: Optional[Integers] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    query_offset: Optional[int] = None,
    dropout: float = 0.0,
    seed: Any = None,
    ranks: Union[int, str, None] = None,
    sharding: Union[str, Sequence[int]] = "contiguous",
    queries: str = "sharded",
    precision: Any = None,
    checkpoint: str = "keep",
    redundancy: int = 0,
    deadline: Optional[float] = None,
    deterministic: bool = True,
    bits: str = "planned",
    memory_per_rank: Optional[int] = None,
    return_lse: bool = False,
) -> Any:
    """Attention of ``q`` ``[batch, queries, heads, dim]`` over ``k`` ``[batch, tokens, kv_heads,
    dim]`` and ``v`` ``[batch, tokens, kv_heads, value_dim]``; ``kv_heads`` must divide ``heads``.
    There may be fewer queries than tokens, and on the CPU values of another ``value_dim`` than
    ``dim``. Without a batch, all are ``[tokens, heads, dim]``, and so is the result. In short::

        out = encke.attention(q, k, v, causal=True)
        out, lse = encke.attention(q, k, v, causal=True, window=(1023, 0), return_lse=True)
        out = encke.attention(q, k, v, segment_lengths=[2048, 8192], dilation_rates=[1, 4])
        out = encke.attention(q, k, v, documents=[700, 324], ranks=4, sharding="zigzag")

    All options follow, in groups; a call without any is dense attention.

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
    padding
        ``"torchscale"`` fills segments up with keys of score 0 and value 0 where torchscale does,
        for weights that were trained there (see ``encke.compat.torchscale``). Default: none.
    causal
        Whether a query attends only to keys at or before its own position.

    The mask; a pair counts if all that is given shows it (on the CPU):

    window
        ``(left, right)``: a query sees that many positions before and after its own; None for no
        limit. A sliding window of W tokens that ends at the query is ``(W - 1, 0)``.
    prefix
        The number of first tokens that are visible outside the window, too (attention sinks of
        streaming models).
    documents, cu_seqlens
        The lengths of the documents that the sequence is packed from, or the running sums of them,
        ``[0, first length, ..., tokens]``. A query sees keys of its own document only, and segments
        and the prefix begin anew in each: a packed call equals a call for each document. The same
        documents are in every entry of the batch.
    query_offset
        The position of the first query where there are fewer queries than tokens. Default: queries
        are the last tokens. Masks, segments and slopes go by positions.
    key_lengths
        The number of tokens of each entry of a right-padded batch. Rows at or after it are not
        read; their output is 0, their lse minus infinity, and their gradients are 0.

    Scores:

    scale
        The softmax scale. Default: ``1 / sqrt(dim)``.
    softcap
        Scores x become ``softcap * tanh(x / softcap)``.
    alibi_slopes
        One number for each head: slope times distance is subtracted from the score. True for the
        usual slopes, ``2 ** (-8 (h + 1) / heads)``. They have no gradient.
    sinks
        One number for each head, ``[heads]``: a score that takes part in the softmax and has no
        value. A torch tensor of sinks has a gradient.
    dropout, seed
        The probability that a pair is dropped after the softmax; the others are divided by the
        probability to be kept. Whether a pair is dropped depends on the seed and the pair, not on
        the ring. Default seed: a random one, of torch's generator for torch tensors. Where
        dropout is 0, as in evaluation, a seed has no effect.

    How it is computed, which changes results only by rounding:

    ranks, sharding, queries
        The number of ranks (threads) that share the tokens, how the tokens are divided
        (``"contiguous"``, ``"zigzag"``, ``"striped"``, ``"balanced"`` for contiguous shards with
        equal work under any mask, ``"documents"`` for long documents in zigzag and short ones
        whole, or the first token of each rank), and whether each rank has its own queries
        (``"sharded"``) or all of them (``"replicated"``).
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
    bits
        ``"planned"``, the fastest order of sums, which another ring has otherwise; or
        ``"invariant"``: the same bits on every contiguous ring, whatever else is in
        the call. Rings are cut at multiples of 512 rows of every segment, or of fewer with
        ``"invariant:256"`` down to ``"invariant:32"``; the bits belong to that number.

    Returns out, ``[batch, queries, heads, value_dim]``, or with ``return_lse`` (out, lse): the lse
    is ``[batch, queries, heads]``, float32 (float64 for float64), and minus infinity where a query
    has no keys.

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

    Two documents of 20 and 12 tokens with a sliding window of 8 tokens, of which the first two
    tokens of each document stay visible:

    >>> masked = dict(causal=True, window=(7, 0), prefix=2)
    >>> packed = attention(q, k, v, documents=[20, 12], **masked)
    >>> second = attention(q[:, 20:], k[:, 20:], v[:, 20:], **masked)
    >>> torch.equal(packed[:, 20:], second)
    True

    Errors name the offending values:

    >>> attention(q, k, v, segment_lengths=[8, 16], dilation_rates=[1])
    Traceback (most recent call last):
    ...
    ValueError: 2 segment lengths but 1 dilation rates; give one rate for each length
    """
    if getattr(q, "ndim", 4) == 3:
        q, k, v = _batched(q, k, v)
        given = {name: x for name, x in locals().items() if name not in ("q", "k", "v")}
        found = attention(q, k, v, **given)
        return (found[0][0], found[1][0]) if return_lse else found[0]
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
        None if window is None else window_of(window),
        prefix and prefix_of(prefix),
        softcap,
        None,
        None,
        query_offset if query_offset is None else offset_of(query_offset),
        dropout and rate_of(dropout),
        None,
        padding,
        bits,
    )
    packed = documents is not None or cu_seqlens is not None
    if packed and _has_no_tokens(q) and _has_no_tokens(k):
        if not sum(documents_of(documents, cu_seqlens) or ()):
            documents = cu_seqlens = None
    plain = (
        not dropout
        and sinks is None
        and documents is None
        and cu_seqlens is None
        and alibi_slopes is None
        and key_lengths is None
    )
    if isinstance(q, numpy.ndarray) and plain:
        _readable.refuse_masked(q, k, v)
        out, lse, _, _ = _readable.forward(find(options), q, k, v)
    elif isinstance(q, numpy.ndarray):
        if dropout and seed is None:
            seed = int(numpy.random.default_rng().integers(2**63))
        masked = with_masks(options, documents, cu_seqlens, alibi_slopes, seed)
        found = find_padded(tuple(masked), key_lengths_of(key_lengths))
        _readable.refuse_masked(q, k, v)
        given = None if sinks is None else numbers("sinks", sinks)
        out, lse, _, _ = _readable.forward(found, q, k, v, given)
    elif plain:
        out, lse = (_on_torch or _import_torch())(q, k, v, options, return_lse)
    else:
        _on_torch or _import_torch()
        masks = _torch_module.BatchMasks(
            sinks, documents, cu_seqlens, alibi_slopes, key_lengths, seed
        )
        out, lse = _torch_module.attention_with(q, k, v, options, masks)
    return (out, lse) if return_lse else out


def _has_no_tokens(x: Any) -> bool:
    nested = getattr(x, "is_nested", False)  # which has no shape
    return not nested and getattr(x, "ndim", 0) == 4 and x.shape[1] == 0


def _batched(*tensors: Any) -> Any:
    """q, k and v without a batch as a batch of one."""
    for name, tensor in zip("qkv", tensors):
        if getattr(tensor, "ndim", None) != 3:
            shape = list(getattr(tensor, "shape", ()))
            raise ValueError(
                f"q has 3 dimensions, [tokens, heads, dim], and {name} is {shape}; all must have "
                "3, or all 4 with the batch first"
            )
    return tuple(tensor[None] for tensor in tensors)


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Integers,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Integers, **options: Unpack[AttentionOptions]
) -> Tensor: ...
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Integers, **options: Any
) -> Any:
    """Attention of sequences of different lengths, one after the other: ``q`` is ``[tokens, heads,
    dim]``, ``k`` and ``v`` are ``[tokens, kv_heads, dim]``, and sequence i has the tokens from
    ``cu_seqlens[i]`` to before ``cu_seqlens[i + 1]``.

    Options are those of :func:`attention`. Returns out, shaped like ``q``, or with ``return_lse``
    (out, lse), the lse as ``[tokens, heads]``.

    >>> import torch
    >>> q, k, v = (torch.randn(32, 4, 8) for _ in range(3))
    >>> out = varlen_attention(q, k, v, torch.tensor([0, 20, 32]), causal=True)
    >>> out.shape
    torch.Size([32, 4, 8])
    >>> first = attention(q[None, :20], k[None, :20], v[None, :20], causal=True)
    >>> torch.equal(out[:20], first[0])
    True
    """
    for name in ("documents", "key_lengths"):
        if options.get(name) is not None:
            raise TypeError(f"{name} and cu_seqlens both divide the tokens; leave {name} out")
    if _torch_module is None or not _torch_module.torch.compiler.is_compiling():
        refuse_unusual(q=q, k=k, v=v)
    refuse_dimensions(3, "[tokens, heads, dim]", q=q, k=k, v=v)
    found = attention(q[None], k[None], v[None], cu_seqlens=cu_seqlens, **options)
    return (found[0][0], found[1][0]) if options.get("return_lse", False) else found[0]


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Optional[Tensor] = None,
    *,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
    sinks: Any = None,
    key_lengths: Optional[Integers] = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Gradients of a loss with respect to ``q``, ``k`` and ``v``, given those with respect to the
    output (``dout``) and, if the loss uses it, the lse (``dlse``): for NumPy, which has no
    autograd.

    With ``out`` and ``lse`` of the forward pass nothing is recomputed; without them the forward
    pass runs again. Options are those of :func:`attention`. Returns (dq, dk, dv), or with ``sinks``
    (dq, dk, dv, dsinks).

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 16, 2, 8))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = attention_backward(q, k, v, dout, out=out, lse=lse, causal=True)
    >>> dq.shape
    (1, 16, 2, 8)
    """
    found = find_padded(tuple(from_keywords(options)), key_lengths_of(key_lengths))
    if found.splits_slots:
        # The outputs of single branches are not part of (out, lse).
        out = lse = None
    given = None if sinks is None else numbers("sinks", sinks)
    refuse_wrappers(q=q, k=k, v=v, dout=dout)
    saved = (out, lse, None, None)
    *gradients, dsinks = _readable.backward(found, q, k, v, saved, dout, dlse, given)
    return tuple(gradients) if sinks is None else (*gradients, numpy.array(dsinks))


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
    refuse_wrappers(q=q, k=k, v=v)
    found = find(tuple(from_keywords(options)))
    try:
        return found.report(q, k, v)
    except ValueError as error:
        copies = _readable.copied(error, q, k, v)
    return found.report(*copies)


__all__ = [
    "Options",
    "as_tuple",
    "attention",
    "attention_backward",
    "explain",
    "report",
    "varlen_attention",
]
