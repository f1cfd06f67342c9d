"""More cases of ring_cases.py: the ring as torch sees it, and unusual tensors."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import encke.distributed as ring
from inductor_cases import Graphs, missing_compiler, model, tensors as around
from ring_cases import raised, tensors


def rows(tokens=12):
    return [ring.shard(x).clone() for x in tensors(tokens)]


def default_backend():
    """torch.compile with inductor, forward and backward, in one graph."""
    if dist.get_world_size() != 2:
        return "skipped: with 2 processes"
    q, k, v, dout, _ = rows()

    def call(q, k, v):
        return ring.ring_attention(q, k, v, causal=True)

    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*given)
        found.append([out, *torch.autograd.grad(out, given, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    torch._dynamo.reset()
    if missing_compiler():
        return f"in part: {missing_compiler()}"
    # With operations around the call, sinks, documents and the lse.
    graphs = Graphs()
    found = []
    for function in (model, torch.compile(model, backend=graphs, fullgraph=True)):
        sinks = around()[3]
        given = [ring.shard(x.detach(), sharding="zigzag").requires_grad_() for x in around()[:3]]
        value = function(ring.ring_attention, *given, sinks, sharding="zigzag")
        found.append([value, *torch.autograd.grad(value, [*given, sinks])])
    for got, wanted in zip(*found):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert graphs.made == 1, graphs.made
    torch._dynamo.reset()
    return None


def unusual_tensors():
    """Collectives under way are waited for; lists, arrays and DTensors are refused in words."""
    q, k, v, dout, _ = rows()
    expected = ring.ring_attention(q, k, v)
    pending = collectives.all_reduce(v / dist.get_world_size(), "sum", dist.group.WORLD)
    mean = v.clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(
        ring.ring_attention(q, k, pending), ring.ring_attention(q, k, mean / dist.get_world_size())
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = [distribute_tensor(x, mesh, [Shard(1)]) for x in tensors(12)[:3]]
    assert "to_local" in raised(TypeError, lambda: ring.ring_attention(*sharded))
    local = [x.to_local() for x in sharded]
    assert torch.equal(ring.ring_attention(*local), expected)
    assert "ndarray" in raised(TypeError, lambda: ring.ring_attention(*map(_array, (q, k, v))))
    assert "list" in raised(TypeError, lambda: ring.ring_attention(q.tolist(), k, v))
    # A rank alone raises its own error, the others name it, and the group can be used.
    last = dist.get_rank() == dist.get_world_size() - 1
    for bad in (k.tolist(), k.to_sparse(), k.to("meta")):
        raises = (TypeError, ValueError) if last else ring.Disagreement
        message = raised(raises, lambda: ring.ring_attention(q, bad if last else k, v))
        assert ("k_local" in message) and (last or "cannot take part" in message), message
    across = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(ring.ring_attention(across, k, v), expected)
    lazily = torch.complex(dout, -dout).conj().imag
    assert lazily.is_neg()
    tracked = q.clone().requires_grad_()
    found = torch.autograd.grad(ring.ring_attention(tracked, k, v), tracked, lazily)
    wanted = torch.autograd.grad(ring.ring_attention(tracked, k, v), tracked, dout)
    assert torch.equal(*found, *wanted)
    message = raised(
        NotImplementedError, lambda: torch.func.grad(lambda x: call_sum(x, k, v))(q)
    )
    assert "torch.func" in message


def call_sum(q, k, v):
    return ring.ring_attention(q, k, v).sum()


def _array(tensor):
    return tensor.numpy()


def seen_by_modes():
    """A dispatch mode sees the operator, with the results of the call that it does not see."""
    q, k, v, *_ = rows()
    options = dict(causal=True, documents=[5, 7], window=(3, 0))
    expected = ring.ring_attention(q, k, v, **options)
    with FlopCounterMode(display=False) as counter:
        found = ring.ring_attention(q, k, v, **options)
    assert torch.equal(found, expected)
    assert counter.get_total_flops() >= 0
    # A backward pass that only the first rank looks at, after a forward pass that nothing saw.
    gradients = []
    for mode in (contextlib.nullcontext(), Named() if dist.get_rank() == 0 else None):
        tracked = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = ring.ring_attention(*tracked, **options, return_lse=True)
        with mode or contextlib.nullcontext():
            gradients.append(torch.autograd.grad(out.sum() + lse.sum(), tracked))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    if mode is not None:
        assert "encke::ring_attention_backward" in mode.names


class Named(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def copies_of_layers():
    """A layer on a sub-group can be copied."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = ring.RingDilatedAttention([4, 12], [1, 2], group=group)
    made = copy.deepcopy(torch.nn.ModuleList([layer]))[0]
    assert made.group is group and made.options == layer.options and made is not layer
    q, k, v, *_ = rows()
    assert torch.equal(made(q, k, v), layer(q, k, v))


CASES = [default_backend, unusual_tensors, seen_by_modes, copies_of_layers]
