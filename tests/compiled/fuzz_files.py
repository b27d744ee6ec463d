"""Loads and runs random graphs, operation by operation, as a hostile file may hold them.

`fuzz_files.py SEED COUNT [--show]`, where `--show` prints each graph before it is loaded.

It is run in a process of its own, which a kernel may crash. What torchguard refuses, and what torch raises, is fine.
"""

import contextlib
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from torchguard._graphs.listing import type_text
from torchguard._torch import fakes, ops
from torchguard.compiled import load
from torchguard.compiled._allowed import check_arguments, is_allowed

SHAPES = [(3, 4), (2, 3, 4, 4), (3, 3), (4,), (1, 2, 5), (2, 2, 3, 3, 3), (0, 3), ()]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8]
INTEGERS = [-1, 0, 1, 2, 3, 4, 5, 7, 64, -2, -5, 1000, 2**31, -(2**31), 2**40, 2**62]
MANY = 10**6
FLOATS = [0.0, 1.0, -1.0, 0.5, 2.0, 1e-300, 1e300, float("inf"), float("nan")]


NAMED = {
    "ScalarType": ["float32", "float64", "int64", "bool", "complex64", "bfloat16", "uint8"],
    "Layout": ["strided", "sparse_coo", "sparse_csr"],
    "Device": ["cpu", "meta"],
    "MemoryFormat": ["contiguous_format", "channels_last"],
}


KEYS = {"ScalarType": "dtype", "Layout": "layout", "Device": "device", "MemoryFormat": "memory_format"}


def random_argument(rng: random.Random, kind: str, leaves: list[str]) -> Any:
    """A value of a type of torch's schemas, in the terms of a file."""
    small = rng.random() < 0.8
    integers, floats = (INTEGERS[:8], FLOATS[:5]) if small else (INTEGERS, FLOATS)
    number = lambda: rng.choice(floats)  # noqa: E731
    encoded = lambda x: x if x == x and abs(x) != float("inf") else {"float": repr(x)}  # noqa: E731
    if kind.startswith("Optional["):
        return None if rng.random() < 0.5 else random_argument(rng, kind[9:-1], leaves)
    if kind.startswith("List["):
        return [random_argument(rng, kind[5:-1], leaves) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
    if kind == "Tensor":
        return {"node": rng.choice(leaves)}
    if kind in NAMED and small:
        return {KEYS[kind]: rng.choice(NAMED[kind])}
    if kind in ("int", *NAMED):
        return rng.choice(integers)
    if kind == "float":
        return encoded(number())
    if kind in ("number", "Scalar"):
        return rng.choice([rng.choice(integers), encoded(number()), rng.random() < 0.5])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "str":
        return rng.choice(["none", "mean", "sum", "prod", "amax", "floor", "L", "reduced", "tanh", "x"])
    return None


def random_file(rng: random.Random, name: str) -> dict[str, Any]:
    operation = ops.op_named(name)
    leaves = [f"x{i}" for i in range(4)]
    shape = rng.choice(SHAPES)
    types = [(rng.choice([shape, rng.choice(SHAPES)]), rng.choice(DTYPES)) for _ in leaves]
    with fakes.fake_mode():
        values = {leaf: torch.empty(size, dtype=dtype) for leaf, (size, dtype) in zip(leaves, types, strict=True)}
    arguments = ops.schema_of(operation).arguments
    encoded = [random_argument(rng, str(argument.real_type), leaves) for argument in arguments]
    # Optional trailing arguments are often left out.
    required = sum(not argument.has_default_value() for argument in arguments)
    encoded = encoded[: rng.randint(required, len(arguments))]
    positional = [part for part, argument in zip(encoded, arguments, strict=False) if not argument.kwarg_only]
    named = {a.name: part for part, a in zip(encoded, arguments, strict=False) if a.kwarg_only and part is not None}
    node = {"name": "y", "op": name, "args": positional, "kwargs": named, "type": ""}
    with contextlib.suppress(Exception), fakes.fake_mode():
        args, kwargs = values_of(positional, values), {name: values_of(part, values) for name, part in named.items()}
        check_arguments(operation, args, kwargs)
        found = operation(*args, **kwargs)
        tensors = [found] if isinstance(found, torch.Tensor) else found
        if sum(one.numel() for one in tensors) < MANY:  # memory and time are not what is tested
            node["type"] = type_text(found)
    nodes, outputs = [node], ["y"]
    if node["type"].startswith("("):
        first = node["type"][1:].split("), ")[0].split("], ")[0]
        first = first if first.endswith("]") else f"{first.rstrip(')')}]" if "[" in first else first
        nodes.append({"name": "z", "op": "getitem", "args": [{"node": "y"}, 0], "type": first})
        outputs = ["z"]
    return {
        "format": "torchguard.compiled",
        "version": 1,
        "kind": "out",
        "name": "f",
        "leaves": [
            {
                "name": leaf,
                "shape": list(values[leaf].shape),
                "stride": list(values[leaf].stride()),
                "dtype": str(values[leaf].dtype).removeprefix("torch."),
                "device": "cpu",
                "differentiable": values[leaf].is_floating_point(),
            }
            for leaf in leaves
        ],
        "graph": {
            "inputs": [[leaf, type_text(values[leaf])] for leaf in leaves],
            "nodes": nodes,
            "outputs": outputs,
        },
        "sources": {},
        "arguments": None,
        "results": {"list": [0]},
    }


def values_of(part: Any, values: dict[str, torch.Tensor]) -> Any:
    if isinstance(part, list):
        return [values_of(one, values) for one in part]
    if not isinstance(part, dict):
        return part
    ((kind, value),) = part.items()
    read = {"node": values.get, "float": float, "device": torch.device}
    return read[kind](value) if kind in read else getattr(torch, value)


def random_values(rng: random.Random, data: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    made = []
    for leaf in data["leaves"]:
        dtype, shape = getattr(torch, leaf["dtype"]), leaf["shape"]
        wide = torch.randint(-3, 6, shape, generator=generator)
        wild = torch.randint(-(2**40), 2**40, shape, generator=generator)
        made.append((wide if rng.random() < 0.7 else wild).to(dtype))
    return made


def main(seed: int, count: int) -> None:
    rng = random.Random(seed)
    names = [name for name in ops.op_names() if (found := ops.op_named(name)) is not None and is_allowed(found)]
    loaded = ran = 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "graph.json"
        for i in range(count):
            name = names[i % len(names)] if count >= len(names) else rng.choice(names)
            data = random_file(rng, name)
            path.write_text(json.dumps(data))
            if "--show" in sys.argv:
                sys.stdout.write(f"{json.dumps(data['graph'])}\n")
                sys.stdout.flush()
            try:
                c = load(path, backend="eager", probe=False)
            except Exception as error:
                if type(error).__module__.split(".")[0] not in ("torchguard", "builtins", "torch"):
                    raise
                continue
            loaded += 1
            with contextlib.suppress(Exception):
                x = random_values(rng, data)
                c(*x)
                ran += 1
                w = [torch.ones_like(y) if y.is_floating_point() else None for y in c(*x)]
                c.vjp_with_seed(tuple(x), w)
    sys.stdout.write(f"{count} files, {loaded} loaded, {ran} run\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
