"""Models of transformers from configs alone, with random weights: tiny ones, and five to time.

Tiny models are for comparison with eager code. The timed ones have experts of a real model's
proportions at a quarter of its width, in a single layer.
"""

import copy
import dataclasses

import torch


# family -> name of the model class, and what is larger in its timed model
FAMILIES = {
    "mixtral": (
        "MixtralForCausalLM",
        {"hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 512,
            "moe_intermediate_size": 192,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {
            "hidden_size": 512,
            "intermediate_size": 256,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "hidden_size": 1792,
            "moe_intermediate_size": 512,
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "hidden_size": 720,
            "intermediate_size": 720,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
    ),
}
# Sizes of a whole model, where its config has the name.
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "d_model": 32,
    "max_seq_len": 64,
    "max_position_embeddings": 64,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_groups": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "decoder_sparse_step": 1,
    "interleave_moe_layer_step": 1,
    "zero_expert_num": 2,
    "sliding_window": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Configs whose sizes differ by layer take them when they are made, and not afterwards. Some have no
# defaults, or none that runs.
AT_ONCE = {
    "FlintConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_only_layers": [],
    },
    "GraniteMoeHybridConfig": {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "HunYuanMoEV1Config": {"head_dim": 8},
    "JambaConfig": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_dt_rank": 4,
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    # Half of a head is rotated.
    "Mistral4Config": {"head_dim": 16, "num_key_value_heads": 4},
    "Qwen4ExpTextConfig": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "hc_lowrank": 8,
        "ple_embed_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "Gemma4TextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "Dots3NoteTextConfig": {
        "first_k_dense_replace": 0,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "num_key_value_heads": 4,
        "head_dim": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 4,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
}
# Of which some configs have no default.
NEEDED = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}


def fill(module: torch.nn.Module, seed: int) -> None:
    """Draws all parameters; as a config initialises them a wrong expert would hardly show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1
            noise = (
                torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
            )
            p.copy_(noise if p.dim() > 1 else p + noise)


def _shrink(config) -> None:
    for name, value in TINY.items():
        if getattr(config, name, None) is not None or (
            value is None and hasattr(config, name)
        ):
            try:
                setattr(config, name, value)
            except (AttributeError, ValueError, TypeError):
                pass
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and kinds:
            # One of each kind, the sparse and the full ones first.
            order = sorted(
                dict.fromkeys(kinds), key=lambda k: ("sparse" not in k, "full" not in k)
            )
            setattr(config, name, (order * 2)[: config.num_hidden_layers])
    for sub in ("attn_config", "ffn_config"):
        if getattr(config, sub, None) is not None:
            _shrink(getattr(config, sub))
    for name, value in NEEDED.items():
        if getattr(config, name, value) is None:
            setattr(config, name, value)
    if getattr(config, "kv_lora_rank", None):  # latent attention: a key for every head
        config.num_key_value_heads = config.num_attention_heads
    if hasattr(config, "kv_n_heads"):  # DBRX, whose own defaults do not run
        config.kv_n_heads, config.rope_theta, config.clip_qkv = 2, 1e4, 8.0


def _tiny_config(config_class: type):
    if sizes := AT_ONCE.get(config_class.__name__):
        fields = {f.name for f in dataclasses.fields(config_class)}
        tiny = {name: value for name, value in TINY.items() if name in fields}
        return config_class(**tiny | sizes)
    config = config_class()
    config = getattr(config, "text_config", config)
    _shrink(config)
    return config


def build_model(
    model_class: type,
    dtype: torch.dtype,
    implementation: str = "eager",
    sizes: dict[str, int] | None = None,
    config: dict[str, object] | None = None,
):
    """A causal language model with eager attention; the same weights for every dtype.

    Args:
        model_class: of transformers.
        dtype: of all parameters.
        implementation: of the experts.
        sizes: other than the tiny ones.
        config: of a checkpoint, as it is, in place of the tiny one.
    """
    if config is None:
        made = _tiny_config(model_class.config_class)
    else:
        made = model_class.config_class.from_dict(copy.deepcopy(config))
    for name, size in (sizes or {}).items():
        setattr(made, name, size)
    made._attn_implementation = "eager"
    made._experts_implementation = implementation
    torch.manual_seed(0)
    model = model_class(made).float()
    fill(model, 1)
    return model.to(dtype).eval()


def build(family: str, *, timed: bool = False, dtype: torch.dtype = torch.float32):
    """A model of FAMILIES with eager experts: a tiny one, or one layer of the timed sizes."""
    import transformers

    name, sizes = FAMILIES[family]
    sizes = sizes | {"num_hidden_layers": 1} if timed else {}
    return build_model(getattr(transformers, name), dtype, sizes=sizes)
