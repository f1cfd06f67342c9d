"""Other packages' attention over processes, as `python -m encke.conformance` calls it.

    pip install ring-attention-pytorch ring-flash-attn yunchang
    python -m encke.conformance conformance_peers:ring_flash_attention --ranks 2

The two packages that call flash_attn's kernels get a stand-in here where it is not installed: the
same functions in plain torch, in float64, for the types that flash_attn takes, so that every
difference is the ring's own.
"""

import inspect
import sys
import types

import torch
import torch.distributed as dist


def encke(q, k, v, *, causal=False, window=None, documents=None, sinks=None, scale=None):
    from encke.distributed import ring_attention

    options = dict(window=window, documents=documents, sinks=sinks, scale=scale)
    return ring_attention(q, k, v, causal=causal, **options)


def encke_zigzag(q, k, v, *, causal=False, window=None, documents=None, sinks=None, scale=None):
    from encke.distributed import ring_attention

    options = dict(window=window, documents=documents, sinks=sinks, scale=scale)
    return ring_attention(q, k, v, causal=causal, sharding="zigzag", **options)


encke_zigzag.sharding = "zigzag"


def ring_flash_attention(q, k, v, *, causal=False, window=None, scale=None):
    stand_in(q)
    from ring_flash_attn import ring_flash_attn_func

    return ring_flash_attn_func(q, k, v, causal=causal, softmax_scale=scale, **sides(window))


def ring_flash_attention_zigzag(q, k, v, *, causal=False, window=None, scale=None):
    stand_in(q)
    from ring_flash_attn import zigzag_ring_flash_attn_func

    return zigzag_ring_flash_attn_func(q, k, v, causal=causal, softmax_scale=scale, **sides(window))


ring_flash_attention_zigzag.sharding = "zigzag"
ring_flash_attention.dtype = ring_flash_attention_zigzag.dtype = torch.bfloat16


def yunchang(q, k, v, *, causal=False, window=None, scale=None):
    """Its ring on flash_attn's kernels."""
    return of_yunchang(q, k, v, "FA", causal, window, scale)


yunchang.dtype = torch.bfloat16


def yunchang_math(q, k, v, *, causal=False, scale=None):
    """Its ring on torch's own attention."""
    return of_yunchang(q, k, v, "TORCH_MATH", causal, None, scale)


def of_yunchang(q, k, v, kind, causal, window, scale):
    stand_in(q if kind == "FA" else q.half())
    import yunchang as package
    from yunchang.kernels import AttnType

    if package.globals.PROCESS_GROUP.RING_PG is None:
        ranks = dist.get_world_size()
        package.set_seq_parallel_pg(1, ranks, dist.get_rank(), ranks)
    layer = package.LongContextAttention(ring_impl_type="basic", attn_type=AttnType[kind])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return layer(q, k, v, causal=causal, softmax_scale=scale, **sides(window))


def ring_attention_pytorch(q, k, v, *, causal=False):
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    rows, ranks, kv_heads = q.shape[1], dist.get_world_size(), k.shape[2]
    # There query head h reads key head h mod kv_heads; here it reads h // (heads / kv_heads).
    q = q.unflatten(2, (kv_heads, -1)).transpose(2, 3).flatten(2, 3)
    out = ring_flash_attn(q, k, v, None, causal, rows, True, False, None, ranks)
    return out.unflatten(2, (-1, kv_heads)).transpose(2, 3).flatten(2, 3)


def torch_context_parallel(q, k, v, *, causal=False, scale=None):
    """PyTorch's own, on consecutive tokens."""
    return of_torch(q, k, v, causal, scale, balanced=False)


def torch_context_parallel_zigzag(q, k, v, *, causal=False, scale=None):
    """The same as it is by default, with balanced shards."""
    return of_torch(q, k, v, causal, scale, balanced=True)


torch_context_parallel_zigzag.sharding = "zigzag"
torch_context_parallel.dtype = torch_context_parallel_zigzag.dtype = torch.bfloat16
# Its context, which stays entered: backward passes need it, too.
entered = []


def of_torch(q, k, v, causal, scale, balanced):
    if not q.is_cuda:
        raise NotImplementedError("it replaces torch's attention on GPUs; on a CPU it stays local")
    if not entered:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._context_parallel import _attention

        mesh = init_device_mesh(q.device.type, (dist.get_world_size(),))
        _attention._cp_options.enable_load_balance = balanced
        if dist.get_backend() == "gloo":
            # torch's own crashes with gloo and tensors of a GPU, which processes share here.
            _attention.ft_c = types.SimpleNamespace(**vars(_attention.ft_c))
            _attention.ft_c.all_gather_tensor = through_the_host
        rows = torch.zeros(2 * dist.get_world_size(), device=q.device)
        entered.append(context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0]))
        entered[0].__enter__()
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        is_causal=causal,
        scale=scale,
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return out.transpose(1, 2)


def through_the_host(tensor, gather_dim, group):
    own = tensor.cpu()
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return torch.cat(every, gather_dim).to(tensor.device)


def sides(window):
    """A window as flash_attn writes it."""
    left, right = (-1 if side is None else side for side in window or (None, None))
    return dict(window_size=(left, right))


def stand_in(q):
    """Puts plain attention in the place of flash_attn, where that is not installed."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError("flash_attn takes float16 and bfloat16")
    try:
        import flash_attn  # noqa: F401

        return
    except ImportError:
        pass
    package, kernels = types.ModuleType("flash_attn"), types.ModuleType("interface")
    package.flash_attn_interface, package.__spec__ = kernels, None
    package.__version__ = "2.8.0"
    for function in (_flash_attn_forward, _flash_attn_backward, *_others()):
        setattr(kernels, function.__name__, function)
        setattr(package, function.__name__, function)
    sys.modules["flash_attn"] = package
    # Its adapters need an older transformers, and are not called here.
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    sys.modules["flash_attn.flash_attn_interface"] = kernels


def _probabilities(q, k, softmax_scale, causal, left, right, lse=None):
    shared = q.shape[2] // k.shape[2]
    k = k.double().repeat_interleave(shared, 2)
    scores = softmax_scale * torch.einsum("bihd,bjhd->bhij", q.double(), k)
    rows, keys = scores.shape[-2:]
    # Queries are the last of the keys, as flash_attn counts.
    at, of = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        seen &= at - of <= left
    if right >= 0:
        seen &= of - at <= right
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    lse = torch.logsumexp(scores, -1) if lse is None else lse.double()
    return torch.exp(scores - lse[..., None]).nan_to_num(0.0), lse


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1,
    softcap=0.0, alibi_slopes=None, return_softmax=False,
):
    shares, lse = _probabilities(q, k, softmax_scale, causal, window_size_left, window_size_right)
    wide = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhij,bjhd->bihd", shares, wide).to(q.dtype)
    return out, lse.float(), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, rng_state=None,
):
    sides = (window_size_left, window_size_right)
    shares, _ = _probabilities(q, k, softmax_scale, causal, *sides, softmax_lse)
    shared, dout = q.shape[2] // k.shape[2], dout.double()
    wide_k, wide_v = (x.double().repeat_interleave(shared, 2) for x in (k, v))
    delta = (dout * out.double()).sum(-1).transpose(1, 2)[..., None]
    ds = shares * (torch.einsum("bihd,bjhd->bhij", dout, wide_v) - delta) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, wide_k))
    for to, weights, of in ((dk, ds, q.double()), (dv, shares, dout)):
        every = torch.einsum("bhij,bihd->bjhd", weights, of)
        to.copy_(every.unflatten(2, (-1, shared)).sum(3))


def _others():
    """Functions that are imported and not called here."""

    def missing(*_, **__):
        raise NotImplementedError("this stand-in has forward and backward of one sequence")

    for name in (
        "_flash_attn_varlen_forward", "_flash_attn_varlen_backward", "flash_attn_func",
        "flash_attn_varlen_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func",
    ):
        made = types.FunctionType(missing.__code__, globals(), name)
        made.__signature__ = inspect.signature(missing)
        yield made
