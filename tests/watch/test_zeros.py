"""Replacing in place: its result, and the modules for which it is used."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from torchguard._watch.detect import scan
from torchguard._watch.hooks import is_qkv_projection
from torchguard._watch.zeros import zero_nonfinite_

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_non_finite_vectors_become_zeros(kind):
    z = torch.ones(4, 3, dtype=kind)
    z[1, 2], z[2, 0], z[3] = NAN, -INF, torch.finfo(kind).max
    status, replaced = scan(z), z.clone()
    torch.testing.assert_close(zero_nonfinite_(replaced), status, equal_nan=True)
    assert torch.equal(replaced, torch.stack([z[0], torch.zeros_like(z[1]), torch.zeros_like(z[2]), z[3]]))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(8, 24), True),
        (nn.Linear(24, 8), False),
        (nn.Linear(8, 32), False),
        (nn.Embedding(24, 8), False),
        (nn.LayerNorm(24), False),
    ],
    ids=str,
)
def test_a_qkv_projection_is_recognized_by_its_sizes(module, expected):
    assert is_qkv_projection(module) is expected


def test_the_qkv_projection_of_gpt2():
    model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10, n_positions=4))
    assert [path for path, module in model.named_modules() if is_qkv_projection(module)] == ["h.0.attn.c_attn"]
