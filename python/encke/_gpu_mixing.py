"""Torchscale's padding and detached mixing weights on a GPU.

The decision here: kernels know neither. A forward pass is one call with exact mixing, to whose
finished rows the phantom keys are added (spec section 10). A backward pass with detached weights
runs branch by branch: the output of each branch is computed again, and its gradient is that of a
softmax with the branch's output and the lse of all branches. So nothing but out and lse is saved,
and a pass has the tensors of one branch in memory.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Protocol

import torch
from torch import Tensor

from encke.options import Options

# The extra terms of patterns and shapes that were used last.
_MAX_TERMS = 16
_terms: dict[Any, Optional[Tensor]] = {}


class GpuAttention(Protocol):
    """Attention on a GPU, of one process or of one rank of several."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, without extra terms."""

    def differentiate(self, *inputs: Optional[Tensor]) -> list[Tensor]:
        """dq, dk and dv, from q, k, v, out, lse, dout and dlse."""

    def phantoms(self, q: Tensor, k: Tensor, v: Tensor) -> Optional[bytes]:
        """The logarithms of the phantom keys of each query and head, float64."""


class GpuMixing:
    """Attention with these options, from attentions that ``make`` makes."""

    def __init__(self, options: Options, make: Callable[[Options], GpuAttention]) -> None:
        self._options = options._replace(mixing_gradient=None)
        self._detached = options.mixing_gradient == "detached"
        self._make = make

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse."""
        return self._attend(self._options, q, k, v)

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
        if not self._detached:
            return self._make(self._options).differentiate(q, k, v, out, lse, dout, dlse)
        sums: list[Tensor] = []
        for branch in range(len(self._options.segment_lengths or ())):
            options = self._branch(branch)
            # P is that of the softmax over all branches, hence its lse; delta is the branch's.
            of_branch, _ = self._attend(options, q, k, v)
            gradients = self._make(options).differentiate(q, k, v, of_branch, lse, dout, dlse)
            sums = gradients if not sums else [x.add_(y) for x, y in zip(sums, gradients)]
            del of_branch, gradients
        return sums

    def _branch(self, branch: int) -> Options:
        lengths, rates = self._options.segment_lengths, self._options.dilation_rates
        assert lengths is not None and rates is not None
        return self._options._replace(
            segment_lengths=lengths[branch : branch + 1], dilation_rates=rates[branch : branch + 1]
        )

    def _attend(self, options: Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        alone = self._make(options)
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
                phantoms = terms.view(lse.shape[1:]).to(lse.device, lse.dtype)
            for oldest in list(_terms)[: 1 - _MAX_TERMS]:
                del _terms[oldest]
            _terms[key] = phantoms
        return _terms[key]


def add_terms(out: Tensor, lse: Tensor, terms: Tensor) -> None:
    """Adds the logarithms of extra terms to finished rows, in place: out shrinks, lse grows. A row
    that sees no key keeps out = 0, and its lse is that of the terms."""
    before = lse.clone()
    torch.logaddexp(before, terms.expand_as(lse), out=lse)
    factor = torch.where(before == -torch.inf, 0.0, torch.exp(before - lse))
    out.mul_(factor.unsqueeze(-1))


def is_needed(options: Options) -> bool:
    """Whether a call on a GPU with these options needs more than its kernels."""
    return options.mixing_gradient == "detached" or options.padding == "torchscale"


__all__ = ["GpuMixing", "add_terms", "is_needed"]
