"""Arguments of a node, read back from their text. Nothing is evaluated: what is not known to be harmless is refused."""

import ast
import math
from collections.abc import Mapping
from typing import Any

import torch

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
