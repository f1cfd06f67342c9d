#!/usr/bin/env python3
"""Encke beside PyTorch on the CPU, in one run: medians of ratios, taken in turns.

    cargo build --release -p encke --example bench_worker
    python3 bench/cpu.py [--threads 2] [--quick] [--worker PATH] [--record FILE]

PyTorch is the rival (pip install torch); without it our own figures are printed alone. Both get the
same shapes, threads and number types; inputs are random, answers are checked before anything is
timed (our output against the f64 reference, on a short sequence; gradients are left to the tests). FLOPs are counted as 4·n²·d·h forward
and 10·n²·d·h backward, half of that when causal, for both alike. `peak` is what registers alone can
multiply and add in the same minute (f32 vectors): it is the ceiling of the f32 rows.
"""
import argparse, json, os, platform, statistics, subprocess, sys, time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--threads", type=int, default=2, help="threads of both contestants (default 2)")
parser.add_argument("--quick", action="store_true", help="one length, few turns")
parser.add_argument("--long", action="store_true", help="16k tokens in the backward rows too (minutes more)")
parser.add_argument("--worker", default="target/release/examples/bench_worker", help="our binary")
parser.add_argument("--record", help="also write the rows as JSON lines to this file")
parser.add_argument("--only", default="", help="only rows whose name contains this")
args = parser.parse_args()

try:
    import torch
    import torch.nn.functional as F
    torch.set_num_threads(args.threads)
except ImportError:
    torch = None
    print("PyTorch is not importable (pip install torch): our own figures alone")

environment = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
worker = subprocess.Popen([args.worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(line):
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline().strip()
    if not answer:
        sys.exit(f"the worker ended on: {line}")
    return answer


def torch_call(dtype, b, n, h, d, causal, segment, dilation, backward):
    """The rival: SDPA, or for dilated patterns gather + SDPA + scatter as the published packages do."""
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(b, n, h, d, generator=generator).to(kind) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(backward)

    def attend(q, k, v):
        swap = lambda x: x.transpose(-3, -2)
        return swap(F.scaled_dot_product_attention(swap(q), swap(k), swap(v), is_causal=causal))

    def forward():
        if not segment:
            return attend(q, k, v)
        w = min(segment, n)
        cut = lambda x: x.view(b, n // w, w, h, d)[:, :, ::dilation].reshape(b * (n // w), -1, h, d)
        part = attend(cut(q), cut(k), cut(v))
        out = torch.zeros_like(q).view(b, n // w, w, h, d)
        out[:, :, ::dilation] = part.view(b, n // w, -1, h, d)
        return out.view(b, n, h, d)

    def call():
        begin = time.perf_counter()
        out = forward()
        if backward:
            for x in (q, k, v):
                x.grad = None
            out.backward(dout)
        return time.perf_counter() - begin
    return call


def contest(name, dtype, n, d, causal, backward, h=8, segment=0, dilation=1, ranks=1, turns=None):
    if args.only not in name:
        return
    turns = turns or (3 if args.quick else 7)
    rows = min(segment or n, n) // dilation
    flops = (14 if backward else 4) * rows * rows * d * h * (n // min(segment or n, n)) / (2 if causal else 1)
    ask(f"{dtype} 1 {n} {h} {d} {int(causal)} {segment} {dilation} {ranks} {int(backward)}")
    ours, theirs = [], []
    rival = torch_call(dtype, 1, n, h, d, causal, segment, dilation, backward) if torch and ranks == 1 else None
    ask("run")
    if rival:
        rival()
    for _ in range(turns):
        # Each takes two calls and the second one counts: threads of the other one may still be
        # spinning during the first, on the same cores, and its data are in the caches.
        ask("run")
        ours.append(float(ask("run")))
        if rival:
            rival()
            theirs.append(rival())
    peak = float(ask("peak"))
    row = dict(name=name, dtype=dtype, n=n, h=h, d=d, causal=causal, backward=backward, segment=segment, dilation=dilation,
               ranks=ranks, gflops=flops / statistics.median(ours) / 1e9, seconds=statistics.median(ours), peak=peak)
    if rival:
        row["torch_gflops"] = flops / statistics.median(theirs) / 1e9
        row["ratio"] = statistics.median(t / o for t, o in zip(theirs, ours))
    ratio = f"{row['ratio']:6.2f} x torch ({row['torch_gflops']:7.1f})" if rival else ""
    share = f"{row['gflops'] / peak:5.2f} of peak {peak:6.1f}" if dtype == "f32" else ""
    print(f"{name:44} {row['gflops']:8.1f} GFLOP/s {ratio} {share}", flush=True)
    if args.record:
        with open(args.record, "a") as file:
            file.write(json.dumps(row) + "\n")
    return row


model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
print(f"{model}, {args.threads} threads, {platform.platform()}, torch {torch.__version__ if torch else 'absent'}, "
      f"ENCKE_CPU={os.environ.get('ENCKE_CPU', 'best')}")
lengths = [4096] if args.quick else [1024, 4096, 16384]
for dtype in ("f32", "bf16"):
    for backward in (False, True):
        for d in (64, 128):
            for n in lengths if args.long or not backward else [n for n in lengths if n <= 4096]:
                for causal in (False, True):
                    heads = 2 if n > 8192 else 8
                    name = f"{dtype} {'both' if backward else 'forward'} d{d} n{n} {'causal' if causal else 'full'}"
                    contest(name, dtype, n, d, causal, backward, h=heads, turns=3 if n > 8192 else None)
for dtype in ("f32", "bf16"):
    for dilation in (1, 4, 16):
        contest(f"{dtype} dilated r{dilation} 2048 rows a segment", dtype, 32768, 64, False, False, h=2,
                segment=2048 * dilation, dilation=dilation)
alone = None
for ranks in (1, 2, 4, 8):
    row = contest(f"ring of {ranks}, f32 d64 n16384 causal zigzag", "f32", 16384, 64, True, False, h=2, ranks=ranks, turns=3)
    if row and ranks == 1:
        alone = row
    elif row and alone:
        print(f"{'':44} {row['seconds'] / alone['seconds']:8.3f} x the time of one rank")
print(f"largest resident size of ours: {int(ask('memory')) / 1024:.0f} MiB")
