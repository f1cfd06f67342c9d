"""Tiny random models of transformers, each twice: with its own eager attention and with Encke's."""

import copy
import functools

import torch
import transformers

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOWED = ["sliding_attention", "full_attention"]


def _sizes(**others):
    return {**SIZES, **others}


CAUSAL = {
    "llama": lambda t: t.LlamaConfig(**_sizes()),
    "qwen3": lambda t: t.Qwen3Config(**_sizes(head_dim=16)),
    "mistral": lambda t: t.MistralConfig(**_sizes(sliding_window=5)),
    "gemma2": lambda t: t.Gemma2Config(
        **_sizes(head_dim=8, sliding_window=5, layer_types=WINDOWED, query_pre_attn_scalar=11,
                 attn_logit_softcapping=1.5)
    ),
    "gemma3": lambda t: t.Gemma3TextConfig(
        **_sizes(head_dim=8, sliding_window=5, layer_types=WINDOWED, query_pre_attn_scalar=11)
    ),
    "gpt-oss": lambda t: t.GptOssConfig(
        **_sizes(head_dim=8, sliding_window=5, layer_types=WINDOWED, num_local_experts=4,
                 num_experts_per_tok=2)
    ),
    "deepseek-v3": lambda t: t.DeepseekV3Config(
        **_sizes(num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
                 topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
                 kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8,
                 v_head_dim=6)
    ),
    "gpt2": lambda t: t.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "llama4": lambda t: t.Llama4TextConfig(
        **_sizes(head_dim=8, attention_chunk_size=5, num_local_experts=2, num_experts_per_tok=1,
                 intermediate_size_mlp=48, layer_types=["chunked_attention", "full_attention"])
    ),
}


# Others that differ in what they ask of attention, for fewer cases.
OTHERS = {
    "cohere2": lambda t: t.Cohere2Config(**_sizes(sliding_window=5, layer_types=WINDOWED)),
    "deepseek-v2": lambda t: t.DeepseekV2Config(
        **_sizes(num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=1,
                 topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
                 kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8,
                 v_head_dim=6, head_dim=4)
    ),
    "exaone4": lambda t: t.Exaone4Config(**_sizes(sliding_window=5, layer_types=WINDOWED)),
    "gemma3n": lambda t: t.Gemma3nTextConfig(
        **_sizes(head_dim=8, sliding_window=5, layer_types=WINDOWED, laurel_rank=4,
                 hidden_size_per_layer_input=8, vocab_size_per_layer_input=61, altup_num_inputs=2,
                 num_kv_shared_layers=0, activation_sparsity_pattern=None)
    ),
    "opt": lambda t: t.OPTConfig(
        vocab_size=61, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2
    ),
    "phi3": lambda t: t.Phi3Config(**_sizes(sliding_window=5)),
    "qwen3-moe": lambda t: t.Qwen3MoeConfig(
        **_sizes(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "smollm3": lambda t: t.SmolLM3Config(**_sizes(no_rope_layer_interval=2)),
    "glm4": lambda t: t.Glm4Config(**_sizes(head_dim=8)),
    "gpt-neox": lambda t: t.GPTNeoXConfig(
        **_sizes(hidden_dropout=0.0, attention_dropout=0.0, classifier_dropout=0.0)
    ),
    "granite": lambda t: t.GraniteConfig(**_sizes(attention_multiplier=0.3)),
    "ministral": lambda t: t.MinistralConfig(
        **_sizes(head_dim=8, sliding_window=5, layer_types=WINDOWED)
    ),
    "mixtral": lambda t: t.MixtralConfig(**_sizes(num_local_experts=4, sliding_window=5)),
    "olmo2": lambda t: t.Olmo2Config(**_sizes()),
    "qwen2": lambda t: t.Qwen2Config(**_sizes()),
    "starcoder2": lambda t: t.Starcoder2Config(
        **_sizes(sliding_window=5, residual_dropout=0.0, embedding_dropout=0.0)
    ),
}


def pair(config, model_class, dtype=torch.float64):
    """The model with eager attention, and with Encke's, and equal weights."""
    torch.manual_seed(3)
    make = getattr(model_class, "_from_config", None) or model_class.from_config
    config._experts_implementation = "eager"
    eager = make(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for weight in eager.parameters():
            # The usual small weights would make all softmaxes nearly even.
            if weight.dim() > 1:
                weight.mul_(4.0)
            elif "sinks" in _name(eager, weight):
                weight.normal_()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("encke")
    return eager, ours


def _name(model, weight):
    return next(name for name, of in model.named_parameters() if of is weight)


@functools.lru_cache(maxsize=None)
def causal_pair(name, dtype=torch.float64):
    """A causal language model by name."""
    config = (CAUSAL | OTHERS)[name](transformers)
    return pair(config, transformers.AutoModelForCausalLM, dtype)


def gradients(model, logits, counted, weights):
    """The gradients of all parameters of a loss of the logits at counted tokens."""
    model.zero_grad()
    loss = (logits[counted] * weights[counted]).sum()
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}
