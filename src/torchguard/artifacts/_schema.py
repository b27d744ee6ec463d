"""The schema of the JSON files in an artifact, as data, and a validator.

The schema uses the few keywords of JSON Schema that `problem_with` implements; `names` and `values` are its own, for
the keys and values of an object with arbitrary keys.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SCHEMA_VERSION = 2
# Manifests of these versions are read. In version 1 the arguments of a node were text: its graphs are not read.
READABLE_VERSIONS = (1, SCHEMA_VERSION)
MARKER = "torchguard artifact"

Schema = Mapping[str, Any]

# File names without a directory: a path in a manifest cannot lead out of the directory of the artifact.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}"
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_FILE_NAME: Schema = {"type": "string", "pattern": NAME}


def _record(required: Schema, optional: Schema = MappingProxyType({})) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


_TENSOR = _record(
    {"shape": {"type": "array", "items": {"type": ["integer", "string"]}}, "dtype": _TEXT, "device": _TEXT},
    {"stride": {"type": "array", "items": {"type": ["integer", "string"]}}, "requires_grad": {"type": "boolean"}},
)
_VALUE = _record({}, {"tensor": _TENSOR, "symbol": _TEXT, "value": _TEXT})
_SOURCE_LINE = _record({"file": _TEXT, "line": _COUNT, "function": _TEXT, "text": _TEXT})
_NODE = _record(
    {
        "name": _TEXT,
        "op": {
            "type": "string",
            "enum": ["placeholder", "get_attr", *(f"call_{k}" for k in ("function", "method", "module")), "output"],
        },
        "target": _TEXT,
        "inputs": _TEXTS,
        "values": {"type": "array", "items": _VALUE},
    },
    {
        "args": {"type": "array"},
        "kwargs": {"type": "object"},
        "origin": _TEXT,
        "position": _COUNT,
        "source": _SOURCE_LINE,
        "modules": {"type": "array", "items": _record({"path": _TEXT, "type": _TEXT})},
        "call": _record({"name": _TEXT, "called": _TEXT}),
        "sequence": {"type": "integer"},
    },
)
_GUARD = _record({"source": _TEXT, "type": _TEXT, "code": _TEXT, "line": _TEXT})

SCHEMA: Mapping[str, Schema] = MappingProxyType(
    {
        "manifest": _record(
            {
                "marker": {"type": "string", "enum": [MARKER]},
                "schema": {"type": "integer", "enum": list(READABLE_VERSIONS)},
                "id": _TEXT,
                "created": _TEXT,
                "compile_id": _TEXT,
                "function": _TEXT,
                "file": _TEXT,
                "line": _COUNT,
                "backend": _TEXT,
                "pid": _COUNT,
                "graphs": {
                    "type": "array",
                    "items": _record(
                        {
                            "name": _FILE_NAME,
                            "kind": {"type": "string", "enum": ["dynamo", "forward", "backward", "inference"]},
                            "nodes": _COUNT,
                            "files": {"type": "object", "values": _FILE_NAME},
                        }
                    ),
                },
                "files": {
                    "type": "object",
                    "names": NAME,
                    "values": _record(
                        {"bytes": _COUNT, "sha256": {"type": "string", "pattern": "[0-9a-f]{64}"}},
                        {"attached_as": _TEXT},
                    ),
                },
                "waiting_for": _TEXTS,
                "notes": _TEXTS,
            }
        ),
        "graph": _record(
            {
                "schema": {"type": "integer"},
                "name": _TEXT,
                "kind": _TEXT,
                "nodes": {"type": "array", "items": _NODE},
                "sizes": {"type": "object", "values": {"type": "integer"}},
            }
        ),
        "guards": _record(
            {"schema": {"type": "integer"}, "count": _COUNT, "guards": {"type": "array", "items": _GUARD}}
        ),
        "recompiles": _record(
            {
                "schema": {"type": "integer"},
                "recompiled_for": {
                    "type": "array",
                    "items": _record(
                        {
                            "compile_id": _TEXT,
                            "failures": {
                                "type": "array",
                                "items": _record({"guard": _GUARD, "now": _TEXT, "why": _TEXT}),
                            },
                        }
                    ),
                },
                "graph_breaks": {
                    "type": "array",
                    "items": _record(
                        {
                            "file": _TEXT,
                            "line": _COUNT,
                            "reason": _TEXT,
                            "hints": _TEXTS,
                            "stack": {"type": "array", "items": _SOURCE_LINE},
                        }
                    ),
                },
            }
        ),
        "environment": _record(
            {
                "schema": {"type": "integer"},
                "versions": {"type": "object", "values": _TEXT},
                "platform": {"type": "object", "values": _TEXT},
                "variables": {"type": "object", "values": _TEXT},
                "torch": {"type": "object", "values": _TEXT},
            }
        ),
    }
)

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


def problem_with(value: Any, schema: Schema, at: str = "") -> str:
    """What about a parsed JSON value violates a schema, in words; empty if nothing does. `at` is its path."""
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(
        isinstance(value, _TYPES[t]) and (t == "boolean" or (value is not True and value is not False)) for t in types
    ):
        return f"{at or 'it'} is {_kind(value)}, expected {' or '.join(types)}"
    if isinstance(value, dict):
        return _problem_in_object(value, schema, at)
    if isinstance(value, list):
        items = schema.get("items")
        found = (problem_with(one, items, f"{at}[{i}]") for i, one in enumerate(value)) if items else ()
        return next(filter(None, found), "")
    if "enum" in schema and value not in schema["enum"]:
        return f"{at} is {value!r:.80}, expected one of {schema['enum']}"
    if "pattern" in schema and not re.fullmatch(schema["pattern"], str(value)):
        return f"{at} is {value!r:.80}, expected to match {schema['pattern']}"
    if value.__class__ is int and value < schema.get("minimum", value):
        return f"{at} is negative"
    return ""


def _problem_in_object(value: dict[str, Any], schema: Schema, at: str) -> str:
    for name in schema.get("required", ()):
        if name not in value:
            return f"{at + ': ' if at else ''}{name!r} is missing"
    for name, one in value.items():
        if "names" in schema and not re.fullmatch(schema["names"], name):
            return f"{at}: {name!r:.80} is not a file name"
        inner = schema.get("properties", {}).get(name, schema.get("values"))
        if inner is not None and (problem := problem_with(one, inner, f"{at}.{name}" if at else name)):
            return problem
    return ""


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = ("boolean", "object", "array", "string", "integer")
    return next((name for name in names if isinstance(value, _TYPES[name])), "number")
