"""More cases of ring_cases.py: the ring as torch sees it, and unusual tensors."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.autograd.forward_ad as forward_ad
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
    in_part = k.clone()
    in_part.untyped_storage().resize_(in_part.nbytes - 8)
    for bad in (k.tolist(), k.to_sparse(), k.to("meta"), in_part, sharded[1]):
        raises = (TypeError, ValueError) if last else ring.Disagreement
        message = raised(raises, lambda: ring.ring_attention(q, bad if last else k, v))
        assert ("k_local" in message) and (last or "cannot take part" in message), message
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, torch.ones_like(k)) if last else k
        raises = NotImplementedError if last else ring.Disagreement
        for looks in (contextlib.nullcontext(), FlopCounterMode(display=False)):
            with looks:
                message = raised(raises, lambda: ring.ring_attention(q, dual, v))
            assert "forward-mode" in message, message
    assert torch.equal(ring.ring_attention(q, k, v), expected)
    across = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(ring.ring_attention(across, k, v), expected)
    lazily = torch.complex(dout, -dout).conj().imag
    assert lazily.is_neg()
    tracked = q.clone().requires_grad_()
    found = torch.autograd.grad(ring.ring_attention(tracked, k, v), tracked, lazily)
    wanted = torch.autograd.grad(ring.ring_attention(tracked, k, v), tracked, dout)
    assert torch.equal(*found, *wanted)


def transforms_of_torch_func():
    """Gradients, products and maps over the batch; forward mode is refused on all ranks."""
    q, k, v, dout, _ = rows()
    options = dict(causal=True, window=(5, 0))

    def call(q, k, v, **more):
        return ring.ring_attention(q, k, v, **options, **more)

    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = call(*given)
    wanted = torch.autograd.grad(out, given, dout)
    found, pull = torch.func.vjp(call, q, k, v)
    assert torch.equal(found, out)
    assert all(torch.equal(a, b) for a, b in zip(pull(dout), wanted))
    loss = torch.func.grad(lambda *x: (call(*x) * dout).sum(), argnums=(0, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(loss(q, k, v), wanted))
    many = [torch.stack([x, 2 * x, -x]) for x in (q, k, v)]
    mapped = torch.func.vmap(call)(*many)
    assert all(torch.equal(mapped[at], call(*(x[at] for x in many))) for at in range(3))
    shared = torch.func.vmap(call, (0, None, None))(many[0], k, v)
    assert all(torch.equal(shared[at], call(many[0][at], k, v)) for at in range(3))
    directions = torch.stack([dout, 2 * dout])
    (mapped,) = torch.func.vmap(lambda x: pull(x)[:1])(directions)
    close = dict(rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(mapped, torch.stack([wanted[0], 2 * wanted[0]]), **close)
    of_entries = torch.func.vmap(torch.func.grad(lambda *x: call(*x).sin().sum()))(*many)
    tracked = [x.clone().requires_grad_() for x in many]
    value = sum(call(*(x[at] for x in tracked)).sin().sum() for at in range(3))
    torch.testing.assert_close(of_entries, torch.autograd.grad(value, tracked)[0], **close)
    message = raised(NotImplementedError, lambda: torch.func.jvp(call, (q, k, v), (q, k, v)))
    assert "forward-mode" in message
    assert torch.equal(call(q, k, v), out)


def nothing_to_compute():
    """Empty batches and sequences, with gradients, and ranks that go on together."""
    for batch, tokens, options in [
        (0, 12, dict()),
        (0, 12, dict(causal=True, sharding="zigzag", window=(3, 0))),
        (0, 12, dict(segment_lengths=[4, 12], dilation_rates=[1, 3], mode="mix")),
        (0, 12, dict(documents=[5, 7], precision=torch.float32)),
        (2, 0, dict(causal=True)),
        (2, 0, dict(sharding="striped", checkpoint="recompute")),
        (2, 0, dict(sinks=torch.zeros(4, dtype=torch.float64))),
    ]:
        cut = dict(sharding=options.get("sharding", "contiguous"))
        q, k, v, dout, dlse = (x[:batch, :tokens] for x in tensors(12))
        given = [ring.shard(x, **cut).clone().requires_grad_() for x in (q, k, v)]
        for looks in (contextlib.nullcontext(), FlopCounterMode(display=False)):
            with looks:
                out, lse = ring.ring_attention(*given, **options, return_lse=True)
                found = torch.autograd.grad(out.sum() + lse.sum(), given)
            assert out.shape == given[0].shape and lse.shape == out.shape[:3], out.shape
            assert out.dtype == options.get("precision", torch.float64)
            assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(found, given))
        assert ring.unshard(out, **cut).shape == q.shape
    # No queries at all, but keys.
    q, k, v = rows()[:3]
    k.requires_grad_()
    out = ring.ring_attention(q[:, :0], k, v)
    assert out.shape[1] == 0 and not torch.autograd.grad(out.sum(), k)[0].any()
    last = dist.get_rank() == dist.get_world_size() - 1
    given = [x[:0] if last else x for x in (q, k, v)]
    message = raised(ring.Disagreement, lambda: ring.ring_attention(*given))
    assert "shapes" in message, message


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


CASES = [
    default_backend,
    unusual_tensors,
    transforms_of_torch_func,
    nothing_to_compute,
    seen_by_modes,
    copies_of_layers,
]
