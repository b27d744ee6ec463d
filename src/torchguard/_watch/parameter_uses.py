"""Parameters that the code of a model itself uses, outside of torch's own layers: `h * self.scale`.

Hooks see what goes into a module and what it returns. Where a fault is created within one module, between two of its
weights, the second weight's operation saves a NaN for its backward pass, and 0 * NaN is in the weight's gradient for
good; and a NaN that the backward pass creates there arrives at the first weight before any mask. So an operation in
which a sample meets a tensor that belongs to no sample and requires a gradient, a *use*, is treated like a small
module of its own (`protected`):

- Its arguments get zeros in place of non-finite vectors. What the operation saves is finite.
- Its result gets NaN where an argument had a fault, so that the next check finds the fault.
- The gradient of its result is masked.

In eager mode a `TorchFunctionMode` sees the operations before autograd does. The call that is followed knows whose
each tensor is, and keeps its uses in the plan of the call. In a graph, `graph_uses.py` adds the same operations.

Operations that hold several steps (a recurrent layer), and those inside a `torch.utils.checkpoint`, which runs them
again without this mode, cannot be treated so. There the gradients of the weights are zero if they are not finite
(`_FiniteGradient`), and a fault is recorded for all samples.
"""

import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchguard._torch.tensors import flatten, unflatten
from torchguard._torch.tracing import can_read, casts_to_float16
from torchguard._watch.batch import Batch
from torchguard._watch.detect import is_finite
from torchguard._watch.gradient_probes import CallOrigins, ProbeTable, call_probes
from torchguard._watch.replace import masked_by_sample, replaced_with_status

# Operations that take several steps with their weights.
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
# Operations that save none of their arguments: a NaN in them reaches no weight's gradient.
LINEAR = {"add", "sub", "rsub", "cat", "concat", "concatenate", "stack", "where", "hstack", "vstack", "expand_as"}
LINEAR |= {f"__{name}__" for name in ("add", "radd", "sub", "rsub", "iadd", "isub")} | {"add_", "sub_"}
# Operations whose results depend, vector by vector, on the vectors of their argument.
_BY_VECTOR = {"linear", "mul", "div", "true_divide", "add", "sub", "__mul__", "__rmul__", "__truediv__", "__imul__"}
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
NOT_OPERATIONS = {
    "__get__",
    "__set__",
    "__setitem__",
    "backward",
    "register_hook",
    "requires_grad_",
    "detach",
    "detach_",
}
# Names of norms whose square roots have an epsilon, so that nothing goes wrong between their input and their weights.
SAFE_NORM = re.compile("rmsnorm|layernorm|groupnorm", re.IGNORECASE)
_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Argument(NamedTuple):
    """An argument of a use that is not known to be finite.

    Args:
        at: among the leaves of all arguments.
        rows: its row code.
        keep_neg_inf: whether it may hold -Inf on purpose.
    """

    at: int
    rows: int
    keep_neg_inf: bool


class ParameterUse(NamedTuple):
    """An operation in which samples meet a parameter.

    Args:
        arguments: those that may be non-finite.
        weights: which leaves of all arguments belong to no sample and require a gradient.
        is_opaque: whether only the gradients of the weights can be protected.
        outputs: the row code of each leaf that it returns; None for one that has no floating-point numbers.
    """

    arguments: tuple[Argument, ...]
    weights: tuple[int, ...]
    is_opaque: bool
    outputs: tuple[int | None, ...] = ()


class Protection(NamedTuple):
    """Where a call is, for what is protected in it."""

    batch: Batch
    probes: Tensor | None
    location: int


class _Protect(torch.autograd.Function):
    """NaN where an argument of an operation had a fault, and a mask on the gradient of its result.

    It saves no tensor for backward: a checkpoint counts those.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor,
        bad: Tensor | None,
        probe: Tensor | None,
        batch: Batch,
        rows: int,
        table: ProbeTable | None,
        location: int,
    ) -> Tensor:
        # A copy: a view of an argument could not be changed in place.
        return z.clone() if bad is None else torch.where(bad, torch.nan, z).to(z.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.bad, _, *ctx.how = inputs

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent.clone() if ctx.bad is None else torch.where(ctx.bad, 0, tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad if ctx.bad is None else torch.where(ctx.bad, 0, grad).to(grad.dtype)
        grad, probe = masked_by_sample(grad, *ctx.how)
        return grad, None, probe, None, None, None, None


class _FiniteGradient(torch.autograd.Function):
    """A weight whose gradient is zero if it is not finite.

    For float16 it is so only after a call with a bad sample: a gradient that overflowed because of the loss scale has
    to reach the `GradScaler`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, cell: CallOrigins | None, is_half: bool) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.cell, ctx.is_half = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_zero = ~grad.isfinite().all()
        if ctx.is_half:
            origins = None if ctx.cell is None else ctx.cell.origins
            if origins is None:
                return grad, None, None
            is_zero = is_zero & (origins[0] >= 0).any().to(grad.device)
        return torch.where(is_zero, 0, grad).to(grad.dtype), None, None


def bad_of(status: Tensor, rows: int, z: Tensor, out_rows: int, batch: Batch, by_vector: bool) -> Tensor:
    """Where a result has to get NaN: a mask that broadcasts against it.

    Args:
        status: the row status of an argument, and `rows` its row code.
        z: the result, and `out_rows` its row code.
        by_vector: whether each vector of the result depends on that vector of the argument alone.
    """
    is_bad = ~is_finite(status)
    if by_vector and is_bad.shape[:-1] == z.shape[:-1] and z.ndim > 1:
        return is_bad.any(-1, keepdim=True)
    by_sample = batch.status_by_sample(is_bad, rows)
    if by_sample is not None:
        found = batch.broadcast(by_sample.flatten(1).any(-1).to(z.device), z, out_rows)
        if found is not None:
            return found
    return is_bad.any().to(z.device)


def protected(z: Tensor, bad: Tensor | None, rows: int, how: Protection) -> Tensor:
    """The result of a use."""
    probe = table = None
    if how.probes is not None and z.requires_grad:
        split = call_probes(how.probes, how.batch.size)
        probe, table = split.each[how.location], split.table
    return _Protect.apply(z, bad, probe, how.batch, rows, table, how.location)  # pyright: ignore[reportReturnType]


def call_protected(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use: ParameterUse,
    owners: Any,
    how: Protection,
) -> Any:
    """Call a function that is a use, in eager mode.

    Args:
        owners: the `plan.Call` that the use was found by.
    """
    leaves, structure = flatten((args, kwargs))
    name = name_of(function)
    if use.is_opaque:
        with owners.paused():
            _protect_weights(leaves, use, how)
        args, kwargs = unflatten(leaves, structure)
        return owners.used(function(*args, **kwargs), use)
    statuses = []
    for argument in () if name in LINEAR else use.arguments:
        z = leaves[argument.at]
        with owners.paused():
            clean, status = _clean(z, argument, how.batch)
            if can_read(status) and bool(is_finite(status).all()):
                continue
            owners.replaced(z, clean)
            statuses.append((status, argument.rows))
            if is_in_place(name) and argument.at == 0:
                z.copy_(clean)
            else:
                leaves[argument.at] = clean
    args, kwargs = unflatten(leaves, structure)
    result = function(*args, **kwargs)
    codes = owners.codes_of_use(result, use)
    with owners.paused():
        found, results = flatten(result)
        for i, z in enumerate(found):
            rows = codes[i]
            if rows is None or not z.requires_grad:
                continue
            by_vector = is_by_vector(name, leaves, use)
            masks = [bad_of(status, code, z, rows, how.batch, by_vector) for status, code in statuses]
            new = protected(z, functools.reduce(torch.logical_or, masks) if masks else None, rows, how)
            owners.replaced(z, new)
            found[i] = z.copy_(new) if is_in_place(name) else new
    return owners.used(unflatten(found, results), use)


def is_by_vector(name: str, leaves: Sequence[Any], use: ParameterUse) -> bool:
    """Whether each vector of the result depends on that vector of the one argument with samples."""
    return is_by_vector_name(name, use.weights == (1,) and leaves[1].ndim == 2)


def is_by_vector_name(name: str, has_matrix: bool) -> bool:
    """The same for the name of an operation. `has_matrix`: whether its second argument is a matrix without samples."""
    return has_matrix if name in ("matmul", "__matmul__") else name in _BY_VECTOR


def _protect_weights(leaves: list[Any], use: ParameterUse, how: Protection) -> None:
    cell = None if how.probes is None else call_probes(how.probes, how.batch.size).cell
    is_half = any(isinstance(one, Tensor) and one.dtype == torch.float16 for one in leaves) or casts_to_float16()
    for i in use.weights:
        leaves[i] = _FiniteGradient.apply(leaves[i], cell, is_half)


def _clean(z: Tensor, argument: Argument, batch: Batch) -> tuple[Tensor, Tensor]:
    """An argument with zeros in place of non-finite vectors, and its row status."""
    is_last = batch.is_last(z.shape, argument.rows)
    vectors = z.unsqueeze(-1) if is_last else z
    clean, status = replaced_with_status(vectors, argument.keep_neg_inf)
    return clean.squeeze(-1) if is_last else clean, status


def name_of(function: Any) -> str:
    return getattr(function, "__name__", "")


def is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class UseMode(TorchFunctionMode):
    """Protects the uses of a call in eager mode.

    Args:
        owners: the `plan.Call` that finds them.
        record: the `CallRecord` of the call.
    """

    def __init__(self, owners: Any, record: Any) -> None:
        super().__init__()
        self._owners, self._record = owners, record
        self._entered: list[Any] = []  # functions whose steps are being followed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, record = kwargs or {}, self._record
        name = name_of(function)
        is_ours = record.is_within_layer or self._owners.is_paused
        if is_ours or name in NOT_OPERATIONS:
            return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._owners.without_gradients((args, kwargs))
            return function(*args, **kwargs)
        use = self._owners.use_of(name, flatten((args, kwargs))[0])
        if use is None:
            return function(*args, **kwargs)
        # A step may have the name of the function: `Tensor.unflatten` calls that of its base class.
        steps = None if use.is_opaque or function in self._entered else steps_of(function)
        if steps is not None:
            self._owners.enters(use)
            self._entered.append(function)
            try:
                with self:
                    return steps(*args, **kwargs)
            finally:
                self._entered.pop()
        return call_protected(function, args, kwargs, use, self._owners, record.protection())


@functools.cache
def steps_of(function: Any) -> Any:
    """A function of torch that is written in Python, so that this mode sees the operations it calls.

    Such a function first asks whether a mode is active, and if so, hands itself to it as a whole. The copy is answered
    no.
    """
    if not isinstance(function, types.FunctionType) or not set(_ASKS) & set(function.__code__.co_names):
        return None
    names = function.__globals__ | {name: lambda *_: False for name in _ASKS}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
