"""Mending in place: what it comes to, and for whom."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from torchguard._watch.detect import look
from torchguard._watch.replace import looks_like_qkv, mend_

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_vectors_that_are_bad_become_zeros(kind):
    z = torch.ones(4, 3, dtype=kind)
    z[1, 2], z[2, 0], z[3] = NAN, -INF, torch.finfo(kind).max
    found, fine = look(z), z.clone()
    torch.testing.assert_close(mend_(fine), found, equal_nan=True)
    assert torch.equal(fine, torch.stack([z[0], torch.zeros_like(z[1]), torch.zeros_like(z[2]), z[3]]))


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (nn.Linear(8, 24), True),
        (nn.Linear(24, 8), False),
        (nn.Linear(8, 32), False),
        (nn.Embedding(24, 8), False),
        (nn.LayerNorm(24), False),
    ],
    ids=str,
)
def test_queries_keys_and_values_are_told_by_sizes(module, told):
    assert looks_like_qkv(module) is told


def test_queries_keys_and_values_of_gpt2():
    model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10, n_positions=4))
    assert [path for path, module in model.named_modules() if looks_like_qkv(module)] == ["h.0.attn.c_attn"]
