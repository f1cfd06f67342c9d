"""Torchscale's padding and detached mixing weights on a GPU.

The decision here: kernels know neither. A forward pass is one call with exact mixing, to whose
finished rows the phantom keys are added (spec section 10). With detached weights the gradient of a
branch is that of a softmax with the lse of all branches and the delta of the branch's own output.
Nothing but out and lse is saved: the outputs of all branches but the one with most pairs are
computed again, one after the other, and the delta of that one is what theirs leave of the delta of
the whole output. One backward pass then takes the deltas of all. Where that is impossible
(``takes_deltas``), each branch has a backward pass of its own.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Protocol

import torch
from torch import Tensor

from encke import _cuda, _encke
from encke.options import Options

# The extra terms of patterns and shapes that were used last.
_MAX_TERMS = 16
_terms: dict[Any, Optional[Tensor]] = {}


class GpuAttention(Protocol):
    """Attention on a GPU, of one process or of one rank of several."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, clears: bool = True
    ) -> tuple[Tensor, Tensor]:
        """out and lse, without extra terms; without ``clears``, rows of out that no head selects
        may hold anything."""

    def differentiate(self, *inputs: Optional[Tensor]) -> list[Tensor]:
        """dq, dk and dv, from q, k, v, out, lse, dout and dlse, or from q, k, v, lse, dout and the
        deltas of branches."""

    def takes_deltas(self, q: Tensor, k: Tensor) -> bool:
        """Whether it differentiates all branches at once, given the delta of each."""

    def new_deltas(self, lse: Tensor) -> Tensor:
        """Uninitialised deltas of branches, for rows with this lse."""

    def add_delta(self, branch: int, deltas: tuple[Optional[Tensor], ...], own: Any) -> None:
        """Computes the delta of a branch (see ``_encke.add_delta``)."""

    def phantoms(self, q: Tensor, k: Tensor, v: Tensor) -> Optional[bytes]:
        """The logarithms of the phantom keys of each query and head, float64."""


class GpuMixing:
    """Attention with these options, from attentions that ``make`` makes."""

    def __init__(self, options: Options, make: Callable[[Options], GpuAttention]) -> None:
        self._options = options._replace(mixing_gradient=None)
        self._detached = options.mixing_gradient == "detached"
        lengths, rates = options.segment_lengths or (), options.dilation_rates or ()
        #: Each branch as a pattern of its own, and the attentions with all and with one.
        self._branches = [
            self._options._replace(segment_lengths=(length,), dilation_rates=(rate,))
            for length, rate in zip(lengths, rates)
        ]
        self._whole = make(self._options)
        self._alone = [make(branch) for branch in self._branches] if self._detached else []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        return self._attend(self._whole, self._options, q, k, v)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Optional[Tensor],
    ) -> list[Tensor]:
        """dq, dk and dv."""
        whole = self._whole
        if len(self._alone) <= 1:
            return whole.differentiate(q, k, v, out, lse, dout, dlse)
        if whole.takes_deltas(q, k):
            dense = [x.contiguous() for x in (out, lse, dout)]
            deltas = self._deltas((q, k, v), *dense, dlse)
            return whole.differentiate(q, k, v, lse, dout, deltas)
        sums: list[Tensor] = []
        for alone, options in zip(self._alone, self._branches):
            # P is that of the softmax over all branches, hence its lse; delta is the branch's.
            of_branch, _ = self._attend(alone, options, q, k, v)
            gradients = alone.differentiate(q, k, v, of_branch, lse, dout, dlse)
            sums = gradients if not sums else [x.add_(y) for x, y in zip(sums, gradients)]
            del of_branch, gradients
        return sums

    def _deltas(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Optional[Tensor],
    ) -> Tensor:
        """The delta of each branch."""
        dlse = None if dlse is None else dlse.contiguous()
        of_branches = self._whole.new_deltas(lse)
        deltas = (dout, dlse, lse, of_branches, torch.empty_like(lse), torch.empty_like(lse))
        _encke.start_deltas(deltas, out, _cuda.current_stream(lse.get_device()))
        tokens = qkv[1].shape[1]
        *others, last = sorted(
            range(len(self._branches)), key=lambda branch: self._pairs(branch, tokens)
        )
        for branch in others:
            alone = self._alone[branch]
            results = alone.attend(*qkv, clears=False)
            terms = self._terms(alone, qkv, self._branches[branch], results[1])
            self._whole.add_delta(branch, deltas, (*results, terms))
            del results
        self._whole.add_delta(last, deltas, None)
        return of_branches

    def _pairs(self, branch: int, tokens: int) -> float:
        """About how many pairs a branch has, per head."""
        lengths, rates = self._options.segment_lengths, self._options.dilation_rates
        assert lengths is not None and rates is not None
        segment = min(lengths[branch], tokens)
        return tokens / segment * (-(-segment // rates[branch])) ** 2

    def _attend(
        self, alone: GpuAttention, options: Options, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out and lse of an attention with these options, with their extra terms."""
        out, lse = alone.attend(q, k, v)
        terms = self._terms(alone, (q, k, v), options, lse)
        if terms is not None:
            add_terms(out, lse, terms)
        return out, lse

    @staticmethod
    def _terms(
        alone: GpuAttention, qkv: tuple[Tensor, ...], options: Options, lse: Tensor
    ) -> Optional[Tensor]:
        """The extra terms of each query and head; kept, as every layer and step has them."""
        key = (options, tuple(x.shape for x in qkv), lse.dtype, lse.device)
        if key not in _terms:
            phantoms = alone.phantoms(*qkv)
            if phantoms is not None:
                terms = torch.frombuffer(bytearray(phantoms), dtype=torch.float64)
                phantoms = terms.view(1, *lse.shape[1:]).to(lse.device, lse.dtype)
            for oldest in list(_terms)[: 1 - _MAX_TERMS]:
                del _terms[oldest]
            _terms[key] = phantoms
        return _terms[key]


def add_terms(out: Tensor, lse: Tensor, terms: Tensor) -> None:
    """Adds the logarithms of extra terms, ``[1, n or 1, heads]``, to finished rows, in place: out
    shrinks, lse grows. A row that sees no key keeps out = 0, and its lse is that of the terms."""
    _encke.add_terms(out, lse, terms, _cuda.current_stream(lse.get_device()))


def is_needed(options: Options) -> bool:
    """Whether a call on a GPU with these options needs more than its kernels."""
    return options.mixing_gradient == "detached" or options.padding == "torchscale"


__all__ = ["GpuMixing", "add_terms", "is_needed"]
