"""Leaves, tangents and cotangents have the shape, dtype, device and stride that a function was compiled for."""

import pytest
import torch
from torch.autograd import forward_ad

from torchguard.compiled import CompileError, LeafTypeError, compile_out


@pytest.fixture
def c():
    return compile_out(lambda x, y: x @ y, torch.ones(2, 3), torch.ones(3, 2), backend="eager")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 4), r"<lambda>: leaf x: expected f32\[2, 3\], got f32\[2, 4\]\."),
        (torch.ones(2), r"leaf x: expected f32\[2, 3\], got f32\[2\]\."),
        (torch.ones(2, 3, dtype=torch.float64), r"leaf x: expected f32\[2, 3\], got f64\[2, 3\]\."),
        (torch.ones(2, 3, device="meta"), r"leaf x: expected device cpu, got meta\."),
        (torch.ones(3, 2).t(), r"leaf x: expected stride \(3, 1\), got \(1, 2\)\. Call \.contiguous\(\)"),
        (3.0, r"leaf x: expected f32\[2, 3\], got float\."),
        (torch.ones(2, 3).to_sparse(), r"leaf x: expected dense f32\[2, 3\], got layout torch.sparse_coo\."),
    ],
    ids=["size", "dims", "dtype", "device", "stride", "no tensor", "sparse"],
)
def test_another_type_is_refused_by_name(c, x, message):
    with pytest.raises(LeafTypeError, match=message):
        c(x, torch.ones(3, 2))


def test_another_number_of_leaves_is_refused(c):
    with pytest.raises(LeafTypeError, match=r"<lambda>: expected 2 leaves \(x: f32\[2, 3\], y: f32\[3, 2\]\), got 1\."):
        c(torch.ones(2, 3))


def test_the_stride_of_a_dim_of_size_one_does_not_matter():
    c = compile_out(lambda x: x * 2, torch.ones(1, 3), backend="eager")
    assert c(torch.ones(3, 1).t()[:1]).shape == (1, 3)


def test_parameters_are_tensors(c):
    assert c(torch.nn.Parameter(torch.ones(2, 3)), torch.ones(3, 2)).shape == (2, 2)


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (torch.ones(3, 2), r"<lambda>: cotangent_0: expected f32\[2, 2\], got f32\[3, 2\]\."),
        (torch.ones(2, 2, dtype=torch.float64), r"<lambda>: cotangent_0: expected f32\[2, 2\], got f64\[2, 2\]\."),
        ((torch.ones(2, 2), torch.ones(2, 2)), r"cotangent: expected the structure \*, got \(\*, \*\)\."),
    ],
    ids=["shape", "dtype", "too many"],
)
def test_cotangents_are_checked(c, w, message):
    with pytest.raises(LeafTypeError, match=message):
        c.vjp_with_seed((torch.ones(2, 3), torch.ones(3, 2)), w)


def test_tangents_are_checked(c):
    with pytest.raises(LeafTypeError, match=r"<lambda>: tangent d_y: expected f32\[3, 2\], got f32\[2, 2\]\."):
        c.jvp((torch.ones(2, 3), torch.ones(3, 2)), (torch.ones(2, 3), torch.ones(2, 2)))


def test_a_cotangent_may_have_any_stride(c):
    x, w = (torch.ones(2, 3), torch.ones(3, 2)), torch.randn(2, 2)
    torch.testing.assert_close(c.vjp_with_seed(x, w.t().contiguous().t()), c.vjp_with_seed(x, w))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_dynamic_dim_may_have_any_size(backend):
    c = compile_out(lambda x: x.sin().sum(dim=0), torch.ones(4, 3), dynamic={"x": {0: "batch"}}, backend=backend)
    assert str(c.leaves[0]) == "f32[batch, 3]"
    for n in (4, 1, 0):
        x = torch.randn(n, 3)
        torch.testing.assert_close(c(x), x.sin().sum(dim=0))
    with pytest.raises(LeafTypeError, match=r"leaf x: expected f32\[batch, 3\], got f32\[4, 5\]\."):
        c(torch.ones(4, 5))


def test_derivatives_of_another_size():
    c = compile_out(lambda x: x.sin(), torch.ones(4, 3), dynamic={"x": 0}, backend="eager")
    x = torch.randn(6, 3)
    torch.testing.assert_close(c.vjp_with_seed(x, torch.ones(6, 3)), x.cos())
    torch.testing.assert_close(c.vjp(x)[1](torch.ones(6, 3)), x.cos())


def test_dims_of_one_name_have_to_agree():
    dynamic = {"x": {0: "batch"}, "y": {0: "batch"}}
    c = compile_out(lambda x, y: x + y, torch.ones(4), torch.ones(4), dynamic=dynamic, backend="eager")
    assert c(torch.ones(3), torch.ones(3)).shape == (3,)
    with pytest.raises(LeafTypeError, match=r"leaf y: dim 0 \(batch\): expected 3 as in the leaves before it, got 2"):
        c(torch.ones(3), torch.ones(2))


@pytest.mark.parametrize(
    "dynamic",
    [{"z": 0}, {"x": 2}, {3: 0}, {"x": {0: ""}}, {"x": {0: None}}],
    ids=["leaf", "dim", "position", "empty", "none"],
)
def test_a_wrong_declaration_of_dynamic_is_refused(dynamic):
    with pytest.raises(
        CompileError, match=r"compile: (there is no leaf|dynamic names dim 2 of x|dynamic: dim 0 of x: expected a name)"
    ):
        compile_out(lambda x: x, torch.ones(4, 3), dynamic=dynamic, backend="eager")


def test_complex_leaves_are_refused():
    with pytest.raises(CompileError, match=r"leaf x: complex tensors are .*, got complex64\. Pass torch.view_as_real"):
        compile_out(lambda x: x, torch.ones(3, dtype=torch.complex64))
    with pytest.raises(CompileError, match="returns complex numbers"):
        compile_out(lambda x: torch.fft.fft(x), torch.ones(4), backend="eager")


def test_complex_numbers_may_be_used_inside():
    c = compile_out(lambda x: torch.fft.rfft(x).abs(), torch.ones(4), backend="eager")
    assert c.vjp_with_seed(torch.randn(4), torch.ones(3)).shape == (4,)


@pytest.mark.parametrize("value", [3.0, "x", torch.ones(2).to_sparse()], ids=["number", "text", "sparse"])
def test_an_example_that_is_no_dense_tensor_is_refused(value):
    with pytest.raises(
        CompileError, match=r"compile: (argument \[0\]: expected a tensor, got|leaf x: expected a dense Tensor, got)"
    ):
        compile_out(lambda x: x, value)


def lazily_negated():
    """Four times -2 as a lazily negated view: its memory holds 2."""
    return torch.tensor([1 + 2j] * 4).conj().imag


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_lazily_negated_view_is_refused_as_a_leaf_and_resolved_as_a_tangent(backend):
    c = compile_out(lambda x: x * 3, torch.ones(8)[::2], backend=backend)
    x = torch.ones(8)[::2]
    with pytest.raises(LeafTypeError, match=r"leaf x: expected .*, got a lazily negated view\. Call .resolve_neg\(\)"):
        c(lazily_negated())
    assert c.vjp_with_seed(x, lazily_negated()).tolist() == [-6.0] * 4
    assert c.jvp(x, lazily_negated())[1].tolist() == [-6.0] * 4
    one = compile_out(lambda x: x * 3, torch.tensor(1.0), backend=backend)
    assert one.vjp_with_seed(torch.tensor(1.0), lazily_negated()[0]).item() == -6.0


@pytest.mark.parametrize("x", [5, None, "ab", {"x": torch.ones(2, 3)}], ids=["number", "none", "text", "dict"])
def test_a_point_that_is_no_tuple_is_refused(c, x):
    with pytest.raises(LeafTypeError, match=r"<lambda>: x: expected the tuple of its arguments, got \w+\."):
        c.jvp(x, x)


def test_gradients_of_a_list_are_a_list(c):
    assert isinstance(c.vjp_with_seed([torch.ones(2, 3), torch.ones(3, 2)], torch.ones(2, 2)), list)


def test_a_dual_tensor_is_refused_as_its_tangent_would_be_lost(c):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(CompileError, match=r"got a dual tensor .* Use the jvp of the compiled function"):
            c(x, torch.ones(3, 2))
        assert c(torch.ones(2, 3), torch.ones(3, 2)).shape == (2, 2)
