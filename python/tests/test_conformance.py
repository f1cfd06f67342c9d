"""The suite for other people's attention over processes: it accepts Encke and names mistakes."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

FUNCTIONS = '''
import time
import torch
import torch.distributed as dist
from encke.distributed import ring_attention

def right(q, k, v, *, causal=False, window=None, documents=None, sinks=None, scale=None):
    options = dict(window=window, documents=documents, sinks=sinks, scale=scale)
    return ring_attention(q, k, v, causal=causal, **options)

def local(q, k, v, *, causal=False):
    """Attention to the rank's own keys only."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal)
    return out.transpose(1, 2)

def bfloat(q, k, v, *, causal=False):
    """Gradients in another type than the inputs."""
    return ring_attention(q, k, v, causal=causal).bfloat16()

class Rounded(torch.autograd.Function):
    """Known of two packages: a gradient in float16 has the rounding of bfloat16."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)

def rounded(q, k, v, *, causal=False):
    return ring_attention(Rounded.apply(q), k, v, causal=causal)

def part_of_dk(q, k, v):
    """Known of one package: dk is not that of all queries."""
    return ring_attention(q, k / 2 + k.detach() / 2, v)

def windows_in_blocks(q, k, v, *, causal=False, window=None):
    """Known of two packages: positions of keys are those in their block."""
    blocks = [[torch.empty_like(x) for _ in range(dist.get_world_size())] for x in (k, v)]
    for every, own in zip(blocks, (k, v)):
        dist.all_gather(every, own)
    keys, values = (torch.cat(every, 1) for every in blocks)
    rows = q.shape[1]
    where = torch.arange(rows * dist.get_world_size())
    mine = torch.arange(rows)[:, None]
    seen = (where <= mine + rows * dist.get_rank()) & (mine - where % rows <= window[0])
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, keys, values)), attn_mask=seen)
    return out.transpose(1, 2)

def in_place(q, k, v):
    out = ring_attention(q, k, v)
    k.data.zero_()
    return out

def stuck(q, k, v):
    while dist.get_rank() == 0:
        time.sleep(1)
    return q

def dead(q, k, v):
    import os
    os._exit(9)

def refuses(q, k, v, *, causal=False):
    if causal:
        raise ValueError("no causal mask here")
    raise NotImplementedError("nothing here")
'''


def run(tmp_path, function, *options):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    command = [sys.executable, "-m", "encke.conformance", f"functions:{function}", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    return ran.returncode, ran.stdout + ran.stderr


def test_encke_keeps_every_promise(tmp_path):
    code, text = run(tmp_path, "right", "--json", "outcomes.json")
    assert code == 0, text
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())["outcomes"]
    assert len(outcomes) >= 24 and {of["verdict"] for of in outcomes} == {"holds"}


MISTAKES = [
    ("local", "forward, causal", "wrong: rank 1: out["),
    ("local", "window", "not offered: the function has no window"),
    ("bfloat", "forward, causal", "wrong: rank 0: out is torch.bfloat16, not torch.float32"),
    ("rounded", "float16", "wrong: rank 0: dq["),
    ("part_of_dk", "gradients", "wrong: rank 0: dk["),
    ("windows_in_blocks", "window longer than a shard", "wrong: rank 1: out["),
    ("in_place", "forward", "failed: rank 0: RuntimeError: the function changed its input k"),
    ("refuses", "forward, causal", "refused: no causal mask here"),
    ("refuses", "forward", "not offered: nothing here"),
]
RANK = """
import os, sys
import torch.distributed as dist
import functions
from encke.conformance import PROMISES, check

dist.init_process_group("gloo")
for name, promise in zip(sys.argv[1::2], sys.argv[2::2]):
    only = [of for of in PROMISES if of.name == promise]
    (found,) = check(getattr(functions, name), "cpu", promises=only)
    if dist.get_rank() == 0:
        print(f"{found.verdict}: {found.detail}")
dist.destroy_process_group()
"""


def test_mistakes_are_named(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "rank.py"]
    command += [word for function, promise, _ in MISTAKES for word in (function, promise)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == len(MISTAKES)
    for line, (_, _, found) in zip(lines, MISTAKES):
        assert line.startswith(found), line


def test_hangs_and_deaths_are_outcomes(tmp_path):
    code, text = run(tmp_path, "stuck", "--only", "head dimension", "--seconds", "2")
    assert code == 1 and "hangs: more than 2 s" in text, text
    code, text = run(tmp_path, "dead", "--only", "head dimension")
    assert code == 1 and "crashed: a process ended with code 9" in text, text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["functions"], "names no function"),
        (["functions:absent"], "has no function absent"),
        (["nowhere:function"], "nowhere cannot be imported"),
        (["functions:right", "--only", "levitation"], "no promise contains 'levitation'"),
    ],
)
def test_bad_arguments(tmp_path, arguments, words):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    command = [sys.executable, "-m", "encke.conformance", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ran.returncode == 1 and words in ran.stderr
