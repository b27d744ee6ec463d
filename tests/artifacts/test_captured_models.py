"""Models of transformers, forward and backward."""

import pytest
import torch
from tests.models import bert, gpt2

from torchguard import artifacts


@pytest.mark.parametrize(
    ("make", "module"),
    [
        pytest.param(lambda: bert(num_hidden_layers=2), "BertSelfAttention", marks=pytest.mark.long),
        (lambda: gpt2(n_layer=2), "GPT2Attention"),
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
