"""A pure function is compiled once, then evaluated and differentiated many times."""

import threading

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_same
from tests.compiled.autograd_functions import Doubled
from tests.models import affine_softmax as mlp
from tests.models import bert, gpt2
from torch import func, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard._graphs.op_facts import facts_of
from torchguard._torch.support import torch_is_at_least
from torchguard.compiled import CompileError, LeafTypeError, MissingRuleError, compile_out, compile_scalar, state_of


@pytest.fixture
def point():
    return torch.randn(4, 8), torch.randn(8, 3), torch.randn(3)


@pytest.mark.inductor
def test_value_and_derivatives_are_those_of_eager_mode(backend, point):
    c = compile_out(mlp, *point, backend=backend)
    dx = tuple(torch.randn_like(leaf) for leaf in point)
    w = torch.randn(4, 3)
    y, pull = func.vjp(mlp, *point)
    assert_same(c(*point), y)
    assert_same(c.forward(*point), y)
    assert_same(c.jvp(point, dx), func.jvp(mlp, point, dx))
    assert_same(c.vjp_with_seed(point, w), pull(w))
    assert_same(c.value_and_vjp(point, w), (y, pull(w)))


def test_a_pullback_takes_any_number_of_cotangents(backend, point):
    c = compile_out(mlp, *point, backend=backend)
    y, pullback = c.vjp(point)
    right, pull = func.vjp(mlp, *point)
    assert_same(y, right)
    for w in torch.randn(3, 4, 3):
        assert_same(pullback(w), pull(w))


def test_a_pushforward_takes_any_number_of_tangents(backend, point):
    c = compile_out(mlp, *point, backend=backend)
    _, pushforward = c.linearize(point)
    for _ in range(2):
        dx = tuple(torch.randn_like(leaf) for leaf in point)
        assert_same(pushforward(dx), func.jvp(mlp, point, dx)[1])


def test_executables_serve_new_inputs(point):
    traced = []

    def counted(x):
        traced.append(1)
        return x.sin()

    c = compile_out(counted, point[0], backend="eager")
    c(point[0])
    before = len(traced)
    for x in torch.randn(3, 4, 8):
        assert_same(c(x), x.sin())
    assert len(traced) == before


@pytest.mark.inductor
def test_a_scalar_function_has_backward_and_hessian(backend):
    c = compile_scalar(lambda x: (x**3).sum(), torch.ones(4), backend=backend)
    x, dx = torch.randn(4), torch.randn(4)
    assert_same(c.backward(x), 3 * x**2)
    assert_same(c.backward_with_seed(x, 2.0), 6 * x**2)
    assert_same(c.backward_with_seed(x, torch.tensor(2.0)), 6 * x**2)
    assert_same(c.value_and_grad(x), ((x**3).sum(), 3 * x**2))
    assert_same(c.hvp(x, dx), 6 * x * dx)


def test_hvp_of_a_tensor_function_takes_a_cotangent():
    c = compile_out(torch.sin, torch.ones(4), backend="eager")
    x, dx, w = torch.randn(3, 4)
    assert_same(c.hvp(x, dx, w), -x.sin() * dx * w)


def test_a_function_that_is_no_scalar_is_refused_with_its_shape():
    with pytest.raises(
        CompileError, match=r"compile_scalar: relu: expected one float of shape \[\] as result, got f32\[4\]"
    ):
        compile_scalar(torch.relu, torch.ones(4), backend="eager")


def test_gradients_have_the_structure_of_the_arguments():
    c = compile_out(lambda x: x * 2, torch.ones(3), backend="eager")
    x = torch.ones(3)
    assert isinstance(c.vjp_with_seed(x, x), torch.Tensor)
    assert isinstance(c.vjp_with_seed((x,), x), tuple)


def test_arguments_and_results_may_be_pytrees(backend):
    def f(batch, scale):
        return {"sum": batch["a"] + batch["b"][0], "parts": [batch["a"] * scale]}

    batch = {"a": torch.ones(3), "b": (torch.full((3,), 2.0),)}
    x = (batch, torch.tensor(5.0))
    c = compile_out(f, *x, backend=backend)
    assert [leaf.name for leaf in c.leaves] == ["batch['a']", "batch['b'][0]", "scale"]
    y, pullback = c.vjp(x)
    assert_same(y, f(*x))
    grads, by_scale = pullback({"sum": torch.ones(3), "parts": [torch.ones(3)]})
    assert_same(grads, {"a": torch.full((3,), 6.0), "b": (torch.ones(3),)})
    assert_same(by_scale, torch.tensor(3.0))
    flat = c.vjp_with_seed((batch["a"], batch["b"][0], x[1]), y)
    assert isinstance(flat, tuple)
    assert len(flat) == 3


def test_an_argument_of_another_structure_is_refused():
    c = compile_out(lambda pair: pair[0] + pair[1], (torch.ones(3), torch.ones(3)), backend="eager")
    with pytest.raises(LeafTypeError, match=r"<lambda>: expected the structure \(\(\*, \*\),\), got \(\[\*, \*\],\)\."):
        c([torch.ones(3), torch.ones(3)])


def test_a_module_is_a_function_of_its_state_and_arguments(backend):
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x, state = torch.randn(3, 8), state_of(model)
    c = compile_out(model, x, backend=backend)
    assert [leaf.name for leaf in c.leaves][:2] == ["0.weight", "0.bias"]
    y, pullback = c.vjp((state, x))
    grads, _ = pullback(torch.ones(3, 2))
    right = model(x)
    assert_same(y, right.detach())
    right.sum().backward()
    for name, parameter in model.named_parameters():
        assert_same(grads[name], parameter.grad)
    assert grads["2.running_mean"] is None, "a buffer is not differentiated by"


def test_a_model_that_tests_whether_it_is_traced():
    model, ids = gpt2().eval(), torch.randint(0, 50, (2, 6))
    state, w = state_of(model), torch.randn(2, 6, 50)
    c = compile_out(
        lambda state, ids: func.functional_call(model, state, (ids,))["logits"], state, ids, backend="eager"
    )
    grads, _ = c.vjp_with_seed((state, ids), w)
    model(ids).logits.backward(w)
    for name, parameter in model.named_parameters():
        assert_same(grads[name], parameter.grad)


def test_a_real_model_compiles():
    model = bert(add_pooling_layer=False).eval()
    ids = torch.randint(0, 50, (2, 6))
    f = lambda state, ids: func.functional_call(model, state, (ids,))["last_hidden_state"]  # noqa: E731
    state = state_of(model)
    c = compile_out(f, state, ids, backend="aot_eager")
    assert_same(c(state, ids), f(state, ids))
    w = torch.randn(2, 6, 16)
    grads, of_ids = c.vjp_with_seed((state, ids), w)
    model(ids).last_hidden_state.backward(w)
    for name, parameter in model.named_parameters():
        assert_same(grads[name], torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    assert of_ids is None


def test_an_unused_leaf_gets_zeros(backend):
    c = compile_out(lambda x, unused: x * 2, torch.ones(3), torch.ones(2), backend=backend)
    x = (torch.ones(3), torch.ones(2))
    assert c.vjp(x)[1](torch.ones(3))[1].tolist() == [0.0, 0.0]


def test_an_output_that_depends_on_nothing_has_no_tangent():
    c = compile_out(lambda x: (torch.ones(2), x), torch.ones(3), backend="eager")
    _, (still, moved) = c.jvp((torch.ones(3),), (torch.full((3,), 2.0),))
    assert still.tolist() == [0.0, 0.0]
    assert moved.tolist() == [2.0, 2.0, 2.0]


def test_inputs_are_neither_changed_nor_shared(backend):
    c = compile_out(lambda x: (x, x, x.t(), x + 0.0), torch.ones(2, 3), backend=backend)
    x, w = torch.ones(2, 3), (torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3))
    before = x.clone()
    outputs, gradient = c.value_and_vjp(x, w)
    _, pullback = c.vjp(x)
    everything = [x, *w, *outputs, gradient, pullback(w), *c.jvp(x, x)[1]]
    for tensor in everything[5:]:
        tensor.add_(1)
    assert torch.equal(x, before)
    assert len({tensor.data_ptr() for tensor in everything}) == len(everything)


def test_gradients_are_returned_and_never_accumulated():
    x = torch.ones(3, requires_grad=True)
    c = compile_scalar(lambda x: (x * x).sum(), x, backend="eager")
    first = c.backward(x)
    assert torch.equal(c.backward(x), first)
    assert x.grad is None
    assert not c(x).requires_grad


def test_a_pullback_raises_if_its_point_was_changed():
    c = compile_out(lambda x: x * x, torch.ones(3), backend="eager")
    x = torch.ones(3)
    _, pullback = c.vjp(x)
    x.add_(1)
    with pytest.raises(CompileError, match="changed in place"):
        pullback(torch.ones(3))


def halves_of_a_leaf(x):
    first, second = x.split(2)
    return first * second


def halves_of_an_output(x):
    h = x.exp()
    first, second = h.chunk(2)
    return first, first * second


def transposed_output(x):
    h = x.reshape(2, 2).exp()
    return h.T, h * h


@pytest.mark.parametrize("f", [halves_of_a_leaf, halves_of_an_output, transposed_output], ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ["vjp", "linearize"])
def test_a_change_of_memory_shared_with_a_residual_raises(f, way, backend):
    c, x = compile_out(f, torch.ones(4), backend=backend), torch.randn(4)
    y, derivative = getattr(c, way)(x)
    tangent = (y if isinstance(y, tuple) else (y,)) if way == "vjp" else x
    before = derivative(tangent)
    (x if f is halves_of_a_leaf else y[0]).mul_(10)
    with pytest.raises(CompileError, match="changed in place"):
        derivative(tangent)
    assert before is not None


def test_inference_tensors_are_copied(backend):
    c = compile_out(lambda x: (x * x).exp(), torch.ones(4), backend=backend)
    with torch.inference_mode():
        x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        y, pullback = c.vjp(x)
        right = 2 * x * y
        x.zero_()
        y.zero_()
    assert_same(pullback(torch.ones(4)), right)


def test_integers_and_masks_are_not_differentiated_by(backend):
    x, index, mask = torch.randn(3, 4), torch.tensor([0, 2]), torch.tensor([True, False])
    c = compile_out(lambda x, i, m: torch.where(m[:, None], x[i], 0.0), x, index, mask, backend=backend)
    gradient, *rest = c.vjp_with_seed((x, index, mask), torch.ones(2, 4))
    assert gradient.sum(dim=1).tolist() == [4.0, 0.0, 0.0]
    assert rest == [None, None]
    _, pushed = c.jvp((x, index, mask), (torch.ones(3, 4), None, None))
    assert pushed.sum(dim=1).tolist() == [4.0, 0.0]


def test_integer_outputs_take_no_cotangent():
    c = compile_out(lambda x: (x.argmax(dim=-1), x.sum(dim=-1)), torch.randn(2, 3), backend="eager")
    x = torch.randn(2, 3)
    assert c.vjp_with_seed(x, (None, torch.ones(2))).tolist() == [[1.0] * 3] * 2
    assert c.jvp(x, torch.ones(2, 3))[1][0] is None


def test_leaves_may_be_declared_not_differentiable():
    c = compile_out(lambda x, y: x * y, torch.ones(2), torch.ones(2), nondiff=["y"], backend="eager")
    x = (torch.ones(2), torch.full((2,), 3.0))
    assert c.vjp_with_seed(x, torch.ones(2))[1] is None
    with pytest.raises(CompileError, match="there is no leaf 'z'"):
        compile_out(lambda x: x, torch.ones(2), nondiff=["z"])


def test_other_precisions(backend):
    xs = tuple(torch.linspace(0, 1, 5, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    c = compile_out(lambda x, y: (x.sin() * 2, y.sin() * 2), *xs, backend=backend)
    for x, gradient in zip(xs, c.vjp_with_seed(xs, tuple(map(torch.ones_like, xs))), strict=True):
        torch.testing.assert_close(gradient, 2 * x.cos())


ODD = {
    "no dims": torch.tensor(3.0),
    "empty": torch.ones(0, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "expanded": torch.arange(4.0).expand(3, 4),
    "with gaps": torch.arange(8.0)[::2],
}


def test_examples_of_odd_layouts(backend):
    xs = tuple(ODD.values())
    square = lambda *leaves: tuple(x * x + 1 for x in leaves)  # noqa: E731
    c = compile_out(square, *xs, backend=backend)
    ones = tuple(map(torch.ones_like, xs))
    doubled = tuple(2 * x for x in xs)
    assert_same(c(*xs), square(*xs))
    assert_same(c.vjp_with_seed(xs, ones), doubled)
    assert_same(c.vjp(xs)[1](ones), doubled)
    assert_same(c.jvp(xs, ones)[1], doubled)


@pytest.mark.parametrize("name", ODD)
def test_an_example_of_odd_layout_alone(name):
    c = compile_out(torch.sin, ODD[name], backend="eager")
    assert_same(c.vjp_with_seed(ODD[name], torch.ones_like(ODD[name])), ODD[name].cos())


def test_the_same_tensor_may_be_passed_twice():
    c = compile_out(lambda x, y: x * y, torch.ones(3), torch.ones(3), backend="eager")
    x = torch.randn(3)
    assert_same(c.vjp_with_seed((x, x), torch.ones(3)), (x, x))


def test_broadcasting():
    c = compile_out(lambda x, b: x + b, torch.ones(4, 3), torch.ones(3), backend="eager")
    assert c.vjp_with_seed((torch.ones(4, 3), torch.ones(3)), torch.ones(4, 3))[1].tolist() == [4.0] * 3


def test_transforms_may_be_used_inside(backend):
    def residual(t, w, v):
        u = lambda s: torch.tanh(s * w) @ v  # noqa: E731
        second = func.grad(func.grad(u))
        return (func.vmap(second)(t) + func.vmap(u)(t)).square().mean()

    x = torch.randn(5), torch.randn(6), torch.randn(6)
    c = compile_scalar(residual, *x, backend=backend)
    assert_same(c.backward(x), func.grad(residual, argnums=(0, 1, 2))(*x))


def test_a_call_inside_a_transform_raises():
    c = compile_out(torch.sin, torch.ones(3), backend="eager")
    with pytest.raises(CompileError, match="called inside a transform"):
        func.grad(lambda x: c(x).sum())(torch.ones(3))


def test_fused_attention_has_a_jvp():
    q = torch.randn(1, 2, 4, 8)
    c = compile_out(lambda q: F.scaled_dot_product_attention(q, q, q), q, backend="eager")
    dq, w = torch.randn_like(q), torch.randn_like(q)
    torch.testing.assert_close((c.jvp(q, dq)[1] * w).sum(), (c.vjp_with_seed(q, w) * dq).sum(), rtol=1e-4, atol=1e-4)


def test_tangents_of_fused_attention_are_those_of_what_was_compiled():
    scale = [2.0]

    def attended(q):
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True) * scale[0]
        return y.transpose(1, 2).reshape(1, 4, 16)

    q, dq = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    c = compile_out(attended, q, backend="eager")
    with sdpa_kernel(SDPBackend.MATH):
        right = func.jvp(attended, (q,), (dq,))
    scale[0] = 5.0
    torch.testing.assert_close(c.jvp(q, dq), right, rtol=1e-4, atol=1e-4)
    assert "test_functions.py" in c.listing("jvp")
    assert "a saved graph" not in c.listing("jvp")


def test_a_missing_jvp_rule_names_the_operation():
    x = torch.randn(4, 3), torch.rand(3), torch.randn(4, 2)
    c = compile_out(lambda a, t, x: torch.ormqr(a, t, x), *x, backend="eager")
    with pytest.raises(MissingRuleError, match=r"ormqr has no rule .* test_functions.py:\d+"):
        c.jvp(x, x)
    assert c.vjp_with_seed(x, torch.ones(4, 2))[0].shape == (4, 3)


def test_a_custom_operator_without_a_rule_has_no_zero_derivative():
    @torch.library.custom_op("torchguard_test::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    square.register_fake(torch.empty_like)
    c = compile_out(lambda x: square(x) + x, torch.ones(3), backend="eager")
    assert c(torch.full((3,), 2.0)).tolist() == [6.0] * 3
    for derivative in (c.jvp, c.vjp_with_seed):
        with pytest.raises(MissingRuleError, match=r"torchguard_test.square has no rule"):
            derivative(torch.ones(3), torch.ones(3))


def test_a_library_operator_without_a_rule_has_no_zero_gradient():
    library = torch.library.Library("torchguard_no_rule", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("torchguard_no_rule::double", torch.empty_like, lib=library)
    c = compile_out(lambda x: torch.ops.torchguard_no_rule.double(x) + x, torch.ones(3), backend="eager")
    with pytest.raises(MissingRuleError, match=r"torchguard_no_rule.double has no rule for gradients, at test_func"):
        c.vjp_with_seed(torch.ones(3), torch.ones(3))


def test_the_registered_rule_of_a_custom_operator_is_used(backend):
    name = f"torchguard_test::cube_{backend}"

    @torch.library.custom_op(name, mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_fake(torch.empty_like)
    save = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)  # noqa: E731
    cube.register_autograd(lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g, setup_context=save)
    c, x = compile_out(lambda x, unused: (cube(x) + x, x.argmax()), torch.ones(3), torch.ones(2), backend=backend), 2.0
    point = torch.full((3,), x), torch.ones(2)
    gradient, of_unused = c.vjp_with_seed(point, (torch.ones(3), None))
    assert gradient.tolist() == [13.0] * 3
    assert of_unused.tolist() == [0.0, 0.0]
    assert_same(c.vjp(point)[1]((torch.ones(3), None))[0], gradient)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 1


def test_rules_of_an_autograd_function_are_used(backend):
    c = compile_out(StraightThrough.apply, torch.ones(3), backend=backend)
    assert c.vjp_with_seed(torch.ones(3), torch.ones(3)).tolist() == [1.0] * 3
    assert c.jvp(torch.ones(3), torch.ones(3))[1].tolist() == [1.0] * 3


class WithGradInside(torch.autograd.Function):
    """Runs its forward with grad switched on, as functions that compute something again in backward do."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        with torch.enable_grad():
            return torch.round(x)

    setup_context, backward, jvp = StraightThrough.setup_context, StraightThrough.backward, StraightThrough.jvp


def rounded(x):
    return torch.round(x)


class OfAFunction(StraightThrough):
    forward = staticmethod(rounded)


bound = StraightThrough.apply


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(WithGradInside.apply, id="grad is switched on inside"),
        pytest.param(OfAFunction.apply, id="its forward is a function from elsewhere"),
        pytest.param(lambda x: bound(x), id="apply was bound before"),
        pytest.param(lambda x: StraightThrough.apply(StraightThrough.apply(x)), id="one after another"),
        pytest.param(lambda x: StraightThrough.apply(x) + rounded(x.detach()) * 0, id="beside plain operations"),
    ],
)
def test_rules_of_an_autograd_function_are_used_however_it_is_called(f):
    c = compile_out(f, torch.ones(3), backend="eager")
    assert c.vjp_with_seed(torch.ones(3), torch.ones(3)).tolist() == [1.0] * 3
    assert c.jvp(torch.ones(3), torch.ones(3))[1].tolist() == [1.0] * 3


def test_an_autograd_function_under_no_grad_is_a_constant():
    def f(x):
        with torch.no_grad():
            constant = StraightThrough.apply(x)
        return x * constant

    c = compile_out(f, torch.full((3,), 2.0), backend="eager")
    assert c.vjp_with_seed(torch.full((3,), 2.0), torch.ones(3)).tolist() == [2.0] * 3
    assert c.jvp(torch.full((3,), 2.0), torch.ones(3))[1].tolist() == [2.0] * 3


def test_values_computed_under_no_grad_are_constants():
    def f(x):
        with torch.no_grad():
            scale = x.sum()
        return x * scale + x.detach() * x

    c = compile_out(f, torch.ones(3), backend="eager")
    x, w = torch.randn(3), torch.randn(3)
    assert_same(c.vjp_with_seed(x, w), func.vjp(f, x)[1](w)[0])
    assert_same(c.vjp_with_seed(x, w), w * (x.sum() + x))
    assert_same(c.jvp(x, w)[1], w * (x.sum() + x))


def test_derivatives_are_of_the_graph_and_the_function_is_run_once():
    runs = []

    def f(x):
        runs.append(1)
        return x.sin()

    c = compile_out(f, torch.ones(3), backend="eager")
    c.jvp(torch.ones(3), torch.ones(3))
    c.vjp(torch.ones(3))
    assert len(runs) == 1


def test_autocast_around_a_call_changes_nothing():
    c = compile_out(lambda x: x @ x, torch.ones(2, 2), backend="eager")
    with torch.autocast("cpu"):
        assert c(torch.ones(2, 2)).dtype == torch.float32
        with pytest.raises(CompileError, match="autocast is on"):
            compile_out(lambda x: x @ x, torch.ones(2, 2))


def beside_a_constant(x):
    with torch.no_grad():
        scale = x.sin().sum()
    return Doubled.apply(x) ** 2 * scale


def of_a_constant(x):
    with torch.no_grad():
        scale = Doubled.apply(x)
    return x**2 * scale


def with_grad_inside(x):
    with torch.no_grad():
        with torch.enable_grad():
            moving = x.sin()
        still = torch.stack(x.cos().split(1)).squeeze(1)
    return Doubled.apply(moving) * still


@pytest.mark.parametrize("f", [beside_a_constant, of_a_constant, with_grad_inside], ids=lambda f: f.__name__)
def test_no_grad_makes_constants_beside_an_autograd_function(f):
    c = compile_out(f, torch.ones(4), backend="eager")
    x = torch.randn(4)
    tracked = x.clone().requires_grad_()
    jacobian = torch.stack([torch.autograd.grad(y, tracked, retain_graph=True)[0] for y in f(tracked)])
    dx, w = torch.randn(2, 4)
    assert_same(c.vjp_with_seed(x, w), jacobian.T @ w)
    assert_same(c.jvp(x, dx)[1], jacobian @ dx)
    assert_same(c.linearize(x)[1](dx), jacobian @ dx)


def test_no_grad_makes_constants_of_second_derivatives_too():
    c = compile_out(beside_a_constant, torch.ones(4), backend="eager")
    x, dx, w = torch.randn(3, 4)
    assert_same(c.hvp(x, dx, w), 8 * x.sin().sum() * dx * w)


def test_a_change_in_place_under_no_grad_has_no_jvp_beside_an_autograd_function():
    def f(x):
        y = x.clone()
        with torch.no_grad():
            y.mul_(3)
        return Doubled.apply(y)

    c = compile_out(f, torch.ones(3), backend="eager", probe=False)
    with pytest.raises(CompileError, match=r"in f: aten.mul_ changes a tensor in place under no_grad"):
        c.jvp(torch.ones(3), torch.ones(3))


def test_recurrent_layers_are_decomposed():
    model, x = nn.LSTM(4, 6, batch_first=True), torch.randn(2, 5, 4)
    c = compile_out(lambda state, x: func.functional_call(model, state, (x,))[0], state_of(model), x, backend="eager")
    state, w = state_of(model), torch.randn(2, 5, 6)
    grads, _ = c.vjp_with_seed((state, x), w)
    model(x)[0].backward(w)
    for name, parameter in model.named_parameters():
        assert_same(grads[name], parameter.grad)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_a_module_may_have_recurrent_layers(layer):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer(4, 6, batch_first=True)

        def forward(self, x):
            return self.inner(x)[0][:, -1]

    model, x, w = Last(), torch.randn(2, 5, 4), torch.randn(2, 6)
    grads, _ = compile_out(model, x, backend="eager").vjp_with_seed((state_of(model), x), w)
    model(x).backward(w)
    for name, parameter in model.named_parameters():
        assert_same(grads[name], parameter.grad)


def test_threads_may_share_a_function():
    c, found = compile_out(torch.sin, torch.ones(3), backend="eager"), []
    call = lambda: found.append(c.vjp_with_seed(torch.zeros(3), torch.ones(3)))  # noqa: E731
    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [gradient.tolist() for gradient in found] == [[1.0] * 3] * 6


def test_value_checks_inside_operations_are_removed():
    a = torch.eye(3) * 2
    c = compile_out(lambda a: torch.linalg.solve(a, a) + torch.linalg.cholesky(a), a, backend="eager")
    assert_same(c(a), torch.eye(3) * (1 + 2**0.5))
    assert "check_errors" not in str(c)


def test_an_unknown_backend_is_refused():
    with pytest.raises(CompileError, match="no backend 'inductr'"):
        compile_out(torch.sin, torch.ones(2), backend="inductr")


def test_the_graph_is_listed_with_types_and_lines(point):
    c = compile_out(mlp, *point, backend="eager")
    lines = str(c).splitlines()
    assert lines[0] == "affine_softmax(%x: f32[4, 8], %w: f32[8, 3], %b: f32[3]):"
    assert lines[1].startswith("  %mm = aten.mm.default(%x, %w) : f32[4, 3]")
    assert "models.py" in lines[1]
    assert lines[-1] == "  return %_softmax: f32[4, 3]"
    assert [node.op for node in c.nodes] == [
        "aten.mm.default",
        "aten.add.Tensor",
        "aten.relu.default",
        "aten._softmax.default",
    ]
    assert "cotangent_0" in c.listing("vjp")


def test_nonsmooth_points_are_recorded(point):
    (found,) = compile_out(mlp, *point, backend="eager").nonsmooth_points
    assert found.op == "aten.relu"
    assert found.convention == "relu'(0) = 0"
    assert "models.py" in found.source


def test_selu_has_a_nonsmooth_point_and_celu_has_none():
    f = lambda x: F.celu(x, 2.0) + F.elu(x)  # noqa: E731
    assert not compile_out(f, torch.ones(3), backend="eager").nonsmooth_points
    assert [point.op for point in compile_out(F.selu, torch.ones(3), backend="eager").nonsmooth_points] == ["aten.elu"]


def test_masks_that_are_leaves_are_smooth():
    f = lambda x, m, i: x.masked_fill(m, 0.0) * (i > 0) + i.int()  # noqa: E731
    leaves = torch.ones(3), torch.tensor([True, False, True]), torch.arange(3)
    assert not compile_out(f, *leaves, backend="eager").nonsmooth_points


CLAMP_AT_END = 0.0 if torch_is_at_least(2, 14) else 1.0
AT_NONSMOOTH_POINTS = {
    "relu": (torch.relu, 0.0, 0.0),
    "abs": (torch.abs, 0.0, 0.0),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.25), 0.0, 0.25),
    "threshold": (lambda x: F.threshold(x, 1.0, 0.0), 1.0, 0.0),
    "hardtanh": (F.hardtanh, 1.0, 0.0),
    "hardsigmoid": (F.hardsigmoid, 3.0, 0.0),
    "clamp": (lambda x: x.clamp(0.0, 1.0), 1.0, CLAMP_AT_END),
    "clamp_min": (lambda x: x.clamp_min(0.0), 0.0, CLAMP_AT_END),
    "clamp_max": (lambda x: x.clamp_max(0.0), 0.0, CLAMP_AT_END),
    "sign": (torch.sign, 0.0, 0.0),
    "floor": (torch.floor, 1.0, 0.0),
    "ceil": (torch.ceil, 1.0, 0.0),
    "round": (torch.round, 0.5, 0.0),
    "trunc": (torch.trunc, 1.0, 0.0),
    "remainder": (lambda x: torch.remainder(x, 1.0), 1.0, 1.0),
    "fmod": (lambda x: torch.fmod(x, 1.0), 1.0, 1.0),
    "amax": (lambda x: torch.stack([x, x.detach()]).amax(dim=0), 1.0, 0.5),
    "amin": (lambda x: torch.stack([x, x.detach()]).amin(dim=0), 1.0, 0.5),
    "max": (lambda x: torch.stack([x, x.detach()]).max(), 1.0, 0.5),
    "min": (lambda x: torch.stack([x, x.detach()]).min(), 1.0, 0.5),
    "topk": (lambda x: torch.stack([x, x.detach()]).topk(2).values.sum(), 1.0, 1.0),
    "sgn": (torch.sgn, 0.0, 0.0),
    "where": (lambda x: torch.where(x > 0, x, 3 * x), 0.0, 3.0),
    "maximum": (lambda x: torch.maximum(x, x.detach()), 1.0, 0.5),
    "minimum": (lambda x: torch.minimum(x, x.detach()), 1.0, 0.5),
    "linalg_vector_norm": (lambda x: torch.linalg.vector_norm(x[None], dim=0), 0.0, 0.0),
    "sqrt": (torch.sqrt, 0.0, float("inf")),
    "hardshrink": (F.hardshrink, 0.5, 0.0),
    "softshrink": (F.softshrink, -0.5, 0.0),
    "hardswish": (F.hardswish, 3.0, 1.0),
    "elu": (lambda x: F.elu(x, 2.0), 0.0, 2.0),
    "huber_loss": (lambda x: F.huber_loss(x, torch.zeros(())), 1.0, 1.0),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, torch.zeros(())), 1.0, 1.0),
    "frac": (torch.frac, 1.0, 1.0),
    "gt": (lambda x: x * (x > 0), 0.0, 0.0),
    "le": (lambda x: x * (x <= 0), 0.0, 1.0),
    "masked_fill": (lambda x: x.masked_fill(x < 0, 7.0), 0.0, 1.0),
    "_to_copy": (lambda x: x - x.int(), 1.0, 1.0),
}


@pytest.mark.parametrize("op", AT_NONSMOOTH_POINTS)
def test_the_derivative_at_a_nonsmooth_point_is_the_one_recorded(op):
    f, x, derivative = AT_NONSMOOTH_POINTS[op]
    c = compile_out(lambda x: f(x), torch.tensor(x), backend="eager", probe=False)
    assert facts_of(op).nonsmooth in {point.convention for point in c.nonsmooth_points if point.op == f"aten.{op}"}
    assert c.vjp_with_seed(torch.tensor(x), torch.tensor(1.0)).item() == derivative


def test_a_pullback_raises_for_a_changed_point_even_if_it_does_not_read_it():
    x = torch.randn(3)
    c = compile_out(lambda x: x * 2, x, backend="eager")
    _, pullback = c.vjp(x)
    x.add_(1)
    with pytest.raises(CompileError, match="changed in place"):
        pullback(torch.ones(3))
