"""The base class of rules, and the questions that several of them ask."""

import abc
import ast
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchguard.lint._module import Function, Module


class Problem(NamedTuple):
    """What a rule found: where, what, and what to do."""

    node: ast.AST
    message: str


class Rule(abc.ABC):
    """A rule. `check` is called for every node of the types in `nodes`.

    The text is the page of the rule. The tests hold that `wrong` is reported by this rule and that `right` is not.
    """

    code: str
    name: str
    nodes: tuple[type[ast.AST], ...]
    is_default = True
    is_fixable = False
    summary: str  # one sentence
    why: str
    wrong: str
    right: str
    silence: str  # when it is right to

    @abc.abstractmethod
    def check(self, node: ast.AST, module: Module) -> Iterable[Problem]: ...


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, of `c` and of `a.b.c()`."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def text(node: ast.AST, longest: int = 40) -> str:
    """The source of an expression, cut."""
    line = " ".join(ast.unparse(node).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg in names), None)


def has_spread(call: ast.Call) -> bool:
    """Whether a call passes on `*args` or `**kwargs`, which may hold anything."""
    return any(one.arg is None for one in call.keywords) or any(isinstance(one, ast.Starred) for one in call.args)


def is_method(call: ast.AST, *names: str) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names


def statement(node: ast.AST, module: Module) -> ast.stmt:
    """The statement that a node stands in."""
    if isinstance(node, ast.stmt):
        return node
    return next(parent for parent in module.parents(node) if isinstance(parent, ast.stmt))


def names_in(node: ast.AST) -> set[str]:
    """The variables of an expression, without functions that it calls."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


_BINDING = (ast.AnnAssign, ast.AugAssign, ast.For, ast.NamedExpr, ast.comprehension)


def assigned_once(name: ast.AST, function: Function | None) -> ast.expr | None:
    """The expression that a variable stands for, if its function binds it in exactly one place."""
    if not isinstance(name, ast.Name) or function is None:
        return None
    found: list[ast.expr | None] = []
    for node in function.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name.id:
                    found.append(node.value)
                elif not isinstance(target, ast.Name | ast.Attribute | ast.Subscript) and name.id in names_in(target):
                    found.append(None)
        elif isinstance(node, _BINDING) and name.id in names_in(node.target):
            found.append(node.value if isinstance(node, ast.NamedExpr | ast.AnnAssign) else None)
    is_parameter = any(one.arg == name.id for one in function.arguments)
    return found[0] if len(found) == 1 and not is_parameter else None


_LOSS = re.compile(
    r"(?:^|_)loss(?:es)?(?:_fn|_function|_fun)?$|^(?:calculate|compute|calc|get)_\w*loss(?:es)?(?:_|$)|^loss_"
)
_EVALUATION = re.compile(
    r"^_?(?:evaluate|eval|validate|validation|infer|inference|predict)(?:_|$)|_(?:evaluate|eval|inference|predict)$"
    r"|^test(?:_epoch|_loop|_model|_step)?$|^(?:run|do)_(?:evaluation|eval|validation|inference)"
)
_TRAINING = re.compile(r"^_?(?:train|training|fit)(?:_|$)|_train$|^(?:run|do)_train")
MODEL_NAMES = frozenset(
    """
    model net network module encoder decoder classifier generator discriminator backbone
    """.split()
)


def is_loss(function: Function) -> bool:
    """Whether a function computes a loss, by its name or its class."""
    if function.cls is not None and function.name == "forward":
        return function.cls.name.endswith(("Loss", "Criterion"))
    return bool(_LOSS.search(function.name))


def is_evaluation(function: Function) -> bool:
    return bool(_EVALUATION.search(function.name))


def is_training(function: Function) -> bool:
    return bool(_TRAINING.search(function.name))


def tensor_parameters(function: Function) -> list[str]:
    from torchguard.lint._values import IS_TENSOR

    return [name for name, held in function.parameters.items() if held in IS_TENSOR]


def differentiable(node: ast.AST, module: Module) -> Function | None:
    """The forward or loss function around a node, if gradients are on there."""
    function = module.function_of(node)
    if function is None:
        return None
    if not (function.is_forward or is_loss(function) or function.is_compiled or function.is_differentiated):
        return None
    return None if module.has_no_grad(node) else function


def calls_of(function: Function, *names: str) -> Iterator[ast.Call]:
    """The calls of a function or method with one of these last names."""
    return (call for call in function.calls if last_name(call) in names)
