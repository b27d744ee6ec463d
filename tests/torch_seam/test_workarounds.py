"""What torch does wrong or refuses, and torchguard works around.

A test that fails here names something that the torch at hand has repaired: switch the workaround off for it.
"""

import contextlib
import copy
import threading

import pytest
import torch
from tests.models import Residual
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._dynamo.variables import dicts
from torch.func import jvp, vjp
from torch.nn.functional import gelu

from torchguard import guards, watch
from torchguard._graphs.op_facts import has_wrong_jvp
from torchguard._torch import dynamo, region_calls, settings
from torchguard._torch.support import minor_version


@pytest.mark.long
def test_gradients_of_regions_are_wrong_without_the_settings(monkeypatch):
    """`settings.protect_regions`. torch 2.15 no longer applies donated indices to regions, but still reuses memory."""
    model, x = Residual(), torch.randn(4, 3, 8)
    alone = copy.deepcopy(model)
    model(x).square().mean().backward()
    monkeypatch.setattr(settings, "_protected", contextlib.nullcontext)
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(watch(alone, compile_once=True), fullgraph=True)(x)[0].square().mean().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert not all(torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-5) for one, other in pairs)


def test_dynamo_loses_what_is_written_after_a_branch_in_torch_2_13_and_2_14(monkeypatch):
    """`dynamo_graph.keep_writes_after_calls`."""

    class Note:
        value = None

    def function(x, note):
        note.value = x + 1
        x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        note.value = None
        return x

    note, proxy = Note(), getattr(dicts, "SideEffectsProxyDict", None)
    patched = vars(proxy).get("side_effects") if proxy else None
    if isinstance(patched, property) and patched.fset:  # torch 2.15 has one without a setter
        monkeypatch.delattr(proxy, "side_effects")
    torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2), note)
    assert (note.value is not None) == (minor_version(torch.__version__) in [(2, 13), (2, 14)])


def test_calls_that_overlap_in_two_threads_switch_off_code_after_breaks_in_torch_2_11():
    """`dynamo.compiles_after_breaks`, of which `guards.inspect` warns."""
    is_running, may_end = (threading.Event(), threading.Event()), (threading.Event(), threading.Event())

    def call(index):
        def wait(graph, inputs):
            def run(*args):
                is_running[index].set()
                assert may_end[index].wait(60)
                return graph(*args)

            return run

        torch.compile(lambda x: x + index, backend=wait, fullgraph=True)(torch.ones(2))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for thread, started in zip(threads, is_running, strict=True):
        thread.start()
        assert started.wait(60)
    for thread, event in zip(threads, may_end, strict=True):
        event.set()
        thread.join()

    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    is_old = minor_version(torch.__version__) == (2, 11)
    warned = pytest.warns(guards.GuardWarning, match="does not compile the code after it: torch 2.11")
    with warned if is_old else contextlib.nullcontext(), guards.inspect() as inspection:
        torch.compile(broken, backend="eager")(torch.ones(2))
    assert len(inspection.frames) == (1 if is_old else 2)
    assert dynamo.compiles_after_breaks() != is_old


def test_a_region_may_not_return_its_input():
    """`regions._run_nested` clones it."""

    @torch.compiler.nested_compile_region
    def region(x, mask):
        return x.sin(), mask

    with pytest.raises(UncapturedHigherOrderOpError, match="aliasing"):
        torch.compile(lambda x, mask: region(x, mask)[0], backend="eager", fullgraph=True)(torch.ones(2), torch.ones(2))


def test_regions_that_differ_in_an_optional_argument_are_one(monkeypatch):
    """`region_calls._are_same` compares all arguments."""
    monkeypatch.setattr(region_calls, "_are_same", lambda original, *args: original(*args))

    @torch.compiler.nested_compile_region
    def region(x, kind):
        return gelu(x) if kind == "erf" else gelu(x, approximate="tanh")

    def function(x):
        return region(x, "erf"), region(x, "tanh")

    one, two = torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    assert torch.equal(one, two)


@pytest.mark.inductor
def test_what_a_region_writes_to_an_argument_is_lost_without_gradients():
    """`region_calls._refusing_writes` has Dynamo refuse such blocks."""

    @torch.compiler.nested_compile_region
    def region(state, x):
        state[:, 0] += x.sum(-1)
        return x.sin()

    def function(x):
        state = torch.zeros_like(x)
        y = region(state, region(state, x))
        return state + y

    x = torch.ones(2, 2)
    with torch.no_grad():
        assert not torch.allclose(torch.compile(function, fullgraph=True)(x), function(x))


def test_tangents_of_a_product_by_index_are_wrong():
    """`op_facts.has_wrong_jvp` has `compiled` refuse them."""
    index, x, dx = torch.tensor([0, 0]), torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0])
    product = lambda x: torch.ones(1).scatter_reduce(0, index, x, "prod")  # noqa: E731
    assert has_wrong_jvp("scatter_reduce", (x, 0, index, x, "prod"))
    assert vjp(product, x)[1](torch.ones(1))[0].tolist() == [3.0, 2.0]
    assert jvp(product, (x,), (dx,))[1].item() != 3.0


def test_second_derivatives_through_lu_are_wrong_without_grad():
    """`compiled` traces them with gradients enabled."""
    x, dx = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    gradient = lambda x: vjp(torch.linalg.det, x)[1](torch.ones(()))[0]  # noqa: E731
    want = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert torch.allclose(jvp(gradient, (x,), (dx,))[1], want, atol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(jvp(gradient, (x,), (dx,))[1], want, atol=1e-4)
