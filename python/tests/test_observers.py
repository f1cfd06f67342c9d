"""Eager calls equal their registered operators to everything in torch that looks at operators,
around the forward pass, around the backward pass alone, or around both."""

import contextlib
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import encke
from encke import _observed

SHAPE = (2, 12, 2, 4)
FORWARD, BACKWARD = "encke::attention", "encke::attention_backward"
OPTIONS = {
    "dense": {},
    "documents": dict(causal=True, documents=[5, 7], window=(3, None)),
    "padded": dict(causal=True, key_lengths=[12, 7]),
    "slots": dict(
        segment_lengths=[4, 12], dilation_rates=[1, 3], mode="mix", mixing_gradient="detached"
    ),
    "recompute": dict(causal=True, checkpoint="recompute", alibi_slopes=True),
    "dropout": dict(dropout=0.5, seed=7),
    "lse": dict(return_lse=True),
}


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name() if hasattr(function, "name") else str(function))
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "name", None)
        self.names.add(name() if callable(name) else str(function))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def dispatch_mode():
    names = set()
    with Dispatched() as mode:
        yield names
    names |= mode.names


@contextlib.contextmanager
def function_mode():
    names = set()
    with Called() as mode:
        yield names
    names |= mode.names


@contextlib.contextmanager
def profiler():
    names = set()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield names
    names |= {event.key for event in seen.key_averages()}


@contextlib.contextmanager
def older_profiler():
    names = set()
    with torch.autograd.profiler.profile() as seen:
        yield names
    names |= {event.name for event in seen.function_events}


@contextlib.contextmanager
def flop_counter():
    names = set()
    with FlopCounterMode(display=False) as counter:
        yield names
    of_operators = counter.get_flop_counts()["Global"]
    names |= {str(name).replace(".", "::") for name, flops in of_operators.items() if flops > 0}


OBSERVERS = [dispatch_mode, function_mode, profiler, older_profiler, flop_counter]


def given(randn):
    return [randn(*SHAPE, requires_grad=True) for _ in range(3)]


def forward(inputs, options):
    found = encke.attention(*inputs[:3], **options)
    return found if isinstance(found, tuple) else (found,)


def backward(outputs, inputs):
    return torch.autograd.grad(sum(x.sin().sum() for x in outputs), inputs)


def check_equal(found, wanted):
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_every_observer_sees_both_passes(observer, options, randn):
    inputs = given(randn)
    outputs = forward(inputs, options)
    gradients = backward(outputs, inputs)
    with observer() as seen:
        observed = forward(inputs, options)
    assert FORWARD in seen and BACKWARD not in seen
    check_equal(observed, outputs)
    # Forward inside and backward outside.
    check_equal(backward(observed, inputs), gradients)
    # The other way round: what is saved was made by a call that was not observed.
    outputs = forward(inputs, options)
    with observer() as seen:
        observed = backward(outputs, inputs)
    # torch ends a function mode where autograd begins.
    assert (BACKWARD in seen or observer is function_mode) and FORWARD not in seen
    check_equal(observed, gradients)


def test_sinks_are_observed(randn):
    inputs = [*given(randn), randn(2, requires_grad=True)]
    options = dict(causal=True, sinks=inputs[3])
    outputs = forward(inputs, options)
    gradients = backward(outputs, inputs)
    outputs = forward(inputs, options)
    with dispatch_mode() as seen:
        observed = backward(outputs, inputs)
    assert BACKWARD in seen
    check_equal(observed, gradients)


def test_a_profiler_of_all_threads_sees_the_calls_of_others(randn):
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    inputs = given(randn)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        thread = threading.Thread(target=lambda: forward(inputs, {}))
        thread.start()
        thread.join()
    assert FORWARD in {event.key for event in seen.key_averages()}


def test_a_default_device_is_no_observer(randn):
    inputs = given(randn)
    with torch.device("cpu"):
        assert not _observed.observed()
        outputs = forward(inputs, {})
        with function_mode() as seen:
            forward(inputs, {})
    assert FORWARD in seen
    check_equal(forward(inputs, {}), outputs)


@pytest.mark.parametrize("options", [OPTIONS["documents"], OPTIONS["slots"]], ids=str)
def test_batches_of_gradients(options, randn):
    """is_grads_batched, which vectorised jacobians use, maps over the backward pass alone."""
    inputs = given(randn)
    (out,) = forward(inputs, options)
    directions = randn(3, *SHAPE)
    found = torch.autograd.grad(out, inputs, directions, is_grads_batched=True)
    for at in range(3):
        (out,) = forward(inputs, options)
        wanted = torch.autograd.grad(out, inputs, directions[at])
        check_equal([x[at] for x in found], wanted)
    small = [x.detach()[:1, :5, :1, :2] for x in inputs]
    options = dict(causal=True)
    slow, fast = (
        torch.autograd.functional.jacobian(
            lambda *x: encke.attention(*x, **options), tuple(small), vectorize=vectorize
        )
        for vectorize in (False, True)
    )
    check_equal(fast, slow)


def test_hooks_of_autograd(randn):
    """Hooks of tensors, of saved tensors and of nodes, and the detection of anomalies."""
    inputs = given(randn)
    outputs = forward(inputs, {})
    gradients = backward(outputs, inputs)
    packed, unpacked, passed = [], [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.numpy(force=True).copy()

    def unpack(array):
        unpacked.append(array.shape)
        return torch.from_numpy(array)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), torch.autograd.detect_anomaly():
        outputs = forward(inputs, {})
        handle = inputs[0].register_hook(lambda gradient: passed.append(gradient.clone()))
        outputs[0].grad_fn.register_hook(lambda *_: passed.append(None))
        check_equal(backward(outputs, inputs), gradients)
    handle.remove()
    # q, k, v, out and lse; the sum of sines saves its own.
    assert len(packed) >= 5 and len(unpacked) >= 5 and torch.Size(SHAPE[:3]) in packed
    assert passed[0] is None
    check_equal(passed[1:], gradients[:1])
    with torch.autograd.graph.save_on_cpu():
        outputs = forward(inputs, {})
    check_equal(backward(outputs, inputs), gradients)
    with pytest.raises(RuntimeError, match="saved_tensors_hooks are disabled"):
        with torch.autograd.graph.disable_saved_tensors_hooks("saved_tensors_hooks are disabled"):
            with torch.autograd.graph.save_on_cpu():
                forward(inputs, {})


def test_a_trace_of_both_passes(randn):
    """make_fx through torch.autograd.grad holds both operators, and no result as a constant."""
    first, second = (given(randn) for _ in range(2))

    def both(*inputs):
        return backward(forward(inputs, dict(causal=True)), inputs)

    traced = make_fx(both)(*first)
    names = {str(node.target) for node in traced.graph.nodes}
    assert {"encke.attention.default", "encke.attention_backward.default"} <= names
    check_equal(traced(*second), both(*second))


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
def test_without_gradients(guard, randn):
    inputs = given(randn)
    with guard():
        (plain,) = forward(inputs, {})
        with dispatch_mode() as seen:
            (observed,) = forward(inputs, {})
    assert FORWARD in seen and not plain.requires_grad and not observed.requires_grad
    assert torch.equal(plain, observed)
    assert plain.is_inference() == observed.is_inference() == (guard is torch.inference_mode)
