"""The scenarios of test_second_import.py, which runs this file in a separate process.

Writes the traceback of each scenario as JSON, "" if it passed. Scenarios run one after another, in the order of this
file.
"""

import gc
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn

AGAIN: dict[str, Callable[[], None]] = {}
RELOADED: dict[str, Callable[[], None]] = {}


def again(scenario):
    AGAIN[scenario.__name__] = scenario
    return scenario


def reloaded(scenario):
    RELOADED[scenario.__name__] = scenario
    return scenario


class Copy:
    """One import of the package, including modules that it loads on first use."""

    def __init__(self, names=("err", "flags", "guards", "artifacts", "device", "compiled", "typing")):
        for name in torchguard_modules():
            del sys.modules[name]
        self.tg = importlib.import_module("torchguard")
        for name in names:
            setattr(self, name, importlib.import_module(f"torchguard.{name}"))


def torchguard_modules():
    return [name for name in sys.modules if name.partition(".")[0] == "torchguard"]


def with_own_code(function):
    """The function with its own code object: Dynamo stores compiled code by code object."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def compiled(function, backend="aot_eager"):
    return torch.compile(function, backend=backend, fullgraph=True)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.two(self.one(x).relu())


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> Tensor:
    """The second sample has a NaN, and the third a zero, whose logarithm is -Inf."""
    x = torch.ones(3, 4)
    x[1, 2], x[2, 0] = float("nan"), 0.0
    return x


def checked(copy):
    """A function with checks of one copy."""
    err, flag_nan, flag_inf = copy.err, copy.tg.flag_nan, copy.tg.flag_inf

    def logarithm(x):
        f = flag_nan(x, "given", err.new(x))
        y = x.log()
        return y, flag_inf(y, "logarithm", f)

    return with_own_code(logarithm)


def assert_recorded(copy, f, *locations):
    text = copy.flags.repr(f)
    assert all(f" @ {location}" in text for location in locations), text
    assert "Location" not in text, text


def runs_checked(copy, function):
    assert_recorded(copy, function(batch())[1], "given", "logarithm")


def runs_watched(copy, function, x=None):
    out, f = function(batch().requires_grad_() if x is None else x)
    out.sum().backward()
    assert out.isfinite().all()
    assert_recorded(copy, f, "input")


def compiles_watched(copy, backend="aot_eager", model=Small, **options):
    guarded = copy.tg.watch(model(), quarantine=True, **options)
    function = compiled(guarded, backend)
    runs_watched(copy, guarded)
    runs_watched(copy, function)
    assert all(p.grad.isfinite().all() for p in guarded.parameters())
    return guarded, function


def audits_once(copy, audit=None):
    """Assert one violation in two calls of compiled code: an unguarded attribute changes before the second."""

    class Scaled(nn.Module):
        factor = 2

        def forward(self, x):
            return x * self.factor

    model = Scaled()
    audit = audit or copy.guards.audit(copy.guards.skip_nn_modules(), every=1)
    function = copy.guards.compile(model, filter=audit, backend="eager")
    for model.factor in (2, 2, 3):
        function(torch.ones(2))
    report = audit.report()
    assert (report.calls, len(report.violations)) == (2, 1), str(report)


def graphs_in(captured) -> list[str]:
    """The names of the graphs in the only artifact of a capture."""
    (artifact,) = captured.artifacts
    assert not captured.problems, captured.problems
    return [graph["name"] for graph in artifact.manifest()["graphs"]]


def captured_from_environment(folder, fresh) -> int:
    """The number of artifacts of one compilation, with `TORCHGUARD_CAPTURE` set before `fresh` imports the package."""
    os.environ["TORCHGUARD_CAPTURE"] = str(folder)
    try:
        artifacts = fresh()
        torch.compile(with_own_code(lambda x: x + 1), backend="eager")(torch.ones(2))
    finally:
        del os.environ["TORCHGUARD_CAPTURE"]
    return len(list(artifacts.Store(folder)))


# The package is removed from `sys.modules` and imported again.


def before_import():
    global first, first_checked, first_watched, second
    first = Copy()
    first_checked = compiled(checked(first))
    runs_checked(first, first_checked)
    _, first_watched = compiles_watched(first)
    first.audit = first.guards.audit(first.guards.skip_nn_modules(), every=1)
    second = Copy()


@again
def a_second_import_defines_its_own_operators():
    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if "torchguard" in str(node.target)})
        return graph.forward

    assert second.tg is not first.tg
    for copy in (first, second):
        compiled(checked(copy), backend)(batch())
    assert graphs == [{f"{space}.begin", f"{space}.check"} for space in ("torchguard", "torchguard_2")], graphs


@again
def checks_of_the_new_copy_compile():
    runs_checked(second, checked(second))
    runs_checked(second, compiled(checked(second)))


@again
def quarantine_of_the_new_copy_compiles_on_inductor():
    compiles_watched(second, "inductor", model=lambda: nn.Linear(4, 2))


@again
def blocks_are_compiled_once_by_the_new_copy():
    compiles_watched(second, model=Tower, compile_once=True)


@again
def annotations_of_the_new_copy_are_checked():
    typing = second.typing

    @second.tg.tensorcheck
    def double(x: typing.Tensor[typing.float32_t, ("batch", 4)]):
        return x * 2

    compiled(double)(torch.ones(2, 4))
    with pytest.raises(second.tg.DimensionMismatchError):
        double(torch.ones(2, 5))


@again
def guards_of_the_new_copy_explain_recompiles():
    function = torch.compile(with_own_code(lambda x: x + 1), backend="eager", dynamic=False)
    function(torch.ones(2))
    assert second.guards.why(function, torch.ones(3)).reasons


@again
def audits_of_the_new_copy_count_once():
    audits_once(second)


@again
def audits_of_the_first_copy_count_once():
    audits_once(first, first.audit)


@again
def inspections_of_both_copies_record_a_compilation_once():
    def breaks(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x + 1

    with first.guards.inspect() as one, second.guards.inspect() as two:
        torch.compile(with_own_code(breaks), backend="eager")(torch.ones(2))
    assert [len(seen.frames) for seen in (one, two)] == [2, 2]
    assert [len(seen.graph_breaks) for seen in (one, two)] == [1, 1]


@again
def captures_of_both_copies_hold_each_graph_once():
    def total(x):
        return x.sin().sum()

    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        with first.artifacts.capture(a) as one, second.artifacts.capture(b) as two:
            compiled(with_own_code(total))(torch.ones(2, requires_grad=True)).backward()
        for found in (one, two):
            assert graphs_in(found) == ["dynamo", "forward", "backward"]


@again
def a_device_of_the_new_copy_reports_to_its_capture():
    backend = second.device.mock_backend(second.device.Device(activations="float32"), mode="strict")
    with (
        tempfile.TemporaryDirectory() as folder,
        second.artifacts.capture(folder) as found,
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed),
    ):
        torch.compile(with_own_code(lambda x: x.double()), backend=backend)(torch.ones(2))
    assert len(backend.report().violations) == 1
    assert found.problems == ()


@again
def the_backend_name_means_that_of_the_newest_copy():
    torch.compile(with_own_code(lambda x: x + 1), backend="torchguard_mock")(torch.ones(2))
    newest = Copy(("device",))
    torch.compile(with_own_code(lambda x: x + 2), backend="torchguard_mock")(torch.ones(2))
    assert len(newest.device.mock_backend.report().graphs) == 1


@again
def functions_are_compiled_out_by_both_copies():
    for copy in (first, second):
        c = copy.compiled.compile_out(lambda x: x.sin() * 2, torch.ones(3), backend="eager")
        torch.testing.assert_close(c(torch.ones(3)), torch.ones(3).sin() * 2)
        c.certify()


@again
def code_compiled_by_the_first_copy_is_not_recompiled():
    with torch._dynamo.config.patch(error_on_recompile=True):
        runs_checked(first, first_checked)
        runs_watched(first, first_watched)


@again
def the_first_copy_still_compiles():
    runs_checked(first, compiled(checked(first)))
    compiles_watched(first)


@again
def compiled_code_uses_the_config_of_its_own_copy():
    ones = torch.ones(2, 4)
    functions = [compiled(checked(copy)) for copy in (first, second)]
    assert [function(ones)[1].shape[1] for function in functions] == [4, 4]
    second.tg.set_config(second.tg.ErrorConfig(num_slots=4))
    assert [function(ones)[1].shape[1] for function in functions] == [4, 1]
    assert [copy.tg.CONFIG.num_slots for copy in (first, second)] == [16, 4]
    second.tg.set_config(second.tg.ErrorConfig())


@again
def one_graph_can_hold_checks_of_both_copies():
    def both(x):
        f = first.tg.flag_nan(x, "one", first.err.new(x))
        return second.tg.flag_inf(x.log(), "two", f)

    (graph, eager) = (compiled(with_own_code(both))(batch()), both(batch()))
    assert torch.equal(graph, eager)
    assert_recorded(second, graph, "one", "two")


@again
def locations_have_one_name_in_both_copies():
    tracked = first.tg.tracked(Small())
    x = batch()
    f = second.tg.flag_nan(x, tracked.two, second.tg.flag_nan(x, "by the second", second.err.new(x)))
    f = first.tg.flag_inf(x.log(), "by the first", f)
    for copy in (first, second):
        assert_recorded(copy, f, "two", "by the second", "by the first")


@again
def the_new_copy_unwatches_what_the_first_watched():
    model = Tower()
    guarded = first.tg.watch(model, quarantine=True, compile_once=True)
    before = {path: {*vars(module)} for path, module in Tower().named_modules()}
    assert second.tg.unwatch(guarded) is model
    assert {path: {*vars(module)} for path, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    compiles_watched(second, model=lambda: model)


@again
def an_annotation_of_the_first_copy_raises_in_the_new_one():
    typing = first.typing

    def double(x: typing.Tensor[typing.float32_t, ("batch", 4)]):
        return x * 2

    with pytest.raises(second.tg.AnnotationError):
        second.tg.tensorcheck(double)


@again
def five_more_imports_change_nothing():
    for _ in range(5):
        newest = Copy(("err", "flags"))
    gc.collect()
    runs_checked(newest, compiled(checked(newest)))
    with torch._dynamo.config.patch(error_on_recompile=True):
        runs_checked(first, first_checked)
        runs_watched(first, first_watched)


@again
def a_process_is_captured_once():
    with tempfile.TemporaryDirectory() as folder:
        assert captured_from_environment(folder, lambda: [Copy(("artifacts",)).artifacts for _ in range(2)][-1]) == 1


# Modules are reloaded, from a copy of the package on disk that the scenarios edit.


def before_reload():
    global copy, package, old_checked, old_watched, old_guarded
    folder = tempfile.mkdtemp()
    (there,) = importlib.util.find_spec("torchguard").submodule_search_locations
    package = shutil.copytree(there, f"{folder}/torchguard")
    sys.path.insert(0, folder)
    copy = Copy(("err", "flags", "guards", "artifacts"))
    old_checked = compiled(checked(copy))
    runs_checked(copy, old_checked)
    old_guarded, old_watched = compiles_watched(copy)


def reload(*names, emptied=False):
    """Reload modules. With `emptied`, empty them first, as IPython does."""
    for name in names:
        module = sys.modules[name]
        if emptied:
            essential = {"__name__": name, "__loader__": module.__loader__}
            vars(module).clear()
            vars(module).update(essential)
        importlib.reload(module)


def edit(file, old, new):
    path = Path(package, file)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@reloaded
def one_module_can_be_reloaded():
    for module in ("_operators", "_channel.config", "_channel.deferred", "_watch.gradient_probes", "_watch.wrapper"):
        reload(f"torchguard.{module}")
        runs_checked(copy, compiled(checked(copy), "eager"))
    compiles_watched(copy)


@reloaded
def an_audit_survives_the_reload_of_its_events():
    for emptied in (False, True):
        audit = copy.guards.audit(copy.guards.skip_nn_modules(), every=1)
        reload("torchguard._torch.events", "torchguard.guards._audit", emptied=emptied)
        audits_once(copy, audit)


@reloaded
def an_inspection_and_a_capture_survive_the_reload_of_their_events():
    modules = ("torchguard._torch.events", "torchguard._torch.compilations", "torchguard.artifacts._capture")
    for emptied in (False, True):
        with (
            tempfile.TemporaryDirectory() as folder,
            copy.guards.inspect() as seen,
            copy.artifacts.capture(folder) as found,
        ):
            reload(*modules, emptied=emptied)
            torch.compile(with_own_code(lambda x: x + 1), backend="eager")(torch.ones(2))
            assert len(seen.frames) == 1
            assert graphs_in(found) == ["dynamo"]


@reloaded
def all_modules_can_be_reloaded():
    reload(*torchguard_modules())
    reload(*torchguard_modules(), emptied=True)
    runs_checked(copy, compiled(checked(copy)))
    compiles_watched(copy, model=Tower, compile_once=True)
    audits_once(copy)
    with copy.guards.inspect() as seen:
        torch.compile(with_own_code(lambda x: x + 1), backend="eager")(torch.ones(2))
    assert len(seen.frames) == 1


@reloaded
def code_compiled_before_still_runs():
    runs_checked(copy, old_checked)
    runs_watched(copy, old_watched)


@reloaded
def a_model_watched_before_can_be_unwatched():
    copy.tg.unwatch(old_guarded)


@reloaded
def a_process_is_captured_once_after_reloads():
    def fresh():
        for emptied in (False, True):
            reload("torchguard.artifacts._capture", "torchguard.artifacts", emptied=emptied)
        return copy.artifacts

    with tempfile.TemporaryDirectory() as folder:
        assert captured_from_environment(folder, fresh) == 1


@reloaded
def edited_operators_are_used_by_code_compiled_before():
    function = compiled(checked(copy))
    runs_checked(copy, function)
    edit(
        "_channel/deferred.py",
        "    if is_known and is_shape_only(f):",
        "    return f * 1\n    if is_known and is_shape_only(f):",
    )
    reload("torchguard._channel.deferred")
    assert not function(batch())[1].any()


def main(prepare, scenarios):
    found = {}
    prepare()
    for name, scenario in scenarios.items():
        try:
            scenario()
            found[name] = ""
        except (Exception, pytest.fail.Exception):
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*{"again": (before_import, AGAIN), "reloaded": (before_reload, RELOADED)}[sys.argv[1]])
