"""The backend: when it raises, what it logs, what it runs, and that it changes no guards and no results."""

import copy
import logging
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from tests.compare import assert_same_state
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from torchguard import artifacts, device, guards
from torchguard.device import Device, DeviceError, DeviceRejectionError, mock_backend
from torchguard.device._device import _VARIABLES


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for variable in [*_VARIABLES, "MOCK_DEVICE", "MOCK_STRICT", "MOCK_RUN"]:
        monkeypatch.delenv(variable, raising=False)
    yield
    mock_backend.clear()


class MyModel(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))

    def forward(self, x):
        return self.layers(x)


class Normed(nn.Module):
    """Updates its buffers in training."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x):
        return self.norm(self.linear(x)) * self.scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Mixed(nn.Module):
    """One layer in bfloat16 and one in float32, with a graph break between them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16)

    def forward(self, x):
        x = self.one(x.bfloat16()).float()
        torch._dynamo.graph_break()
        return self.two(x).sum(-1)


# Dynamo itself reads .grad where a graph resumes after a break.
NOT_A_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def rejection(call, *args):
    with pytest.raises(BackendCompilerFailed) as raised:
        call(*args)
    error = raised.value.inner_exception
    assert isinstance(error, DeviceRejectionError)
    assert isinstance(error, RuntimeError)
    return error


def check_equal_to_eager(make, x, within=1e-5, **compile_options):
    """Compare values, gradients and buffers after two steps with those of the same model uncompiled."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    other = make()
    compiled = torch.compile(other, **compile_options)
    for _ in range(2):
        expected, got = model(x), compiled(x)
        torch.testing.assert_close(got, expected, atol=within, rtol=1e-4)
        expected.float().pow(2).sum().backward()
        got.float().pow(2).sum().backward()
    assert_same_state(other, model, atol=within, rtol=1e-4)


# The documented use.


def test_mock_backend_is_a_backend_without_being_called():
    model = MyModel()
    opt_model = torch.compile(model, backend=mock_backend)
    x = torch.randn(3, 16)
    torch.testing.assert_close(opt_model(x), model(x))
    assert mock_backend.report().violations == ()


def test_the_documented_variables_are_read_at_each_compilation(monkeypatch):
    opt_model = torch.compile(MyModel(width=20), backend=mock_backend)
    monkeypatch.setenv("MOCK_STRICT", "1")
    monkeypatch.setenv("MOCK_ALIGNMENT", "16")
    monkeypatch.setenv("MOCK_MAX_MEMORY", "17179869184")  # 16 GB
    error = rejection(opt_model, torch.randn(3, 20))
    assert {violation.code for violation in error.violations} == {"TGD301"}
    assert "pad dim 1 from 20 to 32" in str(error)


def test_strict_raises_one_error_for_forward_and_backward_before_anything_runs():
    model = Normed()
    strict = Device(name="chip", deny=["aten._native_batch_norm_legit_functional", "aten.native_batch_norm_backward"])
    error = rejection(torch.compile(model, backend=mock_backend(strict, mode="strict")), torch.randn(4, 16))
    assert [(violation.graph, violation.op) for violation in error.violations] == [
        ("forward", "aten._native_batch_norm_legit_functional.default"),
        ("backward", "aten.native_batch_norm_backward.default"),
    ]
    assert model.norm.num_batches_tracked == 0
    assert str(error).startswith("2 violations of device chip:\nTGD501 forward: ")
    assert "return self.norm(self.linear(x)) * self.scale" in str(error)


def test_strict_checks_inference_graphs():
    compiled = torch.compile(MyModel(), backend=mock_backend(Device(deny="aten.gelu"), mode="strict"))
    with torch.no_grad():
        error = rejection(compiled, torch.randn(3, 16))
    assert [violation.graph for violation in error.violations] == ["inference"]


def test_strict_does_not_change_results_without_violations():
    x = torch.randn(16, 16)
    check_equal_to_eager(lambda: MyModel().requires_grad_(), x, backend=mock_backend(Device(), mode="strict"))


def test_warning_logs_each_violation_once_and_runs_the_model(caplog):
    backend = mock_backend(Device(deny="aten.gelu"), mode="warning")
    model = MyModel()
    with caplog.at_level(logging.WARNING, "torchguard.device"):
        for rows in (3, 4):
            torch._dynamo.reset()
            torch.compile(model, backend=backend, dynamic=False)(torch.randn(rows, 16))
    (record,) = [record for record in caplog.records if record.name == "torchguard.device"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("TGD501 forward: aten.gelu.default: mock does not support aten.gelu")
    assert len(backend.report().graphs) == 4


@pytest.mark.parametrize(
    ("value", "strict"), [("1", True), ("true", True), ("YES", True), ("0", False), ("off", False), ("", False)]
)
def test_mock_strict_sets_the_mode(monkeypatch, value, strict):
    monkeypatch.setenv("MOCK_STRICT", value)
    compiled = torch.compile(MyModel(), backend=mock_backend(Device(deny="aten.gelu")))
    if strict:
        rejection(compiled, torch.randn(3, 16))
    else:
        compiled(torch.randn(3, 16))


def test_python_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("MOCK_STRICT", "1")
    torch.compile(MyModel(), backend=mock_backend(Device(deny="aten.gelu"), mode="warning"))(torch.randn(3, 16))
    monkeypatch.setenv("MOCK_ALIGNMENT", "64")
    monkeypatch.setenv("MOCK_DENY", "aten.gelu")
    backend = mock_backend(deny=[], mode="warning")
    torch.compile(MyModel(), backend=backend)(torch.randn(3, 16))
    assert {violation.code for violation in backend.report().violations} == {"TGD301"}


def test_a_device_may_be_a_file_with_overrides(tmp_path):
    path = tmp_path / "chip.toml"
    path.write_text('deny = ["aten.gelu"]\nalignment = 64')
    backend = mock_backend(path, alignment=None)
    torch.compile(MyModel(), backend=backend)(torch.randn(3, 16))
    assert {violation.code for violation in backend.report().violations} == {"TGD501"}
    changed = mock_backend(Device(deny="aten.gelu"), deny=[])
    torch.compile(MyModel(), backend=changed)(torch.randn(3, 16))
    assert changed.report().violations == ()


def test_options_of_torch_compile_are_used(tmp_path):
    path = tmp_path / "chip.toml"
    path.write_text('deny = ["aten.gelu"]')
    options = {"mode": "strict", "run": "eager", "device": str(path)}
    error = rejection(torch.compile(MyModel(), backend=mock_backend, options=options), torch.randn(3, 16))
    assert [violation.op for violation in error.violations] == ["aten.gelu.default"]
    by_mode = torch.compile(MyModel(), backend=mock_backend(Device(deny="aten.gelu")), mode="strict")
    rejection(by_mode, torch.randn(3, 16))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mod": "strict"}, "unknown name 'mod'. Did you mean 'mode'"),
        ({"mode": "stric"}, "'stric' is not allowed. Did you mean 'strict'? Use strict or warning"),
        ({"run": "fast"}, "'fast' is not allowed. Use eager or inductor"),
        ({"device": "nowhere.toml"}, "there is no file 'nowhere.toml'"),
        ({"device": 3}, "expected a Device or the path of a TOML file, got 3"),
    ],
    ids=["unknown", "mode", "run", "file", "number"],
)
def test_wrong_options_raise(options, expected):
    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(MyModel(), backend=mock_backend, options=options)(torch.randn(3, 16))
    assert isinstance(raised.value.inner_exception, DeviceError)
    assert expected in str(raised.value.inner_exception)


def test_wrong_settings_raise_where_they_are_given(monkeypatch):
    with pytest.raises(DeviceError, match="mode: 'loud' is not allowed"):
        mock_backend(Device(), mode="loud")
    with pytest.raises(DeviceError, match="run: 'fast' is not allowed"):
        mock_backend(Device(), run="fast")
    with pytest.raises(DeviceError, match=r"unknown name 'alignmnt'. Did you mean 'alignment'"):
        mock_backend(Device(), alignmnt=16)
    with pytest.raises(DeviceError, match="expected a Device or the path of a TOML file, got 3"):
        mock_backend(3)  # pyright: ignore[reportArgumentType, reportCallIssue]
    monkeypatch.setenv("MOCK_STRICT", "perhaps")
    with pytest.raises(BackendCompilerFailed, match=r"MOCK_STRICT: 'perhaps' is not allowed. Use 1 or 0"):
        torch.compile(MyModel(), backend=mock_backend)(torch.randn(3, 16))


def test_the_backend_has_a_name_once_installed():
    code = (
        "import torch\n"
        "from torchguard.device import mock_backend\n"
        "def double(x): return x.double()\n"
        "out = torch.compile(double, backend='torchguard_mock')(torch.ones(3))\n"
        "assert out.dtype == torch.float64\n"
        "print([violation.code for violation in mock_backend.report().violations])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "['TGD102']"


# Results are those of eager.

SUPPORTS_NOTHING = Device(
    name="supports nothing",
    parameters=[],
    activations=[],
    indices=[],
    accumulators=[],
    layouts=[],
    alignment=1024,
    max_memory=1,
    allow=[],
    max_rank=1,
    max_dim=1,
    dynamic_shapes=False,
)
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@NOT_A_LEAF
@pytest.mark.parametrize("decompositions", ["none", "core", "inductor"])
@pytest.mark.parametrize(
    ("make", "x"),
    [(MyModel, torch.ones(3, 16)), (Normed, torch.randn(5, 16)), (Tied, TOKENS), (Mixed, torch.randn(3, 16))],
    ids=["plain", "buffers", "tied", "mixed"],
)
def test_a_device_that_supports_nothing_changes_no_result(make, x, decompositions):
    backend = mock_backend(SUPPORTS_NOTHING, decompositions=decompositions)
    check_equal_to_eager(make, x, backend=backend)
    report = backend.report()
    assert report.coverage.by_count == 0
    assert {"TGD101", "TGD102", "TGD301", "TGD401", "TGD502"} <= report.by_rule().keys()


@pytest.mark.parametrize(
    ("make", "x"), [(MyModel, torch.ones(3, 16)), (Normed, torch.randn(5, 16))], ids=["plain", "buffers"]
)
def test_inductor_runs_what_is_checked(make, x):
    backend = mock_backend(Device(deny="aten.gelu"), run="inductor")
    check_equal_to_eager(make, x, within=1e-3, backend=backend)
    assert [graph.name for graph in backend.report().graphs] == ["forward", "backward"]


def test_inductor_hides_no_op_from_the_check():
    strict = mock_backend(Device(deny=["aten.gelu", "aten.gelu_backward"]), mode="strict", run="inductor")
    error = rejection(torch.compile(MyModel(), backend=strict), torch.randn(3, 16))
    assert [violation.op for violation in error.violations] == ["aten.gelu.default", "aten.gelu_backward.default"]


def test_mock_run_selects_inductor(monkeypatch):
    monkeypatch.setenv("MOCK_RUN", "inductor")
    backend = mock_backend(Device())
    assert backend._settings({}).run == "inductor"
    monkeypatch.setenv("MOCK_RUN", "slow")
    with pytest.raises(DeviceError, match="MOCK_RUN: 'slow' is not allowed"):
        backend._settings({})


# The checked graph has the ops of the device.


def test_the_checked_graph_is_decomposed_and_keeps_source_lines():
    norm = nn.LayerNorm(16)

    def checked(decompositions):
        torch._dynamo.reset()
        backend = mock_backend(Device(deny="aten.*", decompositions=decompositions))
        torch.compile(lambda x: norm(x).relu(), backend=backend)(torch.randn(3, 16))
        found = backend.report().violations
        in_forward = [violation for violation in found if violation.graph == "forward"]
        assert all(one.source_line is not None and one.source_line.file == __file__ for one in in_forward)
        return {violation.op for violation in in_forward}

    assert "aten.native_layer_norm.default" in checked("none")
    assert "aten.native_layer_norm.default" in checked("core")
    assert {"aten.var_mean.correction", "aten.rsqrt.default"} <= checked("inductor")
    chosen = checked(["aten.native_layer_norm"])
    assert {"aten.rsqrt.default", "aten.relu.default"} <= chosen
    assert "aten.native_layer_norm.default" not in chosen


def test_an_op_without_a_decomposition_raises():
    with pytest.raises(BackendCompilerFailed, match=r"torch cannot decompose 'aten.convolution'. Remove it"):
        torch.compile(torch.relu, backend=mock_backend(decompositions="aten.convolution"))(torch.randn(3))


# A check adds no guards and causes no recompiles.

SYMBOLIC = {"alignment": {-1: 16, 0: 8}, "max_dim": 64, "max_memory": 100, "layouts": "contiguous"}


@pytest.mark.parametrize("run", ["eager", "inductor"])
@pytest.mark.parametrize("decompositions", ["none", "core", "inductor"])
def test_checking_symbolic_sizes_adds_no_guard_and_no_recompile(decompositions, run):
    def model(x, y):
        x = nn.functional.layer_norm(x, [16])
        return nn.functional.gelu(x @ y).softmax(-1).sum() + x.reshape(-1, 4).mean()

    def compiled_with(backend):
        torch._dynamo.reset()
        with guards.inspect() as seen:
            compiled = torch.compile(model, backend=backend, dynamic=True)
            for rows, columns in ((3, 5), (8, 16), (7, 9), (32, 48)):
                x = torch.randn(rows, 16, requires_grad=True)
                y = torch.randn(16, columns, requires_grad=True)
                compiled(x, y).backward()
        return [sorted(str(guard) for guard in frame.guards.all_guards()) for frame in seen.frames]

    backend = mock_backend(Device(**SYMBOLIC, decompositions=decompositions), run=run)
    guards_of_frames = compiled_with(backend)
    assert len(guards_of_frames) == 1
    assert guards_of_frames == compiled_with("aot_eager" if run == "eager" else "inductor")
    conditions = {violation.condition for violation in backend.report().violations if violation.condition}
    assert any(condition.endswith("% 16 == 0") for condition in conditions)


def test_other_sizes_recompile_only_as_torch_itself_does():
    backend = mock_backend(Device(alignment=16))
    compiled = torch.compile(MyModel(), backend=backend)
    for rows in (3, 5, 7, 9):
        compiled(torch.randn(rows, 16)).sum().backward()
    assert len(backend.report().graphs) == 4  # first with static sizes, then once with a symbolic one


@NOT_A_LEAF
def test_every_graph_of_a_function_with_a_graph_break_is_checked():
    backend = mock_backend(Device(deny="aten.addmm"))
    torch.compile(Mixed(), backend=backend)(torch.randn(3, 16)).sum().backward()
    assert [graph.name for graph in backend.report().graphs] == ["forward", "backward"] * 2


def test_graphs_of_compiled_autograd_are_checked():
    backend = mock_backend(Device(deny="aten.gelu_backward"))
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(MyModel(), backend=backend)
        torch.compile(lambda x: compiled(x).sum().backward(), backend=backend)(torch.randn(3, 16))
    assert any(graph.name == "inference" for graph in backend.report().graphs)


def test_threads_may_compile_with_one_backend():
    backend = mock_backend(Device(deny="aten.gelu"))
    models = [MyModel() for _ in range(4)]

    def work(model):
        torch.compile(model, backend=backend)(torch.randn(3, 16)).sum().backward()

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(backend.report().violations) == len(backend.report().graphs) / 2 > 0


def test_a_rejection_can_be_pickled():
    strict = mock_backend(Device(name="chip", deny="aten.gelu"), mode="strict")
    error = rejection(torch.compile(MyModel(), backend=strict), torch.randn(3, 16))
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DeviceRejectionError)
    assert str(again) == str(error)
    assert str(again).startswith("1 violation of device chip:\n")
    assert again.violations == error.violations
    assert again.report is None


def test_clear_forgets_the_report():
    backend = mock_backend(Device(deny="aten.gelu"))
    torch.compile(MyModel(), backend=backend)(torch.randn(3, 16))
    assert backend.report().graphs
    backend.clear()
    assert backend.report() == device.DeviceReport()


def test_the_artifact_of_a_rejected_model_has_its_graphs(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    with artifacts.capture(tmp_path) as captured, pytest.raises(BackendCompilerFailed):
        torch.compile(model, backend=mock_backend(deny="gelu", mode="strict"))(torch.randn(2, 4))
    (one,) = captured.artifacts
    manifest = one.manifest()
    assert [graph["kind"] for graph in manifest["graphs"]] == ["dynamo", "forward", "backward"]
    assert manifest["function"] == "Sequential"
    with artifacts.capture(tmp_path / "inference") as captured, torch.no_grad(), pytest.raises(BackendCompilerFailed):
        torch.compile(model, backend=mock_backend(deny="gelu", mode="strict"))(torch.randn(2, 4))
    (one,) = captured.artifacts
    assert [graph["kind"] for graph in one.manifest()["graphs"]] == ["dynamo", "inference"]


def test_a_copy_of_a_backend_reports_to_the_same_place():
    backend = mock_backend(Device())
    assert copy.deepcopy(backend) is backend  # Lightning copies the arguments of torch.compile
