"""Compiled functions read from JSON files that are not trusted: only pure ATen operations are looked up and run."""

import json
import operator
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchguard._graphs.codec import decode_argument, torch_value
from torchguard._graphs.listing import type_text
from torchguard._pytrees import PytreeSpec, flatten_tensors
from torchguard._torch import fakes, tensors
from torchguard.compiled._allowed import check_arguments
from torchguard.compiled._functions import CallStructure, CompiledOut, CompiledScalar
from torchguard.compiled._leaves import LeafType, is_available
from torchguard.compiled._save import FORMAT, VERSION, find_operation
from torchguard.compiled._trace import fakes_of, program_of
from torchguard.exceptions import SavedGraphError

_KINDS: dict[str, type[CompiledOut]] = {kind.kind: kind for kind in (CompiledOut, CompiledScalar)}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_LARGEST = 64 << 20  # bytes of a file
# What Python and torch raise for data of another form than expected.
_MALFORMED = (
    *(ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError),
    AssertionError,  # of torch's functions that derive types
)


def load(path: str | Path, *, backend: str = "inductor", probe: bool = True) -> CompiledOut:
    """Read a compiled function from a file. Whatever the file holds, only pure ATen operations are looked up."""
    try:
        if Path(path).stat().st_size > _LARGEST:
            raise SavedGraphError(f"it is larger than {_LARGEST >> 20} MiB.")
        return _decode(json.loads(Path(path).read_text()), backend, probe)
    except SavedGraphError as error:
        raise SavedGraphError(f"load: {path}: {error}") from error
    except _MALFORMED as error:
        message = (str(error).strip().splitlines() or [""])[0]
        raise SavedGraphError(f"load: {path} does not hold a graph: {type(error).__name__}: {message}") from error


@fakes.with_tracing_lock
def _decode(data: Any, backend: str, probe: bool) -> CompiledOut:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise SavedGraphError("the file was not written by save().")
    if data["version"] != VERSION:
        raise SavedGraphError(f"expected version {VERSION} of the format, got {data['version']!r:.60}.")
    leaves = tuple(_decode_leaf(leaf) for leaf in data["leaves"])
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise SavedGraphError("two leaves have the same name.")
    graph = _decode_graph(data["graph"], leaves, data.get("sources") or {})
    arguments = None if data["arguments"] is None else _decode_nest(data["arguments"])
    results = _decode_nest(data["results"])
    if arguments is not None and len(arguments.positions) != len(leaves):
        raise SavedGraphError(
            f"the arguments hold {len(arguments.positions)} tensors, but there are {len(leaves)} leaves."
        )
    program = program_of(graph, _printable(data["name"])[:200], leaves)
    made = _KINDS[data["kind"]](program, CallStructure(arguments, lambda: results), backend=backend, probe=probe)
    if (outputs := len(made.graphs.outputs)) != len(results.positions):
        raise SavedGraphError(f"the graph returns {outputs} tensors, but the results hold {len(results.positions)}.")
    return made


def _decode_leaf(data: dict[str, Any]) -> LeafType:
    shape, stride = tuple(map(_size, data["shape"])), tuple(map(_size, data["stride"]))
    if len(shape) != len(stride):
        raise SavedGraphError(f"leaf {data['name']!r} has {len(shape)} sizes but {len(stride)} strides.")
    dtype = torch_value("dtype", data["dtype"])
    differentiable = data["differentiable"] is True and dtype.is_floating_point
    if dtype.is_complex:
        raise SavedGraphError(f"leaf {data['name']!r} is complex.")
    device = _require_device(torch.device(data["device"]))
    return LeafType(_printable(data["name"]), shape, dtype, device, stride, differentiable)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise SavedGraphError(f"{value!r:.60} is not a size.")
    return value


def _decode_graph(data: dict[str, Any], leaves: tuple[LeafType, ...], sources: dict[str, Any]) -> GraphModule:
    graph, nodes = Graph(), {}
    if len(data["inputs"]) != len(leaves):
        raise SavedGraphError(f"the graph has {len(data['inputs'])} inputs, but there are {len(leaves)} leaves.")
    for (name, _), leaf in zip(data["inputs"], leaves, strict=True):
        nodes[name] = graph.placeholder(_new_name(name, nodes))
        nodes[name].meta["val"] = leaf.fake()
    for encoded in data["nodes"]:
        name = _new_name(encoded["name"], nodes)
        try:
            nodes[name] = _decode_node(graph, name, encoded, nodes)
        except SavedGraphError as error:
            raise SavedGraphError(f"%{name}: {error}") from error
        if isinstance(sources.get(name), str):
            nodes[name].stack_trace = "".join(filter(str.isprintable, sources[name]))[:300]
    results = [nodes[name] for name in data["outputs"]]
    if not all(isinstance(node.meta["val"], Tensor) for node in results):
        raise SavedGraphError("an output is not a tensor.")
    graph.output(results)
    made = GraphModule(torch.nn.Module(), graph)
    assert len(fakes_of(made)) == len(leaves)
    return made


def _decode_node(graph: Graph, name: str, data: dict[str, Any], nodes: dict[str, Node]) -> Node:
    """A node whose type, computed anew by its operation on fake tensors, is the one in the file."""
    operation = find_operation(data["op"])
    args = tuple(decode_argument(part, nodes) for part in data["args"])
    kwargs = {_identifier(key): decode_argument(part, nodes) for key, part in (data.get("kwargs") or {}).items()}
    for part in tensors.flatten((args, kwargs))[0]:
        if isinstance(part, torch.device):
            _require_device(part)
    node = graph.create_node("call_function", operation, args, kwargs, name=name)
    values = torch.fx.map_arg((args, kwargs), lambda part: part.meta["val"])
    if operation is not operator.getitem:
        check_arguments(operation, *values)
    with fakes.fake_mode(), torch.no_grad():
        node.meta["val"] = operation(*values[0], **values[1])
    if (computed := type_text(node.meta["val"])) != data["type"]:
        raise SavedGraphError(f"the file says {data['type']!r:.200}, but its type is {computed}.")
    return node


def _require_device(device: torch.device) -> torch.device:
    if not is_available(device):
        raise SavedGraphError(f"the file needs the device {device}, which this machine does not have.")
    return device


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SavedGraphError(f"{name!r:.200} is not a name.")
    return name


def _printable(name: Any) -> str:
    """A name that is only displayed: it must not hold control characters, which could drive a terminal."""
    if not isinstance(name, str) or not name.isprintable():
        raise SavedGraphError(f"{name!r:.200} is not a name.")
    return name


def _new_name(name: Any, taken: dict[str, Node]) -> str:
    if _identifier(name) in taken:
        raise SavedGraphError(f"two nodes are called %{name}.")
    return name


def _decode_nest(data: Any) -> PytreeSpec:
    numbers: list[int] = []
    value = _decode_part(data, numbers)
    if numbers != list(range(len(numbers))):
        raise SavedGraphError(f"the tensors of a value are numbered {numbers}, expected 0 to {len(numbers) - 1}.")
    return flatten_tensors(value, "load: ", "")[0]


def _decode_part(data: Any, numbers: list[int]) -> Any:
    if type(data) is int:
        numbers.append(data)
        return torch.empty(0)
    if data is None:
        return None
    ((key, value),) = data.items()
    parts = ((_printable(name), part) for name, part in value.items()) if key == "dict" else enumerate(value)
    decoded = {name: _decode_part(part, numbers) for name, part in parts}
    return decoded if key == "dict" else {"tuple": tuple, "list": list}[key](decoded.values())
