"""Audits: they find changes that filtered guards no longer notice."""

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from torchguard.exceptions import GuardError, StaleGuardError
from torchguard.guards._audit import audit
from torchguard.guards._compile import _isolates_recompiles, compile
from torchguard.guards._filters import (
    keep_portable,
    keep_tensors,
    named,
    skip_all,
    skip_globals,
    skip_inbuilt_nn_modules,
    skip_nn_modules,
)
from torchguard.guards._why import why

# Before torch 2.13, filters on one function share a cache; each test resets it.
pytestmark = pytest.mark.filterwarnings("ignore::torchguard.exceptions.GuardWarning")

FACTOR = 2


def scaled(x):
    return x * FACTOR


class ScaledDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.k = nn.Linear(3, 3), nn.Dropout(0.5), 2

    def forward(self, x):
        return self.drop(self.layer(x)) * self.k


@pytest.fixture
def factor():
    """Sets the global that `scaled` reads, and sets it back."""

    def set_to(value):
        global FACTOR
        FACTOR = value

    yield set_to
    set_to(2)


def audited(fn, filter, backend="eager", fullgraph=True, **settings):
    auditor = audit(filter, **settings)
    return compile(fn, filter=auditor, backend=backend, fullgraph=fullgraph), auditor


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_stale_result_is_recorded(factor, backend):
    fn, auditor = audited(scaled, skip_globals(), backend=backend, every=1)
    x = torch.ones(2)
    assert fn(x).tolist() == [2, 2]
    factor(3)
    assert fn(x).tolist() == [2, 2]  # stale: no guard checks the global any more
    (violation,) = auditor.report().violations
    assert violation.type == "EQUALS_MATCH" or "MATCH" in violation.type
    assert "FACTOR" in violation.name
    assert (violation.then, violation.now, violation.calls) == ("2", "3", 1)
    assert violation.function == "scaled"
    assert "return x * FACTOR" in violation.line


def test_recompiling_gives_the_new_result(factor):
    fn, auditor = audited(scaled, skip_globals(), every=1, action="recompile")
    x = torch.ones(2)
    fn(x)
    factor(3)
    assert fn(x).tolist() == [3, 3]
    assert fn(x).tolist() == [3, 3]
    assert len(auditor.report().violations) == 1


def stale_calls(call, model, x, toggle, calls=60, each=5):
    """The calls with another result than the model in eager mode, while it toggles between two states."""
    found = []
    for i in range(calls):
        toggle(model, bool(i // each % 2))
        if not torch.equal(call(x), model(x)):
            found.append(i)
    return found


def patch_forward(model, on):
    if on:
        model.layer.forward = lambda x: x - 1
    else:
        vars(model.layer).pop("forward", None)


@pytest.mark.parametrize(
    "toggle",
    [
        lambda model, on: setattr(model, "k", 7 if on else 2),
        lambda model, on: setattr(model.drop, "training", on),
        patch_forward,  # one entry guards on the absence of `forward`, the other on its value
    ],
)
@pytest.mark.parametrize("filter", [skip_all(), skip_nn_modules()])
def test_recompiling_heals_for_good(toggle, filter):
    model, x = ScaledDropout().eval(), torch.randn(2, 3)
    model.drop.p = 0.0
    toggle(model, True)
    toggle(model, False)
    net, auditor = audited(model, filter, every=7, action="recompile")
    net(x)
    found = stale_calls(net, model, x, toggle)
    assert set(found) <= set(range(8))  # only before the first check that notices
    assert len(auditor.report().violations) <= 3


def test_a_relation_that_failed_heals_for_good():
    def fn(x, y):
        x.add_(1)
        return x + y

    call, _ = audited(fn, skip_all(), every=2, action="recompile")
    a = torch.zeros(2)
    call(torch.zeros(2), torch.zeros(2))
    call(a, a)  # one tensor twice: stale, until a check notices
    call(a, a)
    for _ in range(6):
        assert call(torch.zeros(2), torch.zeros(2)).tolist() == [1, 1]
        b = torch.zeros(2)
        assert call(b, b).tolist() == [2, 2]


def test_raising_comes_before_a_stale_result(factor):
    fn, _ = audited(scaled, skip_globals(), every=1, action="raise")
    x = torch.ones(2)
    fn(x)
    factor(3)
    with pytest.raises(StaleGuardError, match=r"FACTOR.*2 became 3"):
        fn(x)
    factor(2)
    assert fn(x).tolist() == [2, 2]


@pytest.mark.parametrize(("answer", "result"), [(None, 2), (False, 3)])
def test_a_custom_action(factor, answer, result):
    found = []

    def act(violations):
        found.extend(violations)
        return answer

    fn, _ = audited(scaled, skip_globals(), every=1, action=act)
    x = torch.ones(1)
    fn(x)
    factor(3)
    assert fn(x).item() == result
    assert [violation.now for violation in found] == ["3"]


def test_an_action_may_raise(factor):
    def act(violations):
        raise RuntimeError("stop here")

    fn, _ = audited(scaled, skip_globals(), every=1, action=act)
    fn(torch.ones(1))
    factor(3)
    with pytest.raises(RuntimeError, match="stop here"):
        fn(torch.ones(1))


def test_a_stale_call_that_runs_eagerly_leaves_no_error_for_later(factor):
    fn, _ = audited(scaled, skip_globals(), every=1, action="raise", fullgraph=False)
    fn(torch.ones(1))
    factor(3)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert fn(torch.ones(1)).item() == 3
    factor(2)
    assert fn(torch.ones(2)).tolist() == [2, 2]


def test_it_checks_every_tenth_call(factor):
    fn, auditor = audited(scaled, skip_globals(), every=10)
    x = torch.ones(1)
    fn(x)
    for _ in range(30):
        fn(x)
    report = auditor.report()
    assert (report.calls, report.checks) == (30, 3)
    factor(3)
    for _ in range(10):
        fn(x)
    (violation,) = auditor.report().violations
    assert 1 <= violation.calls <= 10


def test_a_budget_sets_how_often_it_checks():
    fn, auditor = audited(scaled, skip_globals(), budget=0.001)
    x = torch.ones(1)
    for _ in range(200):
        fn(x)
    assert 1 <= auditor.report().checks < 100


def test_train_and_eval_are_noticed_at_once():
    model = ScaledDropout().eval()
    net, auditor = audited(model, skip_inbuilt_nn_modules(), every=1000)
    x = torch.randn(2, 3)
    want = net(x)
    assert torch.equal(net(x), want)
    model.train()
    net(x)
    names = [violation.name for violation in auditor.report().violations]
    assert any("drop" in name and "training" in name for name in names)


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_grad_mode_and_autocast_are_noticed_at_once(mode):
    call, auditor = audited(lambda x: x @ x, skip_all(), every=1000)
    x = torch.ones(2, 2)
    call(x)
    call(x)
    with mode():
        call(x)
    assert "GLOBAL_STATE" in [violation.type for violation in auditor.report().violations]


def test_the_wrong_branch_under_dynamic_shapes():
    def fn(x):
        return x + 1 if x.shape[0] > 4 else x - 1

    call, auditor = audited(lambda x: fn(x), skip_all(), every=1, fullgraph=True)
    assert call(torch.zeros(8))[0] == 1
    assert call(torch.zeros(2))[0] == 1  # stale
    assert any(violation.type == "TENSOR_MATCH" for violation in auditor.report().violations)
    call, auditor = audited(fn, keep_tensors(), every=1, fullgraph=True, action="recompile")
    x = torch.zeros(8)
    torch._dynamo.mark_dynamic(x, 0)
    call(x)
    assert call(torch.zeros(2))[0] == -1


def test_frames_behind_a_graph_break(factor):
    def fn(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * FACTOR

    call, auditor = audited(fn, skip_globals(), every=1, fullgraph=False)
    call(torch.ones(1))
    factor(5)
    call(torch.ones(1))
    (violation,) = auditor.report().violations
    assert "resume" in violation.function
    assert violation.now == "5"


def test_closures():
    power = 2

    def fn(x):
        return x**power

    call, auditor = audited(fn, keep_portable(), every=1)
    call(torch.full((1,), 3.0))
    power = 3
    assert call(torch.full((1,), 3.0)).item() == 9  # stale
    (violation,) = auditor.report().violations
    assert (violation.then, violation.now) == ("2", "3")


def test_all_violations_are_reported():
    model = ScaledDropout().eval()
    net, auditor = audited(model, keep_portable(), every=1)
    x = torch.randn(2, 3)
    net(x)
    model.k, model.drop.p = 3, 0.25
    model.drop.train()
    net(x)
    names = [violation.name for violation in auditor.report().violations]
    assert "self.k" in names
    assert sum("drop" in name for name in names) >= 1


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return x * self.weight.sum()


PARAMETER_CHANGES = {
    "requires_grad": lambda layer: layer.weight.requires_grad_(False),
    "dtype": lambda layer: setattr(layer.weight, "data", layer.weight.data.double()),
    "size": lambda layer: setattr(layer.weight, "data", torch.ones(1, 2)),
}


@pytest.mark.parametrize("change", PARAMETER_CHANGES.values(), ids=PARAMETER_CHANGES)
def test_a_parameter_that_changes_after_several_calls(change):
    model = Weighted()
    net, auditor = audited(model, skip_nn_modules(), every=1)
    for _ in range(4):  # Dynamo of torch 2.11 skips tensors of a module once its guards held
        net(torch.ones(2))
    assert not auditor.report().violations
    change(model)
    net(torch.ones(2))
    assert "weight" in auditor.report().violations[0].name


def test_a_parameter_that_stays_changed_raises_in_each_call_until_it_is_put_back():
    model = Weighted()
    net, _ = audited(model, skip_nn_modules(), every=3, action="raise")
    for _ in range(4):
        net(torch.ones(2))
    for _ in range(2):
        model.weight.requires_grad_(False)
        for _ in range(3):
            with contextlib.suppress(StaleGuardError):  # up to two calls run before the check is due
                net(torch.ones(2))
        for _ in range(3):
            with pytest.raises(StaleGuardError, match="weight"):
                net(torch.ones(2))
        model.weight.requires_grad_()
        for _ in range(4):
            net(torch.ones(2))


@pytest.mark.parametrize("other", [nn.Linear(2, 3), nn.LeakyReLU(2.0)], ids=["same class", "other class"])
@pytest.mark.parametrize("is_audited", [False, True])
@pytest.mark.parametrize("action", ["record", "recompile", "raise"])
def test_another_module_of_torch_is_no_violation(action, is_audited, other):
    x, model = torch.ones(1, 2), nn.Linear(2, 2)
    net, auditor = audited(model, skip_nn_modules(), every=1, action=action)
    net(x)
    if is_audited:
        net_of_other, _ = audited(other, skip_nn_modules(), every=1, action=action)
    else:
        net_of_other = torch.compile(other, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(net_of_other(x), other(x))
        torch.testing.assert_close(net(x), model(x))
    assert not auditor.report().violations
    model.weight.requires_grad_(False)
    with pytest.raises(StaleGuardError, match="weight") if action == "raise" else contextlib.nullcontext():
        net(x)
    assert len(auditor.report().violations) == 1
    torch.testing.assert_close(net_of_other(x), other(x))


@pytest.mark.skipif(not _isolates_recompiles(), reason="before torch 2.13, both have one cache")
@pytest.mark.parametrize("is_audited", [False, True])
def test_another_module_of_the_same_class_is_no_violation(is_audited):
    model, other = Weighted(), Weighted().requires_grad_(False)
    net, auditor = audited(model, skip_nn_modules(), every=1, action="raise")
    net(torch.ones(2))
    net_of_other = compile(other, filter=auditor if is_audited else None, backend="eager")
    assert not net_of_other(torch.ones(2)).requires_grad
    other.requires_grad_()  # what was compiled for the other one is stale, if it is audited
    with pytest.raises(StaleGuardError, match="weight") if is_audited else contextlib.nullcontext():
        net_of_other(torch.ones(2))
    net(torch.ones(2))


def test_after_a_reset_a_change_is_no_violation():
    model = nn.Linear(2, 2)
    net, auditor = audited(model, skip_nn_modules(), every=1, action="raise")
    net(torch.ones(2))
    torch.compiler.reset()
    model.double()
    assert net(torch.ones(2, dtype=torch.float64)).dtype == torch.float64
    torch.compiler.reset()
    model.weight.requires_grad_(False)
    net(torch.ones(2, dtype=torch.float64))
    assert not auditor.report().violations


@pytest.mark.skipif(not _isolates_recompiles(), reason="before torch 2.13, both have one cache")
def test_an_error_that_was_not_raised_is_not_that_of_another_module():
    model, other = Weighted(), Weighted()
    net, _ = audited(model, skip_nn_modules(), every=1, action="raise")
    net(torch.ones(2))
    model.weight.requires_grad_(False)
    with torch.compiler.set_stance("eager_on_recompile"):
        net(torch.ones(2))
    torch.compile(other, backend="eager")(torch.ones(2))
    with pytest.raises(StaleGuardError, match="weight"):
        net(torch.ones(2))


def test_train_of_a_module_of_torch_is_noticed_at_once():
    model = nn.Dropout(1.0).eval()
    net, auditor = audited(model, skip_nn_modules(), every=100, action="recompile")
    for _ in range(3):
        assert net(torch.ones(1)).item() == 1
    model.train()
    assert net(torch.ones(1)).item() == 0
    assert auditor.report().violations


def test_threads():
    fn, auditor = audited(scaled, skip_globals(), every=5)
    x = torch.ones(1)
    fn(x)
    found = []

    def work():
        found.extend(fn(x).item() for _ in range(100))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {2}
    assert auditor.report().calls >= 400


def test_each_thread_gets_its_error(factor):
    fn, auditor = audited(scaled, skip_globals(), every=1, action="raise")
    x = torch.ones(1)
    fn(x)
    factor(3)
    raised = []

    def work():
        for _ in range(25):
            with contextlib.suppress(StaleGuardError):
                fn(x)
                continue
            raised.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(raised) == 100
    (violation,) = auditor.report().violations
    assert violation.checks == 100


def test_what_raised_once_raises_at_once_the_next_time(factor):
    fn, _ = audited(scaled, skip_globals(), every=2, action="raise")
    x = torch.ones(1)
    fn(x)
    fn(x)
    for value in (3, 4, 5):
        factor(value)
        with pytest.raises(StaleGuardError):
            [fn(x) for _ in range(3 if value == 3 else 1)]
        factor(2)
        assert fn(x).item() == 2


def test_a_guard_that_fails_with_many_values_is_one_violation(factor):
    fn, auditor = audited(scaled, skip_globals(), every=1)
    fn(torch.ones(1))
    for value in range(3, 23):
        factor(value)
        fn(torch.ones(1))
    (violation,) = auditor.report().violations
    assert (violation.then, violation.now, violation.checks) == ("2", "22", 20)
    assert "found in 20 checks" in str(violation)


def test_copies_of_an_audited_model(factor):
    model = ScaledDropout().eval()
    auditor = audit(skip_nn_modules() & ~named("self.k"), every=1)
    net, x = compile(model, filter=auditor, backend="eager"), torch.randn(2, 3)
    net(x)
    copied = copy.deepcopy(net)
    torch.testing.assert_close(copied(x), net(x))
    copied._orig_mod.k = 3
    copied(x)
    assert [violation.now for violation in auditor.report().violations] == ["3"]  # it reports to the same audit
    loaded = pickle.loads(pickle.dumps(net))
    torch.testing.assert_close(loaded(x), net(x))


def test_nothing_is_kept_alive():
    model = ScaledDropout().eval()
    net, auditor = audited(model, skip_inbuilt_nn_modules(), every=1)
    net(torch.randn(2, 3))
    net(torch.randn(2, 3))
    there = weakref.ref(model)
    calls = auditor.report().calls
    del net, model
    torch._dynamo.reset()
    gc.collect()
    assert there() is None
    assert auditor.report().calls == calls


def test_train_is_noticed_whatever_self_is_called():
    class Odd(ScaledDropout):
        def forward(this, x):  # noqa: N805
            return this.drop(this.layer(x))

    model = Odd().eval()
    net, auditor = audited(model, skip_inbuilt_nn_modules(), every=1000)
    net(torch.randn(2, 3))
    model.train()
    net(torch.randn(2, 3))
    assert auditor.report().violations


def test_where_torch_reads_the_value_the_line_is_still_the_users():
    model = ScaledDropout().train()
    net, auditor = audited(model, skip_inbuilt_nn_modules(), every=1)
    net(torch.randn(2, 3))
    model.drop.p = 0.25
    net(torch.randn(2, 3))
    (violation,) = auditor.report().violations
    assert violation.line.startswith(__file__)
    assert "self.drop" in violation.line


def test_an_audit_that_knows_the_model_does_not_keep_it_alive():
    def there():
        model, seen = ScaledDropout().eval(), []
        auditor = audit(skip_inbuilt_nn_modules(), every=1, action=lambda violations: seen.append((model, violations)))
        compile(model, filter=auditor, backend="eager")(torch.randn(2, 3))
        return weakref.ref(model)

    model = there()
    gc.collect()
    assert model() is None


def test_why_does_not_count_as_a_call():
    fn, auditor = audited(scaled, skip_globals(), every=1)
    fn(torch.ones(1))
    before = auditor.report().calls
    assert not why(fn, torch.ones(1))
    assert auditor.report().calls == before


def test_a_filter_that_drops_nothing_is_not_audited():
    def keep(entries):
        return [True for _ in entries]

    fn, auditor = audited(scaled, keep, every=1)
    fn(torch.ones(1))
    fn(torch.ones(1))
    assert auditor.report().calls == 0


def test_the_report_as_text(factor):
    fn, auditor = audited(scaled, skip_globals(), every=1)
    fn(torch.ones(1))
    factor(7)
    fn(torch.ones(1))
    text = str(auditor.report())
    assert "1 violations" in text
    assert "2 became 7" in text
    assert repr(auditor) == "audit(skip_globals(), every=1, action='record')"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": True}, "every is True"),
        ({"action": "repair"}, "action is 'repair'"),
        ({"budget": 2.0}, "budget is 2.0"),
    ],
)
def test_bad_input(settings, message):
    with pytest.raises(GuardError, match=message):
        audit(skip_globals(), **settings)


def test_a_torch_without_a_private_name_is_refused_with_that_name(monkeypatch):
    monkeypatch.delattr("torch._dynamo.guards._get_closure_vars")
    with pytest.raises(GuardError, match=r"has no torch\._dynamo\.guards\._get_closure_vars.*Filters work without"):
        audit(skip_globals())
    assert compile(scaled, filter=skip_globals(), backend="eager") is not None
