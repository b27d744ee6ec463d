"""A batch: how many samples it has, some of them as a batch of their own, and which have non-finite inputs."""

import collections
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchguard._pytrees import children, replace_children
from torchguard._retry.copies import is_floating, wide
from torchguard._retry.python_state import PythonState
from torchguard._retry.reach import reach
from torchguard._torch.tensors import versions
from torchguard.exceptions import RetryError

Select = Callable[[Any, list[int]], Any]

# Where a batch has the ids of its samples in the dataset, in a mapping or as attributes.
ID_NAMES = ("sample_id", "sample_ids", "index", "indices", "idx", "id", "ids")


class Batch:
    """One batch of samples along dim 0, or whatever `select` takes samples of.

    Args:
        value: a tensor, or a pytree of tensors.
        shared: keys, names or positions of what belongs to no sample although it has as many rows as there are samples.
        select: `select(batch, rows)` returns the batch of these samples, in that order.
        size: the number of samples, if `select` is given and the batch has no length.
    """

    def __init__(
        self, value: Any, shared: Collection[Any] = (), select: Select | None = None, size: int | None = None
    ) -> None:
        self.value, self.shared, self._select = value, shared, select
        plain = _plain_items(value)
        self._is_plain = plain is not None
        self.tensors = tensors_of(value) if plain is None else plain
        self.is_one_loss = False  # whether the closure returned one loss for all samples
        self._is_checked = False  # whether ragged tensors were looked for
        self._state: PythonState | None = None
        if select is not None:  # a batch of any class: its attributes are put back before each run
            reached = reach({"the batch": value})
            self.tensors = [tensor for _, tensor in reached.tensors]
            self._state = PythonState(reached)
        counted = tensors_of(value, shared) if shared else self.tensors
        self._has_given_size = size is not None or select is not None
        if select is None and size is None and not self._is_plain and _holds_packed(value):
            raise RetryError(
                "Retry: the batch holds a PackedSequence, whose samples are not along dim 0. Pack the samples in the "
                "closure, or give select=, which returns the batch of some samples, and size=, which counts them."
            )
        self.size = _count(value, counted) if size is None else size
        self._versioned = [tensor for tensor in self.tensors if not tensor.is_inference()]

    def is_clear(self) -> bool:
        """Whether it is clear which dim has the samples, without a loss for each of them.

        It is not where two sizes are equally frequent, and where a list has tensors of one kind but of different
        lengths: these may be the samples.
        """
        if self._has_given_size:
            return True
        sizes = self._sizes(self.value)
        counts = [count for _, count in sizes.most_common(2)]
        has_most = len(counts) < 2 or (counts[0] > counts[1] and not _is_ragged(self.value, self.shared))
        return has_most and (self._is_plain or not any(map(self._may_have_samples, _lists_in(self.value, self.shared))))

    def _sizes(self, value: Any) -> collections.Counter[int]:
        tensors = tensors_of(value, self.shared)
        return collections.Counter(tensor.size(0) for tensor in tensors if tensor.ndim and not tensor.is_nested)

    def _may_have_samples(self, items: Any) -> bool:
        """Whether a list whose length is not that of the batch may have one item per sample all the same.

        It may if the size of the batch was found in such a list alone, or if the length of the list is the size of a
        tensor outside of it: images, and a dict of boxes for each of them.
        """
        outside = self._sizes(self.value) - self._sizes(items)
        return len(items) != self.size and _is_uniform(items) and (not outside or len(items) in outside)

    def whole(self) -> Any:
        """The batch in containers of its own: a closure may take things out of them (`batch.pop("labels")`)."""
        if self._is_plain and self._state is None:
            return self.value if isinstance(self.value, (Tensor, tuple)) else self.value.copy()
        if self._state is None:
            return _copied(self.value)
        self._state.restore()
        return self.value

    def versions(self) -> list[int]:
        """How often each of its tensors was changed in place."""
        return versions(self._versioned)

    def part(self, rows: Sequence[int]) -> Any:
        if self._select is not None:
            return self._select(self.whole(), [*rows])
        self._refuse_ragged()
        return self._part(self.value, list(rows))

    def _part(self, value: Any, rows: list[int]) -> Any:
        if isinstance(value, Tensor):
            return self._rows_of(value, rows)
        if isinstance(value, np.ndarray):
            return value[rows] if value.ndim and len(value) == self.size else value
        if type(value) in (list, tuple) and len(value) == self.size and self._is_of_samples(value):
            return type(value)(value[row] for row in rows)
        return replace_children(
            value, {key: self._part(child, rows) for key, child in children(value) if key not in self.shared}
        )

    def _rows_of(self, tensor: Tensor, rows: list[int]) -> Tensor:
        if tensor.is_nested:
            parts = tensor.unbind()
            if len(parts) != self.size:
                return tensor
            return torch.nested.as_nested_tensor([parts[row] for row in rows], layout=tensor.layout)
        if not self._has_rows(tensor):
            return tensor
        chosen = tensor.index_select(0, torch.tensor(rows, device=tensor.device))
        return chosen.detach().requires_grad_() if tensor.requires_grad and tensor.is_leaf else chosen

    def passed_whole(self) -> list[tuple[str, Any]]:
        """The tensors and arrays of several rows that every part of the batch gets whole, by name."""
        inputs = self._inputs(self.value, "") if self._select is None else []
        return [(name, one) for name, one in inputs if len(one) not in (0, 1, self.size)]

    def _inputs(self, value: Any, name: str) -> list[tuple[str, Any]]:
        """The tensors and arrays of a value by name, but shared ones and the items of a list with one per sample."""
        if isinstance(value, (Tensor, np.ndarray)):
            return [(name or "the tensor", value)] if value.ndim and not getattr(value, "is_nested", False) else []
        if type(value) in (list, tuple) and len(value) == self.size and self._is_of_samples(value):
            return []
        return [
            found
            for key, child in children(value)
            if key not in self.shared
            for found in self._inputs(child, f"{name}.{key}" if name else str(key))
        ]

    def _refuse_ragged(self) -> None:
        """Refuse tensors with different numbers of rows for each sample, where lengths, offsets or indices show it."""
        if self._is_checked:
            return
        self._is_checked = True
        whole = self.passed_whole()
        inputs = self._inputs(self.value, "") if whole else []
        integers = [(name, one.tolist()) for name, one in inputs if _is_list_of_integers(one)]
        for name, tensor in whole:
            for other, numbers in integers:
                if _gives_rows(numbers, self.size, len(tensor)):
                    raise RetryError(
                        f"Retry: {name} of the batch has {len(tensor)} rows for {self.size} samples, and {other} seems "
                        "to tell which rows belong to which sample. Give select=, which returns the batch of some "
                        f"samples. If {name} belongs to no sample, name it in shared=."
                    )

    def _has_rows(self, value: Any) -> bool:
        if isinstance(value, (Tensor, np.ndarray)):
            return value.ndim > 0 and len(value) == self.size
        return any(self._has_rows(child) for _, child in children(value))

    def _is_of_samples(self, items: Any) -> bool:
        """Whether a list that is as long as the batch has one item per sample: names, images, dicts of boxes.

        Raises:
            RetryError: it may as well have one item for each of several inputs.
        """
        arrays = [one for item in items for one in _arrays_in(item)]
        with_rows = [one for one in arrays if self._has_rows(one)]
        if not with_rows:
            return True
        if not _is_uniform(items) or (items is self.value and not self._has_given_size):
            return False
        if len(with_rows) < len(arrays):
            return True
        if self.is_one_loss:  # a loss for each sample would show which it is
            raise RetryError(
                f"Retry: the batch has a list of {len(items)} items, as many as it has samples, and each item has as "
                "many rows. These may be the samples, or inputs with one row per sample. Give select=, which returns "
                "the batch of some samples."
            )
        return self._has_given_size

    def non_finite_inputs(self) -> list[int]:
        """The samples with NaN or Inf in a dense tensor. Waits for the device."""
        if self._select is not None or not self.size:
            return []
        found = torch.zeros(self.size, dtype=torch.bool)
        for tensor in tensors_of(self.value, self.shared):
            if (
                tensor.is_nested
                or tensor.layout is not torch.strided
                or not self._has_rows(tensor)
                or not is_floating(tensor)
            ):
                continue
            found |= ~wide(tensor.detach()).reshape(self.size, -1).isfinite().all(1).cpu()
        return found.nonzero().flatten().tolist()

    def ids(self, source: str | Callable[[Any], Any] | None) -> list[Any] | None:
        """The ids of the samples in the dataset, or None."""
        if callable(source):
            found = source(self.value)
        else:
            by_name = dict(children(self.value)) if not isinstance(self.value, (tuple, list)) else {}
            names = ID_NAMES if source is None else (source,)
            found = next((by_name[name] for name in names if name in by_name), None)
            if source is not None and found is None:
                raise RetryError(f"Retry: the batch has no {source!r} to take the ids of its samples from.")
        if isinstance(found, Tensor):
            found = found.tolist()
        if found is None or not hasattr(found, "__len__") or len(found) != self.size:
            return None
        return list(found)


def _plain_items(value: Any) -> list[Tensor] | None:
    """The tensors of a batch that is a tensor, or a dict, list or tuple of tensors alone, as most are; else None."""
    if type(value) is Tensor:
        return [value]
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return [*items] if {*map(type, items)} == {Tensor} else None


def _count(value: Any, tensors: Sequence[Tensor]) -> int:
    """The most frequent size of dim 0 of the tensors in a value; of several, the first."""
    sizes = [len(tensor.unbind()) if tensor.is_nested else tensor.size(0) for tensor in tensors if tensor.ndim]
    if not sizes:
        raise RetryError(
            f"Retry: the batch ({type(value).__name__}) holds no tensor with samples along dim 0. "
            "Give select=, which returns the batch of some samples, and size=, which counts them."
        )
    return sizes[0] if len({*sizes}) == 1 else collections.Counter(sizes).most_common(1)[0][0]


def _is_ragged(value: Any, shared: Collection[Any]) -> bool:
    items = [child for key, child in children(value) if key not in shared]
    tensors = [one for one in items if isinstance(one, Tensor) and one.ndim]
    if type(value) in (list, tuple) and len(tensors) == len(items):
        kinds = {(one.dtype, one.shape[1:]) for one in tensors}
        if len(kinds) == 1 and len({*map(len, tensors)}) > 1:
            return True
    return any(_is_ragged(child, shared) for child in items)


def _lists_in(value: Any, shared: Collection[Any]) -> list[Any]:
    """The lists and tuples of several items in a value, but the value itself."""
    found = []
    for key, child in children(value):
        if key not in shared:
            found += [child] if type(child) in (list, tuple) and len(child) > 1 else []
            found += _lists_in(child, shared)
    return found


def _is_uniform(items: Any) -> bool:
    """Whether all items are of one kind, as samples are: tensors of one dtype and rank, dicts of such."""
    kinds = [_kind(one) for one in items]
    return all(one == kinds[0] for one in kinds) and bool(_arrays_in(items))


def _kind(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.dtype, value.ndim
    return type(value), [(key, _kind(child)) for key, child in children(value)]


def _arrays_in(value: Any) -> list[Any]:
    """The tensors and arrays in a value, but numbers."""
    if isinstance(value, (Tensor, np.ndarray)):
        return [value] if value.ndim else []
    return [one for _, child in children(value) for one in _arrays_in(child)]


def _is_list_of_integers(value: Any) -> bool:
    return value.ndim == 1 and str(value.dtype).removeprefix("torch.") in ("int32", "int64")


def _gives_rows(numbers: list[int], samples: int, rows: int) -> bool:
    """Whether numbers tell which of some rows belong to which sample: as lengths, offsets, or an index for each row."""
    if len(numbers) == samples and min(numbers) > 0 and sum(numbers) == rows:
        return True
    rises = [later - number for number, later in itertools.pairwise(numbers)]
    if not rises or numbers[0] != 0 or min(rises) < 0:
        return False
    if len(numbers) == samples:  # without the last offset; the ids of samples rise by 1
        return min(rises) > 0 and max(rises) > 1 and numbers[-1] < rows
    if len(numbers) == samples + 1:
        return numbers[-1] == rows
    return len(numbers) == rows and {*numbers} == {*range(samples)}


def _holds_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence) or any(_holds_packed(child) for _, child in children(value))


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # it is not known whether a closure changed it in place
        return value.copy()
    return replace_children(value, {key: _copied(child) for key, child in children(value)})


def tensors_of(value: Any, shared: Collection[Any] = ()) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for key, child in children(value) if key not in shared for tensor in tensors_of(child, shared)]


def keys_of(value: Any) -> set[Any]:
    """The keys, names and positions of all that a pytree holds."""
    found = children(value)
    return {key for key, _ in found}.union(*(keys_of(child) for _, child in found))


def micro_batches(value: Any, window: bool | None) -> list[Any]:
    """The micro-batches that `backward` was given: those of a list, unless it is the list of a batch's tensors.

    Raises:
        RetryError: a list of tensors may be either.
    """
    if window is None:
        window = type(value) is list and not any(isinstance(one, Tensor) for one in value)
        if type(value) is list and value and all(isinstance(one, Tensor) and one.ndim for one in value):
            kinds = {(one.dtype, one.shape[1:]) for one in value}
            if len(kinds) == 1 and len(value) > 1:
                raise RetryError(
                    f"Retry: a list of {len(value)} tensors of one dtype and shape may be one batch or as many "
                    "micro-batches. Give window=True for micro-batches, window=False for one batch."
                )
    if not window:
        return [value]
    if not isinstance(value, (list, tuple)) or not value:
        given = f"an empty {type(value).__name__}" if isinstance(value, (list, tuple)) else type(value).__name__
        raise RetryError(f"Retry: a window needs a list of micro-batches, got {given}.")
    return [*value]
