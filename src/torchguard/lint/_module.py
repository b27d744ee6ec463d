"""A file as the rules see it: what an expression holds, what it stands in, and whether gradients are on there."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torchguard.lint._inference import Inference
from torchguard.lint._syntax import Class, Function, FunctionNode, Tree

__all__ = ["Class", "Function", "FunctionNode", "Module"]

_NO_GRAD = frozenset(
    ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode")
)
_DERIVATIVES = frozenset(
    f"torch.func.{name}" for name in "grad grad_and_value vjp jvp jacrev jacfwd hessian linearize".split()
)
# Conditions under which code is not traced, or which the trace decides.
_TRACING_TESTS = re.compile(
    r"is_(?:scripting|tracing|compiling|exporting|torchdynamo_compiling|torchdynamo_exporting|dynamo_compiling|torch_fx_proxy|fx_tracing|onnx)|is_in_onnx_export|in_onnx|is_eager|_is_tracing"
)


class Module(Tree):
    """A parsed file. `value(node)` is what an expression holds, `parents(node)` what it stands in."""

    def __init__(self, source: str, path: str = "<string>", options: dict[str, Any] | None = None) -> None:
        super().__init__(source, path)
        self.options = options or {}
        Inference(self).run()
        self._find_compiled()

    @cached_property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node stands in, from the inside out."""
        while (node := getattr(node, "_parent", None)) is not None:  # pyright: ignore[reportAssignmentType]
            yield node

    def function_of(self, node: ast.AST) -> Function | None:
        """The function that a node stands in. A lambda belongs to the function around it."""
        for parent in self.parents(node):
            if parent in self.functions:
                return self.functions[parent]
        return None

    def inside(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs of a parent and its child towards the node, up to the function around it."""
        child = node
        for parent in self.parents(node):
            if parent in self.functions:
                return
            yield parent, child
            child = parent

    def conditions(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """The conditions that hold where a node runs, and whether they are true there."""
        for parent, child in self.inside(node):
            if isinstance(parent, ast.If | ast.While) and child is not parent.test:
                yield parent.test, child in parent.body
            elif isinstance(parent, ast.IfExp) and child is not parent.test:
                yield parent.test, child is parent.body
            elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
                for earlier in parent.values[: parent.values.index(child)]:  # pyright: ignore[reportArgumentType]
                    yield earlier, True

    def has_no_grad(self, node: ast.AST) -> bool:
        """Whether gradients are off where a node runs, as far as its function shows."""
        for parent, _ in self.inside(node):
            if isinstance(parent, ast.With | ast.AsyncWith) and any(
                self.turns_off_gradients(item.context_expr) for item in parent.items
            ):
                return True
        function = self.function_of(node)
        while function is not None:
            if any(name in _NO_GRAD for name in function.decorators):
                return True
            function = function.outer
        return False

    def turns_off_gradients(self, node: ast.expr) -> bool:
        """Whether this is `torch.no_grad()`, `torch.inference_mode()` or `torch.set_grad_enabled(False)`."""
        if not isinstance(node, ast.Call):
            return self.qualified(node) in _NO_GRAD
        name = self.qualified(node.func)
        first = node.args[0] if node.args else None
        is_false = isinstance(first, ast.Constant) and first.value is False
        return (name in _NO_GRAD and not is_false) or (name.endswith(".set_grad_enabled") and is_false)

    @cached_property
    def imports_torch(self) -> bool:
        return any(name.partition(".")[0] in ("torch", "lightning", "torchguard") for name in self.imported)

    @cached_property
    def imports_torchguard(self) -> bool:
        return any(name.partition(".")[0] == "torchguard" for name in self.imported)

    def in_traced_function(self, node: ast.AST) -> bool:
        """Whether a node stands in a forward or compiled function; see `is_traced`."""
        function = self.function_of(node)
        return function is not None and function.is_traced

    def is_traced(self, node: ast.AST) -> bool:
        """Whether a node runs inside a forward or compiled function, and not only where nothing is traced."""
        function = self.function_of(node)
        if function is None or not function.is_traced:
            return False
        for test, _ in self.conditions(node):
            if _TRACING_TESTS.search(ast.unparse(test)):
                return False
        return not any(isinstance(parent, ast.Raise | ast.ExceptHandler) for parent, _ in self.inside(node))

    def _find_compiled(self) -> None:
        by_name: dict[str, list[Function]] = defaultdict(list)
        for function in self.functions.values():
            by_name[function.name].append(function)
            if "torch.compile" in function.decorators:
                function.is_compiled = True
        for call in self.nodes[ast.Call]:
            assert isinstance(call, ast.Call)
            is_backward = isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
            if is_backward and (around := self.function_of(call)) is not None:
                around.is_differentiated = True
            name = self.qualified(call.func)
            if not call.args or not isinstance(call.args[0], ast.Name) or not name.startswith("torch."):
                continue
            for function in by_name[call.args[0].id]:
                if function.cls is None:
                    function.is_compiled = function.is_compiled or name == "torch.compile"
                    function.is_differentiated = function.is_differentiated or name in _DERIVATIVES
