"""attn_implementation="encke" in encoders and encoder-decoders; what it never makes; refusals."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)

import encke.transformers  # noqa: E402
from encke.integrations.visibility import UnsupportedMask  # noqa: E402
from test_transformers import CLOSE, TOKENS, padded, tokens  # noqa: E402
from test_transformers import softmax_in_the_type_of_its_input  # noqa: E402, F401
from transformers_models import SIZES, causal_pair, gradients, pair  # noqa: E402

ENCODER = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=0,
)
BART = dict(
    vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    forced_eos_token_id=None,
)


def compare(eager, ours, call, counted, randn):
    """Outputs at the counted tokens and the gradients of all parameters."""
    expected, found = call(eager), call(ours)
    torch.testing.assert_close(found[counted], expected[counted], **CLOSE)
    weights = randn(*expected.shape)
    wanted = gradients(eager, expected, counted, weights)
    got = gradients(ours, found, counted, weights)
    for name, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(got[name], gradient, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right", None])
def test_bert(side, randn):
    config = transformers.BertConfig(
        **ENCODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    given = dict(attention_mask=padded(side)[0]["attention_mask"]) if side else {}
    # Every query is computed, so that hidden tokens are those of eager, too.
    everything = torch.ones(3, TOKENS, dtype=torch.bool)
    call = lambda model: model(tokens(), **given).last_hidden_state  # noqa: E731
    compare(*pair(config, transformers.BertModel), call, everything, randn)


def test_windows_to_both_sides(randn):
    config = transformers.ModernBertConfig(
        **ENCODER, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2,
        bos_token_id=1, eos_token_id=2,
    )
    given, counted = padded("right")
    call = lambda model: model(  # noqa: E731
        tokens(), attention_mask=given["attention_mask"]
    ).last_hidden_state
    compare(*pair(config, transformers.ModernBertModel), call, counted, randn)


@pytest.mark.parametrize("targets", [5, 13, 40])
def test_bart_with_fewer_and_more_queries_than_keys(targets, randn):
    eager, ours = pair(transformers.BartConfig(**BART), transformers.BartForConditionalGeneration)
    decoder_ids = tokens(count=targets)
    given = dict(attention_mask=padded("right")[0]["attention_mask"], decoder_input_ids=decoder_ids)
    everything = torch.ones(3, targets, dtype=torch.bool)
    compare(eager, ours, lambda model: model(tokens(), **given).logits, everything, randn)


def test_bart_generates():
    eager, ours = pair(transformers.BartConfig(**BART), transformers.BartForConditionalGeneration)
    options = dict(
        attention_mask=padded("right")[0]["attention_mask"], max_new_tokens=20, do_sample=False,
        eos_token_id=None,
    )
    assert torch.equal(ours.generate(tokens(), **options), eager.generate(tokens(), **options))


T5GEMMA = dict(
    SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
    query_pre_attn_scalar=11, attn_logit_softcapping=1.5, dropout_rate=0.0,
)


def t5gemma():
    """Windows to both sides and softcap in the encoder, and cross attention."""
    return transformers.T5GemmaConfig(
        encoder=T5GEMMA, decoder=dict(T5GEMMA, is_decoder=True), vocab_size=61, dropout_rate=0.0
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_t5gemma(side, randn):
    eager, ours = pair(t5gemma(), transformers.T5GemmaForConditionalGeneration)
    given = dict(
        attention_mask=padded(side)[0]["attention_mask"], decoder_input_ids=tokens(count=20)
    )
    everything = torch.ones(3, 20, dtype=torch.bool)
    compare(eager, ours, lambda model: model(tokens(), **given).logits, everything, randn)


def test_whisper(randn):
    config = transformers.WhisperConfig(
        **{**BART, "max_position_embeddings": None}, num_mel_bins=8, max_source_positions=10,
        max_target_positions=32,
    )
    eager, ours = pair(config, transformers.WhisperForConditionalGeneration)
    sound = randn(2, 8, 20)
    everything = torch.ones(2, 15, dtype=torch.bool)
    call = lambda model: model(  # noqa: E731
        input_features=sound, decoder_input_ids=tokens(2, 15)
    ).logits
    compare(eager, ours, call, everything, randn)
    options = dict(input_features=sound, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours.generate(**options), eager.generate(**options))


def test_masks_that_a_model_joins_or_cuts_are_refused(randn):
    """A description is no tensor of pairs: what cuts or joins it changes what it means."""
    from transformers.masking_utils import create_causal_mask

    _, ours = causal_pair("llama")
    mask = torch.ones(3, TOKENS, dtype=torch.int64)
    mask[1, 8:] = 0
    described = create_causal_mask(ours.config, torch.zeros(3, TOKENS, 32), mask, None)
    layer = ours.model.layers[0].self_attn
    q, k = randn(3, 4, TOKENS, 8), randn(3, 2, TOKENS, 8)
    call = encke.integrations.transformers.attention_forward
    call(layer, q, k, k, described)
    longer = torch.cat([k, k], 2)
    with pytest.raises(UnsupportedMask, match="one for 13 keys, of which the model made"):
        call(layer, q, longer, longer, torch.cat([described, described], -1))
    with pytest.raises(UnsupportedMask, match="one for 13 keys, of which the model made one for 7"):
        call(layer, q, k, k, described[..., :TOKENS])
    with pytest.raises(UnsupportedMask, match="for 13 keys, but there are 26"):
        call(layer, q, longer, longer, described)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_what_a_model_gives_beside_its_mask_is_not_left_out(name, randn):
    _, ours = causal_pair("llama")
    q = randn(3, 4, TOKENS, 8)
    layer = ours.model.layers[0].self_attn
    with pytest.raises(UnsupportedMask, match=f"gives its attention {name}"):
        encke.integrations.transformers.attention_forward(
            layer, q, q, q, None, **{name: torch.zeros(3, 4, TOKENS, 1)}
        )


def test_t5_whose_biases_torch_computes(randn, caplog):
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0,
    )
    eager, ours = pair(config, transformers.T5ForConditionalGeneration)
    given = dict(
        attention_mask=padded("right")[0]["attention_mask"], decoder_input_ids=tokens(count=7)
    )
    everything = torch.ones(3, 7, dtype=torch.bool)
    compare(eager, ours, lambda model: model(tokens(), **given).logits, everything, randn)


def test_t5_in_one_graph(randn):
    """Also with hidden tokens, of which a graph knows nothing but where they are written."""
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0,
    )
    eager, ours = pair(config, transformers.T5ForConditionalGeneration)
    torch._dynamo.reset()
    whole = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for side in ("left", "right"):
        mask = padded(side)[0]["attention_mask"]
        given = dict(attention_mask=mask, decoder_input_ids=tokens(count=7), use_cache=False)
        expected, found = (model(tokens(), **given).logits for model in (eager, whole))
        torch.testing.assert_close(found, expected, **CLOSE)


def test_vit_makes_no_mask(randn):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=12, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    pixels = randn(2, 3, 12, 12)
    everything = torch.ones(2, 10, dtype=torch.bool)
    call = lambda model: model(pixels).last_hidden_state  # noqa: E731
    compare(*pair(config, transformers.ViTModel), call, everything, randn)


def test_cross_attention_of_a_decoder(randn):
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )
    memory = randn(3, 9, 32)
    given = dict(
        encoder_hidden_states=memory,
        encoder_attention_mask=torch.arange(9) < torch.tensor([[9], [4], [1]]),
    )
    everything = torch.ones(3, TOKENS, dtype=torch.bool)
    call = lambda model: model(tokens(), **given).logits  # noqa: E731
    compare(*pair(config, transformers.GPT2LMHeadModel), call, everything, randn)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest result of any operation."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for of in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(of, torch.Tensor):
                self.elements = max(self.elements, of.untyped_storage().nbytes() // of.itemsize)
        return found


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_no_tensor_of_queries_times_keys(name):
    eager, ours = causal_pair(name)
    ids = torch.randint(3, 61, (2, 512))
    mask = torch.ones_like(ids)
    mask[1, :160] = 0
    largest = {}
    for model in (eager, ours):
        with LargestTensor() as largest[model.config._attn_implementation]:
            model.model(ids, attention_mask=mask)
    assert largest["eager"].elements >= 512 * 512
    assert largest["encke"].elements < 512 * 512 / 2


def test_attention_weights_are_refused():
    _, ours = causal_pair("llama")
    with pytest.raises(ValueError, match="output_attentions"):
        ours(tokens(), output_attentions=True)


def test_masks_that_are_no_pattern_are_refused():
    from transformers.masking_utils import create_causal_mask

    _, ours = causal_pair("llama")
    embedded = torch.zeros(1, 8, 32)
    with pytest.raises(UnsupportedMask, match="one mask or another"):
        create_causal_mask(
            ours.config, embedded, None, None, or_mask_function=lambda b, h, q, k: k == 0
        )
    with pytest.raises(UnsupportedMask, match="function .*even"):
        create_causal_mask(ours.config, embedded, None, None, and_mask_function=even)


def even(batch, head, query, key):
    """Every second key."""
    return key % 2 == 0


@pytest.mark.parametrize(
    ("config", "made"),
    [
        (lambda t: t.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4), "CausalLM"),
        (lambda t: t.DogeConfig(**SIZES), "CausalLM"),
        (lambda t: t.BigBirdPegasusConfig(**BART), "Seq2SeqLM"),
    ],
    ids=["all layers", "masks of its own", "some layers"],
)
def test_models_that_compute_attention_themselves_are_refused(config, made):
    """They would add a description to their scores, or take it for a mask."""
    maker = getattr(transformers, f"AutoModelFor{made}")
    model = maker.from_config(config(transformers), attn_implementation="encke")
    for count in (TOKENS, 1):
        with pytest.raises(UnsupportedMask, match="code of its own"):
            model(tokens(count=count))


def test_a_hole_in_a_window_is_refused():
    _, ours = causal_pair("mistral")
    mask = torch.ones(3, TOKENS, dtype=torch.int64)
    mask[1, 4] = 0
    with pytest.raises(UnsupportedMask, match="padding at token 4"):
        ours(tokens(), attention_mask=mask)


def test_a_hole_without_a_window(randn):
    eager, ours = causal_pair("llama")
    mask = torch.ones(3, TOKENS, dtype=torch.int64)
    mask[1, 4] = 0
    call = lambda model: model(tokens(), attention_mask=mask).logits  # noqa: E731
    compare(eager, ours, call, mask.bool(), randn)


VISION = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)


def test_a_learned_bias_of_each_pair_is_refused():
    """Also one whose numbers are still 0, as they are before training: their gradient would be
    lost."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=4
    )
    swin = transformers.SwinModel._from_config(config, attn_implementation="encke")
    for name, parameter in swin.named_parameters():
        if "relative_position_bias" in name:
            torch.nn.init.zeros_(parameter)
    with pytest.raises(UnsupportedMask, match="attention_mask is learned"):
        swin(torch.ones(1, 3, 16, 16))
    config = transformers.BeitConfig(
        **VISION, image_size=16, patch_size=8, use_relative_position_bias=True
    )
    beit = transformers.BeitModel._from_config(config, attn_implementation="encke")
    with pytest.raises(UnsupportedMask, match="use_relative_position_bias"):
        beit(torch.ones(1, 3, 16, 16))
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(encke.MaskError, match="attn_mask is learned"):
        learned = torch.zeros(4, 4, requires_grad=True)
        encke.scaled_dot_product_attention(q, q, q, attn_mask=learned)


def test_padding_that_another_attention_reads_is_refused():
    config = transformers.Siglip2VisionConfig(**VISION, num_patches=4, patch_size=2)
    model = transformers.Siglip2VisionModel._from_config(config, attn_implementation="encke")
    images = dict(pixel_values=torch.ones(1, 4, 12), spatial_shapes=torch.tensor([[2, 2]]))
    with pytest.raises(UnsupportedMask, match="code of its own"):
        model(**images, pixel_attention_mask=torch.tensor([[1, 1, 1, 0]]))
