"""The modules: results of the packages they replace, parameter names, and invalid arguments."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from test_golden import files, options, read
from torch import nn

import encke
from encke.distributed import RingDilatedAttention
from encke.nn import (
    DilatedAttention,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNet,
    LongNetEncoder,
    LongNetLM,
    MultiheadDilatedAttention,
    ScaledRotaryEmbedding,
)

PATTERN = dict(dilation_rates=[1, 2], segment_lengths=[8, 16])


@pytest.mark.parametrize("path", list(files()), ids=lambda path: path.stem)
def test_the_module_equals_other_packages(path):
    tensors, config = read(path)
    given = options(path, config)
    causal = given.pop("causal")
    attention = DilatedAttention(**given)
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    out = attention(q, k, v, is_causal=causal)
    out.backward(tensors["do"].double())
    for name, got in dict(out=out, dq=q.grad, dk=k.grad, dv=v.grad).items():
        expected = tensors.get(f"{name}_f64", tensors[name]).double()
        off = (got - expected).abs().max() / expected.abs().max()
        assert off <= 1e-12, f"{name} is off by {off:.1e}"


def by_hand(module, x, **attention):
    """The multi-head module written out."""
    heads = module.num_heads
    q, k, v = (
        nn.functional.linear(x, p.weight, p.bias).unflatten(-1, (h, -1))
        for p, h in (
            (module.q_proj, heads),
            (module.k_proj, module.num_kv_heads),
            (module.v_proj, module.num_kv_heads),
        )
    )
    out = encke.attention(q, k, v, **attention).flatten(-2)
    if module.norm is not None:
        shape = (module.embed_dim,)
        out = nn.functional.layer_norm(
            out, shape, module.norm.weight, module.norm.bias, module.norm.eps
        )
    return nn.functional.linear(out, module.out_proj.weight, module.out_proj.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_multihead_is_projections_attention_norm_projection(randn, bias, layer_norm):
    module = MultiheadDilatedAttention(
        32, 4, **PATTERN, bias=bias, layer_norm=layer_norm, dtype=torch.float64
    )
    x = randn(2, 37, 32)
    out, weights = module(x, x, x, is_causal=True)
    assert weights is None
    assert torch.allclose(out, by_hand(module, x, **PATTERN, causal=True), atol=1e-12)
    assert torch.equal(module(x, is_causal=True)[0], out)
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    assert names == {"q_proj", "k_proj", "v_proj", "out_proj"} | ({"norm"} if layer_norm else set())


def test_grouped_keys_and_dense_attention(randn):
    module = MultiheadDilatedAttention(32, 4, num_kv_heads=2, dtype=torch.float64)
    x = randn(1, 20, 32)
    q = module.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (module.k_proj, module.v_proj))
    out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    out = module.out_proj(module.norm(out.transpose(1, 2).flatten(-2)))
    assert torch.allclose(module(x)[0], out, atol=1e-12)


def test_the_gain_is_that_of_values_and_outputs():
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(256, 4, **PATTERN, gamma_init=3.0)
    xavier = math.sqrt(2 / 512)
    for projection, gain in (
        (module.q_proj, 1.0),
        (module.k_proj, 1.0),
        (module.v_proj, 3.0),
        (module.out_proj, 3.0),
    ):
        assert abs(projection.weight.std().item() / (gain * xavier) - 1) < 0.02
        assert not projection.bias.any()


def test_positional_arguments_are_those_of_other_packages():
    module = MultiheadDilatedAttention(
        32, 4, [1, 2], [8, 16], 0.0, False, True, 1e-6, 0.5, "cpu", torch.float64
    )
    assert module.attention.segment_lengths == [8, 16] and module.norm.eps == 1e-6
    assert module.q_proj.bias is None and module.q_proj.weight.dtype == torch.float64
    attention = DilatedAttention([8, 16], [1, 2], 0.25, 0.0, None)
    assert attention.softmax_scale == 0.25 and "segment_lengths=[8, 16]" in repr(attention)
    layer = DilatedTransformerEncoderLayer(32, 4, [8, 16], [1, 2], 64, 0.1, "gelu", 1e-6, 0.5)
    assert layer.self_attn.attention.dilation_rates == [1, 2] and layer.linear1.out_features == 64


def test_the_layer_is_two_residual_blocks(randn):
    layer = DilatedTransformerEncoderLayer(32, 4, [8, 16], [1, 2], 48, 0.0, dtype=torch.float64)
    x = randn(2, 21, 32)
    attended = x + layer.self_attn(layer.norm1(x), is_causal=True)[0]
    hidden = layer.norm3(torch.relu(layer.linear1(layer.norm2(attended))))
    assert torch.allclose(layer(x, is_causal=True), attended + layer.linear2(hidden), atol=1e-12)
    layer.residual = False
    attended = layer.self_attn(layer.norm1(x), is_causal=True)[0]
    hidden = layer.norm3(torch.relu(layer.linear1(layer.norm2(attended))))
    assert torch.allclose(layer(x, is_causal=True), layer.linear2(hidden), atol=1e-12)
    names = {name.split(".")[0] for name in layer.state_dict()}
    assert names == {"norm1", "self_attn", "norm2", "linear1", "norm3", "linear2"}


def test_a_decoder_layer_is_three_residual_blocks(randn):
    layer = DilatedTransformerDecoderLayer(32, 4, [8, 16], [1, 2], 48, 0.0, dtype=torch.float64)
    x, memory = randn(2, 21, 32), randn(2, 21, 32)
    attended = x + layer.self_attn(layer.norm1(x), is_causal=True)[0]
    crossed = attended + layer.multihead_attn(layer.norm2(attended), memory, is_causal=False)[0]
    hidden = layer.norm4(torch.relu(layer.linear1(layer.norm3(crossed))))
    out = layer(x, memory, tgt_is_causal=True)
    assert torch.allclose(out, crossed + layer.linear2(hidden), atol=1e-12)
    assert layer.self_attn.norm is None and layer.multihead_attn.norm is not None
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_longnet_has_the_names_and_gains_of_the_other_package(randn):
    model = LongNet(32, 4, 2, 3, 48, [8, 16], [1, 2], 0.0, "gelu", 1e-6, "cpu", torch.float64)
    names = set(model.state_dict())
    assert {
        "encoder.layers.1.self_attn.norm.weight",
        "encoder.layers.0.norm3.bias",
        "decoder.layers.2.multihead_attn.q_proj.weight",
        "decoder.layers.0.norm4.weight",
    } <= names and "decoder.layers.0.self_attn.norm.weight" not in names
    first, last = model.encoder.layers[0], model.decoder.layers[2]
    assert first.gamma_init == pytest.approx(math.sqrt(math.log(9) * math.log(4) / 3))
    assert last.gamma_init == pytest.approx(math.sqrt(math.log(9)))
    assert last.norm4.eps == 1e-6 and last.linear1.weight.dtype == torch.float64
    x = randn(1, 40, 32)
    changed = x.clone()
    changed[:, 25] += 1
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :25], after[:, :25]) and not torch.equal(before, after)
    before, after = model(x, is_causal=False), model(changed, is_causal=False)
    assert not torch.equal(before[:, :25], after[:, :25])


def test_positions_turn_pairs_of_columns(randn):
    for tokens in (7, 8):
        x = randn(2, tokens, 6)
        out = ScaledRotaryEmbedding(6).double()(x)
        for t in range(tokens):
            for pair in range(3):
                scale = ((2 * pair + 0.4 * 6) / (1.4 * 6)) ** ((t - math.ceil(tokens / 2)) / 512)
                turn = scale * cmath.exp(1j * t / 10000 ** (pair / 3))
                for row, turned in zip(x[:, t], out[:, t]):
                    want = complex(*row[2 * pair : 2 * pair + 2]) * turn
                    got = complex(*turned[2 * pair : 2 * pair + 2])
                    assert abs(got - want) < 1e-6


def test_a_language_model_learns():
    torch.manual_seed(3)
    pattern = dict(segment_lengths=[8, 16], dilation_rates=[1, 2])
    model = LongNetLM(11, 32, 4, 1, 1, 64, **pattern)
    text = torch.arange(33).remainder(11)[None]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        logits = model(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert {"token_embedding.weight", "pos_embedding.scale", "out.bias"} <= set(model.state_dict())


def test_an_encoder_has_gradients_and_is_causal(randn):
    torch.manual_seed(1)
    model = LongNetEncoder(2, 32, 4, [8, 16], [1, 2], 64, 0.0, mode="mix")
    x = randn(1, 40, 32, dtype=torch.float32)
    before = model(x, is_causal=True)
    changed = x.clone()
    changed[:, 25] += 1
    after = model(changed, is_causal=True)
    assert torch.equal(before[:, :25], after[:, :25]) and not torch.equal(
        before[:, 25:], after[:, 25:]
    )
    before.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_state_dict_round_trip(randn):
    module = MultiheadDilatedAttention(32, 4, **PATTERN)
    other = MultiheadDilatedAttention(32, 4, **PATTERN, mode="mix")
    other.load_state_dict(module.state_dict())
    x = randn(1, 20, 32, dtype=torch.float32)
    assert not torch.equal(module(x)[0], other(x)[0])
    other.attention.options["mode"] = "group"
    assert torch.equal(module(x)[0], other(x)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiheadDilatedAttention(30, 4, **PATTERN), "embed_dim 30 .* num_heads 4"),
        (lambda: MultiheadDilatedAttention(32, 4, **PATTERN, num_kv_heads=3), "num_kv_heads 3"),
        (lambda: MultiheadDilatedAttention(32, 4, **PATTERN, dropout=1.1), "dropout is 1.1"),
        (lambda: DilatedAttention([4], [1], attention_dropout=-0.2), "dropout is -0.2"),
        (lambda: DilatedAttention([4], [1], op="flash"), "op is 'flash'"),
        (lambda: DilatedTransformerEncoderLayer(32, 4, [4], [1], activation="tanh"), "known: relu"),
        (
            lambda: MultiheadDilatedAttention(
                32, 4, **PATTERN, attention=RingDilatedAttention([4], [1])
            ),
            "its own",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_more_branches_than_heads_are_refused_in_the_call(randn):
    module = MultiheadDilatedAttention(16, 2, [1, 1, 1], [4, 4, 4])
    with pytest.raises(ValueError, match="3 branches but only 2 heads"):
        module(randn(1, 8, 16, dtype=torch.float32))


def test_attention_dropout_while_training(randn):
    torch.manual_seed(2)
    layer = MultiheadDilatedAttention(32, 4, **PATTERN, dropout=0.4)
    plain = MultiheadDilatedAttention(32, 4, **PATTERN)
    plain.load_state_dict(layer.state_dict())
    x = randn(1, 24, 32).float()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(layer(x)[0])
    assert torch.equal(*results) and "attention_dropout=0.4" in repr(layer)
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])
    with pytest.raises(ValueError, match="attention is given"):
        MultiheadDilatedAttention(32, 4, dropout=0.1, attention=DilatedAttention())
