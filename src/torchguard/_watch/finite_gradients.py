"""The last resort of quarantine: zeros in place of a parameter's gradient that is not finite.

Where operations cannot be followed (a graph break, parts that are compiled on their own, an operation that fake tensors
do not support, attention in a graph for varying sizes), uses of parameters are not protected (`parameter_uses.py`).
There all samples of a call with a fault are flagged, and a hook on each parameter keeps its gradient finite. If no
sample was bad going forward, the hook records the fault for all samples, for `backward_flags`.

In a graph, an opaque operator sets the hooks when the graph runs: Dynamo may run one graph for several models.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from torchguard._operators import define_opaque
from torchguard._torch.tracing import can_read, casts_to_float16
from torchguard._watch.detect import PROBE_NAN, all_finite
from torchguard.checks import floats_of

_STATES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _FiniteHook:
    """A hook on the gradient of a parameter."""

    __torch_unserializable__ = True  # a copy of the parameter goes without it, and torch need not warn of that

    def __init__(self, state: Any) -> None:
        self.state = weakref.ref(state)

    def __call__(self, grad: Tensor) -> Tensor | None:
        state = self.state()
        if state is None or grad.layout != torch.strided or (can_read(grad) and all_finite(floats_of(grad))):
            return None
        is_zero, summary = ~grad.isfinite().all(), state.summary
        if summary is None:
            return torch.where(is_zero, 0, grad).to(grad.dtype)
        is_good = summary.origins[0] < 0
        if state.has_half or grad.dtype == torch.float16:  # the loss scale may be the cause: see `gradient_mask.py`
            is_zero = is_zero & ~is_good.all().to(grad.device)
        if state.probes is not None and len(is_good) <= state.probes.shape[1]:
            faults = torch.zeros_like(state.probes, requires_grad=False)
            faults[-1, : len(is_good)] = PROBE_NAN * (is_good & is_zero.to(is_good.device)).to(faults.device)
            known = state.backward_faults
            state.backward_faults = faults if known is None else torch.maximum(known, faults)
        return torch.where(is_zero, 0, grad).to(grad.dtype)


def require_finite_gradients(state: Any) -> None:
    """Set a hook on each parameter of a watched model, once."""
    state.has_half = state.has_half or casts_to_float16()
    hooked = state.gradient_hooks
    for parameter in state.model.parameters():
        known = hooked.get(id(parameter))
        if parameter.requires_grad and (known is None or known[0]() is not parameter):
            hooked[id(parameter)] = (weakref.ref(parameter), parameter.register_hook(_FiniteHook(state)))


def _require_op(flags: Tensor, handle: Tensor) -> Tensor:
    state = _STATES.get(int(handle))
    if state is not None:
        require_finite_gradients(state)
    return flags.clone()


_REQUIRE = define_opaque(
    "require_finite_gradients(Tensor flags, Tensor handle) -> Tensor",
    _require_op,
    lambda flags, handle: torch.empty_like(flags),
)


def require_in_graph(flags: Tensor, handle: Tensor) -> Tensor:
    """The flags of a call. When the graph runs, the hooks are set. `handle` has the number of the history."""
    return _REQUIRE(flags, handle)


def register_state(number: int, state: Any) -> None:
    """Let the operator find a state by the number of its history."""
    _STATES[number] = state
