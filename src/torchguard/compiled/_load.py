"""Compiled functions read from JSON files, without trust: nothing is unpickled, and nothing but ATen is looked up."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchguard._torch import fakes
from torchguard.compiled._encode import FORMAT, TORCH_VALUES, VERSION, operation
from torchguard.compiled._functions import CompiledOut, CompiledScalar, Signature
from torchguard.compiled._leaves import LeafType, is_there
from torchguard.compiled._listing import type_text
from torchguard.compiled._nesting import Nest, nest_of
from torchguard.compiled._trace import fakes_of, program_of
from torchguard.exceptions import SavedGraphError

_KINDS: dict[str, type[CompiledOut]] = {kind.kind: kind for kind in (CompiledOut, CompiledScalar)}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_LARGEST = 64 << 20  # bytes of a file


def load(path: str | Path, *, backend: str = "inductor", probe: bool = True) -> CompiledOut:
    """Read a compiled function from a file. Whatever the file holds, nothing but ATen operations is looked up."""
    try:
        if Path(path).stat().st_size > _LARGEST:
            raise SavedGraphError(f"load: {path} is larger than {_LARGEST >> 20} MiB.")
        read = json.loads(Path(path).read_text())
        return _decoded(read, backend, probe)
    except SavedGraphError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
        OverflowError,
        RuntimeError,
    ) as error:
        said = (str(error).strip().splitlines() or [""])[0]
        raise SavedGraphError(f"load: {path} does not hold a graph: {type(error).__name__}: {said}") from error


@fakes.with_tracing_lock
def _decoded(read: Any, backend: str, probe: bool) -> CompiledOut:
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise SavedGraphError("load: the file was not written by save().")
    if read["version"] != VERSION:
        raise SavedGraphError(f"load: the file is of version {read['version']!r}, and {VERSION} is known.")
    leaves = tuple(_decoded_leaf(leaf) for leaf in read["leaves"])
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise SavedGraphError("load: two leaves have one name.")
    graph = _decoded_graph(read["graph"], leaves, read.get("sources") or {})
    arguments = None if read["arguments"] is None else _decoded_nest(read["arguments"])
    results = _decoded_nest(read["results"])
    if arguments is not None and len(arguments.places) != len(leaves):
        raise SavedGraphError("load: the arguments do not hold as many tensors as there are leaves.")
    program = program_of(graph, _shown(read["name"])[:200], leaves)
    made = _KINDS[read["kind"]](program, Signature(arguments, lambda: results), backend=backend, probe=probe)
    if len(made.graphs.outputs) != len(results.places):
        raise SavedGraphError("load: the graph does not return as many tensors as its results hold.")
    return made


def _decoded_leaf(read: dict[str, Any]) -> LeafType:
    shape, stride = tuple(map(_count, read["shape"])), tuple(map(_count, read["stride"]))
    if len(shape) != len(stride):
        raise SavedGraphError(f"load: leaf {read['name']!r} has {len(shape)} sizes and {len(stride)} strides.")
    dtype = _torch_value("dtype", read["dtype"])
    differentiable = read["differentiable"] is True and dtype.is_floating_point
    if dtype.is_complex:
        raise SavedGraphError(f"load: leaf {read['name']!r} is complex.")
    return LeafType(_shown(read["name"]), shape, dtype, _device(read["device"]), stride, differentiable)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise SavedGraphError(f"load: {value!r} is no size.")
    return value


def _decoded_graph(read: dict[str, Any], leaves: tuple[LeafType, ...], sources: dict[str, Any]) -> GraphModule:
    graph, nodes = Graph(), {}
    if len(read["inputs"]) != len(leaves):
        raise SavedGraphError("load: the graph does not take as many tensors as there are leaves.")
    for (name, _), leaf in zip(read["inputs"], leaves, strict=True):
        nodes[name] = graph.placeholder(_new_name(name, nodes))
        nodes[name].meta["val"] = leaf.fake()
    for encoded in read["nodes"]:
        name = _new_name(encoded["name"], nodes)
        target = operation(encoded["op"])
        args = tuple(_decoded_value(part, nodes) for part in encoded["args"])
        kwargs = {
            _checked_name(key): _decoded_value(part, nodes) for key, part in (encoded.get("kwargs") or {}).items()
        }
        node = nodes[name] = graph.create_node("call_function", target, args, kwargs, name=name)
        if isinstance(sources.get(name), str):
            node.stack_trace = "".join(filter(str.isprintable, sources[name]))[:300]
        values = torch.fx.map_arg((args, kwargs), lambda part: part.meta["val"])
        with fakes.fake_mode(), torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        if type_text(node.meta["val"]) != encoded["type"]:
            raise SavedGraphError(
                f"load: %{name} is {type_text(node.meta['val'])}, and the file says {encoded['type']!r}."
            )
    results = [nodes[name] for name in read["outputs"]]
    if not all(isinstance(node.meta["val"], Tensor) for node in results):
        raise SavedGraphError("load: an output is no tensor.")
    graph.output(results)
    made = GraphModule(torch.nn.Module(), graph)
    assert len(fakes_of(made)) == len(leaves)
    return made


def _decoded_value(read: Any, nodes: dict[str, Node]) -> Any:
    if isinstance(read, list):
        return [_decoded_value(part, nodes) for part in read]
    if not isinstance(read, dict):
        return read
    ((key, value),) = read.items()
    if key == "node":
        return nodes[value]
    if key == "float":
        return float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[value])
    if key == "device":
        return _device(value)
    return _torch_value(key, value)


def _device(name: Any) -> torch.device:
    device = torch.device(name)
    if not is_there(device):
        raise SavedGraphError(f"load: the file is for {device}, and this machine has no such device.")
    return device


def _torch_value(key: str, name: Any) -> Any:
    found = getattr(torch, name, None) if isinstance(name, str) and _NAME.fullmatch(name) else None
    if key not in TORCH_VALUES or not isinstance(found, TORCH_VALUES[key]):
        raise SavedGraphError(f"load: {key} {name!r} is not known.")
    return found


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SavedGraphError(f"load: {name!r} is no name.")
    return name


def _shown(name: Any) -> str:
    """A name that is only shown: whatever a terminal would not obey."""
    if not isinstance(name, str) or not name.isprintable():
        raise SavedGraphError(f"load: {name!r} is no name.")
    return name


def _new_name(name: Any, taken: dict[str, Node]) -> str:
    if _checked_name(name) in taken:
        raise SavedGraphError(f"load: %{name} is there twice.")
    return name


def _decoded_nest(read: Any) -> Nest:
    numbers: list[int] = []
    value = _decoded_part(read, numbers)
    if numbers != list(range(len(numbers))):
        raise SavedGraphError(f"load: the tensors of a value are numbered {numbers}.")
    return nest_of(value, "load: ", "")[0]


def _decoded_part(read: Any, numbers: list[int]) -> Any:
    if type(read) is int:
        numbers.append(read)
        return torch.empty(0)
    if read is None:
        return None
    ((key, value),) = read.items()
    parts = ((_shown(name), part) for name, part in value.items()) if key == "dict" else enumerate(value)
    decoded = {name: _decoded_part(part, numbers) for name, part in parts}
    return decoded if key == "dict" else {"tuple": tuple, "list": list}[key](decoded.values())
