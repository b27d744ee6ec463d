"""What torch notes on the nodes of its graphs."""

import re
import types
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as traceback
from torch import fx


def source_of(placeholder: fx.Node) -> str:
    """What Dynamo reads an input of its graph from, such as `L['x']`. Empty if that is unknown."""
    return str(getattr(_source(placeholder), "name", ""))


def keep_source(before: fx.Node, after: fx.Node) -> None:
    """Give a copy of an input of Dynamo's graph its source, which Dynamo sets on the node, where no copy has it."""
    if (source := _source(before)) is not None:
        after._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]


def _source(placeholder: fx.Node) -> Any:
    # A moment before a backend is called, Dynamo has it still where it keeps what it knows of its arguments.
    argument = placeholder.meta.get("grapharg")
    return getattr(placeholder, "_dynamo_source", None) or getattr(argument, "source", None)


def position_of(placeholder: fx.Node) -> int | None:
    """Which input of Dynamo's graph an input of AOTAutograd's is. None for tangents, and what is saved."""
    description = placeholder.meta.get("desc")
    return description.idx if type(description).__name__ == "PlainAOTInput" else None  # pyright: ignore[reportOptionalMemberAccess]


def note_source(placeholder: fx.Node, source: str) -> None:
    """Note what an input of Dynamo's graph is read from, where Dynamo notes it."""
    placeholder._dynamo_source = types.SimpleNamespace(name=source)  # pyright: ignore[reportAttributeAccessIssue]


def note_position(placeholder: fx.Node, position: int) -> None:
    """Note which input of Dynamo's graph an input of AOTAutograd's is, as AOTAutograd notes it."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    placeholder.meta["desc"] = PlainAOTInput(idx=position)


def rename(node: torch.fx.Node, name: str) -> None:
    """Give a placeholder a name, which its graph makes unique; nodes have no public way to be renamed."""
    node._rename(name)
    node.target = node.name


def current_line() -> str:
    """The line of the source noted at the node that is being run by an interpreter."""
    return traceback.get_current_meta().get("stack_trace") or "a saved graph"


# What advice names: how a program tells Dynamo something of its sizes.
SAY = "torch._check"

_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_SIZE = re.compile(r"\.size\(\)\[(\d+)\]")
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_LOCAL = re.compile(r"^L\['([^']*)'\]")
# What Dynamo calls the module that is compiled, whose parameters go by the names they have in its state dict.
_ROOT = re.compile(r"^(?:self|fn)\.")


class Input(NamedTuple):
    """What a graph is given: what it is called in the program, and whether it is a parameter or a buffer."""

    name: str
    is_state: bool


def hint(size: int | torch.SymInt) -> int | None:
    """The size at hand behind a symbol, without the guard that asking the symbol itself adds. None if unknown."""
    if isinstance(size, int):
        return size
    known = size.node.hint if size.node.has_hint() else None
    return None if known is None else int(known)


def in_program(size: torch.SymInt) -> str | None:
    """A size as the program can say it, such as `x.shape[1]`. None where it is of nothing that it was given."""
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


def inputs_of(dynamo: fx.GraphModule) -> tuple[Input, ...]:
    """What Dynamo's graph is given, by the names of the program: Dynamo notes the source of each with the node."""
    found = []
    for node in dynamo.graph.find_nodes(op="placeholder"):
        source = str(getattr(getattr(node, "_dynamo_source", None), "name", node.name))
        name = _ROOT.sub("", _LOCAL.sub(r"\1", _MEMBER.sub(r".\1", source)))
        found.append(Input(name, "._parameters[" in source or "._buffers[" in source))
    return tuple(found)


def is_state_by_itself(placeholder: fx.Node) -> bool:
    """Whether AOTAutograd says that this is a parameter or a buffer, as it does when it lifted it itself."""
    return type(placeholder.meta.get("desc")).__name__ in ("ParamAOTInput", "BufferAOTInput")
