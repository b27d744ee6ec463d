"""A graph made again from an artifact, for rules and memory plans to look at: its ops, and tensors without memory.

Arguments of a node, read back from their text. Nothing is evaluated: what is not known to be harmless is refused.
"""

import ast
import keyword
import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import torchguard._watch  # noqa: F401  # its operators stand in graphs of watched models
from torchguard._torch.fakes import fake_tensors
from torchguard._torch.nodes import set_position, set_source
from torchguard._torch.ops import is_view, op_named
from torchguard.cli._symbols import note_symbols
from torchguard.cli._terminal import CommandError
from torchguard.cli._trace import Pair

if TYPE_CHECKING:
    from torchguard.artifacts import Artifact


_NUMBERS = {"inf": math.inf, "nan": math.nan}
_SETTINGS = (torch.dtype, torch.layout, torch.memory_format)


def arguments(text: str, nodes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(x, [0, 1]) {'dtype': torch.float32}` as args and kwargs, names standing for `nodes`.

    Raises ValueError for anything that is not of this kind, a text that was cut short among it.
    """
    head, brace, tail = text.rpartition(") {")
    positional, named = (f"{head})", f"{{{tail}") if brace and text.endswith("}") else (text, "{}")
    try:
        return _read(_parsed(positional), nodes), _read(_parsed(named), nodes)
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two where it is nested too deeply
        raise ValueError(f"{text[:60]!r} was cut short, or was never written by torchguard") from error


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _read(one: ast.expr, nodes: Mapping[str, Any]) -> Any:
    match one:
        case ast.Constant():
            return one.value
        case ast.Tuple():
            return tuple(_read(item, nodes) for item in one.elts)
        case ast.List():
            return [_read(item, nodes) for item in one.elts]
        case ast.Dict():
            return {
                _read(k, nodes): _read(v, nodes) for k, v in zip(one.keys, one.values, strict=True) if k is not None
            }
        case ast.UnaryOp(op=ast.USub()):
            return -_read(one.operand, nodes)
        case ast.Name() if one.id in nodes:
            return nodes[one.id]
        case ast.Name() if one.id in _NUMBERS:
            return _NUMBERS[one.id]
        case ast.Attribute(value=ast.Name(id="torch")) if isinstance(getattr(torch, one.attr, None), _SETTINGS):
            return getattr(torch, one.attr)
        case ast.Call(func=ast.Name(id="device")):
            given = {keyword.arg: _read(keyword.value, nodes) for keyword in one.keywords if keyword.arg}
            return torch.device(*(given[name] for name in ("type", "index") if name in given))
        case ast.Call(func=ast.Name(id="slice")):
            return slice(*(_read(argument, nodes) for argument in one.args))
    raise ValueError(f"{ast.unparse(one)[:60]!r} is not known")


# What calculates with sizes, beside the ops.
_OPERATORS = {
    f"_operator.{name}": getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "mod")
}

Node = Mapping[str, Any]


def pairs_in(artifact: "Artifact") -> list[Pair]:
    """The graphs of AOTAutograd that an artifact has, each forward with its backward."""
    manifest = artifact.manifest()
    files = {one["name"]: one["files"]["json"] for one in manifest["graphs"] if "json" in one["files"]}
    dynamo = inputs_again(artifact.read_json(files.pop("dynamo"))) if "dynamo" in files else None
    with fake_tensors():
        read = {name: artifact.read_json(file) for name, file in files.items()}
        built = {name: rebuilt(data) for name, data in read.items()}
    return [
        Pair(
            manifest["compile_id"],
            graph,
            built.get(f"backward{name.removeprefix('forward')}") if name.startswith("forward") else None,
            dynamo,
            read[name]["sizes"],
        )
        for name, graph in built.items()
        if name.startswith(("forward", "inference"))
    ]


def inputs_again(data: Mapping[str, Any]) -> fx.GraphModule:
    """Of Dynamo's graph what it is given, which tells the names of inputs, and which are parameters."""
    graph = fx.Graph()
    for one in data["nodes"]:
        if one["op"] == "placeholder" and "." not in one["name"]:  # and not of a graph within it
            node = graph.placeholder(_identifier(one["name"]))
            if "origin" in one:
                set_source(node, one["origin"])
    graph.output(())
    return fx.GraphModule({}, graph)


def rebuilt(data: Mapping[str, Any]) -> fx.GraphModule:
    """A graph from what an artifact says of it; to be called where tensors are fake."""
    graph, root, sizes = fx.Graph(), torch.nn.Module(), data["sizes"]
    nodes: dict[str, fx.Node] = {}
    for one in data["nodes"]:
        try:
            node = _node(graph, one, nodes)
            node.meta["val"] = _value(one, node, sizes)
            if node.op == "get_attr":
                root.register_buffer(one["target"], node.meta["val"])
        except Exception as error:  # an artifact may say anything, and torch refuses it in many ways
            raise CommandError(
                f"{one['name']} of the {data['name']} graph cannot be made again from an artifact: {error}. "
                "Give package.module:callable instead."
            ) from error
        note_symbols(node, one["values"])
        if source := one.get("source"):
            place = f'File "{source["file"]}", line {source["line"]}, in {source["function"]}'
            node.meta["stack_trace"] = f"  {place}\n    {source['text']}\n"
        nodes[one["name"]] = node
    return fx.GraphModule(root, graph)


def _node(graph: fx.Graph, one: Node, nodes: Mapping[str, fx.Node]) -> fx.Node:
    if one["op"] == "placeholder":
        node = graph.placeholder(_identifier(one["name"]))
        if "position" in one:
            set_position(node, one["position"])
        return node
    if one["op"] == "get_attr" and any("tensor" in value for value in one["values"]):  # and no graph within the graph
        return graph.create_node("get_attr", _identifier(one["target"]), name=one["name"])
    if one["op"] == "output":
        return graph.output(tuple(nodes[name] for name in one["inputs"]))
    target = _OPERATORS.get(one["target"]) or op_named(one["target"])
    if one["op"] != "call_function" or target is None:
        raise ValueError(f"it calls {one['target']}, which is no op")
    args, kwargs = arguments(one["args"], nodes)
    return graph.create_node("call_function", target, args, kwargs, name=one["name"])


def _identifier(name: str) -> str:
    """A name that goes into the code of a graph, which Python runs: one that is more than a name is refused."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name[:60]!r} is no name")
    return name


def _value(one: Node, node: fx.Node, sizes: Mapping[str, int]) -> Any:
    """What a node gives. What is a view shares the memory of what it is a view of."""
    if node.target is operator.getitem:
        source, index = node.args
        return source.meta["val"][index]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    first = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else None
    is_shared = node.op == "call_function" and isinstance(first, Tensor) and is_view(node.target)
    made = [_made(value, sizes, first if is_shared else None) for value in one["values"]]
    return made[0] if len(made) == 1 else tuple(made) if made else None


def _made(value: Mapping[str, Any], sizes: Mapping[str, int], base: Tensor | None) -> Tensor | int | None:
    if "symbol" in value:
        return _size(value["symbol"], sizes)
    told = value.get("tensor")
    if told is None:
        return None
    shape, stride = ([_size(size, sizes) for size in told[name]] for name in ("shape", "stride"))
    dtype = getattr(torch, told["dtype"])
    if base is not None and base.dtype == dtype:
        return base.as_strided(shape, stride)
    return torch.empty_strided(shape, stride, dtype=dtype, device=told["device"])


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    """A size, of symbols the one that was at hand."""
    if isinstance(size, int):
        return size
    if size not in sizes:
        raise ValueError(f"its size {size} was not known when it was compiled")
    return sizes[size]
