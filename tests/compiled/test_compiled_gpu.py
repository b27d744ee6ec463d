"""Compiled functions on a GPU: their results are those of eager mode in float64, and no tensor changes device."""

import pytest
import torch
import torch.nn.functional as F
from torch import func, nn
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard.compiled import (
    Certificate,
    CompileError,
    LeafTypeError,
    Session,
    compile_out,
    compile_scalar,
    load,
    state_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),  # from torch, about its matmuls
]

CPU = torch.device("cpu")
LAYERS = ("typed", "probe", "algebraic", "enclosure")


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def in_full_precision():
    """Compute products of float32 in float32: by default convolutions are in TensorFloat32."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


def mlp(x, w, b, v):
    return torch.tanh(x @ w + b).relu() @ v


def attention(x, wq, wk, wv):
    q, k, v = x @ wq, x @ wk, x @ wv
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    scores = (q @ k.mT / x.shape[-1] ** 0.5).masked_fill(~causal, float("-inf"))
    return F.gelu(scores.softmax(-1) @ v)


def layer_norm(x, g, b):
    return F.layer_norm(x, x.shape[-1:], g, b) * x


def convolution(x, w, b):
    return F.max_pool2d(F.gelu(F.conv2d(x, w, b, padding=1)), 2)


def gather_and_scatter(x, i):
    taken = x.gather(1, i).square()
    return torch.zeros_like(x).scatter_add(1, i, taken) + F.embedding(i[:, 0] % x.shape[0], x.sin())


def reduction(x, y):
    weights = torch.tensor([0.5, -1.0, 2.0], device=x.device, dtype=x.dtype)
    return (x * weights).logsumexp(-1) + (y * torch.arange(3, device=x.device)).var(-1), x.amax(0).prod()


def fused_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


SHAPES = {
    mlp: [(16, 8), (8, 32), (32,), (32, 4)],
    attention: [(2, 16, 16), (16, 16), (16, 16), (16, 16)],
    layer_norm: [(8, 32), (32,), (32,)],
    convolution: [(2, 3, 8, 8), (4, 3, 3, 3), (4,)],
    gather_and_scatter: [(6, 8)],
    reduction: [(5, 3), (5, 3)],
    fused_attention: [(2, 2, 16, 32)] * 3,
}


@pytest.fixture(params=SHAPES, ids=lambda f: f.__name__)
def function(request):
    return request.param


def point_of(function, device):
    floats = [torch.randn(shape).to(device) for shape in SHAPES[function]]
    return (*floats, torch.randint(8, (6, 4)).to(device)) if function is gather_and_scatter else (*floats,)


def random_like(values, device):
    return tuple(torch.randn(v.shape).to(device) if v.is_floating_point() else None for v in values)


class InFloat64:
    """A function and its derivatives by eager mode, in float64 on the CPU."""

    def __init__(self, f, x):
        self.x = [leaf.cpu().double() if leaf.is_floating_point() else leaf.cpu() for leaf in x]
        self.own = [i for i, leaf in enumerate(self.x) if leaf.is_floating_point()]
        self.f = f

    def value(self, *moved):
        x = [*self.x]
        for i, leaf in zip(self.own, moved or [self.x[i] for i in self.own], strict=True):
            x[i] = leaf
        with sdpa_kernel(SDPBackend.MATH):  # torch has no JVP rule for the fused kernel
            found = self.f(*x)
        return found if isinstance(found, tuple) else (found,)

    def jvp(self, dx):
        moving = tuple(self.x[i] for i in self.own)
        return func.jvp(self.value, moving, tuple(d.cpu().double() for d in dx if d is not None))[1]

    def vjp(self, w):
        pull = func.vjp(self.value, *(self.x[i] for i in self.own))[1]
        return pull(tuple(cotangent.cpu().double() for cotangent in w))

    def hvp(self, dx, w):
        def gradients(*moved):
            return func.vjp(self.value, *moved)[1](tuple(cotangent.cpu().double() for cotangent in w))

        moving = tuple(self.x[i] for i in self.own)
        return func.jvp(gradients, moving, tuple(d.cpu().double() for d in dx if d is not None))[1]


def assert_close_to(found, right, device, tolerance=2e-4):
    """Each tensor is on the device, and close to its value in float64."""
    found = [one for one in (found if isinstance(found, (tuple, list)) else (found,)) if one is not None]
    assert len(found) == len(right)
    for got, exact in zip(found, right, strict=True):
        assert got.device == device
        assert not got.requires_grad
        atol = tolerance * float(exact.abs().max())
        torch.testing.assert_close(got.cpu().double(), exact, rtol=tolerance, atol=atol)


# The call, and the exact value of its result.
MODES = {
    "forward": lambda c, x, dx, w: (c(*x), lambda exact: exact.value()),
    "jvp": lambda c, x, dx, w: (c.jvp(x, dx)[1], lambda exact: exact.jvp(dx)),
    "linearize": lambda c, x, dx, w: (c.linearize(x)[1](dx), lambda exact: exact.jvp(dx)),
    "value of vjp": lambda c, x, dx, w: (c.value_and_vjp(x, w)[0], lambda exact: exact.value()),
    "vjp": lambda c, x, dx, w: (c.vjp_with_seed(x, w), lambda exact: exact.vjp(w)),
    "pullback": lambda c, x, dx, w: (c.vjp(x)[1](w), lambda exact: exact.vjp(w)),
    "hvp": lambda c, x, dx, w: (c.hvp(x, dx, w), lambda exact: exact.hvp(dx, w)),
}


@pytest.mark.parametrize("mode", MODES)
def test_values_and_derivatives_are_those_of_float64(function, mode, device, in_full_precision):
    x = point_of(function, device)
    c = compile_out(function, *x)
    exact = InFloat64(function, x)
    found, right = MODES[mode](c, x, random_like(x, device), random_like(exact.value(), device))
    assert_close_to(found, right(exact), device)
    assert not c.fallbacks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fused_attention_in_half_precision_has_gradients(dtype, device):
    x = tuple(leaf.to(dtype) for leaf in point_of(fused_attention, device))
    c = compile_out(fused_attention, *x)
    exact = InFloat64(fused_attention, x)
    w = torch.randn(2, 2, 16, 32).to(device, dtype)
    y, pullback = c.vjp(x)
    assert_close_to(y, exact.value(), device, 0.03)
    assert_close_to(pullback(w), exact.vjp((w,)), device, 0.03)
    assert_close_to(c.vjp_with_seed(x, w), exact.vjp((w,)), device, 0.03)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_have_gradients(layer, device):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer(4, 8, batch_first=True)

        def forward(self, x):
            return self.inner(x)[0][:, -1]

    model = Last().to(device)
    x, w = torch.randn(3, 5, 4, device=device), torch.randn(3, 8, device=device)
    c = compile_out(model, x)
    by_state, by_x = c.vjp_with_seed((state_of(model), x), w)
    tracked = x.clone().requires_grad_()
    wanted = torch.autograd.grad(model(tracked), [*model.parameters(), tracked], w)
    got = [by_state[name] for name, _ in model.named_parameters()]
    torch.testing.assert_close([*got, by_x], list(wanted), rtol=2e-3, atol=2e-3)


def test_a_module_is_a_function_of_its_state(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU()).to(device).eval()
    x = torch.randn(2, 3, 6, 6, device=device)
    c = compile_out(model, x)
    y, (by_state, by_x) = c.value_and_vjp((state_of(model), x), torch.ones(2, 4, 4, 4, device=device))
    torch.testing.assert_close(y, model(x).detach(), rtol=2e-3, atol=2e-3)
    assert by_state["1.running_mean"] is None
    assert by_state["0.weight"].device == by_x.device == device


@pytest.mark.parametrize("function", [mlp, layer_norm], ids=lambda f: f.__name__)
def test_a_dynamic_dim_may_have_any_size(function, device):
    x, *rest = point_of(function, device)
    c = compile_out(function, x, *rest, dynamic={"x": {0: "batch"}})
    for n in (x.shape[0], 5, 33, 1):
        there = torch.randn(n, *x.shape[1:]).to(device), *rest
        exact = InFloat64(function, there)
        w = random_like(exact.value(), device)
        y, pullback = c.vjp(there)
        assert_close_to(y, exact.value(), device)
        assert_close_to(pullback(w), exact.vjp(w), device)
        assert_close_to(c.vjp_with_seed(there, w), exact.vjp(w), device)


def test_a_leaf_on_another_device_is_refused_by_name(device):
    x, here = point_of(mlp, device), point_of(mlp, CPU)
    c = compile_out(mlp, *x, backend="eager")
    mismatch = f"expected device {device}, got cpu"
    with pytest.raises(LeafTypeError, match=f"mlp: leaf w: {mismatch}"):
        c(x[0], here[1], *x[2:])
    with pytest.raises(LeafTypeError, match=f"mlp: tangent d_x: {mismatch}"):
        c.jvp(x, (here[0], *x[1:]))
    with pytest.raises(LeafTypeError, match=f"mlp: cotangent_0: {mismatch}"):
        c.vjp_with_seed(x, torch.ones(16, 4))
    with pytest.raises(LeafTypeError, match=f"mlp: leaf x: expected device cpu, got {device}"):
        compile_out(mlp, *here, backend="eager")(*x)


def test_leaves_of_two_devices_that_meet_are_refused_when_compiling(device):
    with pytest.raises(CompileError, match=r"at \S+.py:\d+ in <lambda>: .*two (different )?devices"):
        compile_out(lambda x, y: x + y, torch.ones(3, device=device), torch.ones(3), backend="eager")


def test_leaves_of_two_devices_may_be_moved_inside(device):
    x, y = torch.randn(3, device=device), torch.randn(3)
    c = compile_out(lambda x, y: x * y.to(x.device), x, y)
    by_x, by_y = c.vjp_with_seed((x, y), torch.ones(3, device=device))
    assert (by_x.device, by_y.device) == (device, CPU)
    torch.testing.assert_close((by_x.cpu(), by_y), (y, x.cpu()))


@pytest.mark.parametrize("function", [mlp, attention], ids=lambda f: f.__name__)
def test_a_certificate_of_the_highest_level_is_ok(function, device):
    c = compile_out(function, *point_of(function, device))
    certificate = c.certify(level="enclosure")
    assert certificate.ok, certificate
    by_layer = {layer: {one.verdict.value for one in certificate.claims if one.layer == layer} for layer in LAYERS}
    assert by_layer["typed"] == by_layer["algebraic"] == {"pass"}, certificate
    assert "pass" in by_layer["probe"], certificate
    (enclosed,) = (claim for claim in certificate.claims if claim.layer == "enclosure")
    assert f"arithmetic on {device}" in enclosed.message
    assert Certificate.from_json(certificate.to_json()).verify(c).ok


def test_a_certificate_knows_how_coarsely_convolutions_round(device):
    x = point_of(convolution, device)
    certificate = compile_out(convolution, *x).certify(level="probe")
    assert certificate.ok, certificate
    assert dict(certificate.flags)[f"convolution precision on {device}"] == "tf32"


def test_a_certificate_ignores_the_default_device(device):
    x = point_of(mlp, device)
    with device:
        assert compile_out(mlp, *x, backend="eager").certify(level="enclosure").ok
    with torch.device("meta"):
        assert compile_out(mlp, *x, backend="eager").certify(level="enclosure").ok


def test_a_file_keeps_the_device(device, tmp_path):
    x = point_of(attention, device)
    c = compile_out(attention, *x, backend="eager")
    c.save(tmp_path / "there.json")
    again = load(tmp_path / "there.json")
    assert [leaf.device for leaf in again.leaves] == [device] * 4
    torch.testing.assert_close(again(*x), c(*x), rtol=1e-4, atol=1e-5)


def test_a_file_from_the_cpu_is_for_the_cpu(device, tmp_path):
    here = point_of(mlp, CPU)
    compile_out(mlp, *here, backend="eager").save(tmp_path / "here.json")
    again = load(tmp_path / "here.json", backend="eager")
    torch.testing.assert_close(again(*here), mlp(*here))
    with pytest.raises(LeafTypeError, match=f"leaf x: expected device cpu, got {device}"):
        again(*point_of(mlp, device))


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_the_next_call_does_not_overwrite_results(cudagraphs, device):
    x = point_of(mlp, device)
    w = torch.randn(16, 4, device=device)
    before = [leaf.clone() for leaf in (*x, w)]
    with inductor_config.patch("triton.cudagraphs", cudagraphs):
        c = compile_out(mlp, *x)
        _, pullback = c.vjp(x)
        results = [c(*x), *c.jvp(x, x), *c.vjp_with_seed(x, w), *pullback(w)]
        copies = [one.clone() for one in results]
        other = tuple(leaf + 1 for leaf in x)
        for _ in range(3):
            c(*other)
            c.jvp(other, other)
            c.vjp_with_seed(other, w + 1)
            pullback(w + 1)
    assert all(map(torch.equal, results, copies))
    assert all(map(torch.equal, (*x, w), before))
    assert len({one.untyped_storage().data_ptr() for one in (*results, *x, w)}) == len(results) + len(x) + 1


def test_a_leaf_may_start_anywhere_in_memory(device):
    whole = torch.randn(4 * 9 + 1, device=device)
    aligned, shifted = whole[:36].view(4, 9), whole[1:].view(4, 9)
    c = compile_out(layer_norm, aligned, torch.ones(9, device=device), torch.zeros(9, device=device))
    x = shifted, torch.randn(9, device=device), torch.randn(9, device=device)
    torch.testing.assert_close(c(*x), layer_norm(*x), rtol=1e-4, atol=1e-5)


def test_a_call_does_not_synchronize(device, no_sync):
    x = point_of(mlp, device)
    w = torch.randn(16, 4, device=device)
    c = compile_out(mlp, *x)
    loss = compile_scalar(lambda *x: mlp(*x).square().mean(), *x)

    def work():
        c(*x), c.jvp(x, x), c.vjp_with_seed(x, w), c.linearize(x)[1](x), c.vjp(x)[1](w), loss.backward(x)

    work()
    with no_sync:
        work()


def test_a_session_runs_there(device):
    seen = []
    for mode in ("eager", "compiled"):
        s = Session(mode=mode)
        w, x = s.param("w", torch.ones(3, 2, device=device)), s.input("x", torch.arange(6.0, device=device).view(2, 3))
        loss = torch.tanh(x @ w).square().mean()
        for _ in range(3):
            s.backward(loss)
            s.sgd_step(0.1)
        seen.append(s.value(w))
    assert seen[0].device == seen[1].device == device
    torch.testing.assert_close(*seen)
