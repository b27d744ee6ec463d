"""Everything compiled in a block is captured, with any backend, and compilation is unchanged."""

import logging
import re
import threading
import warnings

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from functorch.compile import default_partition, make_boxed_func, nop
from tests.models import TwoLayers
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.graph import GraphLowering
from torch.utils.checkpoint import checkpoint

from torchguard import artifacts, guards


def names(artifact):
    return [graph["name"] for graph in artifact.manifest()["graphs"]]


def warnings_of_torchguard(caplog):
    return [
        record for record in caplog.records if record.name.startswith("torchguard") and record.levelno > logging.INFO
    ]


def without_addresses(code):
    return re.sub(r"\d{6,}", "...", code)


def shapes(artifact, graph):
    """The shapes of the first value of each node, by name."""
    nodes = artifact.read_json(f"{graph}.json")["nodes"]
    return {node["name"]: node["values"][0].get("tensor", {}).get("shape") for node in nodes if node["values"]}


@pytest.fixture
def captured_of(tmp_path):
    """Capture a call of a function."""

    def capture(call, **options):
        with artifacts.capture(tmp_path / "store", **options) as captured:
            call()
        assert not captured.problems
        return captured.artifacts

    return capture


class TestContent:
    def test_forward_and_backward_graphs_with_shapes_lines_and_modules(self, captured_of):
        compiled = torch.compile(TwoLayers(), backend="aot_eager")
        (one,) = captured_of(lambda: compiled(torch.randn(3, 4)).sum().backward())
        assert (one.state, names(one)) == ("whole", ["dynamo", "forward", "backward"])
        assert "torch.ops.aten.addmm.default" in one.read_text("forward.py")
        assert one.read_text("forward.dot").startswith('digraph "forward"')
        tanh = next(n for n in one.read_json("forward.json")["nodes"] if n["target"] == "aten.tanh.default")
        tensor = {"shape": [3, 8], "stride": [8, 1], "dtype": "float32", "device": "cpu", "requires_grad": False}
        assert tanh["values"] == [{"tensor": tensor}]
        assert tanh["source"]["text"] == "hidden = torch.tanh(self.first(x))"
        assert tanh["source"]["file"] == TwoLayers.forward.__code__.co_filename
        linear = next(n for n in one.read_json("backward.json")["nodes"] if n["target"] == "aten.mm.default")
        assert linear["modules"][-1]["type"] == "torch.nn.modules.linear.Linear"

    def test_guards_and_environment(self, captured_of):
        compiled = torch.compile(TwoLayers(), backend="eager")
        (one,) = captured_of(lambda: compiled(torch.randn(3, 4)))
        found = one.read_json("guards.json")
        assert found["count"] == len(found["guards"]) > 5
        assert any(guard["type"] == "TENSOR_MATCH" and "'x'" in guard["source"] for guard in found["guards"])
        assert "TENSOR_MATCH" in one.read_text("guards.txt")
        environment = one.read_json("environment.json")
        assert environment["versions"]["torch"] == torch.__version__
        assert environment["torch"]["grad_enabled"] == "True"
        about = one.manifest()
        assert (about["backend"], about["function"]) == ("eager", "TwoLayers.forward")

    def test_variables_that_look_like_secrets_are_left_out(self, captured_of, monkeypatch):
        monkeypatch.setenv("TORCH_API_TOKEN", "hush")
        monkeypatch.setenv("TORCH_SOMETHING", "loud")
        (one,) = captured_of(lambda: torch.compile(torch.sin, backend="eager")(torch.ones(2)))
        assert "hush" not in one.read_text("environment.json")
        assert one.read_json("environment.json")["variables"]["TORCH_SOMETHING"] == "loud"

    def test_reasons_of_a_recompile(self, captured_of):
        compiled = torch.compile(TwoLayers(), backend="eager", dynamic=False)

        def twice():
            compiled(torch.randn(3, 4))
            compiled(torch.randn(5, 4))

        _, again = captured_of(twice)
        (miss,) = again.read_json("recompiles.json")["recompiled_for"]
        assert "expected 3, actual 5" in miss["failures"][0]["why"]

    def test_eager_has_only_the_graph_of_dynamo(self, captured_of):
        compiled = torch.compile(TwoLayers(), backend="eager")
        (one,) = captured_of(lambda: compiled(torch.randn(3, 4)).sum().backward())
        assert names(one) == ["dynamo"]

    def test_without_gradients_there_is_one_inference_graph(self, captured_of):
        compiled = torch.compile(TwoLayers(), backend="aot_eager")
        with torch.no_grad():
            (one,) = captured_of(lambda: compiled(torch.randn(3, 4)))
        assert names(one) == ["dynamo", "inference"]
        assert one.manifest()["waiting_for"] == []

    def test_a_custom_backend(self, captured_of):
        def mine(graph, inputs):
            return graph.forward

        (one,) = captured_of(lambda: torch.compile(TwoLayers(), backend=mine)(torch.randn(3, 4)))
        assert (one.manifest()["backend"], names(one)) == ("mine", ["dynamo"])

    def test_inductor_and_its_code(self, captured_of):
        compiled = torch.compile(TwoLayers(), backend="inductor")
        (one,) = captured_of(lambda: compiled(torch.randn(3, 4)).sum().backward())
        assert names(one) == ["dynamo", "forward", "backward"]
        for graph in ("forward", "backward"):
            assert "def call(" in one.read_text(f"output_code.{graph}.py")

    def test_graph_caches_are_bypassed(self, captured_of):
        def run():
            torch._dynamo.reset()
            torch.compile(TwoLayers(), backend="inductor")(torch.randn(3, 4)).sum().backward()

        functorch, inductor = torch._functorch.config, torch._inductor.config
        with functorch.patch(enable_autograd_cache=True), inductor.patch(fx_graph_cache=True):
            run()
            (one,) = captured_of(run)
            assert (functorch.enable_autograd_cache, inductor.fx_graph_cache) == (True, True)
        assert names(one) == ["dynamo", "forward", "backward"]

    def test_both_sides_of_a_graph_break_and_its_reason(self, captured_of):
        def broken(x):
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        first, second = captured_of(lambda: torch.compile(broken, backend="aot_eager")(torch.ones(2)))
        (found,) = first.read_json("recompiles.json")["graph_breaks"]
        assert found["file"] == __file__
        assert "aten.mul.Tensor" in second.read_text("inference.py")

    def test_symbolic_sizes_are_text(self, captured_of):
        compiled = torch.compile(TwoLayers(), backend="aot_eager", dynamic=True)
        (one,) = captured_of(lambda: compiled(torch.randn(3, 4)).sum().backward())
        rows, columns = shapes(one, "forward")["tanh"]
        assert (type(rows), columns) == (str, 8)

    def test_graphs_within_graphs(self, captured_of):
        net = TwoLayers()

        def step(x):
            return checkpoint(net, x, use_reentrant=False).sum()

        (one,) = captured_of(lambda: torch.compile(step, backend="aot_eager")(torch.randn(3, 4)).backward())
        assert names(one) == ["dynamo", "forward", "backward"]
        assert any("." in node["name"] for node in one.read_json("dynamo.json")["nodes"])
        assert "aten.tanh.default" in one.read_text("backward.py")  # computed again

    def test_a_frame_that_a_backend_refuses(self, tmp_path):
        def refusing(graph, inputs):
            raise RuntimeError("not on this device")

        with artifacts.capture(tmp_path) as captured, pytest.raises(Exception, match="not on this device"):
            torch.compile(TwoLayers(), backend=refusing)(torch.randn(3, 4))
        (one,) = captured.artifacts
        assert any("not on this device" in note for note in one.manifest()["notes"])
        assert names(one) == ["dynamo"]

    def test_a_backward_graph_that_cannot_be_compiled(self, tmp_path):
        def refusing(graph, inputs):
            raise RuntimeError("no way back")

        backend = aot_autograd(fw_compiler=nop, bw_compiler=refusing)
        with artifacts.capture(tmp_path) as captured, pytest.raises(RuntimeError, match="no way back"):
            torch.compile(TwoLayers(), backend=backend)(torch.randn(3, 4)).sum().backward()
        (one,) = captured.artifacts
        assert any("no way back" in note for note in one.manifest()["notes"])
        assert "backward" in names(one)

    def test_a_frame_without_a_graph(self, captured_of):
        def breaking(x):
            breaking.calls.append("before any tensor is used")
            torch._dynamo.graph_break()
            return x + 1

        breaking.calls = []
        found = captured_of(lambda: torch.compile(breaking, backend="eager")(torch.ones(2)))
        assert [names(one) for one in found] == [[], ["dynamo"]]
        assert found[0].read_json("guards.json")["count"] > 0


class TestLateBackward:
    def test_is_added_when_it_is_compiled(self, tmp_path):
        with artifacts.capture(tmp_path) as captured:
            loss = torch.compile(TwoLayers(), backend="aot_eager")(torch.randn(3, 4)).sum()
            (before,) = captured.artifacts
            waiting = before.manifest()["waiting_for"]
            loss.backward()
        (after,) = captured.artifacts
        assert (waiting, names(after)) == (["backward"], ["dynamo", "forward", "backward"])
        assert after.manifest()["waiting_for"] == []

    def test_in_another_thread(self, tmp_path):
        with artifacts.capture(tmp_path) as captured:
            loss = torch.compile(TwoLayers(), backend="aot_eager")(torch.randn(3, 4)).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert names(captured.artifacts[0]) == ["dynamo", "forward", "backward"]

    def test_after_the_block_is_not_captured_and_noted_as_missing(self, tmp_path):
        with artifacts.capture(tmp_path) as captured:
            loss = torch.compile(TwoLayers(), backend="aot_eager")(torch.randn(3, 4)).sum()
        loss.backward()
        about = captured.artifacts[0].manifest()
        assert about["notes"][-1] == "not compiled while this was captured: backward"
        assert about["waiting_for"] == []


class TestNothingChanges:
    @pytest.mark.parametrize("dynamic", [False, True, None])
    def test_results_guards_and_compilations(self, tmp_path, dynamic):
        def run():
            torch._dynamo.reset()
            torch.manual_seed(0)
            net = TwoLayers()
            compiled = torch.compile(net, backend="aot_eager", dynamic=dynamic)
            found = []
            with guards.inspect() as seen:
                for rows in (3, 5, 7, 3):
                    compiled(torch.ones(rows, 4)).sum().backward()
                    found.append(net.first.weight.grad.clone())
            codes = [
                [(guard.type, without_addresses(guard.code)) for guard in frame.guards.all_guards()]
                for frame in seen.frames
            ]
            return found, codes

        grads, plain = run()
        with artifacts.capture(tmp_path, exported=True, on_graphs=lambda graphs: None) as captured:
            same_grads, same = run()
        assert (same, len(captured.artifacts)) == (plain, len(plain))
        assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))

    def test_code_compiled_before_the_capture_is_reused(self, tmp_path):
        net = TwoLayers()
        compiled = torch.compile(net, backend="aot_eager")
        compiled(torch.ones(3, 4)).sum().backward()
        with artifacts.capture(tmp_path) as captured, guards.expect_no_recompile():
            compiled(torch.ones(3, 4)).sum().backward()
        assert captured.artifacts == []


class TestFailures:
    def test_a_directory_that_cannot_be_written_to_is_an_error_at_once(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        error = pytest.raises(artifacts.ArtifactError, match=r"Cannot capture into .*file.*Name a directory")
        with error, artifacts.capture(tmp_path / "file"):
            pass
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_directory_that_is_removed_later_is_one_warning(self, tmp_path, caplog):
        root = tmp_path / "store"
        compiled = torch.compile(TwoLayers(), backend="aot_eager", dynamic=False)
        with caplog.at_level(logging.WARNING, "torchguard"), artifacts.capture(root) as captured:
            root.rmdir()
            root.write_text("something else is here now")
            for rows in (1, 2, 3):
                compiled(torch.ones(rows, 4)).sum().backward()
        assert captured.artifacts == []
        assert len(warnings_of_torchguard(caplog)) == 1
        assert len(captured.problems) >= 3

    def test_an_artifact_that_is_removed_before_its_backward(self, tmp_path, caplog):
        with artifacts.capture(tmp_path) as captured:
            loss = torch.compile(TwoLayers(), backend="aot_eager")(torch.randn(3, 4)).sum()
            artifacts.Store(tmp_path).clean(keep=0)
            loss.backward()
        assert captured.artifacts == []
        assert list(tmp_path.iterdir()) == []
        assert len(warnings_of_torchguard(caplog)) == 1

    def test_a_graph_that_cannot_be_encoded_is_noted(self, tmp_path, caplog):
        def spoiling(*args, **kwargs):
            forward, backward = default_partition(*args, **kwargs)
            for node in forward.graph.nodes:
                node.meta["nn_module_stack"] = "not what it should be"
            return forward, backward

        backend = aot_autograd(fw_compiler=nop, partition_fn=spoiling)
        with artifacts.capture(tmp_path) as captured:
            torch.compile(TwoLayers(), backend=backend)(torch.ones(3, 4)).sum().backward()
        (one,) = captured.artifacts
        assert (one.state, names(one)) == ("whole", ["dynamo", "forward", "backward"])
        assert "aten.tanh" in one.read_text("forward.py")
        assert "forward.json" not in one.files
        assert any(note.startswith("forward.json could not be captured") for note in one.manifest()["notes"])
        assert len(warnings_of_torchguard(caplog)) == 1

    def test_a_callback_that_fails_is_noted(self, tmp_path, caplog):
        with artifacts.capture(tmp_path, on_graphs=lambda graphs: 1 / 0) as captured:
            torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4)).sum().backward()
        (one,) = captured.artifacts
        assert [note for note in one.manifest()["notes"] if "on_graphs" in note and "ZeroDivisionError" in note]
        assert len(warnings_of_torchguard(caplog)) == 1

    def test_under_warnings_as_errors(self, captured_of):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # Dynamo, of itself
            assert captured_of(lambda: torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4)))


class TestMissingPrivateFunctions:
    def test_of_output_code(self, tmp_path, monkeypatch):
        monkeypatch.delattr(GraphLowering, "save_output_code")
        with artifacts.capture(tmp_path) as captured:
            torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4))
        about = captured.artifacts[0].manifest()
        assert about["notes"][0] == f"output code: torch {torch.__version__} has no save_output_code"

    def test_of_forward_and_backward_graphs(self, tmp_path, monkeypatch):
        original = torch._functorch.aot_autograd.aot_stage2_compile
        monkeypatch.setattr(torch._functorch.aot_autograd, "aot_stage2_compile", lambda *args: original(*args))
        with artifacts.capture(tmp_path) as captured:
            torch.compile(TwoLayers(), backend="eager")(torch.ones(3, 4))
        assert captured.artifacts[0].manifest()["notes"][0].startswith("forward and backward graphs: torch")

    def test_of_guards(self, tmp_path, monkeypatch):
        monkeypatch.delattr(torch._dynamo.guards, "get_guard_fail_reason")  # which torch needs to recompile alone
        with artifacts.capture(tmp_path) as captured:
            torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4)).sum().backward()
        (one,) = captured.artifacts
        assert names(one) == ["dynamo", "forward", "backward"]
        assert "guards.json" not in one.files
        assert any("has no torch._dynamo.guards.get_guard_fail_reason" in note for note in one.manifest()["notes"])


class TestConcurrency:
    def test_each_thread_has_its_own_artifact(self, tmp_path):
        steps = {
            "sin": (lambda x: torch.sin(x), "cos"),
            "tanh": (lambda x: torch.tanh(x), "tanh_backward"),
            "sigmoid": (lambda x: torch.sigmoid(x), "sigmoid_backward"),
            "relu": (lambda x: torch.relu(x), "threshold_backward"),
        }

        def train(step):
            torch.compile(step, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()

        with artifacts.capture(tmp_path) as captured:
            threads = [threading.Thread(target=train, args=(step,)) for step, _ in steps.values()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [names(one) for one in captured.artifacts] == [["dynamo", "forward", "backward"]] * 4
        for there, (_, back) in steps.items():
            (one,) = [one for one in captured.artifacts if there in shapes(one, "forward")]
            assert back in shapes(one, "backward")

    def test_a_backend_that_compiles_something_itself(self, tmp_path):
        def compiling(graph, inputs):
            torch.compile(lambda x: x.cos(), backend="eager")(torch.ones(2))
            return graph.forward

        with artifacts.capture(tmp_path) as captured:
            compiled = torch.compile(lambda x: x.sin(), backend=compiling, dynamic=False)
            compiled(torch.ones(2))
            compiled(torch.ones(3))
        by_id = {one.manifest()["compile_id"]: one for one in captured.artifacts}
        assert {one.manifest()["backend"] for one in by_id.values()} == {"eager", "compiling"}
        (miss,) = by_id["0/1"].read_json("recompiles.json")["recompiled_for"]
        assert miss["compile_id"] == "0/0"


class TestNested:
    def test_both_captures_have_what_is_compiled_in_both(self, tmp_path):
        compiled = torch.compile(TwoLayers(), backend="aot_eager", dynamic=False)
        with artifacts.capture(tmp_path / "outer") as outer:
            compiled(torch.ones(1, 4)).sum().backward()
            with artifacts.capture(tmp_path / "inner") as inner:
                loss = compiled(torch.ones(2, 4)).sum()
            loss.backward()
        assert [names(one) for one in outer.artifacts] == [["dynamo", "forward", "backward"]] * 2
        assert [names(one) for one in inner.artifacts] == [["dynamo", "forward"]]
        assert all(one.state == "whole" for one in [*outer.artifacts, *inner.artifacts])

    def test_into_the_same_directory(self, tmp_path):
        with artifacts.capture(tmp_path), artifacts.capture(tmp_path):
            torch.compile(TwoLayers(), backend="eager")(torch.ones(1, 4))
        assert [one.state for one in artifacts.Store(tmp_path)] == ["whole", "whole"]


class TestAttachedFilesAndCallbacks:
    def test_a_backend_attaches_a_report_to_each_graph(self, tmp_path):
        def reporting(graph, inputs):
            artifacts.attach("device.json", {"nodes": len(graph.graph.nodes)})
            return make_boxed_func(graph.forward)

        with artifacts.capture(tmp_path) as captured:
            backend = aot_autograd(fw_compiler=reporting)
            torch.compile(TwoLayers(), backend=backend)(torch.ones(3, 4)).sum().backward()
        (one,) = captured.artifacts
        assert one.attached("device.json") == ("device.json", "device_2.json")
        nodes = {graph["name"]: graph["nodes"] for graph in one.manifest()["graphs"]}
        reports = [one.read_json(name)["nodes"] for name in one.attached("device.json")]
        assert reports == [nodes["forward"], nodes["backward"]]

    def test_attaching_does_nothing_where_nothing_is_captured(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        artifacts.attach("device.json", {})
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["../escaped.json", "/etc/x", "manifest.json", "a\nb", ".torchguard", ""])
    def test_a_name_outside_the_directory_is_noted_and_not_written(self, tmp_path, name, caplog):
        def attaching(graph, inputs):
            artifacts.attach(name, "text")
            return graph.forward

        with artifacts.capture(tmp_path / "store") as captured:
            torch.compile(TwoLayers(), backend=attaching)(torch.ones(3, 4))
        (one,) = captured.artifacts
        assert (one.state, one.attached(name)) == ("whole", ())
        assert any("cannot be the name" in note for note in one.manifest()["notes"])
        assert [path.name for path in tmp_path.iterdir()] == ["store"]

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_on_graphs_is_called_when_graphs_are_compiled(self, tmp_path, backend):
        found = []
        with artifacts.capture(tmp_path, on_graphs=found.append):
            torch.compile(TwoLayers(), backend=backend)(torch.ones(3, 4)).sum().backward()
        given = [(g.dynamo is not None, g.forward is not None, g.backward is not None) for g in found]
        assert given == ([(True, False, False)] if backend == "eager" else [(True, True, False), (True, True, True)])

    def test_on_graphs_receives_copies(self, tmp_path):
        def empty(graphs):
            for graph in (graphs.dynamo, graphs.forward, graphs.backward):
                if graph is not None:
                    graph.graph = torch.fx.Graph()

        with artifacts.capture(tmp_path, on_graphs=empty) as captured:
            torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4)).sum().backward()
        assert not captured.problems


class TestExported:
    def test_a_graph_can_be_loaded_and_run_without_its_weights_in_the_file(self, tmp_path):
        net = nn.Linear(300, 300)
        x = torch.randn(2, 300)
        with artifacts.capture(tmp_path, exported=True) as captured, torch.no_grad():
            expected = torch.compile(net, backend="aot_eager")(x)
        (one,) = captured.artifacts
        assert len(one.read_bytes("inference.pt2")) < 100_000 < net.weight.nbytes
        program = one.load_graph("inference")
        inputs = {tuple(value.shape): value for value in (net.weight, net.bias, x)}
        order = [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.op == "placeholder"]
        (found,) = program.module()(*(inputs[shape] for shape in order))
        assert torch.equal(found, expected)

    def test_forward_and_backward(self, tmp_path):
        with artifacts.capture(tmp_path, exported=True) as captured:
            torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4)).sum().backward()
        (one,) = captured.artifacts
        for name in ("forward", "backward"):
            assert isinstance(one.load_graph(name), torch.export.ExportedProgram)

    def test_the_error_says_why_a_graph_was_not_exported(self, tmp_path):
        with artifacts.capture(tmp_path, exported=True) as captured:
            torch.compile(TwoLayers(), backend="aot_eager", dynamic=True)(torch.ones(3, 4)).sum().backward()
        with pytest.raises(artifacts.NoSuchArtifactError, match=r"forward cannot be loaded.*SymInt"):
            captured.artifacts[0].load_graph("forward")

    def test_is_off_by_default(self, tmp_path):
        with artifacts.capture(tmp_path) as captured:
            torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4))
        with pytest.raises(artifacts.NoSuchArtifactError, match="exported=True"):
            captured.artifacts[0].load_graph("forward")
        with pytest.raises(LookupError, match=r"has no graph 'joint'\. It has: dynamo, forward"):
            captured.artifacts[0].load_graph("joint")


class TestDrawings:
    def test_where_graphviz_is_installed(self, tmp_path, monkeypatch):
        dot = tmp_path / "bin" / "dot"
        dot.parent.mkdir()
        dot.write_text('#!/bin/sh\necho "<svg>"; cat\n')
        dot.chmod(0o755)
        monkeypatch.setenv("PATH", str(dot.parent), prepend=":")
        with artifacts.capture(tmp_path / "store") as captured:
            torch.compile(TwoLayers(), backend="aot_eager")(torch.ones(3, 4)).sum().backward()
        (one,) = captured.artifacts
        assert one.state == "whole"
        for graph in names(one):
            assert one.read_text(f"{graph}.svg") == "<svg>\n" + one.read_text(f"{graph}.dot")

    def test_dot_has_escaped_nodes_and_edges(self, captured_of):
        (one,) = captured_of(lambda: torch.compile(lambda x: {'a"b': x.sin()}, backend="eager")(torch.ones(2)))
        lines = one.read_text("dynamo.dot").splitlines()
        assert (lines[0], lines[-1]) == ('digraph "dynamo" {', "}")
        assert any(line.startswith('  "sin" [label="sin\\nsin\\nf32[2]"') for line in lines)
        assert '  "l_x_" -> "sin";' in lines

    def test_a_failure_of_graphviz_is_noted(self, tmp_path, monkeypatch):
        dot = tmp_path / "bin" / "dot"
        dot.parent.mkdir()
        dot.write_text("#!/bin/sh\nexit 1\n")
        dot.chmod(0o755)
        monkeypatch.setenv("PATH", str(dot.parent), prepend=":")
        with artifacts.capture(tmp_path / "store") as captured:
            torch.compile(TwoLayers(), backend="eager")(torch.ones(3, 4))
        assert any(note.startswith("dynamo.svg") for note in captured.artifacts[0].manifest()["notes"])

    def test_missing_graphviz_is_noted(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with artifacts.capture(tmp_path) as captured:
            torch.compile(TwoLayers(), backend="eager")(torch.ones(3, 4))
        assert "there is no SVG: dot of Graphviz is not on PATH" in captured.artifacts[0].manifest()["notes"]


class TestLimit:
    def test_the_oldest_are_removed_first_and_the_newest_stays(self, tmp_path):
        compiled = torch.compile(TwoLayers(), backend="eager", dynamic=False)
        with artifacts.capture(tmp_path, limit=1) as captured:
            for rows in (1, 2, 3):
                compiled(torch.ones(rows, 4))
        (left,) = artifacts.Store(tmp_path)
        assert (left.manifest()["compile_id"], captured.artifacts) == ("0/2", [left])

    def test_artifacts_below_the_limit_stay(self, tmp_path):
        compiled = torch.compile(TwoLayers(), backend="eager", dynamic=False)
        with artifacts.capture(tmp_path, limit="10MB") as captured:
            for rows in (1, 2, 3):
                compiled(torch.ones(rows, 4))
        assert len(captured.artifacts) == 3

    def test_can_be_set_by_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHGUARD_ARTIFACTS_LIMIT", "1")
        monkeypatch.setenv("TORCHGUARD_ARTIFACTS", str(tmp_path))
        compiled = torch.compile(TwoLayers(), backend="eager", dynamic=False)
        with artifacts.capture():
            for rows in (1, 2, 3):
                compiled(torch.ones(rows, 4))
        assert len(list(artifacts.Store())) == 1

    def test_that_is_not_a_size(self, tmp_path):
        error = pytest.raises(artifacts.ArtifactError, match="'2 apples' is not a size")
        with error, artifacts.capture(tmp_path, limit="2 apples"):
            pass
