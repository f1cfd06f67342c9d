#!/usr/bin/env python3
"""Another package's ring on the CPU beside PyTorch's attention: errors of output and gradients.

    pip install torch ring-attention-pytorch
    torchrun --nproc_per_node 2 bench/peer_gradients.py [--causal]

The package is lucidrains' ring-attention-pytorch (`ring_flash_attn`), over gloo, 16 tokens a rank,
f32. Each rank prints the largest difference from scaled_dot_product_attention of the whole sequence
in its own rows, and the largest element there. Encke is not run. COMPARE.md quotes the output.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--causal", action="store_true", help="each query sees keys at or before it only"
)
args = parser.parse_args()

ROWS, HEADS, DIM = 16, 2, 8
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
own = slice(rank * ROWS, (rank + 1) * ROWS)

# Every rank has the whole sequence, from one seed, to know what is right.
q, k, v, dout = (torch.randn(1, ROWS * ranks, HEADS, DIM) for _ in range(4))
whole = [x.clone().requires_grad_() for x in (q, k, v)]
right = F.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in whole), is_causal=args.causal
).transpose(1, 2)
right.backward(dout)

shard = [x[:, own].clone().requires_grad_() for x in (q, k, v)]
out = ring_flash_attn(*shard, None, args.causal, ROWS, True, False, None, ranks)
out.backward(dout[:, own])

pairs = {"out": (out, right[:, own])}
pairs |= {name: (x.grad, y.grad[:, own]) for name, x, y in zip(("dq", "dk", "dv"), shard, whole)}
words = [
    f"{name} {(x - y).abs().max():.1e} of {y.abs().max():.2f}" for name, (x, y) in pairs.items()
]
print(f"rank {rank} of {ranks}: " + ", ".join(words), flush=True)
dist.barrier()
dist.destroy_process_group()
