"""Training steps: many tensors in one kernel, and what a step leaves on parameters, optimizers and DDP.

Everything here is required but `steps_in_backward`, `communication_hooks`, `skips_on_device`, `has_step_hooks`,
`has_step_of_its_own`, `functions_of_operators`, `names_of_unsaved_buffers`, `reset_sharded`, and those that read hooks,
whose docstrings say what happens where torch lacks a name. torch 2.11 to 2.15 have all of the others.
"""

import functools
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as _of_all  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils.hooks import RemovableHandle


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """`target.copy_(source)` for each pair. The public way launches a kernel for each tensor."""
    for some, others in _by_kind(targets, sources):
        torch._foreach_copy_(some, others)  # pyright: ignore[reportPrivateImportUsage]


def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """`target.add_(source)` for each pair of dense tensors."""
    for some, others in _by_kind(targets, sources):
        torch._foreach_add_(some, others)  # pyright: ignore[reportPrivateImportUsage]


def multiply_all(targets: Sequence[Tensor], factor: Tensor) -> None:
    """`target.mul_(factor)` for each tensor, with a factor on the device."""
    for target in targets:
        target.mul_(factor.to(target.device, target.dtype))  # noqa: TG120 (gradients are corrected where they are)


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each dense tensor, in one pass over those of a device and dtype."""
    found: list[Tensor | None] = [None] * len(tensors)
    indices = sorted(range(len(tensors)), key=lambda index: str((tensors[index].device, tensors[index].dtype)))
    for _, group in itertools.groupby(indices, key=lambda index: (tensors[index].device, tensors[index].dtype)):
        chosen = [*group]
        real = [torch.view_as_real(tensors[one]) if tensors[one].is_complex() else tensors[one] for one in chosen]
        found_norms = torch._foreach_norm(real, order, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
        for index, norm in zip(chosen, found_norms, strict=True):
            found[index] = norm
    return [norm for norm in found if norm is not None]


def norms_of_one_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each dense tensor, all of them on one device."""
    return [*torch._foreach_norm([*tensors], 2.0)]  # pyright: ignore[reportPrivateImportUsage]


def _by_kind(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Pairs grouped by device and dtype of the target: one kernel takes one group."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        some, others = groups.setdefault((target.device, target.dtype), ([], []))
        some.append(target)
        others.append(source)
    yield from groups.values()


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether a hook runs once the gradient of a parameter is accumulated: an optimizer that steps in backward.

    Degraded where torch renames the attributes: such an optimizer is noticed by the version of the parameter.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks) or hasattr(parameter, "_in_backward_optimizers")


def communication_hooks(module: nn.Module) -> list[tuple[str, object]]:
    """The communication hooks of a DistributedDataParallel: name and state.

    Degraded where torch renames `_comm_hooks`: none are seen.
    """
    return [(getattr(hook, "__qualname__", str(hook)), state) for hook, state in getattr(module, "_comm_hooks", ())]


def is_joining(module: nn.Module) -> bool:
    """Whether a DistributedDataParallel is in its `join()`, which has no public getter.

    Degraded where torch renames `_join_config`: it is not seen.
    """
    return getattr(getattr(module, "_join_config", None), "enable", False)


def copy_buffers(module: nn.parallel.DistributedDataParallel) -> None:
    """Copy the buffers of rank 0 to the others, as a DistributedDataParallel does at the start of a forward pass."""
    module._sync_buffers()


def gradient_reduction(module: Any) -> tuple[bool, float | None]:
    """Of an FSDP2 module: whether its backward pass reduces gradients, and what it divides them by, if not by default.

    FSDP2 has public setters for both (`set_requires_gradient_sync`, `set_gradient_divide_factor`), and no getters.
    """
    groups = _groups_of(module._get_fsdp_state())
    factors = [group.gradient_divide_factor for group in groups if group.gradient_divide_factor is not None]
    return all(group.reduce_grads for group in groups), next(iter(factors), None)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13


def gradients_so_far(model: nn.Module) -> list[Tensor]:
    """The gradients of a step whose later micro-batches are still to come.

    Between its passes an FSDP2 module shows either parts of its parameters or whole ones. It keeps gradients of both:
    those of whole parameters if `set_requires_gradient_sync(False)` puts off their sum. There is no public way to them.
    Required.
    """
    sharded = [one for group in _sharded_groups(model.modules()) for one in group.fsdp_params]
    holders = [*model.parameters()]
    for one in sharded:
        holders += [one.sharded_param, *([one._unsharded_param] if hasattr(one, "_unsharded_param") else [])]
    found = [*(one.grad for one in holders), *(one.unsharded_accumulated_grad for one in sharded)]
    return [*{id(one): one for one in found if one is not None}.values()]


def _sharded_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """The parameter groups of FSDP2 modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who uses it has imported it, which takes long
    if fsdp is None:
        return []
    sharded: list[Any] = [one for one in modules if isinstance(one, fsdp.FSDPModule)]
    return [group for one in sharded for group in _groups_of(one._get_fsdp_state())]


def sharding_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """What FSDP2 will do in a forward pass: gather the parameters of a module, for the first time or again, or not.

    There is no public way to ask. A forward pass with another gathering has other operations.
    """
    return tuple(
        [
            (group._sharded_state, any(hasattr(one, "_unsharded_param") for one in group.fsdp_params))
            for group in _sharded_groups(modules)
        ]
    )


def reset_sharded(module: Any) -> None:
    """Have an FSDP2 module forget a forward pass without a backward pass, or one that raised an exception.

    Degraded where torch has no `reset_iter_state` (before 2.13): parameters are sharded again, but after an exception
    inside of a forward pass the module cannot be used again.
    """
    if module._get_fsdp_state()._is_root and hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    module.reshard()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` skips a step by itself if the attribute `found_inf` says so: the fused optimizers.

    Degraded where torch renames `_step_supports_amp_scaling`: no optimizer does.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before or after each step of an optimizer, of its own or of all optimizers.

    Hooks are registered publicly; there is no public way to ask for them. Degraded where torch renames the attributes:
    none are seen.
    """
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", None)
        or getattr(optimizer, "_optimizer_step_post_hooks", None)
        or getattr(_of_all, "_global_optimizer_pre_hooks", None)
        or getattr(_of_all, "_global_optimizer_post_hooks", None)
    )


def has_step_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody replaced the `step` of one of torch's optimizers, on the object or in a subclass.

    Schedulers of learning rates replace it by one that only notes the call, marked `_wrapped_by_lr_sched`. Degraded
    where torch renames that: an optimizer with a scheduler counts as one with a step of its own.
    """
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return True
    return _class_has_step_of_its_own(type(optimizer))


@functools.lru_cache(maxsize=64)
def _class_has_step_of_its_own(kind: type) -> bool:
    classes = [one for one in kind.__mro__ if one is not torch.optim.Optimizer]
    definer = next((one for one in classes if "step" in vars(one)), None)
    of_torch = [one for one in classes if one.__module__.startswith("torch.optim")]
    return bool(of_torch) and definer not in of_torch


def module_dicts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The parameters, buffers and children of a module, as the module itself stores them."""
    return module._parameters, module._buffers, module._modules


def next_hook() -> int:
    """The id of the next hook that somebody registers on a module. Ids are counted up in each process."""
    return RemovableHandle.next_id


def remove_hooks(module: nn.Module, first: int, but: Collection[int]) -> None:
    """Remove the hooks of a module that were registered since `next_hook` returned `first`, but some.

    A module has a dict by id for each kind of hook, in attributes of its own. torch can remove a hook only by its
    handle, which whoever registered it has.
    """
    for name, hooks in vars(module).items():
        if "hooks" in name and isinstance(hooks, dict):
            for key in [key for key in hooks if isinstance(key, int) and key >= first and key not in but]:
                del hooks[key]


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that run in forward and backward passes, of a module and of its parameters.

    Degraded where torch keeps them in other attributes: those are not seen.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    held = (getattr(module, kind, None) for kind in kinds)
    own = [hook for hooks in held if isinstance(hooks, dict) for hook in hooks.values()]
    return own + [hook for one in module_dicts(module)[0].values() for hook in hooks_of_tensor(one)]


def hooks_of_tensor(tensor: Tensor | None) -> list[Any]:
    """The hooks that get the gradient of a tensor.

    Degraded where torch keeps them in another attribute: those are not seen.
    """
    return [*(getattr(tensor, "_backward_hooks", None) or {}).values()]


def hooks_of_all_modules() -> list[Any]:
    """The hooks that run in forward and backward passes of every module.

    Degraded where torch keeps them in other variables: those are not seen.
    """
    kinds = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    held = (getattr(nn.modules.module, kind, None) for kind in kinds)
    return [hook for hooks in held if isinstance(hooks, dict) for hook in hooks.values()]


def functions_of_operators() -> list[Any]:
    """The functions of the operators that somebody defined by `torch.library.custom_op`.

    An operator is called by its name, so what it reaches is not found by following references. Degraded where torch
    renames the registry or its attributes: those functions are not seen.
    """
    from torch._library import custom_ops

    definitions = [*getattr(custom_ops, "OPDEFS", {}).values()]
    names = ("_init_fn", "_setup_context_fn", "_backward_fn", "_vmap_fn")
    found = [getattr(one, name, None) for one in definitions for name in names]
    return [one for one in found if callable(one)]


def active_modes() -> list[Any]:
    """The function modes and dispatch modes that are entered: every operation of a step passes through them.

    There is no public way to ask. Required.
    """
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return []
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def names_of_unsaved_buffers(module: nn.Module) -> set[str] | None:
    """The set in which a module has the names of buffers that are not in its state dict. It changes with these alone.

    Degraded where torch renames it: None, and `Retry` looks at the set in every step.
    """
    return getattr(module, "_non_persistent_buffers_set", None)


def tracing_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile(fullgraph=True)` raises for code that it cannot trace into one graph, or not compile."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)
