"""Recurrent cells written out: on a GPU torch has one operation for each, without tangents."""

from typing import Any

import torch
from torch import Tensor


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


# By operation, as a tracer takes them.
CELLS: dict[Any, Any] = {
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm,
    torch.ops.aten._thnn_fused_gru_cell.default: _gru,
}
