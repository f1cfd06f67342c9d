"""A function around attention for torch.compile's default backend. Not a test by itself."""

from __future__ import annotations

import torch


class Graphs:
    """The default backend, and how often it was asked for a graph."""

    def __init__(self):
        self.made = 0

    def __call__(self, graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        self.made += 1
        return compile_fx(graph, inputs)


def missing_compiler():
    """Why the default backend cannot be tried, if it cannot."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "torch.compile's default backend needs a C++ compiler, such as g++"
    return None


def tensors(tokens=12):
    generator = torch.Generator().manual_seed(6)
    shapes = [(2, tokens, 4, 8), (2, tokens, 2, 8), (2, tokens, 2, 8), (4,)]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def model(attend, q, k, v, sinks, **cut):
    """Operations before and after, of which the compiler makes code of its own; all outputs and all
    kinds of inputs."""
    options = dict(causal=True, window=(6, 0), documents=[5, 7], sinks=sinks.tanh(), **cut)
    out, lse = attend(q.sin() * 2, k.cos(), v * v, return_lse=True, **options)
    return (out * q).square().sum() + lse.sigmoid().sum()
