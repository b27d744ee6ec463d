"""Decompositions of operations whose rules in torch are missing or wrong. Those they decompose to have right ones.

- Some are decomposed in every graph: the fused LSTM and GRU cells that torch uses on a GPU, which have no JVP; solving
  with a Cholesky factor, whose rules also differentiate the triangle that is not read; weight norm, whose second
  derivative lacks that of the norm; bags of embeddings, whose fused operation has gradients only under autograd; losses
  with class weights and batch norm by given statistics, which the fused operations take as constants; `ldexp`, whose
  rules take an integer power of two, which is 0 for a negative exponent.
- Others are decomposed for JVPs and HVPs alone, because the fused operation is faster: attention, distances, and
  sampling from a grid; normalisation, whose second derivative in torch computes eps back from the rounded result; and
  `hardsigmoid`, which has no HVP.
- `logcumsumexp` is decomposed for all derivatives: its JVP adds 1e-13 to sums that may be much smaller, and its VJP
  takes the logarithm of cotangents. So is `sinc`, whose second derivative is 0 at 0 in torch, and not finite close to
  it; and fused attention whose mask is differentiable: it has no gradient by the mask.
"""

import math
from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard._torch import ops
from torchguard.exceptions import CompileError


def _lstm(
    igates: Tensor, hgates: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _with_bias(igates, input_bias) + _with_bias(hgates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _gru(
    igates: Tensor, hgates: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    ir, iz, i_new = _with_bias(igates, input_bias).chunk(3, 1)
    hr, hz, h_new = _with_bias(hgates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (i_new + r * h_new).tanh()
    return new + z * (hx - new), torch.cat([r, z, new, hx, h_new], 1)


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    factor = factor.mT if upper else factor
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    one = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand(factor.shape)
    return _cholesky_solve(one, factor, upper)


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    factor, is_upper = (a.mT, not upper) if transpose else (a, upper)
    return torch.linalg.solve_triangular(factor, b, upper=is_upper, unitriangular=unitriangular), a.clone()


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(v, 2, [d for d in range(v.dim()) if d != dim % v.dim()], keepdim=True)
    return v * (g / norm), norm


# Up to here five terms of the power series of sin(z) / z are exact in float64.
_SMALL_ANGLE = 0.1
_SUM, _MEAN, _MAX = 0, 1, 2  # the modes of a bag


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums, means or maxima of the rows of each bag. The other results serve the fused backward alone."""
    if scale_grad_by_freq:
        raise CompileError("embedding_bag: scale_grad_by_freq is not the derivative. Pass scale_grad_by_freq=False.")
    count = offsets.shape[0] - int(include_last_offset)
    starts = offsets[:count]
    positions = torch.arange(indices.shape[0], device=indices.device)
    bag = (positions.unsqueeze(1) >= starts.unsqueeze(0).to(positions.dtype)).sum(1) - 1
    is_counted = indices != padding_idx if padding_idx >= 0 else torch.ones_like(indices, dtype=torch.bool)
    rows = weight[indices]
    width = rows.shape[1]
    counts = torch.zeros(count, dtype=torch.int64, device=indices.device).index_add(0, bag, is_counted.to(torch.int64))
    if mode == _MAX:
        low = torch.full((count, width), -math.inf, dtype=rows.dtype, device=rows.device)
        shown = torch.where(is_counted.unsqueeze(1), rows, -math.inf)
        largest = low.scatter_reduce(0, bag.unsqueeze(1).expand(rows.shape), shown, "amax")
        result = torch.where(counts.unsqueeze(1) > 0, largest, 0.0)
    else:
        weights = is_counted.to(rows.dtype) if per_sample_weights is None else per_sample_weights * is_counted
        summed = torch.zeros((count, width), dtype=rows.dtype, device=rows.device)
        result = summed.index_add(0, bag, rows * weights.unsqueeze(1))
        result = result / counts.clamp(min=1).unsqueeze(1) if mode == _MEAN else result
    return result, bag, counts, starts.clone()


def _batch_norm_by_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if training or mean is None or variance is None:
        return NotImplemented
    shape = [1, -1, *[1] * (x.dim() - 2)]
    mean, variance = (t.to(torch.promote_types(t.dtype, x.dtype)).reshape(shape) for t in (mean, variance))
    y = (x - mean) * torch.rsqrt(variance + eps)
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return y.to(x.dtype), x.new_zeros(0), x.new_zeros(0)


def _with_weights(operation: Any) -> Any:
    decomposition = ops.decomposition_of(operation)

    def decompose(x: Tensor, target: Tensor, weight: Tensor | None, *args: Any) -> Any:
        return NotImplemented if weight is None else decomposition(x, target, weight, *args)

    return decompose


def _ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    return x * torch.pow(2.0, exponent)


# Decompositions by operation, as a tracer takes them; those that return NotImplemented leave a call as it is.
DECOMPOSITIONS: dict[Any, Any] = {
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm,
    torch.ops.aten._thnn_fused_gru_cell.default: _gru,
    torch.ops.aten.cholesky_solve.default: _cholesky_solve,
    torch.ops.aten.cholesky_inverse.default: _cholesky_inverse,
    torch.ops.aten.triangular_solve.default: _triangular_solve,
    torch.ops.aten._weight_norm_interface.default: _weight_norm,
    torch.ops.aten._embedding_bag.default: _embedding_bag,
    torch.ops.aten._embedding_bag_forward_only.default: _embedding_bag,
    torch.ops.aten.ldexp.Tensor: _ldexp,
    torch.ops.aten.native_batch_norm.default: _batch_norm_by_statistics,
    torch.ops.aten.nll_loss_forward.default: _with_weights(torch.ops.aten.nll_loss_forward.default),
    torch.ops.aten.nll_loss2d_forward.default: _with_weights(torch.ops.aten.nll_loss2d_forward.default),
}
if hasattr(torch.ops.aten, "cholesky"):  # torch 2.14 removed it
    DECOMPOSITIONS[torch.ops.aten.cholesky.default] = lambda a, upper=False: torch.linalg.cholesky(a, upper=upper)


def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, dim=-1)


def _pdist(x: Tensor, p: float = 2) -> Tensor:
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return torch.linalg.vector_norm(x[first] - x[second], p, dim=-1)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """By doubling: after each step, an element is the result over twice as many."""
    if not x.dim():
        return x.clone()
    step = 1
    while step < x.shape[dim]:
        rest = x.shape[dim] - step
        # Not logaddexp, whose second derivative in torch overflows where two numbers are far apart.
        added = torch.stack([x.narrow(dim, step, rest), x.narrow(dim, 0, rest)]).logsumexp(0)
        x = torch.cat([x.narrow(dim, 0, step), added], dim)
        step *= 2
    return x.clone()


def sinc(x: Tensor) -> Tensor:
    """sin(z) / z for z = πx, and its power series where z is small."""
    z = x * math.pi
    is_small = z.abs() < _SMALL_ANGLE
    square = torch.where(is_small, z, 0.0).square()
    series = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    far = torch.where(is_small, 1.0, z)
    return torch.where(is_small, series, far.sin() / far)


_FORWARD_MODE: dict[Any, Any] = {
    torch.ops.aten.hardsigmoid.default: lambda x: F.hardtanh(x + 3, 0.0, 6.0) / 6,
    torch.ops.aten.logcumsumexp.default: logcumsumexp,
    torch.ops.aten.sinc.default: sinc,
    torch.ops.aten._cdist_forward.default: _cdist,
    torch.ops.aten._euclidean_dist.default: lambda x, y: _cdist(x, y, 2.0),
    torch.ops.aten._pdist_forward.default: _pdist,
    **{
        operation: ops.decomposition_of(operation)
        for operation in (
            torch.ops.aten.grid_sampler_2d.default,
            torch.ops.aten.native_layer_norm.default,
            torch.ops.aten.native_group_norm.default,
        )
    },
}


_IN_ALL_MODES = {torch.ops.aten.logcumsumexp.default, torch.ops.aten.sinc.default}


def is_fused_attention(node: Node) -> bool:
    return "scaled_dot_product" in str(node.target)


def without_rule(graph: GraphModule, differentiable: Sequence[bool], kind: str) -> frozenset[Node]:
    """The nodes that have no rule for a derivative, but a decomposition that has.

    Args:
        differentiable: which inputs of the graph are.
    """
    if kind != "vjp":
        return frozenset(n for n in graph.graph.nodes if is_fused_attention(n) or n.target in _FORWARD_MODE)
    leaves = graph.graph.find_nodes(op="placeholder")
    moving = {leaf for leaf, is_own in zip(leaves, differentiable, strict=True) if is_own}
    found = set()
    for node in graph.graph.nodes:
        if moving.intersection(node.all_input_nodes):
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
                moving.add(node)
        has_moving_mask = is_fused_attention(node) and node.kwargs.get("attn_mask") in moving
        if has_moving_mask or node.target in _IN_ALL_MODES:
            found.add(node)
    return frozenset(found)


def has_attention_backward(graph: GraphModule) -> bool:
    """Whether a graph holds the backward operation of fused attention, which needs more than the forward result."""
    return any(is_fused_attention(node) and "backward" in str(node.target) for node in graph.graph.nodes)


class Decomposer(Interpreter):
    """Runs a graph with decompositions in place of some nodes."""

    def __init__(self, graph: GraphModule, nodes: Set[Node]) -> None:
        super().__init__(graph)
        self.nodes = nodes

    def run_node(self, n: Node) -> Any:
        self._running = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._running not in self.nodes:
            return super().call_function(target, args, kwargs)
        if target in _FORWARD_MODE:
            like, found = self._running.meta["val"], _FORWARD_MODE[target](*args, **kwargs)
            is_one = isinstance(found, Tensor)
            return _with_dim_order(like, found) if is_one else tuple(map(_with_dim_order, like, found))
        names = [argument.name for argument in ops.schema_of(target).arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        like, *rest = self._running.meta["val"]
        # Later nodes may view the result, so its strides have to be the same. The other results serve backward alone.
        return (_with_dim_order(like, _attention(given)), *(None for _ in rest))


def _attention(given: dict[str, Any]) -> Tensor:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=given.get("attn_mask", given.get("attn_bias")),
            is_causal=given.get("is_causal", False),
            scale=given.get("scale"),
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _with_dim_order(like: Tensor, values: Tensor) -> Tensor:
    """The same values, with the order of dims in memory of another tensor."""
    order = sorted(range(like.dim()), key=lambda dim: -like.stride(dim))
    back = sorted(range(like.dim()), key=order.__getitem__)
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
