"""`torchguard analyze`, of artifacts and of models that a callable builds."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from tests.models import gpt2

from torchguard import artifacts
from torchguard.cli._model_graphs import GraphCollector, check
from torchguard.cli._rebuild import pairs_in
from torchguard.cli._targets import load_target
from torchguard.device import Device, mock_backend

BUILD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    def forward(self, x, *, scale=1):
        return self.layers(x) * scale

def build():
    return Net(), (torch.randn(16, 16),), {"scale": 3}

def inference():
    return Net().requires_grad_(False), [torch.randn(16, 16)]

def compiled():
    return torch.compile(Net(), backend="aot_eager"), (torch.randn(16, 16),)

def breaking():
    def f(x):
        torch._dynamo.graph_break()
        return x.sin()
    return f, (torch.randn(4),)

class Nested:
    make = staticmethod(build)
"""


@pytest.fixture
def trained(captured):
    """The artifact of a trained model, without symbolic sizes."""
    return next(one for one in captured if one.id.endswith("0_0") and "backward.json" in one.files)


@pytest.mark.parametrize("kind", ["guards", "memory", "graph"])
def test_without_an_id_the_newest_artifact_is_analyzed(invoke, captured, kind):
    result = invoke("analyze", "--type", kind, "--dir", captured.root)
    assert result.exit_code == 0
    assert captured.find().id in result.stderr
    assert result.stdout


@pytest.mark.parametrize("kind", ["guards", "device", "memory", "graph"])
def test_each_type_gives_json_alone(invoke, captured, trained, kind):
    device = ["--device", "edge-npu"] if kind == "device" else []
    result = invoke("analyze", "--type", kind, *device, trained.id, "--dir", captured.root, "--json")
    assert json.loads(result.stdout)["type"] == kind


def test_guards_of_an_artifact_are_counted_and_recompiles_explained(invoke, captured):
    again = next(one for one in captured if one.id.endswith("0_1"))
    output = invoke("analyze", "--type", "guards", again.id, "--dir", captured.root).stdout
    assert "TENSOR_MATCH" in output
    assert output.startswith("1 compilation\n")
    assert "expected 16, actual 8" in output
    assert "mark_dynamic" in output


def test_guards_of_a_callable_come_with_their_cost(invoke, module, fake_guard_clock):
    output = json.loads(invoke("analyze", "-t", "guards", f"{module(BUILD)}:build", "--json").stdout)
    (frame,) = output["frames"]
    assert frame["function"] == "Net.forward"
    assert len(frame["guards"]) == frame["guard_count"] > 0
    assert output["cost"]["hot_us"] > 0
    assert any("layers" in source for source, _ in output["cost"]["by_source"])


def test_graph_breaks_of_a_callable_are_printed_with_their_source_line(invoke, module):
    output = invoke("analyze", "-t", "guards", f"{module(BUILD)}:breaking").stdout
    assert "graph break" in output
    assert "torch._dynamo.graph_break()" in output


def test_memory_is_printed_forward_and_backward_with_the_tensors_alive(invoke, module):
    output = invoke("analyze", "-t", "memory", f"{module(BUILD)}:build").stdout
    assert "0/0 forward: peak" in output
    assert "0/0 backward: peak" in output
    assert "ALIVE" in output
    assert "█" in output


@pytest.mark.long
def test_if_the_encoding_has_no_blocks_the_chart_is_ascii(command, captured, trained):
    ran = command("analyze", "-t", "memory", trained.id, "--dir", captured.root, PYTHONIOENCODING="ascii")
    assert ran.returncode == 0
    assert "|####" in ran.stdout


@pytest.mark.parametrize("name", ["inference", "compiled", "Nested.make"])
def test_a_callable_may_return_any_model_that_can_be_called(invoke, module, name):
    result = invoke("analyze", "-t", "graph", f"{module(BUILD)}:{name}")
    assert result.exit_code == 0
    assert "aten.addmm.default" in result.stdout
    assert "layers.0: t, addmm" in result.stdout


def test_a_device_is_given_by_name_or_file_and_broken_rules_exit_with_1(invoke, module, tmp_path):
    target = f"{module(BUILD)}:build"
    (tmp_path / "mine.toml").write_text('name = "mine"\ndeny = ["aten.gelu"]\n')
    result = invoke("analyze", "-t", "device", "--device", "mine.toml", target)
    assert result.exit_code == 1
    assert "on mine" in result.stdout
    assert "aten.gelu.default" in result.stdout
    assert ".py:10  return self.layers(x) * scale" in result.stdout
    (tmp_path / "any.toml").write_text('name = "any"\n')
    assert invoke("analyze", "-t", "device", "--device", "any.toml", target).exit_code == 0


def tiny_gpt2():
    return gpt2(n_embd=32, vocab_size=64, use_cache=True), torch.randint(0, 64, (2, 8))


def resnet():
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])), torch.randn(2, 3, 16, 16)


@pytest.mark.parametrize("build", [tiny_gpt2, resnet])
def test_a_graph_rebuilt_from_an_artifact_gets_the_report_of_the_graph_itself(tmp_path, build):
    model, given = build()
    live = GraphCollector()
    with artifacts.capture(tmp_path, on_graphs=live) as captured:
        torch.compile(model, backend="aot_eager")(given)[0].sum().backward()
    device = Device.from_toml("edge-npu")
    (pair,) = live
    (again,) = pairs_in(captured.artifacts[0])
    expected, found = check(pair, device), check(again, device)
    assert found.coverage == expected.coverage
    assert [plan.curve for plan in found.memory] == [plan.curve for plan in expected.memory]
    assert found.by_op() == expected.by_op()
    assert found.by_line() == expected.by_line()


ROLES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(770, 64), nn.Linear(64, 16)
    def forward(self, x):
        return self.two(self.one(x))

def build():
    return Net(), (torch.randn(16, 770),)
"""


def test_parameters_and_activations_are_distinguished_as_by_the_backend(invoke, module, tmp_path):
    name = module(ROLES)
    target = load_target(f"{name}:build")
    model, (x,) = target.model, target.args
    backend = mock_backend("edge-npu")
    torch.compile(model, backend=backend)(x).sum().backward()
    torch._dynamo.reset()
    with artifacts.capture(tmp_path / "store"):
        torch.compile(model, backend="aot_eager")(x).sum().backward()
    expected = backend.report().by_rule()
    assert expected["TGD101"] == 3
    for given in (["--dir", tmp_path / "store"], [f"{name}:build"]):
        output = json.loads(invoke("analyze", "-t", "device", "--device", "edge-npu", "--json", *given).stdout)
        assert output["by_rule"] == expected
        output = invoke("analyze", "-t", "device", "--device", "edge-npu", *given).stdout
        assert "edge-npu supports float16, bfloat16 (one.bias and 3 more) [2 times]" in output
        output = invoke("analyze", "-t", "memory", *given).stdout
        assert "one.weight" in output
        assert "primals" not in output


def test_symbols_are_replaced_by_the_concrete_sizes(invoke, tmp_path):
    model = torch.nn.Linear(3, 5)
    x = torch.randn(4, 6, 3)
    plans = []
    for is_dynamic in (False, True):
        torch._dynamo.reset()
        with artifacts.capture(tmp_path / str(is_dynamic)):
            torch.compile(model, backend="aot_eager", dynamic=is_dynamic)(x).sum().backward()
        result = invoke("analyze", "-t", "memory", "--json", "--dir", tmp_path / str(is_dynamic))
        assert result.exit_code == 0, result.stderr
        (compilation,) = json.loads(result.stdout)["compilations"]
        plans.append({name: plan["peak"] for name, plan in compilation["graphs"].items()})
    assert plans[0] == plans[1]


def test_symbolic_sizes_are_named_and_break_the_rule_of_a_device_without_dynamic_shapes(invoke, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.GELU()).bfloat16()
    with artifacts.capture(tmp_path / "store"), torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        compiled(torch.randn(4, 32, dtype=torch.bfloat16))
    analyze = ["analyze", "-t", "device", "--dir", tmp_path / "store", "--device"]
    result = invoke(*analyze, "edge-npu")
    assert result.exit_code == 1
    assert re.search(r"^at sizes (s\d+)=4$", result.stdout, re.MULTILINE)
    assert re.search(r"TGD304 inference: aten.addmm.default: sizes s\d+ are symbolic", result.stdout)
    output = json.loads(invoke(*analyze, "edge-npu", "--json").stdout)
    assert [*output["sizes"].values()] == [4]
    (tmp_path / "any.toml").write_text('name = "any"\n')
    result = invoke(*analyze, tmp_path / "any.toml")
    assert (result.exit_code, "TGD304" in result.stdout) == (0, False)


def test_an_artifact_without_graphs_of_aotautograd_is_refused(invoke, tmp_path):
    with artifacts.capture(tmp_path):
        torch.compile(lambda x: x.sin(), backend="eager")(torch.randn(4))
    result = invoke("analyze", "-t", "memory", "--dir", tmp_path)
    assert result.exit_code == 3
    assert "eager" in result.stderr


def test_a_target_may_give_its_arguments_by_name_alone(invoke, module):
    name = module("from torch import nn, ones\ndef build(): return nn.Linear(3, 3), {'input': ones(2, 3)}\n")
    result = invoke("analyze", f"{name}:build", "-t", "memory", "--json")
    assert result.exit_code == 0, result.stderr


WRONG = {
    "no_such_module:build": (2, "module 'no_such_module' cannot be imported"),
    "{module}:nothing": (2, "has no 'nothing'"),
    "{module}:": (2, "is not a target"),
    "{module}:a_number": (2, "expected a callable, got a value of type int"),
    "{module}:alone": (2, "returned a value of type Linear. It must return (model, args), (model, kwargs) or"),
    "{module}:unpacked": (2, "args: expected a tuple, (x,) for one argument, or a dict of named ones, got a value"),
    "{module}:no_model": (2, "model: expected a module or a function, got a value of type int"),
    "{module}:many": (2, "returned a tuple of 4"),
    "{module}:no_kwargs": (2, "kwargs: expected a dict, got a value of type list"),
    "{module}:raises": (1, "calling it without arguments failed: RuntimeError: no weights"),
    "{module}:wrong_shape": (1, "calling the model failed: RuntimeError: "),  # torch 2.15 names addmm
}
WRONG_MODULE = """
import torch
from torch import nn
a_number = 3
x = torch.randn(2, 3)
def alone(): return nn.Linear(3, 3)
def unpacked(): return nn.Linear(3, 3), x
def no_model(): return 3, (x,)
def many(): return nn.Linear(3, 3), (x,), {}, 1
def no_kwargs(): return nn.Linear(3, 3), (x,), [1]
def raises(): raise RuntimeError("no weights")
def wrong_shape(): return nn.Linear(4, 4), (x,)
"""


@pytest.mark.parametrize(
    ("target", "expected"), WRONG.items(), ids=[name.partition(":")[2] or "empty" for name in WRONG]
)
def test_the_error_for_a_wrong_target_is_one_sentence(invoke, module, target, expected):
    code, says = expected
    result = invoke("analyze", "-t", "graph", target.format(module=module(WRONG_MODULE)))
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_error_for_a_module_that_raises_has_its_source_line(invoke, module):
    name = module("x = 1\n1 / 0")
    result = invoke("analyze", "-t", "graph", f"{name}:build")
    assert result.exit_code == 2
    assert "ZeroDivisionError" in result.stderr
    assert ".py:2)" in result.stderr


def test_a_device_is_for_its_own_type_alone(invoke, captured):
    assert invoke("analyze", "-t", "graph", "--device", "edge-npu", "--dir", captured.root).exit_code == 2
    result = invoke("analyze", "-t", "device", "--dir", captured.root)
    assert result.exit_code == 2
    assert "edge-npu" in result.stderr
    result = invoke("analyze", "-t", "device", "--device", "edge-npo", "--dir", captured.root)
    assert result.exit_code == 2
    assert "edge-npu" in result.stderr


HOSTILE = [{"schema": 2, "nodes": [{"name": 5}]}, {"schema": 2}, [], None, "x", {"schema": 2, "guards": 3, "count": 1}]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("file", ["dynamo.json", "forward.json", "guards.json", "recompiles.json"])
def test_the_error_for_a_malformed_file_is_one_sentence(invoke, captured, tmp_path, content, file):
    found = next(one for one in captured if file in one.files and "forward.json" in one.files)
    path = tmp_path / "store" / found.id
    shutil.copytree(found.path, path)
    (path / file).write_text(json.dumps(content))
    manifest = json.loads((path / "manifest.json").read_text())
    written = (path / file).read_bytes()
    manifest["files"][file] = {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    is_graph = file in ("dynamo.json", "forward.json")
    for verb in (["analyze", "-t", kind] for kind in (("graph", "memory") if is_graph else ("guards",))):
        result = invoke(*verb, "--dir", tmp_path / "store", found.id)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"{file} violates its schema" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("parts", [80, 2_000])
def test_ops_that_take_many_tensors_can_be_rebuilt(invoke, tmp_path, parts):
    def joined(x):
        return torch.cat([x * (i + 1) for i in range(3)] + [x] * parts)

    with artifacts.capture(tmp_path):
        torch.compile(joined, backend="aot_eager")(torch.randn(4))
    result = invoke("analyze", "-t", "memory", "--json", "--dir", tmp_path)
    assert result.exit_code == 0, result.stderr
