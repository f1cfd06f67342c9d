"""``attn_implementation="encke"`` for the models of transformers.

>>> import transformers                                              # doctest: +SKIP
>>> import encke.transformers                                        # doctest: +SKIP
>>> model = transformers.AutoModelForCausalLM.from_pretrained(
...     "...", attn_implementation="encke")                          # doctest: +SKIP

Every model that calls its attention through transformers' attention interface takes it: causal
models, encoders and cross attention; grouped heads, values of another width (MLA), sliding windows,
chunks, softcap, sinks, dropout; padding on either side, packed sequences (``position_ids`` that
restart, ``cu_seq_lens_q``); dynamic, static and sliding caches. Masks are described by one number
for each key (:mod:`encke.integrations.visibility`); no tensor of queries times keys is made.

A token that padding hides has attention 0, as with FlashAttention; ``eager`` gives it that of
arbitrary keys. In encoders and cross attention, whose padding hides keys only, all queries are
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import numpy
import torch
from torch import Tensor

import encke
from encke.integrations import compiled
from encke.integrations.pieces import attend, attend_sequences
from encke.integrations.visibility import (
    UnsupportedMask,
    Visibility,
    as_description,
    describe,
    is_description,
    packed,
    pairs,
    read,
    refuse_own_attention,
    refuse_unknown,
)

__all__ = ["UnsupportedMask", "attention_forward", "attention_mask", "register"]


def register(name: str = "encke") -> None:
    """Makes ``attn_implementation=name`` known to transformers, and ``name + "_ring"`` for
    sequences in shards (:func:`encke.distributed.context_parallel`); ``import encke.transformers``
    does it for ``"encke"``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    if torch.distributed.is_available():
        from encke.integrations import context

        AttentionInterface.register(f"{name}_ring", context.ring_forward)
        AttentionMaskInterface.register(f"{name}_ring", context.ring_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Optional[Callable[..., Any]] = None,
    attention_mask: Optional[Tensor] = None,
    device: Any = "cpu",
    **others: Any,
) -> Tensor:
    """The description of a mask, in the place of a tensor of queries times keys."""
    if not torch.compiler.is_compiling():
        refuse_own_attention(others.get("config"), attention_mask is not None)
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function as mask_function
    return describe(
        mask_function,
        batch=batch_size,
        keys=kv_length,
        query_offset=q_offset,
        key_offset=kv_offset,
        padding=attention_mask,
        device=device,
        traced=others,
    )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    is_causal: Optional[bool] = None,
    position_ids: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of ``[batch, heads, tokens, dim]``, as transformers calls it; returns ``[batch,
    tokens, heads, dim]`` and no weights."""
    _refuse(others)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scores = dict(scale=scaling, softcap=softcap, sinks=s_aux, dropout=dropout)
    compiling = torch.compiler.is_compiling()
    described = attention_mask is not None and is_description(attention_mask)
    if described and not compiling:
        seen = read(attention_mask)
    elif attention_mask is None:
        seen = _without_mask(q, k, causal, sliding_window)
    elif not described:
        seen = _of_pairs(attention_mask, q, k)
    if position_bias is not None or compiling and (described or cu_seq_lens_q is not None):
        # A graph reads descriptions when it runs: it is that of all masks of a shape.
        description = attention_mask if described else as_description(seen, k.shape[1], k.device)
        if position_bias is not None:
            shown = pairs(description, q.shape[1], k.shape[1])
            return _with_bias(q, k, v, shown, position_bias, **scores), None
        places = (position_ids, cu_seq_lens_q, cu_seq_lens_k)
        return compiled.attention(q, k, v, description, *places, **scores), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        return attend_sequences(q, k, v, seen, cu_seq_lens_q, cu_seq_lens_k, **scores), None
    if seen.documents is None and seen.causal and q.shape[1] == k.shape[1] and not seen.offset:
        seen = seen._replace(documents=packed(position_ids, q.shape[1]))
    return attend(q, k, v, seen, **scores), None


def _refuse(given: dict[str, Any]) -> None:
    if given.get("output_attentions"):
        raise ValueError(
            "output_attentions=True asks for the matrix of attention weights, which Encke never "
            'makes; use attn_implementation="eager" for it'
        )
    if given.get("cache") is not None:
        raise ValueError(
            "Encke does not read paged caches (continuous batching); use generate() with its other "
            'caches, or attn_implementation="sdpa"'
        )
    refuse_unknown(given)


def _without_mask(q: Tensor, k: Tensor, causal: bool, window: Optional[int]) -> Visibility:
    """Models without padding may make no mask; then the queries are the last tokens."""
    queries, keys = q.shape[1], k.shape[1]
    if not causal or queries > keys:
        sides = (None, None) if window is None or window >= keys else (window - 1, window - 1)
        return Visibility(False, *sides, offset=max(keys - queries, 0))
    left = None if window is None else window - 1
    return Visibility(True, left, offset=keys - queries)


def _of_pairs(mask: Tensor, q: Tensor, k: Tensor) -> Visibility:
    """A mask [batch, 1, queries, keys] that the caller made."""
    if mask.dim() == 2:
        documents = mask.detach().cpu().numpy().astype(bool).astype(numpy.int64)
        return Visibility(False, documents=documents)
    if mask.requires_grad:
        # Also where all its numbers are still 0: their gradient would be lost.
        raise UnsupportedMask(
            "attention_mask is learned, a bias of each pair's score, which Encke does not compute; "
            'use attn_implementation="sdpa" or "eager"'
        )
    known = getattr(mask, "_encke_visibility", None)
    if known is None:
        shown = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool and not bool((shown | (mask <= -1e4)).all()):
            raise UnsupportedMask(
                "attention_mask adds numbers other than 0 and minus infinity to the scores; Encke "
                'has masks and ALiBi slopes: use attn_implementation="sdpa" or "eager" for it'
            )
        known = _recognised(shown, q.shape[1], k.shape[1])
        mask._encke_visibility = known  # type: ignore[attr-defined]
    return known


def _recognised(shown: Tensor, queries: int, keys: int) -> Visibility:
    batch = shown.shape[0]
    if shown.dim() == 4 and bool((shown == shown[:, :1, :1]).all()):
        # Keys that are hidden from every query.
        rows = shown[:, 0, 0].cpu().numpy().astype(numpy.int64)
        return Visibility(False, offset=max(keys - queries, 0), documents=rows)
    if shown.dim() != 4 or not bool((shown == shown[:, :1]).all()):
        raise UnsupportedMask(
            f"attention_mask has shape {list(shown.shape)}; Encke takes masks [batch, 1, queries, "
            "keys] that are equal for all heads"
        )
    try:
        found = encke.pattern_of(shown[:, :1])
    except encke.MaskError as error:
        raise UnsupportedMask(
            f'{error}; use attn_implementation="sdpa" or "eager" for this mask'
        ) from error
    lengths = found.pop("key_lengths", None)
    documents = numpy.ones((batch, keys), dtype=numpy.int64)
    if "documents" in found:
        numbers = numpy.arange(len(found["documents"])) + 1
        documents[:] = numpy.repeat(numbers, found["documents"])
    for entry, length in enumerate(() if lengths is None else lengths):
        documents[entry, length:] = 0
    if "prefix" in found:
        raise UnsupportedMask(
            f"attention_mask shows the first {found['prefix']} tokens outside its window; call "
            "encke.attention with prefix for it"
        )
    left, right = found.get("window", (None, None))
    offset = found.get("query_offset", keys - queries)
    return Visibility(found.get("causal", False), left, right, offset, documents)


_warned = False


def _with_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shown: Tensor,
    bias: Tensor,
    scale: Optional[float],
    softcap: Optional[float],
    sinks: Optional[Tensor],
    dropout: float,
) -> Tensor:
    """A learned number for each pair (T5), which the model has made already: by torch."""
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        from transformers.utils import logging

        logging.get_logger(__name__).warning(
            "This model adds a learned bias to each pair's score (position_bias), which Encke's "
            "kernels do not take: torch's scaled_dot_product_attention computes these layers."
        )
    if softcap is not None or sinks is not None:
        raise ValueError(
            "position_bias together with softcap or sinks is computed neither by Encke nor by "
            'torch; use attn_implementation="eager"'
        )
    bias = bias.masked_fill(~shown, torch.finfo(q.dtype).min)
    grouped = q.shape[2] != k.shape[2]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=bias.to(q.dtype),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)
