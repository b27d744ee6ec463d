"""The hooks on one module: they check what goes into it and what it returns."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._pytrees import OBJECTS, map_tensors, tensors_in
from torchguard._torch.hook_calls import HookCall
from torchguard._torch.hook_guards import IDENTITY
from torchguard._torch.modules import is_torch_leaf
from torchguard._torch.tracing import is_in_branch
from torchguard._watch.batch import row_code
from torchguard._watch.call import CallRecord
from torchguard._watch.detect import index_status
from torchguard._watch.finite_gradients import require_of_module
from torchguard._watch.parameter_uses import SAFE_NORM
from torchguard._watch.parts import (
    address_of,
    check_indices_in_part,
    check_output_in_part,
    is_in_part,
    run_other_checks,
)
from torchguard._watch.select import is_mask, looks_up_its_argument, mask_positions
from torchguard._watch.state import WatchState
from torchguard._watch.traced_checks import TracedChecks

# Names of modules that square their input, and the number of squares they are taken to sum if they do not say.
_SQUARING, _NUM_SQUARES = re.compile("norm", re.IGNORECASE), 2**20


class ModuleHooks:
    """The hooks on one watched module. They do nothing unless the watched model is being called.

    Args:
        location: of the module.
        checks_output: whether the output is checked. Of an embedding that is not watched, only the indices are.
    """

    is_constant_hook = True  # nothing in it changes: see `_torch/hook_guards.py`

    def __init__(self, watch: WatchState, location: int, module: nn.Module, checks_output: bool) -> None:
        self.watch, self.location, self.masks = watch, location, mask_positions(module)
        self.num_squares = num_squares_of(module)
        self.is_embedding = looks_up_its_argument(module)
        self.checks_output = checks_output
        self.checks_input = watch.checks.indices if self.is_embedding else watch.quarantine
        # A non-finite gradient that one of torch's own modules makes is masked at the output of the module before it.
        self.mask_gradient = not is_torch_leaf(module)
        self.in_place = is_qkv_projection(module)
        self.is_layer, self.is_recurrent = is_layer(module), isinstance(module, (nn.RNNBase, nn.RNNCellBase))
        self.address = address_of(watch.key, location)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call_record = self.watch.call_record
        if call_record is None:
            call_record = self.watch.record_for_recompute()
            if call_record is None:
                return None
        if not getattr(module, IDENTITY, True):  # never: it has Dynamo guard on the identity
            return None
        if call_record.in_graph:
            if is_in_branch():
                return None
        elif self.is_layer:
            call_record.is_within_layer = True
        if call_record.has_distributed:
            require_of_module(self.watch, module)
        if self.is_embedding:
            if args:
                return (self._clamped(args[0], module, call_record), *args[1:]), kwargs
            return args, {**kwargs, "input": self._clamped(kwargs["input"], module, call_record)}
        if not call_record.quarantine:
            return None
        if len(args) == 1 and not kwargs and not self.masks and isinstance(args[0], Tensor):  # the most frequent case
            return (call_record.check(args[0], self.location, self.mask_gradient, True, self.num_squares),), kwargs
        return checked_arguments(
            args, kwargs, call_record, self.location, self.masks, self.mask_gradient, self.num_squares
        )

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call_record = self.watch.call_record
        if call_record is None:
            call_record = self.watch.record_for_recompute()
            if call_record is None:
                return None
        if not call_record.in_graph:  # in a graph, Dynamo is slow to trace each call and each attribute of a hook
            if self.is_layer:
                call_record.is_within_layer = False
            if is_in_part(call_record):
                check_output_in_part(module, output, self.address)
                return None
        elif is_in_branch():
            return None
        if not getattr(module, IDENTITY, True):  # never: it has Dynamo guard on the identity
            return None
        # The weights of a recurrent layer cannot be kept from a fault inside of it.
        call_record.is_for_all = self.is_recurrent and torch.is_grad_enabled()
        if isinstance(output, Tensor):
            output = call_record.check(output, self.location, in_place=self.in_place)
        else:
            output = checked_output(module, output, call_record, self.location)
        call_record.is_for_all = False
        if call_record.checks.others:
            for _, z in tensors_in(output, objects=OBJECTS):
                run_other_checks(z, call_record, self.location)
        return output

    def in_dynamo(self, call: HookCall) -> TracedChecks:
        """What Dynamo calls in place of `before` and `after`: see `_torch/hook_calls.py`."""
        return TracedChecks(call, self)

    def _clamped(self, ids: Any, embedding: Any, call_record: CallRecord) -> Any:
        if not isinstance(ids, Tensor):
            return ids
        rows = _rows_of(embedding)
        if is_in_part(call_record):
            check_indices_in_part(ids, rows, self.address)
        else:
            call_record.record_indices(self.location, ids, index_status(ids, rows))
        return ids.clamp(0, rows - 1)


def num_squares_of(module: nn.Module) -> int:
    """How many squares of its input a module sums: if they overflow, the fault is in the module's own gradient."""
    if not _SQUARING.search(type(module).__name__):
        return 0
    shape = getattr(module, "normalized_shape", _NUM_SQUARES)
    return shape if isinstance(shape, int) else math.prod(shape)


def is_layer(module: nn.Module) -> bool:
    """Whether nothing can go wrong between two parameters of a module: one of torch's own that takes one step, or a
    norm, whose square roots have an epsilon."""
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return False
    return is_torch_leaf(module) or bool(SAFE_NORM.search(type(module).__name__))


def is_qkv_projection(module: nn.Module) -> bool:
    """Whether a module returns queries, keys and values side by side: its output is three times as wide as its input.

    Attention reads three slices of that output, and Inductor fuses nothing with the kernel of attention. A `where` in
    the graph would write each slice once more.
    """
    if isinstance(module, nn.Linear):
        return module.out_features == 3 * module.in_features
    inputs, outputs = getattr(module, "nx", None), getattr(module, "nf", None)  # the `Conv1D` of transformers
    return isinstance(inputs, int) and outputs == 3 * inputs


def checked_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call_record: CallRecord,
    location: int,
    masks: tuple[int, ...],
    mask_gradient: bool,
    num_squares: int = 0,
    first: int = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module, checked, and in quarantine replaced.

    Masks are left as they are. All floating-point arguments but the first may be masks under another name: -Inf stays
    in them. `first` is the number of floating-point arguments before these. A tensor that is given several times stays
    one: `nn.MultiheadAttention` asks whether query, key and value are the same.
    """
    how = (call_record, location, mask_gradient, True, num_squares, None)
    checked, count = [], first
    for i, value in enumerate(args):
        checked.append(value if i in masks else _checked_once(value, args[:i], checked, *how, count > 0))
        count += holds_floats(value)
    before, named = (*args, *kwargs.values()), {}
    for i, (name, value) in enumerate(kwargs.items(), start=len(args)):
        checked.append(value if is_mask(name) else _checked_once(value, before[:i], checked, *how, count > 0))
        named[name] = checked[-1]
        count += holds_floats(value)
    return tuple(checked[: len(args)]), named


def checked_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], call_record: CallRecord, watch: WatchState
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the model, checked, each under its own name, and in quarantine replaced."""
    checked, count = [], 0
    for i, value in enumerate(args):
        if i in watch.masks:
            checked.append(value)
            continue
        call_record.argument = watch.arguments[watch.positional[i]] if i < len(watch.positional) else None
        checked += checked_arguments((value,), {}, call_record, 0, (), mask_gradient=True, first=count)[0]
        count += holds_floats(value)
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        call_record.argument = watch.arguments.get(name)
        named |= checked_arguments((), {name: value}, call_record, 0, (), mask_gradient=True, first=count)[1]
        count += holds_floats(value)
    call_record.argument = None
    return tuple(checked), named


def _checked_once(value: Any, before: Sequence[Any], checked: list[Any], *how: Any) -> Any:
    """An argument, checked: the one that was made of it before, if it was."""
    if isinstance(value, Tensor):
        for one, new in zip(before, checked, strict=True):
            if one is value and new is not value:
                return new
    return _checked(value, *how)


def holds_floats(value: Any) -> bool:
    """Whether a value is a floating-point tensor, or holds tensors."""
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, (tuple, list, dict))


def checked_output(module: Any, output: Any, call_record: CallRecord, location: int) -> Any:
    """The output of a module, checked, and in quarantine replaced."""
    if not isinstance(output, Tensor) and isinstance(module, nn.RNNBase):
        states = _checked(output[1], call_record, location, rows=row_code(1))  # (layers, batch, width)
        return _checked(output[0], call_record, location), states
    return _checked(output, call_record, location)


def _checked(
    value: Any,
    call_record: CallRecord,
    location: int,
    mask_gradient: bool = True,
    is_argument: bool = False,
    num_squares: int = 0,
    rows: int | None = None,
    keep_neg_inf: bool = False,
) -> Any:
    """A pytree of which every tensor was checked."""
    how = (location, mask_gradient, is_argument, num_squares, rows, False, keep_neg_inf)
    if isinstance(value, Tensor):
        return call_record.check(value, *how)
    objects = 0 if is_argument else OBJECTS  # a module may write to the objects that it is given
    if call_record.quarantine:
        return map_tensors(value, lambda z: call_record.check(z, *how), objects)
    for _, z in tensors_in(value, objects=objects):
        call_record.check(z, *how)
    return value


def _rows_of(embedding: Any) -> int:
    """The number of rows of the table. Its `weight` may have been replaced, or, sharded, not be gathered yet."""
    weight = embedding.weight
    return weight.shape[0] if weight.ndim == 2 else embedding.num_embeddings
