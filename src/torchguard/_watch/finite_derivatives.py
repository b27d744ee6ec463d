"""Finite derivatives in a compiled transform of `torch.func`: `grad`, `vmap`, `jvp` and what is made of them.

Nothing is followed there, so uses of parameters are not protected (`parameter_uses.py`), and there is no gradient on
which a hook could be set (`finite_gradients.py`). Instead, what derivatives are taken of is passed through a function
that is the identity, and whose derivatives of every order are finite: the arguments of the model, its parameters, and
what is checked in it.

Dynamo traces an `autograd.Function` under `grad` alone, and none with a `jvp`. So it does not trace this one: it calls
it in its graph (`torch.compiler.allow_in_graph`), and the backend traces it as in eager mode.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._pytrees import map_tensors
from torchguard._torch.modules import with_parameters
from torchguard._torch.tracing import constant_in_graphs, forward_depth
from torchguard._watch.detect import is_finite, row_status
from torchguard._watch.zeros import zero_vectors
from torchguard.exceptions import WatchError


class _Finite(torch.autograd.Function):
    """The identity. A derivative has zeros in place of its non-finite vectors; with `is_whole`, in all of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, is_whole: bool) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_whole = inputs[1]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _finite(tangent, ctx.is_whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _finite(grad, ctx.is_whole), None


def _finite(derivative: Tensor, is_whole: bool) -> Tensor:
    """A derivative without non-finite entries, whose own derivatives are finite as well."""
    if is_whole or derivative.ndim == 0:
        finite = torch.where(derivative.isfinite().all(), derivative, 0)
    else:
        finite = zero_vectors(is_finite(row_status(derivative)), derivative)
    return _Finite.apply(finite, is_whole)  # pyright: ignore[reportReturnType]


def finite_derivative(z: Tensor, is_whole: bool) -> Tensor:
    """`z`, with finite derivatives."""
    return _Finite.apply(z, is_whole)  # pyright: ignore[reportReturnType]


def allow_in_graphs() -> None:
    """Have Dynamo call the function in its graphs. It loads Dynamo: only where a model is watched."""
    torch.compiler.allow_in_graph(finite_derivative)


@constant_in_graphs
def refuse_nested_forward_mode() -> None:
    """torch loses the outer derivative of an `autograd.Function` in forward mode within forward mode."""
    if forward_depth() > 1:
        raise WatchError(
            "watch: a model in quarantine is called in forward mode within forward mode, such as jacfwd(jacfwd(f)), "
            "where torch loses derivatives of what quarantine does. Use reverse mode inside: jacfwd(jacrev(f)), "
            "torch.func.hessian. Or watch without quarantine."
        )


def finite_arguments(arguments: Any) -> Any:
    """The arguments of a model, with finite derivatives."""
    return map_tensors(arguments, lambda z: finite_derivative(z, False) if _has_derivatives(z) else z)


def with_finite_derivatives(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, derivatives with respect to the parameters of a model are finite."""
    return with_parameters(model, {name: finite_derivative(one, True) for name, one in model.named_parameters()})


def _has_derivatives(z: Tensor) -> bool:
    return (z.is_floating_point() or z.is_complex()) and z.layout == torch.strided and not z.is_nested
