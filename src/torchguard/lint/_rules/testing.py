"""Tests of losses."""

import ast
import re
from collections.abc import Iterator

from torchguard.lint._module import Module
from torchguard.lint._rules.base import FUNCTIONS, Problem, Rule, is_loss, is_method, keyword, last_name
from torchguard.lint._rules.creation import factory


class GradientOfConstant(Rule):
    code = "TG260"
    name = "gradient-of-constant"
    nodes = FUNCTIONS
    summary = "The gradient of a tensor is read that does not require one."
    why = """
`x = torch.randn(4)` is a constant to autograd: after `backward()`, `x.grad` is None, and a loss of such inputs alone
has no `backward` at all. A test that means to check gradients has to ask for them.
"""
    wrong = """
import torch

def test_loss() -> None:
    x = torch.randn(4, dtype=torch.float32)
    loss = (x * torch.ones(4, dtype=torch.float32, requires_grad=True)).sum()
    loss.backward()
    assert x.grad is not None
"""
    right = """
import torch

def test_loss() -> None:
    x = torch.randn(4, dtype=torch.float32, requires_grad=True)
    loss = (x * 2).sum()
    loss.backward()
    assert x.grad is not None
"""
    silence = "Where the test holds that there is no gradient (`assert x.grad is None` is not reported)."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if "backward" not in module.source:
            return
        function = module.functions[node]
        constants: dict[str, ast.AST] = {}
        for one in function.body:
            if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
                made = factory(one.value, module)
                assert not made or isinstance(one.value, ast.Call)
                if made and keyword(one.value, "requires_grad") is None:  # pyright: ignore[reportArgumentType]
                    constants.setdefault(one.targets[0].id, one)
                else:
                    constants[one.targets[0].id] = function.node  # bound again: unclear
        if not constants:
            return
        for one in function.body:
            if is_method(one, "requires_grad_", "retain_grad") and isinstance(one, ast.Call):
                constants.pop(ast.unparse(one.func.value), None)  # pyright: ignore[reportAttributeAccessIssue]
            elif (
                isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and one.attr in ("requires_grad", "grad")
            ):
                constants.pop(ast.unparse(one.value), None)
            elif isinstance(one, ast.AugAssign | ast.For) and isinstance(one.target, ast.Name):
                constants.pop(one.target.id, None)
            elif isinstance(one, ast.Call) and last_name(one) in ("gradcheck", "vmap", "grad", "map", "tree_map"):
                return
        seen: set[str] = set()
        for one in function.body:
            is_read = isinstance(one, ast.Attribute) and one.attr == "grad" and isinstance(one.value, ast.Name)
            if not is_read or not isinstance(one, ast.Attribute) or not isinstance(one.ctx, ast.Load):
                continue
            name = one.value.id  # pyright: ignore[reportAttributeAccessIssue]
            bound = constants.get(name)
            if bound is None or bound is function.node or name in seen or _expects_none(one, module):
                continue
            if any(last_name(call) == "backward" for call in function.calls):
                seen.add(name)
                yield Problem(
                    one, f"{name}.grad is None: {name} does not require grad. Create it with requires_grad=True."
                )


def _expects_none(node: ast.AST, module: Module) -> bool:
    parent = next(module.parents(node), None)
    return isinstance(parent, ast.Compare) and any(isinstance(op, ast.Is) for op in parent.ops)


# What the tests of a loss should show, and how a test that does so is recognised.
_NEEDED = {
    "dtypes": re.compile(r"bfloat16|float16|\bhalf\b|\bdtype\b"),
    "shapes": re.compile(r"\bshapes?\b|\bbatch\b|\bsizes?\b|parametrize"),
    "backward": re.compile(r"backward\(|autograd|gradcheck|\.grad\b"),
    "stability": re.compile(r"isnan|isinf|isfinite|\bnan\b|\binf\b|1e[-+]?\d|extreme|stab", re.IGNORECASE),
    "distributed": re.compile(r"torch\.distributed|\bdist\.|process_group|world_size|spawn"),
}


class MissingLossTests(Rule):
    """A check of the whole project: `check_project` gets every file that was read."""

    code = "TG261"
    name = "missing-loss-tests"
    nodes = ()
    is_default = False
    summary = "A loss has no tests for dtypes, shapes, backward, stability or several ranks."
    why = """
A loss is where dtypes, empty batches, zeros and several ranks meet. Its tests should run it in float32, bfloat16 and
float16, on several shapes, backward, on extreme values, and, if it communicates, on more than one rank. The linter
looks for tests that name the loss, in files called `test_*.py` among the PATHS, and for what these tests mention.
"""
    wrong = """
import torch

def focal_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x.float() - y.float()) ** 2).mean()
"""
    right = """
import torch

def focal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x.float() - y.float()) ** 2).mean()
"""
    silence = "For losses that another loss's tests cover."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        return iter(())

    @staticmethod
    def losses_of(module: Module) -> list[tuple[str, int, int, bool]]:
        """Public losses of a file: name, line, column, and whether the file communicates."""
        is_distributed = any(name.startswith("torch.distributed") for name in module.imported)
        found = []
        for function in module.functions.values():
            if function.outer is not None or function.is_stub or not module.imports_torch or not function.returns:
                continue
            if function.cls is not None:
                if function.name == "forward" and is_loss(function) and not function.cls.name.startswith("_"):
                    node = function.cls.node
                    found.append((function.cls.name, node.lineno, node.col_offset, is_distributed))
            elif is_loss(function) and not function.name.startswith(("_", "test")) and function.arguments:
                found.append((function.name, function.node.lineno, function.node.col_offset, is_distributed))
        return found

    @staticmethod
    def missing(name: str, is_distributed: bool, tests: list[str]) -> list[str]:
        """What no test that names the loss mentions."""
        naming = [one for one in tests if re.search(rf"\b{re.escape(name)}\b", one)]
        needed = {kind: seen for kind, seen in _NEEDED.items() if kind != "distributed" or is_distributed}
        return [kind for kind, seen in needed.items() if not any(seen.search(one) for one in naming)]

    def message(self, name: str, missing: list[str]) -> str:
        return f"{name}: no test for {', '.join(missing)}. Add them to a test_*.py that names it."


RULES = (GradientOfConstant(), MissingLossTests())
