"""What every process of a launch does: the cases of test_distributed.py. Not a test by itself.

One launch runs all cases, because importing torch takes longer than they do. Every rank makes the whole
sequence from the same seed, computes all of it by itself, and compares its rows with its part of the ring.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

import encke
import encke.distributed as ring
from encke import _wire

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
    """The same on the ring: this rank's rows."""
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
DETACHED = dict(MIX, mixing_gradient="detached", offsets="head-block")


def uneven(tokens, ranks):
    """Sizes with one rank that has nothing and one that has most."""
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
                    # Asking the others and knowing beforehand take turns.
                    got = together(*given, cut, sizes if count % 2 else None, **options)
                    compare(got, expected, cut, 1e-12, (tokens, options, cut))
                    count += 1
    return count


def narrow_types_and_choices():
    cut = dict(sharding="zigzag")
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)):
        given = tensors(50, dtype=dtype)
        got = together(*given, cut, None, causal=True, **GROUP)
        assert got[0].dtype == dtype and got[1].dtype == torch.float32
        compare(got, alone(*given, causal=True, **GROUP), cut, tolerance, dtype)
    given = tensors(50)
    for choice in (dict(checkpoint="recompute"), dict(scale=0.7), dict(group_scale="groups")):
        options = dict(GROUP, **choice)
        compare(together(*given, cut, None, **options), alone(*given, **options), cut, 1e-12, choice)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = (ring.shard(x, **cut) for x in tensors(50, dtype=torch.float32)[:3])
        assert ring.ring_attention(q, k, v, sharding="zigzag").dtype == torch.bfloat16


def the_same_bits_twice():
    given = tensors(60, dtype=torch.float32)
    first, second = (together(*given, dict(), None, causal=True, **MIX) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def strided_inputs():
    """q, k and v as slices of one projection, as models have them."""
    qkv = ring.shard(torch.randn(2, 30, 3, 4, 8, generator=torch.Generator().manual_seed(1)))
    q, k, v = qkv.unbind(2)
    out = ring.ring_attention(q, k, v, causal=True)
    packed = ring.ring_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(out, packed)


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
        said = raised(ring.Disagreement, lambda: ring.ring_attention(q, q, q, **options))
        assert word in said and "rank 0" in said and f"rank {ranks - 1}" in said, said
        every = [None] * ranks
        dist.all_gather_object(every, said)
        assert every == [said] * ranks, every
    said = raised(ring.Disagreement, lambda: ring.ring_attention(q, q, q, sizes=[7] * ranks))
    assert "[7" in said and "[6" in said, said
    wide = torch.randn(1, 6, 4, 9) if last else q
    assert "shapes" in raised(ring.Disagreement, lambda: ring.ring_attention(wide, wide, wide))
    # One rank that cannot take part is told what is wrong, the others who it was.
    bad = q[..., 0] if last else q
    said = raised(ValueError, lambda: ring.ring_attention(bad, bad, bad))
    assert ("shape [1, 6, 4]" in said) and (last or f"rank {ranks - 1}" in said), said
    # What nobody can have, nobody gets.
    wrong = dict(segment_lengths=[2] * 5, dilation_rates=[1] * 5)
    said = raised(ValueError, lambda: ring.ring_attention(q, q, q, **wrong))
    assert "5 branches but only 4 heads" in said, said
    said = raised(ValueError, lambda: ring.ring_attention(q, q, q, mode="fkodom", **GROUP))
    assert "fkodom" in said, said
    # Nothing of it has harmed the group.
    assert ring.ring_attention(q, q, q).shape == q.shape


def subgroups():
    """A ring over some of the processes, with numbers of its own."""
    ranks = dist.get_world_size()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    if dist.get_rank() in members:
        q = tensors(20)[0]
        local = ring.shard(q, group=group)
        out = ring.unshard(ring.ring_attention(local, local, local, group=group), group=group)
        assert torch.allclose(out, encke.attention(q, q, q), atol=1e-12)
    else:
        assert "no member" in raised(ValueError, lambda: ring.unshard(torch.zeros(1, 1), group=group))


class Model(torch.nn.Module):
    """A layer over shards: attention on the ring, everything else on rows."""

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
    """A sequence over all processes, with parameters kept by torch's own wrappers: the gradients of one
    process that has all of it."""
    ranks, tokens = dist.get_world_size(), 41
    x = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.manual_seed(5)
    one = Model()
    one(x).square().sum().backward()
    torch.manual_seed(5)
    many = Model(ring.RingDilatedAttention(**GROUP, sharding="striped"))
    many.load_state_dict(one.state_dict())
    many, full = wrap(many)
    # Wrappers average over ranks, and this loss is a sum over them.
    (many(ring.shard(x, sharding="striped")).square().sum() * ranks).backward()
    expected = {name: parameter.grad for name, parameter in one.named_parameters()}
    for name, parameter in many.named_parameters():
        gradient = full(parameter.grad)
        name = name.removeprefix("module.")
        assert torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-9), name


def under_data_parallel():
    gradients_of_one_model(lambda model: (torch.nn.parallel.DistributedDataParallel(model), lambda x: x))


def under_fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(model, mesh=mesh), lambda gradient: gradient.full_tensor()

    gradients_of_one_model(wrap)


def on_gpus():
    """Processes with a GPU each, or sharing one; hops go through the host."""
    if not torch.cuda.is_available():
        return "skipped: torch sees no GPU"
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for options in (DENSE, GROUP, MIX):
            options = dict(options, causal=dtype != torch.float32)
            given = tensors(148, dim=32, dtype=dtype)
            expected = alone(*given, **options)
            for cut in (dict(), dict(sharding="zigzag"), dict(sharding="striped")):
                got = together(*(x.to(device) for x in given), cut, None, **options)
                assert all(x.device == device for x in got)
                got = [x.cpu() for x in got]
                compare(got, expected, cut, tolerance, (dtype, options, cut))
    # What the host combines, and ranks without rows, are refused on all ranks.
    q = torch.randn(1, 6, 4, 8, device=device)
    for refused in (DETACHED, dict(checkpoint="recompute")):
        assert "on GPUs" in raised(ValueError, lambda: ring.ring_attention(q, q, q, **refused))
    return None


def all_cases():
    start()
    cases = [
        equals_one_process,
        narrow_types_and_choices,
        the_same_bits_twice,
        strided_inputs,
        sharding_there_and_back,
        disagreements,
        subgroups,
        under_data_parallel,
        under_fully_sharded,
        on_gpus,
    ]
    for case in cases:
        begin = time.monotonic()
        said = case()
        if dist.get_rank() == 0:
            print(f"{case.__name__} {time.monotonic() - begin:.1f} s {said or ''}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def start(seconds=60):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))


def failure(how, victim, seconds):
    """One rank dies, stops, or fails in the middle of the second call; the others say who it was."""
    start(seconds)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q = torch.randn(1, 4000, 2, 16, requires_grad=True)
    ring.ring_attention(q, q, q)
    post = _wire._Call.post

    def fail(self, round, sends, receives):
        if round == 1:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise MemoryError("no memory for it")
        return post(self, round, sends, receives)

    if rank == victim:
        _wire._Call.post = fail
    begin = time.monotonic()
    try:
        for _ in range(3):
            ring.ring_attention(q, q, q).sum().backward()
    except encke.RingError as error:
        assert rank != victim and error.rank == victim, error
        took = time.monotonic() - begin
        assert "make a new one" not in str(error), error
        print(f"rank {rank} of {ranks} after {took:.1f} s: {error}", flush=True)
        assert took < seconds + 3, took
        again = raised(encke.RingError, lambda: ring.ring_attention(q, q, q))
        assert f"rank {victim}" in again and "make a new one" in again, again
    except MemoryError:
        assert rank == victim
        print(f"rank {rank} of {ranks} failed by itself", flush=True)
    else:
        raise AssertionError(f"rank {rank} noticed nothing")
    # Nobody leaves before all have seen it: a process that ends closes its connections too.
    time.sleep(1)
    os._exit(0)


def lost(how, victim, seconds, ranks=4):
    """Processes without a launcher that would end the others when one has died. They are forked, because
    torch is imported here already, and nothing else of it has been used."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    processes, words = [], []
    for rank in range(ranks):
        words.append(tempfile.TemporaryFile("w+"))
        processes.append(os.fork())
        if processes[-1] == 0:
            os.dup2(words[-1].fileno(), 1)
            os.dup2(words[-1].fileno(), 2)
            os.environ["RANK"] = str(rank)
            try:
                failure(how, victim, seconds)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
    begin = time.monotonic()
    for rank, process in enumerate(processes):
        if rank == victim and how == "stop":
            continue
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        words[rank].seek(0)
        said = words[rank].read()
        assert code == (-signal.SIGKILL if (rank, how) == (victim, "die") else 0), said
        assert rank == victim or f"rank {victim} failed" in said, said
        print(said, end="")
    if how == "stop":
        os.kill(processes[victim], signal.SIGKILL)
        os.waitpid(processes[victim], 0)
    print(f"{how} {victim}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        all_cases()
    else:
        # The second one keeps the processes' store, so that it takes with it what the others would ask.
        for how, victim, seconds in [("die", 2, 60), ("die", 0, 60), ("stop", 1, 8), ("fail", 3, 60)]:
            lost(how, victim, seconds)
