"""attn_implementation="encke" in transformers: logits and gradients of causal models equal eager's.

Eager attention computes its softmax in float32 whatever the type of its inputs; here it is kept in
float64, so that the two agree to rounding.
"""

import copy

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)

import encke.transformers  # noqa: E402
from encke.integrations.visibility import UnsupportedMask  # noqa: E402
from transformers_models import CAUSAL, OTHERS, causal_pair, gradients  # noqa: E402

TOKENS = 13
# The documents of each batch entry.
PACKED = [(13,), (4, 1, 8), (7, 6)]
CLOSE = dict(rtol=1e-9, atol=1e-9)
# The projections that make queries, in the names of their parameters.
QUERIES = ("q_proj", "q_b_proj", "c_attn", "qkv_proj", "query_key_value")


@pytest.fixture(autouse=True)
def softmax_in_the_type_of_its_input(monkeypatch):
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim=dim)
    )


def tokens(batch=3, count=TOKENS):
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(7))


def padded(side):
    """A padding mask of lengths 13, 8 and 2, and the positions of its tokens."""
    lengths = torch.tensor([[13], [8], [2]])
    at = torch.arange(TOKENS).expand(3, -1)
    mask = at < lengths if side == "right" else at >= TOKENS - lengths
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return dict(attention_mask=mask.long(), position_ids=positions), mask


def inputs(kind):
    """Arguments of a model, and which tokens count."""
    if kind == "plain":
        return dict(), torch.ones(3, TOKENS, dtype=torch.bool)
    if kind == "packed":
        positions = [torch.cat([torch.arange(n) for n in of]) for of in PACKED]
        given = dict(position_ids=torch.stack(positions), use_cache=False)
        return given, torch.ones(3, TOKENS, dtype=torch.bool)
    return padded(kind)


def one_by_one(model):
    """The logits of the packed documents, each in a call of its own."""
    rows = []
    for entry, lengths in enumerate(PACKED):
        documents = tokens()[entry : entry + 1].split(lengths, 1)
        rows.append(torch.cat([model(document).logits for document in documents], 1))
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_and_gradients(name, kind, randn):
    eager, ours = causal_pair(name)
    given, counted = inputs(kind)
    # GPT-OSS does not tell its masks about packed documents.
    alone = kind == "packed" and name == "gpt-oss"
    expected = one_by_one(eager) if alone else eager(tokens(), **given).logits
    found = ours(tokens(), **given).logits
    torch.testing.assert_close(found[counted], expected[counted], **CLOSE)
    weights = randn(*expected.shape)
    wanted = gradients(eager, expected, counted, weights)
    got = gradients(ours, found, counted, weights)
    assert wanted.keys() == got.keys()
    for parameter, gradient in wanted.items():
        if gradient is None:
            assert got[parameter] is None, parameter
            continue
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(got[parameter] / scale, gradient / scale, **CLOSE)
    query = next(of for of in got if any(part in of for part in QUERIES))
    assert got[query].abs().max() > 1e-3, "attention has hardly any effect on this loss"


def cache_of(kind, model, batch):
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 4)


def in_steps(model, steps, cache, ids, mask, positions):
    """The logits of a sequence given in pieces."""
    found, at = [], 0
    with torch.no_grad():
        for step in steps:
            end = at + step
            out = model(
                ids[:, at:end],
                attention_mask=None if mask is None else mask[:, :end],
                position_ids=positions[:, at:end],
                past_key_values=cache,
            )
            found.append(out.logits)
            at = end
    return torch.cat(found, 1)


@pytest.mark.parametrize("steps", [[1] * TOKENS, [6, 4, 3]], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "llama4"])
def test_caches(name, cache, steps):
    eager, ours = causal_pair(name)
    for side in ("left", None):
        given, counted = padded("left") if side else inputs("plain")
        mask = given.get("attention_mask")
        positions = given.get("position_ids", torch.arange(TOKENS).expand(3, -1))
        caches = [cache_of(cache, model, 3) for model in (eager, ours)]
        expected = in_steps(eager, steps, caches[0], tokens(), mask, positions)
        found = in_steps(ours, steps, caches[1], tokens(), mask, positions)
        torch.testing.assert_close(found[counted], expected[counted], **CLOSE)
        with torch.no_grad():
            whole = ours(tokens(), attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(found[counted], whole[counted], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name, randn):
    """Left-padded: logits, gradients, and a cache in chunks."""
    test_logits_and_gradients(name, "left", randn)
    eager, ours = causal_pair(name)
    given, counted = padded("left")
    arguments = (tokens(), given["attention_mask"], given["position_ids"])
    expected, found = (
        in_steps(model, [6, 4, 3], cache_of("dynamic", model, 3), *arguments)
        for model in (eager, ours)
    )
    torch.testing.assert_close(found[counted], expected[counted], **CLOSE)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek-v3", "gpt2"])
def test_generate(name, cache):
    eager, ours = causal_pair(name)
    given, _ = padded("left")
    options = dict(
        attention_mask=given["attention_mask"],
        max_new_tokens=8,
        do_sample=False,
        cache_implementation=cache,
        eos_token_id=None,
    )
    assert torch.equal(
        ours.generate(tokens(), **options), eager.generate(tokens(), **options)
    )


def test_beams():
    eager, ours = causal_pair("mistral")
    options = dict(max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None)
    assert torch.equal(ours.generate(tokens(), **options), eager.generate(tokens(), **options))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_sequence_lengths_as_the_flash_integrations_pass_them(name):
    _, ours = causal_pair(name)
    lengths = [5, 1, 7]
    bounds = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    ids = tokens(batch=1)
    packed = ours(
        ids,
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=7,
        max_length_k=7,
    ).logits
    for first, end in zip(bounds[:-1], bounds[1:]):
        alone = ours(ids[:, first:end]).logits
        torch.testing.assert_close(packed[:, first:end], alone, **CLOSE)


def test_positions_that_restart_divide_documents_also_with_a_cache():
    """Training often leaves use_cache on, with which transformers itself does not look."""
    _, ours = causal_pair("mistral")
    given, _ = inputs("packed")
    given["use_cache"] = True
    found = ours(tokens(), **given).logits
    torch.testing.assert_close(found[1:2, :4], ours(tokens()[1:2, :4]).logits, **CLOSE)
    torch.testing.assert_close(found[1:2, 5:], ours(tokens()[1:2, 5:]).logits, **CLOSE)


def test_a_mask_of_pairs_that_is_a_pattern():
    eager, ours = causal_pair("llama")
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    mask = (key <= query) & (query - key < 4)
    given = dict(attention_mask=mask.expand(3, 1, -1, -1))
    expected = copy.deepcopy(eager)
    expected.set_attn_implementation("sdpa")
    torch.testing.assert_close(
        ours(tokens(), **given).logits, expected(tokens(), **given).logits, **CLOSE
    )
    other = mask | ((query == 2) & (key == 5))
    with pytest.raises(UnsupportedMask, match="query 2 sees key 5.* attn_implementation="):
        ours(tokens(), attention_mask=other.expand(3, 1, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    eager, ours = causal_pair("gemma2", dtype)
    given, counted = padded("left")
    expected, found = (model(tokens(), **given).logits for model in (eager, ours))
    close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.1, atol=0.1)
    torch.testing.assert_close(found[counted], expected[counted], **close)


def test_dropout_in_training_is_drawn_anew_and_by_torchs_seed():
    config = CAUSAL["llama"](transformers)
    config.attention_dropout = 0.5
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="encke")
    torch.manual_seed(1)
    first, second = model(tokens()).logits, model(tokens()).logits
    torch.manual_seed(1)
    assert torch.equal(model(tokens()).logits, first)
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(tokens()).logits, model(tokens()).logits)


def test_gradient_checkpointing():
    _, ours = causal_pair("gpt-oss")
    given, counted = padded("left")
    weights = torch.ones(3, TOKENS, 61, dtype=torch.float64)
    plain = gradients(ours, ours(tokens(), **given).logits, counted, weights)
    plain = {name: None if of is None else of.clone() for name, of in plain.items()}
    ours = copy.deepcopy(ours).train()
    ours.activation_checkpointing_enable()
    again = gradients(ours, ours(tokens(), **given).logits, counted, weights)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, **CLOSE)


def test_sequences_without_padding_in_one_graph():
    """As DataCollatorWithFlattening gives them; the same graph for other lengths."""
    _, ours = causal_pair("llama")
    torch._dynamo.reset()
    whole = torch.compile(ours, backend="aot_eager", fullgraph=True)
    weights = torch.ones(1, TOKENS, 61, dtype=torch.float64)
    for lengths in ([TOKENS], [3, TOKENS - 3], [TOKENS - 5, 5], [2, 2, TOKENS - 4]):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        given = dict(
            input_ids=tokens()[:1], use_cache=False,
            position_ids=torch.cat([torch.arange(of) for of in lengths])[None],
            cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
            max_length_q=max(lengths), max_length_k=max(lengths),
        )
        alone = tokens()[:1].split(lengths, 1)
        expected = torch.cat([ours(document).logits for document in alone], 1)
        found = whole(**given).logits
        torch.testing.assert_close(found, expected, **CLOSE)
        everything = torch.ones(1, TOKENS, dtype=torch.bool)
        wanted = gradients(ours, expected, everything, weights)
        wanted = {name: None if of is None else of.clone() for name, of in wanted.items()}
        for name, gradient in gradients(ours, found, everything, weights).items():
            torch.testing.assert_close(gradient, wanted[name], **CLOSE)


@pytest.mark.parametrize(("name", "kind"), [("llama", "left"), ("gemma3", "packed")])
def test_one_graph_forward_and_backward(name, kind):
    """torch.compile makes one graph of the whole model, for any padding."""
    _, ours = causal_pair(name)
    torch._dynamo.reset()
    whole = torch.compile(ours, backend="aot_eager", fullgraph=True)
    given, counted = inputs(kind)
    given["use_cache"] = False
    weights = torch.ones(3, TOKENS, 61, dtype=torch.float64)
    expected, found = (model(tokens(), **given).logits for model in (ours, whole))
    torch.testing.assert_close(found[counted], expected[counted], **CLOSE)
    wanted = gradients(ours, expected, counted, weights)
    wanted = {name: None if of is None else of.clone() for name, of in wanted.items()}
    for name, gradient in gradients(ours, found, counted, weights).items():
        torch.testing.assert_close(gradient, wanted[name], **CLOSE)
