"""The golden files, forward and backward: results of other packages.

Which options a file gets follows from its name and its recorded configuration, so a file that is
added is tested without a line being written.
"""

import json
import struct
from pathlib import Path

import numpy
import pytest
import torch

import encke

FOLDER = Path(__file__).parents[2] / "testdata" / "golden"
TORCHSCALE = dict(
    mode="mix", offsets="head-block", mixing_gradient="detached", padding="torchscale"
)
MODES = {
    "dense": {},
    "fkodom": dict(mode="fkodom"),
    "darcstar": dict(group_scale="groups"),
    "torchscale": TORCHSCALE,
    "gigapath": TORCHSCALE,
    "torchscale_fullgrad": dict(mode="mix", offsets="head-block"),
}


def files():
    """All files but those in which the other package has misplaced rows."""
    for path in sorted(FOLDER.glob("*.safetensors")):
        if "quirk" not in path.stem and "misplaced" not in path.stem:
            yield path


def read(path):
    """Tensors and configuration of a safetensors file."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(size)), file.read()
    config = json.loads(header.pop("__metadata__")["config"])
    types = {"F64": numpy.float64, "F32": numpy.float32}
    tensors = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        array = numpy.frombuffer(data[begin:end], types[about["dtype"]])
        tensors[name] = torch.tensor(array.reshape(about["shape"]))
    return tensors, config


def options(path, config):
    kind = "torchscale_fullgrad" if "fullgrad" in path.stem else path.stem.split("_")[0]
    given = dict(MODES[kind], causal=config["causal"])
    if "segment_lengths" in config:
        given["segment_lengths"] = config["segment_lengths"]
        given["dilation_rates"] = config["dilation_rates"]
    return given


def test_there_are_files():
    assert len(list(files())) >= 20


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("path", list(files()), ids=lambda path: path.stem)
def test_results_equal_those_of_other_packages(path, ranks):
    tensors, config = read(path)
    given = options(path, config)
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    out, lse = encke.attention(q, k, v, **given, ranks=ranks, return_lse=True)
    out.backward(tensors["do"].double())
    got = dict(out=out, dq=q.grad, dk=k.grad, dv=v.grad, lse=lse)
    for name in ("out", "dq", "dk", "dv", "lse"):
        if name not in tensors:
            continue
        expected = tensors.get(f"{name}_f64", tensors[name]).reshape(got[name].shape)
        off = (got[name].detach() - expected).abs().max() / expected.abs().max()
        assert off <= 1e-12, f"{name} is off by {off:.1e}"
