"""Which keys a query sees, as one number for each key.

A mask of transformers is a function of (query, key) and a padding mask. :func:`describe` reads the
parts of the function by their names, so that no tensor of queries times keys is made, and writes
them into one tensor of integers; :func:`read` reads it back.

The decision here: the description is a tensor ``[batch, 1, 1, 6 + keys]`` because models hand masks
on as tensors of four dimensions: they move them to devices, keep them for checkpointing, and take
one that was made before (for static caches) as it is. It begins with a number that no mask has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import numpy
import torch
from torch import Tensor

# A description begins with this number, then causal, the window's sides (-1: no limit), the
# position of the first query, and the number of keys.
_MARK = 0x454E434B45
_HEADER = 6


# Models that use the interface in some layers, and make or read masks of pairs in others.
_OWN_MASKS = ("bigbird_pegasus", "doge", "git", "informer", "lightglue")
# The same where there is padding: another attention of torch's gets the mask, too.
_OWN_PADDING = ("siglip2", "siglip2_vision_model")
# What configurations call a learned number for each pair, which models add to the mask.
_BIASES = ("use_relative_position_bias", "use_shared_relative_position_bias")


class Visibility(NamedTuple):
    """Which keys are visible; positions count keys from 0, and query i stands at ``offset + i``.

    ``documents`` is ``[batch, keys]``: 0 for a key that no query sees, or the number of its
    document, from 1 on. A query sees keys of its own document only; where there is just one, also
    queries at hidden positions see it unless the mask is causal. None: one document.
    """

    causal: bool = False
    left: Optional[int] = None
    right: Optional[int] = None
    offset: int = 0
    documents: Optional[numpy.ndarray] = None

    @property
    def window(self) -> Optional[tuple[Optional[int], Optional[int]]]:
        """The window as :func:`encke.attention` takes it."""
        return None if self.left is None and self.right is None else (self.left, self.right)


class UnsupportedMask(ValueError):
    """A mask that is none of causal, windows, chunks, packed sequences and padding."""


def describe(
    function: Callable[..., Any],
    *,
    batch: int,
    keys: int,
    query_offset: Any,
    key_offset: int,
    padding: Optional[Tensor],
    device: Any,
    traced: dict[str, Any],
) -> Tensor:
    """The description of a mask of transformers; ``padding`` is ``[batch, tokens]``, True for
    tokens that count, and ``traced`` the other arguments of the mask function's caller."""
    if torch.compiler.is_compiling():
        parts = _probed(function, batch, torch.arange(keys, device=device) + key_offset, traced)
    else:
        parts = list(_parts(function))
    causal = any(part == "causal" for part in parts)
    sides: list[list[int]] = [[], []]
    labels: list[Tensor] = []
    at = torch.arange(keys, device=device) + key_offset
    for part in parts:
        if isinstance(part, _Side):
            sides[part.right].append(part.tokens)
        elif isinstance(part, _Chunks):
            where = at.expand(batch, -1) if part.positions is None else part.positions
            labels.append((where - part.first[:, None]).div(part.tokens, rounding_mode="floor"))
        elif isinstance(part, _Labels):
            labels.append(part.labels)
    documents = torch.ones(batch, keys, dtype=torch.int64, device=device)
    for of_key in labels:
        documents[:, 1:] += (of_key[:, 1:] != of_key[:, :-1]).cumsum(-1)
    for part in parts:
        if isinstance(part, _Refused):
            documents = torch.where(part.found, -1, documents)
    if padding is not None:
        missing = key_offset + keys - padding.shape[-1]
        if missing > 0:
            padding = torch.nn.functional.pad(padding, (0, missing))
        documents = documents * padding[:, key_offset : key_offset + keys]
    left, right = (min(of, default=-1) for of in sides)
    return band(causal, left, right, documents, query_offset - key_offset)


def describe_band(
    function: Callable[..., Any], documents: Tensor, device: Any, traced: dict[str, Any]
) -> Tensor:
    """The description of a mask with these ``documents`` ``[batch, tokens]`` in the place of its
    own, and of padding: where a sequence lies in shards, those are not in the rows that the mask
    function knows."""
    documents = documents.to(device)
    if torch.compiler.is_compiling():
        parts, keys = _said(traced), traced["kv_length"]
        if "causal" in parts and keys > 1:
            at = torch.arange(keys, device=device)
            parts.append(_both_ways(function, traced["batch_size"], at))
    else:
        parts = list(_parts(function))
    for part in parts:
        if isinstance(part, _Chunks):
            documents = _in_chunks(documents, part.tokens)
        elif isinstance(part, _Refused):
            documents = torch.where(part.found, -1, documents)
    sides = ([x.tokens for x in parts if isinstance(x, _Side) and x.right == of] for of in (0, 1))
    return band("causal" in parts, *(min(of, default=-1) for of in sides), documents)


def band(causal: bool, left: int, right: int, documents: Tensor, first: Any = 0) -> Tensor:
    """The description of a window (-1: no limit) inside documents; queries begin at ``first``."""
    header = torch.tensor([_MARK, int(causal), left, right, 0, 0], device=documents.device)
    header[4] += first
    header[5] += documents.shape[1]
    return torch.cat([header.expand(documents.shape[0], -1), documents], -1)[:, None, None]


def as_description(seen: Visibility, keys: int, device: Any) -> Tensor:
    """What :func:`read` reads as the same."""
    sides = (-1 if side is None else side for side in (seen.left, seen.right))
    documents = torch.ones(1, keys, dtype=torch.int64, device=device)
    if seen.documents is not None:
        documents = torch.from_numpy(seen.documents[:, :keys]).to(device)
    return band(seen.causal, *sides, documents, seen.offset)


def _in_chunks(documents: Tensor, tokens: int) -> Tensor:
    """Documents of so many tokens each, from the first one of every document on."""
    at = torch.arange(documents.shape[1], device=documents.device)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(new, at, 0).cummax(-1).values
    return ((at - first) % tokens == 0).cumsum(-1)


def refuse_own_attention(config: Any, is_padded: bool = False) -> None:
    """Refuses models that compute attention by code of their own, to which a description means
    nothing."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    kind = getattr(config, "model_type", None)
    for name in _BIASES:
        if getattr(config, name, False):
            raise UnsupportedMask(
                f"{type(config).__name__} has {name}: a learned bias of each pair's score, which "
                'Encke does not compute; use attn_implementation="eager" or "sdpa"'
            )
    own = kind in _OWN_MASKS or is_padded and kind in _OWN_PADDING
    if own or _computes_its_own(module):
        raise UnsupportedMask(
            f"the model of {type(config).__name__} computes attention, or chooses its keys, by "
            "code of its own, outside of transformers' attention interface; use "
            'attn_implementation="eager" or "sdpa"'
        )


# What some models give their attention beside q, k, v and a mask, and means something to it.
_OTHER_TERMS = ("attn_bias", "attention_bias", "block_indices", "indices", "sinks")


def refuse_unknown(given: dict[str, Any]) -> None:
    """Refuses what a model gives its attention that Encke would leave out: chosen keys, biases,
    sinks that differ between queries."""
    for name in _OTHER_TERMS:
        if given.get(name) is not None:
            raise UnsupportedMask(
                f"this model gives its attention {name}, which Encke does not compute; use "
                'attn_implementation="eager" or "sdpa"'
            )


@functools.lru_cache(maxsize=None)
def _computes_its_own(module: str) -> bool:
    found = vars(sys.modules[module]) if module in sys.modules else {}
    own = [x for x in found.values() if isinstance(x, type) and x.__module__ == module]
    names = [x.__name__ for x in own if issubclass(x, torch.nn.Module)]
    if any("Indexer" in name for name in names):
        return True
    attention = any("Attention" in name for name in names)
    return attention and "ALL_ATTENTION_FUNCTIONS" not in found


def is_description(mask: Tensor) -> bool:
    """Whether :func:`describe` may have made it: masks of pairs are boolean or of real numbers."""
    return mask.dim() == 4 and mask.dtype == torch.int64 and mask.shape[1] == mask.shape[2] == 1


def read(description: Tensor) -> Visibility:
    """What was described; read once for all layers that get the same tensor."""
    found = getattr(description, "_encke_visibility", None)
    if found is not None:
        return found
    values = description.detach().cpu().numpy()[:, 0, 0]
    header = values[0, :_HEADER].tolist()
    if header[0] != _MARK:
        raise UnsupportedMask(
            f"attention_mask has shape {list(description.shape)} and holds integers; give a "
            "padding mask of two dimensions, or a boolean mask [batch, 1, queries, keys]"
        )
    left, right = (None if side < 0 else side for side in header[2:4])
    documents = values[:, _HEADER:]
    if documents.shape[1] != header[5]:
        raise _unsupported(
            f"one for {header[5]} keys, of which the model made one for {documents.shape[1]}, by "
            "cutting or joining"
        )
    if (documents < 0).any():
        raise _unsupported("one in which blocks of tokens see each other in both ways")
    whole = None if (documents == 1).all() else documents
    found = Visibility(bool(header[1]), left, right, header[4], whole)
    description._encke_visibility = found  # type: ignore[attr-defined]
    return found


def pairs(description: Tensor, queries: int, keys: int) -> Tensor:
    """The pairs ``[batch, 1, queries, keys]`` that were described, by operations that a graph can
    hold."""
    causal, left, right, first = description[0, 0, 0, 1:5].unbind()
    documents = description[:, 0, 0, _HEADER : _HEADER + keys]
    torch._assert_async((documents >= 0).all(), "tokens see each other in both ways")
    key = torch.arange(keys, device=description.device)
    at = torch.arange(queries, device=description.device) + first
    distance = at[:, None] - key
    shown = (distance >= 0) | (causal == 0)
    shown = shown & ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
    mine = documents[:, at.clamp(0, keys - 1)]
    same = (documents[:, None] == mine[:, :, None]) | (documents.max() <= 1)
    return (shown & same & (documents[:, None] > 0))[:, None]


def packed(positions: Any, tokens: int) -> Optional[numpy.ndarray]:
    """The documents of positions that restart at 0; None unless each is 0 or one more than the one
    before, and some but the first are 0."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != tokens:
        return None
    known = getattr(positions, "_encke_documents", None)
    if known is None or known[0] != positions._version:
        known = (positions._version, _packed(positions.detach().cpu().numpy()))
        positions._encke_documents = known  # type: ignore[attr-defined]
    return known[1]


def _packed(positions: numpy.ndarray) -> Optional[numpy.ndarray]:
    restarts = positions[:, 1:] == 0
    if not restarts.any() or positions[:, 0].any():
        return None
    if not (restarts | (numpy.diff(positions) == 1)).all():
        return None
    documents = numpy.ones(positions.shape, dtype=numpy.int64)
    documents[:, 1:] += restarts.cumsum(-1)
    return documents


class _Side(NamedTuple):
    """At most so many tokens on one side of the query."""

    right: bool
    tokens: int


class _Chunks(NamedTuple):
    """Documents of this many tokens, from the first token of each batch entry on."""

    tokens: int
    first: Tensor
    positions: Optional[Tensor]


class _Labels(NamedTuple):
    """Documents: keys with equal labels."""

    labels: Tensor


class _Refused(NamedTuple):
    """Whether a query sees the key after it in spite of a causal mask."""

    found: Tensor


def _parts(function: Callable[..., Any], positions: Optional[Tensor] = None) -> Iterator[Any]:
    """The conjunction that a mask function of transformers is made of."""
    name = getattr(function, "__qualname__", "").split(".")[0]
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        raise _unsupported(f"the function {name or function!r}")
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    given = {variable: cell.cell_contents for variable, cell in cells}
    if name == "causal_mask_function":
        yield "causal"
    elif name == "and_masks":
        for of in given["mask_functions"]:
            yield from _parts(of, positions)
    elif name == "or_masks":
        # Blocks that see each other in both directions, of which there may be none.
        first, *others = given["mask_functions"]
        if not all(_is_empty(other) for other in others):
            raise _unsupported("one mask or another (images that see themselves in both ways)")
        yield from _parts(first, positions)
    elif name == "sliding_window_overlay":
        yield _Side(False, given["sliding_window"] - 1)
    elif name == "sliding_window_bidirectional_overlay":
        yield from (_Side(right, given["sliding_window"]) for right in (False, True))
    elif name == "chunked_overlay":
        yield _Chunks(given["chunk_size"], given["left_padding"], positions)
    elif name == "packed_sequence_mask_function":
        yield _Labels(given["packed_sequence_mask"])
    elif name == "remap_positions_for_packed_sequence":
        # Inside a document positions are consecutive, so causal and windows mean the same.
        yield from _parts(given["mask_function"], given["position_ids"])
    elif name != "bidirectional_mask_function":
        raise _unsupported(f"the function {name}")


def _probed(
    function: Callable[..., Any], batch: int, at: Tensor, given: dict[str, Any]
) -> list[Any]:
    """The same where torch.compile traces, which shows no closures: from what the caller says, and
    from which neighbours see each other."""
    parts = _said(given)
    # A chunk is no longer than a window of its size.
    parts = [_Side(False, x.tokens - 1) if isinstance(x, _Chunks) else x for x in parts]
    if "causal" in parts and at.shape[0] > 1:
        entry = torch.arange(batch, device=at.device)[:, None]
        before = function(entry, torch.zeros_like(entry), at[None, 1:], at[None, :-1])
        before = before.expand(batch, -1)
        first = torch.zeros(batch, 1, dtype=torch.int64, device=at.device)
        parts.append(_Labels(torch.cat([first, (~before).cumsum(-1)], -1)))
        parts.append(_both_ways(function, batch, at))
    return parts


def _said(given: dict[str, Any]) -> list[Any]:
    """The parts of a mask by what transformers says to its maker."""
    if given.get("use_vmap"):
        raise _unsupported("one with a function of the model's own, which torch.compile hides")
    size, config = given.get("local_size"), given.get("config")
    if "allow_is_bidirectional_skip" in given:
        return [] if size is None else [_Side(False, size), _Side(True, size)]
    if size is None:
        return ["causal"]
    # Where a model's windows and chunks have one size, a chunk is described as a window, and the
    # neighbours tell where it begins.
    if getattr(config, "sliding_window", None) == size:
        return ["causal", _Side(False, size - 1)]
    return ["causal", _Chunks(size, torch.zeros(()), None)]


def _both_ways(function: Callable[..., Any], batch: int, at: Tensor) -> _Refused:
    """Whether a query of a causal mask sees the key after it."""
    entry = torch.arange(batch, device=at.device)[:, None]
    after = function(entry, torch.zeros_like(entry), at[None, :-1], at[None, 1:])
    return _Refused(after.any())


def _is_empty(function: Callable[..., Any]) -> bool:
    if getattr(function, "__qualname__", "").split(".")[0] != "blockwise_overlay":
        return False
    (cell,) = function.__closure__ or (None,)
    return cell is not None and bool((cell.cell_contents < 0).all())


def _unsupported(what: str) -> UnsupportedMask:
    return UnsupportedMask(
        f"this model's mask is {what}; Encke has causal masks, windows, chunks, packed sequences "
        'and padding: use attn_implementation="sdpa" or "eager" for it'
    )
