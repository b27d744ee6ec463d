"""Owners: which samples each element of a tensor depends on.

Sizes do not show which row belongs to which sample: `cat([a, b])`, a batch flattened time first, or windows of an image
all have `batch * k` rows, in different orders. So the owners are computed: `OwnerMode` runs beside a call of the model,
starts with the samples of the arguments, and derives the owners of each operation's outputs from those of its inputs by
the rules of `owner_rules.py`. It reads shapes and constants, never values, so its answer holds for every batch of that
shape. It also works on fake tensors, where a graph is traced.

The owners of an element are an interval from the lowest to the highest sample that it may depend on. An interval of one
sample is exact. A longer one means that the element may mix samples: that is always a safe answer, and the one for an
operation that has no rule. An empty interval means that the element depends on no sample, as in a weight.

Intervals are kept for each storage, so that writing into a view changes what the other views hold. They are stored as
expanded tensors: along most dims all elements have the same owners. Such a dim has the stride 0 and takes no memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchguard._torch.dispatch import (
    StorageWeakRef,
    has_tag,
    makes_view,
    named_arguments,
    overload_of,
    short_name,
    weak_storage,
    written_arguments,
)
from torchguard._torch.tensors import flatten, mutation_count, storage_of
from torchguard._watch import owner_rules
from torchguard._watch.call_path import PathMode
from torchguard._watch.owner_rules import Rule
from torchguard._watch.owner_storages import Changes, StorageOwners, UsedTensors, geometry_of
from torchguard._watch.sample_intervals import Call, Owners, everything, nobody, union

# Operations that hand a value to Python, which may then decide by it what the model does.
_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")
# Operations whose result has -Inf where an argument has it.
_KEEP_NEG_INF = {
    *("clone", "_to_copy", "copy", "lift_fresh", "where", "masked_fill", "add", "sub", "cat", "stack", "index"),
    *("gather", "scatter", "index_put", "index_select", "triu", "tril", "maximum", "minimum", "repeat", "roll", "flip"),
    *("_unsafe_view", "fill", "_log_softmax"),
}
_NEW = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_RANDOM_OR_NEW = torch.Tag.nondeterministic_seeded


class OwnerMode(PathMode):
    """Follows owners through all operations while it is active.

    Attributes:
        problem: why the owners of what comes out are not known, as far as that is: the first operation that mixed
            samples, or that cannot be followed.
        is_lost: whether owners are not known from some operation on. One handed a value that depends on floating-point
            numbers of samples to Python, for example. (Integers are token ids and masks: models test them for
            shortcuts that do not change which rows belong to which sample.)

    Args:
        is_new: whether a tensor was created since the call began. With it, tensors that no operation of the call made
            count as mixing samples: other threads have no dispatch mode. None where a graph has all operations.
    """

    def __init__(self, is_new: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self._is_new, self._is_making = is_new, False
        self._read_on_host: Owners | None = None  # the owners of all integers that were read into Python or NumPy
        self.has_picked = False  # whether integers were made of floating-point numbers of samples, as by `argmax`
        self.uses_picked = False  # whether an operation reads such integers: those of a max-pooling are mostly dropped
        self.needs_finite = False  # whether an operation may refuse values that are not finite
        self.changes_older = False  # whether samples were written into a tensor that is older than `begin`
        self._made: set[int] = set()
        self._changes: dict[int, Changes] = {}
        self.problem: str | None = None
        self.is_lost = False
        self._storages: dict[int, StorageOwners] = {}
        self._constants: dict[int, StorageWeakRef] = {}
        self._neg_inf: dict[int, StorageWeakRef] = {}
        self._of_floats: dict[int, StorageWeakRef] = {}
        self._unwritten: dict[int, StorageWeakRef] = {}
        self._samples = 0
        self.used = UsedTensors()

    def set_samples(self, z: Tensor, dim: int) -> None:
        """Let the samples lie along a dim of an argument."""
        self._samples = max(self._samples, z.shape[dim])
        numbers = torch.arange(z.shape[dim], dtype=torch.int32)
        shaped = numbers.reshape([-1 if i == dim else 1 for i in range(z.ndim)]).expand(z.shape)
        self.set_owners(z, Owners(shaped, shaped))

    def set_sample(self, z: Tensor, number: int) -> None:
        """Let a tensor belong to one sample."""
        self._samples = max(self._samples, number + 1)
        one = torch.tensor(number, dtype=torch.int32)
        self.set_owners(z, Owners(one, one).expand(z.shape))

    def begin(self) -> None:
        """Take all tensors so far for older than the call."""
        self._made.clear()

    def owners_of(self, z: Any) -> Owners | None:
        """The owners of a tensor; None if it depends on no sample, or is no tensor."""
        if not isinstance(z, Tensor) or not _has_storage(z):
            return None
        found = self._storages.get(_key(z))
        if found is None:
            return None
        return found.read(z)

    def set_owners(self, z: Tensor, owners: Owners | None) -> None:
        key = _key(z)
        found = self._storages.get(key)
        if found is not None and not found.reference.expired():
            found.write(z, nobody(z.shape) if owners is None else owners)
        elif owners is None:
            self._storages.pop(key, None)
        else:
            self._storages[key] = StorageOwners(z, owners)

    def is_constant(self, z: Tensor) -> bool:
        """Whether a tensor has the same values in every call: it was made of constants alone."""
        return _has_storage(z) and _key(z) in self._constants

    def may_have_neg_inf(self, z: Tensor) -> bool:
        """Whether -Inf may have been put into a tensor on purpose, as into masked logits."""
        return _has_storage(z) and _key(z) in self._neg_inf

    def note_copy(self, z: Tensor, new: Tensor) -> None:
        """Take a tensor that stands for another for as old as that, and with -Inf where that may have it."""
        if self.may_have_neg_inf(z):
            self._neg_inf[_key(new)] = weak_storage(new)
        if _key(z) in self._made:
            self._made.add(_key(new))

    @torch.no_grad()
    def _follow(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        arguments = named_arguments(op, args, kwargs)
        outputs = [one for one in flatten(result)[0] if isinstance(one, Tensor)]
        call = Call(short_name(op).rstrip("_"), op, arguments, self.owners_of, self.is_constant, outputs)
        given = call.tensors()
        if not all(_has_storage(one) for one in (*given, *outputs)):
            if any(self.owners_of(one) is not None for one in given):
                self.lose(f"{op} has a sparse or nested tensor")
            return
        if has_tag(op, torch.Tag.inplace_view):  # another view of the same storage
            changes = self._changes.get(_key(outputs[0])) if outputs and call.name != "resize" else None
            if changes is not None:  # what autograd counts as a change
                changes.count += 1
            return
        written = [z for name in (*written_arguments(op), *_written_by_norm(call)) for z in _tensors(arguments[name])]
        if self._is_new is not None:
            self._find_foreign(call, given, outputs, written)
        self._note_unwritten(call, given, written)
        self._note_constants(op, given, outputs, written)
        if self._passes_neg_inf(call, given):
            for one in (*outputs, *written):
                self._neg_inf.setdefault(_key(one), weak_storage(one))
        older = {_key(one) for one in given}
        self._made.update(key for one in outputs if (key := _key(one)) not in older)
        if not any(_key(one) in self._storages for one in given):
            for one in outputs:
                self._forget(one)
            return
        self.changes_older = self.changes_older or not all(_key(one) in self._made for one in written)
        if any(_key(one) in self._of_floats or self._is_float_of_samples(one) for one in given):
            if call.name in _READS:
                self.lose(f"{op} hands a value of a sample to Python")
            elif self._has_size_of_values(call):
                self.lose(f"{op} returns a tensor whose size depends on values of a sample")
            self._of_floats |= {_key(one): weak_storage(one) for one in (*outputs, *written)}
            self.needs_finite = self.needs_finite or _rule_of(call) is owner_rules.batch_of_matrices
        before = [owners for one in given if (owners := self.owners_of(one)) is not None]
        self.uses_picked = self.uses_picked or any(map(self._is_picked, given))
        self._set_outputs(call)
        if not makes_view(op) and self.used.meet(given):
            for one in outputs:
                self.mix_used(one)
        self.has_picked = self.has_picked or any(map(self._is_picked, outputs))
        for one in written:
            if one is arguments.get("self") and len(outputs) == 1 and outputs[0].shape == one.shape:
                if outputs[0] is not one:  # a constant that a graph changes by fake tensors
                    self.set_owners(one, self.owners_of(outputs[0]))
            elif not any(one is output for output in outputs):  # such as the statistics of a batch norm
                every = everything(call)
                self.set_owners(one, None if every is None else every.expand(one.shape))
        after = [owners for one in (*outputs, *written) if (owners := self.owners_of(one)) is not None]
        if self.problem is None and any(map(_mixes, after)) and not any(map(_mixes, before)):
            self.problem = str(op)

    def _follow_whole(self, op: Any, result: Any) -> Any:
        for z in filter(_has_storage, _tensors(super()._follow_whole(op, result))):
            self.know([z])
            self.mix(z, f"torch.{op}")
        return result

    def mix_used(self, z: Tensor) -> None:
        """A parameter was used in a checkpoint, where a fault cannot be kept from its gradient."""
        self.mix(z, "a parameter is used in a torch.utils.checkpoint, outside of torch's own layers")

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors for older than the call, such as the parameters of the model."""
        for z in tensors:
            if _has_storage(z):
                self._changes.setdefault(_key(z), Changes(z))

    def _ignore(self, result: Any) -> Any:
        if self._is_new is not None:
            self.know(_tensors(result))
            for z in _tensors(result):
                if _has_storage(z):
                    self._changes[_key(z)].count += 1  # if it was changed in place
        return result

    def _find_foreign(self, call: Call, given: list[Tensor], outputs: list[Tensor], written: list[Tensor]) -> None:
        """Take tensors that no operation of this call made, or that others wrote to, for mixtures of all samples."""
        is_fresh = call.name == "lift_fresh"
        for one in given:
            changes = self._changes.get(_key(one))
            if changes is None or changes.storage.expired():
                is_foreign = not is_fresh and _key(one) not in self._storages and self._is_unknown(one)
                changes = self._changes[_key(one)] = Changes(one)
            else:
                is_foreign = mutation_count(one) - changes.first > changes.count
            if is_foreign or (is_fresh and not self._is_making and self._may_hold_samples(one)):
                self.mix(one, f"data that no operation of this call made, before {call.op}")
                changes.first, changes.count = mutation_count(one), 0
            elif is_fresh and self._read_on_host is not None:
                self.set_owners(one, self._read_on_host.expand(one.shape))
        if call.name == "set" and _key(outputs[0]) not in self._changes:
            self.mix(outputs[0], f"{call.op}")
        for one in written:
            self._changes[_key(one)].count += 1
        self.know(outputs)

    def _may_hold_samples(self, z: Tensor) -> bool:
        """Whether a tensor that torch made of host data on its own may hold what an operation computed of samples.

        A number in `z[0] = 1.0` does not: it would have been read before. Nor do the integers of `z[:, [0, 2]]`, unless
        the model has made integers of floating-point numbers.
        """
        return z.ndim > 0 and (z.is_floating_point() or z.is_complex() or self.has_picked)

    def _is_unknown(self, z: Tensor) -> bool:
        assert self._is_new is not None
        with self.paused():
            return self._is_new(z)

    def mix(self, z: Tensor, problem: str) -> None:
        """Let a tensor depend on all samples."""
        low, high = (torch.tensor(number, dtype=torch.int32) for number in (0, max(1, self._samples - 1)))
        self.set_owners(z, Owners(low.expand(z.shape), high.expand(z.shape)))
        self.problem = self.problem or problem

    def read(self, tensor: Tensor, how: str) -> None:
        """Python or NumPy reads a tensor: see `Listener`."""
        if self.is_paused:
            return
        with self.paused():
            if (owners := self.owners_of(tensor)) is None:
                return
            if _key(tensor) in self._of_floats or self._is_float_of_samples(tensor):
                self.lose(f"Tensor.{how} hands values of a sample to Python")
            self._read_on_host = union([self._read_on_host, owners.all()])

    @contextmanager
    def making(self, values: Any, how: str) -> Iterator[None]:
        """A tensor is made of values on the host: see `Listener`."""
        is_copy = any(isinstance(value, Tensor) for value in values[0][:1])  # `torch.tensor(z)` is dispatched
        for value in [] if is_copy else flatten(values)[0]:
            if isinstance(value, Tensor):
                self.read(value, how)
        self._is_making, before = True, self._is_making
        try:
            yield
        finally:
            self._is_making = before

    def lose(self, problem: str) -> None:
        """From here on, it is not known which rows belong to which sample."""
        self.is_lost, self.problem = True, self.problem or problem

    def _set_outputs(self, call: Call) -> None:
        outputs = call.outputs
        try:
            found = _rule_of(call)(call)
            each = found if isinstance(found, list) else [found] * len(outputs)
            stored = [None if one is None else one.stored_once() for one in each]
            spread = [None if one is None else one.expand(z.shape) for one, z in zip(stored, outputs, strict=True)]
        except (RuntimeError, ValueError, IndexError, TypeError):  # a form of the operation that the rule does not know
            every = everything(call)
            spread = [None if every is None else every.expand(z.shape) for z in outputs]
        is_view = makes_view(call.op) or call.name == "_unsafe_view"  # which its schema does not say
        for z, owners in zip(outputs, spread, strict=True):
            key = _key(z)
            if is_view and key in self._storages:
                self._storages[key].views.setdefault(geometry_of(z), owners or nobody(z.shape))
            else:
                self.set_owners(z, owners)

    def _forget(self, z: Tensor) -> None:
        """Drop the entry of a storage that is gone and whose number a new tensor has."""
        found = self._storages.get(_key(z))
        if found is not None and found.reference.expired():
            del self._storages[_key(z)]

    def _note_unwritten(self, call: Call, given: list[Tensor], written: list[Tensor]) -> None:
        """Note memory that no operation has written yet. If one reads it, a kernel that is no operation of torch, such
        as a Triton kernel, may have written anything into it. A view reads nothing."""
        for one in () if makes_view(call.op) else given:
            is_written = any(one is other for other in written)
            if self._unwritten.pop(_key(one), None) is not None and not is_written and _may_have_changed(one):
                self.mix(one, f"a kernel that is no operation of torch, before {call.op}")
        if call.name in _NEW:
            self._unwritten |= {_key(one): weak_storage(one) for one in call.outputs}

    def _is_picked(self, z: Tensor) -> bool:
        """Whether a tensor has integers that were made of floating-point numbers of samples."""
        return z.dtype in _INTEGERS and _key(z) in self._of_floats and _key(z) in self._storages

    def _is_float_of_samples(self, z: Tensor) -> bool:
        return (z.is_floating_point() or z.is_complex()) and _key(z) in self._storages

    def _has_size_of_values(self, call: Call) -> bool:
        """Whether values of samples decide the size of an output, which Python may read unnoticed."""
        if not has_tag(call.op, torch.Tag.dynamic_output_shape):
            return False
        given = _tensors(call.arguments["indices"]) if call.name == "index" else call.tensors()
        masks = [one for one in given if call.name != "index" or one.dtype in (torch.bool, torch.uint8)]
        return any(_key(one) in self._of_floats or self._is_float_of_samples(one) for one in masks)

    def _passes_neg_inf(self, call: Call, given: list[Tensor]) -> bool:
        if -math.inf in [value for value in call.arguments.values() if isinstance(value, float)]:
            return True
        if call.name not in _KEEP_NEG_INF and not makes_view(call.op):
            return False
        return any(_key(one) in self._neg_inf or _is_neg_inf(one) for one in given)

    def _note_constants(self, op: Any, given: list[Tensor], outputs: list[Tensor], written: list[Tensor]) -> None:
        known = not has_tag(op, _RANDOM_OR_NEW) and all(self.is_constant(one) for one in given)
        for one in (*outputs, *written):
            if known:
                self._constants.setdefault(_key(one), weak_storage(one))
            else:
                self._constants.pop(_key(one), None)


def _is_neg_inf(z: Tensor) -> bool:
    """Whether a tensor is the number -Inf, as far as it has a value that can be read without waiting."""
    return z.ndim == 0 and type(z) is Tensor and z.is_cpu and z.is_floating_point() and z.item() == -math.inf


def _written_by_norm(call: Call) -> Sequence[str]:
    """The statistics that a batch norm updates: not all of its operators say so."""
    is_training = call.arguments.get("training", call.arguments.get("train"))
    return ("running_mean", "running_var") if is_training and "running_mean" in call.arguments else ()


def _may_have_changed(z: Tensor) -> bool:
    """Whether memory that was zero, or had any content, holds something else. A graph has all that writes to it."""
    return type(z) is Tensor and bool(z.detach().count_nonzero())


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in flatten(value)[0] if isinstance(one, Tensor)]


def _has_storage(z: Tensor) -> bool:
    return z.layout == torch.strided and not z.is_nested


def _key(z: Tensor) -> int:
    key = storage_of(z)
    assert key is not None
    return key


def _mixes(owners: Owners) -> bool:
    low, high = owners.compact()
    return bool((low < high).any())


def _rule_of(call: Call) -> Rule:
    if call.name == "view" and overload_of(call.op) == "dtype":
        return owner_rules.of_other_dtype
    rule = owner_rules.RULES.get(call.name)
    if rule is not None:
        return rule
    if makes_view(call.op) and call.name != "as_strided":
        return owner_rules.moved
    if has_tag(call.op, torch.Tag.pointwise):
        return owner_rules.pointwise
    if has_tag(call.op, torch.Tag.reduction):
        return owner_rules.reduction
    return everything
