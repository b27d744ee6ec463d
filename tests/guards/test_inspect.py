"""What Dynamo compiled in a block, as data: frames, guards, recompiles and graph breaks."""

import functools
import json
import logging
import threading
import types

import pytest
import torch
from tests.models import ScaledLayer, bert
from torch import nn

from torchguard.exceptions import GuardError, GuardWarning
from torchguard.guards import audit, skip_nn_modules
from torchguard.guards._inspect import GuardInspector, inspect


def compiled(fn, **options):
    return torch.compile(fn, **{"backend": "eager", "dynamic": False, **options})


def line_of(fn, text):
    """The number of the line of a function that has a text in it."""
    import inspect as of_python

    lines, first = of_python.getsourcelines(fn)
    return next(first + i for i, line in enumerate(lines) if text in line)


def broken_in_the_middle(x):
    y = x + 1
    torch._dynamo.graph_break()  # here
    return y * 2


def test_a_frame_has_its_guards_as_a_tree():
    with inspect() as inspection:
        compiled(ScaledLayer())(torch.ones(2, 3))
    (frame,) = inspection.frames
    assert (frame.function, frame.file, frame.cache_size) == (
        "ScaledLayer.forward",
        ScaledLayer.forward.__code__.co_filename,
        1,
    )
    assert frame.line == ScaledLayer.forward.__code__.co_firstlineno
    assert frame.seconds is not None
    assert frame.seconds > 0
    assert frame.guards.source == "L"
    by_source = {(guard.source, guard.type): guard for guard in frame.guards.all_guards()}
    assert by_source["L['self'].k", "EQUALS_MATCH"].code == "L['self'].k == 2"
    assert len(list(frame.guards.all_guards())) == frame.guard_count > 10
    assert not inspection.graph_breaks
    assert not inspection.recompiles


def test_a_guard_has_the_users_source_line_and_the_stack_into_torch():
    with inspect() as inspection:
        compiled(ScaledLayer())(torch.ones(2, 3))
    guard = next(
        g for g in inspection.frames[0].guards.all_guards() if g.type == "TENSOR_MATCH" and g.source == "L['x']"
    )
    line = line_of(ScaledLayer.forward, "self.layer(x)")
    assert f"{ScaledLayer.forward.__code__.co_filename}:{line} in forward" in guard.line
    assert guard.stack[0].line == line
    assert "linear.py" in guard.stack[-1].file


def test_a_frame_names_the_guards_that_a_filter_dropped_and_whether_an_audit_checks_them():
    def on_tensors(entries):
        return [one.guard_type != "TENSOR_MATCH" for one in entries]

    plain = GuardInspector(lambda x: x + 1, filter=on_tensors).run(torch.ones(3)).frames[0]
    audited = GuardInspector(lambda x: x + 1, filter=audit(on_tensors)).run(torch.ones(3)).frames[0]
    assert plain.dropped == audited.dropped == ("TENSOR_MATCH L['x']",)
    assert (plain.is_audited, audited.is_audited) == (False, True)
    assert "1 dropped, unchecked" in str(plain)
    assert GuardInspector(lambda x: x + 2).run(torch.ones(3)).frames[0].dropped == ()


def test_a_recompile_that_an_audit_asks_for_has_that_reason():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    found = GuardInspector(model, filter=audit(skip_nn_modules(), action="recompile"))
    found.run(torch.ones(2, 3))
    model.train()
    (frame,) = found.run(torch.ones(2, 3)).frames
    assert "a dropped guard no longer holds" in str(frame)


def test_a_cache_hit_is_not_recorded():
    net = compiled(ScaledLayer())
    net(torch.ones(2, 3))
    with inspect() as inspection:
        net(torch.ones(2, 3))
    assert (inspection.frames, inspection.graph_breaks, inspection.not_compiled) == ([], [], [])


def test_a_recompile_has_all_failing_guards_of_everything_before():
    model = ScaledLayer()
    net = compiled(model)
    net(torch.ones(2, 3))
    net(torch.ones(4, 3))
    model.k = 5
    with inspect() as inspection:
        net(torch.ones(2, 3, dtype=torch.float64), flag=False)
    (frame,) = inspection.recompiles
    assert frame.cache_size == 3
    assert len(frame.recompiled_for) == 2
    for entry in frame.recompiled_for:
        types = {failure.guard.type for failure in entry.failures}
        assert {"TENSOR_MATCH", "EQUALS_MATCH", "TRUE_MATCH"} <= types
    assert "L['self'].k == 2, but it is 5" in str(inspection)
    assert "dtype mismatch" in str(inspection)


def test_an_entry_of_another_backend_is_marked_as_such():
    def fn(x):
        return x + 1

    compiled(fn)(torch.ones(2))
    with inspect() as inspection:
        compiled(fn, backend="aot_eager")(torch.ones(2))
    (entry,) = inspection.frames[0].recompiled_for
    assert entry.is_of_another_backend
    assert "another backend" in str(inspection)
    assert inspection.recompiles == []


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def test_a_recompile_because_an_object_was_deallocated_says_which():
    net = nn.Sequential(nn.Identity())
    net[0].forward = Scale(2)
    c = compiled(net)
    c(torch.ones(2, 3))
    net[0].forward = Scale(3)
    with inspect() as inspection:
        assert torch.equal(c(torch.ones(2, 3)), torch.full((2, 3), 3.0))
    (entry,) = inspection.recompiles[0].recompiled_for
    assert "forward got deallocated" in str(entry)


def test_a_graph_break_has_the_users_source_line_and_a_reason():
    with inspect() as inspection:
        compiled(broken_in_the_middle)(torch.ones(2))
    (graph_break,) = inspection.graph_breaks
    assert (graph_break.file, graph_break.line) == (__file__, line_of(broken_in_the_middle, "# here"))
    assert "User-inserted graph break" in graph_break.reason
    assert any("Remove" in hint for hint in graph_break.hints)
    assert "\n" not in graph_break.reason
    assert graph_break.compile_ids == (inspection.frames[0].compile_id,)


def test_the_code_after_a_break_is_a_frame_of_its_own():
    with inspect() as inspection:
        compiled(broken_in_the_middle)(torch.ones(2))
    assert inspection.frames[0].function == "broken_in_the_middle"
    assert "resume_in_broken_in_the_middle" in inspection.frames[1].function
    assert all(frame.seconds is not None for frame in inspection.frames)


def test_code_after_a_break_that_is_not_compiled_is_warned_of(monkeypatch):
    monkeypatch.setattr("torchguard._torch.events.compiles_after_breaks", lambda: False)  # as torch 2.11 may do
    warned = pytest.warns(GuardWarning, match=r"graph break at .*test_inspect\.py:\d+\. Dynamo does not compile")
    with warned, inspect() as inspection:
        compiled(broken_in_the_middle)(torch.ones(2))
    assert "Dynamo does not compile the code after it" in inspection.graph_breaks[0].hints[0]
    assert "call such functions from one thread, or use torch 2.12." in str(inspection)


def test_several_breaks():
    def fn(x):
        y = x + 1
        torch._dynamo.graph_break()  # first
        if y.sum() > 0:  # second
            y = y * 2
        return y

    with inspect() as inspection:
        compiled(fn)(torch.ones(2))
    assert [b.line for b in inspection.graph_breaks] == [line_of(fn, "# first"), line_of(fn, "# second")]
    assert "branching" in inspection.graph_breaks[1].reason


def test_a_break_in_a_called_function_is_one_break_that_ends_two_graphs():
    def called(x):
        y = x + 1
        torch._dynamo.graph_break()  # here
        return y

    def fn(x):
        return called(x * 2) + 1  # there

    with inspect() as inspection:
        compiled(fn)(torch.ones(2))
    (graph_break,) = inspection.graph_breaks
    assert graph_break.line == line_of(called, "# here")
    assert [line.line for line in graph_break.stack] == [line_of(fn, "# there"), line_of(called, "# here")]
    assert len(graph_break.compile_ids) == 2


def test_a_break_inside_torchs_code_is_at_the_line_that_called_it():
    def fn(x):
        return nn.utils.rnn.unpad_sequence(x, torch.tensor([2, 1]))  # here

    with inspect() as inspection:
        compiled(fn)(torch.ones(2, 2))
    graph_break = inspection.graph_breaks[0]
    assert (graph_break.file, graph_break.line) == (__file__, line_of(fn, "# here"))
    assert "rnn.py" in graph_break.stack[-1].file


def test_a_break_in_a_loop_leaves_the_function_uncompiled():
    def fn(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    with inspect() as inspection:
        compiled(fn)(torch.ones(2))
    assert inspection.frames == []
    assert "loop" in inspection.graph_breaks[0].reason


def test_past_the_recompile_limit_a_call_is_not_compiled(caplog):
    net = compiled(ScaledLayer())
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.CRITICAL), inspect() as inspection:
        net(torch.ones(2, 3))
        net(torch.ones(4, 3))
    assert len(inspection.frames) == 1
    (not_compiled,) = inspection.not_compiled
    assert not_compiled.function == "ScaledLayer.forward"
    assert "size mismatch" in str(not_compiled)
    assert "not compiled" in str(inspection)


def test_json():
    net = compiled(ScaledLayer())
    with inspect() as inspection:
        net(torch.ones(2, 3))
        net(torch.ones(4, 3))
        compiled(broken_in_the_middle)(torch.ones(2))
    read = json.loads(inspection.to_json(indent=1))
    assert read == json.loads(json.dumps(inspection.to_dict()))
    assert [frame["compile_id"] for frame in read["frames"]] == [frame.compile_id for frame in inspection.frames]
    assert read["frames"][1]["recompiled_for"][0]["failures"][0]["guard"]["source"] == "L['x']"
    assert read["graph_breaks"][0]["line"] == inspection.graph_breaks[0].line
    assert read["frames"][0]["guard_count"] == inspection.frames[0].guard_count


def test_the_terminal_view():
    with inspect() as inspection:
        compiled(broken_in_the_middle)(torch.ones(2))
    assert str(inspection).startswith("2 compiled, 0 recompiled, 1 graph breaks\n")
    assert f"graph break at {__file__}:" in str(inspection)
    tree = inspection.frames[0].tree().splitlines()
    assert tree[0] == "L"
    assert "  L['x']" in tree
    assert any(line.startswith("    - TENSOR_MATCH") for line in tree)


def test_nothing_is_reset_and_nothing_is_run_but_the_block():
    ran = []

    def counted(graph, inputs):
        return lambda *args: (ran.append(1), graph(*args))[1]

    net = compiled(ScaledLayer(), backend=counted)
    net(torch.ones(2, 3))
    code = ScaledLayer.forward.__code__
    with inspect() as inspection:
        net(torch.ones(4, 3))
        net(torch.ones(2, 3))
    assert len(ran) == 3
    assert len(inspection.frames) == 1
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(code)) == 2


def test_blocks_in_blocks():
    with inspect() as outer:
        compiled(lambda x: x + 1)(torch.ones(2))
        with inspect() as inner:
            compiled(lambda x: x + 2)(torch.ones(2))
        compiled(lambda x: x + 3)(torch.ones(2))
    assert (len(outer.frames), len(inner.frames)) == (3, 1)
    assert outer.frames[1].compile_id == inner.frames[0].compile_id


def test_an_error_in_the_block_propagates_and_the_record_stays():
    with pytest.raises(KeyError), inspect() as inspection:  # noqa: PT012
        compiled(broken_in_the_middle)(torch.ones(2))
        raise KeyError
    assert len(inspection.frames) == 2
    compiled(lambda x: x + 1)(torch.ones(2))
    assert len(inspection.frames) == 2


def test_no_logger_is_touched_and_nothing_is_printed(capfd):
    log = logging.getLogger("torch.__trace")
    compiled(lambda x: x + 1)(torch.ones(2))
    before = (log.level, log.propagate, list(log.handlers))
    with inspect():
        assert (log.level, log.propagate, list(log.handlers)) == before
        compiled(broken_in_the_middle)(torch.ones(2))
    assert (log.level, log.propagate, list(log.handlers)) == before
    assert capfd.readouterr() == ("", "")


def test_other_threads_are_recorded():
    # Threads share settings in torch 2.11: two that compile at a time leave this one changed.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True), inspect() as inspection:
        threads = [threading.Thread(target=compiled(ScaledLayer()), args=(torch.ones(i + 1, 3),)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {frame.function for frame in inspection.frames} == {"ScaledLayer.forward"}
    assert len(inspection.frames) == 3


def test_times_after_a_reset_are_not_mixed_up():
    with inspect() as inspection:
        compiled(lambda x: x + 1)(torch.ones(2))
        torch.compiler.reset()
        compiled(lambda x: x + 2, backend="aot_eager")(torch.ones(2))
    first, second = inspection.frames
    assert first.compile_id == second.compile_id
    assert first.seconds != second.seconds


@pytest.mark.long
def test_more_frames_than_torch_keeps_metrics_of():
    def fn(x):
        return x + 1

    with inspect() as inspection:
        for i in range(70):
            code = fn.__code__.replace(co_name=f"fn_{i}")
            compiled(types.FunctionType(code, globals()))(torch.ones(2))
    assert len(inspection.frames) == 70
    assert all(frame.seconds is not None for frame in inspection.frames)


def test_inductor():
    with inspect() as inspection:
        compiled(ScaledLayer(), backend="inductor")(torch.ones(2, 3))
    assert inspection.frames[0].function == "ScaledLayer.forward"
    assert not inspection.graph_breaks


def test_a_real_model():
    net = compiled(bert(num_hidden_layers=2).eval())
    with torch.no_grad(), inspect() as inspection:
        net(torch.ones(1, 4, dtype=torch.int64))
        net(torch.ones(1, 5, dtype=torch.int64))
    assert len(inspection.recompiles) == len(inspection.frames) / 2
    assert "size mismatch" in str(inspection.recompiles[0])
    assert sum(frame.guard_count for frame in inspection.frames) > 500
    assert json.loads(inspection.to_json())


def test_an_inspector_runs_the_model_as_often_as_asked():
    ran = []

    def counted(graph, inputs):
        return lambda *args: (ran.append(1), graph(*args))[1]

    inspector = GuardInspector(ScaledLayer(), backend=counted, dynamic=False)
    assert ran == []
    assert inspector.cached() == []
    inspection = inspector.run(torch.ones(2, 3))
    assert len(ran) == 1
    assert len(inspection.frames) == 1
    assert inspector.run(torch.ones(2, 3)).frames == []
    assert inspector.run(torch.ones(5, 3)).frames[0].recompiled_for
    assert len(inspector.cached()) == 2
    assert inspector.cached()[0].guard_count > 10


def test_an_inspector_does_not_touch_cached_entries():
    model = ScaledLayer()
    net = compiled(model)
    net(torch.ones(2, 3))
    GuardInspector(model, dynamic=False).run(torch.ones(4, 3))
    with inspect() as inspection:
        net(torch.ones(2, 3))
    assert inspection.frames == []


def test_an_inspector_of_a_compiled_model():
    model = ScaledLayer()
    net = compiled(model)
    net(torch.ones(2, 3))
    inspector = GuardInspector(net)
    assert inspector.compiled is net
    (frame,) = inspector.cached()
    assert frame.function == "ScaledLayer.forward"
    model.compile(backend="eager", dynamic=False)
    assert len(GuardInspector(model).cached()) == 1
    model.compile(backend="eager")  # which torch takes for another backend
    assert GuardInspector(model).cached() == []
    with pytest.raises(GuardError, match="Leave out backend"):
        GuardInspector(net, backend="eager")


def test_a_module_of_torch_has_the_name_of_its_class():
    inspection = GuardInspector(nn.Sequential(nn.Linear(3, 3))).run(torch.ones(2, 3))
    (frame,) = inspection.frames
    assert frame.function == "Sequential"
    assert frame.file.endswith("container.py")


def test_a_decorated_forward_has_the_name_of_its_class():
    def logged(forward):
        @functools.wraps(forward)
        def wrapper(self, *args):
            return forward(self, *args)

        return wrapper

    class Decorated(nn.Module):
        @logged
        def forward(self, x):
            return x + 1

    (frame,) = GuardInspector(Decorated()).run(torch.ones(2)).frames
    assert frame.function == "Decorated.forward"
    assert frame.line == Decorated.forward.__wrapped__.__code__.co_firstlineno


def test_a_decorated_forward_of_a_base_has_the_name_of_the_class_that_is_called():
    def counted(forward):
        @functools.wraps(forward)
        def wrapper(self, x):
            return forward(self, x)

        return wrapper

    class Base(nn.Module):
        @counted
        @counted
        def forward(self, x):
            return x + 1

    class Model(Base):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    frames = GuardInspector(Model()).run(torch.ones(2)).frames
    assert [frame.function for frame in frames if "<locals>" in frame.function and "wrapper" in frame.function] == []
    assert "Model.forward" in {frame.function for frame in frames}


def test_what_is_no_model_is_refused():
    with pytest.raises(GuardError, match=r"GuardInspector: expected a model or a function, got 3 \(int\)"):
        GuardInspector(3)
