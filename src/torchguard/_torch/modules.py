"""Modules: hooks, and what torch.compile makes of a module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def mixes_rows(module: torch.nn.Module) -> bool:
    """Whether samples of a batch touch each other while it trains. The base of all batch norms is private."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_of_torch(module: torch.nn.Module) -> bool:
    """Whether a module is one of torch's own, and holds no others."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` or `torch.jit` made it: the former leaves nothing but the attribute of what it wraps."""
    return hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule)


def remove_forward_hooks(module: torch.nn.Module, is_ours: Callable[[object], bool]) -> None:
    """Take off the forward hooks and pre-hooks whose object (of a bound method, that it is bound to) is ours.

    The handles that registering gives are no way: a copy of a model has copies of the hooks, and no handles.
    """
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if is_ours(getattr(hook, "__self__", hook))]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def wrap_compiled_call(model: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what `model.compile()` made, which torch keeps in an attribute that has no public name.

    Where it is not there, nothing is done, and what is to be known of the model is known of its last call alone.
    """
    call = model.__dict__.get("_compiled_call_impl")
    if call is not None:
        model.__dict__["_compiled_call_impl"] = wrap(call)


def is_compiled_already(model: object) -> bool:
    """Whether `torch.compile` returned this module. All it leaves is the attribute of what it wraps."""
    return isinstance(model, nn.Module) and "_orig_mod" in model._modules


def is_compiled_function(model: object) -> bool:
    """Whether `torch.compile` returned this function, on which it leaves the one that it compiles."""
    return hasattr(model, "_torchdynamo_orig_callable")


def without_compiling(model: nn.Module) -> nn.Module:
    """The module that was compiled, however often."""
    while is_compiled_already(model):
        model = model._modules["_orig_mod"]  # pyright: ignore[reportAssignmentType]
    return model
