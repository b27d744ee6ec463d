"""What is passed has to be what was compiled for: shape, dtype, device and stride."""

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
        (torch.ones(2, 4), r"<lambda>: leaf x has shape \[2, 4\], and f32\[2, 3\] was compiled for\."),
        (torch.ones(2), r"leaf x has shape \[2\]"),
        (torch.ones(2, 3, dtype=torch.float64), r"leaf x is f64, and f32\[2, 3\] was compiled for"),
        (torch.ones(2, 3, device="meta"), r"leaf x is on meta, and cpu was compiled for"),
        (torch.ones(3, 2).t(), r"leaf x has stride \(1, 2\), and \(3, 1\) was compiled for\. Call \.contiguous\(\)"),
        (3.0, r"leaf x is a float, and a tensor f32\[2, 3\] was compiled for"),
        (torch.ones(2, 3).to_sparse(), r"leaf x is of layout torch.sparse_coo"),
    ],
    ids=["size", "dims", "dtype", "device", "stride", "no tensor", "sparse"],
)
def test_another_type_is_refused_by_name(c, x, message):
    with pytest.raises(LeafTypeError, match=message):
        c(x, torch.ones(3, 2))


def test_another_number_of_leaves_is_refused(c):
    with pytest.raises(LeafTypeError, match="got 1 leaves, and 2 were compiled for: x: f32"):
        c(torch.ones(2, 3))


def test_the_stride_of_a_dim_of_size_one_says_nothing():
    c = compile_out(lambda x: x * 2, torch.ones(1, 3), backend="eager")
    assert c(torch.ones(3, 1).t()[:1]).shape == (1, 3)


def test_parameters_are_tensors(c):
    assert c(torch.nn.Parameter(torch.ones(2, 3)), torch.ones(3, 2)).shape == (2, 2)


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (torch.ones(3, 2), r"seed: leaf seed_0 has shape \[3, 2\]"),
        (torch.ones(2, 2, dtype=torch.float64), "seed: leaf seed_0 is f64"),
        ((torch.ones(2, 2), torch.ones(2, 2)), "seed"),
    ],
    ids=["shape", "dtype", "too many"],
)
def test_seeds_are_checked(c, w, message):
    with pytest.raises(LeafTypeError, match=message):
        c.vjp_with_seed((torch.ones(2, 3), torch.ones(3, 2)), w)


def test_tangents_are_checked(c):
    with pytest.raises(LeafTypeError, match=r"tangent: leaf d_y has shape \[2, 2\]"):
        c.jvp((torch.ones(2, 3), torch.ones(3, 2)), (torch.ones(2, 3), torch.ones(2, 2)))


def test_a_seed_may_have_any_stride(c):
    x, w = (torch.ones(2, 3), torch.ones(3, 2)), torch.randn(2, 2)
    torch.testing.assert_close(c.vjp_with_seed(x, w.t().contiguous().t()), c.vjp_with_seed(x, w))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_dynamic_dim_may_have_any_size(backend):
    c = compile_out(lambda x: x.sin().sum(dim=0), torch.ones(4, 3), dynamic={"x": {0: "batch"}}, backend=backend)
    assert str(c.leaves[0]) == "f32[batch, 3]"
    for n in (4, 1, 0):
        x = torch.randn(n, 3)
        torch.testing.assert_close(c(x), x.sin().sum(dim=0))
    with pytest.raises(LeafTypeError, match=r"has shape \[4, 5\], and f32\[batch, 3\] was compiled for"):
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
    with pytest.raises(LeafTypeError, match=r"y: dim 0 \(batch\) is 2, and 3 elsewhere"):
        c(torch.ones(3), torch.ones(2))


@pytest.mark.parametrize(
    "dynamic",
    [{"z": 0}, {"x": 2}, {3: 0}, {"x": {0: ""}}, {"x": {0: None}}],
    ids=["leaf", "dim", "position", "empty", "none"],
)
def test_a_wrong_declaration_of_dynamic_is_refused(dynamic):
    with pytest.raises(
        CompileError, match=r"compile: (there is no leaf|dynamic names dim 2 of x|dynamic gives dim 0 of x no)"
    ):
        compile_out(lambda x: x, torch.ones(4, 3), dynamic=dynamic, backend="eager")


def test_complex_leaves_are_refused():
    with pytest.raises(CompileError, match=r"leaf x is complex. Pass torch.view_as_real"):
        compile_out(lambda x: x, torch.ones(3, dtype=torch.complex64))
    with pytest.raises(CompileError, match="returns complex numbers"):
        compile_out(lambda x: torch.fft.fft(x), torch.ones(4), backend="eager")


def test_complex_numbers_may_be_used_inside():
    c = compile_out(lambda x: torch.fft.rfft(x).abs(), torch.ones(4), backend="eager")
    assert c.vjp_with_seed(torch.randn(4), torch.ones(3)).shape == (4,)


@pytest.mark.parametrize("value", [3.0, "x", torch.ones(2).to_sparse()], ids=["number", "text", "sparse"])
def test_an_example_that_is_no_dense_tensor_is_refused(value):
    with pytest.raises(CompileError, match=r"compile: (argument \[0\] is a|leaf x is a)"):
        compile_out(lambda x: x, value)


def lazily_negated():
    """Minus 2, four times: torch negates it when it is read, and its memory holds 2."""
    return torch.tensor([1 + 2j] * 4).conj().imag


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_negated_lazily_is_refused_as_a_leaf_and_resolved_as_a_direction(backend):
    c = compile_out(lambda x: x * 3, torch.ones(8)[::2], backend=backend)
    x = torch.ones(8)[::2]
    with pytest.raises(LeafTypeError, match=r"leaf x is negated lazily. Call .resolve_neg\(\) on it"):
        c(lazily_negated())
    assert c.vjp_with_seed(x, lazily_negated()).tolist() == [-6.0] * 4
    assert c.jvp(x, lazily_negated())[1].tolist() == [-6.0] * 4
    one = compile_out(lambda x: x * 3, torch.tensor(1.0), backend=backend)
    assert one.vjp_with_seed(torch.tensor(1.0), lazily_negated()[0]).item() == -6.0


@pytest.mark.parametrize("x", [5, None, "ab", {"x": torch.ones(2, 3)}], ids=["number", "none", "text", "dict"])
def test_a_point_that_is_no_tuple_is_refused(c, x):
    with pytest.raises(LeafTypeError, match=r"<lambda>: x is a \w+\. Pass the tuple of its arguments"):
        c.jvp(x, x)


def test_gradients_of_a_list_are_a_list(c):
    assert isinstance(c.vjp_with_seed([torch.ones(2, 3), torch.ones(3, 2)], torch.ones(2, 2)), list)


def test_a_dual_tensor_is_refused_as_its_tangent_would_be_lost(c):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(CompileError, match=r"given a dual tensor .* Use its own jvp"):
            c(x, torch.ones(3, 2))
        assert c(torch.ones(2, 3), torch.ones(3, 2)).shape == (2, 2)
