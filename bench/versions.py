#!/usr/bin/env python3
"""Two versions of Encke on the CPU, in turns: does a change cost time?

    cargo build --release -p encke --example bench_worker        # in each version's tree
    python3 bench/versions.py OLD/bench_worker NEW/bench_worker [--threads 1] [--turns 15]

Prints new / old: medians of the ratios of neighbouring turns, with the quartiles beside them, of
processor time and of wall time. Below 1 the new version is faster. Each contestant is a process of
its own, and they begin turns alternately. With several threads, or beside other work, wall time
says little; processor time of one thread says most.
"""

import argparse, json, os, statistics, subprocess, time

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("old", help="the worker of the older version")
parser.add_argument("new", help="the worker of the newer version")
parser.add_argument("--threads", type=int, default=1, help="threads of both (default 1)")
parser.add_argument("--turns", type=int, default=15, help="turns of each row (default 15)")
parser.add_argument("--seconds", type=float, default=0.3, help="least time of a turn")
parser.add_argument("--only", default="", help="only rows whose name contains this")
parser.add_argument("--record", help="also write the rows as JSON lines to this file")
args = parser.parse_args()

# dtype, heads, dim, tokens, causal, segment, dilation, backward.
ROWS = {
    "f32 forward d64 n2048 full": ("f32", 8, 64, 2048, 0, 0, 1, 0),
    "f32 forward d64 n2048 causal": ("f32", 8, 64, 2048, 1, 0, 1, 0),
    "f32 forward d128 n2048 causal": ("f32", 8, 128, 2048, 1, 0, 1, 0),
    "f32 both d64 n2048 full": ("f32", 8, 64, 2048, 0, 0, 1, 1),
    "f32 both d64 n2048 causal": ("f32", 8, 64, 2048, 1, 0, 1, 1),
    "bf16 forward d64 n2048 causal": ("bf16", 8, 64, 2048, 1, 0, 1, 0),
    "bf16 both d64 n2048 causal": ("bf16", 8, 64, 2048, 1, 0, 1, 1),
    "f64 forward d64 n1024 causal": ("f64", 8, 64, 1024, 1, 0, 1, 0),
    "f32 forward dilated r4": ("f32", 2, 64, 65536, 0, 4096, 4, 0),
    "f32 forward dilated r16": ("f32", 2, 64, 131072, 0, 16384, 16, 0),
    "f32 both dilated r4": ("f32", 2, 64, 65536, 0, 4096, 4, 1),
    "f32 forward short n256 causal": ("f32", 8, 64, 256, 1, 0, 1, 0),
}


class Version:
    """One version's worker, in a process of its own."""

    def __init__(self, path):
        environment = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
        self.process = subprocess.Popen(
            [path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.calls = 1

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise SystemExit(f"the worker ended on: {line}")
        return answer

    def processor_time(self):
        """Nanoseconds of all its threads."""
        tasks = f"/proc/{self.process.pid}/task"
        return sum(
            int(open(f"{tasks}/{task}/schedstat").read().split()[0]) for task in os.listdir(tasks)
        )

    def turn(self):
        before = self.processor_time()
        wall = sum(float(self.ask("run")) for _ in range(self.calls))
        return (self.processor_time() - before) / self.calls, wall / self.calls


def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


for name, (dtype, heads, dim, tokens, causal, segment, dilation, backward) in ROWS.items():
    if args.only not in name:
        continue
    versions = [Version(args.old), Version(args.new)]
    for version in versions:
        version.ask(
            f"{dtype} 1 {tokens} {heads} {dim} {causal} {segment} {dilation} 1 {backward}"
        )
        version.turn()
        began = time.perf_counter()
        version.turn()
        version.calls = max(1, round(args.seconds / (time.perf_counter() - began)))
    calls = max(version.calls for version in versions)
    ratios = []
    for turn in range(args.turns):
        order = versions if turn % 2 == 0 else versions[::-1]
        for version in order:
            version.calls = calls
        taken = {version: version.turn() for version in order}
        old, new = (taken[version] for version in versions)
        ratios.append((new[0] / old[0], new[1] / old[1]))
    for version in versions:
        version.process.stdin.close()
        version.process.wait()
    processor, wall = (quartiles(values) for values in zip(*ratios))
    row = dict(name=name, threads=args.threads, turns=args.turns, processor=processor, wall=wall)
    text = "  ".join(f"{what} {q[1]:.3f} ({q[0]:.3f} to {q[2]:.3f})" for what, q in (
        ("processor", processor), ("wall", wall)
    ))
    print(f"{name:32} {text}", flush=True)
    if args.record:
        with open(args.record, "a") as file:
            file.write(json.dumps(row) + "\n")
