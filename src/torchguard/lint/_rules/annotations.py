"""Type and shape annotations."""

import ast
import re
from collections.abc import Iterator

from torchguard.lint import _values as values
from torchguard.lint._module import Function, Module
from torchguard.lint._rules.base import FUNCTIONS, Problem, Rule, tensor_parameters


class MissingAnnotation(Rule):
    code = "TG101"
    name = "missing-annotation"
    nodes = FUNCTIONS
    is_fixable = True
    summary = "A function takes or returns tensors, and a parameter or the result has no annotation."
    why = """
A signature with annotations says which arguments are tensors. Type checkers, `torch.export` and `@tensorcheck` read
it; so does whoever calls the function. The rule only reports parameters and results that it knows to be tensors, by
how the function uses them.
"""
    wrong = """
import torch

def scale(x, factor: float):
    return torch.relu(x) * factor
"""
    right = """
import torch

def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.relu(x) * factor
"""
    silence = (
        "Where another tool forbids annotations, or for functions that accept tensors and arrays alike on purpose."
    )

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if function.is_stub or (function.name.startswith("__") and function.name != "__call__"):
            return
        missing = [
            one
            for one in function.arguments
            if one.annotation is None and function.parameters.get(one.arg) in values.IS_TENSOR
        ]
        if missing:
            names = ", ".join(one.arg for one in missing)
            noun = "parameter" if len(missing) == 1 else "parameters"
            yield Problem(
                missing[0], f"{noun} {names} of {function.name}: no annotation. Write {missing[0].arg}: torch.Tensor."
            )
        if function.node.returns is None and returns_tensors(function, module):
            yield Problem(
                node, f"{function.name} returns a tensor but has no return annotation. Write -> torch.Tensor."
            )


def returns_tensors(function: Function, module: Module) -> bool:
    """Whether every way out of a function returns one tensor."""
    if not function.returns or any(isinstance(one, ast.Yield | ast.YieldFrom) for one in function.body):
        return False
    return all(one.value is not None and module.is_tensor(one.value) for one in function.returns) and ends(
        function.node.body
    )


def ends(block: list[ast.stmt]) -> bool:
    """Whether a block cannot be left at its end."""
    last = block[-1]
    if isinstance(last, ast.Return | ast.Raise):
        return True
    if isinstance(last, ast.If):
        return bool(last.orelse) and ends(last.body) and ends(last.orelse)
    if isinstance(last, ast.With):
        return ends(last.body)
    if isinstance(last, ast.Try):
        return (ends(last.body) and all(ends(one.body) for one in last.handlers)) or (
            bool(last.finalbody) and ends(last.finalbody)
        )
    return False


class TupleInput(Rule):
    code = "TG102"
    name = "tuple-input"
    nodes = FUNCTIONS
    summary = "A model's forward takes a tuple of tensors as one argument."
    why = """
A tuple hides its tensors: their names are lost in an exported program and in ONNX, and callers have to know the
order. Take named arguments, or one NamedTuple.
"""
    wrong = """
import torch
from torch import nn

class Detector(nn.Module):
    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, boxes = inputs
        return images.mean() + boxes.mean()
"""
    right = """
import torch
from torch import nn

class Detector(nn.Module):
    def forward(self, images: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return images.mean() + boxes.mean()
"""
    silence = "Where a framework calls forward with a tuple, such as the states of a recurrent layer."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if not function.is_forward or function.is_stub:
            return
        unpacked = _unpacked(function)
        for one in function.arguments:
            is_tuple = one.annotation is not None and _is_fixed_tuple(one.annotation, module)
            is_hidden = one.annotation is None and one.arg in unpacked
            if is_tuple or is_hidden:
                yield Problem(
                    one,
                    f"forward takes the tuple {one.arg}, which hides its tensors from exporters. Take each as an "
                    "argument of its own, or a NamedTuple.",
                )


def _is_fixed_tuple(annotation: ast.expr, module: Module) -> bool:
    """`tuple[Tensor, Tensor]`, also with `| None`. `tuple[Tensor, ...]` is a sequence, and no hidden record."""
    for one in ast.walk(annotation):
        if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Tuple) and len(one.slice.elts) > 1:
            name = one.value.attr if isinstance(one.value, ast.Attribute) else getattr(one.value, "id", "")
            if name in ("tuple", "Tuple"):
                held = [values.of_annotation(module.value(e), e, lambda x: module.value(x)) for e in one.slice.elts]
                return any(h in values.IS_TENSOR for h in held) and all(
                    not (isinstance(e, ast.Constant) and e.value is ...) for e in one.slice.elts
                )
    return False


def _unpacked(function: Function) -> set[str]:
    """Parameters that are unpacked into several variables before they are bound again."""
    return {
        node.value.id
        for node in function.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and any(isinstance(target, ast.Tuple) and len(target.elts) > 1 for target in node.targets)
    }


class TupleOutput(Rule):
    code = "TG103"
    name = "tuple-output"
    nodes = FUNCTIONS
    summary = "A model's forward returns a bare tuple of tensors."
    why = """
The names of the outputs are lost in an exported program and in ONNX, and every caller depends on their order: adding
an output breaks all of them. Return a NamedTuple: it is still a tuple to torch.compile, torch.export and ONNX. `(out,
flags)` of torchguard is not reported.
"""
    wrong = """
import torch
from torch import nn

class Encoder(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(x)
        return h, h.mean()
"""
    right = """
from typing import NamedTuple

import torch
from torch import nn

class Encoded(NamedTuple):
    hidden: torch.Tensor
    score: torch.Tensor

class Encoder(nn.Module):
    def forward(self, x: torch.Tensor) -> Encoded:
        h = torch.relu(x)
        return Encoded(hidden=h, score=h.mean())
"""
    silence = "For internal layers that are never exported on their own, or whose callers expect `(out, state)`."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if not function.is_forward:
            return
        for one in function.returns:
            value = one.value
            if not isinstance(value, ast.Tuple) or len(value.elts) < 2:
                continue
            held = [module.value(element) for element in value.elts]
            if all(one in values.IS_PLAIN for one in held) or values.FLAGS in held:
                continue
            if all(one in values.IS_TENSOR or one in ("", values.NONE, values.TENSORS) for one in held):
                yield Problem(
                    one,
                    f"forward returns a bare tuple of {len(value.elts)}: exporters lose names. Return a NamedTuple.",
                )
                return  # one finding a function: all its returns change together


_SHAPE_WORDS = re.compile(
    r"\bshapes?\b|\bdims?\b|\b[BNTCHWDL]+(?:\s*,\s*[BNTCHWDLSE]+)+\b|\b[A-Z]\s*[x\u00d7]\s*[A-Z]\b"
    r"|[\[(]\s*[A-Za-z_*][\w*. ]*\s*(?:,|x|\u00d7)\s*[\w*. +/-]+.*?[\])]"
)


class MissingShape(Rule):
    code = "TG201"
    name = "missing-shape"
    nodes = FUNCTIONS
    summary = "Tensors of a signature have neither a jaxtyping annotation nor a comment with their shape."
    why = """
`torch.Tensor` says nothing about dimensions. A jaxtyping annotation (`Float[torch.Tensor, "batch time dim"]`) says it
in the signature, `@tensorcheck` can check it, and it costs nothing in a compiled graph. A comment or docstring with
the shape counts, too.
"""
    wrong = """
import torch

def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT, dim=-1)
"""
    right = """
import torch
from jaxtyping import Float

def attend(
    q: Float[torch.Tensor, "batch query dim"], k: Float[torch.Tensor, "batch key dim"]
) -> Float[torch.Tensor, "batch query key"]:
    return torch.softmax(q @ k.mT, dim=-1)
"""
    silence = 'For elementwise functions, which take any shape: or annotate them `Float[torch.Tensor, "..."]`.'

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if function.is_stub or (function.name.startswith("__") and function.name != "__call__"):
            return
        plain = [
            one
            for one in function.arguments
            if one.annotation is not None
            and function.parameters.get(one.arg) in values.IS_TENSOR
            and not _has_shape(one.annotation, module)
        ]
        if len(plain) == 0 or len(plain) < len(tensor_parameters(function)):
            return
        lines = module.lines[function.node.lineno - 1 : function.node.end_lineno]
        written = "\n".join(line.partition("#")[2] for line in lines) + (ast.get_docstring(function.node) or "")
        if not _SHAPE_WORDS.search(written):
            names = ", ".join(one.arg for one in plain[:3]) + (", ..." if len(plain) > 3 else "")
            yield Problem(
                node,
                f"{function.name}: no shape for {names}. Annotate with jaxtyping, as in "
                'Float[torch.Tensor, "batch dim"], or add a comment.',
            )


def _has_shape(annotation: ast.expr, module: Module) -> bool:
    return any(
        isinstance(one, ast.Subscript)
        and (
            module.qualified(one.value).startswith("jaxtyping.") or module.qualified(one.value).startswith("torchguard")
        )
        for one in ast.walk(annotation)
    )


RULES = (MissingAnnotation(), TupleInput(), TupleOutput(), MissingShape())
