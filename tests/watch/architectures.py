"""Architectures of transformers, built from small random configurations by one recipe for all."""

import torch
import transformers
from torch import nn

BATCH = 3
# By the name of a configuration's attribute: a small value that is set wherever there is such an attribute.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "encoder_hidden_size", "embed_dim"), 16),
    **dict.fromkeys(("embedding_size", "model_dim", "word_embed_proj_dim", "hidden_dim", "lm_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "dim_ff", "d_inner"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("vocab_size",), 40),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 32),
    **dict.fromkeys(("image_size",), 16),
    **dict.fromkeys(("patch_size",), 4),
    "use_cache": False,
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    "num_labels": 3,
}


def build(name: str) -> nn.Module:
    """A model of this class in evaluation mode and float64."""
    cls = getattr(transformers, name)
    defaults = cls.config_class()
    config = cls.config_class(**{key: value for key, value in SMALL.items() if hasattr(defaults, key)})
    torch.manual_seed(0)
    return cls(config).double().eval()


def inputs_of(model: nn.Module) -> tuple[dict, str]:
    """Arguments for a call, and the name of the one whose samples can be made bad."""
    name = model.main_input_name
    if name == "pixel_values":
        size = model.config.image_size
        channels = getattr(model.config, "num_channels", 3)
        return {name: torch.randn(BATCH, channels, size, size, dtype=torch.float64)}, name
    width = model.get_input_embeddings().weight.shape[1]
    given = {"inputs_embeds": torch.randn(BATCH, 6, width, dtype=torch.float64)}
    if model.config.is_encoder_decoder:
        given["decoder_inputs_embeds"] = torch.randn(BATCH, 4, width, dtype=torch.float64)
    return given, "inputs_embeds"
