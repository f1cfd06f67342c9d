"""Other packages' rings in the form that ``python -m encke.conformance`` calls, and Encke's own.

    torchrun --standalone --nproc-per-node=2 -m encke.conformance conformance_adapters:encke_ring
    torchrun --standalone --nproc-per-node=2 -m encke.conformance \\
        conformance_adapters:ring_attention_pytorch

Each needs its package. yunchang_pytorch and ring_flash_attention need a GPU for each process
(``--device cuda``), the latter also flash-attn.
"""
import torch.distributed as dist


def encke_ring(q, k, v, *, causal=False, window=None, documents=None, sinks=None, softcap=None,
               scale=None, sharding="contiguous", sizes=None, group=None):
    """encke.distributed.ring_attention."""
    from encke.distributed import ring_attention

    return ring_attention(q, k, v, causal=causal, window=window, documents=documents, sinks=sinks,
                          softcap=softcap, scale=scale, sharding=sharding, sizes=sizes, group=group)


def ring_attention_pytorch(q, k, v, *, causal=False):
    """lucidrains' ring-attention-pytorch, its path for the CPU."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    rows, ranks, key_heads = q.shape[1], dist.get_world_size(), k.shape[2]
    # Its query head i reads key head i % key_heads; here consecutive heads share one.
    q = q.unflatten(2, (key_heads, -1)).transpose(2, 3).flatten(2, 3)
    out = ring_flash_attn(q, k, v, None, causal, rows, True, False, None, ranks)
    return out.unflatten(2, (-1, key_heads)).transpose(2, 3).flatten(2, 3)


ring_attention_pytorch.even = True
ring_attention_pytorch.dtypes = ("float32",)


def yunchang_pytorch(q, k, v, *, causal=False, scale=None, group=None):
    """feifeibear's yunchang, its ring in torch operations."""
    from yunchang.ring import ring_pytorch_attn_func

    return ring_pytorch_attn_func(q, k, v, softmax_scale=scale, causal=causal, group=group)


yunchang_pytorch.even = True
yunchang_pytorch.dtypes = ("float32", "bfloat16", "float16")


def yunchang_math(q, k, v, *, causal=False, scale=None, group=None):
    """The same package, its usual ring on torch's kernels."""
    from yunchang.kernels import AttnType
    from yunchang.ring import ring_flash_attn_func

    return ring_flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, group=group,
                                attn_type=AttnType.TORCH_MATH)


yunchang_math.even = True
yunchang_math.dtypes = ("float32", "bfloat16", "float16")


def ring_flash_attention(q, k, v, *, causal=False, scale=None, sharding="contiguous", group=None):
    """zhuzilin's ring-flash-attention."""
    import ring_flash_attn

    functions = dict(contiguous=ring_flash_attn.ring_flash_attn_func,
                     zigzag=ring_flash_attn.zigzag_ring_flash_attn_func,
                     striped=ring_flash_attn.stripe_flash_attn_func)
    return functions[sharding](q, k, v, softmax_scale=scale, causal=causal, group=group)


ring_flash_attention.even = True
ring_flash_attention.dtypes = ("bfloat16", "float16")
