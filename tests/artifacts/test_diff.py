"""Two artifacts are compared by graphs, guards and metadata."""

import hashlib
import json

import pytest
import torch
from torch import nn

from torchguard import artifacts
from torchguard.artifacts import diff


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 8), 2

    def forward(self, x):
        hidden = torch.relu(self.layer(x))
        return hidden * 2 if self.scale == 2 else (hidden.tanh() + 1) * self.scale


@pytest.fixture
def captured(tmp_path):
    """Capture the forward and backward pass of a model, for each input it is called with."""

    def capture(net, *inputs):
        torch._dynamo.reset()
        with artifacts.capture(tmp_path) as captured:
            compiled = torch.compile(net, backend="aot_eager", dynamic=False)
            for x in inputs:
                compiled(x).sum().backward()
        return captured.artifacts

    return capture


def by_name(difference):
    return {graph.name: graph for graph in difference.graphs}


def test_the_same_compiled_twice_is_the_same(captured):
    net = Scaled()
    (first,), (second,) = captured(net, torch.ones(3, 4)), captured(net, torch.ones(3, 4))
    found = diff(first, second)
    assert found.same
    assert (found.graphs, found.metadata) == ((), ())
    assert str(found) == f"{first.id} -> {second.id}: graphs and guards are the same"


def test_another_shape_changes_nodes_and_guards(captured):
    first, second = captured(Scaled(), torch.ones(3, 4), torch.ones(5, 4))
    found = diff(first, second)
    forward = by_name(found)["forward"]
    assert (forward.added, forward.removed) == ((), ())
    assert "relu shape: [3, 8] -> [5, 8]" in map(str, forward.changed)
    assert '-        relu: "f32[3, 8]' in forward.text
    assert any("size=[5, 4]" in guard for guard in found.guards_added)
    assert any("size=[3, 4]" in guard for guard in found.guards_removed)


def test_another_dtype_changes_nodes(captured):
    net = Scaled()
    (first,) = captured(net, torch.ones(3, 4))
    (second,) = captured(net.double(), torch.ones(3, 4, dtype=torch.float64))
    assert "relu dtype: float32 -> float64" in map(str, by_name(diff(first, second))["forward"].changed)


def test_nodes_that_only_one_has(captured):
    net = Scaled()
    (first,) = captured(net, torch.ones(3, 4))
    net.scale = 3
    (second,) = captured(net, torch.ones(3, 4))
    forth, back = by_name(diff(first, second))["dynamo"], by_name(diff(second, first))["dynamo"]
    assert (
        forth.added
        == back.removed
        == (
            "%tanh = tanh(%hidden) : f32[3, 8]",
            "%add = _operator.add(%tanh, 1) : f32[3, 8]",
        )
    )
    assert forth.removed == back.added == ()
    assert {"mul args: (%, 2) -> (%, 3)", "mul inputs: hidden -> add"} <= {*map(str, forth.changed)}


def test_an_operator_instead_of_another(captured):
    (first,) = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(3, 4))
    (second,) = captured(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), torch.ones(3, 4))
    changes = [change for change in by_name(diff(first, second))["dynamo"].changed if change.what.endswith(" op")]
    assert [(change.was.rpartition(".")[2], change.now.rpartition(".")[2]) for change in changes] == [
        ("relu", "sigmoid")
    ]


def test_operands_that_were_swapped(captured):
    class Swapped(nn.Module):
        def __init__(self, is_swapped):
            super().__init__()
            self.layer, self.is_swapped = nn.Linear(4, 4), is_swapped

        def forward(self, x):
            a, b = self.layer(x), x.exp()
            return b - a if self.is_swapped else a - b

    (first,), (second,) = captured(Swapped(False), torch.ones(3, 4)), captured(Swapped(True), torch.ones(3, 4))
    assert any(change.what == "sub inputs" for change in by_name(diff(first, second))["dynamo"].changed)


def test_a_graph_that_only_one_has(captured):
    (first,) = captured(Scaled(), torch.ones(3, 4))
    with torch.no_grad():
        torch._dynamo.reset()
        with artifacts.capture(first.path.parent) as inference:
            torch.compile(Scaled(), backend="aot_eager")(torch.ones(3, 4))
    found = by_name(diff(first, inference.artifacts[0]))
    assert {"forward", "backward", "inference"} <= {*found}
    assert found["backward"].removed
    assert found["inference"].added


def test_metadata_is_compared_by_key(captured, monkeypatch):
    net = Scaled()
    (first,) = captured(net, torch.ones(3, 4))
    monkeypatch.setenv("TORCH_SOMETHING", "1")
    (second,) = captured(net, torch.ones(3, 4))
    assert [str(change) for change in diff(first, second).metadata] == ["variables.TORCH_SOMETHING: (absent) -> 1"]


def test_a_difference_as_json(captured):
    first, second = captured(Scaled(), torch.ones(3, 4), torch.ones(5, 4))
    data = json.loads(diff(first, second).to_json())
    assert data["same"] is False
    assert {graph["name"] for graph in data["graphs"]} == {"dynamo", "forward", "backward"}
    assert data["metadata"] == [{"what": "compile_id", "was": "0/0", "now": "0/1"}]


def test_a_damaged_artifact_is_an_artifact_error(captured):
    first, second = captured(Scaled(), torch.ones(3, 4), torch.ones(5, 4))
    (second.path / "forward.json").write_text("{}")
    with pytest.raises(artifacts.ArtifactError, match=r"forward\.json is not what was written"):
        diff(first, second)


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"\xff\x00",
        b"[" * 50_000 + b"]" * 50_000,
        b'{"schema": 2, "name": "", "kind": "", "nodes": [{"name": "x"}]}',
        b'{"schema": 2, "name": "", "kind": "", "nodes": [{"name": "", "op": "", "target": "", "inputs": 1}]}',
    ],
    ids=["list", "binary", "deep", "keys missing", "wrong type"],
)
def test_a_forged_artifact_is_an_artifact_error(captured, content):
    first, second = captured(Scaled(), torch.ones(3, 4), torch.ones(5, 4))
    (second.path / "forward.json").write_bytes(content)
    manifest = second.manifest()
    manifest["files"]["forward.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (second.path / "manifest.json").write_text(json.dumps(manifest))
    assert artifacts.Store(second.path.parent).find(second.id).state == "whole"
    with pytest.raises(artifacts.ArtifactError, match=r"forward\.json"):
        diff(first, second)
