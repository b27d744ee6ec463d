"""FX graphs as data that JSON can hold, and back.

Three parts of torchguard exchange graphs with files:

- `artifacts` describes every graph that is compiled, Dynamo's included: `encode_graph`.
- `torchguard analyze` rebuilds the graphs of AOTAutograd from such a description: `decode_graph`.
- `compiled` saves a function as its forward graph and loads it again (`compiled/_save.py`, `compiled/_load.py`), with
  `target_name`, `encode_argument`, `decode_argument` and `torch_value`; its node record is its own.

The node records differ because the files have opposite purposes. An artifact describes any graph and is never executed:
its record holds the metadata of every node (tensors, symbols, source line, modules), arguments that JSON cannot hold
become text, and decoding believes the metadata. A saved function is executed: its record holds operation, arguments and
one type, an argument that JSON cannot hold is an error, only pure ATen operations are accepted, and loading recomputes
every type and compares it. One record for both would store metadata that loading must not trust.

Arguments are JSON values; what JSON lacks is an object with one key:

    {"node": "add_1"}  {"float": "-inf"}  {"complex": [0.0, 1.0]}  {"dtype": "float32"}  {"layout": "strided"}
    {"memory_format": "channels_last"}  {"device": "cuda:0"}  {"slice": [0, 2, null]}  {"dict": {"a": 1}}
    {"symbol": "s0"}  {"text": "<function f>"}

A tuple is written as a list: no operator of torch distinguishes them. `symbol` and `text` occur in artifacts only.

A file may be hostile. Nothing in it is evaluated or imported; names are looked up among torch's operators and torch's
dtypes, layouts and memory formats only; names that FX writes into Python code must be identifiers; nesting is bounded
here, and the size of a file by its reader.
"""

import keyword
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from torchguard._graphs.source_lines import lines_of_trace
from torchguard._torch.nodes import (
    ProgramCall,
    call_of,
    hint,
    op_before_decomposition,
    position_of,
    set_call,
    set_op_before_decomposition,
    set_position,
    set_source,
    source_of,
)
from torchguard._torch.ops import is_view, op_named
from torchguard.exceptions import SavedGraphError

_LONGEST_TEXT = 500  # characters of a value that is only described
MAX_DEPTH = 32  # levels of lists within the arguments of a node
_TORCH_TYPES = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Arithmetic on sizes, which stands in graphs beside the operators of torch.
_ARITHMETIC = {f"_operator.{name}": getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod")}
# What tracing copies from a node to those it is decomposed into: the entry "custom" of its meta.
_META, _META_SYMBOLS = "custom", "symbols"

NodeData = Mapping[str, Any]


# Targets: what a node calls.


def target_name(target: Any) -> str:
    """The name of what a node calls: `aten.mm.default`, `getitem`, `_operator.add`, or the name of a method."""
    if isinstance(target, str):
        return target
    if target is operator.getitem:
        return "getitem"
    name = getattr(target, "__qualname__", None)
    if name is None or hasattr(target, "namespace"):  # an operator of torch, whose str is the name users write
        return str(target)
    return f"{getattr(target, '__module__', None) or 'builtins'}.{name}"


def _find_target(name: str) -> Any:
    found = operator.getitem if name == "getitem" else _ARITHMETIC.get(name) or op_named(name)
    if found is None:
        raise SavedGraphError(f"it calls {name[:60]!r}, which is not an operator of torch.")
    return found


# Arguments.


def _refuse(value: Any) -> Any:
    raise SavedGraphError(f"an argument of type {type(value).__name__} cannot be written to a file.")


def _describe(value: Any) -> dict[str, str]:
    if isinstance(value, _SYMBOLS):
        return {"symbol": str(value)}
    return {"text": repr(value)[:_LONGEST_TEXT]}


def encode_argument(value: Any, name_of: Callable[[fx.Node], str], other: Callable[[Any], Any] = _refuse) -> Any:
    """An argument of a node as JSON can hold it.

    Args:
        name_of: the name under which a node is referred to.
        other: encodes what the codec does not know; unless given, that is a `SavedGraphError`.
    """
    if isinstance(value, fx.Node):
        return {"node": name_of(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, type_ in _TORCH_TYPES.items():
        if isinstance(value, type_):
            return {kind: str(value).removeprefix("torch.")}

    def encode(part: Any) -> Any:
        return encode_argument(part, name_of, other)

    if isinstance(value, (tuple, list)):
        return [encode(part) for part in value]
    if isinstance(value, slice):
        return {"slice": [encode(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(part) for key, part in value.items()}}
    return other(value)


def decode_argument(
    data: Any,
    nodes: Mapping[str, fx.Node],
    sizes: Mapping[str, int] = MappingProxyType({}),
    _depth: int = 0,
) -> Any:
    """An argument from what `encode_argument` made of it. Raises SavedGraphError for anything else.

    Args:
        nodes: the nodes that may be referred to, by name.
        sizes: the numbers that symbols stand for.
    """
    if _depth > MAX_DEPTH:
        raise SavedGraphError(f"its arguments are nested more than {MAX_DEPTH} levels deep.")

    def decode(part: Any) -> Any:
        return decode_argument(part, nodes, sizes, _depth + 1)

    if isinstance(data, list):
        return [decode(part) for part in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise SavedGraphError(f"an argument has the keys {sorted(data)!r:.60}, expected one key.")
    ((kind, value),) = data.items()
    match kind, value:
        case "node", str() if value in nodes:
            return nodes[value]
        case "node", _:
            raise SavedGraphError(f"it takes {value!r:.60}, which is not an earlier node.")
        case "float", "inf" | "-inf" | "nan":
            return float(value)
        case "device", str():
            return torch.device(value)
        case "slice", [start, stop, step]:
            return slice(decode(start), decode(stop), decode(step))
        case "complex", [real, imag]:
            return complex(decode(real), decode(imag))
        case "dict", dict():
            return {key: decode(part) for key, part in value.items()}
        case "symbol", str():
            return _size(value, sizes)
    return torch_value(kind, value)


def torch_value(kind: str, name: Any) -> Any:
    """A dtype, memory format or layout by its name in torch."""
    found = vars(torch).get(name) if isinstance(name, str) else None  # getattr would import submodules
    if kind not in _TORCH_TYPES or not isinstance(found, _TORCH_TYPES[kind]):
        raise SavedGraphError(f"{kind!r:.60}: {name!r:.60} is not a value that torchguard reads.")
    return found


# Graphs as artifacts describe them.


def encode_graph(graph: fx.GraphModule) -> dict[str, Any]:
    """The nodes of a graph and of the graphs within it, and the numbers its symbolic sizes stand for."""
    nodes = [_encode_node(node, prefix) for prefix, node in _all_nodes(graph)]
    return {"nodes": nodes, "sizes": _concrete_sizes(graph)}


def _all_nodes(graph: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """All nodes, those of graphs within the graph too, each with the path of its graph."""
    for path, module in graph.named_modules():
        if isinstance(module, fx.GraphModule):
            yield from ((f"{path}." if path else "", node) for node in module.graph.nodes)


def _concrete_sizes(graph: fx.GraphModule) -> dict[str, int]:
    """The numbers that symbols, and expressions of them, stood for during compilation, as far as they are known."""
    found: dict[str, int] = {}
    for _, node in _all_nodes(graph):
        for value in values_of(node):
            sizes = [*value.shape, *(_strides(value) or ())] if isinstance(value, Tensor) else [value]
            for size in sizes:
                if isinstance(size, torch.SymInt) and (number := hint(size)) is not None:
                    found[str(size)] = number
    return found


def values_of(node: fx.Node) -> list[Any]:
    """The values that a node has in tracing. AOTAutograd notes them as `val`, Dynamo as `example_value`."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _encode_node(node: fx.Node, prefix: str) -> dict[str, Any]:
    def name_of(other: fx.Node) -> str:
        return prefix + other.name

    found: dict[str, Any] = {
        "name": name_of(node),
        "op": node.op,
        "target": target_name(node.target),
        "inputs": [name_of(one) for one in node.all_input_nodes],
        "values": [encode_value(one) for one in values_of(node)],
    }
    if node.op == "placeholder":
        if source := source_of(node):
            found["origin"] = source
        if (position := position_of(node)) is not None:
            found["position"] = position
    else:
        found["args"] = [encode_argument(one, name_of, _describe) for one in node.args]
        if node.kwargs:
            found["kwargs"] = {key: encode_argument(one, name_of, _describe) for key, one in node.kwargs.items()}
    if lines := lines_of_trace(node.meta.get("stack_trace") or ""):
        found["source"] = asdict(lines[-1])
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if modules:
        found["modules"] = [{"path": str(path), "type": _type_name(kind)} for path, kind in modules.values()]
    if (call := call_of(node)) is not None:
        found["call"] = {"name": call.name, "called": call.called}
    if node.op == "call_function" and (before := op_before_decomposition(node)) != str(node.target):
        found["decomposed_from"] = before
    if isinstance(sequence := node.meta.get("seq_nr"), int):
        found["sequence"] = sequence
    return found


def encode_value(value: Any) -> dict[str, Any]:
    """What is known of a value in tracing: a tensor's metadata, the text of a symbol, or other text."""
    if isinstance(value, Tensor):
        return {"tensor": _encode_tensor(value)}
    if isinstance(value, _SYMBOLS):
        return {"symbol": str(value)}
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return {"value": (repr(value) if is_plain else type(value).__name__)[:_LONGEST_TEXT]}


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    found = {
        "shape": [_encode_size(one) for one in tensor.shape],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
    }
    if (strides := _strides(tensor)) is not None:
        found["stride"] = [_encode_size(one) for one in strides]
    return found


def _strides(tensor: Tensor) -> tuple[int | torch.SymInt, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else None


def _encode_size(size: int | torch.SymInt) -> int | str:
    # A symbol as text: comparing it with anything would add a guard.
    return size if type(size) is int else str(size)


def _type_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def decode_graph(data: Mapping[str, Any]) -> fx.GraphModule:
    """A graph from what `encode_graph` made of it, with tensors in its metadata and the user's source lines.

    Call it where new tensors are fake: they are as large as the file says. Symbolic sizes become the numbers they stood
    for; `symbols_of` has their names. Raises SavedGraphError where something cannot be rebuilt.
    """
    graph, root, sizes = fx.Graph(), torch.nn.Module(), data["sizes"]
    nodes: dict[str, fx.Node] = {}
    for one in data["nodes"]:
        try:
            node = _decode_node(graph, one, nodes, sizes)
            node.meta["val"] = _decode_values(one, node, sizes)
            if node.op == "get_attr":
                root.register_buffer(one["target"], node.meta["val"])
        except Exception as error:  # a file may say anything, and torch refuses it in many ways
            raise SavedGraphError(f"{one['name']!r:.60}: {error}") from error
        _note_symbols(node, one["values"])
        if source := one.get("source"):
            where = f'File "{source["file"]}", line {source["line"]}, in {source["function"]}'
            node.meta["stack_trace"] = f"  {where}\n    {source['text']}\n"
        if call := one.get("call"):
            set_call(node, ProgramCall(**call))
        if before := one.get("decomposed_from"):
            set_op_before_decomposition(node, before)
        nodes[one["name"]] = node
    return fx.GraphModule(root, graph)


def decode_inputs(data: Mapping[str, Any]) -> fx.GraphModule:
    """The inputs of Dynamo's graph, without the rest: they have the users' names, and say which are parameters."""
    graph = fx.Graph()
    for one in data["nodes"]:
        if one["op"] == "placeholder" and "." not in one["name"]:  # and not of a graph within it
            node = graph.placeholder(_identifier(one["name"]))
            if "origin" in one:
                set_source(node, one["origin"])
    graph.output(())
    return fx.GraphModule({}, graph)


def symbols_of(node: fx.Node) -> tuple[str, ...]:
    """The symbolic sizes that the values of a decoded node had when it was compiled."""
    return tuple(node.meta.get(_META, {}).get(_META_SYMBOLS, ()))


def _note_symbols(node: fx.Node, values: list[NodeData]) -> None:
    sizes = [size for value in values for size in value.get("tensor", {}).get("shape", ()) if isinstance(size, str)]
    symbols = [*sizes, *(value["symbol"] for value in values if "symbol" in value)]
    if symbols:
        node.meta[_META] = {_META_SYMBOLS: symbols}


def _decode_node(graph: fx.Graph, one: NodeData, nodes: Mapping[str, fx.Node], sizes: Mapping[str, int]) -> fx.Node:
    name = _identifier(one["name"])
    if one["op"] == "placeholder":
        node = graph.placeholder(name)
        if "position" in one:
            set_position(node, one["position"])
        return node
    if one["op"] == "get_attr" and any("tensor" in value for value in one["values"]):  # and not a graph within it
        return graph.create_node("get_attr", _identifier(one["target"]), name=name)
    if one["op"] not in ("call_function", "output"):
        raise SavedGraphError(f"it is a {one['op']}, which is not a call of an operator.")
    target = "output" if one["op"] == "output" else _find_target(one["target"])
    args = tuple(decode_argument(part, nodes, sizes) for part in one.get("args", ()))
    kwargs = {_identifier(key): decode_argument(part, nodes, sizes) for key, part in one.get("kwargs", {}).items()}
    return graph.create_node(one["op"], target, args, kwargs, name=name)


def _identifier(name: str) -> str:
    """A name that FX writes into the code of a graph, which Python then runs."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise SavedGraphError(f"{name[:60]!r} is not an identifier.")
    return name


def _decode_values(one: NodeData, node: fx.Node, sizes: Mapping[str, int]) -> Any:
    """What a node returns. A view shares the storage of the tensor it is a view of."""
    if node.target is operator.getitem:
        source, index = node.args
        return source.meta["val"][index]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    first = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else None
    is_shared = node.op == "call_function" and isinstance(first, Tensor) and is_view(node.target)
    made = [_decode_value(value, sizes, first if is_shared else None) for value in one["values"]]
    return made[0] if len(made) == 1 else tuple(made) if made else None


def _decode_value(value: NodeData, sizes: Mapping[str, int], base: Tensor | None) -> Tensor | int | None:
    if "symbol" in value:
        return _size(value["symbol"], sizes)
    tensor = value.get("tensor")
    if tensor is None:
        return None
    shape, stride = ([_size(size, sizes) for size in tensor[name]] for name in ("shape", "stride"))
    dtype = torch_value("dtype", tensor["dtype"])
    if base is not None and base.dtype == dtype:
        return base.as_strided(shape, stride)
    return torch.empty_strided(shape, stride, dtype=dtype, device=tensor["device"])


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    if size not in sizes:
        raise SavedGraphError(f"its size {size[:60]} was not known when it was compiled.")
    return sizes[size]
