"""Models of transformers, forward and backward."""

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from torchguard import artifacts

SMALL_BERT = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
SMALL_GPT2 = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=50, use_cache=False)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        pytest.param(lambda: BertModel(SMALL_BERT), "BertSelfAttention", marks=pytest.mark.long),
        (lambda: GPT2LMHeadModel(SMALL_GPT2), "GPT2Attention"),
    ],
    ids=["bert", "gpt2"],
)
def test_transformers_in_training(tmp_path, make, module):
    model = make()
    with artifacts.capture(tmp_path, exported=True) as captured:
        torch.compile(model, backend="aot_eager")(torch.randint(0, 50, (2, 8)))[0].sum().backward()
    assert not captured.problems
    (one,) = captured.artifacts
    graphs = {graph["name"]: graph["nodes"] for graph in one.manifest()["graphs"]}
    assert {*graphs} == {"dynamo", "forward", "backward"}
    assert graphs["backward"] > graphs["forward"] > 50
    for graph in ("forward", "backward"):
        types = {entry["type"] for node in one.read_json(f"{graph}.json")["nodes"] for entry in node.get("modules", ())}
        assert any(name.endswith(module) for name in types)
    assert one.read_json("guards.json")["count"] > 20
    assert isinstance(one.load_graph("forward"), torch.export.ExportedProgram)
    assert artifacts.diff(one, one).same
