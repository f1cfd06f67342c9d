#!/usr/bin/env python3
"""What masks cost on a GPU, through the Python package, in one process and in turns.

    python3 bench/gpu_masks.py [--turns 7] [--only WORD] [--record FILE]

One line for each shape: milliseconds and TFLOP/s of the visible pairs, forward and backward alone,
for Encke and, where it is installed and has the mask, FlashAttention-4. The first rows are dense: a
mask must not change them. A time is the median over turns of CUDA events around several calls.

The last rows are of few queries over many keys (decode), forward alone, beside PyTorch's SDPA:
milliseconds and TB/s of the keys and values, each counted once. An answer is checked in f32 first.
"""

import argparse, json, math, random, statistics

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--turns", type=int, default=7, help="turns of each row (default 7)")
parser.add_argument("--only", default="", help="only rows whose name contains this word")
parser.add_argument("--record", help="also write the rows as JSON lines to this file")
args = parser.parse_args()

import torch

import encke

try:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
except ImportError:
    flash_attn_func = flash_attn_varlen_func = None

torch.manual_seed(1)
random.seed(1)


def log_normal(count, total):
    """Lengths of documents that add up to `total`."""
    weights = [random.lognormvariate(0, 1) for _ in range(count)]
    lengths = [max(1, int(total * w / sum(weights))) for w in weights]
    lengths[-1] += total - sum(lengths)
    return lengths


K = 1024
# name, tokens, heads, key heads, dim, value dim, options
SHAPES = [
    ("causal 16k d128", 16 * K, 16, 16, 128, 128, dict(causal=True)),
    ("full 16k d128", 16 * K, 16, 16, 128, 128, {}),
    ("causal 16k d64", 16 * K, 16, 16, 64, 64, dict(causal=True)),
    ("64 documents of 1k d128", 64 * K, 16, 16, 128, 128,
     dict(causal=True, documents=log_normal(64, 64 * K))),
    ("8 documents of 8k d128", 64 * K, 16, 16, 128, 128, dict(causal=True, documents=[8 * K] * 8)),
    ("256 documents of 256 d128", 64 * K, 16, 16, 128, 128,
     dict(causal=True, documents=[256] * 256)),
    ("window 1024 of 64k d128", 64 * K, 16, 16, 128, 128, dict(causal=True, window=(1023, 0))),
    ("window 128 of 16k d64 64:8", 16 * K, 64, 8, 64, 64, dict(causal=True, window=(127, 0))),
    ("values of 128 of 192 16k", 16 * K, 16, 16, 192, 128, dict(causal=True)),
    ("causal 8k d256", 8 * K, 16, 16, 256, 256, dict(causal=True)),
    ("softcap 8k d128", 8 * K, 16, 16, 128, 128, dict(causal=True, softcap=50.0)),
    ("slopes 8k d128", 8 * K, 16, 16, 128, 128, dict(causal=True, alibi_slopes=True)),
    ("dropout 8k d128", 8 * K, 16, 16, 128, 128, dict(causal=True, dropout=0.1, seed=3)),
    ("sinks window 128 16k d64 64:8", 16 * K, 64, 8, 64, 64,
     dict(causal=True, window=(127, 0), sinks=True)),
]


# name, batch, queries, keys, heads, key heads, dim
DECODE = [
    (f"decode {queries} of 128k d128 32:8{of}", batch, queries, 128 * K, 32, 8, 128)
    for batch, of in ((1, ""), (8, " batch 8"))
    for queries in (1, 4, 16)
] + [("prefill chunk 64 of 128k d128 32:8", 1, 64, 128 * K, 32, 8, 128)]


def pairs(tokens, options):
    """Visible pairs of one head."""
    left = options.get("window", (None, None))[0]
    total = 0
    for length in options.get("documents", [tokens]):
        if not options.get("causal"):
            total += length * length
        elif left is None or left >= length:
            total += length * (length + 1) // 2
        else:
            total += (left + 1) * length - left * (left + 1) // 2
    return total


def milliseconds(call, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def passes(attend, q, k, v):
    """A forward call, and a backward call on its saved results."""
    out = attend(q, k, v)
    dout = torch.randn_like(out)
    backward = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # noqa: E731

    def forward():
        with torch.no_grad():
            attend(q, k, v)

    return forward, backward


def rival(options, heads):
    """FlashAttention-4 with the same mask; None if it has none or is not installed."""
    known = {"causal", "documents", "window", "softcap"}
    if flash_attn_func is None or not set(options) <= known:
        return None
    window = options.get("window", (None, None))
    more = dict(causal=options.get("causal", False) and "window" not in options)
    if "window" in options:
        more["window_size"] = window
    if "softcap" in options:
        more["softcap"] = options["softcap"]
    if "documents" not in options:
        return lambda q, k, v: flash_attn_func(q, k, v, **more)[0]
    ends = torch.tensor([0, *options["documents"]]).cumsum(0).int().cuda()
    most = max(options["documents"])

    def packed(q, k, v):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(
            *flat, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=most, max_seqlen_k=most,
            **more,
        )
        return out[0].unflatten(0, q.shape[:2])

    return packed


def row(name, tokens, heads, kv_heads, dim, value_dim, options):
    make = lambda h, d: torch.randn(  # noqa: E731
        1, tokens, h, d, dtype=torch.bfloat16, device="cuda"
    ).requires_grad_()
    q, k, v = make(heads, dim), make(kv_heads, dim), make(kv_heads, value_dim)
    given = dict(options)
    if given.pop("sinks", False):
        given["sinks"] = torch.zeros(heads, device="cuda")
    contestants = {"encke": lambda q, k, v: encke.attention(q, k, v, **given)}
    other = rival(options, heads)
    if other is not None:
        contestants["fa4"] = other
    flops = 2 * pairs(tokens, options) * heads * (dim + value_dim)
    calls = {}
    for who, attend in contestants.items():
        try:
            calls[who] = passes(attend, q, k, v)
            for call in calls[who]:
                call()
        except Exception as error:
            print(f"{name}: {who} failed: {type(error).__name__}: {str(error)[:200]}")
            calls.pop(who, None)
    torch.cuda.synchronize()
    times = {(who, part): [] for who in calls for part in (0, 1)}
    for _ in range(args.turns):
        for who, both in calls.items():
            for part, call in enumerate(both):
                count = max(1, min(20, math.ceil(10 / max(milliseconds(call, 1), 1e-3))))
                times[who, part].append(milliseconds(call, count))
    found = {"name": name}
    for (who, part), all_times in times.items():
        ms = statistics.median(all_times)
        what = f"{who} {'backward' if part else 'forward'}"
        found[f"{what} ms"] = round(ms, 3)
        found[f"{what} tflops"] = round(flops * (2.5 if part else 1) / ms / 1e9, 1)
    return found


def in_turns(calls):
    """The median time of each call, in milliseconds."""
    times = {who: [] for who in calls}
    for _ in range(args.turns):
        for who, call in calls.items():
            count = max(1, min(50, math.ceil(10 / max(milliseconds(call, 1), 1e-3))))
            times[who].append(milliseconds(call, count))
    return {who: statistics.median(all_times) for who, all_times in times.items()}


def exact(q, k, v):
    """Causal attention of the last queries in f32, one head of keys after the other."""
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(keys - queries + 1)
    out = torch.empty(q.shape, device="cuda")
    for entry in range(q.shape[0]):
        for head in range(k.shape[2]):
            own = slice(head * group, (head + 1) * group)
            keys_of, values_of = k[entry, :, head].float(), v[entry, :, head].float()
            scores = torch.einsum("qhd,kd->hqk", q[entry, :, own].float(), keys_of)
            scores = (scores / q.shape[3] ** 0.5).masked_fill(hidden, -math.inf)
            out[entry, :, own] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), values_of)
    return out


def sdpa(q, k, v):
    from torch.nn.attention.bias import causal_lower_right

    # One query sees every key.
    mask = None if q.shape[1] == 1 else causal_lower_right(q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return out.transpose(1, 2)


@torch.no_grad()
def decode_row(name, batch, queries, keys, heads, kv_heads, dim):
    """The last queries of a sequence over all of its keys."""
    make = lambda n, h: torch.randn(  # noqa: E731
        batch, n, h, dim, dtype=torch.bfloat16, device="cuda"
    )
    q, k, v = make(queries, heads), make(keys, kv_heads), make(keys, kv_heads)
    contestants = {
        "encke": lambda: encke.attention(q, k, v, causal=True),
        "sdpa": lambda: sdpa(q, k, v),
    }
    if flash_attn_func is not None:
        contestants["fa4"] = lambda: flash_attn_func(q, k, v, causal=True)[0]
    expected, calls, found = exact(q, k, v), {}, {"name": name}
    for who, call in contestants.items():
        try:
            off = float((call().float() - expected).norm() / expected.norm())
        except Exception as error:
            print(f"{name}: {who} failed: {type(error).__name__}: {str(error)[:200]}")
            continue
        if not off < 1e-2:
            print(f"{name}: {who} is wrong: relative error {off:.2e}")
            continue
        found[f"{who} error"] = round(off, 5)
        calls[who] = call
    bytes_read = 2 * batch * keys * kv_heads * dim * k.element_size()
    for who, ms in in_turns(calls).items():
        found[f"{who} ms"] = round(ms, 4)
        found[f"{who} TB/s"] = round(bytes_read / ms / 1e9, 3)
    return found


print(torch.cuda.get_device_name())
rows = []
for shape in SHAPES:
    if args.only in shape[0]:
        rows.append(row(*shape))
        print(json.dumps(rows[-1]), flush=True)
for shape in DECODE:
    if args.only in shape[0]:
        rows.append(decode_row(*shape))
        print(json.dumps(rows[-1]), flush=True)
if args.record:
    with open(args.record, "w") as file:
        file.writelines(json.dumps(x) + "\n" for x in rows)
