"""Calls of the extension with tensors that it cannot read as they lie, or that are empty.

The decision here: nothing is checked before a call. The extension refuses what it cannot read
(:class:`encke._encke.UnreadableTensor`), and only then copies are made, so that usual tensors cost
nothing.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import numpy

from encke._encke import UnreadableTensor
from encke._unusual import is_freed


def forward(found: Any, q: Any, k: Any, v: Any, sinks: Any = None) -> tuple[Any, ...]:
    """``found.forward`` of tensors of any strides and sizes."""
    try:
        return found.forward(q, k, v, sinks)
    except ValueError as error:
        if is_empty(q, k, v):
            return *nothing(q, v, sinks, found.precision), None, None
        copies = copied(error, q, k, v)
    return found.forward(*copies, sinks)


def backward(
    found: Any, q: Any, k: Any, v: Any, saved: Any, dout: Any, dlse: Any, sinks: Any = None
) -> tuple[Any, ...]:
    """``found.backward`` of tensors of any strides and sizes."""
    try:
        return found.backward(q, k, v, saved, dout, dlse, sinks)
    except ValueError as error:
        if is_empty(q, k, v):
            return *(_full(x, x.shape, 0.0) for x in (q, k, v)), sinks_of_nothing(dlse, sinks)
        q, k, v, dout, dlse, *saved = copied(error, q, k, v, dout, dlse, *saved)
    return found.backward(q, k, v, tuple(saved), dout, dlse, sinks)


def copied(error: ValueError, *tensors: Optional[Any]) -> list[Any]:
    """The tensors, with copies of those that cannot be read; raises ``error`` if none can help."""
    if not isinstance(error, UnreadableTensor):
        raise error
    try:
        copies = [None if x is None else readable(x) for x in tensors]
    except ValueError as unnamed:
        raise (error if "has no memory" in str(error) else unnamed) from None
    if all(copy is x for copy, x in zip(copies, tensors)):
        raise error
    return copies


def readable(tensor: Any) -> Any:
    """A tensor or array whose elements lie in memory, with a contiguous last dimension."""
    if isinstance(tensor, numpy.ndarray):
        whole = all(step >= 0 and step % tensor.itemsize == 0 for step in tensor.strides)
        good = whole and tensor.flags.aligned and tensor.strides[-1:] in ((), (tensor.itemsize,))
        return tensor if good else numpy.array(tensor, order="C", copy=True)
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        # The extension, or the caller, has the sentence.
        return tensor
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_freed(tensor):
        raise ValueError(
            f"a tensor {list(tensor.shape)} has no memory: its storage was freed; give a tensor "
            "that holds its elements"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if torch._is_zerotensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    strided = tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1
    if strided or tensor.data_ptr() % tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def is_empty(q: Any, k: Any, v: Any) -> bool:
    """Whether there are no queries or no keys, of shapes that otherwise fit together."""
    if not all(hasattr(x, "shape") and len(x.shape) == 4 for x in (q, k, v)):
        return False
    if q.shape[0] and q.shape[1] and k.shape[1]:
        return False
    heads, of_keys = q.shape[2], k.shape[2]
    fitting = tuple(k.shape[:3]) == tuple(v.shape[:3]) and q.shape[0] == k.shape[0]
    return fitting and q.shape[3] == k.shape[3] and bool(of_keys) and heads % of_keys == 0


_LONG = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def nothing(q: Any, v: Any, sinks: Any, precision: Optional[str]) -> tuple[Any, Any]:
    """out and lse of queries that see no key."""
    out = _full(q, (*q.shape[:3], v.shape[3]), 0.0)
    if precision is not None:
        name = _LONG[precision]
        out = out.astype(name) if isinstance(out, numpy.ndarray) else out.to(_torch_type(name))
    sums = out if str(out.dtype).endswith("64") else _single(out)
    lse = _full(sums, tuple(q.shape[:3]), -math.inf)
    if sinks is not None:
        lse[...] = lse.new_tensor(sinks) if hasattr(lse, "new_tensor") else numpy.array(sinks)
    return out, lse


def _torch_type(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _single(tensor: Any) -> Any:
    return tensor.astype("float32") if isinstance(tensor, numpy.ndarray) else tensor.float()


def sinks_of_nothing(dlse: Any, sinks: Any) -> Optional[list[float]]:
    """The gradient of the sinks of queries that see no key."""
    if sinks is None:
        return None
    if dlse is None:
        return [0.0] * len(sinks)
    return dlse.reshape(-1, len(sinks)).sum(0).tolist()


def _full(like: Any, shape: Any, value: float) -> Any:
    if isinstance(like, numpy.ndarray):
        return numpy.full(shape, value, dtype=like.dtype)
    return like.new_full(tuple(shape), value)


def refuse_masked(*arrays: Any) -> None:
    """Refuses NumPy's masked arrays, whose masks would be ignored."""
    q, k, v = arrays
    if type(q) is type(k) is type(v) is numpy.ndarray:
        return
    for name, array in zip("qkv", arrays):
        if isinstance(array, numpy.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array, whose mask Encke would ignore; give {name}.filled(), "
                "and hide keys with key_lengths, documents or window"
            )
