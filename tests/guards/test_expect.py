"""`expect_no_recompile`: tests that fail when Dynamo recompiles."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from tests.models import ScaledLayer

from torchguard.exceptions import GuardError, RecompileError
from torchguard.guards._inspect import expect_no_recompile


def compiled(fn, **options):
    return torch.compile(fn, **{"backend": "eager", "dynamic": False, **options})


def test_a_recompile_is_an_error_with_all_failing_guards_and_advice():
    model = ScaledLayer()
    net = compiled(model)
    net(torch.ones(2, 3))
    model.k = 5
    with pytest.raises(RecompileError) as error, expect_no_recompile():
        net(torch.ones(4, 3), flag=False)
    text = str(error.value)
    assert "ScaledLayer.forward" in text
    assert ScaledLayer.forward.__code__.co_filename in text
    assert "was recompiled" in text
    assert "L['self'].k == 2, but it is 5" in text
    assert "size mismatch at index 0" in text
    assert "mark_dynamic(x, 0)" in text
    assert "flag" in text


def test_the_first_compilation_is_allowed():
    net = compiled(ScaledLayer())
    with expect_no_recompile():
        net(torch.ones(2, 3))
        net(torch.ones(2, 3))


def test_a_second_compilation_in_the_same_block_is_an_error():
    net = compiled(ScaledLayer())
    with pytest.raises(RecompileError, match="size mismatch"), expect_no_recompile():
        _ = net(torch.ones(2, 3)), net(torch.ones(4, 3))


def test_declared_inputs_are_compiled_for_first():
    net = compiled(ScaledLayer())
    inputs = [(torch.ones(2, 3),), (torch.ones(4, 3), False), {"x": torch.ones(5, 3)}, torch.ones(6, 3)]
    with expect_no_recompile(net, inputs):
        net(torch.ones(2, 3))
        net(torch.ones(4, 3), False)
        net(torch.ones(5, 3))
        net(torch.ones(6, 3))


def test_after_declared_inputs_nothing_may_be_compiled():
    net = compiled(ScaledLayer())
    with pytest.raises(RecompileError, match="was recompiled"), expect_no_recompile(net, [(torch.ones(2, 3),)]):
        net(torch.ones(4, 3))
    other = compiled(lambda x: x + 1)
    with pytest.raises(RecompileError, match="for the first time"), expect_no_recompile(net, [(torch.ones(2, 3),)]):
        other(torch.ones(2))


def test_one_dynamic_graph_serves_all_sizes():
    net = compiled(ScaledLayer(), dynamic=None)
    with expect_no_recompile(net, [torch.ones(2, 3), torch.ones(4, 3)]):
        for size in range(2, 9):
            net(torch.ones(size, 3))


def test_a_function_with_graph_breaks():
    def fn(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    net = compiled(fn)
    with expect_no_recompile():
        net(torch.ones(2))
    with expect_no_recompile(net, [torch.ones(2)]):
        net(torch.ones(2))
    with pytest.raises(RecompileError, match="resume_in"), expect_no_recompile():
        net(torch.ones(3))


def test_a_limit_reached_by_another_backend_is_an_error():
    def fn(x):
        return x + 1

    for size in range(2, 10):
        compiled(fn)(torch.ones(size))
    other = compiled(fn, backend="aot_eager")
    with pytest.raises(RecompileError, match="ran eagerly"), expect_no_recompile(other):
        other(torch.ones(2))


def test_another_backend_is_no_recompile():
    def fn(x):
        return x + 1

    compiled(fn)(torch.ones(2))
    with expect_no_recompile():
        compiled(fn, backend="aot_eager")(torch.ones(3))


def test_at_the_recompile_limit(caplog):
    net = compiled(ScaledLayer())
    net(torch.ones(2, 3))
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        caplog.at_level(logging.CRITICAL),
        pytest.raises(RecompileError, match="was not recompiled"),
        expect_no_recompile(),
    ):
        net(torch.ones(4, 3))


def test_an_error_of_the_block_comes_first():
    net = compiled(ScaledLayer())
    net(torch.ones(2, 3))
    with pytest.raises(KeyError), expect_no_recompile():  # noqa: PT012
        net(torch.ones(4, 3))
        raise KeyError
    with expect_no_recompile():
        net(torch.ones(4, 3))


def test_inductor():
    net = compiled(ScaledLayer(), backend="inductor")
    with expect_no_recompile(net, [torch.ones(2, 3)]):
        net(torch.ones(2, 3)).sum().backward()


def test_inputs_need_something_to_call():
    with pytest.raises(GuardError, match="nothing to call"), expect_no_recompile(inputs=[torch.ones(2)]):
        pass


@pytest.mark.skipif(not entry_points(group="pytest11", name="torchguard"), reason="run from the source, not installed")
@pytest.mark.long
def test_the_fixture(tmp_path):
    (tmp_path / "test_it.py").write_text(
        """
import torch

def double(x):
    return x * 2

net = torch.compile(double, backend="eager", dynamic=False)

def test_matches(expect_no_recompile):
    with expect_no_recompile(net, [torch.ones(2)]):
        net(torch.ones(2))

def test_recompiles(expect_no_recompile):
    with expect_no_recompile():
        net(torch.ones(3))
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "RecompileError" in done.stdout
    assert "mark_dynamic(x, 0)" in done.stdout


def test_the_plugin_loads_nothing_heavy():
    code = "import sys, torchguard_pytest; sys.exit(bool({'torch', 'torchguard'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
