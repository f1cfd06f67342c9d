"""Rings over torch.distributed processes on this machine's CPU: Encke's and published ones.

    python bench/python_ring.py                 # two processes; writes a record to bench/record
    python bench/python_ring.py --tokens 8192   # a longer sequence
    taskset -c 0-3 python bench/python_ring.py --repeats 5   # minutes, on four idle cores

A step is one attention of a training step: forward, then backward from a given gradient, of a
sequence of `--tokens` tokens with `--heads` heads of `--dim` channels, not causal (so that
contiguous shards have equal work in every package) and causal (sharded as each package does it).

step        shortest of `--repeats` steps after two that are not counted, each by its slowest rank:
            the shortest, because other load on the machine only makes steps longer
efficiency  T(1 process) / (p x T(p processes)), each process with one thread; 1 is perfect
memory      highest resident memory of a process during the first two steps, less that before them
            (with torch loaded and this rank's inputs made); the largest of all ranks
error       largest difference of out and dq from torch's attention of the whole sequence, relative
            to the largest element; checked before anything is timed

Rivals run as published where they run on a CPU:
- torch: torch.distributed.tensor.experimental.context_parallel around scaled_dot_product_attention.
  It takes CPU tensors and runs, but its ring handles GPU operators only: on the CPU each rank
  attends to its own shard and to no other, without an error. Its rows are marked wrong, and its
  time is that of less work.
- ring-attention-pytorch (PyPI): ring_flash_attn, buckets of 512; causal with its striped form. One
  process is its function without the ring, since gloo does not send to itself.
- ring-flash-attn (PyPI): its kernel is flash-attn, which is for GPUs. Its ring runs as published
  with torch's own flash attention for CPUs as the kernel: this measures its ring, not its kernel.
  One process is that kernel alone. In bf16, since its gradients are wrong in f32 (`.to(float32)`
  of a buffer that it goes on writing to is the buffer itself).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONTENDERS = {
    "encke": ["f32", "bf16"],
    "torch": ["f32"],
    "ring-attention-pytorch": ["f32"],
    "ring-flash-attn": ["bf16"],
}


def contender(name, causal, options):
    """(cut, step): how a sequence [b, n, h, d] is sharded; out and dq of this rank's rows."""
    import torch
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()

    def contiguous(x):
        return x.chunk(ranks, dim=1)[rank]

    def striped(x):
        # Tokens in the order in which that package strides its buckets over the ranks.
        return contiguous(x.unflatten(1, (512, -1)).transpose(1, 2).flatten(1, 2))

    def zigzag(x):
        pieces = x.chunk(2 * ranks, dim=1)
        return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim=1)

    def stepping(attend):
        def step(q, k, v, dout):
            q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
            out = attend(q, k, v)
            out.backward(dout)
            return out.detach(), q.grad

        return step

    if name == "encke":
        import encke.distributed as ring

        cut = dict(sharding="zigzag" if causal else "contiguous")
        sizes = ring.sizes_of(options.tokens, **cut)
        attend = lambda q, k, v: ring.ring_attention(q, k, v, causal=causal, sizes=sizes, **cut)
        return (lambda x: ring.shard(x, **cut)), stepping(attend)
    if name == "torch":
        return (lambda x: x), context_parallel_step(causal)
    if name == "ring-attention-pytorch":
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

        around = ranks > 1
        attend = lambda q, k, v: ring_flash_attn(
            q, k, v, None, causal, 512, around, causal and around, None, ranks
        )
        return (striped if causal and around else contiguous), stepping(attend)
    if ranks == 1:
        return contiguous, stepping(lambda q, k, v: whole_attention(q, k, v, causal))
    stand_in_for_flash_attn()
    if causal:
        from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func as function
    else:
        from ring_flash_attn.ring_flash_attn import ring_flash_attn_func as function
    attend = lambda q, k, v: function(q, k, v, causal=causal)
    return (zigzag if causal else contiguous), stepping(attend)


def whole_attention(q, k, v, causal):
    """torch's attention of [b, n, h, d]."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2)


def context_parallel_step(causal):
    """A step as in the documentation of torch's context parallel: buffers of the whole sequence are
    sharded in place while the context lasts. Returns the whole out and dq."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    attention = torch.nn.functional.scaled_dot_product_attention

    def step(*whole):
        q, k, v, dout = (x.detach().transpose(1, 2).clone() for x in whole)
        buffers = [q, k, v, dout]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            for x in (q, k, v):
                x.requires_grad = True
            out = attention(q, k, v, is_causal=causal)
            out.backward(dout)
            gradient = q.grad
            for x in (q, k, v):
                x.requires_grad = False
        out, gradient = context_parallel_unshard(mesh, [out.detach(), gradient], [2, 2])
        return out.transpose(1, 2), gradient.transpose(1, 2)

    return step


def stand_in_for_flash_attn():
    """flash-attn's two functions on torch's flash attention for CPUs."""
    import torch

    aten = torch.ops.aten

    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=softmax_scale
        )
        return out.transpose(1, 2), lse, None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        rng_state=None,
    ):
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, softmax_lse, 0.0, causal, scale=softmax_scale
        )
        for to, gradient in zip((dq, dk, dv), gradients):
            to.copy_(gradient.transpose(1, 2))

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    for missing in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        setattr(interface, missing, None)
    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = interface
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})
    # The package's own beginning imports adapters for other libraries; its rings do not need them.
    import importlib.util

    found = importlib.util.find_spec("ring_flash_attn")
    bare = types.ModuleType("ring_flash_attn")
    bare.__path__ = list(found.submodule_search_locations)
    sys.modules["ring_flash_attn"] = bare


def resident(field):
    """Kilobytes of this process, as the kernel counts them."""
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def work(options):
    """What each process does; the first prints a line of JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    causal = options.causal
    cut, step = contender(options.worker, causal, options)
    shape = (1, options.tokens, options.heads, options.dim)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]

    def sequence():
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]

    mine = [cut(x).clone() for x in sequence()]
    dist.barrier()
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    for _ in range(2):
        got = step(*mine)
    kilobytes = resident("VmHWM") - before
    expected = reference(sequence(), causal)
    error = max(
        ((a.float() - cut(b)).abs().max() / b.abs().max()).item() for a, b in zip(got, expected)
    )
    del got, expected
    seconds = []
    for _ in range(options.repeats):
        dist.barrier()
        begin = time.perf_counter()
        step(*mine)
        seconds.append(time.perf_counter() - begin)
    said = [None] * dist.get_world_size()
    own = dict(seconds=seconds, error=error, kilobytes=kilobytes)
    dist.all_gather_object(said, own)
    if dist.get_rank() == 0:
        slowest = [max(times) for times in zip(*(one["seconds"] for one in said))]
        line = dict(
            step=min(slowest),
            steps=slowest,
            error=max(one["error"] for one in said),
            kilobytes=max(one["kilobytes"] for one in said),
        )
        print("RESULT " + json.dumps(line), flush=True)
    dist.destroy_process_group()


def reference(whole, causal):
    """out and dq of the whole sequence by torch, in f32."""
    q, k, v = (x.float().requires_grad_() for x in whole[:3])
    out = whole_attention(q, k, v, causal)
    out.backward(whole[3].float())
    return out.detach(), q.grad


def launch(name, dtype, causal, ranks, options):
    """The result of one launch, or the last line of its error."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name]
    for option in ("tokens", "heads", "dim", "repeats"):
        command += [f"--{option}", str(getattr(options, option))]
    command += ["--dtype", dtype] + (["--causal"] if causal else [])
    # As torchrun starts them, less its own start.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    # gloo would look for the machine's name, and without a network waits for the answer.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipes)
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=1200) for process in started]
    for line in said[0][0].splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    words = said[0][1].splitlines()
    errors = [line for line in words if "Error" in line]
    return dict(failed=(errors or words or ["no word"])[-1].split("]: ")[-1].strip())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument(
        "--masks", nargs="*", choices=["full", "causal"], default=["full", "causal"]
    )
    parser.add_argument("--record", default=str(HERE / "record" / "python_ring.json"))
    parser.add_argument("--causal", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="f32", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    import torch

    ranks = options.ranks
    cpu = next(
        (l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), ""
    )
    record = dict(
        command=f"python bench/python_ring.py --tokens {options.tokens} --heads {options.heads} "
        f"--dim {options.dim} --repeats {options.repeats} --ranks {ranks}",
        machine=f"{cpu}, {os.cpu_count()} threads, {platform.system()}; "
        f"torch {torch.__version__}, gloo",
        load_before=os.getloadavg()[0],
        rows=[],
    )
    print(record["machine"])
    head = f"{'':23} {'':5} {'causal':7} {'step, 1':>9} {f'step, {ranks}':>9} {'efficiency':>10} "
    print(head + f"{'memory, 1':>10} {f'memory, {ranks}':>10} {'error':>8}")
    cases = [
        (mask == "causal", name, dtype)
        for mask in options.masks
        for name in options.only
        for dtype in CONTENDERS[name]
    ]
    for causal, name, dtype in cases:
        one, many = (launch(name, dtype, causal, count, options) for count in (1, ranks))
        row = dict(name=name, dtype=dtype, causal=causal, one=one, many=many)
        print(f"{name:23} {dtype:5} {str(causal):7} ", end="")
        failed = many.get("failed") or one.get("failed")
        if failed:
            print(f"does not run here: {failed[:150]}", flush=True)
        else:
            row["efficiency"] = one["step"] / (ranks * many["step"])
            error = max(one["error"], many["error"])
            print(
                f"{one['step'] * 1e3:6.0f} ms {many['step'] * 1e3:6.0f} ms "
                f"{row['efficiency']:10.2f} {one['kilobytes'] / 1024:6.0f} MiB "
                f"{many['kilobytes'] / 1024:6.0f} MiB {error:8.1e}"
                + ("  wrong" if error > 0.05 else ""),
                flush=True,
            )
        record["rows"].append(row)
        # After every row, since the next one may take a while or be interrupted.
        Path(options.record).parent.mkdir(exist_ok=True)
        Path(options.record).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
