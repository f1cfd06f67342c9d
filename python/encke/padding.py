"""Right-padded batches: rows at or after an entry's length are neither read nor written.

The decision here: the rows that count are packed into one sequence of documents, and the results
are put back, so that padding costs no computation and needs nothing of a kernel. An entry of a
batch and a document of a packed sequence are the same thing (segments, offsets and prefixes begin
at its first token).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Optional

import numpy

from encke import _encke
from encke.options import Options, find


class PaddedAttention:
    """Attention of batches with these key lengths, called like :class:`encke._encke.Attention`."""

    def __init__(self, options: tuple[Any, ...], key_lengths: tuple[int, ...]) -> None:
        self._options = Options(*options)
        self._lengths = key_lengths
        # For what does not depend on documents and seed.
        lasting = self._options._replace(documents=None, dropout=0.0, seed=None)
        self._unpacked: _encke.Attention = find(tuple(lasting))
        if not isinstance(self._options.sharding, str):
            raise ValueError(
                f"sharding is {list(self._options.sharding)} and key_lengths is given: the rows "
                "that count are packed before they are divided, so that first tokens would be "
                'others; use sharding="balanced"'
            )
        if self._options.mode == "fkodom":
            raise ValueError(
                'key_lengths and mode="fkodom" do not go together: its rows are divided by sums '
                "over the whole sequence; use group mode"
            )
        self.splits_slots = self._unpacked.splits_slots
        self.recomputes = self._unpacked.recomputes
        self.precision = self._unpacked.precision

    def forward(
        self, q: Any, k: Any, v: Any, sinks: Any = None, run: Any = _encke.Attention.forward
    ) -> tuple[Any, ...]:
        """out, lse, and both by slot where branches keep slots of their own; ``run`` computes the
        packed rows."""
        rows = self._rows(q, k, v)
        out, lse, slot_out, slot_lse = run(self._attention(q), *rows.pack(q, k, v), sinks)
        return (
            rows.unpack(out, 0.0),
            rows.unpack(lse, -math.inf),
            rows.unpack(slot_out, 0.0),
            rows.unpack(slot_lse, -math.inf),
        )

    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        saved: Any,
        dout: Any,
        dlse: Any,
        sinks: Any = None,
        run: Any = _encke.Attention.backward,
    ) -> tuple[Any, ...]:
        """dq, dk, dv and the gradient of the sinks."""
        rows = self._rows(q, k, v)
        saved = tuple(rows.pack(*saved))
        packed = rows.pack(q, k, v, dout, dlse)
        dq, dk, dv, dsinks = run(self._attention(q), *packed[:3], saved, *packed[3:], sinks)
        return rows.unpack(dq, 0.0), rows.unpack(dk, 0.0), rows.unpack(dv, 0.0), dsinks

    def _rows(self, q: Any, k: Any, v: Any) -> _Rows:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if len(tensor.shape) != 4:
                raise ValueError(
                    f"{name} has {len(tensor.shape)} dimensions, {tuple(tensor.shape)}; it must "
                    "have 4, [batch, tokens, heads, dim]"
                )
            if tuple(tensor.shape[:2]) != tuple(q.shape[:2]):
                raise ValueError(
                    f"{name} is {list(tensor.shape[:2])} and q {list(q.shape[:2])} in [batch, "
                    "tokens]; with key_lengths both must have the same tokens"
                )
        batch, tokens = q.shape[:2]
        if len(self._lengths) != batch:
            raise ValueError(
                f"key_lengths has {len(self._lengths)} numbers for a batch of {batch}; give one "
                "length for each entry"
            )
        for entry, length in enumerate(self._lengths):
            if length > tokens:
                raise ValueError(
                    f"key_lengths[{entry}] is {length}, but there are {tokens} tokens"
                )
        return _Rows(batch, tokens, self._lengths)

    def _attention(self, q: Any) -> _encke.Attention:
        """The attention of the packed rows."""
        within = self._options.documents or (q.shape[1],)
        if sum(within) != q.shape[1]:
            raise ValueError(
                f"the documents have {sum(within)} tokens together, but the sequence has "
                f"{q.shape[1]}; give lengths that add up to it"
            )
        entries: list[tuple[int, ...]] = []
        for length in self._lengths:
            ends = itertools.accumulate(within)
            before = itertools.accumulate((0, *within))
            parts = (min(end, length) - min(first, length) for first, end in zip(before, ends))
            entries.append(tuple(parts))
        if not any(self._lengths):
            entries = [(1,)]
        return find(tuple(self._options._replace(documents=tuple(entries))))


class _Rows:
    """The rows of a batch that count."""

    def __init__(self, batch: int, tokens: int, lengths: tuple[int, ...]) -> None:
        self._shape = (batch, tokens)
        within = [numpy.arange(length) + entry * tokens for entry, length in enumerate(lengths)]
        self._index = numpy.concatenate(within)

    def pack(self, *tensors: Optional[Any]) -> list[Optional[Any]]:
        """The rows of each tensor as one sequence; a sequence of one row of zeros without any."""
        return [None if tensor is None else self._packed(tensor) for tensor in tensors]

    def _packed(self, tensor: Any) -> Any:
        rest = tuple(tensor.shape[2:])
        if not self._index.size:
            return _full(tensor, (1, 1, *rest), 0.0)
        flat = tensor.reshape((self._shape[0] * self._shape[1], *rest))
        return flat[self._index_for(tensor)][None]

    def unpack(self, packed: Optional[Any], missing: float) -> Optional[Any]:
        """The rows at their places in a batch; the others have the value ``missing``."""
        if packed is None:
            return None
        batch, tokens = self._shape
        rest = tuple(packed.shape[2:])
        flat = _full(packed, (batch * tokens, *rest), missing)
        if self._index.size:
            flat[self._index_for(packed)] = packed[0]
        return flat.reshape((batch, tokens, *rest))

    def _index_for(self, tensor: Any) -> Any:
        if isinstance(tensor, numpy.ndarray):
            return self._index
        import torch

        return torch.from_numpy(self._index).to(tensor.device)


def _full(like: Any, shape: tuple[int, ...], value: float) -> Any:
    if isinstance(like, numpy.ndarray):
        return numpy.full(shape, value, dtype=like.dtype)
    return like.new_full(shape, value)


def find_padded(options: tuple[Any, ...], key_lengths: Optional[tuple[int, ...]]) -> Any:
    """The attention with these options, of padded batches if lengths are given."""
    return find(options) if key_lengths is None else PaddedAttention(options, key_lengths)
