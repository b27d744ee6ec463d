"""Tiny models of transformers with random weights, each with a batch for its own loss and the input to make bad."""

import torch

B = 5


def _sizes(**more):
    return {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        **more,
    }


def _image(size):
    return {"pixel_values": torch.randn(B, 3, size, size), "labels": torch.randint(3, (B,))}


def _embedded(labels=20, shape=(B, 6)):
    return {"inputs_embeds": torch.randn(B, 6, 16), "labels": torch.randint(labels, shape)}


def _encoder_decoder(**more):
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return {"vocab_size": 20, "d_model": 16, **layers, **heads, **widths, **tokens, **more}


# The class, its configuration and that one's arguments, a batch, and the input whose samples can be made bad.
MODELS = {
    "SwinForImageClassification": (
        "SwinConfig",
        lambda: {
            "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2,
            "num_labels": 3,
        },
        lambda: _image(16),
        "pixel_values",
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        lambda: _sizes(
            num_key_value_heads=1, num_local_experts=3, output_router_logits=True, experts_implementation="eager"
        ),
        _embedded,
        "inputs_embeds",
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        lambda: _encoder_decoder(num_mel_bins=8, max_source_positions=8, max_target_positions=8, dropout=0.1),
        lambda: {"input_features": torch.randn(B, 8, 16), "labels": torch.randint(20, (B, 6))},
        "input_features",
    ),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2Config",
        lambda: _sizes(
            vocab_size=12, conv_dim=[8, 8], conv_stride=[4, 4], conv_kernel=[8, 8], num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, mask_time_prob=0.3, mask_time_length=2,
        ),
        lambda: {"input_values": torch.randn(B, 400), "labels": torch.randint(1, 12, (B, 4))},
        "input_values",
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        lambda: {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3},
        lambda: _image(32),
        "pixel_values",
    ),
    "CLIPModel": (
        "CLIPConfig",
        lambda: {
            "text_config": _sizes(max_position_embeddings=8, eos_token_id=19),
            "vision_config": _sizes(image_size=16, patch_size=8),
            "projection_dim": 8,
        },
        lambda: {
            "pixel_values": torch.randn(B, 3, 16, 16), "input_ids": torch.randint(18, (B, 6)), "return_loss": True,
        },
        "pixel_values",
    ),
    "BertForSequenceClassification": (
        "BertConfig", lambda: _sizes(num_labels=3), lambda: _embedded(3, (B,)), "inputs_embeds",
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        lambda: {
            "vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        _embedded,
        "inputs_embeds",
    ),
    "MambaForCausalLM": ("MambaConfig", lambda: _sizes(state_size=4), _embedded, "inputs_embeds"),
    "ViTMAEForPreTraining": (
        "ViTMAEConfig",
        lambda: _sizes(
            image_size=16, patch_size=4, decoder_hidden_size=16, decoder_intermediate_size=16,
            decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        ),
        lambda: {"pixel_values": torch.randn(B, 3, 16, 16)},
        "pixel_values",
    ),
    "GPT2LMHeadModel": (
        "GPT2Config",
        lambda: {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2},
        _embedded,
        "inputs_embeds",
    ),
    "BartForConditionalGeneration": (
        "BartConfig", lambda: _encoder_decoder(max_position_embeddings=8), _embedded, "inputs_embeds",
    ),
    "SegformerForSemanticSegmentation": (
        "SegformerConfig",
        lambda: {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8, "num_labels": 3,
        },
        lambda: {"pixel_values": torch.randn(B, 3, 32, 32), "labels": torch.randint(3, (B, 32, 32))},
        "pixel_values",
    ),
    "PatchTSTForPrediction": (
        "PatchTSTConfig",
        lambda: {
            "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "prediction_length": 4,
        },
        lambda: {"past_values": torch.randn(B, 16, 2), "future_values": torch.randn(B, 4, 2)},
        "past_values",
    ),
}  # fmt: skip


def make(name: str) -> torch.nn.Module:
    import transformers

    config, arguments, _, _ = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**arguments()))
    return model.double().train()
