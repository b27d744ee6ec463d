"""Graphs built by hand: ordered leaves, operations in SSA form, and the outputs that are compiled."""

import pytest
import torch
import torch.nn.functional as F

from torchguard.compiled import Builder, CompileError, ImpureFunctionError, compile_out


@pytest.fixture
def b():
    return Builder("built")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_graph_by_hand_is_that_of_the_function(b, backend):
    x, w = b.leaf("x", (4, 8)), b.leaf("w", (8, 3))
    h = b.op("aten.mm", x, w)
    y = F.softmax(h.relu() * 2, dim=-1)
    c = b.compile_out(y, backend=backend)
    point = torch.randn(4, 8), torch.randn(8, 3)
    f = compile_out(lambda x, w: F.softmax((x @ w).relu() * 2, dim=-1), *point, backend=backend)
    cotangent = torch.randn(4, 3)
    torch.testing.assert_close(c(*point), f(*point))
    torch.testing.assert_close(c.vjp_with_seed(point, cotangent), f.vjp_with_seed(point, cotangent))
    assert [node.op for node in c.nodes] == [node.op for node in f.nodes]


def test_leaves_and_operations_keep_their_order(b):
    x = b.leaf("x", (2,))
    y = x * 2
    z = b.leaf("z", (2,), torch.int64)
    total = y + z
    assert [leaf.name for leaf in b.leaves] == ["x", "z"]
    assert [leaf.differentiable for leaf in b.leaves] == [True, False]
    assert [node.name for node in b.nodes] == ["mul", "add"]
    assert str(b).splitlines()[0] == "built(%x: f32[2], %z: i64[2]):"
    assert str(b).splitlines()[-1] == "  return %add: f32[2]"
    assert repr(total) == "%add: f32[2]"


def test_variables_know_their_types(b):
    x = b.leaf("x", (2, 3), torch.float64)
    y = x.sum(dim=0)
    assert y.shape == (3,)
    assert y.dtype == torch.float64
    assert y.ndim == 1


def test_several_outputs(b):
    x = b.leaf("x", (3,))
    values, indices = torch.sort(x)
    c = b.compile_out(values, indices, backend="eager")
    found = c(torch.tensor([3.0, 1.0, 2.0]))
    assert [part.tolist() for part in found] == [[1.0, 2.0, 3.0], [1, 2, 0]]


def test_a_scalar_output(b):
    x = b.leaf("x", (3,))
    assert b.compile_scalar((x * x).sum(), backend="eager").backward(torch.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(CompileError, match=r"built: expected one float of shape \[\] as result, got f32\[3\]"):
        b.compile_scalar(x * x)


def test_operations_that_do_not_contribute_are_removed(b):
    x = b.leaf("x", (3,))
    _ = x.exp()
    assert len(b.compile_out(x.sin(), backend="eager").nodes) == 1


def test_source_lines_are_those_that_built_the_graph(b):
    c = b.compile_out(b.leaf("x", (3,)).sin(), backend="eager")
    assert "test_builder.py" in c.nodes[0].source


def test_a_wrong_shape_raises_at_once(b):
    x, w = b.leaf("x", (2, 3)), b.leaf("w", (2, 3))
    with pytest.raises(CompileError, match=r"built: at test_builder.py:\d+ in test_a_wrong_shape.*: RuntimeError: "):
        x @ w


def test_only_pure_operations_on_variables(b):
    x = b.leaf("x", (3,))
    with pytest.raises(ImpureFunctionError, match=r"aten.add_ changes a variable in place"):
        x.add_(1)
    with pytest.raises(ImpureFunctionError, match="hidden constant"):
        x * torch.ones(3)
    with pytest.raises(ImpureFunctionError, match="draws random numbers"):
        torch.rand_like(x)
    with pytest.raises(CompileError, match="no value to branch on"):
        bool(x.sum() > 0)
    with pytest.raises(CompileError, match="expected a variable of this builder, got one of the builder other"):
        x + Builder("other").leaf("y", (3,))
    with pytest.raises(CompileError, match=r"no operation 'os.system'"):
        b.op("os.system", x)
    with pytest.raises(CompileError, match="there is a leaf 'x' already"):
        b.leaf("x", (3,))
    with pytest.raises(CompileError, match="outputs: expected variables of this builder"):
        b.compile_out(torch.ones(3))
