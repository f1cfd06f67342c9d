"""The cases of test_distributed.py, run by every process of a launch. Not a test by itself.

One launch runs all cases, because importing torch takes longer than they do. Every rank makes the
whole sequence from the same seed, computes all of it by itself, and compares its rows with its part
of the ring.
"""

from __future__ import annotations

import datetime
import json
import sys
import time

import torch
import torch.distributed as dist

import encke
import encke.distributed as ring
from encke import _gpu_wire, _wire
from encke._ring import Request, agreed

torch.set_num_threads(1)


def tensors(tokens, heads=4, kv_heads=2, dim=8, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [heads, kv_heads, kv_heads, heads]
    q, k, v, dout = (
        torch.randn(batch, tokens, h, dim, generator=generator, dtype=torch.float64) for h in shapes
    )
    dlse = torch.randn(batch, tokens, heads, generator=generator, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, v, dout)] + [dlse.to(sums(dtype))]


def sums(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def alone(q, k, v, dout, dlse, **options):
    """(out, lse, dq, dk, dv) of the whole sequence in one process."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, lse = encke.attention(q, k, v, return_lse=True, **options)
    gradient_of_lse = torch.where(lse.isinf(), 0.0, dlse)
    torch.autograd.backward([out, lse], [dout, gradient_of_lse])
    return [x.detach() for x in (out, lse, q.grad, k.grad, v.grad)]


def together(q, k, v, dout, dlse, cut, given_sizes, **options):
    """The same on the ring, for this rank's rows."""
    mine = [ring.shard(x, **cut).clone() for x in (q, k, v, dout, dlse)]
    q, k, v = (x.requires_grad_() for x in mine[:3])
    sharding = cut.get("sharding", "contiguous")
    out, lse = ring.ring_attention(
        q, k, v, return_lse=True, sharding=sharding, sizes=given_sizes, **options
    )
    gradient_of_lse = torch.where(lse.isinf(), 0.0, mine[4])
    torch.autograd.backward([out, lse], [mine[3], gradient_of_lse])
    return [x.detach() for x in (out, lse, q.grad, k.grad, v.grad)]


def compare(got, expected, cut, tolerance, what):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
        b = ring.shard(b, **cut)
        assert a.shape == b.shape, (what, name, a.shape, b.shape)
        same = torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)
        assert same, (what, name, (a.double() - b.double()).abs().max())


DENSE = dict()
GROUP = dict(segment_lengths=[12, 24], dilation_rates=[1, 3])
MIX = dict(segment_lengths=[10, 20, 40], dilation_rates=[1, 2, 5], mode="mix")
DETACHED = dict(
    MIX, mixing_gradient="detached", offsets="head-block", padding="torchscale"
)


def uneven(tokens, ranks):
    """Sizes with one empty rank and one that has most rows."""
    sizes = [rank + 1 for rank in range(ranks)]
    sizes[0] = 0 if ranks > 2 else 1
    sizes[-1] += tokens - sum(sizes)
    return sizes


def equals_one_process():
    ranks = dist.get_world_size()
    count = 0
    for tokens in (37, 60):
        cuts = [dict(sharding=kind) for kind in ("contiguous", "zigzag", "striped")]
        cuts.append(dict(sizes=uneven(tokens, ranks)))
        for options in (DENSE, GROUP, MIX, DETACHED):
            for causal in (False, True):
                options = dict(options, causal=causal)
                given = tensors(tokens, seed=tokens)
                expected = alone(*given, **options)
                for cut in cuts:
                    sizes = ring.sizes_of(tokens, sharding=cut.get("sharding", "contiguous"))
                    sizes = cut.get("sizes", sizes)
                    # Alternates between exchanged and given sizes.
                    got = together(*given, cut, sizes if count % 2 else None, **options)
                    compare(got, expected, cut, 1e-12, (tokens, options, cut))
                    count += 1
    return count


def invariant_bits():
    """Every number of processes has the bits of one."""
    ranks = dist.get_world_size()
    for options in (DENSE, dict(causal=True), dict(segment_lengths=[4096], dilation_rates=[2])):
        options = dict(options, bits="invariant:32")
        given = tensors(64 * ranks + 20, dtype=torch.float32)
        sizes = [64] * (ranks - 1) + [84]
        got = together(*given, dict(sizes=sizes), sizes, **options)
        for mine, whole in zip(got, alone(*given, **options)):
            assert torch.equal(mine, ring.shard(whole, sizes=sizes)), options


def low_precision_and_checkpoints():
    cut = dict(sharding="zigzag")
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)):
        given = tensors(50, dtype=dtype)
        got = together(*given, cut, None, causal=True, **GROUP)
        assert got[0].dtype == dtype and got[1].dtype == torch.float32
        compare(got, alone(*given, causal=True, **GROUP), cut, tolerance, dtype)
    given = tensors(50)
    for choice in (dict(checkpoint="recompute"), dict(scale=0.7), dict(group_scale="groups")):
        options = dict(GROUP, **choice)
        compare(
            together(*given, cut, None, **options), alone(*given, **options), cut, 1e-12, choice
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = (ring.shard(x, **cut) for x in tensors(50, dtype=torch.float32)[:3])
        assert ring.ring_attention(q, k, v, sharding="zigzag").dtype == torch.bfloat16


def the_same_bits_twice():
    given = tensors(60, dtype=torch.float32)
    first, second = (together(*given, dict(), None, causal=True, **MIX) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def strided_inputs():
    """q, k and v as slices of one fused projection."""
    qkv = ring.shard(torch.randn(2, 30, 3, 4, 8, generator=torch.Generator().manual_seed(1)))
    q, k, v = qkv.unbind(2)
    out = ring.ring_attention(q, k, v, causal=True)
    packed = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(out, ring.ring_attention(*packed, causal=True))
    # A rank reads in place what one process would.
    for given in ((q, k, v), packed, [x[:1] for x in packed], [x[:, :, 1:3] for x in packed]):
        ring.ring_attention(*given, sizes=ring.sizes_of(30))
        (rank,) = encke.report(*given)["ranks"]
        request = Request(sizes=tuple(ring.sizes_of(30)))
        borrowed = agreed(_wire.wire_of(None), tuple(given), request).shard.borrowed_bytes
        assert borrowed == rank["borrowed_bytes"], (borrowed, rank)
        assert borrowed == sum(x.nbytes for x in given if x.is_contiguous()), borrowed


def sharding_there_and_back():
    whole = torch.arange(2 * 23 * 3).reshape(2, 23, 3)
    for kind in ("contiguous", "zigzag", "striped"):
        local = ring.shard(whole, sharding=kind)
        assert torch.equal(ring.unshard(local, sharding=kind), whole), kind
        last = ring.shard(whole.movedim(1, 2), sharding=kind, dim=-1)
        assert torch.equal(ring.unshard(last, sharding=kind, dim=-1), whole.movedim(1, 2)), kind
    sizes = uneven(23, dist.get_world_size())
    assert torch.equal(ring.unshard(ring.shard(whole, sizes=sizes)), whole)
    x = torch.randn(2, 23, requires_grad=True)
    ring.shard(x, sharding="zigzag").sum().backward()
    positions = ring.shard(torch.arange(23), sharding="zigzag", dim=0)
    assert x.grad.sum() == 2 * len(positions) and bool((x.grad[:, positions] == 1).all())


def raised(kind, work):
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def disagreements():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q = torch.randn(1, 6, 4, 8)
    last = rank == ranks - 1
    for options, word in (
        (dict(causal=last), "causal"),
        (dict(segment_lengths=[4 + last], dilation_rates=[1]), "segment_lengths"),
        (dict(return_lse=last), "return_lse"),
        (dict(sizes=[6] * ranks if last else None), "sizes"),
    ):
        message = raised(ring.Disagreement, lambda: ring.ring_attention(q, q, q, **options))
        assert word in message and "rank 0" in message and f"rank {ranks - 1}" in message, message
        every = [None] * ranks
        dist.all_gather_object(every, message)
        assert every == [message] * ranks, every
    message = raised(ring.Disagreement, lambda: ring.ring_attention(q, q, q, sizes=[7] * ranks))
    assert "[7" in message and "[6" in message, message
    wide = torch.randn(1, 6, 4, 9) if last else q
    assert "shapes" in raised(ring.Disagreement, lambda: ring.ring_attention(wide, wide, wide))
    # An invalid rank raises its own error, the others name that rank.
    bad = q[..., 0] if last else q
    message = raised(ValueError, lambda: ring.ring_attention(bad, bad, bad))
    assert ("shape [1, 6, 4]" in message) and (last or f"rank {ranks - 1}" in message), message
    # An invalid request raises the same error on all ranks.
    wrong = dict(segment_lengths=[2] * 5, dilation_rates=[1] * 5)
    message = raised(ValueError, lambda: ring.ring_attention(q, q, q, **wrong))
    assert "5 branches but only 4 heads" in message, message
    message = raised(ValueError, lambda: ring.ring_attention(q, q, q, mode="fkodom", **GROUP))
    assert "fkodom" in message, message
    # The group can still be used.
    assert ring.ring_attention(q, q, q).shape == q.shape


def subgroups():
    """A ring over some of the processes, with its own rank numbers."""
    ranks = dist.get_world_size()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    if dist.get_rank() in members:
        q = tensors(20)[0]
        local = ring.shard(q, group=group)
        out = ring.unshard(ring.ring_attention(local, local, local, group=group), group=group)
        assert torch.allclose(out, encke.attention(q, q, q), atol=1e-12)
    else:
        assert "not a member" in raised(
            ValueError, lambda: ring.unshard(torch.zeros(1, 1), group=group)
        )


class Model(torch.nn.Module):
    """A layer over shards: attention on the ring, everything else row by row."""

    def __init__(self, attention=None):
        super().__init__()
        from encke.nn import DilatedTransformerEncoderLayer

        options = dict(attention=attention) if attention else dict(GROUP)
        self.layer = DilatedTransformerEncoderLayer(
            32, 4, dim_feedforward=48, dropout=0.0, dtype=torch.float64, **options
        )

    def forward(self, x):
        return self.layer(x, is_causal=True)


def gradients_of_one_model(wrap):
    """A sequence over all processes, with parameters in torch's own wrappers, has the gradients of
    one process with the whole sequence."""
    ranks, tokens = dist.get_world_size(), 41
    x = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.manual_seed(5)
    one = Model()
    one(x).square().sum().backward()
    torch.manual_seed(5)
    many = Model(ring.RingDilatedAttention(**GROUP, sharding="striped"))
    many.load_state_dict(one.state_dict())
    many, full = wrap(many)
    # Wrappers average over ranks; this loss is a sum over ranks.
    (many(ring.shard(x, sharding="striped")).square().sum() * ranks).backward()
    expected = {name: parameter.grad for name, parameter in one.named_parameters()}
    for name, parameter in many.named_parameters():
        gradient = full(parameter.grad)
        name = name.removeprefix("module.")
        assert torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-9), name


def under_data_parallel():
    gradients_of_one_model(
        lambda model: (torch.nn.parallel.DistributedDataParallel(model), lambda x: x)
    )


def under_fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(model, mesh=mesh), lambda gradient: gradient.full_tensor()

    gradients_of_one_model(wrap)


def through_the_store():
    """Control messages of a group with NCCL alone, and heartbeats."""
    wire = _wire.wire_of(None)
    rank, ranks = wire.rank, wire.size
    for turn in range(4):
        own = torch.arange(rank + turn) + 10 * rank
        every = wire._gather_by_store("a test", own)
        assert all(
            x.tolist() == [10 * r + i for i in range(r + turn)] for r, x in enumerate(every)
        ), every
    heartbeat = _gpu_wire.Heartbeat(wire.store, rank, ranks, timeout=1.5)
    for _ in range(rank + 1):
        heartbeat.next_pass()
    key = _gpu_wire._heartbeat_key(rank)
    while not (wire.store.check([key]) and json.loads(wire.store.get(key))[1] == rank + 1):
        time.sleep(0.05)
    dist.barrier()
    assert heartbeat.look(wire) is None
    # The rank with the fewest passes is behind; of equals, the one that is waited for.
    assert heartbeat.furthest_behind([ranks - 1]) == (0 if rank else 1)
    dist.barrier()
    if rank == ranks - 1:
        del heartbeat
        dist.barrier()
    else:
        until = time.monotonic() + 20
        while (stale := heartbeat.look(wire)) is None and time.monotonic() < until:
            time.sleep(0.1)
        assert stale is not None and stale[0] == ranks - 1 and stale[1] > 1.5, stale
        dist.barrier()


def in_a_graph():
    """torch.compile of a layer, forward and backward, without a graph break."""
    if dist.get_world_size() != 2:
        return "skipped: with 2 processes"
    group = dist.new_group(list(range(dist.get_world_size())))
    for options, dtype, where in ((GROUP, torch.float64, None), (DETACHED, torch.float32, group)):

        def layer(q, k, v, sizes):
            out, lse = ring.ring_attention(
                q * 2, k, v, group=where, sizes=sizes, return_lse=True, causal=True, **options
            )
            return out.sin(), lse

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
        for sizes in (None, uneven(20, 2)):
            cut = dict() if sizes is None else dict(sizes=sizes)
            got = []
            for function in (layer, compiled):
                mine = [ring.shard(x, **cut).clone() for x in tensors(20, dtype=dtype)]
                given = [x.requires_grad_() for x in mine[:3]]
                out, lse = function(*given, sizes)
                torch.autograd.backward([out, lse], mine[3:])
                got.append([out, lse, *(x.grad for x in given)])
            assert all(torch.equal(a, b) for a, b in zip(*got)), (options, sizes)
    # Without gradients, under autocast, and the module.
    q, k, v = (x.to(torch.float32) for x in tensors(12)[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = ring.RingDilatedAttention(**GROUP, sharding="zigzag")
        out = torch.compile(module, fullgraph=True, backend="aot_eager")(q, k, v)
        assert out.dtype == torch.bfloat16 and torch.equal(out, module(q, k, v))
    torch._dynamo.reset()
    return None


def on_gpus():
    """Processes with one GPU each, or sharing one; hops go through the host."""
    return gpu_cases() if torch.cuda.is_available() else "skipped: torch sees no GPU"


def gpu_cases():
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for options in (DENSE, GROUP, MIX, DETACHED):
            options = dict(options, causal=dtype != torch.float32)
            given = tensors(148, dim=32, dtype=dtype)
            expected = alone(*given, **options)
            for cut in (dict(), dict(sharding="zigzag"), dict(sharding="striped")):
                got = together(*(x.to(device) for x in given), cut, None, **options)
                assert all(x.device == device for x in got)
                whole = ring.unshard(got[0], **cut)
                assert whole.device == device and torch.equal(ring.shard(whole, **cut), got[0])
                got = [x.cpu() for x in got]
                compare(got, expected, cut, tolerance, (dtype, options, cut))
    # What needs the host, and ranks without rows, are refused on all ranks.
    q = torch.randn(1, 6, 4, 8, device=device)
    for refused in (dict(GROUP, mode="fkodom"), dict(checkpoint="recompute")):
        assert "on GPUs" in raised(ValueError, lambda: ring.ring_attention(q, q, q, **refused))


def over_nccl():
    """A group with NCCL alone: no rows go through the host."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    hops, post = [], _wire._Call.post_on_gpu

    def counted(self, round, sends, receives, stream):
        hops.append(sum(message[3] for message in (*sends, *receives)))
        return post(self, round, sends, receives, stream)

    def never(*_):
        raise AssertionError("a hop came to the host")

    _wire._Call.post_on_gpu, _wire._Call.post = counted, never
    gpu_cases()
    assert ranks == 1 or (len(hops) > 30 and all(hops)), hops
    # On the caller's stream, after the work that makes the inputs and before the work that reads
    # the output.
    given = [x.to(device, torch.float32) for x in tensors(4096, dim=64)[:3]]
    expected = ring.shard(encke.attention(*given, causal=True))
    mine = [ring.shard(x) for x in given]
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            late = [torch.zeros_like(x) for x in mine]
            torch.cuda._sleep(20_000_000)
            for x, y in zip(late, mine):
                x.copy_(y)
            out = ring.ring_attention(*late, causal=True, sizes=ring.sizes_of(4096)) + 0
            for x in late:
                x.fill_(float("nan"))
            assert torch.allclose(out, expected, rtol=1e-4, atol=1e-4)
    # Disagreements go through the store.
    q = torch.randn(1, 6, 4, 8, device=device)
    if ranks > 1:
        message = raised(ring.Disagreement, lambda: ring.ring_attention(q, q, q, causal=rank == 0))
        assert "causal" in message, message
    message = raised(ValueError, lambda: ring.ring_attention(q.cpu(), q.cpu(), q.cpu()))
    assert "cpu:gloo,cuda:nccl" in message, message
    assert ring.ring_attention(q, q, q).shape == q.shape
    return f"{len(hops)} hops, {sum(hops)} bytes"


def all_cases(backend="gloo"):
    # These import this file.
    import citizen_cases
    import mask_cases

    start(backend=backend)
    cases = [
        equals_one_process,
        invariant_bits,
        low_precision_and_checkpoints,
        the_same_bits_twice,
        strided_inputs,
        sharding_there_and_back,
        disagreements,
        subgroups,
        under_data_parallel,
        under_fully_sharded,
        through_the_store,
        in_a_graph,
        *mask_cases.CASES,
        *citizen_cases.CASES,
        on_gpus,
    ]
    for case in cases if backend == "gloo" else [over_nccl]:
        begin = time.monotonic()
        message = case()
        if dist.get_rank() == 0:
            print(f"{case.__name__} {time.monotonic() - begin:.1f} s {message or ''}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def start(seconds=60, backend="gloo"):
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))


if __name__ == "__main__":
    words = sys.argv[1:]
    if words in ([], ["nccl"]):
        all_cases(*words)
    else:
        import lost_cases

        lost_cases.main("nccl" if "nccl" in words else "gloo")
