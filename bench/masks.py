#!/usr/bin/env python3
"""What masks cost on the CPU, through the Python package, in one run and in turns.

    python3 bench/masks.py [--threads 2] [--turns 5] [--quick] [--record FILE]

Three questions. Does the time of a window grow with its width and not with the sequence? What does
one packed call of 512 documents cost beside 512 separate calls, beside a batch padded to the
longest document, and beside PyTorch's attention with a boolean mask of the documents? What does a
window cost beside PyTorch's attention with a boolean mask of the window? Inputs are random; every
answer is compared with PyTorch's before anything is timed. A ratio is the median over turns of two
calls that followed one another.
"""

import argparse, json, os, platform, random, statistics, sys, time

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--threads", type=int, default=2, help="threads of both contestants (default 2)"
)
parser.add_argument("--turns", type=int, default=5, help="turns of each row (default 5)")
parser.add_argument("--quick", action="store_true", help="a quarter of the tokens")
parser.add_argument("--record", help="also write the rows as JSON lines to this file")
args = parser.parse_args()
os.environ.setdefault("RAYON_NUM_THREADS", str(args.threads))

import torch
import torch.nn.functional as F

import encke

torch.set_num_threads(args.threads)
torch.manual_seed(1)
HEADS, DIM = 4, 64
TOKENS = 8192 if args.quick else 32768
rows = []


def tensors(tokens, batch=1):
    return [torch.randn(batch, tokens, HEADS, DIM) for _ in range(3)]


def rival(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def seconds(call):
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(calls):
    """Seconds of each call, turn by turn."""
    return [[seconds(call) for call in calls] for _ in range(args.turns)]


def check(name, got, expected):
    error = (got - expected).abs().max().item()
    if not error < 2e-5:
        sys.exit(f"{name} is off by {error:.1e}")


def say(name, ratio, meaning, **more):
    print(f"{name:42} {ratio:8.3f}  {meaning}", flush=True)
    rows.append(dict(name=name, ratio=round(ratio, 4), meaning=meaning, **more))


def window_mask(tokens, width):
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    return (distance >= 0) & (distance < width)


def windowed(q, k, v, width):
    return encke.attention(q, k, v, causal=True, window=(width - 1, 0))


def windows():
    q, k, v = tensors(600)
    check("a window", windowed(q, k, v, 100), rival(q, k, v, window_mask(600, 100)))
    q, k, v = tensors(TOKENS)
    widths = [TOKENS // 32, TOKENS // 16, TOKENS // 8, TOKENS // 4]
    turns = in_turns([lambda width=width: windowed(q, k, v, width) for width in widths])
    for index, width in enumerate(widths):
        # Pairs of a causal window, divided by those of the widest.
        pairs = [w * (w + 1) / 2 + (TOKENS - w) * w for w in (width, widths[-1])]
        per_pair = [turn[index] / turn[-1] * pairs[1] / pairs[0] for turn in turns]
        say(
            f"window {width} of {TOKENS}",
            statistics.median(per_pair),
            f"time per pair / that of window {widths[-1]}",
            seconds=statistics.median(turn[index] for turn in turns),
        )
    short = [x[:, : TOKENS // 2].contiguous() for x in (q, k, v)]
    width = widths[0]
    turns = in_turns([lambda: windowed(q, k, v, width), lambda: windowed(*short, width)])
    say(
        f"window {width}, twice the tokens",
        statistics.median(turn[0] / turn[1] for turn in turns),
        "time of n tokens / of n / 2",
    )
    q, k, v = tensors(TOKENS // 4)
    width, mask = TOKENS // 32, window_mask(TOKENS // 4, TOKENS // 32)
    turns = in_turns([lambda: windowed(q, k, v, width), lambda: rival(q, k, v, mask)])
    say(
        f"window {width} of {TOKENS // 4}, beside PyTorch",
        statistics.median(turn[1] / turn[0] for turn in turns),
        "time of SDPA with a boolean mask / Encke's",
    )


def lengths_of(count, tokens):
    """Log-normal lengths that add up to `tokens`."""
    draw = random.Random(2)
    raw = [draw.lognormvariate(0, 1.0) for _ in range(count)]
    lengths = [max(1, int(x * tokens / sum(raw))) for x in raw]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    return lengths


def document_mask(lengths):
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal = torch.ones(len(document), len(document), dtype=torch.bool).tril()
    return causal & (document[:, None] == document[None, :])


def packed(q, k, v, lengths):
    return encke.attention(q, k, v, causal=True, documents=lengths)


def documents():
    few = lengths_of(20, 700)
    q, k, v = tensors(700)
    check("documents", packed(q, k, v, few), rival(q, k, v, document_mask(few)))
    count, tokens = 512, TOKENS
    lengths = lengths_of(count, tokens)
    q, k, v = tensors(tokens)
    parts = list(zip(*(torch.split(x, lengths, dim=1) for x in (q, k, v))))
    together = torch.cat([encke.attention(*part, causal=True) for part in parts], dim=1)
    check("512 documents", packed(q, k, v, lengths), together)
    longest = max(lengths)
    padded = [torch.randn(count, longest, HEADS, DIM) for _ in range(3)]
    calls = [
        lambda: packed(q, k, v, lengths),
        lambda: [encke.attention(*part, causal=True) for part in parts],
        lambda: encke.attention(*padded, causal=True),
    ]
    turns = in_turns(calls)
    name = f"{count} documents"
    of = lambda at: statistics.median(turn[at] / turn[0] for turn in turns)
    say(f"{name}, beside 512 calls", 1 / of(1), "time of one call / of 512 calls")
    meaning = f"time of a batch padded to {longest} / of the packed call"
    say(f"{name}, beside padding", of(2), meaning)
    mask = document_mask(lengths)
    turns = in_turns([calls[0], lambda: rival(q, k, v, mask)])
    ratio = statistics.median(turn[1] / turn[0] for turn in turns)
    say(f"{name}, beside PyTorch", ratio, "time of SDPA with a boolean mask / Encke's")


print(
    f"f32, {HEADS} heads of {DIM}, {args.threads} threads, torch {torch.__version__}, "
    f"encke {encke.__version__}, {platform.processor() or platform.machine()}"
)
windows()
documents()
if args.record:
    with open(args.record, "w") as record:
        for row in rows:
            record.write(json.dumps(row) + "\n")
