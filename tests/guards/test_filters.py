"""Filters: what they keep, how they combine, their `repr` and explanation, and the errors of bad ones."""

import dataclasses
import functools
import logging

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from torchguard.exceptions import FilterError, GuardError, TorchGuardError
from torchguard.guards import _filters
from torchguard.guards._filters import (
    Filter,
    aot_default,
    by_function,
    from_source,
    keep_all,
    keep_portable,
    keep_tensors,
    named,
    of_derived_type,
    of_type,
    precompile_default,
    skip_all,
    skip_globals,
    skip_inbuilt_nn_modules,
    skip_nn_modules,
    with_value,
)

FACTOR = 3
LAYER = nn.Linear(4, 4)


class DropoutAndBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.scale = nn.Linear(4, 4), nn.Dropout(), 2
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.dropout(self.linear(x)) * self.scale + self.shift


def uses_globals(x, y=None):
    return LAYER(x) * FACTOR if y is None else x + y


def scaled_by(factor):
    def inner(x):
        return x * factor

    return inner


def calls(x, fn):
    return fn(x) + 1


def branches_on_shape(x):
    with torch.no_grad():
        return x + 1 if x.shape[0] > 10 else x - 1


def entries_of(fn, *args, **options):
    """The guards of a call, as Dynamo passes them to a filter."""
    seen = []

    def keep(entries):
        seen.extend(entries)
        return [True] * len(entries)

    torch.compile(fn, backend="eager", options={"guard_filter_fn": keep}, **options)(*args)
    return seen


X = torch.ones(2, 4)
SUBJECTS = {
    "module": lambda: entries_of(DropoutAndBuffer(), X),
    "transformer": lambda: entries_of(nn.TransformerEncoderLayer(8, 2, 16), torch.ones(2, 3, 8)),
    "globals": lambda: entries_of(uses_globals, X),
    "free variable": lambda: entries_of(scaled_by(5), X),
    "function as argument": lambda: entries_of(calls, X, scaled_by(5)),
    "dynamic shapes": lambda: entries_of(branches_on_shape, torch.ones(20), dynamic=True),
}


@pytest.fixture(params=list(SUBJECTS))
def entries(request):
    return SUBJECTS[request.param]()


def kept(filter, entries):
    return {(entry.name, entry.guard_type) for entry, keep in zip(entries, filter(entries), strict=True) if keep}


def kept_names(filter, entries):
    return {name for name, _ in kept(filter, entries)}


# Predefined filters


@pytest.mark.parametrize(
    ("filter", "torchs"),
    [
        (skip_inbuilt_nn_modules(), torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe),
        (skip_nn_modules(), torch.compiler.skip_guard_on_all_nn_modules_unsafe),
        (keep_tensors(), torch.compiler.keep_tensor_guards_unsafe),
        (
            keep_tensors(keep_parameters=True),
            functools.partial(torch.compiler.keep_tensor_guards_unsafe, keep_parameters=True),
        ),
        (skip_globals(), torch.compiler.skip_guard_on_globals_unsafe),
        (skip_all(), torch.compiler.skip_all_guards_unsafe),
        (keep_portable(), torch.compiler.keep_portable_guards_unsafe),
    ],
    ids=lambda one: repr(one) if isinstance(one, Filter) else "torch",
)
def test_named_filters_decide_as_torchs_helpers_do(filter, torchs, entries):
    assert filter(entries) == torchs(entries)


def test_all_are_kept_by_keep_all_and_none_by_skip_all(entries):
    assert all(keep_all()(entries))
    assert not any(skip_all()(entries))


def test_ahead_of_time_drops_globals_and_what_cannot_be_saved(entries):
    cannot = torch._dynamo.guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
    assert aot_default()(entries) == [not (entry.is_global or entry.guard_type in cannot) for entry in entries]


def test_ahead_of_time_compilation_makes_the_same_guards_with_it_as_without():
    def guards(**options):
        with torch._dynamo.config.patch(enable_aot_compile=True):  # not the default in torch 2.11
            compiled = torch.compile(uses_globals, backend="inductor", fullgraph=True, **options)
            return str(compiled.aot_compile(((X,), {}))._artifacts.guard_manager)

    assert guards(options={"guard_filter_fn": aot_default()}) == guards()
    assert guards(options={"guard_filter_fn": keep_tensors()}) != guards()


def test_caching_precompile_has_nothing_to_drop_after_its_filter(caplog):
    def dropped(filter):
        torch._dynamo.reset()
        caplog.clear()
        with (
            torch._dynamo.config.patch(caching_precompile=True),
            caplog.at_level(logging.WARNING, "torch._dynamo.guards"),
        ):
            torch.compile(uses_globals, backend="eager", options={"guard_filter_fn": filter})(X)
        return sum("is dropped with caching_precompile" in message for message in caplog.messages)

    entries = entries_of(uses_globals, X)
    assert dropped(precompile_default()) == 0
    assert dropped(keep_all()) == precompile_default()(entries).count(False) > 0


# Building blocks


def test_by_type():
    entries = SUBJECTS["module"]()
    assert {type for _, type in kept(of_type("TENSOR_MATCH", "SHAPE_ENV"), entries)} == {"TENSOR_MATCH", "SHAPE_ENV"}


def test_by_derived_type():
    entries = SUBJECTS["globals"]()
    assert kept(of_derived_type("NONE_MATCH"), entries) == {("y", "CONSTANT_MATCH")}
    assert not kept(of_type("NONE_MATCH"), entries)


def test_by_name_with_globs_in_which_brackets_are_literal():
    entries = SUBJECTS["module"]()
    parameters = {"self._modules['linear']._parameters['bias']", "self._modules['linear']._parameters['weight']"}
    assert kept_names(named("self._modules['linear']._parameters[*]"), entries) == parameters
    assert kept_names(named("self._modules['linear']._parameters['????']"), entries) == {
        "self._modules['linear']._parameters['bias']"
    }
    assert kept_names(named("x", "self.sca*"), entries) == {"x", "self.scale"}
    assert kept_names(named("[xs]*", "scale"), entries) == set()


def test_guards_on_the_state_of_torch_have_the_empty_name(entries):
    assert {"SHAPE_ENV", "GLOBAL_STATE", "GRAD_MODE"} <= {type for _, type in kept(named(""), entries)}


def test_by_source_of_a_global_and_of_a_module():
    entries = SUBJECTS["globals"]()
    assert {"G['FACTOR']", "G['LAYER']"} <= kept_names(from_source("global"), entries)
    assert {name.split("]")[0] for name in kept_names(from_source("module"), entries)} == {"G['LAYER'"}
    assert kept_names(from_source("local"), entries) == {"x", "y"}
    assert not kept(from_source("closure"), entries)


def test_by_source_of_an_attribute_of_the_compiled_module():
    entries = SUBJECTS["module"]()
    assert "self.scale" in kept_names(from_source("module"), entries)
    assert kept_names(from_source("local") & ~from_source("module"), entries) == {"x"}


def test_by_source_of_a_free_variable():
    entries = SUBJECTS["free variable"]()
    assert kept_names(from_source("closure"), entries) == {"factor"}
    assert kept_names(from_source("local"), entries) == {"x"}


def test_by_source_of_a_cell_of_a_function():
    entries = SUBJECTS["function as argument"]()
    assert kept_names(from_source("closure"), entries) == {"fn.__closure__[0].cell_contents"}
    assert kept_names(from_source("local") & ~from_source("closure"), entries) == {"x", "fn"}


def test_an_argument_that_an_inner_function_uses_is_local():
    def outer(x):
        return (lambda: x + 1)()

    assert kept_names(from_source("local"), entries_of(outer, X)) == {"x"}


def test_state_is_what_has_no_name(entries):
    assert kept(from_source("state"), entries) == kept(named(""), entries)


def test_each_guard_has_a_source_and_sources_agree_with_torch(entries):
    assert all(from_source(*_filters.SOURCE_KINDS)(entries))
    assert from_source("global")(entries) == (~skip_globals())(entries)
    assert from_source("module")(entries) == (~skip_nn_modules())(entries)


def test_by_value():
    entries = SUBJECTS["globals"]()
    assert kept_names(with_value(lambda value: value is None), entries) == {"y"}
    assert not any(
        keep for keep, entry in zip(with_value(lambda _: True)(entries), entries, strict=True) if not entry.name
    )


def test_by_a_function_in_torchs_form(entries):
    assert by_function(torch.compiler.keep_tensor_guards_unsafe)(entries) == keep_tensors()(entries)
    assert by_function(lambda entries: tuple(entry.is_global for entry in entries))(entries) == (~skip_globals())(
        entries
    )


def test_the_right_side_decides_only_what_the_left_side_leaves_undecided():
    entries = SUBJECTS["module"]()
    large = with_value(lambda tensor: tensor.dim() > 1)
    assert kept_names(of_type("TENSOR_MATCH") & large, entries) == {
        "x",
        "self._modules['linear']._parameters['weight']",
    }
    assert (~of_type("TENSOR_MATCH") | large)(entries).count(False) == 2  # the bias and the buffer
    with pytest.raises(FilterError, match="dim"):
        large(entries)


def test_a_function_sees_all_guards_wherever_it_stands():
    entries = SUBJECTS["module"]()
    first = by_function(lambda entries: [i == 0 for i in range(len(entries))])
    assert (named("self*") & first)(entries) == [False] * len(entries)
    assert (keep_all() & first)(entries) == first(entries)


# Combining


@dataclasses.dataclass(frozen=True)
class FakeEntry:
    name: str
    guard_type: str
    derived_guard_types: tuple[str, ...] = ()
    has_value: bool = False
    value: object = None
    is_global: bool = False
    orig_guard: object = None


TYPES = ("ID_MATCH", "TENSOR_MATCH", "TYPE_MATCH")
fake_entries = st.lists(
    st.builds(
        FakeEntry,
        name=st.sampled_from(["", "x", "self.x", "G['x']"]),
        guard_type=st.sampled_from(TYPES),
        derived_guard_types=st.lists(st.sampled_from(TYPES), max_size=2).map(tuple),
        has_value=st.booleans(),
        value=st.integers(0, 2),
        is_global=st.booleans(),
    ),
    max_size=12,
)


def is_one(value):
    return value == 1


# Each a filter and the same in plain Python.
leaves = st.sampled_from(
    [
        *((of_type(type), lambda entry, type=type: entry.guard_type == type) for type in TYPES),
        (of_derived_type("ID_MATCH"), lambda entry: "ID_MATCH" in entry.derived_guard_types),
        (named("*x"), lambda entry: entry.name.endswith("x")),
        (named("G[*]"), lambda entry: entry.name.startswith("G[")),
        (with_value(is_one), lambda entry: entry.has_value and entry.value == 1),
        (skip_globals(), lambda entry: not entry.is_global),
        (keep_all(), lambda entry: True),
        (skip_all(), lambda entry: False),
    ]
)
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        inner.map(lambda one: (~one[0], lambda entry: not one[1](entry))),
        st.tuples(inner, inner).map(
            lambda two: (two[0][0] & two[1][0], lambda entry: two[0][1](entry) and two[1][1](entry))
        ),
        st.tuples(inner, inner).map(
            lambda two: (two[0][0] | two[1][0], lambda entry: two[0][1](entry) or two[1][1](entry))
        ),
    ),
    max_leaves=8,
)


@given(expressions, fake_entries)
def test_combined_filters_are_plain_boolean_logic(expression, entries):
    filter, model = expression
    answers = filter(entries)
    assert answers == [model(entry) for entry in entries]
    assert all(type(answer) is bool for answer in answers)


@given(expressions, fake_entries)
def test_a_filter_is_what_its_repr_says(expression, entries):
    filter, _ = expression
    again = eval(repr(filter), {**vars(_filters), "is_one": is_one})
    assert repr(again) == repr(filter)
    assert again(entries) == filter(entries)


@given(expressions, expressions, fake_entries)
def test_de_morgan(one, two, entries):
    a, b = one[0], two[0]
    assert (~(a & b))(entries) == (~a | ~b)(entries)
    assert (~(a | b))(entries) == (~a & ~b)(entries)


@pytest.mark.parametrize(
    ("filter", "text"),
    [
        (of_type("ID_MATCH") & ~from_source("global"), "of_type('ID_MATCH') & ~from_source('global')"),
        (~(skip_globals() | keep_portable()) & keep_all(), "~(skip_globals() | keep_portable()) & keep_all()"),
        (
            (keep_tensors() | skip_all()) & keep_tensors(keep_parameters=True),
            "(keep_tensors() | skip_all()) & keep_tensors(keep_parameters=True)",
        ),
        (named("x", "self.*"), "named('x', 'self.*')"),
        (with_value(callable), "with_value(callable)"),
        (with_value(lambda v: v is None, "lambda v: v is None"), "with_value(lambda v: v is None)"),
        (by_function(torch.compiler.skip_all_guards_unsafe), "by_function(skip_all_guards_unsafe)"),
        (by_function(lambda entries: [], name="nothing"), "by_function(nothing)"),
        (aot_default() | precompile_default(), "aot_default() | precompile_default()"),
        (skip_nn_modules() & skip_inbuilt_nn_modules(), "skip_nn_modules() & skip_inbuilt_nn_modules()"),
    ],
)
def test_the_repr_is_code(filter, text):
    assert repr(filter) == text


@pytest.mark.wrong_types
def test_a_filter_does_not_combine_with_something_else():
    with pytest.raises(TypeError, match="unsupported operand"):
        keep_all() & torch.compiler.skip_all_guards_unsafe
    with pytest.raises(TypeError, match="unsupported operand"):
        keep_all() | True


# Explaining


def test_an_explanation_has_what_is_kept_and_what_is_dropped(entries):
    filter = keep_tensors()
    explanation = filter.explain(entries)
    assert [guard.name for guard in explanation.kept] == [e.name for e in entries if filter([e]) == [True]]
    assert len(explanation.kept) + len(explanation.dropped) == len(entries)


def test_an_explanation_as_text():
    explanation = skip_globals().explain(SUBJECTS["globals"]())
    lines = str(explanation).splitlines()
    kept, dropped = len(explanation.kept), len(explanation.dropped)
    assert lines[0] == f"skip_globals() keeps {kept} of {kept + dropped} guards and drops {dropped}."
    assert lines[1] == "dropped:"
    assert "    G['FACTOR'] = 3 [global]" in lines[: lines.index("kept:")]
    assert "    G['LAYER']._parameters['bias'] = Parameter(float32, (4,), cpu) [global, module]" in lines
    assert "    x = Tensor(float32, (2, 4), cpu) [local]" in lines[lines.index("kept:") :]
    assert lines[lines.index("  SHAPE_ENV (1)") + 1] == "    (no name) [state]"


def test_an_explanation_is_short_for_many_guards_of_one_type():
    many = [FakeEntry(f"x{i}", "ID_MATCH", has_value=True, value="long " * 50) for i in range(500)]
    text = str(skip_all().explain(many))
    assert "  ID_MATCH (500)" in text
    assert "    ... and 490 more" in text
    assert len(text.splitlines()) == 14
    assert max(map(len, text.splitlines())) < 100


def test_values_in_an_explanation_are_one_short_line_without_values_of_tensors():
    values = {
        "Sequential(...)": nn.Sequential(nn.Linear(2, 2)),
        "{'weight': Parameter(float32, (2, 2), cpu)}": {"weight": nn.Parameter(torch.ones(2, 2))},
        "[1, 2]": [1, 2],
        "None": None,
    }
    guards = keep_all().explain([FakeEntry("x", "ID_MATCH", has_value=True, value=value) for value in values.values()])
    assert [guard.value for guard in guards.kept] == list(values)


# Bad filters


@pytest.mark.parametrize("make", [of_type, of_derived_type])
def test_a_type_torch_does_not_know_is_refused_with_those_it_knows(make):
    with pytest.raises(FilterError, match=r"there is no guard type 'TENSOR'\. Known are .*TENSOR_MATCH"):
        make("ID_MATCH", "TENSOR")


def test_a_kind_of_source_that_is_none_is_refused():
    with pytest.raises(
        FilterError, match=r"no kind of source 'globals'\. Known are closure, global, local, module, state"
    ):
        from_source("globals")


@pytest.mark.parametrize("make", [of_type, of_derived_type, named, from_source])
def test_a_filter_that_names_nothing_is_refused(make):
    with pytest.raises(FilterError, match=f"{make.__name__}: give at least one"):
        make()


@pytest.mark.wrong_types
@pytest.mark.parametrize("make", [of_type, named, from_source])
def test_a_list_in_place_of_arguments_is_refused(make):
    with pytest.raises(FilterError, match="as an argument of its own"):
        make(["ID_MATCH"])


@pytest.mark.wrong_types
def test_what_cannot_be_called_is_no_filter():
    with pytest.raises(FilterError, match=r"3 \(int\) is no filter"):
        by_function(3)


def first_three(entries):
    return [True] * 3


def too_many(entries):
    return [True] * (len(entries) + 1)


def nothing(entries):
    return None


def generated(entries):
    return (True for _ in entries)


def ones(entries):
    return [1 for _ in entries]


def shape_of_all(entries):
    return [entry.value.shape[0] > 1 for entry in entries]


def raises_together(entries):
    if len(entries) > 1:
        raise KeyError("missing")
    return [True]


def loses_the_tensor(entries):
    return [torch.ones(2) if entry.name == "x" else True for entry in entries]


BAD = {
    first_three: r"by_function\(first_three\) returned 3 bools for \d+ guards: the first without one is guard",
    too_many: r"by_function\(too_many\) returned \d+ bools for \d+ guards\. Return one bool per guard",
    nothing: r"by_function\(nothing\) returned NoneType\. Return a list",
    generated: r"by_function\(generated\) returned generator\. Return a list",
    ones: r"by_function\(ones\) returned 1 \(int\) for guard \w+ \(\w+\)\. Return exactly True",
    shape_of_all: r"by_function\(shape_of_all\) raised AttributeError at guard factor \(CONSTANT_MATCH\): 'int' object",
    raises_together: r"by_function\(raises_together\) raised KeyError at all \d+ guards together: 'missing'",
    loses_the_tensor: r"returned Tensor\(float32, \(2,\), cpu\) \(Tensor\) for guard x \(TENSOR_MATCH\)",
}


@pytest.mark.parametrize("fn", BAD, ids=lambda fn: fn.__name__)
def test_a_bad_filter_is_named_together_with_the_guard(fn):
    entries = SUBJECTS["free variable"]()
    with pytest.raises(FilterError, match=BAD[fn]):
        (keep_all() & ~by_function(fn))(entries)


def test_a_predicate_that_raises_is_named_together_with_the_guard():
    def is_wide(value):
        return value.shape[1] > 2

    with pytest.raises(FilterError, match=r"with_value\(is_wide\) raised AttributeError at guard factor") as caught:
        with_value(is_wide)(SUBJECTS["free variable"]())
    assert isinstance(caught.value.__cause__, AttributeError)


def test_a_predicate_has_to_return_a_bool():
    with pytest.raises(
        FilterError, match=r"returned Tensor\(bool, \(2, 4\), cpu\) \(Tensor\) for guard x \(TENSOR_MATCH\)"
    ):
        with_value(lambda value: value == 1)(SUBJECTS["free variable"]())


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=["breaks allowed", "fullgraph"])
@pytest.mark.parametrize("fn", BAD, ids=lambda fn: fn.__name__)
def test_whoever_calls_a_compiled_function_sees_the_filter_error_itself(fn, options):
    compiled = torch.compile(scaled_by(5), backend="eager", options={"guard_filter_fn": by_function(fn)}, **options)
    with pytest.raises(FilterError, match=BAD[fn]):
        compiled(X)


def test_the_error_of_the_filter_is_its_cause_also_behind_torch_compile():
    compiled = torch.compile(scaled_by(5), backend="eager", options={"guard_filter_fn": by_function(shape_of_all)})
    with pytest.raises(FilterError) as caught:
        compiled(X)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_without_torchguard_it_would_be_an_internal_error_of_dynamo():
    compiled = torch.compile(scaled_by(5), backend="eager", options={"guard_filter_fn": shape_of_all})
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match="AttributeError"):
        compiled(X)


def test_errors_are_of_the_family():
    assert issubclass(FilterError, GuardError)
    assert issubclass(GuardError, TorchGuardError)
    assert issubclass(GuardError, ValueError)
    assert issubclass(FilterError, AssertionError)  # what torch raises of itself


def test_all_building_blocks_are_filters():
    assert isinstance(of_type("ID_MATCH") & ~by_function(ones) | keep_all(), Filter)
