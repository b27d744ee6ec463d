"""Models that several test files use. A model that is the point of one test is defined beside that test."""

import torch
from torch import Tensor, nn


class ScaledLayer(nn.Module):
    """Something for each common kind of guard: a parameter, a number as an attribute, and a branch on an argument."""

    def __init__(self):
        super().__init__()
        self.layer, self.k, self.calls = nn.Linear(3, 3), 2, 0

    def forward(self, x, flag=True):
        return self.layer(x) * self.k if flag else x + self.k


class TwoLayers(nn.Module):
    """Two linear layers, from 4 features to 8 to 2."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden)


class Residual(nn.Module):
    """Each of its blocks saves its argument for backward, and that argument is used again after the block."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x * 2 + block(x).sin()
        return x.sin() @ x.cos().transpose(-1, -2)


def mlp() -> nn.Sequential:
    """Two linear layers as a `Sequential`, with a normalization and an activation between them."""
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


def affine_softmax(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A layer as a function of its parameters."""
    return torch.softmax(torch.relu(x @ w + b), dim=-1)


# transformers is imported when it is needed: machines with a GPU may not have it.


def gpt2(**settings):
    """A `GPT2LMHeadModel` of one layer, with 50 tokens and 16 features."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **(sizes | settings)))


def bert(add_pooling_layer: bool = True, **settings):
    """A `BertModel` of one layer, with 50 tokens and 16 features."""
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
        "max_position_embeddings": 32,
    }
    return BertModel(BertConfig(**(sizes | settings)), add_pooling_layer=add_pooling_layer)
