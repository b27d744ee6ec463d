"""Models from elsewhere: transformers' Llamas, ViT, GPT-2, BERT and T5 with random weights; and the GPT of `models`.

Each has the sizes of its benchmark on a GPU, and tiny ones for the CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from models import Gpt
from torch import Tensor, nn

Inputs = dict[str, Tensor]


class Family(NamedTuple):
    """A model, its inputs, and the inputs of a step of decoding if it decodes.

    Args:
        loss: from the model's output to what `backward` starts from.
    """

    model: nn.Module
    inputs: Inputs
    work: str
    decoding: Inputs | None = None
    loss: Callable[[Any], Tensor] = lambda output: output.logits.float().square().mean()


def new_llama(width: int, layers: int, words: int, is_large: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16 if is_large else 4,
        num_key_value_heads=8 if is_large else 2,
        vocab_size=words,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama(is_large: bool) -> Family:
    width, layers, length, words = (2048, 8, 1024, 32_000) if is_large else (64, 8, 16, 100)
    ids, few = _ids(words, 4, length), _ids(words, 4, 4)
    work = f"Llama, {layers} layers of {width}, 4x{length}; decoding 4x4"
    return Family(new_llama(width, layers, words, is_large), ids, work, few)


def large_llama(is_large: bool) -> Family:
    """With blocks that `watch` compiles once by itself."""
    width, layers, length, words = (4096, 4, 1024, 32_000) if is_large else (64, 4, 16, 100)
    work = f"Llama, {layers} layers of {width}, 4x{length}"
    return Family(new_llama(width, layers, words, is_large), _ids(words, 4, length), work)


def vit(is_large: bool) -> Family:
    from transformers import ViTConfig, ViTForImageClassification

    width, size, count, layers = (768, 224, 64, 8) if is_large else (64, 32, 4, 8)
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=12 if is_large else 4,
        image_size=size,
    )
    images = {"pixel_values": torch.randn(count, 3, size, size)}
    return Family(ViTForImageClassification(config), images, f"ViT, {layers} layers of {width}, batch {count}")


def gpt2(is_large: bool) -> Family:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, batch, length, words = (768, 12, 8, 512, 50_257) if is_large else (64, 4, 4, 16, 100)
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=12 if is_large else 4, n_positions=1024, vocab_size=words, use_cache=False
    )
    work = f"GPT-2, {layers} layers of {width}, {batch}x{length}; decoding {batch}x4"
    return Family(GPT2LMHeadModel(config), _ids(words, batch, length), work, _ids(words, batch, 4))


def bert(is_large: bool) -> Family:
    from transformers import BertConfig, BertForSequenceClassification

    width, layers, batch, length, words = (768, 12, 8, 512, 30_522) if is_large else (64, 4, 4, 16, 100)
    config = BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=12 if is_large else 4,
        vocab_size=words,
    )
    work = f"BERT, {layers} layers of {width}, {batch}x{length}"
    return Family(BertForSequenceClassification(config), _ids(words, batch, length), work)


def t5(is_large: bool) -> Family:
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers, batch, length, words = (512, 6, 8, 512, 32_128) if is_large else (64, 2, 4, 16, 100)
    config = T5Config(
        d_model=width,
        d_kv=width // 8,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=8,
        vocab_size=words,
        use_cache=False,
    )

    def inputs(length: int) -> Inputs:
        return {**_ids(words, batch, length), "decoder_input_ids": torch.randint(words, (batch, length))}

    work = f"T5, {layers}+{layers} layers of {width}, {batch}x{length}; decoding {batch}x4"
    return Family(T5ForConditionalGeneration(config), inputs(length), work, inputs(4))


def ours(is_large: bool) -> Family:
    blocks, width, batch, length = (24, 1024, 8, 1024) if is_large else (4, 64, 4, 16)
    work = f"the GPT of benchmarks/models.py, {blocks} blocks of {width}, {batch}x{length}"
    model = Gpt(blocks=blocks, width=width, heads=16 if is_large else 4)
    return Family(
        model, {"x": torch.randn(batch, length, width)}, work, loss=lambda output: output.float().square().mean()
    )


def _ids(words: int, batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(words, (batch, length))}


FAMILIES: dict[str, Callable[[bool], Family]] = {
    "Llama": llama,
    "large Llama": large_llama,
    "ViT": vit,
    "GPT-2": gpt2,
    "BERT": bert,
    "T5": t5,
    "GPT of ours": ours,
}
