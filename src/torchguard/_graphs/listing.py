"""Graphs as text: one operation a line, with its arguments, its type and the source line it comes from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard._graphs.codec import MAX_DEPTH, encode_argument, target_name

_SHORT_DTYPES = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}
_SHORT_DTYPES |= {"int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8"}


@dataclass(frozen=True)
class Line:
    """One operation of a graph: `%name = op(arguments) : type`, and the source line it comes from."""

    name: str
    op: str
    arguments: str
    type: str
    source: str

    def __str__(self) -> str:
        return f"%{self.name} = {self.op}({self.arguments})" + (f" : {self.type}" if self.type else "")


def short_dtype(dtype: torch.dtype | str) -> str:
    """`f32` of `torch.float32`; a dtype without a short name keeps its own."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def tensor_text(dtype: torch.dtype | str, shape: Sequence[Any]) -> str:
    """`f32[4, s0]`"""
    return f"{short_dtype(dtype)}[{', '.join(map(str, shape))}]"


def type_text(value: Any) -> str:
    """The type of a value in a graph: `f32[4, 8]`, of a tuple those of its parts."""
    if isinstance(value, Tensor):
        return tensor_text(value.dtype, value.shape)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(type_text, value))})"
    return type(value).__name__


def value_text(value: Mapping[str, Any]) -> str:
    """The type of a value as the codec encodes it, or its text where it is not a tensor."""
    if (tensor := value.get("tensor")) is not None:
        return tensor_text(tensor["dtype"], tensor["shape"])
    return str(value.get("symbol", value.get("value", "")))


def arguments_text(
    args: Sequence[Any], kwargs: Mapping[str, Any], node_text: Callable[[str], str] = "%{}".format, _depth: int = 0
) -> str:
    """Encoded arguments as text: `%x, [0, 1], dtype=f32`. `node_text` formats the names of nodes."""
    if _depth > MAX_DEPTH:  # the codec never writes this, but a file may hold anything
        return "..."

    def text(data: Any) -> str:
        if isinstance(data, list):
            return f"[{arguments_text(data, {}, node_text, _depth + 1)}]"
        if not isinstance(data, dict):
            return str(data)
        match [*data.items()]:
            case [("node", str() as name)]:
                return node_text(name)
            case [("dtype", str() as name)]:
                return short_dtype(name)
            case [("memory_format" | "layout", str() as name)]:
                return f"torch.{name}"
            case [("slice" | "complex" as kind, list() as parts)]:
                return f"{kind}({arguments_text(parts, {}, node_text, _depth + 1)})"
            case [("dict", dict() as parts)]:
                return f"{{{arguments_text((), parts, node_text, _depth + 1)}}}"
            case [(_, str() as other)]:
                return other
        return "..."

    return ", ".join([*map(text, args), *(f"{key}={text(part)}" for key, part in kwargs.items())])


def line_of(node: Mapping[str, Any]) -> Line:
    """The line of an encoded node."""
    arguments = arguments_text(node.get("args", ()), node.get("kwargs", {}))
    values = [value_text(value) for value in node["values"]]
    type = values[0] if len(values) == 1 else f"({', '.join(values)})" if values else ""
    source = "{file}:{line} in {function}".format(**node["source"]) if "source" in node else ""
    return Line(node["name"], node["target"], arguments, type, source)


def lines_of(graph: GraphModule) -> tuple[Line, ...]:
    """The operations of a graph in order."""
    return tuple(_line(node) for node in graph.graph.nodes if node.op == "call_function")


def _line(node: Node) -> Line:
    def encode(value: Any) -> Any:
        return encode_argument(value, lambda other: other.name, str)

    arguments = arguments_text([*map(encode, node.args)], {key: encode(part) for key, part in node.kwargs.items()})
    return Line(node.name, target_name(node.target), arguments, type_text(node.meta["val"]), node.stack_trace or "")


def listing_of(graph: GraphModule, name: str) -> str:
    """A graph as text."""
    nodes = list(graph.graph.nodes)
    leaves = [f"%{node.name}: {type_text(node.meta['val'])}" for node in nodes if node.op == "placeholder"]
    lines = [(str(line), line.source) for line in lines_of(graph)]
    width = min(max((len(text) for text, _ in lines), default=0), 88)
    body = [f"  {text:<{width}}  # {source}" if source else f"  {text}" for text, source in lines]
    results = ", ".join(f"%{node.name}: {type_text(node.meta['val'])}" for node in nodes[-1].args[0])
    return "\n".join([f"{name}({', '.join(leaves)}):", *body, f"  return {results}"])
