"""A training step of a ring over processes with GPU tensors, by the backend of their group.

    torchrun --nproc-per-node=2 bench/python_gpu_ring.py nccl   # hops from GPU to GPU
    torchrun --nproc-per-node=2 bench/python_gpu_ring.py gloo   # hops through the host's memory

16 heads of 128 channels, bf16, forward and backward; shortest and median of ten steps, on the first
rank. Processes may share a GPU: with gloo always, with NCCL 2.30 and later if
NCCL_MULTI_RANK_GPU_ENABLE=1. Without MPS (nvidia-cuda-mps-control -d) they take turns on it, for
milliseconds each.
"""

import sys
import time

import torch
import torch.distributed as dist

import encke.distributed as ring

HEADS, DIM, REPEATS = 16, 128, 10


def steps(tokens, ranks):
    """Seconds of each step of a sequence of so many tokens."""
    shape = (1, tokens // ranks, HEADS, DIM)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    sizes = ring.sizes_of(tokens)
    seconds = []
    for _ in range(3 + REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        ring.ring_attention(q, k, v, sizes=sizes).backward(dout)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds[3:])


def main():
    backend = sys.argv[1]
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    for tokens in (4096, 16384, 65536):
        took = steps(tokens, ranks)
        if rank == 0:
            words = f"{backend}, {ranks} ranks, {tokens} tokens"
            print(
                f"{words}: {took[0] * 1e3:.2f} ms, median {took[REPEATS // 2] * 1e3:.2f} ms",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
