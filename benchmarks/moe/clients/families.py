"""Five MoE families of transformers, built from their configs with random weights.

``tiny`` models are for comparison with eager code, ``timed`` ones have experts of a
real model's proportions at a quarter of its width, in a single layer.
"""

import torch


_COMMON = {
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    # the defaults lie outside this small vocabulary
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# family -> (name of the config class, what makes the family, tiny sizes, timed sizes)
FAMILIES = {
    "mixtral": (
        "MixtralConfig",
        {"num_experts_per_tok": 2},
        {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4},
        {"hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "head_dim": 8},
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "moe_intermediate_size": 192,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {"norm_topk_prob": False},
        {
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        {
            "hidden_size": 512,
            "intermediate_size": 256,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "first_k_dense_replace": 0,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        {
            "hidden_size": 1792,
            "intermediate_size": 4608,
            "moe_intermediate_size": 512,
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8},
        {
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        {
            "hidden_size": 720,
            "intermediate_size": 720,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
}


def build(family: str, *, timed: bool = False, dtype: torch.dtype = torch.float32):
    """A causal language model of this family; the same weights for every dtype.

    Args:
        family: a key of FAMILIES.
        timed: the larger sizes and one layer, instead of the tiny ones and two.
        dtype: of all parameters.

    Returns:
        transformers.PreTrainedModel: with eager attention and eager experts.
    """
    import transformers

    config_class, fixed, tiny, large = FAMILIES[family]
    config = getattr(transformers, config_class)(
        **{**_COMMON, **fixed, **(large if timed else tiny)},
        num_hidden_layers=1 if timed else 2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    # The initial weights are so small that a wrong expert would hardly show.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model.to(dtype)
