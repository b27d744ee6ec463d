"""Gradients of bad values: zeroed row by row, or kept out of the branch that was not chosen.

`torch.where` sends a zero gradient into what it does not choose. A step before it multiplies that zero by what it saved
in the forward pass, and 0 * NaN is NaN. For a choice of the whole batch (`choose`) this can be undone: a step of the
backward pass is linear, so if all that it receives is zero, all that it sends on is zero. Hooks on the autograd nodes
before the choice replace whatever else they send then. They become part of a compiled backward pass: AOTAutograd traces
it by running autograd, hooks included. So `choose` is an operator: Dynamo, which cannot trace hooks of nodes, records
it as one call, and AOTAutograd runs its body.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.autograd.graph import Node

from torchguard._operators import define, source_checksum, use_operators
from torchguard._torch.tracing import can_read

_REVISION = source_checksum(Path(__file__).parent)
_HOOKED = "torchguard keeps zeros"


def over_rows(mask: Bool[Tensor, " batch"], z: Tensor) -> Tensor:
    """`mask` with trailing dimensions of size 1, so that it broadcasts over the rows of `z`."""
    return mask.reshape(-1, *(1,) * (z.ndim - 1))


class _GradientMask(torch.autograd.Function):
    """The identity; its backward zeroes the gradient of each row in which any element is not finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved for backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        finite = torch.isfinite(grad)
        return torch.where(over_rows(finite.flatten(1).all(-1) if grad.ndim > 1 else finite, grad), grad, 0)


def mask_nonfinite_gradients(z: Tensor) -> Tensor:
    """`z`, such that gradients through it are zeroed for every row in which they are not finite."""
    return _GradientMask.apply(z) if z.requires_grad else z


def choose(cond: Bool[Tensor, ""], value: Tensor, other: Tensor) -> Tensor:
    """`torch.where`; what is not chosen gets a gradient of zero, also where its own computation was not finite."""
    return _CHOOSE(cond, value, other, _REVISION) if use_operators() else _choose(cond, value, other)


def _choose(cond: Bool[Tensor, ""], value: Tensor, other: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        is_chosen = bool(cond) if can_read(cond) else None
        for branch, chosen in ((value, True), (other, False)):
            if branch.requires_grad and is_chosen is not chosen:
                _keep_zeros(branch.grad_fn)
    return torch.where(cond, value, other)


def _choose_op(cond: Tensor, value: Tensor, other: Tensor, revision: int) -> Tensor:
    return _choose(cond, value, other)


_CHOOSE = define("choose(Tensor cond, Tensor value, Tensor other, int revision) -> Tensor", _choose_op)


def _keep_zeros(last: Node | None) -> None:
    """Hook all nodes from `last` back to the leaves."""
    pending = [last]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        notes: Any = node.metadata  # a dict; torch's stubs call it a method
        if _HOOKED in notes:  # then those before it are hooked, too
            continue
        notes[_HOOKED] = True
        if node.next_functions:  # a leaf has none
            node.register_hook(_zeros_for_zeros)
        pending += [before for before, _ in node.next_functions]


def _zeros_for_zeros(sent: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> Any:
    """What a node sends back, with zeros for NaN and Inf if all that it received is zero."""
    gradients = [grad for grad in (*sent, *received) if grad is not None]
    known = [grad for grad in received if grad is not None]
    if not known or any(grad.layout != torch.strided or grad.is_nested for grad in gradients):
        return None
    is_zero = torch.stack([(grad == 0).all() for grad in known]).all()
    # Finite values stay: they are zeros as well, and have derivatives of their own in a double backward.
    return tuple(None if grad is None else torch.where(is_zero & ~torch.isfinite(grad), 0, grad) for grad in sent)
