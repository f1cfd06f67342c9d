"""torch.compile with its default backend, whose code a C++ compiler compiles: operations around the
call, forward and backward, in one graph. On several processes: citizen_cases.py."""

import pytest
import torch

import encke

dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

from inductor_cases import Graphs, missing_compiler, model, tensors  # noqa: E402

if missing_compiler():
    pytest.skip(missing_compiler(), allow_module_level=True)


@pytest.fixture(scope="module")
def a_ring_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield encke.distributed.ring_attention
    dist.destroy_process_group()


def alone(*qkv, **options):
    return encke.attention(*qkv, **options)


def compare(attend):
    """Results and gradients of one graph beside those of no graph."""
    torch._dynamo.reset()
    given = tensors()
    graphs = Graphs()
    wanted = torch.autograd.grad(model(attend, *given), given)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for got, of in zip(torch.autograd.grad(compiled(attend, *given), given), wanted):
        torch.testing.assert_close(got, of, rtol=1e-12, atol=1e-12)
    assert graphs.made == 1
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(attend, *given), model(attend, *given), rtol=1e-12, atol=1e-12
        )


def test_one_process():
    compare(alone)


def test_a_ring_of_one_process(a_ring_of_one):
    compare(a_ring_of_one)
