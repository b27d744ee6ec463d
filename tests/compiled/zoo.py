"""Functions to certify, of every kind that models are made of, and their forward, JVP and VJP graphs."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functionalize, grad, jvp, vjp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Graphs:
    """The graphs of one function, and which of its leaves are differentiable."""

    forward: GraphModule
    jvp: GraphModule
    vjp: GraphModule
    differentiable: tuple[bool, ...]
    inputs: tuple[Tensor, ...]


def traced(fn: Callable[..., Any], inputs: Sequence[Tensor], *, functional: bool = True) -> GraphModule:
    fn = functionalize(fn, remove="mutations_and_views") if functional else fn
    gm = make_fx(fn, tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def graphs_of(fn: Callable[..., Any], inputs: Sequence[Tensor], *, functional: bool = True) -> Graphs:
    """The forward, JVP and VJP graphs of a function. Pass `functional=False` if it calls an `autograd.Function`."""
    inputs = tuple(inputs)
    n = len(inputs)
    flat = lambda *xs: list(y) if isinstance(y := fn(*xs), tuple | list) else [y]  # noqa: E731
    outputs = flat(*inputs)
    differentiable = tuple(x.is_floating_point() for x in inputs)
    positions = [i for i, is_differentiable in enumerate(differentiable) if is_differentiable]
    has_cotangent = [y.is_floating_point() for y in outputs]

    def of_leaves(xs):
        def inner(*ds):
            merged = list(xs)
            for i, d in zip(positions, ds, strict=True):
                merged[i] = d
            ys = flat(*merged)
            return tuple(y for y, is_differentiable in zip(ys, has_cotangent, strict=True) if is_differentiable), ys

        return inner

    def jvp_fn(*values):
        xs, ts = values[:n], values[n:]
        primal = tuple(xs[i] for i in positions)
        _, dys, ys = jvp(of_leaves(xs), primal, ts, has_aux=True)
        return [*ys, *dys]

    def vjp_fn(*values):
        xs, ws = values[:n], values[n:]
        _, pull, ys = vjp(of_leaves(xs), *(xs[i] for i in positions), has_aux=True)
        return [*ys, *pull(tuple(ws))]

    tangents = [torch.randn_like(inputs[i]) for i in positions]
    cotangents = [
        torch.randn_like(y) for y, is_differentiable in zip(outputs, has_cotangent, strict=True) if is_differentiable
    ]
    # Torch has no JVP rule for fused attention, but has one for the math backend.
    with sdpa_kernel(SDPBackend.MATH):
        jvp_graph = traced(jvp_fn, [*inputs, *tangents], functional=functional)
    forward = traced(flat, inputs, functional=functional)
    vjp_graph = traced(vjp_fn, [*inputs, *cotangents], functional=functional)
    return Graphs(forward, jvp_graph, vjp_graph, differentiable, inputs)


def _r(*shape: int) -> Tensor:
    return torch.linspace(-1.3, 1.7, int(torch.Size(shape).numel()) or 1).sin().reshape(shape)


def _ids(high: int, *shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 7 + 3).reshape(shape) % high


def _mlp(x, w1, b1, w2, b2):
    return F.linear(torch.tanh(F.linear(x, w1, b1)), w2, b2)


def _attention(x, wq, wk, wv, wo, heads: int = 2):
    b, t, d = x.shape
    q, k, v = ((x @ w).view(b, t, heads, d // heads).transpose(1, 2) for w in (wq, wk, wv))
    causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
    scores = (q @ k.transpose(-2, -1) / (d // heads) ** 0.5).masked_fill(~causal, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d) @ wo


def attention_block(x, g1, b1, wq, wk, wv, wo, g2, b2, w1, c1, w2, c2):
    x = x + _attention(F.layer_norm(x, x.shape[-1:], g1, b1), wq, wk, wv, wo, heads=4)
    h = F.linear(F.layer_norm(x, x.shape[-1:], g2, b2), w1, c1)
    return x + F.linear(F.gelu(h), w2, c2)


def attention_block_inputs(batch: int, tokens: int, width: int) -> tuple[Tensor, ...]:
    square = [(width, width)] * 4
    shapes = [(batch, tokens, width), (width,), (width,), *square, (width,), (width,)]
    shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return tuple(_r(*shape) for shape in shapes)


def _rnn(x, h, wi, wh, b):
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ wi + h @ wh + b)
    return h


def _gru(x, h, wi, wh):
    for t in range(x.shape[1]):
        r, z, n = (x[:, t] @ wi).chunk(3, -1)
        hr, hz, hn = (h @ wh).chunk(3, -1)
        r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        h = (1 - z) * torch.tanh(n + r * hn) + z * h
    return h


def _pinn(x, w1, b1, w2):
    """The residual u'' + u of a network u, as in a physics-informed loss."""

    def u(point):
        return (torch.tanh(point * w1 + b1) * w2).sum()

    second = torch.func.vmap(grad(grad(u)))(x)
    return (second + torch.func.vmap(u)(x)).square().mean()


def _conv_net(x, w, b, v):
    return F.max_pool2d(F.relu(F.conv2d(x, w, b, padding=1)), 2).flatten(1) @ v


def _conv_bn(x, w, g, b):
    h = F.conv2d(x, w, stride=2)
    return F.relu(F.batch_norm(h, None, None, g, b, training=True))


def _cross_entropy(x, y):
    return F.cross_entropy(x, y)


Function = tuple[Callable[..., Any], tuple[Tensor, ...]]

ZOO: dict[str, Function] = {
    "polynomial": (lambda x, y: x**3 * y - 2.5 * x * y + 0.1, (_r(3, 4), _r(3, 4))),
    "rational": (lambda x, y: x / (1 + y * y), (_r(3, 4), _r(4))),
    "exp_log": (lambda x: torch.log(1 + torch.exp(x)) + torch.log1p(x * x), (_r(5),)),
    "trigonometry": (lambda x: torch.sin(x) * torch.cos(2 * x) + torch.tan(x) + torch.atan(x), (_r(5),)),
    "hyperbolic": (lambda x: torch.sinh(x) / torch.cosh(x) + torch.tanh(x) * torch.sigmoid(x), (_r(5),)),
    "roots": (lambda x: x.sqrt() + x.rsqrt() + x.pow(1.5) + x.pow(0.3), (_r(5).abs() + 0.5,)),
    "pow_tensor": (lambda x, y: torch.pow(x, y), (_r(5).abs() + 0.5, _r(5))),
    "erf": (lambda x: torch.erf(x) + torch.special.expm1(x), (_r(5),)),
    "where_abs": (lambda x, y: torch.where(x > y, x.abs(), y * x), (_r(3, 4), _r(3, 4).cos())),
    "clamp_minmax": (lambda x, y: x.clamp(-0.5, 0.5) + torch.maximum(x, y) - torch.minimum(x, y), (_r(6), _r(6).cos())),
    "relu_family": (lambda x: F.relu(x) + F.leaky_relu(x, 0.1) + F.elu(x) + F.hardtanh(x), (_r(3, 4),)),
    "silu_softplus": (lambda x: F.silu(x) + F.softplus(x) + F.mish(x), (_r(3, 4),)),
    "hard_activations": (lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.relu6(x) + F.softsign(x), (_r(3, 4),)),
    "gelu": (lambda x: F.gelu(x), (_r(3, 4),)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (_r(3, 4),)),
    "logsigmoid": (lambda x: F.logsigmoid(x), (_r(3, 4),)),
    "sums": (lambda x: x.sum(0) * x.mean(1).sum() + x.mean(), (_r(4, 4),)),
    "prod_cumsum": (lambda x: x.cumsum(0) * x.prod(dim=1, keepdim=True), (_r(3, 4),)),
    "variance": (lambda x: x.var(1) + x.std(0, correction=0).sum(), (_r(3, 4),)),
    "amax_amin": (lambda x: x.amax(1) * x.amin(0).sum() + x.max(1).values, (_r(3, 4),)),
    "logsumexp": (lambda x: x.logsumexp(1), (_r(3, 4),)),
    "softmax": (lambda x, v: (x.softmax(-1) * v).sum(-1), (_r(3, 4), _r(4))),
    "log_softmax": (lambda x, v: (x.log_softmax(-1) * v).sum(-1), (_r(3, 4), _r(4))),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=1) + F.normalize(x, dim=1).sum(1), (_r(3, 4),)),
    "layer_norm": (lambda x, g, b: F.layer_norm(x, (4,), g, b), (_r(3, 4), _r(4), _r(4).cos())),
    "group_norm": (lambda x, g, b: F.group_norm(x, 2, g, b), (_r(2, 4, 3), _r(4), _r(4).cos())),
    "rms_norm": (lambda x, g: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * g, (_r(3, 4), _r(4))),
    "batch_norm": (
        lambda x, g, b: F.batch_norm(x, None, None, g, b, training=True),
        (_r(4, 3, 2), _r(3), _r(3).cos()),
    ),
    "linear": (lambda x, w, b: F.linear(x, w, b), (_r(3, 4), _r(2, 4), _r(2))),
    "mlp": (_mlp, (_r(3, 4), _r(5, 4), _r(5), _r(2, 5), _r(2))),
    "bilinear_einsum": (lambda x, a, y: torch.einsum("bi,ij,bj->b", x, a, y), (_r(3, 4), _r(4, 5), _r(3, 5))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, dilation=2), (_r(2, 4, 9), _r(6, 4, 3), _r(6))),
    "conv2d_groups": (lambda x, w: F.conv2d(x, w, padding=1, groups=2), (_r(2, 4, 5, 5), _r(4, 2, 3, 3))),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        (_r(2, 3, 4, 4), _r(3, 2, 3, 3), _r(2)),
    ),
    "conv_bn_relu": (_conv_bn, (_r(2, 3, 7, 7), _r(4, 3, 3, 3), _r(4), _r(4).cos())),
    "conv_net": (_conv_net, (_r(2, 3, 4, 4), _r(4, 3, 3, 3), _r(4), _r(16, 2))),
    "conv_times_its_pool": (
        lambda x, w, b: (c := F.conv2d(x, w, b, padding=1)) * F.max_pool2d(c, 3, 1, 1),
        (_r(2, 3, 5, 5), _r(4, 3, 3, 3), _r(4)),
    ),
    "max_pool1d": (lambda x: F.max_pool1d(x, 3, 2), (_r(2, 3, 9),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, padding=1), (_r(2, 3, 7, 7),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 2)), (_r(2, 3, 6, 6),)),
    "upsample_nearest": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (_r(2, 3, 3, 3),)),
    "upsample_bilinear": (lambda x: F.interpolate(x, size=(5, 5), mode="bilinear"), (_r(2, 2, 3, 3),)),
    "pad_flip_roll": (
        lambda x: F.pad(x, (1, 2), value=0.5).flip(0).roll(1, 1),
        (_r(3, 4),),
    ),
    "attention": (_attention, (_r(2, 3, 4), _r(4, 4), _r(4, 4), _r(4, 4), _r(4, 4))),
    "attention_block": (attention_block, attention_block_inputs(2, 3, 8)),
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (_r(2, 2, 3, 4), _r(2, 2, 3, 4), _r(2, 2, 3, 4))),
    "embedding": (lambda ids, w: F.embedding(ids, w).square().sum(-1), (_ids(6, 2, 3), _r(6, 4))),
    "gather": (lambda x, i: x.gather(1, i), (_r(3, 4), _ids(4, 3, 2))),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (_r(3, 4), _ids(4, 3, 2), _r(3, 2))),
    "index_select": (lambda x, i: x.index_select(0, i) * x[i], (_r(5, 3), _ids(5, 4))),
    "index_put": (lambda x, i, s: x.index_put((i,), s, accumulate=True), (_r(5, 3), _ids(5, 4), _r(4, 3))),
    "topk": (lambda x: x.topk(2, dim=1).values.square(), (_r(3, 5),)),
    "sort": (lambda x: x.sort(dim=1).values * torch.arange(5.0), (_r(3, 5),)),
    "cross_entropy": (_cross_entropy, (_r(4, 5), _ids(5, 4))),
    "mse_huber": (lambda x, y: F.mse_loss(x, y) + F.huber_loss(x, y) + F.smooth_l1_loss(x, y), (_r(6), _r(6).cos())),
    "bce_with_logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y), (_r(6), _r(6).abs())),
    "inverse": (lambda a, b: torch.linalg.inv_ex(a).inverse @ b, (_r(3, 3) + 2 * torch.eye(3), _r(3, 2))),
    "solve": (lambda a, b: torch.linalg.solve_ex(a, b).result, (_r(3, 3) + 2 * torch.eye(3), _r(3, 2))),
    "determinant": (lambda a: torch.linalg.det(a), (_r(3, 3) + 2 * torch.eye(3),)),
    "cholesky": (lambda a: torch.linalg.cholesky_ex(a @ a.mT + torch.eye(3)).L, (_r(3, 3),)),
    "triangular_solve": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        (_r(3, 3) + 2 * torch.eye(3), _r(3, 2)),
    ),
    "eigenvalues": (lambda a: torch.linalg.eigvalsh(a + a.mT), (_r(3, 3),)),
    "eigenvectors": (lambda a: (lambda s, v: (v * s.sin()) @ v.mT)(*torch.linalg.eigh(a + a.mT)), (_r(3, 3),)),
    "singular_vectors": (lambda a: (lambda u, s, v: u * s.sin() @ v)(*torch.linalg.svd(a, False)), (_r(4, 3),)),
    "qr": (lambda a: (lambda q, r: (q.sin(), r.cos()))(*torch.linalg.qr(a)), (_r(4, 3),)),
    "qr_wide": (lambda a: (lambda q, r: q @ r.sin())(*torch.linalg.qr(a)), (_r(3, 4),)),
    "pinn_residual": (_pinn, (_r(5), _r(7), _r(7), _r(7))),
    "hessian_vector": (
        lambda x, v: grad(lambda y: (grad(lambda z: (z.sin() * z.exp()).sum())(y) * v).sum())(x),
        (_r(4), _r(4)),
    ),
    "rnn": (_rnn, (_r(2, 4, 3), _r(2, 5), _r(3, 5), _r(5, 5), _r(5))),
    "gru": (_gru, (_r(2, 3, 3), _r(2, 5), _r(3, 15), _r(5, 15))),
    "two_outputs": (lambda x, y: (x * y, (x + y).argmax(-1), x.exp()), (_r(3, 4), _r(3, 4))),
    "cdist": (lambda x, y: (x[:, None] - y[None]).square().sum(-1).sqrt(), (_r(3, 4), _r(2, 4).cos())),
    "glu_chunk_stack": (lambda x: torch.stack([F.glu(x), x.chunk(2, -1)[0]]), (_r(3, 4),)),
    "masks": (lambda x: x.tril().triu(-1) + torch.diag_embed(x.diagonal()), (_r(4, 4),)),
}


@functools.cache
def graphs(name: str) -> Graphs:
    """The graphs of a function of the zoo, traced once."""
    return graphs_of(*ZOO[name])
