"""FX nodes: where Dynamo and AOTAutograd note the source, the position and the size of an input.

Dynamo puts a `_dynamo_source` on a placeholder, AOTAutograd a descriptor under `meta["desc"]`, and sizes are symbols
with a `node`. None of it is public; all of it is in torch 2.11 to 2.15. What is read degrades to "unknown" where it is
missing; what is written is required by the command that writes it.
"""

import re
import types
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as traceback
from torch import fx


def source_of(placeholder: fx.Node) -> str:
    """The source of an input of Dynamo's graph, such as `L['x']`. Degraded where torch notes none: empty."""
    return str(getattr(_source(placeholder), "name", ""))


def copy_source(before: fx.Node, after: fx.Node) -> None:
    """Copy the source of an input of Dynamo's graph: it is an attribute of the node, which copies of a graph lose."""
    if (source := _source(before)) is not None:
        after._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]


def _source(placeholder: fx.Node) -> Any:
    # Until just before the backend is called, Dynamo has it in "grapharg".
    argument = placeholder.meta.get("grapharg")
    return getattr(placeholder, "_dynamo_source", None) or getattr(argument, "source", None)


def position_of(placeholder: fx.Node) -> int | None:
    """Which input of Dynamo's graph an input of AOTAutograd's graph is. None for tangents and saved values."""
    description = placeholder.meta.get("desc")
    return description.idx if type(description).__name__ == "PlainAOTInput" else None  # pyright: ignore[reportOptionalMemberAccess]


class ProgramCall(NamedTuple):
    """A call in the program: its name in Dynamo's graph, and the function, method or class of module that it calls."""

    name: str
    called: str


def call_of(node: fx.Node) -> ProgramCall | None:
    """The call in the program that a node was traced from. Degraded where torch notes none: None."""
    stack = node.meta.get("source_fn_stack")
    if not stack:
        return None
    name, called = stack[-1]
    return ProgramCall(str(name), called if isinstance(called, str) else getattr(called, "__name__", ""))


def set_call(node: fx.Node, call: ProgramCall) -> None:
    """Set the call that a node was traced from, where Dynamo sets it."""
    node.meta["source_fn_stack"] = [tuple(call)]


def op_before_decomposition(node: fx.Node) -> str:
    """The op that a node was decomposed from, or else the node's own. Degraded where torch notes none: its own."""
    return str(node.meta.get("original_aten") or node.target)


def set_op_before_decomposition(node: fx.Node, name: str) -> None:
    """Set the name of the op that a node was decomposed from, where torch sets the op."""
    node.meta["original_aten"] = name


def set_source(placeholder: fx.Node, source: str) -> None:
    """Set the source of an input of Dynamo's graph, where Dynamo sets it."""
    placeholder._dynamo_source = types.SimpleNamespace(name=source)  # pyright: ignore[reportAttributeAccessIssue]


def set_position(placeholder: fx.Node, position: int) -> None:
    """Set which input of Dynamo's graph an input of AOTAutograd's graph is, as AOTAutograd does. Required."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    placeholder.meta["desc"] = PlainAOTInput(idx=position)


def rename(node: torch.fx.Node, name: str) -> None:
    """Rename a placeholder; its graph makes the name unique. Nodes have no public way to be renamed. Required."""
    node._rename(name)
    node.target = node.name


def current_line() -> str:
    """The source line of the node that an `fx.Interpreter` is running."""
    return traceback.get_current_meta().get("stack_trace") or "a saved graph"


# The function by which a program asserts something about its sizes, as advice to the user quotes it.
CHECK_SIZE = "torch._check"

_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_SIZE = re.compile(r"\.size\(\)\[(\d+)\]")
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_LOCAL = re.compile(r"^L\['([^']*)'\]")
# Dynamo's name of the compiled module, whose parameters are reported by their names in its state dict.
_ROOT = re.compile(r"^(?:self|fn)\.")


class GraphInput(NamedTuple):
    """An input of a graph: its name in the program, and whether it is a parameter or a buffer."""

    name: str
    is_state: bool


def hint(size: int | torch.SymInt) -> int | None:
    """The concrete size that a symbol was traced with; `int(size)` would add a guard. None if unknown. Required."""
    if isinstance(size, int):
        return size
    known = size.node.hint if size.node.has_hint() else None
    return None if known is None else int(known)


def size_in_user_code(size: torch.SymInt) -> str | None:
    """A size as the program can write it, such as `x.shape[1]`. None if it is not computed from its inputs."""
    expression, sources = size.node.expr, size.node.shape_env.var_to_sources
    names = {}
    for symbol in expression.free_symbols:
        name = getattr(next(iter(sources.get(symbol, ())), None), "name", None)
        if name is None:
            return None
        source = str(name() if callable(name) else name)  # a method on torch 2.11
        names[str(symbol)] = _SIZE.sub(r".shape[\1]", _LOCAL.sub(r"\1", _MEMBER.sub(r".\1", source)))
    text = _SYMBOL.sub(lambda found: names.get(found[0], found[0]), str(expression))
    return text if expression.is_symbol else f"({text})"


def inputs_of(dynamo: fx.GraphModule) -> tuple[GraphInput, ...]:
    """The inputs of Dynamo's graph. Degraded where a node has no source: by the node's name, and no parameter."""
    found = []
    for node in dynamo.graph.find_nodes(op="placeholder"):
        source = str(getattr(getattr(node, "_dynamo_source", None), "name", node.name))
        name = _ROOT.sub("", _LOCAL.sub(r"\1", _MEMBER.sub(r".\1", source)))
        found.append(GraphInput(name, "._parameters[" in source or "._buffers[" in source))
    return tuple(found)


def is_lifted_state(placeholder: fx.Node) -> bool:
    """Whether AOTAutograd's descriptor says that it lifted a parameter or a buffer to this input."""
    return type(placeholder.meta.get("desc")).__name__ in ("ParamAOTInput", "BufferAOTInput")
