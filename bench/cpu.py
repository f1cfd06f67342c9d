#!/usr/bin/env python3
"""Encke beside PyTorch on the CPU, in one run: medians of ratios, taken in turns.

    cargo build --release -p encke --example bench_worker
    python3 bench/cpu.py [--threads 2] [--quick] [--only WORDS] [--worker PATH] [--record FILE]

PyTorch is the rival (pip install torch); without it only Encke's figures are printed. Both get the
same shapes, threads and types. Inputs are random. Encke's output is checked against the f64
reference on a short sequence before anything is timed (tests check the gradients). In its turn each
contestant makes two calls and the second one counts: during the first, threads of the other one may
still spin on the same cores. FLOPs are counted as 4·n²·d·h forward and 10·n²·d·h backward, half of
that when causal, for both. `peak` is the multiply-add rate from registers alone in the same minute,
with vectors (f32) or AMX tiles (bf16, on machines that have them). f32 that is computed on tiles,
as a sum of bf16, can exceed the peak of the vectors.
"""

import argparse, json, os, platform, statistics, subprocess, sys, time

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--threads", type=int, default=2, help="threads of both contestants (default 2)"
)
parser.add_argument("--quick", action="store_true", help="one length, few turns")
parser.add_argument(
    "--long", action="store_true", help="16k tokens in the backward rows too (minutes more)"
)
parser.add_argument(
    "--worker", default="target/release/examples/bench_worker", help="Encke's binary"
)
parser.add_argument("--record", help="also write the rows as JSON lines to this file")
parser.add_argument("--only", default="", help="only rows whose name contains this")
parser.add_argument("--turns", type=int, help="turns of each row")
parser.add_argument("--torch-memory", help=argparse.SUPPRESS)
args = parser.parse_args()

try:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(args.threads)
except ImportError:
    torch = None
    print("PyTorch is not importable (pip install torch): only Encke's figures")


class Worker:
    """Encke's contestant, in a process of its own."""

    def __init__(self):
        environment = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
        self.process = subprocess.Popen(
            [args.worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            sys.exit(f"the worker ended on: {line}")
        return answer

    def run(self, calls=1):
        """Wall seconds of a call, and CPU seconds of all its threads (counted in hundredths)."""
        before = self.cpu()
        wall = sum(float(self.ask("run")) for _ in range(calls))
        return wall / calls, (self.cpu() - before) / calls

    def cpu(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def torch_call(dtype, b, n, h, d, causal, segment, dilation, backward):
    """The rival: SDPA; for dilated patterns gather + SDPA + scatter, as published packages do."""
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(b, n, h, d, generator=generator).to(kind) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(bool(backward))

    def attend(q, k, v):
        swap = lambda x: x.transpose(-3, -2)
        return swap(
            F.scaled_dot_product_attention(swap(q), swap(k), swap(v), is_causal=bool(causal))
        )

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


def resident(which):
    line = next(line for line in open("/proc/self/status") if line.startswith(which))
    return int(line.split()[1])


if args.torch_memory:
    # In a process of its own: the peak of one call over the resident memory before it.
    dtype, *numbers = args.torch_memory.split()
    call = torch_call(dtype, *map(int, numbers))
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    call()
    print(resident("VmHWM") - before)
    sys.exit()

worker = Worker()


def note(row, text):
    print(text, flush=True)
    if args.record:
        with open(args.record, "a") as file:
            file.write(json.dumps(row) + "\n")


def contest(name, dtype, n, d, causal, backward, h=8, segment=0, dilation=1, turns=None):
    if args.only not in name:
        return
    turns = args.turns or turns or (3 if args.quick else 7)
    rows = min(segment or n, n) // dilation
    flops = (
        (14 if backward else 4)
        * rows
        * rows
        * d
        * h
        * (n // min(segment or n, n))
        / (2 if causal else 1)
    )
    worker.ask(f"{dtype} 1 {n} {h} {d} {int(causal)} {segment} {dilation} 1 {int(backward)}")
    rival = torch_call(dtype, 1, n, h, d, causal, segment, dilation, backward) if torch else None
    ours, theirs = [], []
    for _ in range(turns):
        worker.run()
        ours.append(worker.run()[0])
        if rival:
            rival()
            theirs.append(rival())
    peak = float(worker.ask(f"peak {dtype}"))
    row = dict(
        name=name,
        dtype=dtype,
        n=n,
        h=h,
        d=d,
        causal=causal,
        backward=backward,
        segment=segment,
        dilation=dilation,
        gflops=flops / statistics.median(ours) / 1e9,
        seconds=statistics.median(ours),
        best_seconds=min(ours),
        peak=peak,
    )
    ratio = ""
    if rival:
        row["torch_gflops"] = flops / statistics.median(theirs) / 1e9
        row["ratio"] = statistics.median(t / o for t, o in zip(theirs, ours))
        row["best_ratio"] = min(theirs) / min(ours)
        ratio = f"{row['ratio']:6.2f} x torch ({row['torch_gflops']:7.1f}), "
        ratio += f"fastest against fastest {row['best_ratio']:5.2f}"
    share = f"{row['gflops'] / peak:5.2f} of peak {peak:6.1f}"
    note(row, f"{name:40} {row['gflops']:8.1f} GFLOP/s {ratio} {share}")
    return row


def ring(ranks):
    """The cost of a ring of threads: its CPU time against that of one rank, in turns."""
    name = f"ring of {ranks}, f32 d64 n16384 causal zigzag"
    if args.only not in name:
        return
    alone, many = Worker(), Worker()
    for one, of in ((alone, 1), (many, ranks)):
        one.ask(f"f32 1 16384 2 64 1 0 1 {of} 0")
    pairs = []
    for _ in range(args.turns or 5):
        alone.run()
        one = alone.run(calls=5)
        many.run()
        pairs.append((one, many.run(calls=5)))
    cpu = statistics.median(m[1] / o[1] for o, m in pairs)
    wall = statistics.median(m[0] / o[0] for o, m in pairs)
    alone.end(), many.end()
    note(
        dict(name=name, ranks=ranks, cpu_ratio=cpu, wall_ratio=wall),
        f"{name:40} {cpu:8.3f} x the CPU time of one rank, {wall:.3f} x by the wall",
    )


def memory(name, dtype, n, h, d, segment=0, dilation=1, backward=0):
    """The memory of a first call beyond its inputs, each contestant in a new process."""
    if args.only not in name:
        return
    fresh = Worker()
    fresh.ask(f"{dtype} 1 {n} {h} {d} 0 {segment} {dilation} 1 {backward}")
    fresh.ask("forget")
    before = int(fresh.ask("resident"))
    fresh.run()
    ours = (int(fresh.ask("memory")) - before) / 1024
    fresh.end()
    outputs = n * h * d * {"f32": 4, "bf16": 2}[dtype] * (4 if backward else 1) / 2**20
    row = dict(name=name, ours_mib=ours, outputs_mib=outputs)
    rival = ""
    if torch:
        spec = f"{dtype} 1 {n} {h} {d} 0 {segment} {dilation} {backward}"
        command = [sys.executable, __file__, "--threads", str(args.threads), "--torch-memory", spec]
        row["torch_mib"] = (
            int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024
        )
        rival = f", torch {row['torch_mib']:8.1f} MiB"
    note(
        row, f"{name:40} {ours:8.1f} MiB beyond the inputs{rival}; outputs alone {outputs:8.1f} MiB"
    )


model = next(
    (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
    "?",
)
version = torch.__version__ if torch else "absent"
print(
    f"{model}, {args.threads} threads, {platform.platform()}, torch {version}, "
    f"ENCKE_CPU={os.environ.get('ENCKE_CPU', 'best')}"
)
lengths = [4096] if args.quick else [1024, 4096, 16384]
for dtype in ("f32", "bf16"):
    for backward in (False, True):
        for d in (64, 128):
            for n in lengths if args.long or not backward else [n for n in lengths if n <= 4096]:
                for causal in (False, True):
                    heads = 2 if n > 8192 else 8
                    passes, mask = "both" if backward else "forward", "causal" if causal else "full"
                    name = f"{dtype} {passes} d{d} n{n} {mask}"
                    contest(
                        name, dtype, n, d, causal, backward, h=heads, turns=3 if n > 8192 else None
                    )
# Equal work, whatever the dilation. On the same tensors: segments of 1024·r² tokens are r² times
# fewer, and each has r times as many rows. And on a sequence r times as long: sixteen segments of
# 2048 rows, but an output, mostly zeros, that is r times as large.
for dtype in ("f32", "bf16"):
    for backward in (False, True):
        passes = "both" if backward else "forward"
        for dilation in (1, 4, 16):
            contest(
                f"{dtype} {passes} dilated r{dilation} same tensors",
                dtype,
                262144,
                64,
                False,
                backward,
                h=2,
                segment=1024 * dilation**2,
                dilation=dilation,
                turns=3,
            )
        for dilation in (1, 4, 16):
            contest(
                f"{dtype} {passes} dilated r{dilation} longer sequence",
                dtype,
                32768 * dilation,
                64,
                False,
                backward,
                h=2,
                segment=2048 * dilation,
                dilation=dilation,
                turns=5,
            )
for ranks in (2, 4, 8):
    ring(ranks)
for n in (4096, 16384, 65536):
    memory(f"memory of f32 forward d64 n{n}", "f32", n, 2, 64, segment=2048)
memory("memory of bf16 forward d64 n16384", "bf16", 16384, 2, 64)
memory("memory of f32 both d64 n16384", "f32", 16384, 2, 64, segment=2048, backward=1)
memory("memory of f32 dilated r16 n524288", "f32", 524288, 2, 64, segment=32768, dilation=16)
worker.end()
