"""Encke in the place of torchscale's dilated attention: padding, patched modules, slides.

A client's own code (prov-gigapath's copy of torchscale, unmodified, on an exact stand-in for flash
attention) is used where the folder ``peers`` is beside the checkout's shared files or named by
ENCKE_PEERS; golden files, which that code made, serve everywhere.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import encke
import encke.compat.torchscale as compat
from test_golden import FOLDER, TORCHSCALE, read

PEERS = Path(os.environ.get("ENCKE_PEERS", Path(__file__).parents[3] / "shared" / "peers"))
SEGMENTS, RATES = (8, 20, 32, 104, 400), (1, 2, 4, 8, 16)
BRANCHES = dict(segment_lengths=SEGMENTS, dilation_rates=RATES)


class DilatedAttention(nn.Module):
    """What torchscale's module has: projections, sub-LN, and branches in args."""

    def __init__(self, dim=4, heads=16, segments=SEGMENTS, rates=RATES, xpos=None):
        super().__init__()
        width = heads * dim
        self.args = SimpleNamespace(segment_length=list(segments), dilated_ratio=list(rates))
        self.num_heads, self.embed_dim, self.dropout = heads, width, 0.0
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.inner_attn_ln = nn.LayerNorm(width)
        self.xpos = xpos

    def gathering(self):
        raise AssertionError("a patched module does not call its own attention")

    scattering = forward = gathering


def by_definition(module, x, causal=False):
    """The same module with attention by spec section 10, branch by branch."""
    batch, tokens, width = x.shape
    heads = module.num_heads
    q, k, v = (
        projected(x).reshape(batch, tokens, heads, -1).transpose(1, 2)
        for projected in (module.q_proj, module.k_proj, module.v_proj)
    )
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    outs, lses = [], []
    for segment, rate in zip(module.args.segment_length, module.args.dilated_ratio):
        segment = min(segment, tokens)
        at = torch.arange(tokens)
        same = at[:, None] // segment == at // segment
        offset = torch.arange(heads) // -(-heads // rate)
        mine = (at % segment % rate) == offset[:, None]
        seen = same & mine[:, :, None] & mine[:, None, :]
        phantoms = -(-segment // rate) - seen.sum(-1)
        if causal:
            seen, phantoms = seen & (at[:, None] >= at), 0 * phantoms
        count = torch.where(mine, phantoms, 0).to(x.dtype).log()
        count = count[..., None].expand(batch, -1, -1, -1)
        every = torch.cat([scores.masked_fill(~seen, -torch.inf), count], -1)
        lse = every.logsumexp(-1, keepdim=True)
        shares = torch.where(mine[..., None], every - lse, -torch.inf).exp()[..., :-1]
        outs.append(shares @ v)
        lses.append(torch.where(mine[..., None], lse, -torch.inf).detach())
    weights = torch.softmax(torch.stack(lses), 0)
    out = (weights * torch.stack(outs)).sum(0).transpose(1, 2).reshape(x.shape)
    return module.out_proj(module.inner_attn_ln(out))


def patched(**options):
    torch.manual_seed(3)
    module = DilatedAttention(**options).double()
    return module, compat.patch(module)


def gradients(module, out, x):
    parameters = [p for p in module.parameters() if p.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad((out * weights).sum(), [x, *parameters])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 33, 53, 104])
def test_a_patched_module_equals_the_definition(tokens, causal, randn):
    module, _ = patched()
    x = randn(2, tokens, 64, requires_grad=True)
    out, weights = module(x, x, x, is_causal=causal)
    expected = by_definition(module, x, causal)
    assert weights is None
    assert torch.allclose(out, expected, atol=1e-11, rtol=0)
    pairs = zip(gradients(module, out, x), gradients(module, expected, x))
    assert all(torch.allclose(a, b, atol=1e-10, rtol=0) for a, b in pairs)
    with torch.no_grad():
        assert torch.allclose(module(x, x, x, is_causal=causal)[0], expected, atol=1e-11, rtol=0)


def test_patch_keeps_parameters_and_can_be_undone(randn):
    model = nn.Sequential(nn.Identity(), DilatedAttention().double())
    before = copy.deepcopy(model.state_dict())
    made = compat.patch(model)
    assert list(made.modules) == ["1"] and "1" in repr(made)
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(ValueError, match="1 is patched already"):
        compat.patch(model)
    x = randn(1, 9, 64)
    twin = copy.deepcopy(model)
    assert torch.equal(twin[1](x, x, x)[0], model[1](x, x, x)[0])
    made.unpatch()
    with pytest.raises(AssertionError, match="does not call"):
        model[1].forward()
    with compat.patch(model):
        model[1](x, x, x)
    assert "forward" not in model[1].__dict__


def test_what_cannot_be_patched_or_computed_is_refused_in_words(randn):
    with pytest.raises(ValueError, match="no dilated attention in this Linear"):
        compat.patch(nn.Linear(2, 2))
    module, made = patched()
    with pytest.raises(ValueError, match='misplaced="shift" is unknown'):
        compat.patch(DilatedAttention(), misplaced="shift")
    with pytest.raises(ValueError, match='mixing_gradient="none" is unknown'):
        compat.patch(DilatedAttention(), mixing_gradient="none")
    with pytest.raises(ValueError, match="group needs a sharding"):
        compat.patch(DilatedAttention(), group=object())
    x = randn(1, 9, 64)
    with pytest.raises(NotImplementedError, match="incremental_state was given"):
        module(x, x, x, incremental_state={})
    with pytest.raises(NotImplementedError, match="attn_mask was given"):
        module(x, x, x, attn_mask=x)
    with pytest.raises(ValueError, match="self-attention"):
        module(x, x[:, :4], x[:, :4])
    with pytest.raises(ValueError, match="3 slides of 9 tokens together, but the batch is 1 x 8"):
        with made.slides([3, 3, 3]):
            module(x[:, :8], x[:, :8], x[:, :8])
    # A mask of padded keys is ignored, as torchscale does.
    ignored = module(x, x, x, key_padding_mask=torch.ones(1, 9, dtype=torch.bool))[0]
    assert torch.equal(ignored, module(x, x, x)[0])


def test_misplaced_rows_are_refused_with_their_numbers(randn):
    module, _ = patched(segments=(8, 22, 30, 64, 128))
    x = randn(1, 61, 64)
    with pytest.raises(ValueError, match="segments of 30 tokens and rate 4 in a sequence of 61"):
        module(x, x, x)
    x = x[:, :30]
    assert torch.allclose(module(x, x, x)[0], by_definition(module, x), atol=1e-11, rtol=0)


def test_misplaced_rows_can_be_reproduced():
    tensors, config = read(FOLDER / "gigapath_07_misplaced.safetensors")
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    names = ("segment_lengths", "dilation_rates")
    branches = {name: config[name] for name in names}
    out = compat.with_misplaced_rows(q, k, v, **branches, **TORCHSCALE)
    assert (out - tensors["out"]).abs().max() <= 1e-12 * tensors["out"].abs().max()
    out.backward(tensors["do"])
    for name, tensor in (("dq", q), ("dk", k), ("dv", v)):
        off = (tensor.grad - tensors[name]).abs().max() / tensors[name].abs().max()
        assert off <= 1e-12, f"{name} is off by {off:.1e}"


@pytest.mark.parametrize("grad", [False, True])
def test_slides_of_a_batch_are_computed_as_if_alone(grad, randn):
    module, made = patched()
    slides = [randn(1, tokens, 64) for tokens in (21, 53, 1)]
    alone = [module(x, x, x)[0] for x in slides]
    packed = torch.cat(slides, 1).requires_grad_(grad)
    with made.slides([21, 53, 1]):
        together = module(packed, packed, packed)[0].split([21, 53, 1], 1)
    for one, other in zip(alone, together):
        assert torch.allclose(one, other, atol=1e-12, rtol=0)
    padded = torch.full((3, 53, 64), 1e3, dtype=torch.float64)
    for entry, slide in zip(padded, slides):
        entry[: slide.shape[1]] = slide[0]
    with made.slides([21, 53, 1]):
        together = module(padded, padded, padded)[0]
    for one, entry in zip(alone, together):
        assert torch.allclose(one[0], entry[: one.shape[1]], atol=1e-12, rtol=0)


def test_rows_of_a_patched_module_sum_to_one_with_their_padding(randn):
    module, made = patched()
    x = randn(1, 53, 64)
    rows = made.attention_rows("", x, [0, 52])
    assert rows.shape == (1, 2, 16, 53)
    values = module.v_proj(x).reshape(53, 16, 4)
    out = torch.einsum("rhn,nhd->rhd", rows[0], values).reshape(2, 64)
    expected = module(x, x, x)[0][0, [0, 52]]
    out = module.out_proj(module.inner_attn_ln(out))
    assert torch.allclose(out, expected, atol=1e-11, rtol=0)
    assert (rows.sum(-1) <= 1 + 1e-12).all() and (rows.sum(-1) < 0.99).any()


def test_the_exact_gradient_is_that_of_the_output(randn):
    module = DilatedAttention().double()
    compat.patch(module, mixing_gradient="exact")
    x, way = randn(1, 37, 64, requires_grad=True), randn(1, 37, 64)
    out = module(x, x, x)[0]
    assert torch.allclose(out, by_definition(module, x), atol=1e-11, rtol=0)
    slope = (torch.autograd.grad(out.square().sum(), x)[0] * way).sum()
    with torch.no_grad():
        ends = [module(y, y, y)[0].square().sum() for y in (x + 1e-6 * way, x - 1e-6 * way)]
    assert torch.allclose((ends[0] - ends[1]) / 2e-6, slope, rtol=1e-7)


def test_the_example_is_the_same_on_two_processes(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "slide_encoder.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    image = tmp_path / "heat.png"
    embeddings = []
    for command in ([script, f"--heat-map={image}"], [*torchrun, script]):
        command = [sys.executable, *map(str, command), "--tiles=90", "--width=64"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        words = next(line.split() for line in ran.stdout.splitlines() if "embedding" in line)
        embeddings.append([float(word) for word in words[1:]])
    assert embeddings[0] == pytest.approx(embeddings[1], abs=3e-5)
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size > 200


def test_half_precision_with_large_scores_has_no_nan(randn):
    q, k, v = (60 * randn(1, 53, 16, 48) for _ in range(3))
    expected = encke.attention(q, k, v, **BRANCHES, **TORCHSCALE)
    halves = [x.half().requires_grad_() for x in (q, k, v)]
    out = encke.attention(*halves, **BRANCHES, **TORCHSCALE)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in halves)
    wide = encke.attention(*(x.double() for x in halves), **BRANCHES, **TORCHSCALE)
    assert expected.isfinite().all() and (out - wide).abs().max() < 1e-2 * wide.abs().max()


peers = pytest.mark.skipif(
    not (PEERS / "encoder.py").exists(),
    reason="the client's own code is not here (see ENCKE_PEERS); golden files stand for it",
)


@pytest.fixture(scope="module")
def encoder_module():
    pytest.importorskip("einops", reason="the client's own code needs einops")
    sys.path.insert(0, str(PEERS))
    import encoder

    yield encoder
    sys.path.remove(str(PEERS))


@peers
@pytest.mark.parametrize("tokens, dim", [(37, 4), (53, 3), (101, 6), (161, 2)])
def test_a_whole_encoder_equals_its_own_code(encoder_module, tokens, dim, randn):
    model = encoder_module.encoder(dim=dim, layers=3, segment_lengths=SEGMENTS)
    x = randn(1, tokens, 16 * dim, requires_grad=True)

    def run():
        out = model(src_tokens=None, token_embeddings=x)["encoder_out"]
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return out, torch.autograd.grad((out * weights).sum(), [x, *parameters], allow_unused=True)

    expected, its_gradients = run()
    made = compat.patch(model)
    assert len(made.modules) == 3
    out, ours = run()
    assert (out - expected).abs().max() <= 1e-10 * expected.abs().max()
    for one, other in zip(ours, its_gradients):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).abs().max() <= 1e-10 * max(1.0, other.abs().max())
