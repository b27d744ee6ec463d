"""A step of the optimizers that the device skips if a flag on the device says so.

A host that waits for the outcome of a backward pass before it launches the optimizers leaves a GPU idle until the
first kernels of the next step arrive. Fused optimizers take a flag (`found_inf`, which a `GradScaler` uses): where it
is 1, the kernels change nothing. So the optimizers are launched before the outcome is known on the host, and the host
reads the flag while they run. A CPU has the flag at once: there, the host decides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchguard._torch.training import has_step_hooks, has_step_of_its_own, skips_on_device

# The loss, the norm of the gradients, and a flag, 0 or 1: whether anything may be non-finite. In a tensor on the device
# where the host would have to wait for it.
Status = Tensor | list[float]


class DeviceStep:
    """One step of some optimizers.

    Args:
        optimizers: those for which `why_not` finds no reason.
        clip: the largest norm of all gradients together; None for any.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], clip: float | None) -> None:
        self._optimizers, self._clip = optimizers, clip
        self._known: list[int] | None = None  # how many parameters of each optimizer had a state before the step
        self._status: HostCopy | None = None
        self._found: list[float] | None = None

    def launch(self, status: Status, norm: Tensor) -> None:
        """Step, unless the flag is set.

        Args:
            status: loss, norm, and the flag.
            norm: of the gradients of the optimizers, by which they are clipped.
        """
        if not isinstance(status, Tensor):
            self._found = status
            if not status[2]:
                update(self._optimizers, self._clip, norm)
            return
        self._known = [len(optimizer.state) for optimizer in self._optimizers]
        transfer, flag = HostCopy(status), status[2]
        # A norm of 0 clips nothing: gradients that are finite although their norm is not are still needed.
        update(self._optimizers, self._clip, torch.where(flag != 0, 0, norm), flag.to(torch.float32))
        self._status = transfer

    def outcome(self) -> tuple[float, float, bool]:
        """Loss, norm, and whether the step was skipped. Waits for them, but not for the optimizers."""
        if self._found is None:
            assert self._status is not None
            self._found = self._status.read()
            if self._found[2]:
                self._forget()
        loss, norm, flag = self._found
        return loss, norm, bool(flag)

    def is_done(self) -> bool:
        """Whether the optimizers stepped. Waits for the outcome."""
        return (self._status is not None or self._found is not None) and not self.outcome()[2]

    def _forget(self) -> None:
        """Remove the states that optimizers made for parameters which had none: the first step has yet to come."""
        for optimizer, known in zip(self._optimizers, self._known or (), strict=True):
            for parameter in [*optimizer.state][known:]:
                del optimizer.state[parameter]


class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Wait for the tensor, not for what was launched after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.tolist()


def clear_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """What `zero_grad` of each does, which looks at each gradient first. A GPU may be waiting for the host now."""
    for optimizer in optimizers:
        if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
            optimizer.zero_grad(set_to_none=True)
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def update(
    optimizers: Sequence[torch.optim.Optimizer], clip: float | None, norm: Tensor | None, flag: Tensor | None = None
) -> None:
    """Clip and step.

    Args:
        optimizers: one or several.
        clip: the largest norm of all gradients together; None for any.
        norm: of all gradients together, if it is known.
        flag: a float32 on the device: where it is 1, the optimizers change nothing.
    """
    if clip is not None:
        trained = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        if norm is None:
            nn.utils.clip_grad_norm_(trained, clip)
        else:
            nn.utils.clip_grads_with_norm_(trained, clip, norm)
    for optimizer in optimizers:
        if flag is None:
            optimizer.step()
            continue
        optimizer.found_inf, optimizer.grad_scale = flag, None  # pyright: ignore
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # pyright: ignore


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot skip a step on the device; empty if it can."""
    if not skips_on_device(optimizer):
        if optimizer.defaults.get("fused"):  # Adagrad of torch 2.11
            return f"is fused, but skips no steps in torch {torch.__version__}. Use another optimizer"
        return "is not fused. Give fused=True where the optimizer has it"
    if has_step_hooks(optimizer):
        return "has step hooks, which would run for skipped steps, too. Remove them"
    if has_step_of_its_own(optimizer):
        return "has a step that is not torch's, and may change more. Use torch's"
    return ""


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer made its state. Those that keep nothing from step to step are SGD without momentum."""
    return bool(optimizer.state) or not any(group.get("momentum", 1) for group in optimizer.param_groups)
