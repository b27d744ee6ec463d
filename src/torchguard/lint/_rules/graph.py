"""What breaks a graph: `fullgraph=True`, `torch.export` and ONNX."""

import ast
from collections.abc import Iterator

from torchguard.lint import _values as values
from torchguard.lint._module import Module
from torchguard.lint._rules.base import Problem, Rule, is_method, keyword, last_name, text

_PRINTERS = frozenset(["print", "pprint", "breakpoint"])


def _names_model(module: Module, node: ast.AST) -> str:
    function = module.function_of(node)
    return function.name if function else ""


class Item(Rule):
    code = "TG150"
    name = "item-in-graph"
    nodes = (ast.Call,)
    summary = "A model's forward reads a number out of a tensor: `.item()`, `int(x)`, `float(x)`, `bool(x)`."
    why = """
The number is not known while tracing: `torch.compile(fullgraph=True)` and `torch.export` stop, or go on with an
unbacked symbol that the next comparison stops at; ONNX writes the traced number into the file as a constant. On a GPU
it also waits for the device. Keep it a tensor.
"""
    wrong = """
import torch
from torch import nn

class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max().item()
"""
    right = """
import torch
from torch import nn

class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max()
"""
    silence = "In models that are never compiled or exported."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        if not module.in_traced_function(node):
            return
        func = node.func
        if is_method(node, "item") and not node.args and isinstance(func, ast.Attribute):
            read, shown = func.value, f"{text(func.value, 25)}.item()"
            is_read = module.is_tensor(read) or _is_reduction(read, module)
        elif isinstance(func, ast.Name) and func.id in ("int", "float", "bool") and len(node.args) == 1:
            if module.value(func):
                return
            read = node.args[0]
            is_read, shown = module.is_tensor(read), f"{func.id}({text(read, 25)})"
        else:
            return
        if not is_read or not module.is_traced(node) or _in_range(node, module):
            return
        yield Problem(node, f"{shown} needs a value that a graph does not have. Keep it a tensor.")


def _is_reduction(node: ast.expr, module: Module) -> bool:
    """`x.max()` of something unknown: what has `.max().item()` in a forward is a tensor."""
    return is_method(node, "max", "min", "sum", "mean", "any", "all", "argmax", "norm")


def _in_range(node: ast.AST, module: Module) -> bool:
    """In `for ... in range(...)`, which `DataDependentLoop` reports."""
    for parent, child in module.inside(node):
        if isinstance(parent, ast.For):
            return child is parent.iter and isinstance(parent.iter, ast.Call) and last_name(parent.iter) == "range"
        if isinstance(parent, ast.stmt):
            return False
    return False


class ToPython(Rule):
    code = "TG151"
    name = "tolist-in-graph"
    nodes = (ast.Call,)
    summary = "A model's forward turns a tensor into a list or an array: `.tolist()`, `.numpy()`."
    why = """
Values leave the graph: `fullgraph=True` and `torch.export` stop, ONNX records constants, gradients end, and on a GPU
the host waits for the device. Keep the computation in torch.
"""
    wrong = """
import torch
from torch import nn

class Sizes(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.sum() for row in x.split(lengths.tolist())])
"""
    right = """
import torch
from torch import nn

class Sizes(nn.Module):
    def forward(self, x: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=x.dtype, device=x.device).index_add(0, groups, x)
"""
    silence = "In models that are never compiled or exported."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        if not is_method(node, "tolist", "numpy") or not isinstance(node.func, ast.Attribute):
            return
        if module.is_tensor(node.func.value) and module.is_traced(node) and not _in_range(node, module):
            yield Problem(
                node, f"{text(node.func, 30)}() takes values out of the graph. Keep the computation in torch."
            )


class Print(Rule):
    code = "TG152"
    name = "print-in-graph"
    nodes = (ast.Call,)
    summary = "A model's forward prints a tensor."
    why = """
Printing needs values: the graph breaks, `fullgraph=True` and `torch.export` stop, and on a GPU the host waits for the
device. Look at values with a forward hook, `torchguard.watch`, or at the boundary.
"""
    wrong = """
import torch
from torch import nn

class Debugged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("x", x)
        return torch.relu(x)
"""
    right = """
import torch
from torch import nn

class Debugged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)
"""
    silence = "While debugging in eager mode."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        if not isinstance(node.func, ast.Name) or node.func.id not in _PRINTERS or not module.in_traced_function(node):
            return
        shown = [one for part in (*node.args, *(k.value for k in node.keywords)) for one in ast.walk(part)]
        printed = [
            one for one in shown if isinstance(one, ast.expr) and module.is_tensor(one) and _is_value(one, module)
        ]
        if (printed or node.func.id == "breakpoint") and module.is_traced(node):
            what = text(printed[0], 20) if printed else ""
            yield Problem(
                node, f"{node.func.id}({what}) breaks the graph. Remove it, or look at values in a forward hook."
            )


def _is_value(node: ast.expr, module: Module) -> bool:
    """Not `x.shape`: an attribute or a plain method of a tensor needs no value."""
    parent = next(module.parents(node), None)
    return not isinstance(parent, ast.Attribute)


def condition_on_tensor(test: ast.expr, module: Module) -> ast.expr | None:
    """The part of a condition whose truth is that of a tensor."""
    if isinstance(test, ast.BoolOp):
        parts = test.values
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        parts = [test.operand]
    else:
        parts = []
    for part in parts:
        if found := condition_on_tensor(part, module):
            return found
    if parts or not module.is_tensor(test):
        return None
    # `if mask:` asks whether an optional tensor was given, wrongly; `if x.any():`, `if x.sum() > 0:` read values.
    return test


class BranchOnTensor(Rule):
    code = "TG153"
    name = "branch-on-tensor"
    nodes = (ast.If, ast.IfExp, ast.Assert)
    summary = "A model's forward branches on the value of a tensor."
    why = """
Which branch to trace is not known: `fullgraph=True` and `torch.export` stop, and ONNX keeps the branch of the example
alone. Use `torch.where`, `torch.cond`, or torchguard's `IF`. An assertion on values has the same effect: use
`torch._check` on sizes, or flags for samples.
"""
    wrong = """
import torch
from torch import nn

class Clip(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1:
            x = x / x.abs().max()
        return x
"""
    right = """
import torch
from torch import nn

class Clip(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max().clamp(min=1)
"""
    silence = "In models that are never compiled or exported."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.If | ast.IfExp | ast.Assert)
        if not module.in_traced_function(node):
            return
        found = condition_on_tensor(node.test, module)
        if found is not None and module.is_traced(node):
            word = "assert" if isinstance(node, ast.Assert) else "if"
            yield Problem(
                node, f"{word} {text(found, 30)}: branches on a tensor's value. Use torch.where or torch.cond."
            )


_DATA_DEPENDENT = frozenset(["masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"])


class DataDependentShape(Rule):
    code = "TG154"
    name = "data-dependent-shape"
    nodes = (ast.Subscript, ast.Call)
    summary = "A model's forward makes a tensor whose size depends on values: `x[mask]`, `nonzero`, `unique`."
    why = """
The size is not known while tracing: `fullgraph=True` stops unless `capture_dynamic_output_shape_ops` is set, later
comparisons of the size stop `torch.export`, and on a GPU the host waits for the size. Keep the size and mask the
values: `torch.where(mask, x, 0)`.
"""
    wrong = """
import torch
from torch import nn

class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()
"""
    right = """
import torch
from torch import nn

class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0).sum()
"""
    silence = "In models that are never compiled or exported."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if not module.in_traced_function(node):
            return
        if isinstance(node, ast.Subscript):
            if not isinstance(node.ctx, ast.Load) or not module.is_tensor(node.value):
                return
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            found = any(module.value(part) == values.BOOL for part in parts)
            shown = text(node, 30)
        else:
            assert isinstance(node, ast.Call)
            package, _, last = module.qualified(node.func).rpartition(".")
            is_method_call = isinstance(node.func, ast.Attribute) and module.is_tensor(node.func.value)
            name = last if package == "torch" else node.func.attr if is_method_call else ""  # pyright: ignore
            found = name in _DATA_DEPENDENT or (
                package == "torch" and name == "where" and len(node.args) == 1 and not node.keywords
            )
            found = found or (name == "repeat_interleave" and _repeats_by_tensor(node, package, module))
            shown = f"{name}()"
        if found and module.is_traced(node):
            yield Problem(node, f"{shown} has a size that depends on values. Keep the size: torch.where(mask, x, 0).")


def _repeats_by_tensor(node: ast.Call, package: str, module: Module) -> bool:
    position = 1 if package == "torch" else 0
    given = keyword(node, "repeats") or (node.args[position] if len(node.args) > position else None)
    return given is not None and module.is_tensor(given) and keyword(node, "output_size") is None


class DataDependentLoop(Rule):
    code = "TG155"
    name = "data-dependent-loop"
    nodes = (ast.For, ast.While)
    summary = "A model's forward loops as often as a tensor's value says."
    why = """
The number of rounds is not known while tracing: `fullgraph=True` and `torch.export` stop, and ONNX unrolls the rounds
of the example. Loop over a size, compute for all rounds and mask, or use `torch.while_loop`.
"""
    wrong = """
import torch
from torch import nn

class Halve(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return x
"""
    right = """
import torch
from torch import nn

class Halve(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounds = torch.log2(x.abs().max().clamp(min=1)).ceil()
        return x / 2**rounds
"""
    silence = "In models that are never compiled or exported."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if not module.in_traced_function(node) or not module.is_traced(node):
            return
        if isinstance(node, ast.While):
            found = condition_on_tensor(node.test, module)
        else:
            assert isinstance(node, ast.For)
            found = _values_in_range(node.iter, module)
        if found is not None:
            word = "while" if isinstance(node, ast.While) else "for"
            yield Problem(
                node, f"{word} {text(found, 30)}: as many rounds as a tensor says. Loop over a size, or mask."
            )


def _values_in_range(node: ast.expr, module: Module) -> ast.expr | None:
    if not isinstance(node, ast.Call):
        return None
    if is_method(node, "tolist") and isinstance(node.func, ast.Attribute) and module.is_tensor(node.func.value):
        return node
    if not isinstance(node.func, ast.Name) or node.func.id not in ("range", "zip", "enumerate"):
        return None
    is_range = node.func.id == "range"
    for argument in node.args:
        for one in ast.walk(argument):
            is_read = is_method(one, "item", "tolist")
            if is_read and (is_range or module.is_tensor(one.func.value)):  # pyright: ignore[reportAttributeAccessIssue]
                return one  # pyright: ignore[reportReturnType]
        if is_range and module.is_tensor(argument):
            return argument
        converted = argument.args if isinstance(argument, ast.Call) and last_name(argument) == "int" else []
        if is_range and any(module.is_tensor(one) for one in converted):
            return argument
    return None


RULES = (
    Item(),
    ToPython(),
    Print(),
    BranchOnTensor(),
    DataDependentShape(),
    DataDependentLoop(),
)
