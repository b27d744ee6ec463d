"""Private torch is used in `torchguard._torch` alone: read off the syntax tree of every other file."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import torchguard

SOURCE = Path(torchguard.__file__).parents[1]
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if "_torch" not in path.relative_to(SOURCE).parts]

# (file, name): why it is no leak.
EXCEPTIONS = {
    ("torchguard/_watch/wrapper.py", "_apply"): (
        "nn.Module calls `_apply` for `to`, `cuda`, `half` and the like, and has no public hook for that: "
        "a class has to override it, which a seam cannot do for it"
    ),
    ("torchguard/integrations/transformers.py", "_prepare_inputs"): (
        "Hugging Face's, not torch's: `Trainer.training_step`, which the mixin replaces, calls it, and there is no "
        "public name"
    ),
}
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*|torch\._C(\.\w+)*|torch\.fx\.experimental(\.\w+)*")
# What the standard library calls private, and documents.
STANDARD = {"_exit", "_getframe", "_replace", "_fields", "_make", "_asdict"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def names_of_torch() -> frozenset[str]:
    """The private attributes of the objects of torch that torchguard handles."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output(node)
    x = torch.ones(1)
    objects = [nn.Linear(1, 1), x, nn.Parameter(x), x.untyped_storage(), graph, node]
    objects += [fx.GraphModule(nn.Module(), graph), torch.ops.aten.mm.default, torch.ops.higher_order.cond]
    objects += [torch.SymInt, torch.autograd.Function, torch.autograd.forward_ad, torch.compile(nn.Linear(1, 1))]
    return frozenset(name for one in objects for name in dir(one) if is_private(name))


def defined_in(tree: ast.AST) -> set[str]:
    """The private names that code gives its own functions, classes, attributes and variables."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@functools.cache
def defined_anywhere() -> frozenset[str]:
    modules = {part.removesuffix(".py") for path in FILES for part in path.parts}
    return frozenset(modules.union(*(defined_in(ast.parse(path.read_text())) for path in FILES)))


def leaks(code: str, file: str = "") -> list[str]:
    """Each use of private torch in code, as `line: text`."""
    tree = ast.parse(code)
    own = defined_in(tree)
    operators = {  # `aten = torch.ops.aten`
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []

    def report(node: ast.AST, name: str, text: str) -> None:
        if (file, name) not in EXCEPTIONS:
            found.append(f"{node.lineno}: {text}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if PRIVATE_MODULE.fullmatch(alias.name) or alias.name.split(".")[0] == "functorch":
                    report(node, alias.name, f"import {alias.name}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "functorch"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if PRIVATE_MODULE.fullmatch(full) or is_private(alias.name) or full.startswith("functorch"):
                    report(node, full, f"from {node.module} import {alias.name}")
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner.startswith("torch.ops") or owner.split(".")[0] in operators:
                continue  # an underscored operator is a name of ATen's
            if PRIVATE_MODULE.fullmatch(f"{owner}.{node.attr}") or f"{owner}.{node.attr}" == "fx.experimental":
                report(node, node.attr, f"{owner}.{node.attr}")
            elif is_private(node.attr) and owner not in ("self", "cls"):
                is_of_torch = node.attr in names_of_torch() and node.attr not in own
                if is_of_torch or node.attr not in defined_anywhere() | own | STANDARD:
                    report(node, node.attr, f"{owner}.{node.attr}")
            elif is_private(node.attr) and node.attr in names_of_torch() and node.attr not in own:
                report(node, node.attr, f"{owner}.{node.attr}")
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in dir(nn.Module) and is_private(method.name):
                    report(method, method.name, f"def {method.name} overrides nn.Module's")
        for text in looked_up_by(node):
            if PRIVATE_MODULE.fullmatch(text) or (text in names_of_torch() and text not in own):
                report(node, text, repr(text))
    return found


def looked_up_by(node: ast.AST) -> list[str]:
    """The names that are written as strings: `getattr(x, "_y")`, `vars(x)["_y"]`, `import_module("torch._y")`."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        parts = [node.slice]
    elif isinstance(node, ast.Call) and re.search(r"attr$|get$|pop$|setdefault$|import", ast.unparse(node.func)):
        parts = node.args
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_torch_is_used_behind_the_seam_alone(path):
    assert leaks(path.read_text(), str(path.relative_to(SOURCE))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "import torch._dynamo.config as config",
        "from torch._guards import TracingContext",
        "from torch import _C",
        "from torch.utils import _pytree as pytree",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "from torch.fx import experimental",
        "from functorch.compile import min_cut_rematerialization_partition",
        "torch._dynamo.reset()",
        "torch._C._set_grad_enabled(True)",
        "torch.fx.experimental.symbolic_shapes",
        "fx.experimental",
        "module._modules",
        "module._forward_hooks.clear()",
        "self._parameters",
        "super()._apply(fn)",
        "tensor._version",
        "op._schema.returns",
        "node._rename('x')",
        "node._dynamo_source",
        "getattr(module, '_orig_mod')",
        "vars(module)['_buffers']",
        "importlib.import_module('torch._inductor')",
        "class Mine(nn.Module):\n    def _apply(self, fn): pass",
    ],
)
def test_a_leak_is_found(code):
    assert leaks(code)


@pytest.mark.parametrize(
    "code",
    [
        "torch.ops.aten._unsafe_view.default",
        "aten = torch.ops.aten\naten._to_copy.default",
        "torch.__version__",
        "from torch import fx",
        "self._name = 1\nself._name",
        "sys._getframe(1)",
        "'Call torch._dynamo.reset() first.'",
    ],
)
def test_what_is_public_or_torchguards_own_is_no_leak(code):
    assert leaks(code) == []


def test_every_exception_is_used():
    for file, name in EXCEPTIONS:
        assert name in (SOURCE / file).read_text()


def test_every_attribute_on_objects_of_torch_is_listed():
    """The docstring of `_watch` names each attribute that torchguard hangs on tensors, modules and the like."""
    attribute = re.compile(r"_torchguard\w*|_fx_\w+|torchguard_line")
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    strings = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    listed = set(re.findall(r"`(_torchguard\w*|_fx_\w+|torchguard_line)`", torchguard._watch.__doc__))
    assert listed == {text for text in strings if attribute.fullmatch(text)}
