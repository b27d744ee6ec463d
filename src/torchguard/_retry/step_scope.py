"""What a closure reaches, found once and used for as long as it reaches the same.

Following all references takes about a millisecond for a model of 100 modules, which is too much for every step. To see
that nothing changed takes a tenth of that.
"""

import collections
import operator
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchguard._health import local
from torchguard._retry.python_state import PythonState, Unsaved
from torchguard._retry.random_state import RandomState
from torchguard._retry.ranks import Alone, ranks_of
from torchguard._retry.reach import reach
from torchguard._retry.tensor_state import shards_of, tensors_of
from torchguard._retry.wrappers import Wrappers
from torchguard._torch.training import (
    active_modes,
    hooks_of,
    hooks_of_all_modules,
    hooks_of_tensor,
    next_hook,
    steps_in_backward,
)
from torchguard.exceptions import RetryError, RetryWarning


class Scope:
    """What a step may change, and who takes part in it.

    Attributes:
        parameters: every leaf that may get a gradient, by name. A closure may freeze and unfreeze parameters.
        leaves: the same without names.
        has_plain_gradients: whether those that require one are on one device, of one dtype, and none is distributed.
        is_all_trained: whether the optimizers train all that require one, and nothing else.
        trained: the ids of those that an optimizer trains, and of their shards.
        stepped: the ids of all that the optimizers have, frozen ones included.
        buffers, others: the tensors that a step may change, by id: buffers, and all others.
        python: attributes and containers.
        wrappers: DDP and FSDP2.
        ranks: the processes that share the gradients.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup | None,
        closure: Any,
    ) -> None:
        self._closure, self._optimizers = _parts_of(closure), optimizers
        named = {f"model{number or ''}": model for number, model in enumerate(models)}
        self.reached = reach({**named, "closure": closure}, optimizers)
        self.wrappers = Wrappers(self.reached.modules)
        self.parameters = self._leaves(optimizers)
        self.leaves = [*self.parameters.values()]
        self._requiring = [*map(_requires_grad, self.leaves)]
        self._refuse()
        self.devices = {one.device for one in self.leaves}
        requiring = [one for one in self.leaves if one.requires_grad]
        device = next((one.device for one in requiring), torch.device("cpu"))
        self.ranks: Alone = ranks_of(group or self.wrappers.group(), device, self.wrappers.meshes)
        buffers, others = tensors_of(self.reached, self.parameters.values())
        self.buffers, self.others = shards_of(buffers), shards_of(others)
        gets_gradient = {*map(id, requiring)}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.stepped = {id(one) for group in groups for one in group["params"]}
        self.is_all_trained = gets_gradient <= self.stepped
        stepped = self.stepped & gets_gradient or gets_gradient
        kinds = {(one.device, one.dtype, type(one) in (Tensor, nn.Parameter)) for one in requiring}
        self.has_plain_gradients = len(kinds) == 1 and next(iter(kinds))[2]
        with torch.no_grad():
            self.trained = stepped | {id(local(one)) for _, one in others.values() if id(one) in stepped}
        self.python = PythonState(self.reached)
        self._tensors = [tensor for _, tensor in others.values()]
        self._trainable = [*map(_requires_grad, self._tensors)]
        self._sizes, self._modes = self._group_sizes(), active_modes()
        self._next_hook, self._hooks = next_hook(), self._all_hooks()

    def update(self, closure: Any) -> bool:
        """Save the Python state before a step. False if the closure reaches something else than before."""
        parts = _parts_of(closure)
        self.wrappers.begin()
        return (
            len(parts) == len(self._closure)
            and all(map(operator.is_, parts, self._closure))
            and [*map(_requires_grad, self._tensors)] == self._trainable
            and self._group_sizes() == self._sizes
            and active_modes() == self._modes
            and self._has_same_hooks()
            and self.python.update()
        )

    def has_same_leaves(self) -> bool:
        """Whether the parameters that require a gradient are those that did before the step."""
        return [*map(_requires_grad, self.leaves)] == self._requiring

    def freeze_as_before(self) -> None:
        """Have each tensor require a gradient if it did before the step."""
        for tensor, is_required in zip(self._tensors, self._trainable, strict=True):
            if tensor.requires_grad != is_required and tensor.is_leaf:
                tensor.requires_grad_(is_required)

    def _has_same_hooks(self) -> bool:
        """Whether modules and parameters have the hooks that were followed. Read if any was registered since."""
        if next_hook() == self._next_hook:
            return True
        self._next_hook = next_hook()
        return [*map(id, self._all_hooks())] == [*map(id, self._hooks)]

    def _all_hooks(self) -> list[Any]:
        of_modules = [hook for _, module in self.reached.modules for hook in hooks_of(module)]
        of_tensors = [hook for tensor in self._tensors for hook in hooks_of_tensor(tensor)]
        return of_modules + of_tensors + hooks_of_all_modules()

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def unsaved(self) -> Unsaved:
        """What a run must not change, because it is not saved before a step."""
        return Unsaved(self.reached)

    def random_state(self) -> RandomState:
        return RandomState(self.reached, self.devices)

    def _leaves(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
        found = {
            id(parameter): (f"{path}.{name}", parameter)
            for path, module in self.reached.modules
            for name, parameter in module.named_parameters(recurse=False)
        }
        found |= {
            id(tensor): (name, tensor)
            for name, tensor in self.reached.tensors
            if (tensor.requires_grad or isinstance(tensor, nn.Parameter)) and id(tensor) not in found
        }
        for number, optimizer in enumerate(optimizers):
            name = f"optimizer{number or ''}"
            for group in optimizer.param_groups:
                found |= {id(one): (name, one) for one in group["params"] if id(one) not in found}
        leaves = [(name, one) for name, one in found.values() if one.is_leaf and _can_get_gradient(one)]
        return dict(_unique(leaves))

    def _refuse(self) -> None:
        """Refuse what cannot be undone."""
        _refuse_uninitialized(self.reached.modules)
        if not self.reached.is_complete:
            warnings.warn(
                "Retry: the closure reaches more objects than are followed, so what it changes in the farthest of them "
                "is not restored. Give a closure that refers to less: a function instead of a trainer's method, say.",
                RetryWarning,
                stacklevel=6,
            )
        if self.reached.iterators:
            raise RetryError(
                f"Retry: the closure uses {self.reached.iterators[0]}, an iterator or queue that cannot be put back "
                "for a new run. Take from it outside of the closure, and put what it gave into the batch."
            )
        for name, parameter in self.parameters.items():
            if steps_in_backward(parameter):
                raise RetryError(
                    f"Retry: {name} has a hook that runs in backward once its gradient is there, as optimizers do that "
                    "step in backward. What such a step changes cannot be undone. Remove the hook, and give the "
                    "optimizer to Retry."
                )


_requires_grad = operator.attrgetter("requires_grad")


def _can_get_gradient(tensor: Tensor) -> bool:
    """Whether a leaf may get a gradient. One on the meta device is a shape, whose values `functional_call` gives."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta


def _parts_of(closure: Any) -> list[Any]:
    """What makes two closures the same: a lambda in a loop is a new object in every step."""
    owner = None
    if isinstance(closure, types.MethodType):
        owner, closure = closure.__self__, closure.__func__
    if not isinstance(closure, types.FunctionType) or closure.__dict__:
        return [owner, closure]
    held = (*(closure.__closure__ or ()), *(closure.__defaults__ or ()), *(closure.__kwdefaults__ or {}).values())
    return [owner, closure.__code__, closure.__globals__, *held]


def _unique(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Names made different where two objects have one."""
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for name, tensor in named:
        seen[name] += 1
        found.append((name if seen[name] == 1 else f"{name}#{seen[name]}", tensor))
    return found


def _refuse_uninitialized(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Lazy modules make their parameters in the first run, which cannot be undone."""
    for path, module in modules:
        if any(torch.nn.parameter.is_lazy(one) for one in module.parameters(recurse=False)):
            raise RetryError(f"Retry: {path} has parameters that are not initialized. Run the model once before.")
