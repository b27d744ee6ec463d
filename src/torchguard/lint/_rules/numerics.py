"""Gradients that become NaN or infinite."""

import ast
from collections.abc import Iterator

from torchguard.lint import _values as values
from torchguard.lint._module import Function, Module
from torchguard.lint._rules.base import (
    Problem,
    Rule,
    assigned_once,
    differentiable,
    keyword,
    last_name,
    names_in,
    text,
)

# Inside of an argument, these show that somebody thought of zero.
_GUARDS = frozenset(
    """
    clamp clamp_min clip clamp_ clamp_min_ where maximum fmax max exp cosh softplus masked_fill masked_fill_
    nan_to_num expm1 sigmoid softmax logsumexp numel size
    """.split()
)


def operand(node: ast.AST, module: Module, *names: str) -> ast.expr | None:
    """`x` of `torch.log(x)` and of `x.log()`, if x is a tensor of floats."""
    if not isinstance(node, ast.Call) or last_name(node) not in names:
        return None
    package = module.qualified(node.func).rpartition(".")[0]
    if package in ("torch", "torch.linalg", "torch.special"):
        given = node.args[0] if node.args else None
    elif isinstance(node.func, ast.Attribute) and not module.qualified(node.func):
        given = node.func.value
    else:
        return None
    return given if given is not None and module.value(given) == values.TENSOR else None


def resolved(node: ast.expr, function: Function | None) -> ast.expr:
    """What a variable stands for, if it is bound once."""
    for _ in range(3):
        found = assigned_once(node, function)
        if found is None:
            return node
        node = found
    return node


def is_guarded(node: ast.expr, function: Function | None, module: Module) -> bool:
    """Whether an expression, or what is bound to one of its variables, shows that it stays away from zero."""
    if _shows_guard(node, module):
        return True
    if function is None:
        return False
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            written = [*_bindings(one.id, function)]
            for value in written[:]:
                written += [resolved(name, function) for name in ast.walk(value) if isinstance(name, ast.Name)]
                if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):  # a view: `x = y.T`
                    written += _bindings(value.value.id, function)
            if any(_shows_guard(value, module) for value in written):
                return True
    return False


def _shows_guard(node: ast.expr, module: Module) -> bool:
    """`x + eps`, `clamp`, `exp`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and last_name(one) in _GUARDS:
            return True
        sides = (one.left, one.right) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add) else ()
        if any(_is_offset(side, module) for side in sides):
            return True
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub) and isinstance(one.left, ast.Constant):
            return True  # 1 - x: of a probability, or a schedule
        if isinstance(one, ast.keyword) and one.arg and "eps" in one.arg:
            return True
    return False


def _bindings(name: str, function: Function) -> list[ast.expr]:
    """Every expression that a function binds to a name, also among others."""
    return [
        node.value
        for node in function.body
        if isinstance(node, ast.Assign) and any(name in names_in(target) for target in node.targets)
    ]


def _is_offset(node: ast.expr, module: Module) -> bool:
    """A number, or a variable that is not known to be a tensor."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and node.value != 0
    return isinstance(node, ast.Name | ast.Attribute) and not module.is_tensor(node)


class UnsafeWhere(Rule):
    code = "TG170"
    name = "unsafe-where"
    nodes = (ast.Call,)
    is_default = False
    summary = "`torch.where` hides a NaN in the forward pass, and lets it through in the backward pass."
    why = """
`torch.where(x > 0, torch.log(x), 0)` computes the logarithm everywhere. In backward the branch that was not chosen
gets the gradient 0, and 0 times an infinite derivative is NaN. Make the argument safe before the operation:
`torch.log(torch.where(x > 0, x, 1))`.
"""
    wrong = """
import torch

def entropy_loss(p: torch.Tensor) -> torch.Tensor:
    return -torch.where(p > 0, p * torch.log(p), 0).sum()
"""
    right = """
import torch

def entropy_loss(p: torch.Tensor) -> torch.Tensor:
    safe = torch.where(p > 0, p, 1)
    return -torch.where(p > 0, p * torch.log(safe), 0).sum()
"""
    silence = "Where no gradient flows through the branch."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        if module.qualified(node.func) != "torch.where" or len(node.args) != 3:
            return
        function = module.function_of(node)
        if function is None or module.has_no_grad(node):
            return
        tested = names_in(resolved(node.args[0], function)) | names_in(node.args[0])
        for branch in node.args[1:]:
            written = resolved(branch, function)
            for one in ast.walk(written):
                risky, what = _risky(one, module)
                if risky is None or module.value(risky) != values.TENSOR:
                    continue
                if is_guarded(risky, function, module) or not names_in(risky) & tested:
                    continue
                if _needs_no_gradient(risky, function, module):
                    continue
                yield Problem(
                    node,
                    f"{what} of {text(risky, 20)} in a branch: its NaN gradient passes torch.where. Guard it first.",
                )
                return


def _risky(node: ast.AST, module: Module) -> tuple[ast.expr | None, str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right, "division"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _is_negative_or_fraction(node.right):
        return node.left, "power"
    names = (
        "log",
        "log2",
        "log10",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "acos",
        "asin",
        "arccos",
        "arcsin",
        "acosh",
        "atanh",
        "logit",
    )
    given = operand(node, module, *names)
    return given, last_name(node) if given is not None else ""


def _is_negative_or_fraction(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 1


class SquareRoot(Rule):
    code = "TG171"
    name = "sqrt-without-epsilon"
    nodes = (ast.Call, ast.BinOp)
    summary = "A square root in a loss or forward, of something that may be zero."
    why = """
The derivative of the square root at 0 is infinite, and infinite times the zero gradient of a square is NaN. One zero
row, such as padding, is enough. Add an epsilon inside the root. (`torch.linalg.vector_norm` and `x.norm()` handle
zero themselves: their gradient there is 0.)
"""
    wrong = """
import torch

def distance_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(((a - b) ** 2).sum(dim=-1)).mean()
"""
    right = """
import torch

def distance_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(((a - b) ** 2).sum(dim=-1) + 1e-12).mean()
"""
    silence = "Where the argument is positive for another reason, or needs no gradient."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if isinstance(node, ast.BinOp):
            is_root = isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 0.5
            given = node.left if is_root and module.value(node.left) == values.TENSOR else None
        else:
            given = operand(node, module, "sqrt")
        function = differentiable(node, module) if given is not None else None
        if given is None or function is None or is_guarded(given, function, module):
            return
        if _needs_no_gradient(given, function, module):
            return
        yield Problem(node, f"sqrt of {text(given, 25)}: infinite gradient at 0. Add an epsilon inside the root.")


_CONSTANTS = ("detach", "alphas", "sigma", "timestep", "cumprod", "config", "torch.tensor(", "schedule", "linspace")


def _needs_no_gradient(node: ast.expr, function: Function, module: Module) -> bool:
    """Detached values, integers, schedules of a diffusion process."""
    written = [resolved(node, function), *(one for name in names_in(node) for one in _bindings(name, function))]
    if any(word in ast.unparse(one) for one in written for word in _CONSTANTS):
        return True
    held = {module.value(one) for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)}
    return bool(held & {values.INT, values.BOOL}) and values.TENSOR not in held


class Logarithm(Rule):
    code = "TG172"
    name = "log-without-epsilon"
    nodes = (ast.Call,)
    is_default = False
    summary = "A logarithm in a loss or forward, of something that may be zero."
    why = """
log(0) is -inf, and its gradient is infinite: the loss, or the gradient of one sample, becomes NaN. For probabilities
compute the logarithm from the logits: `log_softmax`, `logsigmoid`, `binary_cross_entropy_with_logits`. Otherwise
clamp the argument.
"""
    wrong = """
import torch

def nll_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(logits, dim=-1)
    return -(torch.log(p) * target).sum(dim=-1).mean()
"""
    right = """
import torch

def nll_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(torch.log_softmax(logits, dim=-1) * target).sum(dim=-1).mean()
"""
    silence = "Where the argument is positive for another reason, or needs no gradient."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        given = operand(node, module, "log", "log2", "log10")
        function = differentiable(node, module) if given is not None else None
        if given is None or function is None:
            return
        written = resolved(given, function)
        of_softmax = last_name(written) if isinstance(written, ast.Call) else ""
        if of_softmax in ("softmax", "sigmoid"):
            better = "log_softmax" if of_softmax == "softmax" else "torch.nn.functional.logsigmoid"
            yield Problem(node, f"log of {of_softmax}: -inf where it underflows. Use {better} of the logits.")
        elif not is_guarded(given, function, module) and not _needs_no_gradient(given, function, module):
            yield Problem(
                node, f"log of {text(given, 25)}: -inf at 0, with an infinite gradient. Clamp it or add an epsilon."
            )


_MAY_VANISH = frozenset("norm vector_norm sum std var amax abs".split())


class Division(Rule):
    code = "TG173"
    name = "division-without-epsilon"
    nodes = (ast.BinOp,)
    summary = "A division in a loss or forward by a norm, sum or deviation that may be zero."
    why = """
The norm of a zero vector, the standard deviation of a constant row and the sum of an empty mask are 0: the quotient
is NaN or infinite, and so is the gradient, for one padded or degenerate sample. Add an epsilon or clamp the
denominator; `torch.nn.functional.normalize` does so.
"""
    wrong = """
import torch

def cosine_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a / a.norm(dim=-1, keepdim=True)
    b = b / b.norm(dim=-1, keepdim=True)
    return 1 - (a * b).sum(dim=-1).mean()
"""
    right = """
import torch

def cosine_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = torch.nn.functional.normalize(a, dim=-1)
    b = torch.nn.functional.normalize(b, dim=-1)
    return 1 - (a * b).sum(dim=-1).mean()
"""
    silence = "Where the denominator is positive for another reason: the sum of a softmax, of counts."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.BinOp)
        if not isinstance(node.op, ast.Div) or module.value(node.right) not in (values.TENSOR, values.INT):
            return
        function = differentiable(node, module)
        if function is None:
            return
        below = resolved(node.right, function)
        if (
            not isinstance(below, ast.Call)
            or last_name(below) not in _MAY_VANISH
            or is_guarded(below, function, module)
        ):
            return
        if any(_covers(test, node.right) for test, _ in module.conditions(node)) or _needs_no_gradient(
            below, function, module
        ):
            return
        yield Problem(node, f"division by {text(below, 30)}, which may be 0. Add an epsilon or clamp it.")


def _covers(test: ast.expr, below: ast.expr) -> bool:
    """`if mask.sum() > 0:` around the division."""
    return bool(names_in(test) & names_in(below))


class ClampAfterLog(Rule):
    code = "TG174"
    name = "clamp-after-log"
    nodes = (ast.Call,)
    summary = "The result of a logarithm is clamped, instead of its argument."
    why = """
`torch.log(x).clamp(min=-100)` is finite at 0, and its gradient is not: clamp passes 0 back, the logarithm multiplies
it by 1/0, and 0 times infinity is NaN. Clamp before: `torch.log(x.clamp(min=1e-38))`.
"""
    wrong = """
import torch

def log_loss(p: torch.Tensor) -> torch.Tensor:
    return -torch.log(p).clamp(min=-100).mean()
"""
    right = """
import torch

def log_loss(p: torch.Tensor) -> torch.Tensor:
    return -torch.log(p.clamp(min=1e-30)).mean()
"""
    silence = "Where no gradient is needed."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        clamped = operand(node, module, "clamp", "clamp_min", "clip", "clamp_max")
        if clamped is None or module.has_no_grad(node):
            return
        function = module.function_of(node)
        written = resolved(clamped, function)
        inner = (
            operand(written, module, "log", "log2", "log10", "sqrt", "rsqrt") if isinstance(written, ast.Call) else None
        )
        assert isinstance(node, ast.Call)
        if (
            inner is None
            or function is None
            or is_guarded(inner, function, module)
            or _needs_no_gradient(inner, function, module)
        ):
            return
        if last_name(written) != "rsqrt" and not _has_minimum(node, module):
            return
        if last_name(written) == "sqrt":
            return  # TG171
        yield Problem(
            node, f"clamp after {last_name(written)}: NaN gradient where {text(inner, 20)} is 0. Clamp the argument."
        )


def _has_minimum(call: ast.Call, module: Module) -> bool:
    given = call.args[1:] if module.qualified(call.func) else call.args
    return keyword(call, "min") is not None or (bool(given) and last_name(call) != "clamp_max")


RULES = (UnsafeWhere(), SquareRoot(), Logarithm(), Division(), ClampAfterLog())
