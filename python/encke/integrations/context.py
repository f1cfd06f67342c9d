"""Context parallelism for models of transformers: every rank of a group holds its rows of each
sequence, and only attention communicates.

The decision here: a model sees rows as a shorter sequence with positions of its own, so that
nothing but its inputs, its attention and its loss changes. What a layer needs to know of the whole
sequence, its documents, travels with the mask, which checkpointing keeps.
"""

from __future__ import annotations

import re
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from encke._torch import _autocast, under_autocast
from encke.distributed import ring_attention, sizes_of
from encke.integrations import compiled_ring
from encke.integrations.visibility import (
    UnsupportedMask,
    band,
    describe_band,
    is_description,
    read,
    refuse_own_attention,
    refuse_unknown,
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
        # The documents of the batch that was sharded last, ``[1 or entries, tokens]``.
        self.documents: Optional[Tensor] = None
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "there is no process group: start with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        # What a graph knows of the group.
        self.group_name = (dist.group.WORLD if group is None else group).group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def __enter__(self) -> ContextParallel:
        of = getattr(self._model, "module", self._model)
        if of is not None:
            _refuse_mixers(of)
        _entered.append(self)
        if of is not None:
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

    def rows(self, sequence: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that every rank has."""
        dim = dim % sequence.dim()
        at = self._at(sequence.shape[dim])
        return sequence.index_select(dim, at.to(sequence.device))

    def _at(self, tokens: int) -> Tensor:
        return compiled_ring.rows_of_rank(tokens, self.sharding, self.size, self.rank)

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
        if batch.get("past_key_values") is not None:
            raise ValueError(_CACHES)
        entries, tokens = whole.shape[:2]
        if tokens < self.size:
            sizes = sizes_of(tokens, ranks=self.size, sharding=self.sharding)
            raise ValueError(
                f"{tokens} tokens give the {len(sizes)} ranks {sizes} rows; every rank needs some"
            )
        self.documents = _documents(batch, entries, tokens)
        where = batch.get("position_ids")
        if where is None:
            where = self._at(tokens).to(whole.device)[None]
        else:
            where = self.rows(where, -1)
        labels = batch.get("labels")
        if labels is not None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
            if batch.get("num_items_in_batch") is None:
                batch["num_items_in_batch"] = (shifted != _IGNORED).sum()
            batch["shift_labels"] = self.rows(shifted)
        for name in ("input_ids", "inputs_embeds", "labels", "token_type_ids"):
            if batch.get(name) is not None:
                batch[name] = self.rows(batch[name])
        for name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
            batch.pop(name, None)
        return {**batch, "position_ids": where, "use_cache": False}

    def loss(self, local: Tensor) -> Tensor:
        """The loss of the whole batch from that of this rank's rows; its gradient is that of the
        rows, times the number of ranks where gradients will be averaged."""
        total = self.sum(local.detach())
        scaled = local * self.size if self.gradients == "mean" else local
        return scaled + (total - scaled.detach())

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", self.group_name))

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


# Names of modules that mix tokens by other means than attention: their parts.
_MIXERS = re.compile(
    "Mamba|Rwkv|RWKV|Recurrent|RGLRU|LSTM|Delta(Net|Rule)|LinearAttention|LightningAttention"
    "|FourierTransform|Retention|Hyena|ShortConv"
)
_MIXES = (
    "{} mixes tokens outside of attention, and a rank has only its own rows: context parallelism "
    "is for models whose tokens meet in attention alone"
)


def _refuse_mixers(model: torch.nn.Module) -> None:
    """Refuses models whose tokens meet outside of attention: a rank would see its own rows as
    neighbours, and its results would be wrong without a word."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        convolves = isinstance(module, torch.nn.Conv1d) and max(module.kernel_size) > 1
        if convolves or isinstance(module, torch.nn.RNNBase) or _MIXERS.search(kind):
            raise ValueError(_MIXES.format(f"{name or 'the model'} ({kind})"))


def _refuse_mixing_layers(config: Any) -> None:
    """The same for what a model's configuration says of its layers."""
    for of in ("layer_types", "layers_block_type"):
        for index, kind in enumerate(getattr(config, of, None) or ()):
            if re.search("linear|mamba|conv|recurrent|ssm|delta|lightning", str(kind)):
                raise ValueError(_MIXES.format(f"layer {index} ({kind})"))


def _documents(batch: dict[str, Any], entries: int, tokens: int) -> Tensor:
    """Numbers of documents, ``[1 or entries, tokens]``."""
    mask, bounds = batch.get("attention_mask"), batch.get("cu_seq_lens_q")
    positions = batch.get("position_ids")
    if mask is not None and mask.dim() != 2:
        raise UnsupportedMask(
            f"attention_mask has shape {list(mask.shape)}; a sequence in shards takes a "
            "padding mask [batch, tokens]"
        )
    if mask is None and bounds is None and positions is None:
        return torch.ones((1, tokens), dtype=torch.int64, device="cpu")
    if bounds is not None and not isinstance(bounds, Tensor):
        bounds = torch.as_tensor(bounds)
    return compiled_ring.documents(mask, positions, bounds, entries, tokens)


def current() -> ContextParallel:
    """The context that is entered."""
    if not _entered:
        raise RuntimeError(
            'attn_implementation="encke_ring" needs a ring: call the model inside "with '
            'encke.distributed.context_parallel(group, model=model):"; use "encke" for one process'
        )
    return _entered[-1]


def _documents_of(context: ContextParallel) -> Tensor:
    if context.documents is None:
        raise RuntimeError(
            "no batch was cut: give context_parallel the model, or the model a batch of "
            "context.shard(batch)"
        )
    return context.documents


def ring_mask(mask_function: Any = None, device: Any = "cpu", **traced: Any) -> Tensor:
    """The mask of a layer, with the documents of the whole sequence."""
    if not torch.compiler.is_compiling():
        config = traced.get("config")
        refuse_own_attention(config)
        _refuse_mixing_layers(config)
    return describe_band(mask_function, _documents_of(current()), device, traced)


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
    if attention_mask is None or not is_description(attention_mask):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        left = -1 if sliding_window is None else sliding_window - 1
        attention_mask = band(causal, left, -1 if causal else left, _documents_of(context))
    seed = _agreed_seed(context, q.device) if dropout else None
    if torch.compiler.is_compiling():
        if under_autocast(q):
            q, k, v = _autocast(q, k, v)
        ring = (context.group_name, context.sharding)
        scores = (s_aux, seed, *ring, scaling, softcap, float(dropout))
        return compiled_ring.attention(q, k, v, attention_mask, *scores), None
    seen = read(attention_mask)
    options: dict[str, Any] = dict(
        group=context.group, sharding=context.sharding, causal=seen.causal, window=seen.window,
        scale=scaling, softcap=softcap, sinks=s_aux, dropout=dropout, seed=seed,
    )
    outs = [
        ring_attention(q[of], k[of], v[of], documents=lengths, **options)
        for of, lengths in compiled_ring.by_documents(seen, q.shape[0])
    ]
    return torch.cat(outs) if len(outs) > 1 else outs[0], None


def _agreed_seed(context: ContextParallel, device: Any) -> Tensor:
    """The first rank's draw: checkpointing restores its generator, and so the seed."""
    seed = torch.randint(2**62, (), device=device)
    return context.sum(seed if context.rank == 0 else torch.zeros_like(seed))


_CACHES = (
    "caches are not sharded: leave the context and use "
    'attn_implementation="encke" to generate, with whole sequences on every process'
)


def _refuse(others: dict[str, Any], q: Tensor, k: Tensor) -> None:
    if others.get("output_attentions"):
        raise ValueError(
            "output_attentions=True asks for the matrix of attention weights, which Encke never "
            'makes; use attn_implementation="eager" for it'
        )
    if others.get("position_bias") is not None:
        raise ValueError("a learned bias of each pair's score (T5) is not computed on a ring")
    refuse_unknown(others)
    if q.shape[1] != k.shape[1] or others.get("cache") is not None:
        raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys: {_CACHES}")
