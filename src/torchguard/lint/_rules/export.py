"""Programs that are saved: torch.export and ONNX in place of what they replace."""

import ast
from collections.abc import Iterator

from torchguard.lint._module import Module
from torchguard.lint._rules.base import Problem, Rule, keyword


class TorchScript(Rule):
    code = "TG250"
    name = "torchscript"
    nodes = (ast.Call, ast.FunctionDef, ast.AsyncFunctionDef)
    summary = "`torch.jit.script` or `torch.jit.trace`, which torch.compile and torch.export replace."
    why = """
TorchScript is deprecated: it supports a part of Python, and no backend of torch.compile sees through it. Compile with
`torch.compile`, export with `torch.export.export` or `torch.onnx.export(dynamo=True)`.
"""
    wrong = """
import torch

@torch.jit.script
def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).sum()
"""
    right = """
import torch

@torch.compile(fullgraph=True)
def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).sum()
"""
    silence = "Where programs in TorchScript are deployed already."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        marks = [node.func] if isinstance(node, ast.Call) else node.decorator_list  # pyright: ignore
        for mark in marks:
            name = module.qualified(mark)
            if name in ("torch.jit.script", "torch.jit.trace"):
                yield Problem(mark, f"{name} is deprecated. Use torch.compile, or torch.export to save a program.")


class DynamicAxes(Rule):
    code = "TG251"
    name = "dynamic-axes"
    nodes = (ast.Call,)
    summary = "`torch.onnx.export(dynamic_axes=...)`, which has no bounds and no check."
    why = """
`dynamic_axes` only renames dimensions: what the traced program assumed about the size of the example stays in the
file. With `dynamo=True`, `dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}}` states the range, and
the export fails if the model does not hold for all of it.
"""
    wrong = """
import torch
from torch import nn

def save(model: nn.Module, x: torch.Tensor) -> None:
    torch.onnx.export(model, (x,), "model.onnx", dynamic_axes={"x": {0: "batch"}})
"""
    right = """
import torch
from torch import nn

def save(model: nn.Module, x: torch.Tensor) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.onnx.export(model, (x,), "model.onnx", dynamo=True, dynamic_shapes={"x": {0: batch}})
"""
    silence = "For versions of torch without `dynamic_shapes`."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        given = keyword(node, "dynamic_axes")
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            return
        if module.qualified(node.func) == "torch.onnx.export":
            yield Problem(
                node, "dynamic_axes has no bounds. Pass dynamo=True and dynamic_shapes with torch.export.Dim."
            )


RULES = (TorchScript(), DynamicAxes())
