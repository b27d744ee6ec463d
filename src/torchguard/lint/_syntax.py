"""A parsed file: its functions and classes, and every node by its type."""

import ast
from collections import defaultdict
from functools import cached_property

from torchguard.lint import _values as values
from torchguard.lint._values import IS_TENSOR, ref

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_NOT_TRACED = frozenset(
    (
        "torch.compiler.disable",
        "torch._dynamo.disable",
        "torch.jit.ignore",
        "torch.jit.unused",
        "torch.compiler.allow_in_graph",
        "torch._dynamo.allow_in_graph",
    )
)
# Methods that give attributes their first value.
SETUP = frozenset("__init__ __new__ setup build reset_parameters _init_weights init_weights".split())


class Function:
    """A function or method."""

    def __init__(self, node: FunctionNode, cls: "Class | None", outer: "Function | None") -> None:
        self.node = node
        self.name = node.name
        self.cls = cls  # whose method it is
        self.outer = outer
        self.locals: set[str] = set()
        self.not_local: set[str] = set()  # global, nonlocal
        self.is_compiled = False
        self.is_differentiated = False  # by torch.func, or because it calls backward itself
        self.decorators: list[str] = []  # qualified names
        self.parameters: dict[str, str] = {}  # what each holds at the start

    @cached_property
    def arguments(self) -> list[ast.arg]:
        """All parameters but self and cls, `*args` and `**kwargs`."""
        arguments = self.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return every[1:] if self.cls and every and "staticmethod" not in self.decorators else every

    @cached_property
    def body(self) -> list[ast.AST]:
        """Every node of the body, without those of nested functions and classes, in source order."""
        found: list[ast.AST] = []
        stack: list[ast.AST] = [*reversed(self.node.body)]
        while stack:
            node = stack.pop()
            found.append(node)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                stack.extend(reversed([*ast.iter_child_nodes(node)]))
        return found

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.body if isinstance(node, ast.Call)]

    @cached_property
    def returns(self) -> list[ast.Return]:
        return [node for node in self.body if isinstance(node, ast.Return)]

    @property
    def is_forward(self) -> bool:
        """Whether this is the forward method of a module, not of an autograd function."""
        return (
            self.name == "forward"
            and self.cls is not None
            and self.cls.is_module
            and "staticmethod" not in self.decorators
        )

    @cached_property
    def is_traced(self) -> bool:
        """Whether torch.compile or an export sees this function: a model's forward, or a compiled function."""
        if any(name in _NOT_TRACED for name in self.decorators):
            return False
        return self.is_forward or self.is_compiled

    @cached_property
    def is_stub(self) -> bool:
        """Whether it does nothing: abstract, overloaded, or it only raises."""
        if any(name.rpartition(".")[2] in ("abstractmethod", "overload") for name in self.decorators):
            return True
        body = [
            one for one in self.node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        ]
        return not body or all(isinstance(one, ast.Pass | ast.Raise) for one in body)


class Class:
    """A class, with what its attributes hold."""

    def __init__(self, node: ast.ClassDef) -> None:
        self.node = node
        self.name = node.name
        self.bases: list[str] = []  # what each base holds
        self.parents: list[Class] = []
        self.methods: dict[str, FunctionNode] = {}
        self.returned: dict[str, str] = {}  # what each method returns, by its annotation
        self.attributes: dict[str, str] = {}
        self.changed: set[str] = set()  # attributes that methods other than __init__ set

    @cached_property
    def is_module(self) -> bool:
        """Whether it is a torch.nn.Module, as far as the file shows it."""
        if any(parent.is_module for parent in self.parents):
            return True
        for base in self.bases:
            qualified = ref(base)
            last = qualified.rpartition(".")[2]
            if qualified.startswith("torch.nn") and last not in ("Parameter", "Buffer"):
                return True
            if last == "Function" or qualified.startswith(("flax", "tensorflow", "keras", "jax")):
                return False
        return "forward" in self.methods and bool(self.node.bases)

    def attribute(self, name: str) -> str:
        for cls in (self, *self.parents):
            if name in cls.attributes:
                return values.UNKNOWN if name in self.changed else cls.attributes[name]
        for cls in (self, *self.parents):
            if name in cls.methods:
                return f"def:{cls.returned.get(name, '')}"
        return values.UNKNOWN


class Tree:
    """Every node by its type, with the node that it stands in; functions and classes. `_inference` sets values."""

    def __init__(self, source: str, path: str) -> None:
        self.source = source
        self.path = path
        self.tree = ast.parse(source, path)
        self.nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self.functions: dict[ast.AST, Function] = {}
        self.classes: dict[ast.AST, Class] = {}
        self.imported: set[str] = set()
        self._index()

    def value(self, node: ast.AST) -> str:
        """What an expression holds: see `_values`."""
        return getattr(node, "_held", values.UNKNOWN)

    def qualified(self, node: ast.AST) -> str:
        """The qualified name of an imported function, class or module, or ""."""
        return ref(self.value(node))

    def is_tensor(self, node: ast.AST) -> bool:
        return self.value(node) in IS_TENSOR

    def _index(self) -> None:
        functions: dict[ast.AST, Function] = self.functions
        buckets = self.nodes
        stack: list[tuple[ast.AST, Function | None, Class | None]] = [(self.tree, None, None)]
        while stack:
            node, function, cls = stack.pop()
            kind = type(node)
            buckets[kind].append(node)
            inner, owner = function, cls
            if kind is ast.FunctionDef or kind is ast.AsyncFunctionDef:
                inner = functions[node] = Function(node, cls, function)  # pyright: ignore[reportArgumentType]
                owner = None
                if cls is not None:
                    cls.methods[node.name] = node  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
                elif function is not None:
                    function.locals.add(node.name)  # pyright: ignore[reportAttributeAccessIssue]
                arguments = node.args  # pyright: ignore[reportAttributeAccessIssue]
                for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    inner.locals.add(one.arg)
            elif kind is ast.ClassDef:
                owner = self.classes[node] = Class(node)  # pyright: ignore[reportArgumentType]
            elif kind is ast.Name:
                if function is not None and type(node.ctx) is not ast.Load:  # pyright: ignore[reportAttributeAccessIssue]
                    function.locals.add(node.id)  # pyright: ignore[reportAttributeAccessIssue]
                continue
            elif kind is ast.Global or kind is ast.Nonlocal:
                if function is not None:
                    function.not_local.update(node.names)  # pyright: ignore[reportAttributeAccessIssue]
            elif kind is ast.Constant:
                continue
            elif kind is ast.Attribute and type(node.ctx) is ast.Store and function is not None:  # pyright: ignore
                base = node.value  # pyright: ignore[reportAttributeAccessIssue]
                is_own = type(base) is ast.Name and base.id == "self" and function.cls is not None
                if is_own and function.name not in SETUP:
                    function.cls.changed.add(node.attr)  # pyright: ignore
            for field in node._fields:
                child = getattr(node, field)
                if type(child) is list:
                    for one in child:
                        if isinstance(one, ast.AST):
                            one._parent = node  # pyright: ignore[reportAttributeAccessIssue]
                            stack.append((one, inner, owner))
                elif isinstance(child, ast.AST) and field != "ctx" and field != "op":
                    child._parent = node  # pyright: ignore[reportAttributeAccessIssue]
                    stack.append((child, inner, owner))
