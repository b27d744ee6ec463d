"""The dtype and device of new tensors."""

import ast
import re
from collections.abc import Iterator

from torchguard.lint import _torch_names as names
from torchguard.lint import _values as values
from torchguard.lint._module import Function, Module
from torchguard.lint._rules.base import (
    FUNCTIONS,
    Problem,
    Rule,
    calls_of,
    has_spread,
    is_loss,
    keyword,
    last_name,
    tensor_parameters,
    text,
)

_CONVERSIONS = frozenset(
    """
    to type type_as float double half bfloat16 long int short byte bool cuda xpu npu new_tensor
    """.split()
)
_DTYPE_CONVERSIONS = _CONVERSIONS - {"cuda", "xpu", "npu"}


def factory(node: ast.AST, module: Module) -> str:
    """`zeros` of `torch.zeros(...)`, or ""."""
    package, _, last = module.qualified(node.func).rpartition(".") if isinstance(node, ast.Call) else ("", "", "")
    return last if package == "torch" and last in names.FACTORIES else ""


def _is_converted(call: ast.Call, module: Module, methods: frozenset[str]) -> bool:
    """Whether a method converts the new tensor at once, as in `torch.zeros(3).to(x)`."""
    for parent, child in module.inside(call):
        if isinstance(parent, ast.Attribute):
            if parent.attr in methods:
                return True
        elif isinstance(parent, ast.Subscript) and parent.value is child:
            continue
        elif not (isinstance(parent, ast.Call) and parent.func is child):
            return False
    return False


def _stands_in(call: ast.Call, module: Module, *callables: str) -> bool:
    """Whether the new tensor is an argument of one of these, as in `nn.Parameter(torch.zeros(3))`."""
    return any(
        isinstance(parent, ast.Call) and child is not parent.func and last_name(parent) in callables
        for parent, child in module.inside(call)
    )


class NoDtype(Rule):
    code = "TG110"
    name = "no-dtype"
    nodes = (ast.Call,)
    summary = "A tensor is created in whatever the default dtype is."
    why = """
`torch.zeros(3)` is float32, float64 or bfloat16, depending on `torch.set_default_dtype`, which libraries change while
they load a model. A mask or position made like this silently promotes the result, or rounds it. Reported are the
functions whose dtype the call does not show: `zeros`, `ones`, `empty`, `rand`, `randn`, `eye`, `linspace`,
`logspace`, and `torch.tensor` of float literals. Parameters and buffers of a module are left out: they are meant to
follow the default.
"""
    wrong = """
import torch

def mask(n: int, device: torch.device) -> torch.Tensor:
    return torch.ones(n, n, device=device).tril()
"""
    right = """
import torch

def mask(n: int, device: torch.device) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.float32, device=device).tril()
"""
    silence = "Where the result should follow the default dtype."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        made = factory(node, module)
        is_float_data = made == "tensor" and bool(node.args) and _holds_float_literals(node.args[0])
        if made == "arange":
            is_float_data = any(_holds_float_literals(one) for one in node.args)
        elif made == "full":
            is_float_data = len(node.args) > 1 and _holds_float_literals(node.args[1])
        if not (made in names.DEFAULT_DTYPE_FACTORIES or is_float_data) or has_spread(node):
            return
        if keyword(node, "dtype", "out") is not None or _is_converted(node, module, _DTYPE_CONVERSIONS):
            return
        if made == "normal" and any(module.value(one) in values.IS_TENSOR for one in node.args):
            return
        if _stands_in(node, module, "Parameter", "register_buffer", "register_parameter", "Buffer", "add_state"):
            return
        if any(module.qualified(one) == "torch" for one in node.args):
            return
        function = module.function_of(node)
        if function is not None and function.cls is not None and "init" in function.name:
            return
        if _dtype_does_not_matter(node, module):
            return
        if made in ("empty", "zeros", "ones") and len(node.args) == 1 and _is_zero(node.args[0]):
            return  # a placeholder without elements
        yield Problem(
            node, f"torch.{made}: no dtype, so the global default decides. Pass dtype=, such as that of an input."
        )


def _dtype_does_not_matter(call: ast.Call, module: Module) -> bool:
    """`torch.rand(1)`, to be compared; `torch.zeros(3).tolist()`; `x[0] = torch.tensor(1.0)`."""
    if last_name(call) == "rand" and len(call.args) == 1 and ast.unparse(call.args[0]) in ("1", "[]", "()"):
        return True
    for parent, child in module.inside(call):
        if isinstance(parent, ast.Compare):
            return True
        if isinstance(parent, ast.Attribute) and parent.attr in ("item", "tolist", "numpy"):
            return True
        if isinstance(parent, ast.Assign):
            return child is parent.value and all(isinstance(target, ast.Subscript) for target in parent.targets)
        is_chain = isinstance(parent, ast.Attribute | ast.Subscript) or (
            isinstance(parent, ast.Call) and parent.func is child
        )
        if not is_chain:
            return False
    return False


def _holds_float_literals(node: ast.expr) -> bool:
    elements = [*ast.walk(node)]
    constants = [one.value for one in elements if isinstance(one, ast.Constant)]
    is_literal = all(
        isinstance(one, ast.Constant | ast.List | ast.Tuple | ast.UnaryOp | ast.USub | ast.Load) for one in elements
    )
    return is_literal and any(isinstance(one, float) for one in constants)


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


class NoDevice(Rule):
    code = "TG111"
    name = "no-device"
    nodes = (ast.Call,)
    summary = "A function that takes tensors creates one on the CPU, or on whatever the default device is."
    why = """
The new tensor is on the CPU while the inputs may be on a GPU: the first operation on both fails, or, if it is moved
afterwards, waits for a copy. In a compiled graph it is a host tensor that is copied in every call.
"""
    wrong = """
import torch

def add_positions(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1], dtype=x.dtype)
    return x + positions
"""
    right = """
import torch

def add_positions(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    return x + positions
"""
    silence = "Where the tensor belongs on the CPU: lengths for `pack_padded_sequence`, indices of a CPU table."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        made = factory(node, module)
        function = module.function_of(node)
        if not made or function is None or has_spread(node) or made == "normal":
            return
        if keyword(node, "device", "out", "pin_memory") is not None or _is_converted(node, module, _CONVERSIONS):
            return
        given = [name for name in tensor_parameters(function) if function.parameters[name] != values.FLAGS]
        if not given or not (function.is_forward or is_loss(function) or made not in ("as_tensor", "tensor")):
            return
        if made == "as_tensor" and node.args and module.is_tensor(node.args[0]):
            return
        if not _meets(node, given, module):
            return
        yield Problem(
            node, f"torch.{made}: no device, so it is not on that of {given[0]}. Pass device={given[0]}.device."
        )


def _meets(call: ast.Call, given: list[str], module: Module) -> bool:
    """Whether the new tensor meets a parameter in an operation: directly, or under the name that it is bound to."""
    for parent, child in module.inside(call):
        if isinstance(parent, ast.BinOp):
            other = parent.right if child is parent.left else parent.left
            if _is_given(other, given, module):
                return True
        elif isinstance(parent, ast.Call) and parent.func is not child:
            package = module.qualified(parent.func).rpartition(".")[0]
            if package in ("torch", "torch.nn.functional"):
                return any(_is_given(one, given, module) for one in _operands(parent))
            return False
        elif isinstance(parent, ast.Assign):
            target = parent.targets[0]
            function = module.function_of(call)
            is_name = len(parent.targets) == 1 and isinstance(target, ast.Name)
            return is_name and function is not None and _name_meets(target.id, parent, given, function, module)  # pyright: ignore
    return False


def _operands(call: ast.Call) -> list[ast.expr]:
    found: list[ast.expr] = []
    for one in call.args:
        found.extend(one.elts if isinstance(one, ast.List | ast.Tuple) else [one])
    return found


def _is_given(node: ast.expr, given: list[str], module: Module) -> bool:
    """Whether an operand is one of the parameters, as it came in or as a view of it."""
    if not module.is_tensor(node):
        return False
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        if isinstance(node, ast.Call) and last_name(node) in ("cpu", "to"):
            return False
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in given


def _name_meets(name: str, bound: ast.Assign, given: list[str], function: Function, module: Module) -> bool:
    """Whether the variable is an operand beside a parameter, without being moved before."""
    for node in function.body:
        if getattr(node, "lineno", 0) <= bound.lineno:
            continue
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets):
            return False  # bound again, perhaps moved
        if isinstance(node, ast.BinOp):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(one, ast.Name) and one.id == name and _is_given(other, given, module):
                    return True
    return False


_DEVICE = re.compile(r"cuda(?::\d+)?$")
_ABOUT_CUDA = re.compile(r"cuda|gpu|triton|nccl|tensorrt|autocast|scaler|offload", re.IGNORECASE)


class HardCodedCuda(Rule):
    code = "TG210"
    name = "hard-coded-cuda"
    nodes = (ast.Call, ast.FunctionDef, ast.AsyncFunctionDef)
    summary = 'A device is written into the code: `"cuda"`, `.cuda()`.'
    why = """
The code runs on machines with an NVIDIA GPU alone, and on the first GPU of them. Take the device from a tensor or
parameter (`x.device`), or as an argument. A choice that asks first (`"cuda" if torch.cuda.is_available() else "cpu"`)
is not reported.
"""
    wrong = """
import torch

def noise(n: int) -> torch.Tensor:
    return torch.randn(n, dtype=torch.float32, device="cuda")
"""
    right = """
import torch

def noise(n: int, device: torch.device) -> torch.Tensor:
    return torch.randn(n, dtype=torch.float32, device=device)
"""
    silence = "In code for one GPU on purpose: kernels, benchmarks, tests that are marked for a GPU."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if not isinstance(node, ast.Call):
            function = module.functions[node]
            owner = function.cls.name if function.cls else ""
            if _ABOUT_CUDA.search(f"{function.name} {owner}"):
                return
            for default in (*node.args.defaults, *node.args.kw_defaults):  # pyright: ignore[reportAttributeAccessIssue]
                if isinstance(default, ast.Constant) and _is_cuda(default):
                    yield Problem(
                        default, f'default {default.value!r}: wrong where there is no CUDA device. Use "cpu" or None.'
                    )
            return
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "cuda" and not module.qualified(func):
            held = module.value(func.value)
            is_known = held in values.IS_TENSOR or held in ("", values.SELF) or held.startswith("layer:")
            is_plain = not node.args and not node.keywords and is_known and module.imports_torch
            if is_plain and not _asks_for_cuda(node, module):
                yield Problem(node, f"{text(func.value, 20)}.cuda() fails without CUDA. Use .to(device).")
            return
        package, _, last = module.qualified(func).rpartition(".")
        is_to = isinstance(func, ast.Attribute) and func.attr == "to" and not package
        candidates = [keyword(node, "device")] if package.startswith("torch") or is_to else []
        if is_to or (package == "torch" and last == "device"):
            candidates.append(node.args[0] if len(node.args) == 1 else None)
        for one in candidates:
            if isinstance(one, ast.Constant) and _is_cuda(one) and not _asks_for_cuda(node, module):
                yield Problem(
                    one, f"device {one.value!r} is written into the code. Pass a device, or take that of an input."
                )


def _is_cuda(node: ast.Constant) -> bool:
    return isinstance(node.value, str) and bool(_DEVICE.fullmatch(node.value))


def _asks_for_cuda(node: ast.AST, module: Module) -> bool:
    """Whether the code around asks whether there is a CUDA device, or deals with CUDA anyway."""
    for test, _ in module.conditions(node):
        if re.search(r"cuda|gpu|device|accelerator", ast.unparse(test), re.IGNORECASE):
            return True
    if any(isinstance(parent, ast.BoolOp) for parent, _ in module.inside(node)):
        return True  # `accelerator() or torch.device("cuda")`
    function = module.function_of(node)
    if function is None:
        return False
    return bool(_ABOUT_CUDA.search(f"{function.name} {function.cls.name if function.cls else ''}")) or any(
        module.qualified(call.func).startswith("torch.cuda.") for call in function.calls
    )


_REDUCING = frozenset(["mean", "sum"])
_CONVERTING = frozenset("to float double type type_as autocast upcast".split())


class LossDtype(Rule):
    code = "TG112"
    name = "loss-without-dtype"
    nodes = FUNCTIONS
    summary = "A loss is computed in the dtype of its inputs."
    why = """
Under bfloat16 or float16 a sum over many elements loses most of its digits or overflows. A loss should convert its
inputs to the dtype that it computes in, float32 by default: `predictions.to(dtype=dtype)`. Losses of torch
that autocast runs in float32 do so under autocast only.
"""
    wrong = """
import torch

def l1_loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.abs(predictions - targets).mean()
"""
    right = """
import torch

def l1_loss(
    predictions: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    predictions = predictions.to(dtype=dtype)
    targets = targets.to(dtype=dtype)
    return torch.abs(predictions - targets).mean()
"""
    silence = "Where callers convert, or where the inputs are float32 by contract."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if not is_loss(function) or function.is_stub:
            return
        given = [name for name in tensor_parameters(function) if function.parameters[name] == values.TENSOR]
        if len(given) < 2 or not any(_computes_loss(call, module) for call in function.calls):
            return
        if any(last_name(call) in _CONVERTING for call in function.calls) or any(
            keyword(call, "dtype") is not None for call in function.calls
        ):
            return
        if not any(True for one in function.returns if one.value is not None and module.is_tensor(one.value)):
            return
        if any(True for _ in calls_of(function, "compute_loss", "loss_fn", "super")):
            return
        yield Problem(
            node,
            f"{function.name} computes in the dtype of {', '.join(given[:2])}. Convert first: "
            f"{given[0]}.to(dtype=torch.float32).",
        )


def _computes_loss(call: ast.Call, module: Module) -> bool:
    package, _, last = module.qualified(call.func).rpartition(".")
    if package in ("torch.nn.functional", "torch"):
        return last in _REDUCING or last.endswith(("_loss", "cross_entropy", "kl_div", "_with_logits"))
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in _REDUCING
        and module.value(call.func.value) == values.TENSOR
    )


RULES = (NoDtype(), NoDevice(), LossDtype(), HardCodedCuda())
