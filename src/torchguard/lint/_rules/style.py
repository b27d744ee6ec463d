"""Names and length of functions."""

import ast
import re
from collections.abc import Iterator

from torchguard.lint import _values as values
from torchguard.lint._module import Module
from torchguard.lint._rules.base import FUNCTIONS, Problem, Rule

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


RULES = (ConversionName(), FunctionLength())
