"""Sentences for what is no tensor of rows: other objects, layouts without rows, types that Encke
does not compute, devices and storages without memory.

The decision here: a plain call of :func:`encke.attention` does not ask, because the extension
refuses what it cannot read. Here is for calls that touch their tensors before: they would end in
errors of torch's own, or read memory that was freed.
"""

from __future__ import annotations

from typing import Any

import numpy

_TYPES = ("float64", "float32", "float16", "bfloat16")


def refuse_unusual(**given: Any) -> None:
    """Refuses each of these, by its name, unless it is a tensor or an array that can be read; all
    must be of one kind. Tensors of other classes are left to their own rules."""
    kinds = {}
    for name, x in given.items():
        if isinstance(x, numpy.ndarray):
            kinds[name] = "NumPy array"
            _refuse_array(name, x)
        elif _is_torch(x):
            kinds[name] = "torch tensor"
            refuse_tensor(name, x)
        else:
            raise TypeError(
                f"{name} is a {type(x).__name__}; Encke takes torch tensors and NumPy arrays, and "
                "all of one kind"
            )
    first = next(iter(kinds))
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise TypeError(
                f"{first} is a {kinds[first]} and {name} a {kind}; give all as one of them"
            )


def refuse_wrappers(*, in_torch: bool = False, **given: Any) -> None:
    """The same for calls that are no operators, so that classes with tensors inside have no rules
    for them, and nothing can see them. ``in_torch``: calls of torch's own operators alone."""
    if any(not isinstance(x, numpy.ndarray) and _is_torch(x) for x in given.values()):
        from encke._observed import refuse_tangents, refuse_unseen

        refuse_unseen(in_torch=in_torch)
        refuse_tangents(**given)
    refuse_unusual(**given)
    for name, x in given.items():
        if not isinstance(x, numpy.ndarray) and hasattr(x, "__tensor_flatten__"):
            raise TypeError(
                f"{name} is a {type(x).__name__}, which holds other tensors; give a plain one: "
                f"{name}.to_local() of a DTensor, {name}.wait() of a collective under way"
            )


def refuse_dimensions(count: int, meaning: str, **given: Any) -> None:
    """Refuses tensors of another number of dimensions."""
    for name, x in given.items():
        if len(x.shape) != count:
            raise ValueError(
                f"{name} has {len(x.shape)} dimensions, {tuple(x.shape)}; it must have {count}, "
                f"{meaning}"
            )


def _is_torch(x: Any) -> bool:
    if not hasattr(x, "data_ptr"):
        return False
    import torch

    return isinstance(x, torch.Tensor)


def _refuse_array(name: str, array: Any) -> None:
    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask Encke would ignore; give {name}.filled(), and "
            "hide keys with key_lengths, documents or window"
        )
    if array.dtype.kind != "f" or array.dtype.name not in _TYPES or not array.dtype.isnative:
        raise _unknown_type(name, array.dtype.str)


def refuse_tensor(name: str, tensor: Any) -> None:
    """Refuses a torch tensor that has no rows in memory."""
    import torch

    if tensor.is_nested or tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} is a {type(tensor).__name__} with layout {tensor.layout}"
            f"{', nested' if tensor.is_nested else ''}, which has no memory of rows that Encke "
            f"could read; give a dense tensor ({name}.to_dense(), or encke.varlen_attention for "
            "sequences of different lengths)"
        )
    if str(tensor.dtype).removeprefix("torch.") not in _TYPES:
        raise _unknown_type(name, tensor.dtype)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on meta; Encke computes on cpu and cuda")
    if is_freed(tensor):
        raise ValueError(
            f"{name} has no memory: its storage was freed, or it wraps another tensor; give a "
            "tensor that holds its elements"
        )


def is_freed(tensor: Any) -> bool:
    """Whether there is no memory (any more) for some elements; torch itself would read it."""
    import torch

    if not tensor.numel() or torch._is_zerotensor(tensor) or tensor.device.type == "meta":
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    storage, size = tensor.untyped_storage(), tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return not storage.data_ptr() or storage.nbytes() < size * (tensor.storage_offset() + last + 1)


def _unknown_type(name: str, dtype: Any) -> TypeError:
    return TypeError(
        f"{name} is of type {dtype}; Encke computes float64, float32, float16 and (torch) bfloat16"
    )
