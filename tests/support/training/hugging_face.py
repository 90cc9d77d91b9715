"""Small configs of Hugging Face's families of models."""

from __future__ import annotations

from typing import Any

LAYERS = 3
_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LAYERS = {"layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"], "sliding_window": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama 3 8B": ("LlamaConfig", {}, "LlamaDecoderLayer"),
    "Llama 3 70B": ("LlamaConfig", {"num_attention_heads": 16, "num_key_value_heads": 2}, "LlamaDecoderLayer"),
    "Qwen 3": ("Qwen3Config", {"head_dim": 16}, "Qwen3DecoderLayer"),
    "Qwen 3 MoE": ("Qwen3MoeConfig", {"num_experts": 4, "head_dim": 16, **_EXPERTS}, "Qwen3MoeDecoderLayer"),
    "Gemma 3": ("Gemma3TextConfig", {"head_dim": 16, **_LAYERS}, "Gemma3DecoderLayer"),
    "GPT-OSS": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, **_LAYERS},
        "GptOssDecoderLayer",
    ),
    "Mistral": ("MistralConfig", {"sliding_window": 16}, "MistralDecoderLayer"),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 8,
            **_EXPERTS,
        },
        "DeepseekV3DecoderLayer",
    ),
    "Llama 4": (
        "Llama4TextConfig",
        {"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 256},
        "Llama4TextDecoderLayer",
    ),
    "Phi 3": ("Phi3Config", {}, "Phi3DecoderLayer"),
}
"""By name: the config's class, its sizes where they differ, and the class of the decoder layers."""


def config_of(family: str, **more: Any) -> Any:
    """Make a family's config."""
    import transformers

    kind, sizes, _ = FAMILIES[family]
    return getattr(transformers, kind)(**{**_COMMON, **sizes, **more})
