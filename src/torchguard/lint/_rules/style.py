"""How code is written: names, length of functions, formulas."""

import ast
import re
from collections.abc import Iterator

from torchguard.lint import _values as values
from torchguard.lint._module import Module
from torchguard.lint._rules.base import FUNCTIONS, Problem, Rule, has_spread, is_method

# `box2mask`, and not `conv2d`, `log2`, `resnet2x`.
_DIGIT = re.compile(r"^_?(?:convert_)?([a-z]{2,})2([a-z]{2,})$")
_CONVERT = re.compile(r"^_?convert_(?:from_)?([a-z0-9_]+)_to_([a-z0-9_]+)$")
_TERMS = ("seq2seq", "word2vec", "wav2vec")


class ConversionName(Rule):
    code = "TG240"
    name = "conversion-name"
    nodes = FUNCTIONS
    summary = "A function that converts x to y is not named `x_to_y`."
    why = """
One pattern for all conversions, `image_to_numpy`, `box_to_normalized`, lets readers guess the name and search for it.
`2` and a leading `convert_` add nothing.
"""
    wrong = """
import torch

def box2mask(box: torch.Tensor) -> torch.Tensor:
    return box > 0
"""
    right = """
import torch

def box_to_mask(box: torch.Tensor) -> torch.Tensor:
    return box > 0
"""
    silence = "For names that others import already."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        found = _DIGIT.match(function.name) or _CONVERT.match(function.name)
        if found is None or not module.imports_torch or any(term in function.name for term in _TERMS):
            return
        is_tensor = any(held in values.IS_TENSOR for held in function.parameters.values()) or any(
            one.value is not None and module.is_tensor(one.value) for one in function.returns
        )
        if is_tensor:
            yield Problem(node, f"{function.name} converts. Name it {found[1].strip('_')}_to_{found[2].strip('_')}.")


class FunctionLength(Rule):
    code = "TG301"
    name = "function-length"
    nodes = FUNCTIONS
    is_default = False
    longest = 60
    summary = "A function has more statements than `max-statements` (60)."
    why = """
A function that fits on a screen can be read, tested and compiled on its own. Statements are counted, not lines: a
long call or docstring does not make a function long.
"""
    wrong = "def long(x):\n" + "".join(f"    x = x + {i}\n" for i in range(61)) + "    return x\n"
    right = "def short(x):\n    return x + 1\n"
    silence = "For tables and for code that a tool generates."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        count = sum(isinstance(one, ast.stmt) for one in function.body)
        longest = module.options.get("max-statements", self.longest)
        if count > longest:
            yield Problem(node, f"{function.name} has {count} statements, more than {longest}. Split it.")


CHAINED = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


class MethodChain(Rule):
    code = "TG220"
    name = "method-chain"
    nodes = (ast.Call,)
    is_fixable = True
    summary = "Arithmetic is written as a chain of methods: `a.add(b).add(c)`."
    why = """
`a + b + c` computes the same, reads as the formula, and makes the order of operations visible. Both make one
intermediate tensor in eager mode and none under Inductor: it is a matter of reading alone.
"""
    wrong = """
import torch

def total(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a.add(b).add(c)
"""
    right = """
import torch

def total(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a + b + c
"""
    silence = "Where a library's style asks for methods."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        parent = next(module.parents(node), None)
        if isinstance(parent, ast.Attribute) and parent.attr in CHAINED:
            return  # the outermost call of a chain is reported
        links = chain(node, module)
        if len(links) > 2:
            yield Problem(node, f"a chain of methods. Write it as a formula: {formula(links)}.")


def chain(node: ast.expr, module: Module) -> list[tuple[str, ast.expr]]:
    """`[("", a), ("+", b), ("+", c)]` of `a.add(b).add(c)`, if a is a tensor; else the expression alone."""
    if (
        is_method(node, *CHAINED)
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and len(node.args) == 1
        and not node.keywords
        and not has_spread(node)
        and module.value(node.func.value) in (values.TENSOR, values.INT, values.BOOL)
    ):
        return [*chain(node.func.value, module), (CHAINED[node.func.attr], node.args[0])]
    return [("", node)]


def formula(links: list[tuple[str, ast.expr]]) -> str:
    written = ast.unparse(links[0][1]) if isinstance(links[0][1], _ATOMS) else f"({ast.unparse(links[0][1])})"
    is_sum = False
    for op, node in links[1:]:
        if op in "*/" and is_sum:
            written = f"({written})"
        is_sum = op in "+-"
        operand = ast.unparse(node) if isinstance(node, _ATOMS) else f"({ast.unparse(node)})"
        written = f"{written} {op} {operand}"
    return written


_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


RULES = (ConversionName(), FunctionLength(), MethodChain())
