"""Dilated attention of a slide encoder, Encke beside the client's own code, in one process.

    python bench/slides.py --code FOLDER --device cuda
    python bench/slides.py --code FOLDER --tiles 1000 10000 --record bench/record/slides-cpu.jsonl

FOLDER is prov-gigapath's folder that contains ``torchscale``. Its attention runs on torch's own
flash attention in the place of flash_attn. Five branches, 16 heads of 48, without projections;
float16 on a GPU, float32 on a CPU. Answers are compared before anything is timed. Calls are made in
turns; times are medians. Memory is what a forward and backward pass takes at most beside q, k, v
and the upstream gradient.
"""

import argparse
import contextlib
import io
import json
import platform
import resource
import statistics
import sys
import time
import types

import torch
from torch import nn

import encke
import encke.compat.torchscale as compat

SEGMENTS, RATES = [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]


def their_module(folder, heads, dim):
    """Their attention, without projections, on torch's flash attention."""
    sys.path.insert(0, folder)
    for name in ("fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers"):
        sys.modules.setdefault(name, types.ModuleType(name))
    from torchscale.component import multihead_attention
    from torchscale.component.dilated_attention import DilatedAttention

    multihead_attention.flash_attn_func = flash
    arguments = types.SimpleNamespace(
        segment_length=SEGMENTS, dilated_ratio=RATES, flash_attention=True, multiway=False,
        xpos_rel_pos=False, layernorm_eps=1e-5, seq_parallel=False,
    )
    module = DilatedAttention(arguments, heads * dim, heads, self_attention=True)
    module.q_proj = module.k_proj = module.v_proj = module.out_proj = nn.Identity()
    return module


def flash(q, k, v, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):
    """torch's flash attention with its lse, in the form their code calls."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    else:
        flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash_cpu(q, k, v, 0.0, is_causal)
    return out.transpose(1, 2), lse.detach()


class Contestant:
    def __init__(self, name, module):
        self.name, self.module, self.times = name, module, {"forward": [], "both": []}

    def forward(self, qkv):
        return self.module(*qkv)[0]

    def both(self, qkv, dout):
        return torch.autograd.grad(self.forward(qkv), qkv, dout)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--code", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiles", type=int, nargs="*", default=[1000, 10000, 45681, 200000])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--record")
    given = parser.parse_args()
    on_gpu = given.device != "cpu"
    machine = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    lines = []
    for tiles in given.tiles:
        line = measure(given, tiles, on_gpu)
        lines.append({"machine": machine, "encke": encke.__version__, **line})
        print(json.dumps(lines[-1]), flush=True)
    if given.record:
        with open(given.record, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def measure(given, tiles, on_gpu):
    tokens, width = tiles + 1, given.heads * given.dim
    dtype = torch.float16 if on_gpu else torch.float32
    torch.manual_seed(tiles)
    make = dict(device=given.device, dtype=dtype)
    qkv = [torch.randn(1, tokens, width, **make).requires_grad_() for _ in range(3)]
    dout = torch.randn(1, tokens, width, **make)
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = Contestant("torchscale on torch's flash attention",
                            their_module(given.code, given.heads, given.dim))
        ours = Contestant("encke", their_module(given.code, given.heads, given.dim))
        module = their_module(given.code, given.heads, given.dim)
        exact = Contestant("encke, exact gradient", module)
    compat.patch(ours.module, misplaced="reproduce")
    contestants = [ours, theirs]
    # Torchscale misplaces rows of longer slides, which has no exact gradient.
    if tokens <= 185363:
        compat.patch(exact.module, mixing_gradient="exact")
        contestants.append(exact)
    line = dict(name=f"{tiles} tiles", tiles=tiles, heads=given.heads, dim=given.dim)
    line["dtype"] = str(dtype).split(".")[1]
    line["differences"] = compare(ours, theirs, qkv, dout)
    for turn in range(given.turns + 1):
        for of in contestants if turn % 2 else contestants[::-1]:
            with torch.no_grad():
                forward = timed(on_gpu, of.forward, qkv)
            both = timed(on_gpu, of.both, qkv, dout)
            if turn:
                of.times["forward"].append(forward)
                of.times["both"].append(both)
    keys = {ours.name: "encke", theirs.name: "theirs", exact.name: "exact"}
    for of in contestants:
        key = keys[of.name]
        for name, times in of.times.items():
            line[f"{key}_{name}_ms"] = round(1e3 * statistics.median(times), 3)
        if on_gpu:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            of.both(qkv, dout)
            line[f"{key}_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    for name in ("forward", "both"):
        line[f"{name}_ratio"] = round(line[f"theirs_{name}_ms"] / line[f"encke_{name}_ms"], 2)
    if not on_gpu:
        line["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    return line


def compare(ours, theirs, qkv, dout):
    """Relative differences of out, dq, dk and dv; an error if they are not those of rounding."""
    out = [of.forward(qkv).detach().float() for of in (ours, theirs)]
    gradients = [[x.float() for x in of.both(qkv, dout)] for of in (ours, theirs)]
    pairs = [out, *zip(*gradients)]
    differences = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    limit = 1e-2 if dout.dtype == torch.float16 else 1e-4
    if not max(differences) < limit:
        raise SystemExit(f"the answers differ by {differences}")
    return [float(f"{x:.1e}") for x in differences]


def timed(on_gpu, function, *arguments):
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    kept = function(*arguments)
    if on_gpu:
        torch.cuda.synchronize()
    del kept
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
