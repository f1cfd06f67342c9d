#!/usr/bin/env python3
"""What users of a GPU get: `encke.attention` on torch tensors, beside cuDNN and FlashAttention-4.

    pip install encke torch flash-attn-4
    python3 bench/gpu.py [--quick] [--only WORDS ...] [--turns 7] [--power] [--record FILE]

Every contestant gets the same bf16 tensors and returns tensors of that type, in one process,
through its Python call; torch's autograd runs the backward passes. Contestants take turns of some
calls, timed by events on the GPU: conversions, zero-fills and gaps between launches are included.
Ratios are medians over turns, above 1 where Encke is faster. FLOPs are counted as 4·n²·d·h forward
and 10·n²·d·h backward, half of that when causal, for all. Before anything is timed, the answers of
all are checked against attention in f64 on a short sequence. `--power` adds clock and power while
each contestant runs for a second.

Rows called "host" are the time of the calling thread for one call of a short sequence, in
microseconds: below some thousand tokens that is what a model waits for.

`bench/gpu_device.py` times rings and dilated patterns through Rust, on memory of the GPU.
"""

import argparse, json, statistics, subprocess, time

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--quick", action="store_true", help="16k tokens, d 64 and 128 only")
parser.add_argument("--turns", type=int, default=7, help="turns of each row (default 7)")
parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="only these rows")
parser.add_argument("--power", action="store_true", help="also measure clock and power")
parser.add_argument("--record", help="also write the rows as JSON lines to this file")
args = parser.parse_args()

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import encke

try:
    from flash_attn.cute import flash_attn_func
except ImportError:
    flash_attn_func = None

K = 1024
# batch, tokens, heads, key heads, dim, causal
QUICK = [(1, 16 * K, 2048 // d, 2048 // d, d, c) for d in (128, 64) for c in (True, False)]
MORE = [
    (1, 16 * K, 64, 8, 128, True),
    (1, 16 * K, 8, 8, 256, True),
    (1, 16 * K, 16, 16, 96, True),
    (1, 16 * K, 16, 16, 48, True),
    (4, 4 * K, 16, 16, 128, True),
    (8, 2 * K, 16, 16, 128, True),
]
SHORT = [(1, 512, 16, 16, 128, True), (1, 2 * K, 16, 16, 128, True)]


def cudnn(q, k, v, causal, _deterministic):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def flash(q, k, v, causal, deterministic):
    return flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)[0]


def ours(q, k, v, causal, deterministic):
    return encke.attention(q, k, v, causal=causal, deterministic=deterministic)


CONTESTANTS = {"Encke": ours, "cuDNN": cudnn}
if flash_attn_func is not None:
    CONTESTANTS["FlashAttention-4"] = flash


def tensors(batch, tokens, heads, key_heads, dim):
    torch.manual_seed(0)
    shapes = [(batch, tokens, h, dim) for h in (heads, key_heads, key_heads, heads)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    return [x.requires_grad_() for x in (q, k, v)], dout


def passes(attend, causal, deterministic, inputs, dout):
    """The calls to be timed: forward, backward alone, and both."""
    out = attend(*inputs, causal, deterministic)

    def forward():
        with torch.no_grad():
            attend(*inputs, causal, deterministic)

    def backward():
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def both():
        return torch.autograd.grad(attend(*inputs, causal, deterministic), inputs, dout)

    return {"forward": forward, "backward": backward, "both": both}


def check():
    """Stops if a contestant is wrong: outputs and gradients against attention in f64."""
    for dim, causal in ((64, False), (128, True)):
        inputs, dout = tensors(1, 700, 4, 2, dim)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        q, k, v = (x.transpose(1, 2) for x in exact)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        right = torch.autograd.grad(out.transpose(1, 2), exact, dout.double())
        for name, attend in CONTESTANTS.items():
            found = torch.autograd.grad(attend(*inputs, causal, False), inputs, dout)
            for which, mine, theirs in zip("qkv", found, right):
                error = ((mine.double() - theirs).norm() / theirs.norm()).item()
                if not error < 0.01:
                    raise SystemExit(f"{name}: d{which} is off by {error:.2g} at d {dim}")


def milliseconds(call, calls):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def host_microseconds(call, calls=50):
    """Time of the calling thread; the GPU is idle before and after."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / calls


def power(call, milliseconds_a_call):
    """Clock in MHz and power in W after half a second of calls."""
    for _ in range(int(1200 / milliseconds_a_call)):
        call()
    time.sleep(0.5)
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]
    torch.cuda.synchronize()
    return [float(x) for x in said.split(",")]


def note(row, text):
    print(text, flush=True)
    if args.record:
        with open(args.record, "a") as file:
            file.write(json.dumps(row) + "\n")


def wanted(name):
    return any(words in name for words in args.only)


def in_turns(calls, measure):
    """The measurements of each contestant, in turns; those that refuse the shape are left out."""
    for name in list(calls):
        try:
            measure(calls[name])
        except Exception as error:
            print(f"    {name}: {str(error).splitlines()[0][:120]}", flush=True)
            del calls[name]
    found = {name: [] for name in calls}
    for _ in range(args.turns):
        for name, call in calls.items():
            found[name].append(measure(call))
    return found


def ratios(found):
    pairs = {who: zip(times, found["Encke"]) for who, times in found.items() if who != "Encke"}
    return {who: statistics.median(t / o for t, o in both) for who, both in pairs.items()}


def contest(name, flops, calls):
    if not wanted(name):
        return
    repeats = max(3, min(40, int(4e12 / flops)))
    found = in_turns(calls, lambda call: milliseconds(call, repeats))
    middle = {who: statistics.median(times) for who, times in found.items()}
    speed = {who: flops / ms / 1e9 for who, ms in middle.items()}
    row = dict(name=name, milliseconds=middle, tflops=speed, ratios=ratios(found), turns=args.turns)
    if args.power:
        row["mhz_watts"] = {who: power(call, middle[who]) for who, call in calls.items()}
    text = f"{name:52} Encke {speed['Encke']:6.1f} TFLOP/s"
    for who, ratio in row["ratios"].items():
        text += f" | {ratio:5.2f} x {who} ({speed[who]:6.1f})"
    for who, (clock, watts) in row.get("mhz_watts", {}).items():
        text += f" | {who} {clock:.0f} MHz {watts:.0f} W"
    note(row, text)


def title(batch, tokens, heads, key_heads, dim, causal):
    shared = f":{key_heads}" if key_heads != heads else ""
    size = f"{batch} x {tokens // K}k" if batch > 1 else f"{tokens // K}k"
    return f"{size} d{dim} {heads}{shared} heads {'causal' if causal else 'full'}"


def measure(shape):
    batch, tokens, heads, key_heads, dim, causal = shape
    flops = 4 * batch * tokens * tokens * heads * dim / (2 if causal else 1)
    inputs, dout = tensors(*shape[:5])
    for deterministic in (False, True):
        every = {}
        for who, attend in CONTESTANTS.items():
            try:
                every[who] = passes(attend, causal, deterministic, inputs, dout)
            except Exception as error:
                print(f"    {who}: {str(error).splitlines()[0][:120]}", flush=True)
        which = {"backward": 2.5} if deterministic else {"forward": 1, "backward": 2.5, "both": 3.5}
        for part, work in which.items():
            name = f"{part} {title(*shape)}" + (", fixed order" if deterministic else "")
            contest(name, work * flops, {who: every[who][part] for who in every})


def measure_host(shape):
    inputs, dout = tensors(*shape[:5])
    every = {who: passes(f, shape[5], False, inputs, dout) for who, f in CONTESTANTS.items()}
    for part in ("forward", "both"):
        name = f"host {part} {shape[1]} tokens d{shape[4]}"
        if not wanted(name):
            continue
        found = in_turns({who: every[who][part] for who in every}, host_microseconds)
        middle = {who: statistics.median(times) for who, times in found.items()}
        row = dict(name=name, host_us=middle, ratios=ratios(found), turns=args.turns)
        text = " | ".join(f"{who} {us:.0f} us" for who, us in middle.items())
        note(row, f"{name:52} {text}")


print(
    f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, torch {torch.__version__}, "
    f"cuDNN {torch.backends.cudnn.version()}; {args.turns} turns of {', '.join(CONTESTANTS)}"
)
check()
for shape in SHORT:
    measure_host(shape)
for shape in QUICK if args.quick else QUICK + MORE:
    measure(shape)
