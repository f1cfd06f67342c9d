"""Encke in the place of torchscale's dilated attention, inside models that have it.

One line replaces the attention of a model and keeps its parameters::

    import encke.compat.torchscale
    encke.compat.torchscale.patch(model)

flash_attn is neither needed nor imported, and the model runs on CPUs and NVIDIA GPUs. Results are
torchscale's: zeros that fill segments up take part in the softmax (``padding="torchscale"``), and
the weights that mix branches have no gradient.

Torchscale misplaces rows where a dilation rate does not divide a segment length and the sequence
is longer than that segment: it writes the rows of later segments a few places too far right. Such
a call is refused by default, with the numbers; ``misplaced="reproduce"`` computes what torchscale
computes, in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

import encke
from encke.compat._misplaced import with_misplaced_rows

# What a module must have to be torchscale's dilated attention, or a copy of it.
_PARTS = ("q_proj", "k_proj", "v_proj", "out_proj", "num_heads", "gathering", "scattering")
_ARGUMENTS = ("segment_length", "dilated_ratio")


def patch(
    model: nn.Module,
    *,
    misplaced: str = "refuse",
    mixing_gradient: str = "detached",
    deterministic: Optional[bool] = None,
    group: Any = None,
    sharding: Optional[str] = None,
) -> Patch:
    """Replaces every dilated attention of torchscale in ``model`` by Encke's, in place.

    Modules are found by what they have, not by their class, so that copies of torchscale inside
    other packages are found, too. Parameters, buffers, hooks and the state_dict stay as they are.

    misplaced
        What happens where torchscale misplaces rows: ``"refuse"`` (default) or ``"reproduce"``.
    mixing_gradient
        ``"detached"`` (default): the weights that mix branches have no gradient, as in torchscale.
        ``"exact"``: the derivative of what was computed, which a GPU computes faster.
    deterministic
        Whether a GPU sums gradients in a fixed order, so that their bits repeat. None (default): as
        ``torch.use_deterministic_algorithms`` says. Over several processes it always does.
    group, sharding
        With a sharding (``"contiguous"``, ``"zigzag"``, ...), the rows that the model gets are
        those of one process of ``group`` (default: all processes), and attention is over the rows
        of all of them; see :func:`encke.distributed.shard`.

    Returns what was replaced; ``unpatch()`` undoes it, and so does leaving a ``with`` block.
    """
    if misplaced not in ("refuse", "reproduce"):
        raise ValueError(f'misplaced="{misplaced}" is unknown; known: "refuse", "reproduce"')
    if mixing_gradient not in ("detached", "exact"):
        raise ValueError(
            f'mixing_gradient="{mixing_gradient}" is unknown; known: "detached", "exact"'
        )
    if mixing_gradient == "exact" and misplaced == "reproduce":
        raise ValueError('misplaced="reproduce" has the gradient of torchscale, "detached"')
    if group is not None and sharding is None:
        raise ValueError('group needs a sharding, as in sharding="contiguous"')
    if sharding is not None and misplaced == "reproduce":
        raise ValueError(
            'misplaced="reproduce" is for one process; leave it or the sharding out'
        )
    found = {name: module for name, module in model.named_modules() if _is_dilated(module)}
    if not found:
        raise ValueError(
            f"there is no dilated attention in this {type(model).__name__}: no module has "
            f"{', '.join(_PARTS)} and args with {' and '.join(_ARGUMENTS)}"
        )
    for name, module in found.items():
        if isinstance(module.__dict__.get("forward"), _Forward):
            raise ValueError(f"{name or 'the model'} is patched already; call unpatch() first")
    made = Patch(found, _Settings(misplaced, group, sharding, mixing_gradient, deterministic))
    for module in found.values():
        module.forward = _Forward(module, made)
    return made


def _is_dilated(module: nn.Module) -> bool:
    if not all(hasattr(module, part) for part in _PARTS):
        return False
    return all(hasattr(getattr(module, "args", None), name) for name in _ARGUMENTS)


class _Settings(NamedTuple):
    misplaced: str
    group: Any
    sharding: Optional[str]
    mixing_gradient: str
    deterministic: Optional[bool]


class Patch:
    """The modules of a model whose attention was replaced."""

    def __init__(self, modules: dict[str, nn.Module], settings: _Settings) -> None:
        #: The modules by their names in the model.
        self.modules = modules
        self._settings = settings
        self._slides: Optional[tuple[int, ...]] = None

    def unpatch(self) -> None:
        """Gives the modules their own attention back."""
        for module in self.modules.values():
            if isinstance(module.__dict__.get("forward"), _Forward):
                del module.forward

    @contextlib.contextmanager
    def slides(self, lengths: Sequence[int]) -> Iterator[None]:
        """Inside this block the model's batch is several slides of these numbers of tokens (the
        CLS token counts): either the entries of a batch that is padded on the right, or one
        sequence of all of them, one after the other. Each slide is computed as if it were alone.

        Rows after the end of a padded slide have no meaning.
        """
        before, self._slides = self._slides, tuple(int(length) for length in lengths)
        try:
            yield
        finally:
            self._slides = before

    def attention_rows(self, name: str, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The attention probabilities of some tokens in the module with this name, ``[batch,
        len(rows), heads, tokens]``, where ``x`` is what the module gets as its query: row 0 is how
        much of each tile is in the output of the CLS token. The rest, to 1, is padding's.
        """
        module = self.modules[name]
        forward = module.__dict__.get("forward")
        if not isinstance(forward, _Forward):
            raise ValueError(f"{name} is not patched any more; call patch again")
        return forward.rows(x, rows)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return f"Patch({', '.join(self.modules)})"


class _Forward:
    """The forward of a patched module, with torchscale's arguments."""

    def __init__(self, module: nn.Module, made: Patch) -> None:
        self._module = module
        self._patch = made

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: Any = None,
        key_padding_mask: Any = None,
        attn_mask: Any = None,
        rel_pos: Any = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        module = self._module
        _refuse(incremental_state=incremental_state, attn_mask=attn_mask, rel_pos=rel_pos)
        if key.shape != query.shape or value.shape != query.shape:
            raise ValueError(
                f"query is {list(query.shape)}, key {list(key.shape)} and value "
                f"{list(value.shape)}; Encke replaces self-attention, where they are equal"
            )
        q, k, v = self._projected(query, key, value)
        # Torchscale would drop pairs in evaluation, too.
        dropout = float(module.dropout) if module.training else 0.0
        out = self._attend(q, k, v, bool(is_causal), dropout).reshape(query.shape)
        if module.inner_attn_ln is not None:
            out = module.inner_attn_ln(out)
        return module.out_proj(out), None

    def rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The attention probabilities of these rows of x."""
        settings = self._patch._settings
        if settings.misplaced != "refuse" or settings.sharding is not None:
            raise ValueError("rows are computed in one process, and not with misplaced rows")
        with torch.no_grad():
            q, k, v = self._projected(x, x, x)
            options = {**self._options(False), **self._lengths(q)}
            _, lse = encke.attention(q, k, v, **options, return_lse=True)
            return encke.attention_rows(q, k, lse, rows, **options)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, ``[batch, tokens, heads, dim]``."""
        module = self._module
        batch, tokens, width = query.shape
        heads = int(module.num_heads)
        rows = (batch, tokens, heads, width // heads)
        q = module.q_proj(query).reshape(rows)
        k = module.k_proj(key).reshape(rows)
        v = module.v_proj(value).reshape(rows)
        if getattr(module, "xpos", None) is not None:
            q, k = self._rotated(module.xpos, q, k)
        return q, k, v

    def _rotated(self, xpos: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with their positions, by the module's own xpos."""
        if self._patch._settings.sharding is not None or self._patch._slides is not None:
            raise ValueError(
                "xpos counts positions from the first row it gets; with rows of one process or of "
                "several slides they are not its own: use one slide in one process"
            )
        batch, tokens, heads, dim = q.shape

        def apply(x: Tensor, downscale: bool) -> Tensor:
            flat = x.transpose(1, 2).reshape(batch * heads, tokens, dim)
            turned = xpos(flat, offset=0, downscale=downscale)
            return turned.reshape(batch, heads, tokens, dim).transpose(1, 2).to(x.dtype)

        return apply(q, False), apply(k, True)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float
    ) -> Tensor:
        misplaced, group, sharding, *_ = self._patch._settings
        options = {**self._options(causal), **self._lengths(q), "dropout": dropout}
        if sharding is not None:
            from encke.distributed import ring_attention

            del options["deterministic"]
            options.update(group=group, sharding=sharding)
            return ring_attention(q, k, v, **options)
        if misplaced == "reproduce" and self._patch._slides is None:
            return with_misplaced_rows(q, k, v, **options)
        return encke.attention(q, k, v, **options)

    def _options(self, causal: bool) -> dict[str, Any]:
        """The pattern of the module."""
        arguments = self._module.args
        deterministic = self._patch._settings.deterministic
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        return dict(
            segment_lengths=[int(length) for length in arguments.segment_length],
            dilation_rates=[int(rate) for rate in arguments.dilated_ratio],
            mode="mix",
            offsets="head-block",
            mixing_gradient=self._patch._settings.mixing_gradient,
            padding="torchscale",
            deterministic=deterministic,
            causal=causal,
        )

    def _lengths(self, q: Tensor) -> dict[str, Any]:
        """The options for several slides."""
        slides = self._patch._slides
        if slides is None:
            return {}
        batch, tokens = q.shape[:2]
        if self._patch._settings.sharding is not None:
            return dict(documents=slides)
        if batch == len(slides):
            return dict(key_lengths=slides)
        if batch == 1 and sum(slides) == tokens:
            return dict(documents=slides)
        raise ValueError(
            f"{len(slides)} slides of {sum(slides)} tokens together, but the batch is {batch} x "
            f"{tokens}; give a batch with one padded slide in each entry, or one sequence of all"
        )


def _refuse(**given: Any) -> None:
    """Refuses arguments that dilated attention does not have, or that Encke cannot compute."""
    reasons = {
        "incremental_state": "decoding token by token is not supported; call the model with the "
        "whole sequence",
        "attn_mask": "dilated attention takes no mask but is_causal",
        "rel_pos": "dilated attention takes no relative positions",
    }
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} was given, but {reasons[name]}")


__all__ = ["Patch", "patch"]
