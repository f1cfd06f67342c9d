"""Context parallelism for models of transformers: every rank of a group holds its rows of each
sequence, and only attention communicates.

The decision here: a model sees rows as a shorter sequence with positions of its own, so that
nothing but its inputs, its attention and its loss changes. What a layer needs to know of the whole
sequence, its documents, travels with the mask, which checkpointing keeps. Under torch.compile the
attention of each layer is called between graphs.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from encke.distributed import positions as rows_of
from encke.distributed import ring_attention, shard, sizes_of
from encke.integrations.pieces import run_lengths
from encke.integrations.visibility import (
    UnsupportedMask,
    Visibility,
    describe_band,
    is_description,
    packed,
    read,
)

_IGNORED = -100
# The contexts that are entered, the innermost last.
_entered: list[ContextParallel] = []


class ContextParallel:
    """What :func:`encke.distributed.context_parallel` returns; see there."""

    def __init__(
        self,
        group: Optional[dist.ProcessGroup] = None,
        *,
        sharding: str = "zigzag",
        model: Any = None,
        gradients: str = "mean",
    ) -> None:
        if sharding not in ("contiguous", "zigzag", "striped"):
            raise ValueError(
                f'sharding is {sharding!r}; it must be "contiguous", "zigzag" or "striped", which '
                "do not depend on a layer's mask"
            )
        if gradients not in ("mean", "sum"):
            raise ValueError(
                f'gradients is {gradients!r}; it must be "mean" (DistributedDataParallel and FSDP '
                'average over ranks) or "sum"'
            )
        self.group, self.sharding, self.gradients = group, sharding, gradients
        self._model, self._hooks = model, []
        # Of the batch that was sharded last.
        self.documents: Optional[numpy.ndarray] = None

    def __enter__(self) -> ContextParallel:
        _entered.append(self)
        if self._model is not None:
            of = getattr(self._model, "module", self._model)
            if hasattr(of, "set_attn_implementation"):
                import encke.transformers  # noqa: F401

                of.set_attn_implementation("encke_ring")
            before = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
            self._hooks = [before, self._model.register_forward_hook(self._after)]
        return self

    def __exit__(self, *_: Any) -> None:
        _entered.remove(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def size(self) -> int:
        """The number of ranks that share a sequence."""
        return dist.get_world_size(self.group)

    def rows(self, sequence: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that every rank has."""
        return shard(sequence, group=self.group, sharding=self.sharding, dim=dim)

    @torch.compiler.disable
    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch that every rank of the group has whole.

        ``input_ids`` or ``inputs_embeds``, ``position_ids`` and ``labels`` are cut; labels are
        shifted before, so that the last token of a rank predicts the first one of another. Padding
        (``attention_mask``), ``position_ids`` that restart and ``cu_seq_lens_q`` become documents
        of the whole sequence. The loss is divided by the number of labels of the whole batch.
        """
        batch = dict(batch)
        whole = batch.get("input_ids")
        whole = batch.get("inputs_embeds") if whole is None else whole
        if whole is None or "decoder_input_ids" in batch:
            raise ValueError(
                f"the batch has {', '.join(sorted(batch))}; context parallelism is for models of "
                "one sequence: give input_ids or inputs_embeds"
            )
        entries, tokens = whole.shape[:2]
        sizes = sizes_of(tokens, group=self.group, sharding=self.sharding)
        if 0 in sizes:
            raise ValueError(
                f"{tokens} tokens give the {len(sizes)} ranks {sizes} rows; every rank needs some"
            )
        self.documents = _documents(batch, entries, tokens)
        where = batch.get("position_ids")
        if where is None:
            where = rows_of(
                tokens, group=self.group, sharding=self.sharding, device=whole.device
            )[None]
        else:
            where = self.rows(where, where.dim() - 1)
        labels = batch.get("labels")
        if labels is not None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
            if batch.get("num_items_in_batch") is None:
                batch["num_items_in_batch"] = (shifted != _IGNORED).sum()
            batch["shift_labels"] = self.rows(shifted).contiguous()
        for name in ("input_ids", "inputs_embeds", "labels", "token_type_ids"):
            if batch.get(name) is not None:
                batch[name] = self.rows(batch[name]).contiguous()
        for name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
            batch.pop(name, None)
        return {**batch, "position_ids": where, "use_cache": False}

    @torch.compiler.disable
    def loss(self, local: Tensor) -> Tensor:
        """The loss of the whole batch from that of this rank's rows; its gradient is that of the
        rows, times the number of ranks where gradients will be averaged."""
        total = local.detach().clone()
        dist.all_reduce(total, group=self.group)
        scaled = local * self.size if self.gradients == "mean" else local
        return scaled + (total - scaled.detach())

    def _before(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if len(given) > 1:
            raise ValueError("give a sharded model its inputs by name: model(input_ids=..., ...)")
        if given:
            named = dict(named, input_ids=given[0])
        return (), self.shard(named)

    def _after(self, module: Any, given: Any, output: Any) -> Any:
        if getattr(output, "loss", None) is not None:
            output.loss = self.loss(output.loss)
        return output


def _documents(batch: dict[str, Any], entries: int, tokens: int) -> Optional[numpy.ndarray]:
    """Numbers of documents, ``[batch, tokens]``; None for one document."""
    mask, bounds = batch.get("attention_mask"), batch.get("cu_seq_lens_q")
    found = packed(batch.get("position_ids"), tokens) if mask is None else None
    if bounds is not None:
        lengths = numpy.diff(torch.as_tensor(bounds).cpu().numpy())
        found = numpy.repeat(numpy.arange(len(lengths)) + 1, lengths)[None]
    if mask is not None:
        if mask.dim() != 2:
            raise UnsupportedMask(
                f"attention_mask has shape {list(mask.shape)}; a sequence in shards takes a "
                "padding mask [batch, tokens]"
            )
        # Padding is a document of its own: no other token sees it.
        found = mask.detach().cpu().numpy().astype(bool).astype(numpy.int64) + 1
        if (found == 2).all():
            return None
        if (numpy.diff(found) != 0).sum(-1).max() > 1:
            raise UnsupportedMask(
                "padding lies between tokens that count; pad on the left or on the right"
            )
    if found is None:
        return None
    return numpy.broadcast_to(found, (entries, tokens))


def current() -> ContextParallel:
    """The context that is entered."""
    if not _entered:
        raise RuntimeError(
            'attn_implementation="encke_ring" needs a ring: call the model inside "with '
            'encke.distributed.context_parallel(group, model=model):"; use "encke" for one process'
        )
    return _entered[-1]


@torch.compiler.disable
def ring_mask(batch_size: int, mask_function: Any = None, device: Any = "cpu", **_: Any) -> Tensor:
    """The mask of a layer, with the documents of the whole sequence."""
    return describe_band(mask_function, current().documents, device)


@torch.compiler.disable
def ring_forward(
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's rows over the keys of all ranks, as transformers calls it."""
    context = current()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    _refuse(others, q, k)
    if attention_mask is not None and is_description(attention_mask):
        seen = read(attention_mask)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        left = None if sliding_window is None else sliding_window - 1
        right = None if causal or sliding_window is None else sliding_window - 1
        seen = Visibility(causal, left, right, documents=context.documents)
    options: dict[str, Any] = dict(
        group=context.group, sharding=context.sharding, causal=seen.causal, window=seen.window,
        scale=scaling, softcap=softcap, sinks=s_aux,
    )
    if dropout:
        options.update(dropout=dropout, seed=_agreed_seed(context.group, q.device))
    rows = seen.documents
    if rows is None:
        return ring_attention(q, k, v, **options), None
    if (rows == rows[0]).all():
        return ring_attention(q, k, v, documents=run_lengths(rows[0]), **options), None
    entries = [
        ring_attention(*(x[i : i + 1] for x in (q, k, v)), documents=run_lengths(row), **options)
        for i, row in enumerate(rows)
    ]
    return torch.cat(entries), None


def _agreed_seed(group: Any, device: Any) -> Tensor:
    """The first rank's draw: checkpointing restores its generator, and so the seed."""
    seed = torch.randint(2**62, (), device=device)
    dist.broadcast(seed, group=group, group_src=0)
    return seed


def _refuse(others: dict[str, Any], q: Tensor, k: Tensor) -> None:
    if others.get("output_attentions"):
        raise ValueError(
            "output_attentions=True asks for the matrix of attention weights, which Encke never "
            'makes; use attn_implementation="eager" for it'
        )
    if others.get("position_bias") is not None:
        raise ValueError("a learned bias of each pair's score (T5) is not computed on a ring")
    if q.shape[1] != k.shape[1] or others.get("cache") is not None:
        raise ValueError(
            f"{q.shape[1]} queries and {k.shape[1]} keys: caches are not sharded; leave the "
            'context and use attn_implementation="encke" to generate'
        )
