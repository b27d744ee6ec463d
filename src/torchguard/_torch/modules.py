"""nn.Module: its hooks and children, and what `torch.compile` leaves on a module or function.

The attributes used here (`_modules`, `_forward_hooks`, `_orig_mod`, `_compiled_call_impl`,
`_torchdynamo_orig_callable`) exist in torch 2.11 to 2.15. Those of nn.Module itself are required; where what
`torch.compile` leaves has other names, the functions are degraded as their docstrings say.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn


def mixes_samples(module: nn.Module) -> bool:
    """Whether samples of a batch influence each other in training. The base class of all batch norms is private.

    Required: where torch has no `_BatchNorm`, this raises AttributeError.
    """
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def child_names(module: nn.Module) -> Iterable[str]:
    """The names of a module's direct children, with those that share a module: `named_children` leaves them out.

    Required: nn.Module itself is built on `_modules`.
    """
    return module._modules


def is_torch_leaf(module: nn.Module) -> bool:
    """Whether a module is one of torch's own and has no children."""
    return type(module).__module__.startswith("torch.nn.") and not child_names(module)


def remove_forward_hooks(module: nn.Module, is_ours: Callable[[object], bool]) -> None:
    """Remove the forward hooks and pre-hooks for whose object (a bound method's `__self__`) `is_ours` is true.

    The handles that `register_forward_hook` returns do not help: a copy of a model has copies of the hooks, and no
    handles. Required: nn.Module itself calls the hooks in these dicts.
    """
    for hooks, key, _ in _forward_hooks(module, is_ours):
        del hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def forward_hooks(model: nn.Module, is_ours: Callable[[object], bool]) -> list[tuple[dict[int, Any], int, Any]]:
    """The same hooks of all modules of a model: the dict that each is in, its key, and the hook."""
    return [found for module in model.modules() for found in _forward_hooks(module, is_ours)]


def _forward_hooks(module: nn.Module, is_ours: Callable[[object], bool]) -> list[tuple[dict[int, Any], int, Any]]:
    dicts = (module._forward_hooks, module._forward_pre_hooks)
    return [(one, key, hook) for one in dicts for key, hook in one.items() if is_ours(getattr(hook, "__self__", hook))]


def with_parameters(model: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Within it, a model has other tensors in place of its parameters; those that are shared stay shared.

    `torch.func.functional_call` does this around a call. Here the call is under way, and its hooks have run. Required.
    """
    from torch.nn.utils.stateless import _reparametrize_module

    return _reparametrize_module(model, tensors, tie_weights=True)


def is_compiled_module(module: object) -> bool:
    """Whether `torch.compile` returned this module: it registers the module that it wraps as `_orig_mod`.

    Degraded where torch names it otherwise: a compiled module counts as a plain one whose `forward` is compiled.
    """
    return isinstance(module, nn.Module) and "_orig_mod" in module._modules


def is_compiled_or_scripted(module: nn.Module) -> bool:
    """Whether `torch.compile` or `torch.jit` made this module."""
    return is_compiled_module(module) or isinstance(module, torch.jit.ScriptModule)


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether a module within a model is compiled on its own, by `compile()` or `torch.compile`."""
    parts = [module for module in model.modules() if module is not model]
    return any(is_compiled_module(part) or is_compiled_in_place(part) for part in parts)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that was passed to `torch.compile`, however often it was compiled."""
    while is_compiled_module(module):
        module = module._modules["_orig_mod"]  # pyright: ignore[reportAssignmentType]
    return module


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile` returned this function, or something wraps it with `functools.wraps`."""
    return hasattr(function, "_torchdynamo_orig_callable")


def wrapped_function(function: object) -> object | None:
    """The function that `torch.compile` or `functools.wraps` wrapped; None if nothing is wrapped."""
    return getattr(function, "__wrapped__", None) or getattr(function, "_torchdynamo_orig_callable", None)


def compiled_function(compiled: Any) -> Any:
    """The function that `torch.compile` returned, also if a module holds it; None if nothing is compiled.

    `functools.wraps` copies all attributes of what it wraps. torch notes the id of the function that they belong to;
    degraded where it does not: a wrapper around a compiled function counts as compiled itself.
    """
    calls = [compiled]
    if isinstance(compiled, nn.Module):
        in_place = getattr(compiled, "_compiled_call_impl", None)  # what model.compile() makes
        calls = [compiled.forward] if is_compiled_module(compiled) else [in_place, compiled.forward]
    return next((call for call in calls if _is_made_by_torch(call)), None)


def _is_made_by_torch(call: Any) -> bool:
    function = getattr(call, "__func__", call)
    return is_compiled_function(function) and getattr(function, "_torchdynamo_wrapper_id", id(function)) == id(function)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. Degraded where torch names the attribute otherwise: False."""
    return module.__dict__.get("_compiled_call_impl") is not None


def skip_frame(function: Any) -> None:
    """Have Dynamo not compile a function as a frame of its own. It still traces it where it traces a call of it.

    Degraded where torch lacks `skip_code`: the function is compiled, without a graph.
    """
    import torch._dynamo.eval_frame  # loads all of Dynamo: only where a model is watched

    skip_code = getattr(torch._dynamo.eval_frame, "skip_code", None)
    if skip_code is not None:
        skip_code(function.__code__)


def compiled_call_at(owner: str) -> dict[str, Any]:
    """A class attribute that has `module.compile()` store what it makes as `compiled_call` of an attribute `owner`.

    torch stores it in the instance's `__dict__`. A watched model and its plain model share that dict, but must not
    share the compiled call. A property takes precedence over the dict. torch reads it in every call, outside of
    the graph, so `skip_code` keeps Dynamo from compiling the getter as a frame of its own; it still traces the
    getter where it traces the call. Degraded where torch lacks `skip_code`: a getter is compiled for each class of
    models; where torch names the attribute otherwise: a watched model cannot be compiled in place.
    """

    def get(self: Any) -> Any:
        return getattr(self, owner).compiled_call

    def set(self: Any, call: Any) -> None:
        getattr(self, owner).compiled_call = call

    skip_frame(get)
    return {"_compiled_call_impl": property(get, set)}


def without_compiled_call(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module as `nn.Module.__getstate__` copies them: compiled code cannot be copied."""
    return {name: value for name, value in attributes.items() if name != "_compiled_call_impl"}


def wrap_compiled_call(model: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what `model.compile()` made, which torch stores as `_compiled_call_impl`.

    Degraded where it is not there: nothing is wrapped, and only the model's last call is reported.
    """
    call = getattr(model, "_compiled_call_impl", None)
    if call is not None:
        model._compiled_call_impl = wrap(call)


def share_compiled_call(source: nn.Module, target: nn.Module) -> None:
    """Have a module run what `source.compile()` made when it is called. Degraded as `wrap_compiled_call`."""
    target.__dict__["_compiled_call_impl"] = getattr(source, "_compiled_call_impl", None)


def script_attributes(module: torch.jit.ScriptModule) -> list[str]:
    """The names of a TorchScript module's attributes that are no parameters and no modules.

    Degraded where torch has no `ConcreteModuleType`: none.
    """
    read_type = getattr(getattr(torch._C, "ConcreteModuleType", None), "from_jit_type", None)
    compiled = vars(module).get("_c")
    if read_type is None or compiled is None:
        return []
    found = read_type(compiled._type()).get_attributes()
    return [name for name, (_, is_parameter) in found.items() if not is_parameter and not name.startswith("_is_full")]
