"""Whether a call would recompile, and why: all reasons, without running anything."""

import contextlib
import functools

import pytest
import torch
from tests.models import ScaledLayer
from torch import nn

from torchguard._torch.dynamo import entries_of, frame_of
from torchguard._torch.guards import children_of
from torchguard._torch.support import torch_is_at_least
from torchguard.exceptions import GuardError
from torchguard.guards._compile import compile as guards_compile
from torchguard.guards._why import why


def compiled(fn, **options):
    return torch.compile(fn, backend="eager", **options)


def test_a_call_that_matches_an_entry_has_no_reasons():
    net = compiled(ScaledLayer())
    net(torch.ones(2, 3))
    answer = why(net, torch.ones(2, 3))
    assert not answer
    assert answer.reasons == ()
    assert str(answer) == "This call matches a cached entry: it would not recompile."


@pytest.mark.parametrize("make", [ScaledLayer, lambda: torch.sin], ids=["module", "function"])
def test_an_entry_of_another_backend_does_not_match(make):
    model = make()

    def double(x):
        return model(x) * 2

    one, other = (torch.compile(double, backend=backend) for backend in ("eager", "aot_eager"))
    one(torch.ones(2, 3))
    assert not why(one, torch.ones(2, 3))
    assert not why(torch.compile(double, backend="eager"), torch.ones(2, 3))
    answer = why(other, torch.ones(2, 3))
    assert answer
    assert "there is no cached entry yet" in str(answer)
    other(torch.ones(2, 3))
    assert not why(other, torch.ones(2, 3))


def test_an_entry_compiled_for_a_deallocated_object_does_not_count():
    net = nn.Sequential(nn.Identity())
    net[0].forward = functools.partial(torch.mul, torch.ones(()))
    c = compiled(net)
    c(torch.ones(2, 3))
    net[0].forward = functools.partial(torch.mul, torch.ones(()))
    assert why(c, torch.ones(2, 3)).recompiles


def test_an_entry_of_another_backend_does_not_match_a_module_either():
    model = ScaledLayer()
    compiled(model)(torch.ones(2, 3))
    assert why(torch.compile(model, backend="aot_eager"), torch.ones(2, 3))
    model.compile(backend="aot_eager")
    assert why(model, torch.ones(2, 3))
    model(torch.ones(2, 3))
    assert not why(model, torch.ones(2, 3))


def test_custom_backends_are_told_apart():
    def one(graph, inputs):
        return graph.forward

    def other(graph, inputs):
        return graph.forward

    fn = nn.Tanh().forward
    torch.compile(fn, backend=one)(torch.ones(2))
    assert not why(torch.compile(fn, backend=one), torch.ones(2))
    assert why(torch.compile(fn, backend=other), torch.ones(2))


class Decorated(ScaledLayer):
    forward = torch.compile(ScaledLayer.forward, backend="eager")


def compiled_itself(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    "make", [Decorated, lambda: compiled_itself(ScaledLayer())], ids=["in the class", "on the instance"]
)
def test_a_module_whose_forward_is_compiled(make):
    model = make()
    assert why(model, torch.ones(2, 3))
    model(torch.ones(2, 3))
    assert not why(model, torch.ones(2, 3))
    assert why(model, torch.ones(2, 3), flag=False)


@pytest.mark.parametrize("wrap", [torch.no_grad(), lambda fn: functools.wraps(fn)(lambda *args: fn(*args))])
def test_a_decorated_compiled_function_is_refused(wrap):
    """It may change the arguments, or the state they are called in."""
    with pytest.raises(GuardError, match="not what a decorator made of it"):
        why(wrap(compiled(lambda x: x + 1)), torch.ones(2))


def test_arguments_may_have_any_name():
    net = compiled(lambda x, compiled: x * compiled)
    assert why(net, torch.ones(2), compiled=3)


class TestLimits:
    def sizes(self, net, *sizes):
        for size in sizes:
            net(torch.ones(size))

    def fn(self, x):
        return x + 1

    def answer(self, net, size, compiles):
        """The answer, after checking that it is what happens."""
        answer = why(net, torch.ones(size))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        net(torch.ones(size))
        compiled_now = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
        assert bool(answer) == (compiled_now == 1) == compiles
        return answer

    @pytest.fixture(autouse=True)
    def quiet(self, caplog):
        caplog.set_level("CRITICAL")  # torch warns of a limit that is reached

    def test_of_the_function(self):
        options = {"recompile_limit": 2} if torch.__version__ >= "2.13" else {}
        with contextlib.ExitStack() as stack:
            if not options:
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=2))
            net = compiled(self.fn, dynamic=False, **options)
            self.sizes(net, 2, 3)
            answer = self.answer(net, 4, compiles=False)
        assert answer.limit_reached
        assert "runs eagerly" in str(answer)
        assert "size mismatch" in str(answer)

    def test_reached_by_another_backend(self):
        self.sizes(compiled(self.fn, dynamic=False), *range(2, 10))
        answer = self.answer(torch.compile(self.fn, backend="aot_eager", dynamic=False), 3, compiles=False)
        assert answer.limit_reached
        assert "runs eagerly" in str(answer)

    def test_reached_by_another_cache_does_not_count(self):
        self.sizes(compiled(self.fn, dynamic=False), *range(2, 10))
        has_own_cache = torch_is_at_least(2, 13)  # before, torch has one for all
        self.answer(guards_compile(self.fn, backend="eager", dynamic=False), 30, compiles=has_own_cache)

    def test_of_all_entries_together(self):
        net = compiled(self.fn, dynamic=False)
        with torch._dynamo.config.patch(accumulated_recompile_limit=2):
            self.sizes(net, 2, 3)
            self.answer(net, 4, compiles=False)


class TestStances:
    @pytest.fixture
    def net(self):
        net = compiled(lambda x: x + 1, dynamic=False)
        net(torch.ones(2))
        return net

    @pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
    def test_nothing_is_compiled(self, net, stance):
        with torch.compiler.set_stance(stance):
            answer = why(net, torch.ones(3))
        assert not answer
        assert f"'{stance}' this call runs eagerly" in str(answer)

    def test_a_call_that_raises(self, net):
        with torch.compiler.set_stance("fail_on_recompile"):
            assert "this call raises" in str(why(net, torch.ones(3)))
            assert not why(net, torch.ones(2)).fallback

    def test_another_backend(self, net):
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            assert why(net, torch.ones(2))
            net(torch.ones(2))
            assert not why(net, torch.ones(2))


def test_before_the_first_call_there_is_no_entry():
    answer = why(compiled(ScaledLayer()), torch.ones(2, 3))
    assert answer
    assert "would compile" in str(answer)
    assert answer.reasons == ()


def test_all_reasons_are_listed_not_only_the_first():
    model = ScaledLayer()
    net = compiled(model)
    net(torch.ones(2, 3))
    model.k = 5
    answer = why(net, torch.ones(2, 3, dtype=torch.float64, requires_grad=True), flag=False)
    types = [reason.failure.guard.type for reason in answer.reasons]
    assert {"TENSOR_MATCH", "EQUALS_MATCH", "TRUE_MATCH"} <= set(types)
    assert "L['self'].k == 2, but it is 5" in str(answer)


def test_why_runs_nothing_and_compiles_nothing():
    ran = []

    def fn(x):
        ran.append(1)
        return x + 1

    net = compiled(fn)
    net(torch.ones(2))
    before = len(ran)
    torch._dynamo.utils.counters.clear()
    assert why(net, torch.ones(3))
    assert len(ran) == before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda x: torch.ones(4, 3), "mark_dynamic(x, 0)"),
        (lambda x: x.double(), "Cast x"),
        (lambda x: torch.ones(3, 2).t(), "contiguous()"),
        (lambda x: x.clone().requires_grad_(), "requires a gradient"),
        (lambda x: torch.ones(2, 3, 1), "number of dims"),
    ],
)
def test_advice_about_tensors(change, advice):
    net = compiled(lambda x: x + 1, dynamic=False)
    x = torch.ones(2, 3)
    net(x)
    answer = why(net, change(x))
    assert advice in " ".join(reason.advice for reason in answer.reasons)


SCALE = 2


def test_advice_about_values_that_are_no_tensors():
    global SCALE
    power = 2

    def fn(x, items, call):
        return call(x * SCALE**power) + len(items)

    def call(x):
        return x

    net = compiled(fn)
    net(torch.ones(2), [1, 2], call)
    answer = why(net, torch.ones(2), [1], lambda x: x)
    advice = " ".join(reason.advice for reason in answer.reasons)
    assert "items has other items" in advice
    assert "create it once" in advice
    SCALE = 3
    power = 3
    answer = why(net, torch.ones(2), [1, 2], call)
    SCALE = 2
    assert "make it an argument" in " ".join(reason.advice for reason in answer.reasons)
    assert len(answer.reasons) == 2


def test_grad_mode():
    net = compiled(ScaledLayer())
    net(torch.ones(2, 3))
    with torch.no_grad():
        answer = why(net, torch.ones(2, 3))
    assert [reason.failure.guard.type for reason in answer.reasons] == ["GLOBAL_STATE"]
    assert "Grad mode" in answer.reasons[0].advice


def test_every_entry_has_its_reasons():
    net = compiled(ScaledLayer(), dynamic=False)
    net(torch.ones(2, 3))
    net(torch.ones(4, 3))
    answer = why(net, torch.ones(5, 3))
    assert answer.cache_size == 2
    assert {reason.compile_id for reason in answer.reasons} == {"0/0", "0/1"}


def test_a_module_of_torchs_own_and_a_method():
    layers = compiled(nn.Sequential(nn.Linear(3, 3)), dynamic=False)
    layers(torch.ones(2, 3))
    assert not why(layers, torch.ones(2, 3))
    assert "size mismatch" in str(why(layers, torch.ones(3, 3)))
    model = ScaledLayer()
    method = compiled(model.forward, dynamic=False)
    method(torch.ones(2, 3))
    assert not why(method, torch.ones(2, 3))
    assert why(method, torch.ones(3, 3))


def test_a_method_decorated_in_its_class():
    class Scale:
        @torch.compile(backend="eager", dynamic=False)
        def apply(self, *args):
            return args[0] * 2

    scale = Scale()
    scale.apply(torch.ones(2))
    assert not why(scale.apply, torch.ones(2))
    assert why(scale.apply, torch.ones(3))


def test_a_variable_that_is_not_set_yet():
    def make():
        def fn(x, n):
            return x * 2 if n == 0 else later(x)

        net = compiled(fn)
        net(torch.ones(2), 0)
        answer = why(net, torch.ones(2), 0)
        later = None
        return answer, later

    assert not make()[0]


def test_past_the_recompile_limit_the_call_runs_eagerly():
    net = compiled(lambda x, text: x + len(text))
    for i in range(torch._dynamo.config.recompile_limit + 1):
        net(torch.ones(2), "a" * i)
    answer = why(net, torch.ones(2), "b" * 30)
    assert answer.limit_reached
    assert not answer
    assert "runs eagerly" in str(answer)


def test_a_size_out_of_range_is_named():
    net = compiled(lambda x: x + 1, dynamic=True)
    net(torch.ones(4))
    answer = why(net, torch.ones(1))
    assert "size()[0]" in str(answer)
    assert "mark_dynamic" in answer.reasons[0].advice


def test_an_attribute_that_is_gone():
    model = ScaledLayer()
    net = compiled(model)
    net(torch.ones(2, 3))
    del model.k
    assert "gone" in str(why(net, torch.ones(2, 3)))


def test_bad_input():
    with pytest.raises(GuardError, match="is not compiled"):
        why(ScaledLayer(), torch.ones(2, 3))
    with pytest.raises(GuardError, match="do not match the signature"):
        why(compiled(ScaledLayer()), 1, 2, 3, 4)


def test_the_order_in_which_dynamo_checks_guards_is_left_alone():
    def counts(manager):
        return [manager.fail_count(), *(count for child in children_of(manager) for count in counts(child))]

    fn = torch.compile(lambda x, k: x * k, backend="eager", dynamic=False)
    fn(torch.ones(2), 3)
    frame = frame_of(fn, (torch.ones(2), 3), {})
    ((_, guards),) = entries_of(frame.cache)
    before = counts(guards.root)
    assert why(fn, torch.ones(5), 4)
    assert counts(guards.root) == before
