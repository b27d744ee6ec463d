"""DDP and FSDP2 around a model: which ranks they join, and what they send and keep in a run.

DDP adds up gradients in the backward pass, and copies buffers from rank 0 at the start of the forward pass. A run on a
part of a batch may raise an exception on one rank alone, or leave parameters without a gradient: the others would wait
for ever, or DDP could not be used again. So a run that only searches for bad samples leaves gradients where they are,
and buffers are copied before the closure is called.

FSDP2 gathers parameters in every forward pass, so all ranks have to make the same passes. A rank whose closure raised
before the first pass makes those of its whole batch instead. After an exception inside a pass there is no way to go on.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchguard._torch.training import communication_hooks, copy_buffers, gradient_reduction, is_joining, reset_sharded
from torchguard.exceptions import RetryError

Modules = list[tuple[str, nn.Module]]
NOTHING = contextlib.nullcontext()


class Wrappers:
    """Every DDP and every FSDP2 module that a closure reaches."""

    def __init__(self, modules: Modules) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")  # who uses it has imported it, which takes long
        self._replicated: Modules = []
        self._sharded: list[tuple[str, Any]] = []
        self.meshes: dict[Any, str] = {}  # of DTensors, with the name of one
        for path, module in modules:
            if isinstance(module, DistributedDataParallel):
                self._replicated.append((path, module))
            elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
                raise RetryError(f"Retry: {path} is a FullyShardedDataParallel. Use fully_shard (FSDP2) instead.")
            elif fsdp is not None and isinstance(module, fsdp.FSDPModule):
                self._sharded.append((path, module))
        self.replicated: list[Any] = [module for _, module in self._replicated]
        self.is_sharded = bool(self._sharded)
        self.is_none = not self._replicated and not self._sharded
        self._copying: list[Any] = []
        self.begin()
        for path, module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if (mesh := getattr(parameter, "device_mesh", None)) is not None:
                    self.meshes[mesh] = f"{path}.{name}"
        self.own_hooks: set[int] = set()  # ids of hooks that are registered here
        self._passes = [0, 0]  # forward passes of FSDP2 modules in this call of the closure: begun, finished
        self._expected: int | None = None  # forward passes in a call that did not raise

    def group(self) -> dist.ProcessGroup | None:
        """The ranks with different samples; None for one process."""
        groups = {one.process_group for one in self.replicated}
        if self.meshes and (not self._sharded or len(self.meshes) > 1 or next(iter(self.meshes)).ndim > 1):
            raise RetryError(
                f"Retry: {', '.join(self.meshes.values())}: distributed in another way than by fully_shard over one "
                "mesh of one dim. Give process_group=, the ranks that have different samples."
            )
        groups |= {mesh.get_group() for mesh in self.meshes}
        if len(groups) > 1:
            raise RetryError(
                "Retry: the models are distributed over different process groups. Give process_group=, the ranks that "
                "have different samples."
            )
        return next(iter(groups), None)

    def begin(self) -> None:
        """Before a step: refuse what cannot be undone, and note what DDP would do in its forward pass."""
        if self.is_none:
            return
        for _, module in self._sharded:
            module.reshard()  # after a forward pass without a backward pass it has whole parameters
        self._refuse()
        self._copying = [one for one in self.replicated if one.will_sync_module_buffers()]

    def _refuse(self) -> None:
        for path, module in self._replicated:
            if is_joining(module):
                raise RetryError(
                    f"Retry: {path} is in join(), which answers the collectives of DDP and not those of Retry. Give a "
                    "rank that has no batch left an empty one, for as long as another has one: docs/distributed.md."
                )
            for hook, state in communication_hooks(module):
                if state is not None and not isinstance(state, dist.ProcessGroup):
                    raise RetryError(
                        f"Retry: {path} has the communication hook {hook} with a state ({type(state).__name__}), which "
                        "each run would change. Use a hook without one."
                    )
        for path, module in self._sharded:
            is_reduced, divisor = gradient_reduction(module)
            if not is_reduced:
                raise RetryError(
                    f"Retry: {path} has set_requires_gradient_sync(False), so that its gradients cannot be checked. "
                    "Give the micro-batches as a list: guard.backward(closure, [batch, batch])."
                )
            if divisor is not None:
                raise RetryError(
                    f"Retry: {path} has set_gradient_divide_factor({divisor}). Retry needs the mean over the ranks."
                )

    # Gradients.

    def unreduced(self) -> list[Tensor]:
        """Parameters whose accumulated gradients are of this rank alone: the last forward pass was in `no_sync()`."""
        return [
            parameter
            for module in self.replicated
            if module.require_backward_grad_sync and not module.require_forward_param_sync
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def keep(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients that no later run overwrites. DDP may keep gradients in its buckets."""
        if not any(module.gradient_as_bucket_view for module in self.replicated):
            return [*gradients]
        return [None if one is None else one.clone() for one in gradients]

    def reducing(self, is_reduced: bool) -> contextlib.AbstractContextManager[Any]:
        """Have DDP leave gradients on each rank as they are, unless they are to be reduced."""
        if is_reduced or not self.replicated:
            return NOTHING
        stack = contextlib.ExitStack()
        for module in self.replicated:
            stack.enter_context(module.no_sync())
        return stack

    # Runs that may raise on one rank.

    @contextlib.contextmanager
    def retrying(self) -> Iterator[None]:
        """Have buffers copied by `copy_buffers` alone, and count the forward passes of FSDP2."""
        before = [(one, one.broadcast_buffers, one.require_forward_param_sync) for one in self.replicated]
        hooks = []
        try:
            for module in self.replicated:
                module.broadcast_buffers = False
            for _, module in self._sharded:
                hooks.append(module.register_forward_pre_hook(lambda *_: self._count(0), prepend=True))
                hooks.append(module.register_forward_hook(lambda *_: self._count(1)))
            self.own_hooks = {hook.id for hook in hooks}
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, is_copying, is_synced in before:
                module.broadcast_buffers, module.require_forward_param_sync = is_copying, is_synced

    def copy_buffers(self) -> None:
        for module in self._copying:
            copy_buffers(module)

    def _count(self, index: int) -> None:
        self._passes[index] += 1

    def call(self, closure: Callable[[], Any], whole: Callable[[], Any]) -> Any:
        """Call a closure that may raise, so that FSDP2 does not have the other ranks wait.

        Args:
            closure: on a part of the batch.
            whole: on the batch as it was given, for which it did not raise.
        """
        self._passes[:] = 0, 0
        try:
            found = closure()
        except Exception as exception:
            begun, finished = self._passes
            if not self._sharded or begun == finished == self._expected:
                raise
            if begun or self._expected is None:
                raise RetryError(
                    f"Retry: a part of the batch raised {type(exception).__name__}: {exception}. The other ranks wait "
                    "for this one inside of FSDP2, so that the step cannot go on. Give min_batch=, the smallest part "
                    "of a rank's batch that does not raise."
                ) from exception
            whole()
            raise
        self._expected = self._passes[1]
        return found

    def reset(self) -> None:
        """Have FSDP2 forget a run that was not finished."""
        for _, module in self._sharded:
            reset_sharded(module)
