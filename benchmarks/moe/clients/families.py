"""Models of transformers from configs alone, tiny and with random weights, to compare with eager code."""

import contextlib
import copy
import dataclasses

import torch


# family -> name of the model class
FAMILIES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# Sizes of a whole model, where its config has the name.
_SIZES = {
    32: "hidden_size d_model",
    48: "intermediate_size intermediate_size_mlp ffn_hidden_size",
    None: "pad_token_id bos_token_id eos_token_id",
    0: "first_k_dense_replace num_dense_layers",
    1: "topk_group decoder_sparse_step interleave_moe_layer_step",
    2: "num_hidden_layers num_layers n_layers num_key_value_heads n_group num_expert_groups "
    "num_experts_per_tok moe_topk moe_k moe_top_k zero_expert_num",
    4: "num_attention_heads n_heads",
    8: "head_dim num_experts num_local_experts n_routed_experts moe_num_experts "
    "qk_rope_head_dim qk_nope_head_dim v_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim sliding_window",
    64: "max_seq_len max_position_embeddings",
    96: "vocab_size",
}
TINY = {name: size for size, names in _SIZES.items() for name in names.split()}
# Configs whose sizes differ by layer take them when they are made, and not afterwards. Some have no
# defaults, or none that runs.
AT_ONCE = {
    "FlintConfig": {
        "layer_types": ["sliding_attention", "full_attention"], "mlp_only_layers": [],
    },
    "GraniteMoeHybridConfig": {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 16, "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "HunYuanMoEV1Config": {"head_dim": 8},
    "JambaConfig": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
        "expert_layer_offset": 0, "mamba_dt_rank": 4,
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    # Half of a head is rotated.
    "Mistral4Config": {"head_dim": 16, "num_key_value_heads": 4},
    "Qwen4ExpTextConfig": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "hc_lowrank": 8, "ple_embed_dim": 16,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "Gemma4TextConfig": {
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
        "enable_moe_block": True, "top_k_experts": 2,
    },
    "Dots3NoteTextConfig": {
        "first_k_dense_replace": 0, "num_key_value_heads": 4, "head_dim": 16,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
}  # fmt: skip
# Some configs have no default for these.
NEEDED = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}


def fill(module: torch.nn.Module, seed: int) -> None:
    """Draws all parameters from bfloat16 values, whatever their dtype.

    As a config initialises them a wrong expert would hardly show.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            drawn = noise * scale if p.dim() > 1 else p + noise * scale
            p.copy_(drawn.bfloat16())


def _shrink(config) -> None:
    for name, value in TINY.items():
        if getattr(config, name, None) is not None:
            with contextlib.suppress(AttributeError, ValueError, TypeError):
                setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and kinds:
            # One of each kind, the sparse and the full ones first.
            kinds = list(dict.fromkeys(kinds))
            kinds.sort(key=lambda kind: ("sparse" not in kind, "full" not in kind))
            setattr(config, name, (kinds * 2)[: config.num_hidden_layers])
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
    config: dict[str, object] | None = None,
):
    """A causal language model with eager attention; the same weights for every dtype.

    Args:
        implementation: of the experts.
        config: of a checkpoint, as it is, in place of the tiny one.
    """
    if config is None:
        made = _tiny_config(model_class.config_class)
    else:
        made = model_class.config_class.from_dict(copy.deepcopy(config))
    made._attn_implementation = "eager"
    made._experts_implementation = implementation
    torch.manual_seed(0)
    model = model_class(made).float()
    fill(model, 1)
    return model.to(dtype).eval()


def build(family: str, dtype: torch.dtype = torch.float32):
    """A tiny model of FAMILIES with eager experts."""
    import transformers

    return build_model(getattr(transformers, FAMILIES[family]), dtype)
