#!/usr/bin/env python3
"""Encke beside cuDNN and FlashAttention-2 on one GPU, in one run: medians of ratios, in turns.

    cargo build --release -p encke --example gpu_worker
    python3 bench/gpu_device.py [--quick] [--only WORDS ...] [--worker PATH] [--record FILE]

The rivals run through PyTorch (pip install torch), with cuDNN or FlashAttention-2 selected. All get
the same shapes and types. Inputs are random, never zeros. Encke's answers are checked against the
f64 reference on a short sequence before anything is timed. Contestants take turns, several calls
each, timed by events on the GPU, so that a warm or slow card affects all of them. FLOPs are counted
as 4·n²·d·h forward and 10·n²·d·h backward, half of that when causal, for all. A backward call of
Encke starts from out and lse and ends with gradients in f32, a rival's ends in its own type.
"""

import argparse, json, statistics, subprocess, sys

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--quick", action="store_true", help="16k tokens only")
parser.add_argument("--worker", default="target/release/examples/gpu_worker", help="Encke's binary")
parser.add_argument("--record", help="also write the rows as JSON lines to this file")
parser.add_argument(
    "--only",
    nargs="+",
    default=[""],
    metavar="WORDS",
    help="only rows whose name contains one of these",
)
parser.add_argument("--turns", type=int, default=9, help="turns of each row")
parser.add_argument(
    "--kernels", default="auto", help="Encke's kernel family: auto, hopper, mma or plain"
)
args = parser.parse_args()

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

RIVALS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}


class Worker:
    """Encke's contestant, in a process of its own."""

    def __init__(self):
        self.process = subprocess.Popen(
            [args.worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip() or sys.exit(f"the worker ended on: {line}")

    def prepare(
        self,
        n,
        h,
        d,
        causal,
        segment=0,
        dilation=1,
        ranks=1,
        backward=0,
        summation="fast",
        hops="pointer",
        kv=None,
        width=1,
    ):
        line = f"bf16 {n} {h} {kv or h} {d} {int(causal)} {segment} {dilation} {ranks} "
        line += f"{int(backward)} {args.kernels} {summation} {hops} {width}"
        answer = self.ask(line)
        return None if answer == "ready" else answer

    def run(self, repeats):
        call, self.host = map(float, self.ask(f"run {repeats}").split())
        return call


worker = Worker()


def timed(call, repeats):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def attention(backend, q, k, v, causal):
    with sdpa_kernel(backend):
        swap = lambda x: x.transpose(-3, -2)
        return swap(F.scaled_dot_product_attention(swap(q), swap(k), swap(v), is_causal=causal))


def rival(backend, n, h, d, causal, backward):
    q, k, v, dout = (torch.randn(1, n, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    if not backward:
        return lambda: attention(backend, q, k, v, causal)
    for x in (q, k, v):
        x.requires_grad_(True)
    out = attention(backend, q, k, v, causal)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def dilated_rival(kind, n, h, d, segment, dilation):
    """Every r-th token of each segment: through strided views, or gathered as packages do."""
    q, k, v = (torch.randn(1, n, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cut = lambda x: x.view(n // segment, segment, h, d)[:, ::dilation]
    if kind == "views":
        return lambda: attention(SDPBackend.CUDNN_ATTENTION, cut(q), cut(k), cut(v), False)

    def call():
        part = attention(
            SDPBackend.CUDNN_ATTENTION,
            cut(q).contiguous(),
            cut(k).contiguous(),
            cut(v).contiguous(),
            False,
        )
        out = torch.zeros_like(q).view(n // segment, segment, h, d)
        out[:, ::dilation] = part
        return out

    return call


def wanted(name):
    return any(words in name for words in args.only)


def note(row, text):
    print(text, flush=True)
    if args.record:
        with open(args.record, "a") as file:
            file.write(json.dumps(row) + "\n")


def turns(calls, flops, work=6e12):
    """Milliseconds a call of each contestant, in turns of about `work` FLOPs."""
    repeats = max(3, min(40, int(work / flops)))
    for call in calls.values():
        call(2)
    times = {name: [] for name in calls}
    for _ in range(args.turns):
        for name, call in calls.items():
            times[name].append(call(repeats))
    return times


def contest(name, flops, calls, work=6e12):
    times = turns(calls, flops, work)
    speed = {who: flops / statistics.median(t) / 1e9 for who, t in times.items()}
    row = dict(name=name, tflops=speed, turns=args.turns, host_us=1000 * worker.host)
    text = f"{name:44} ours {speed['ours']:6.1f} TFLOP/s"
    for who in times:
        if who != "ours":
            row[f"ratio_{who}"] = statistics.median(
                t / o for t, o in zip(times[who], times["ours"])
            )
            text += f" | {row[f'ratio_{who}']:5.2f} x {who} ({speed[who]:6.1f})"
    text += f" | host {row['host_us']:.0f} us a call"
    note(row, text)


def dense(n, d, causal, backward, summation="fast"):
    h = 2048 // d
    passes = f"backward {summation}" if backward else "forward"
    name = f"{passes} d{d} n{n} {'causal' if causal else 'full'}"
    if not wanted(name):
        return
    failed = worker.prepare(n, h, d, causal, backward=backward, summation=summation)
    if failed:
        return note(dict(name=name, error=failed), f"{name:44} {failed}")
    calls = {"ours": worker.run}
    for who, backend in RIVALS.items():
        call = rival(backend, n, h, d, causal, backward)
        calls[who] = lambda repeats, call=call: timed(call, repeats)
    contest(name, (10 if backward else 4) * n * n * 2048 / (2 if causal else 1), calls)


def dilated(d, dilation):
    keys, h, n = 2048, 2048 // d, 262144
    name = f"dilated d{d} r{dilation}, {keys} keys a segment, n{n}"
    if not wanted(name):
        return
    segment = keys * dilation
    failed = worker.prepare(n, h, d, False, segment=segment, dilation=dilation)
    if failed:
        return note(dict(name=name, error=failed), f"{name:44} {failed}")
    calls = {"ours": worker.run}
    for kind in ("views", "gather"):
        call = dilated_rival(kind, n, h, d, segment, dilation)
        calls[f"cuDNN on {kind}" if kind == "views" else "gather + cuDNN"] = (
            lambda repeats, call=call: timed(call, repeats)
        )
    contest(name, 4 * keys * keys * 2048 * (n // segment), calls)


def ring(ranks, hops, kv=16, width=1, h=16):
    """A ring on one GPU against one fused call, both ten times in a row, like layers of a model.
    All ranks share one link to the host."""
    n, d = 65536, 128
    how = (
        (f", {kv} key heads" if kv != h else "")
        + (f" of {h}" if h != 16 else "")
        + (f", {width} parcels a round" if width > 1 else "")
    )
    name = f"ring of {ranks}, {hops} hops{how}, d{d} n{n} causal zigzag"
    if not wanted(name):
        return
    flops = 2 * n * n * d * h
    alone = Worker()
    failed = alone.prepare(n, h, d, True, kv=kv) or worker.prepare(
        n, h, d, True, ranks=ranks, hops=hops, kv=kv, width=width
    )
    if failed:
        return note(dict(name=name, error=failed), f"{name:44} {failed}")
    contest(name, flops, {"ours": worker.run, "one fused call": alone.run}, work=180e12)
    alone.process.stdin.close()


card = torch.cuda.get_device_name(0)
print(
    f"{card}, CUDA {torch.version.cuda}, torch {torch.__version__}, "
    f"cuDNN {torch.backends.cudnn.version()}; {args.turns} turns"
)
lengths = [16384] if args.quick else [16384, 4096, 65536, 2048]
for n in lengths:
    for d in (64, 128):
        for causal in (False, True):
            dense(n, d, causal, False)
            for summation in ("fast", "deterministic") if n >= 4096 else ():
                dense(n, d, causal, True, summation)
    if n == 16384:
        for d in (64, 128):
            for dilation in (1, 4, 16):
                dilated(d, dilation)
        for hops in ("pointer", "pinned"):
            for ranks in (2, 4, 8, 16):
                ring(ranks, hops)
            for kv in (2, 4):
                ring(8, hops, kv=kv)
        ring(8, "pinned", kv=8, h=64)
        for ranks, width in ((4, 3), (8, 2), (8, 4), (8, 7), (16, 4), (16, 15)):
            ring(ranks, "pointer", width=width)
        for width in (2, 4):
            for kv in (2, 4):
                ring(8, "pinned", kv=kv, width=width)
            ring(8, "pinned", kv=8, h=64, width=width)
