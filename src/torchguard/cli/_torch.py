"""The command's seam to private torch: it hears when something is compiled, and reads a model compiled in place."""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn


def on_compiling(start: Callable[[str], None], end: Callable[[], None]) -> bool:
    """Call `start` with the compile id when something begins to be compiled, and `end` when nothing is any more.

    There is no public way to hear of it. Where this one is missing there is no progress line, and False is returned.
    """
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:
        return False
    callback_handler.register_start_callback(lambda args: start(str(getattr(args, "compile_id", ""))))
    callback_handler.register_end_callback(lambda args: end())
    return True


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


def op_named(name: str) -> Any:
    """The op that a graph calls `aten.mm.default`, None if there is none. The type of ops has no public name."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def is_view(op: Any) -> bool:
    """Whether an op gives what it was given, seen another way: only its schema, which is private, says so."""
    if op is torch.ops.aten._unsafe_view.default:  # its schema does not say so, but it shares memory
        return True
    return any(given.alias_info is not None and not given.alias_info.is_write for given in op._schema.returns)


def note_source(placeholder: fx.Node, source: str) -> None:
    """Note what an input of Dynamo's graph is read from, where Dynamo notes it."""
    placeholder._dynamo_source = types.SimpleNamespace(name=source)  # pyright: ignore[reportAttributeAccessIssue]


def note_position(placeholder: fx.Node, position: int) -> None:
    """Note which input of Dynamo's graph an input of AOTAutograd's is, as AOTAutograd notes it."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    placeholder.meta["desc"] = PlainAOTInput(idx=position)


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Make tensors that have a device and a storage, but no memory. The mode for it has no public name."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()
