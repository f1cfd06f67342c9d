"""Which calls go through the registered operators in eager mode.

The decision here: an operator with forty arguments costs tens of microseconds in torch's
dispatcher, so a plain call does not use it. It does as soon as something could see the difference:
a dispatch mode (FLOP counters, selective checkpointing, fake tensors, ``make_fx``), a function
mode, a transform of ``torch.func``, ``torch.jit.trace``, a profiler of this or of all threads, or a
class of tensors of its own. A backward pass asks again, whatever saw its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd import profiler
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_traced = torch._C._get_tracing_state
_profiled = torch.autograd._profiler_enabled
_function_modes = torch._C._len_torch_function_stack
# Whether a gradient is one of several (is_grads_batched): autograd maps over them without
# torch.func's transforms.
is_batched = torch._C._functorch.is_legacy_batchedtensor
_NO_FORWARD_MODE = (
    "encke.attention has no forward-mode derivative (jvp, jacfwd, dual tensors); use reverse mode "
    "(grad, vjp, jacrev), or torch.nn.functional.scaled_dot_product_attention"
)
# Modes that make a graph.
_RECORDING_MODES = (
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FAKE,
)
# Classes that keep their elements in memory.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def observed() -> bool:
    """Whether anything looks at the operators of this thread."""
    if _modes() or _transforms() or _profiled() or _traced() is not None:
        return True
    # A profiler of another thread may record all of them.
    if profiler._is_profiler_enabled:
        return True
    # torch.set_default_device is a mode, too, which looks at functions that make tensors.
    return _function_modes() > 0 and any(
        not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    )


def transformed() -> bool:
    """Whether a transform of torch.func is under way; operators themselves are functional."""
    return _transforms() and any(
        level.key() != torch._C._functorch.TransformType.Functionalize
        for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def is_plain(*tensors: Tensor) -> bool:
    """Whether all are torch's own tensors."""
    return all(type(tensor) in PLAIN for tensor in tensors)


def refuse_tangents(**given: Any) -> None:
    """Refuses forward-mode differentiation, which would lose its tangents without a word."""
    dual = forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None
        for x in given.values()
    )
    if dual or _transforms() and _is_jvp():
        raise NotImplementedError(_NO_FORWARD_MODE)


def refuse_unseen(*, in_torch: bool) -> None:
    """Refuses calls that are no operators, where a trace or a graph would keep their first results,
    or a transform of torch.func lose their derivatives. ``in_torch``: a call of torch's operators
    alone, which can be traced and mapped over, but has no derivatives."""
    levels = torch._C._functorch.get_interpreter_stack() or () if _transforms() else ()
    kinds = {level.key().name for level in levels} - {"Functionalize"}
    if kinds & {"Grad", "Jvp"} or kinds and not in_torch:
        raise NotImplementedError(
            "this call has no rules for torch.func (grad, vjp, jvp, vmap): its derivatives would "
            "be lost; call it outside, or differentiate encke.attention"
        )
    if in_torch:
        return
    recorded = _modes() and any(
        torch._C._get_dispatch_mode(key) is not None for key in _RECORDING_MODES
    )
    if recorded or _traced() is not None:
        raise NotImplementedError(
            "this call is no operator of torch: torch.jit.trace, make_fx and torch.export would "
            "keep its first result; call it outside of them"
        )


def in_gradients(*tensors: Any) -> bool:
    """Whether a call that torch.compile traces is inside of gradients of torch.func; refuses
    forward-mode differentiation, whose tangents would be lost."""
    levels = _levels()
    if "Jvp" in levels:
        raise NotImplementedError(_NO_FORWARD_MODE)
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(_NO_FORWARD_MODE)
    return "Grad" in levels


def refuse_gradients_in_graph(*tensors: Any) -> None:
    """The same for operators that have no rule for torch.func."""
    if in_gradients(*tensors):
        raise NotImplementedError(
            "this attention is not in a graph of torch.compile inside of torch.func.grad, vjp or "
            "jacrev; use autograd: torch.autograd.grad, or backward()"
        )


def _levels() -> str:
    """The kinds of transforms that are under way."""
    from encke import _torch

    # Here, because torch.compile is under way: it is slow to import.
    torch.compiler.allow_in_graph(_torch.transformed_operator)
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return " ".join(level.key().name for level in stack)


# torch.compile calls it while it traces, and keeps the result: what
# torch.compiler.assume_constant_result does, which would import the compiler.
_levels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_jvp() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def dispatched(call: Callable[..., Any], **given: Any) -> Any:
    """An operator's call, with a sentence for classes of tensors that have no rule for it."""
    refuse_tangents(**given)
    try:
        return call()
    except (RuntimeError, TypeError) as error:
        others = {name: x for name, x in given.items() if not is_plain(x)}
        foreign = isinstance(error, NotImplementedError) or "dispatch" in str(error)
        foreign = foreign or "DTensor" in str(error)
        if not others or not foreign:
            raise
        name, tensor = next(iter(others.items()))
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which has no rule for Encke's operators; give "
            f"plain tensors: {name}.to_local() of a DTensor (encke.distributed.ring_attention is "
            "for sequences in shards), encke.varlen_attention for nested tensors, and key_lengths "
            "for masked ones"
        ) from error


def refuse_second_order(*_: Any) -> Any:
    """The gradient of the backward pass."""
    raise RuntimeError(
        "encke.attention has gradients of first order only, but was differentiated twice "
        "(create_graph=True, then through the gradients); detach the gradients, or use "
        "torch.nn.functional.scaled_dot_product_attention where second order is needed"
    )
