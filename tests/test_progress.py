"""The progress of long work: on a terminal alone, in one line that is erased."""

import io
import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard import compiled, device, export, guards, testing, watch
from torchguard._progress import progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    """Have stderr be a terminal, or with False a pipe."""
    monkeypatch.setenv("TERM", "xterm")

    def use(is_terminal=True):
        stream = Terminal() if is_terminal else io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return use


def test_a_terminal_shows_the_newest_text_and_is_left_as_it_was(stderr):
    stream = stderr()
    with progress_line() as show:
        show("first")
        with progress_line() as inner:  # uses the same line
            inner("second")
    assert "second" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_pipe_gets_nothing_unless_it_is_wanted(stderr):
    stream = stderr(is_terminal=False)
    with progress_line() as show:
        show("not wanted")
    with progress_line(wanted=True) as show:
        show("wanted")
    assert stream.getvalue() == "wanted\n"


def test_an_error_in_the_block_frees_the_line(stderr):
    stderr()
    with pytest.raises(KeyboardInterrupt), progress_line():
        raise KeyboardInterrupt
    stream = stderr()
    with progress_line() as show:
        show("again")
    assert "again" in stream.getvalue()


def certified():
    compiled.compile_out(torch.sin, torch.randn(3)).certify("typed")


def certified_filter():
    guards.certify(lambda x: x + 1, torch.ones(3), guards.skip_all(), backend="eager")


def exported():
    export.to_program(watch(nn.Linear(4, 2)).eval(), torch.randn(3, 4), verify=False)


def compiled_function():
    compiled.compile_out(torch.sin, torch.randn(3), backend="eager").jvp(torch.randn(3), torch.randn(3))


def checked_on_device():
    graph = make_fx(torch.sin, tracing_mode="fake")(torch.randn(3))
    device.check(graph, device=device.Device(name="small"))


def checked_for_export():
    testing.check_exportable(nn.Linear(4, 2), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (certified, "typed layer"),
        (certified_filter, "change"),
        (exported, "to_program: exporting"),
        (compiled_function, "compiling jvp with eager"),
        (checked_on_device, "on the inference graph"),
        (checked_for_export, "comparing for a batch of 2"),
    ],
    ids=["certificate", "filter", "export", "compiled function", "device", "exportable"],
)
def test_long_functions_show_their_progress_on_a_terminal_and_nothing_in_a_pipe(stderr, work, text):
    stream = stderr()
    work()
    assert text in stream.getvalue()
    stream = stderr(is_terminal=False)
    work()
    assert stream.getvalue() == ""
