"""Operations in place, and how operations are written."""

import ast
import re
from collections.abc import Iterator

from torchguard.lint import _torch_names as names
from torchguard.lint import _values as values
from torchguard.lint._module import Module
from torchguard.lint._rules.base import Problem, Rule, keyword, last_name, text

# Where values are set on purpose, outside of what autograd and a graph see.
_INITIALIZERS = ("init", "reset", "load", "convert", "fill", "update_", "tie_", "merge", "set_", "copy_", "step")


_SETTING = ("init", "cache", "backward", "kernel", "update")


def may_be_differentiated(node: ast.AST, module: Module) -> bool:
    """Whether gradients may be on where a node runs, and the function is not there to set values."""
    if module.has_no_grad(node):
        return False
    owner = module.function_of(node)
    while owner is not None:
        name = owner.name.lower().lstrip("_")
        if name.startswith(_INITIALIZERS) or any(word in name for word in _SETTING):
            return False
        if any(one.arg == "inplace" for one in owner.arguments) or (
            owner.cls is not None and "Cache" in owner.cls.name
        ):
            return False
        if owner.cls is not None and any(_sets_values(values.ref(base)) for base in owner.cls.bases):
            return False
        if owner.cls is None and _is_written_by_hand(module):
            return False
        if any(module.qualified(call.func).startswith("torch.distributed.") for call in owner.calls):
            return False  # collectives work in place anyway
        owner = owner.outer
    return True


def _sets_values(base: str) -> bool:
    """Optimizers work under no_grad, autograd functions below autograd."""
    return base.endswith(("Optimizer", "autograd.Function", ".Function"))


def _is_written_by_hand(module: Module) -> bool:
    """Whether a file holds optimizers, autograd functions or operators: its functions are parts of these."""
    if "torch.library" in module.source or any(name.startswith("triton") for name in module.imported):
        return True
    return any(_sets_values(values.ref(base)) for cls in module.classes.values() for base in cls.bases)


# What optimizers and averages update.
_STATE = ("param", "exp_avg", "grad", "momentum", "buf", "ema", "running", "cache")
# What holds integers, by its name.
_INTEGERS = re.compile(r"(?:^|_)(?:idx|inds?|index|indices|ids?|coords?|counts?|positions?|labels?|masks?)(?:_|$)")


def is_state(node: ast.expr) -> bool:
    name = last_name(node.value if isinstance(node, ast.Subscript) else node).lower()
    return name in ("p", "v", "m") or any(word in name for word in _STATE) or bool(_INTEGERS.search(name))


def is_fresh(node: ast.AST, module: Module) -> bool:
    """Whether an expression makes a new tensor that nothing else refers to yet."""
    if isinstance(node, ast.BinOp | ast.Compare):
        return module.is_tensor(node)
    if not isinstance(node, ast.Call):
        return False
    package, _, last = module.qualified(node.func).rpartition(".")
    if package in ("torch", "torch.nn.functional"):
        return last not in _MAY_ALIAS and keyword(node, "out") is None
    if isinstance(node.func, ast.Attribute) and module.is_tensor(node.func.value):
        attribute = node.func.attr
        if attribute in names.IN_PLACE_METHODS:
            return is_fresh(node.func.value, module)
        return attribute in names.TENSOR_METHODS and attribute not in _MAY_ALIAS
    return False


# Operations that may return their input, or a view of it.
_MAY_ALIAS = frozenset(
    """
    adjoint alpha_dropout as_strided as_tensor asarray bfloat16 bool broadcast_to byte char conj contiguous cpu cuda
    detach diagonal double dropout dropout1d dropout2d dropout3d expand expand_as feature_alpha_dropout flatten
    float from_dlpack from_numpy frombuffer half imag int long movedim moveaxis narrow permute pin_memory positive
    ravel real resolve_conj resolve_neg requires_grad_ reshape reshape_as select short squeeze swapaxes swapdims t
    to transpose type type_as unfold unflatten unsqueeze view view_as view_as_complex view_as_real xpu where pad
    interpolate new nan_to_num fold normalize coalesce to_dense values indices as_subclass sum_to_size chalf tile
    repeat
    """.split()
)


class InPlaceMethod(Rule):
    code = "TG120"
    name = "in-place-method"
    nodes = (ast.Call,)
    is_fixable = True
    summary = "A method changes a tensor in place, where gradients may be on."
    why = """
`x.add_(1)` changes what every view of x and every other name of it holds. If autograd saved x, backward fails; if it
did not, a caller's tensor changes without notice. In a compiled graph it saves nothing: Inductor chooses buffers
itself. Not reported: under `torch.no_grad()`, in initialization and optimizers, on `.data`, on integers, and on a
buffer that the function has just made and fills.
"""
    wrong = """
import torch

def shift(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)
"""
    right = """
import torch

def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1
"""
    silence = "Where memory decides, and no gradient needs the old values."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        func = node.func
        if (
            not isinstance(func, ast.Attribute)
            or not func.attr.endswith("_")
            or func.attr not in names.IN_PLACE_METHODS
        ):
            return
        if module.value(func.value) != values.TENSOR or is_state(func.value) or _is_asked_for(node, module):
            return
        if not may_be_differentiated(node, module) or _is_data(func.value) or _fills_fresh(func, module):
            return
        if (func.attr not in _OPERATORS and _is_own_buffer(func.value, module)) or _leaves_torch(node, module):
            return
        if module.value(_root(func.value)) == values.SELF and not module.in_traced_function(node):
            return  # a buffer of a module, set outside of its forward
        yield Problem(node, f"{text(func.value, 20)}.{func.attr}() works in place. Use {_instead(func.attr)}.")


_OPERATORS = {"add_": "+", "sub_": "-", "mul_": "*", "div_": "/", "pow_": "**"}


def _instead(method: str) -> str:
    if method in _OPERATORS:
        return f"x = x {_OPERATORS[method]} y"
    if method[:-1] in names.TENSOR_METHODS:
        return f"x = x.{method[:-1]}(...)"
    return {"zero_": "torch.zeros_like(x)", "fill_": "torch.full_like(x, value)", "copy_": "x = y.clone()"}.get(
        method, "a new tensor"
    )


def _is_asked_for(node: ast.AST, module: Module) -> bool:
    """`x.relu_() if self.inplace else x.relu()`."""
    return any("inplace" in ast.unparse(test) for test, _ in module.conditions(node))


def _is_own_buffer(node: ast.expr, module: Module) -> bool:
    """Whether a function fills a tensor that it made itself: one from a factory or a clone, or parts of a local one."""
    function = module.function_of(node)
    root = _root(node)
    if function is None or not isinstance(root, ast.Name):
        return False
    if any(one.arg == root.id for one in function.arguments):
        return False
    if any(isinstance(one, ast.Subscript) for one in ast.walk(node)):
        return root.id != "self"
    made = [
        one.value
        for one in function.body
        if isinstance(one, ast.Assign)
        and one.lineno < node.lineno
        and any(isinstance(target, ast.Name) and target.id == root.id for target in one.targets)
    ]
    return bool(made) and _makes(made[-1])


def _root(node: ast.expr) -> ast.expr:
    """`x` of `x[0].data` and of `x.view(-1)`."""
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _leaves_torch(node: ast.AST, module: Module) -> bool:
    """`x.clamp_(0).numpy()`."""
    for parent, child in module.inside(node):
        if isinstance(parent, ast.Attribute) and parent.attr in ("numpy", "tolist", "item"):
            return True
        if not isinstance(parent, ast.Attribute) and not (isinstance(parent, ast.Call) and parent.func is child):
            return False
    return False


def _makes(node: ast.expr) -> bool:
    """`torch.zeros(3)`, `x.new_zeros(3)`, `torch.zeros_like(x)`, `x.clone()`, also moved or reshaped."""
    while isinstance(node, ast.Call):
        name = last_name(node)
        if name in names.FACTORIES or name.startswith("new_") or name.endswith("_like") or name == "clone":
            return True
        if not isinstance(node.func, ast.Attribute):
            return False
        node = node.func.value
    return False


def _is_data(node: ast.expr) -> bool:
    """`x.data`, `x.data[0]`, `x.grad`."""
    return any(isinstance(one, ast.Attribute) and one.attr in ("data", "grad") for one in ast.walk(node))


_RANDOM = frozenset(
    """
    uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ fill_ zero_
    """.split()
)


def _fills_fresh(func: ast.Attribute, module: Module) -> bool:
    """`torch.empty(3).uniform_()`: the tensor was just made, and this gives it its first values."""
    made = func.value
    if isinstance(made, ast.Call):
        last = last_name(made)
        return (
            func.attr in _RANDOM
            or last in names.FACTORIES
            or last in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like")
            or (last.startswith("new_"))
        )
    return False


class AugmentedAssignment(Rule):
    code = "TG121"
    name = "augmented-assignment"
    nodes = (ast.AugAssign,)
    is_fixable = True
    summary = "`x += y` on a tensor is an operation in place."
    why = """
It reads like `x = x + y` and is `x.add_(y)`: the tensor that x was made from, and every view of it, changes too. In a
residual block, `out += shortcut` fails in backward as soon as the layer before saves its output.
"""
    wrong = """
import torch

def residual(x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
    x += shortcut
    return x
"""
    right = """
import torch

def residual(x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
    x = x + shortcut
    return x
"""
    silence = "Where memory decides, and no gradient needs the old values."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.AugAssign)
        if module.value(node.target) != values.TENSOR or not may_be_differentiated(node, module):
            return
        if _is_data(node.target) or is_state(node.target) or _is_asked_for(node, module):
            return
        if isinstance(node.target, ast.Subscript) and _is_own_buffer(node.target, module):
            return
        if isinstance(node.target, ast.Attribute) and not module.in_traced_function(node):
            return  # a counter or an average of a module, updated outside of its forward
        target, op = text(node.target, 20), _SYMBOLS.get(type(node.op), "+")
        is_part = isinstance(node.target, ast.Subscript)
        instead = "Build a new one: torch.where, index_put, cat." if is_part else f"Write {target} = {target} {op} ..."
        yield Problem(node, f"{target} {op}= ... changes the tensor in place. {instead}")


_SYMBOLS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.MatMult: "@",
    ast.LShift: "<<",
    ast.RShift: ">>",
}


class InPlaceArgument(Rule):
    code = "TG122"
    name = "inplace-argument"
    nodes = (ast.Call,)
    is_fixable = True
    summary = "`inplace=True` of a layer or function."
    why = """
`nn.ReLU(inplace=True)` overwrites its input: a residual connection or a hook that holds the input then sees the
output. What it saves in eager mode, Inductor saves by itself.
"""
    wrong = """
import torch
from torch import nn

act = nn.ReLU(inplace=True)
"""
    right = """
import torch
from torch import nn

act = nn.ReLU()
"""
    silence = "Where memory in eager mode decides."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        given = keyword(node, "inplace")
        if isinstance(given, ast.Constant) and given.value is True and module.qualified(node.func).startswith("torch."):
            yield Problem(node, f"{last_name(node)}(inplace=True) overwrites its input. Leave inplace out.")


class OutArgument(Rule):
    code = "TG123"
    name = "out-argument"
    nodes = (ast.Call,)
    summary = "`out=` writes into an existing tensor."
    why = """
Functions with `out=` do not support autograd: they raise if an argument requires grad. They also resize or overwrite
a tensor that others may hold.
"""
    wrong = """
import torch

def total(a: torch.Tensor, b: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    torch.add(a, b, out=buffer)
    return buffer
"""
    right = """
import torch

def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b
"""
    silence = "Under `torch.no_grad()` with preallocated buffers (there it is not reported)."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        given = keyword(node, "out")
        if given is None or isinstance(given, ast.Constant | ast.Call):
            return  # none, or a tensor that was just made
        package, _, last = module.qualified(node.func).rpartition(".")
        known = package in ("torch", "torch.linalg", "torch.fft", "torch.special") and (
            last in names.TENSOR_FUNCTIONS or last in names.TENSORS_FUNCTIONS or package != "torch"
        )
        if known and may_be_differentiated(node, module):
            yield Problem(
                node, f"torch.{last}(out={text(given, 20)}) overwrites a tensor, and has no gradient. Use the result."
            )


class DataAttribute(Rule):
    code = "TG221"
    name = "data-attribute"
    nodes = (ast.Attribute,)
    is_fixable = True
    summary = "`.data` reads a tensor behind autograd's back."
    why = """
`x.data` shares memory with x but not its version counter: if the values are changed later, autograd does not notice,
and gradients are wrong without an error. `x.detach()` gives the same values and keeps the counter. To write, use
`with torch.no_grad()`.
"""
    wrong = """
import torch

def plain(x: torch.Tensor) -> torch.Tensor:
    return x.data.mean()
"""
    right = """
import torch

def plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().mean()
"""
    silence = "Where a parameter's storage is swapped on purpose (`param.data = ...`), which is not reported."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Attribute)
        if node.attr == "data" and isinstance(node.ctx, ast.Load) and module.is_tensor(node.value):
            yield Problem(
                node, f"{text(node, 30)} is hidden from autograd's checks. Use .detach(), or no_grad to write."
            )


RULES = (InPlaceMethod(), AugmentedAssignment(), InPlaceArgument(), OutArgument(), DataAttribute())
