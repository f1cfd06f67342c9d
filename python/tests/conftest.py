"""Fixtures: seeded tensors."""

import pytest
import torch


@pytest.fixture
def randn():
    """A function that makes normally distributed tensors, the same in every run."""
    generator = torch.Generator().manual_seed(20)

    def make(*shape, dtype=torch.float64, requires_grad=False):
        tensor = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return tensor.requires_grad_(requires_grad)

    return make
