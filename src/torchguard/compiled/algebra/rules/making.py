"""Operators that make tensors out of numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchguard.compiled.algebra.field import Field
from torchguard.compiled.algebra.unsupported import UnsupportedError
from torchguard.compiled.algebra.values import Value, exact


def _full(f: Field, shape: Sequence[int], number: float | Value) -> Value:
    if isinstance(number, Value):
        return number.arranged(lambda t: t.expand(tuple(shape)))
    if isinstance(number, bool | int):
        return exact(f, torch.full(tuple(shape), number))
    return Value(f, torch.full(tuple(shape), f.number(number), dtype=f.dtype))


def _uninitialised(f: Field, shape: Sequence[int]) -> Value:
    # Unknown elements: a result that depends on them differs from one trial to the next.
    return Value(f, f.random("uninitialised", tuple(shape)))


def _arange(f: Field, *bounds: float, **_: Any) -> Value:
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if all(isinstance(bound, int) for bound in (start, end, step)):
        return exact(f, torch.arange(start, end, step))
    numbers = [start + i * step for i in range(math.ceil((end - start) / step))]
    return Value(f, torch.tensor([f.number(number) for number in numbers], dtype=f.dtype))


def _eye(f: Field, n: int, m: int | None = None) -> Value:
    return exact(f, torch.eye(n, n if m is None else m, dtype=torch.int64))


def _of_options(rule: Callable[..., Value]) -> Callable[..., Value]:
    """The same rule, heedless of dtype, device and layout: the evaluator knows the dtype of a node."""

    def heedless(f: Field, *args: Any, **options: Any) -> Value:
        ignored = {"dtype", "layout", "device", "pin_memory", "memory_format"}
        if unknown := set(options) - ignored:
            raise UnsupportedError(f"the option {', '.join(sorted(unknown))}")
        return rule(f, *args)

    return heedless


RULES: dict[str, Callable[..., Any]] = {
    name: _of_options(rule)
    for name, rule in {
        "full": _full,
        "full_like": lambda f, x, number: _full(f, x.shape, number),
        "new_full": lambda f, x, shape, number: _full(f, shape, number),
        "fill": lambda f, x, number: _full(f, x.shape, number),
        "zeros": lambda f, shape: _full(f, shape, 0),
        "zeros_like": lambda f, x: _full(f, x.shape, 0),
        "new_zeros": lambda f, x, shape: _full(f, shape, 0),
        "_new_zeros_with_same_feature_meta": lambda f, x, other: _full(f, other.shape, 0),
        "ones": lambda f, shape: _full(f, shape, 1),
        "ones_like": lambda f, x: _full(f, x.shape, 1),
        "new_ones": lambda f, x, shape: _full(f, shape, 1),
        "scalar_tensor": lambda f, number: _full(f, (), number),
        "empty": _uninitialised,
        "empty_like": lambda f, x: _uninitialised(f, x.shape),
        "new_empty": lambda f, x, shape: _uninitialised(f, shape),
        "empty_strided": lambda f, shape, strides: _uninitialised(f, shape),
        "new_empty_strided": lambda f, x, shape, strides: _uninitialised(f, shape),
        "empty_permuted": lambda f, shape, order: _uninitialised(f, shape),
        "arange": _arange,
        "eye": _eye,
    }.items()
}
