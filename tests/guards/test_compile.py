"""`compile`: torch.compile with a filter, what it no longer notices, and the pitfalls it avoids."""

import warnings

import pytest
import torch
from torch import nn

from torchguard.exceptions import FilterError, GuardError, GuardWarning
from torchguard.guards import _compile
from torchguard.guards._audit import audit
from torchguard.guards._compile import compile, entries
from torchguard.guards._filters import (
    by_function,
    from_source,
    keep_all,
    keep_portable,
    keep_tensors,
    named,
    of_type,
    skip_all,
    skip_globals,
    skip_inbuilt_nn_modules,
    skip_nn_modules,
    with_value,
)

# torch 2.11 and 2.12 have one cache for all modules of torch itself.
BEFORE_2_13 = pytest.mark.filterwarnings(
    "ignore:.*one cache for all modules of torch:torchguard.exceptions.GuardWarning"
)
X = torch.ones(3, 4)
FACTOR = 2.0
can_isolate = _compile._isolates_recompiles()


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def no_filters_yet():
    _compile._last_filters.clear()


@pytest.fixture
def backend():
    return Counting()


class CountingFilter:
    """A filter in torch's form that counts its calls, and keeps all."""

    def __init__(self):
        self.times = 0

    def __call__(self, entries):
        self.times += 1
        return [True] * len(entries)


def double(x):
    return x * 2


def scale(x):
    return x * FACTOR


def plus_or_minus(x):
    return x + 1 if x.shape[0] > 10 else x - 1


def add_if_given(x, y):
    return x * 3 if y is None else x + y


def identity(x):
    return id(x)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, x):
        return x * self.factor


def dropping(filter, backend="eager"):
    """A model with Dropout that was compiled and run in training, and then set to evaluation."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled = compile(model, filter=filter, backend=backend)
    compiled(X)
    model.eval()
    return model, compiled


# What is no longer noticed, filter by filter


@BEFORE_2_13
def test_all_guards_kept_everything_is_noticed(monkeypatch):
    fn = compile(scale, filter=keep_all(), backend="eager")
    assert fn(X)[0, 0] == 2
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert fn(X)[0, 0] == 5
    model, compiled = dropping(keep_all())
    torch.testing.assert_close(compiled(X), model(X))


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_without_guards_on_globals_the_old_value_stays(monkeypatch, backend):
    fn = compile(scale, filter=skip_globals(), backend=backend)
    assert fn(X)[0, 0] == 2
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert scale(X)[0, 0] == 5
    assert fn(X)[0, 0] == 2


@BEFORE_2_13
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("filter", [skip_inbuilt_nn_modules(), skip_nn_modules()], ids=repr)
def test_without_guards_on_torchs_modules_dropout_stays_active_after_eval(filter, backend):
    model, compiled = dropping(filter, backend)
    assert (model(X) != 0).all()
    assert (compiled(X) == 0).any()


def test_without_guards_on_torchs_modules_those_of_the_user_are_still_noticed():
    model = Scale()
    compiled = compile(model, filter=skip_inbuilt_nn_modules(), backend="eager")
    compiled(X)
    model.factor = 5.0
    assert compiled(X)[0, 0] == 5


def test_without_guards_on_any_module_a_changed_attribute_is_not_noticed():
    model = Scale()
    compiled = compile(model, filter=skip_nn_modules(), backend="eager")
    compiled(X)
    model.factor = 5.0
    assert model(X)[0, 0] == 5
    assert compiled(X)[0, 0] == 2


def test_with_guards_on_tensors_only_shapes_and_dtypes_are_noticed(backend):
    fn = compile(double, filter=keep_tensors(), backend=backend)
    for x in (X, X, torch.ones(3, 5), X.double()):
        torch.testing.assert_close(fn(x), double(x))
    assert backend.graphs == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_with_guards_on_tensors_only_dynamic_shapes_take_the_wrong_branch(backend):
    fn = compile(plus_or_minus, filter=keep_tensors(), dynamic=True, backend=backend)
    assert fn(torch.zeros(20))[0] == 1
    assert plus_or_minus(torch.zeros(5))[0] == -1
    assert fn(torch.zeros(5))[0] == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_with_guards_on_tensors_only_requires_grad_is_lost(backend):
    x = torch.ones(2, requires_grad=True)
    fn = compile(double, filter=keep_tensors(), backend=backend)
    with torch.no_grad():
        fn(x)
    assert double(x).requires_grad
    assert not fn(x).requires_grad


@pytest.mark.parametrize("filter", [keep_portable(), keep_tensors() | from_source("state")], ids=repr)
def test_guards_on_state_cure_both(filter):
    fn = compile(plus_or_minus, filter=filter, dynamic=True, backend="aot_eager")
    assert [fn(torch.zeros(n))[0].item() for n in (20, 5)] == [1, -1]
    x = torch.ones(2, requires_grad=True)
    fn = compile(double, filter=filter, backend="aot_eager")
    with torch.no_grad():
        fn(x)
    assert fn(x).requires_grad


def test_without_any_guard_the_first_graph_runs_for_every_call(backend):
    fn = compile(add_if_given, filter=skip_all(), backend=backend)
    fn(X, None)
    torch.testing.assert_close(add_if_given(X, X), 2 * X)
    torch.testing.assert_close(fn(X, X), 3 * X)
    assert backend.graphs == 1


# The examples of the guide, as functions in torch's form and as filters


@pytest.mark.parametrize(
    "filter",
    [lambda entries: [entry.guard_type != "ID_MATCH" for entry in entries], ~of_type("ID_MATCH")],
    ids=["function", "filter"],
)
def test_without_identity_guards_the_id_of_the_first_tensor_stays(filter):
    one, two = torch.ones(2), torch.ones(2)
    fn = compile(identity, filter=filter, fullgraph=True, backend="eager")
    assert fn(one) == id(one)
    assert fn(two) == id(one)


def test_with_identity_guards_each_tensor_has_its_own_id():
    one, two = torch.ones(2), torch.ones(2)
    fn = compile(identity, filter=keep_all(), fullgraph=True, backend="eager")
    assert (fn(one), fn(two)) == (id(one), id(two))


@pytest.mark.parametrize(
    "filter",
    [
        lambda entries: [not (entry.name == "y" and entry.value is None) for entry in entries],
        ~(named("y") & with_value(lambda value: value is None)),
    ],
    ids=["function", "filter"],
)
def test_without_the_guard_that_y_is_none_y_is_never_added(filter):
    fn = compile(add_if_given, filter=filter, fullgraph=True, backend="eager")
    torch.testing.assert_close(fn(X, None), 3 * X)
    torch.testing.assert_close(fn(X, X), 3 * X)
    torch.testing.assert_close(add_if_given(X, X), 2 * X)


def test_the_other_way_round_a_tensor_y_is_guarded():
    fn = compile(add_if_given, filter=~(named("y") & with_value(lambda value: value is None)), backend="eager")
    torch.testing.assert_close(fn(X, X), 2 * X)
    torch.testing.assert_close(fn(X, None), 3 * X)


def custom(entries):
    results = []
    for entry in entries:
        if entry.guard_type == "TENSOR_MATCH":
            results.append(True)
        elif entry.guard_type == "ID_MATCH" or entry.is_global:
            results.append(False)
        else:
            results.append(True)
    return results


def combined(entries):
    keep = torch.compiler.skip_guard_on_globals_unsafe(entries)
    for i, entry in enumerate(entries):
        if keep[i] and entry.guard_type == "ID_MATCH":
            keep[i] = False
    return keep


@pytest.mark.parametrize(
    ("function", "filter"),
    [
        (custom, of_type("TENSOR_MATCH") | ~of_type("ID_MATCH") & skip_globals()),
        (combined, by_function(torch.compiler.skip_guard_on_globals_unsafe) & ~of_type("ID_MATCH")),
    ],
    ids=["custom", "combined"],
)
def test_a_filter_in_a_line_is_the_function_of_many(monkeypatch, function, filter):
    def both(entries):
        assert filter(entries) == function(entries)
        return function(entries)

    fn = compile(scale, filter=both, backend="eager")
    fn(X)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert fn(X)[0, 0] == 2
    torch.testing.assert_close(fn(X.double()), 5 * X.double())  # the tensor is guarded: recompiled


def test_what_is_dropped_can_be_printed():
    lines = []

    def debug(entries):
        lines.append(str((~of_type("TENSOR_MATCH")).explain(entries)))
        return [True] * len(entries)

    compile(double, filter=debug, backend="eager")(X)
    assert "dropped:\n  TENSOR_MATCH (1)\n    x = Tensor(float32, (3, 4), cpu) [local]" in lines[0]


def test_dynamo_optimize_takes_a_filter_too(monkeypatch):
    fn = torch._dynamo.optimize(backend="eager", guard_filter_fn=skip_globals())(scale)
    fn(X)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert fn(X)[0, 0] == 2


def test_fail_on_recompile_notices_kept_guards_only(monkeypatch):
    fn = compile(scale, filter=skip_globals(), backend="eager")
    fn(X)
    with torch.compiler.set_stance("fail_on_recompile"):
        fn(torch.zeros(3, 4))
        monkeypatch.setitem(globals(), "FACTOR", 5.0)
        assert fn(X)[0, 0] == 2  # wrong, and nothing fails
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            fn(torch.zeros(5, 6, 7))


@pytest.mark.parametrize("name", ["guard_export_fn", "guard_fail_fn"])
def test_other_hooks_are_not_taken_as_options_today(name):
    with pytest.raises(RuntimeError, match=f"Unexpected optimization option {name}"):
        torch.compile(double, options={name: print})


def test_other_hooks_go_to_dynamo_optimize():
    exported, failed = [], []
    fn = torch._dynamo.optimize(
        backend="eager",
        guard_export_fn=lambda guards: exported.extend((guard.name, guard.create_fn_name()) for guard in guards),
        guard_fail_fn=failed.append,
    )(scale)
    fn(X)
    fn(X.double())
    assert ("G['FACTOR']", "CONSTANT_MATCH") in exported
    assert "dtype mismatch" in failed[0].reason
    assert failed[0].orig_code is scale.__code__


# The pitfalls


def test_torch_takes_the_filter_out_of_the_options_it_is_given():
    options = {"guard_filter_fn": skip_all()}
    torch.compile(double, backend="eager", options=options)
    assert options == {}


def test_options_are_left_alone_and_can_be_used_again():
    counting = CountingFilter()
    options = {"guard_filter_fn": counting}
    for fn in (lambda x: x + 1, lambda x: x + 2):
        compile(fn, backend="eager", options=options)(X)
    assert counting.times == 2
    assert options == {"guard_filter_fn": counting}


def test_a_decorator_can_be_used_again():
    counting = CountingFilter()
    decorate = compile(filter=counting, backend="eager")
    for fn in (lambda x: x + 1, lambda x: x + 2):
        decorate(fn)(X)
    assert counting.times == 2


def test_as_a_decorator():
    counting = CountingFilter()

    @compile(filter=counting, backend="eager", fullgraph=True)
    def triple(x):
        return x * 3

    torch.testing.assert_close(triple(X), 3 * X)
    assert counting.times == 1
    assert triple.__name__ == "triple"


def test_two_filters_on_one_function_do_not_share_graphs(monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        careless = compile(scale, filter=skip_globals(), backend="eager")
        careful = compile(scale, filter=keep_all(), backend="eager")
    assert [warning.category for warning in caught] == ([] if can_isolate else [GuardWarning])
    careless(X), careful(X)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert careless(X)[0, 0] == 2
    assert careful(X)[0, 0] == (5 if can_isolate else 2)


def test_plain_torch_compile_does_not_use_filtered_graphs_either(monkeypatch):
    compile(scale, filter=skip_globals(), backend="eager")(X)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert torch.compile(scale, backend="eager")(X)[0, 0] == (5 if can_isolate else 2)


def test_torch_compile_alone_mixes_up_two_filters():
    first, second = CountingFilter(), CountingFilter()
    torch.compile(double, backend="eager", options={"guard_filter_fn": first})(X)
    torch.compile(double, backend="eager", options={"guard_filter_fn": second})(X)
    assert (first.times, second.times) == (1, 0)


def test_graphs_of_plain_torch_compile_are_used_while_their_guards_hold():
    counting = CountingFilter()
    torch.compile(double, backend="eager")(X)
    fn = compile(double, filter=counting, backend="eager")
    fn(X)
    assert counting.times == 0
    fn(X.double())
    assert counting.times == 1


def test_where_two_filters_share_a_cache_there_is_a_warning(monkeypatch):
    monkeypatch.setattr(_compile, "_isolates_recompiles", lambda: False)
    first = skip_globals()
    compile(add_if_given, filter=first, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile(add_if_given, filter=first, backend="eager")
    with pytest.warns(GuardWarning, match="add_if_given was compiled with another filter before"):
        compile(add_if_given, filter=keep_all(), backend="eager")
    compile(Scale(), filter=first, backend="eager")
    with pytest.warns(GuardWarning, match=r"Scale\.forward was compiled with another filter"):
        compile(Scale(), backend="eager")


def test_where_modules_of_torch_share_a_cache_there_is_a_warning(monkeypatch):
    monkeypatch.setattr(_compile, "_isolates_recompiles", lambda: False)
    with pytest.warns(GuardWarning, match="one cache for all modules of torch itself, such as this Linear"):
        compile(torch.nn.Linear(2, 2), filter=skip_globals(), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile(torch.nn.Linear(2, 2), filter=audit(skip_globals()), backend="eager")
        compile(torch.nn.Linear(2, 2), backend="eager")


def test_mode_and_options_are_refused():
    with pytest.raises(GuardError, match=r"mode='max-autotune' and options.*list_mode_options"):
        compile(double, filter=skip_all(), mode="max-autotune", options={"max_autotune": True})


def test_two_filters_at_once_are_refused():
    with pytest.raises(GuardError, match="Combine them with & and pass filter="):
        compile(double, filter=skip_all(), options={"guard_filter_fn": skip_all()})


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_a_mode_goes_with_a_filter_and_sets_what_it_sets_alone(mode):
    counting = CountingFilter()
    with_filter, alone = compile(double, filter=counting, mode=mode), torch.compile(double, mode=mode)
    assert with_filter.get_compiler_config() == alone.get_compiler_config()


def test_a_mode_with_a_filter_runs():
    counting = CountingFilter()
    torch.testing.assert_close(compile(double, filter=counting, mode="reduce-overhead")(X), 2 * X)
    assert counting.times == 1


def test_a_mode_without_a_filter_is_torchs():
    torch.testing.assert_close(compile(double, mode="reduce-overhead")(X), 2 * X)


def test_the_default_mode_goes_with_any_backend(backend):
    compile(double, filter=keep_all(), mode="default", backend=backend)(X)
    assert backend.graphs == 1


def test_another_mode_with_another_backend_is_refused(backend):
    for other in ("eager", backend):
        with pytest.raises(GuardError, match="with the backend 'inductor' only"):
            compile(double, filter=keep_all(), mode="max-autotune", backend=other)


def test_a_mode_that_is_none_is_refused_by_torch():
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        compile(double, filter=keep_all(), mode="fast")


def test_options_of_a_backend_reach_it_without_the_filter():
    seen = []

    def backend(graph, inputs, options):
        seen.append(options)
        return graph.forward

    compile(double, filter=keep_all(), backend=backend, options={"level": 3})(X)
    assert seen == [{"level": 3}]


def test_options_of_inductor_go_with_a_filter():
    fn = compile(double, filter=keep_all(), options={"max_autotune": True})
    assert fn.get_compiler_config()["max_autotune"] is True


def test_a_backend_without_options_is_given_none(caplog):
    def warnings_of(fn, **kwargs):
        caplog.clear()
        compile(fn, filter=keep_all(), backend="eager", **kwargs)(X)
        return [record for record in caplog.records if "ignoring extra kwargs" in record.getMessage()]

    assert not warnings_of(double)
    assert warnings_of(scale, options={"level": 3})


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", Counting()])
@pytest.mark.parametrize("filter", [None, keep_tensors()], ids=repr)
def test_every_backend_works_with_a_filter_and_without(filter, backend):
    fn = compile(double, filter=filter, dynamic=False, fullgraph=True, backend=backend)
    torch.testing.assert_close(fn(X), 2 * X)


# What counts as a filter


def test_a_function_in_torchs_form_is_wrapped_so_that_its_errors_read_well():
    def short(entries):
        return [True]

    with pytest.raises(FilterError, match=r"by_function\(short\) returned 1 bools"):
        compile(double, filter=short, backend="eager")(X)


def test_so_is_one_inside_options():
    def short(entries):
        return [True]

    with pytest.raises(FilterError, match=r"by_function\(short\) returned 1 bools"):
        compile(double, options={"guard_filter_fn": short}, backend="eager")(X)


@pytest.mark.wrong_types
def test_what_is_no_filter_is_refused():
    with pytest.raises(FilterError, match=r"'ID_MATCH' \(str\) is no filter"):
        compile(double, filter="ID_MATCH")


def test_an_audit_is_passed_on_as_it_is():
    audited = audit(keep_all())
    assert _compile._to_filter(audited) is audited
    torch.testing.assert_close(compile(double, filter=audited, backend="eager")(X), 2 * X)


def test_a_module_stays_a_module():
    model = Scale()
    compiled = compile(model, filter=keep_all(), backend="eager")
    assert isinstance(compiled, nn.Module)
    torch.testing.assert_close(compiled(X), 2 * X)


def test_the_guards_of_a_call_can_be_explained():
    found = entries(double, torch.ones(2))
    explanation = skip_all().explain(found)
    assert len(explanation.dropped) == len(found) > 0
    assert any(guard.type == "TENSOR_MATCH" and guard.name == "x" for guard in explanation.dropped)
