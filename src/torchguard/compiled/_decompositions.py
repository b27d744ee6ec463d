"""Decompositions of operations that have no JVP rule in torch.

These are fused attention, and the fused LSTM and GRU cells that torch uses on a GPU. The operations they decompose to
have JVP rules.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard._torch import ops


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


# Decompositions by operation, as a tracer takes them.
RECURRENT_CELLS: dict[Any, Any] = {
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm,
    torch.ops.aten._thnn_fused_gru_cell.default: _gru,
}


def is_fused_attention(node: Node) -> bool:
    return "scaled_dot_product" in str(node.target)


def has_attention_backward(graph: GraphModule) -> bool:
    """Whether a graph holds the backward operation of fused attention, which needs more than the forward result."""
    return any(is_fused_attention(node) and "backward" in str(node.target) for node in graph.graph.nodes)


class AttentionDecomposer(Interpreter):
    """Runs a graph with products and a softmax in place of fused attention."""

    def run_node(self, n: Node) -> Any:
        self._running = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not is_fused_attention(self._running):
            return super().call_function(target, args, kwargs)
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
