"""Tiny configurations of transformers' models, for the examples that train them."""
import transformers

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
WINDOWED = dict(SIZES, head_dim=8, sliding_window=24,
                layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(**WINDOWED),
    "gpt-oss": lambda: transformers.GptOssConfig(**WINDOWED, num_local_experts=4,
                                                 num_experts_per_tok=2),
}
