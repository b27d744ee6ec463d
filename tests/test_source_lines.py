"""The user's source line behind a node, a stack and an error."""

import functools
import inspect
import os

import pytest
import torch
from torch import fx, nn

from torchguard._graphs.source_lines import (
    SourceLine,
    caller_line,
    definition_line,
    error_line,
    lines_of_trace,
    source_line_of,
    user_line,
)

TORCH = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "linear.py")
TRACE = f"""  File "model.py", line 12, in forward
    return self.layer(x)
  File "{TORCH}", line 134, in forward
    return F.linear(input, self.weight, self.bias)
"""


def test_a_line_as_str_and_in_short():
    line = SourceLine("/src/model.py", 12, "forward", "return x")
    assert str(line) == "/src/model.py:12 in forward: return x"
    assert str(SourceLine("/src/model.py", 12, "forward")) == "/src/model.py:12 in forward"
    assert line.short == "model.py:12 in forward"


def test_the_lines_of_a_stack_trace_outermost_first():
    assert lines_of_trace(TRACE) == (
        SourceLine("model.py", 12, "forward", "return self.layer(x)"),
        SourceLine(TORCH, 134, "forward", "return F.linear(input, self.weight, self.bias)"),
    )


def test_a_frame_without_text_does_not_hide_the_next():
    trace = '  File "<stdin>", line 1, in <module>\n  File "model.py", line 12, in forward\n    return x\n'
    assert [line.line for line in lines_of_trace(trace)] == [1, 12]
    assert lines_of_trace(trace)[0].text == ""


def test_the_users_line_is_the_innermost_outside_torch():
    assert user_line(lines_of_trace(TRACE)).file == "model.py"
    assert user_line(lines_of_trace(TRACE)[1:]).file == TORCH


def test_the_line_of_the_first_node_that_has_one():
    graph = fx.Graph()
    without, node = graph.placeholder("x"), graph.placeholder("y")
    node.meta["stack_trace"] = TRACE
    assert source_line_of(without) is None
    line = source_line_of(without, node)
    assert line is not None
    assert line.line == 12


def number_of_this_line():
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_callers_line_is_outside_the_standard_library():
    line, number = functools.reduce(lambda one, two: (caller_line(), number_of_this_line()), [0, 1])
    assert (line.file, line.line) == (__file__, number)


def test_the_line_an_error_passed_through_is_outside_torch():
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 3)(torch.ones(4))
    line = error_line(caught.value)
    assert line is not None
    assert (line.file, line.text) == (__file__, "nn.Linear(2, 3)(torch.ones(4))")
    assert error_line(RuntimeError("never raised")) is None


def test_the_line_of_a_definition():
    line = definition_line(number_of_this_line.__code__)
    assert (line.file, line.function) == (__file__, "number_of_this_line")
