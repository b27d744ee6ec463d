"""A Python file as the rules see it: functions, classes, and what each expression holds."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torchguard.lint import _torch_names as names
from torchguard.lint import _values as values
from torchguard.lint._values import IS_TENSOR, ref

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_NO_GRAD = frozenset(
    ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode")
)
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
# Conditions under which code is not traced, or which the trace decides.
_TRACING_TESTS = re.compile(
    r"is_(?:scripting|tracing|compiling|exporting|torchdynamo_compiling|torchdynamo_exporting|dynamo_compiling|torch_fx_proxy|fx_tracing|onnx)|is_in_onnx_export|in_onnx|is_eager|_is_tracing"
)


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


class Module:
    """A parsed file. `value(node)` is what an expression holds, `parents(node)` what it stands in."""

    def __init__(self, source: str, path: str = "<string>", options: dict[str, Any] | None = None) -> None:
        self.source = source
        self.options = options or {}
        self.path = path
        self.tree = ast.parse(source, path)
        self.nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self.functions: dict[ast.AST, Function] = {}
        self.classes: dict[ast.AST, Class] = {}
        self.imported: set[str] = set()
        self._index()
        _Inference(self).run()
        self._find_compiled()

    @cached_property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    def value(self, node: ast.AST) -> str:
        """What an expression holds: see `_values`."""
        return getattr(node, "_held", values.UNKNOWN)

    def qualified(self, node: ast.AST) -> str:
        """The qualified name of an imported function, class or module, or ""."""
        return ref(self.value(node))

    def is_tensor(self, node: ast.AST) -> bool:
        return self.value(node) in IS_TENSOR

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node stands in, from the inside out."""
        while (node := getattr(node, "_parent", None)) is not None:  # pyright: ignore[reportAssignmentType]
            yield node

    def function_of(self, node: ast.AST) -> Function | None:
        """The function that a node stands in. A lambda belongs to the function around it."""
        for parent in self.parents(node):
            if parent in self.functions:
                return self.functions[parent]
        return None

    def inside(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs of a parent and its child towards the node, up to the function around it."""
        child = node
        for parent in self.parents(node):
            if parent in self.functions:
                return
            yield parent, child
            child = parent

    def conditions(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """The conditions that hold where a node runs, and whether they are true there."""
        for parent, child in self.inside(node):
            if isinstance(parent, ast.If | ast.While) and child is not parent.test:
                yield parent.test, child in parent.body
            elif isinstance(parent, ast.IfExp) and child is not parent.test:
                yield parent.test, child is parent.body
            elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And):
                for earlier in parent.values[: parent.values.index(child)]:  # pyright: ignore[reportArgumentType]
                    yield earlier, True

    def has_no_grad(self, node: ast.AST) -> bool:
        """Whether gradients are off where a node runs, as far as its function shows."""
        for parent, _ in self.inside(node):
            if isinstance(parent, ast.With | ast.AsyncWith) and any(
                self.turns_off_gradients(item.context_expr) for item in parent.items
            ):
                return True
        function = self.function_of(node)
        while function is not None:
            if any(name in _NO_GRAD for name in function.decorators):
                return True
            function = function.outer
        return False

    def turns_off_gradients(self, node: ast.expr) -> bool:
        """Whether this is `torch.no_grad()`, `torch.inference_mode()` or `torch.set_grad_enabled(False)`."""
        if not isinstance(node, ast.Call):
            return self.qualified(node) in _NO_GRAD
        name = self.qualified(node.func)
        first = node.args[0] if node.args else None
        is_false = isinstance(first, ast.Constant) and first.value is False
        return (name in _NO_GRAD and not is_false) or (name.endswith(".set_grad_enabled") and is_false)

    @cached_property
    def imports_torch(self) -> bool:
        return any(name.partition(".")[0] in ("torch", "lightning", "torchguard") for name in self.imported)

    @cached_property
    def imports_torchguard(self) -> bool:
        return any(name.partition(".")[0] == "torchguard" for name in self.imported)

    def in_traced_function(self, node: ast.AST) -> bool:
        """Whether a node stands in a forward or compiled function; see `is_traced`."""
        function = self.function_of(node)
        return function is not None and function.is_traced

    def is_traced(self, node: ast.AST) -> bool:
        """Whether a node runs inside a forward or compiled function, and not only where nothing is traced."""
        function = self.function_of(node)
        if function is None or not function.is_traced:
            return False
        for test, _ in self.conditions(node):
            if _TRACING_TESTS.search(ast.unparse(test)):
                return False
        return not any(isinstance(parent, ast.Raise | ast.ExceptHandler) for parent, _ in self.inside(node))

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
            elif kind is ast.Attribute:
                if type(node.ctx) is ast.Store and function is not None and function.cls is not None:  # pyright: ignore
                    base = node.value  # pyright: ignore[reportAttributeAccessIssue]
                    if type(base) is ast.Name and base.id == "self" and function.name not in _SETUP:
                        function.cls.changed.add(node.attr)  # pyright: ignore[reportAttributeAccessIssue]
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

    def _find_compiled(self) -> None:
        by_name: dict[str, list[Function]] = defaultdict(list)
        for function in self.functions.values():
            by_name[function.name].append(function)
            if "torch.compile" in function.decorators:
                function.is_compiled = True
        if "compile" not in self.source:
            return
        for call in self.nodes[ast.Call]:
            assert isinstance(call, ast.Call)
            if self.qualified(call.func) == "torch.compile" and call.args and isinstance(call.args[0], ast.Name):
                for function in by_name[call.args[0].id]:
                    function.is_compiled = function.cls is None


_SETUP = frozenset("__init__ __new__ setup build reset_parameters _init_weights init_weights".split())


class _Scope:
    """The names of a function, a class body or the file."""

    __slots__ = ("bound", "function", "outer")

    def __init__(self, bound: dict[str, str], function: Function | None, outer: "_Scope | None") -> None:
        self.bound = bound
        self.function = function
        self.outer = outer

    def lookup(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.bound:
                return scope.bound[name]
            function = scope.function
            if function is not None and name in function.locals and name not in function.not_local:
                return values.UNKNOWN  # bound further down
            scope = scope.outer
        return None


class _Inference:
    """Runs through a file in the order of execution, and notes what each expression holds."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.waiting: list[tuple[Function, _Scope]] = []
        self.scope = _Scope({}, None, None)
        self.classes: dict[str, Class] = {}
        self.expressions = {
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.Constant: self._constant,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.Compare: self._compare,
            ast.BoolOp: self._boolean,
            ast.IfExp: self._conditional,
            ast.Subscript: self._subscript,
            ast.Tuple: self._display,
            ast.List: self._display,
            ast.JoinedStr: self._text,
            ast.NamedExpr: self._named,
            ast.Lambda: self._lambda,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._dict_comprehension,
            ast.Starred: self._starred,
        }
        self.statements = {
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated,
            ast.AugAssign: self._augmented,
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.FunctionDef: self._function,
            ast.AsyncFunctionDef: self._function,
            ast.ClassDef: self._class,
            ast.If: self._if,
            ast.For: self._for,
            ast.AsyncFor: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.Try: self._try,
        }

    def run(self) -> None:
        self._block(self.module.tree.body)
        # Constructors first: what they assign to self is known in the other methods then.
        self.waiting.sort(key=lambda entry: entry[0].name not in _SETUP)
        while self.waiting:
            function, outer = self.waiting.pop(0)
            self._run_function(function, outer)

    # Statements

    def _block(self, statements: list[ast.stmt]) -> bool:
        """Run statements; True if the last of them leaves the block."""
        table = self.statements
        for statement in statements:
            run = table.get(type(statement))
            if run is not None:
                run(statement)
            else:
                self._children(statement)
        return bool(statements) and type(statements[-1]) in _LEAVING

    def _children(self, node: ast.AST) -> None:
        for field in node._fields:
            child = getattr(node, field)
            if type(child) is list:
                for one in child:
                    if isinstance(one, ast.stmt):
                        self._block([one])
                    elif isinstance(one, ast.expr):
                        self._value(one)
                    elif isinstance(one, ast.AST):
                        self._children(one)
            elif isinstance(child, ast.expr):
                self._value(child)

    def _bind(self, target: ast.expr, held: str) -> None:
        kind = type(target)
        if kind is ast.Name:
            self.scope.bound[target.id] = held  # pyright: ignore[reportAttributeAccessIssue]
            target._held = held  # pyright: ignore[reportAttributeAccessIssue]
        elif kind is ast.Tuple or kind is ast.List:
            for one in target.elts:  # pyright: ignore[reportAttributeAccessIssue]
                if type(one) is ast.Starred:
                    self._bind(one.value, held if held == values.TENSORS else values.UNKNOWN)
                else:
                    self._bind(one, values.element(held))
        elif kind is ast.Attribute:
            self._value(target.value)  # pyright: ignore[reportAttributeAccessIssue]
            self._bind_attribute(target, held)  # pyright: ignore[reportArgumentType]
        elif kind is ast.Subscript:
            self._value(target)

    def _bind_attribute(self, target: ast.Attribute, held: str) -> None:
        function = self.scope.function
        if self.module.value(target.value) == values.SELF and function is not None and function.cls is not None:
            known = function.cls.attributes
            known[target.attr] = values.merge(known[target.attr], held) if target.attr in known else held

    def _assign(self, node: ast.Assign) -> None:
        held = self._value(node.value)
        for target in node.targets:
            if type(target) in (ast.Tuple, ast.List) and type(node.value) in (ast.Tuple, ast.List):
                parts, sources = target.elts, node.value.elts  # pyright: ignore[reportAttributeAccessIssue]
                if len(parts) == len(sources) and not any(type(one) is ast.Starred for one in (*parts, *sources)):
                    for part, source in zip(parts, sources, strict=True):
                        self._bind(part, self.module.value(source))
                    continue
            self._bind(target, held)

    def _annotated(self, node: ast.AnnAssign) -> None:
        held = self._annotation(node.annotation)
        given = self._value(node.value) if node.value is not None else values.UNKNOWN
        if isinstance(node.target, ast.Name) and node.value is None:
            owner = getattr(node, "_parent", None)
            if owner in self.module.classes:
                self.module.classes[owner].attributes[node.target.id] = held
        self._bind(node.target, held or given)

    def _augmented(self, node: ast.AugAssign) -> None:
        right = self._value(node.value)
        target = node.target
        left = self._value(target)
        if isinstance(target, ast.Name):
            self.scope.bound[target.id] = left if left in IS_TENSOR else values.of_binary(node.op, left, right)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.module.imported.add(alias.name)
            if alias.asname:
                self.scope.bound[alias.asname] = f"ref:{alias.name}"
            else:
                root = alias.name.partition(".")[0]
                self.scope.bound[root] = f"ref:{root}"

    def _import_from(self, node: ast.ImportFrom) -> None:
        package = "." * node.level + (node.module or "")
        self.module.imported.add(package)
        for alias in node.names:
            dot = "" if not package or package.endswith(".") else "."
            self.module.imported.add(f"{package}{dot}{alias.name}")
            self.scope.bound[alias.asname or alias.name] = f"ref:{_public(f'{package}{dot}{alias.name}')}"

    def _function(self, node: FunctionNode) -> None:
        function = self.module.functions[node]
        arguments = node.args
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self._value(default)
        for decorator in node.decorator_list:
            self._value(decorator)
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            qualified = ref(self.module.value(called))
            if qualified in ("functools.partial", "partial") and isinstance(decorator, ast.Call) and decorator.args:
                qualified = ref(self.module.value(decorator.args[0]))
            function.decorators.append(
                qualified or (called.id if isinstance(called, ast.Name) else ast.unparse(called))
            )
        returned = self._annotation(node.returns) if node.returns is not None else values.UNKNOWN
        is_generator = returned and isinstance(node, ast.AsyncFunctionDef)
        if "property" in function.decorators or any(name.endswith("cached_property") for name in function.decorators):
            if function.cls is not None:
                function.cls.attributes[node.name] = returned
        elif function.cls is not None:
            function.cls.returned[node.name] = "" if is_generator else returned
        self.scope.bound[node.name] = f"def:{'' if is_generator else returned}"
        self.waiting.append((function, self.scope if function.cls is None else self.scope.outer or self.scope))

    def _class(self, node: ast.ClassDef) -> None:
        cls = self.module.classes[node]
        for base in node.bases:
            cls.bases.append(self._value(base))
            if isinstance(base, ast.Name) and base.id in self.classes:
                parent = self.classes[base.id]
                cls.parents.extend([parent, *parent.parents])
        for decorator in node.decorator_list:
            self._value(decorator)
        self.classes[node.name] = cls
        outer = self.scope
        self.scope = _Scope({}, None, outer)
        self._block(node.body)
        self.scope = outer
        outer.bound[node.name] = f"class:{node.name}"

    def _run_function(self, function: Function, outer: _Scope) -> None:
        scope = self.scope = _Scope({}, function, outer)
        node = function.node
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args]
        if function.cls is not None and every and "staticmethod" not in function.decorators:
            scope.bound[every[0].arg] = values.SELF
        defaults = dict(
            zip([one.arg for one in every][len(every) - len(arguments.defaults) :], arguments.defaults, strict=True)
        )
        defaults |= {one.arg: default for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
        unclear: list[str] = []
        for one in function.arguments:
            if one.annotation is not None:
                held = self._annotation(one.annotation)
            else:
                default = defaults.get(one.arg)
                held = self.module.value(default) if default is not None else values.UNKNOWN
                if held in (values.UNKNOWN, values.NONE):
                    held = values.UNKNOWN
                    unclear.append(one.arg)
            scope.bound[one.arg] = held
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                scope.bound[extra.arg] = values.UNKNOWN
                function.locals.add(extra.arg)
        if unclear:
            for name in _tensors_by_use(function, unclear, self):
                scope.bound[name] = values.TENSOR
        function.parameters = {one.arg: scope.bound[one.arg] for one in function.arguments}
        self._block(node.body)

    def _branches(self, *blocks: list[ast.stmt]) -> None:
        """Run blocks of which one is executed, and merge what they bind."""
        scope = self.scope
        before = scope.bound
        ends: list[dict[str, str]] = []
        for block in blocks:
            scope.bound = dict(before)
            self._narrow(block)
            if not self._block(block):
                ends.append(scope.bound)
        if not ends:
            scope.bound = before
            return
        merged = ends[0]
        for other in ends[1:]:
            for name in {*merged, *other}:
                if merged.get(name) != other.get(name):
                    held = [end[name] for end in (merged, other) if name in end]
                    merged[name] = held[0] if len(held) == 1 else values.merge(*held)
        scope.bound = merged

    def _narrow(self, block: list[ast.stmt]) -> None:
        """Apply `if isinstance(x, ...)` to its branches."""
        test = getattr(getattr(block[0], "_parent", None), "test", None) if block else None
        owner = getattr(block[0], "_parent", None) if block else None
        is_true = isinstance(owner, ast.If) and owner.body is block
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, is_true = test.operand, not is_true
        tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and is_true else [test]
        for one in tests:
            if not isinstance(one, ast.Call) or not one.args or not isinstance(one.args[0], ast.Name):
                continue
            name = one.args[0].id
            if isinstance(one.func, ast.Name) and one.func.id == "isinstance" and len(one.args) == 2:
                is_tensor = self._annotation(one.args[1]) in IS_TENSOR
            elif self.module.qualified(one.func) == "torch.is_tensor":
                is_tensor = True
            else:
                continue
            if is_tensor and is_true and self.scope.bound.get(name) not in IS_TENSOR:
                self.scope.bound[name] = values.TENSOR
            elif is_tensor != is_true and name in self.scope.bound:
                self.scope.bound[name] = values.UNKNOWN

    def _if(self, node: ast.If) -> None:
        self._value(node.test)
        self._branches(node.body, node.orelse)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        held = self._value(node.iter)
        self._bind_iteration(node.target, node.iter, held)
        self._branches(node.body, [])
        self._block(node.orelse)

    def _bind_iteration(self, target: ast.expr, iterated: ast.expr, held: str) -> None:
        called = iterated.func.id if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) else ""
        if isinstance(iterated, ast.Call) and isinstance(target, ast.Tuple):
            parts = [values.element(self.module.value(one)) for one in iterated.args]
            if called == "enumerate" and len(target.elts) == 2 and parts:
                parts = [values.NUMBER, parts[0]]
            if called in ("enumerate", "zip") and len(parts) == len(target.elts):
                for one, part in zip(target.elts, parts, strict=True):
                    self._bind(one, part)
                return
        self._bind(target, values.NUMBER if called == "range" else values.element(held))

    def _while(self, node: ast.While) -> None:
        self._value(node.test)
        self._branches(node.body, [])
        self._block(node.orelse)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._value(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, values.UNKNOWN)
        self._block(node.body)

    def _try(self, node: ast.Try) -> None:
        before = dict(self.scope.bound)
        left = self._block(node.body)
        after = self.scope.bound
        for handler in node.handlers:
            self.scope.bound = {**before, **after}
            if handler.type is not None:
                self._value(handler.type)
            if self._block(handler.body):
                continue
            if left:
                after, left = self.scope.bound, False
                continue
            for name, held in self.scope.bound.items():
                known = after.get(name)
                # `try: import x; except ImportError: x = None` leaves x imported for the rest of the file.
                is_import = known is not None and known.startswith("ref:")
                after[name] = held if known is None else known if is_import else values.merge(known, held)
        self.scope.bound = after
        self._block(node.orelse)
        self._block(node.finalbody)

    # Expressions

    def _value(self, node: ast.expr) -> str:
        evaluate = self.expressions.get(type(node))
        if evaluate is None:
            self._children(node)
            held = values.PLAIN if type(node) in (ast.Dict, ast.Set) else values.UNKNOWN
        else:
            held = evaluate(node)
        if held:
            node._held = held  # pyright: ignore[reportAttributeAccessIssue]
        return held

    def _annotation(self, node: ast.expr) -> str:
        return values.of_annotation(self._value(node), node, self._value)

    def _name(self, node: ast.Name) -> str:
        held = self.scope.lookup(node.id)
        return values.UNKNOWN if held is None else held

    def _attribute(self, node: ast.Attribute) -> str:
        held = self._value(node.value)
        if held.startswith("ref:"):
            return f"ref:{_public(f'{held[4:]}.{node.attr}')}"
        if held in IS_TENSOR:
            if node.attr == "shape":
                return values.SIZE
            if node.attr in names.TENSOR_ATTRIBUTES:
                return held
            return values.NUMBER if node.attr in ("ndim", "requires_grad", "is_cuda", "is_leaf") else values.UNKNOWN
        if held == values.TENSORS:
            return values.TENSOR if node.attr in ("values", "indices") else values.UNKNOWN
        if held == values.SELF and self.scope.function is not None:
            return self._attribute_of_self(node)
        if held.startswith("layer:") and node.attr in ("weight", "bias", "running_mean", "running_var"):
            return values.TENSOR
        return values.UNKNOWN

    def _attribute_of_self(self, node: ast.Attribute) -> str:
        function = self.scope.function
        while function is not None and function.cls is None:
            function = function.outer
        if function is None or function.cls is None:
            return values.UNKNOWN
        return function.cls.attribute(node.attr)

    def _constant(self, node: ast.Constant) -> str:
        value = node.value
        if value is None:
            return values.NONE
        return values.TEXT if isinstance(value, str | bytes) else values.NUMBER if value is not ... else values.PLAIN

    def _call(self, node: ast.Call) -> str:
        called = self._value(node.func)
        arguments = [self._value(one) for one in node.args]
        for keyword in node.keywords:
            self._value(keyword.value)
        if called:
            return values.of_call(called, node, arguments)
        func = node.func
        if isinstance(func, ast.Attribute):
            held = self.module.value(func.value)
            if held in IS_TENSOR:
                return values.of_method(held, func.attr, node, arguments, self._is_bool_dtype, self._is_int_dtype)
            if func.attr in ("register_buffer", "register_parameter") and held == values.SELF:
                self._register(node)
            return values.UNKNOWN
        if isinstance(func, ast.Name) and self.scope.lookup(func.id) is None:
            return self._builtin(func.id, arguments)
        return values.UNKNOWN

    def _register(self, node: ast.Call) -> None:
        function = self.scope.function
        first = node.args[0] if node.args else None
        if function is not None and function.cls is not None and isinstance(first, ast.Constant):
            held = self.module.value(node.args[1]) if len(node.args) > 1 else values.TENSOR
            function.cls.attributes[str(first.value)] = held if held in IS_TENSOR else values.TENSOR

    def _builtin(self, name: str, arguments: list[str]) -> str:
        if name in ("len", "int", "float", "bool", "isinstance", "hasattr", "callable", "id", "hash", "any", "all"):
            return values.NUMBER
        if name in ("str", "repr", "format"):
            return values.TEXT
        if name in ("abs", "round") and arguments:
            return arguments[0]
        if name in ("list", "tuple", "reversed") and arguments[:1] == [values.TENSORS]:
            return values.TENSORS
        if name == "sum" and arguments[:1] == [values.TENSORS]:
            return values.TENSOR
        if (
            name in ("max", "min", "sum", "pow", "divmod")
            and arguments
            and all(one == values.NUMBER for one in arguments)
        ):
            return values.NUMBER
        return values.PLAIN if name in ("dict", "set", "range", "print", "type", "open") else values.UNKNOWN

    def _is_bool_dtype(self, node: ast.expr) -> bool:
        return self.module.qualified(node) == "torch.bool" or (isinstance(node, ast.Name) and node.id == "bool")

    def _is_int_dtype(self, node: ast.expr) -> bool:
        package, _, last = self.module.qualified(node).rpartition(".")
        return package == "torch" and last in values._INT_DTYPES

    def _binary(self, node: ast.BinOp) -> str:
        return values.of_binary(node.op, self._value(node.left), self._value(node.right))

    def _unary(self, node: ast.UnaryOp) -> str:
        held = self._value(node.operand)
        return values.NUMBER if isinstance(node.op, ast.Not) else held

    def _compare(self, node: ast.Compare) -> str:
        held = [self._value(node.left), *map(self._value, node.comparators)]
        if all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            return values.NUMBER
        if any(one in IS_TENSOR for one in held):
            others = [one for one in held if one not in IS_TENSOR]
            # `tensor == "auto"` and `tensor == None` are Python bools
            return values.BOOL if all(one in (values.NUMBER, values.UNKNOWN) for one in others) else values.UNKNOWN
        return values.NUMBER if all(one in values._IS_PLAIN for one in held) else values.UNKNOWN

    def _boolean(self, node: ast.BoolOp) -> str:
        held = [self._value(one) for one in node.values]
        merged = held[0]
        for one in held[1:]:
            merged = values.merge(merged, one)
        return merged

    def _conditional(self, node: ast.IfExp) -> str:
        self._value(node.test)
        return values.merge(self._value(node.body), self._value(node.orelse))

    def _subscript(self, node: ast.Subscript) -> str:
        held = self._value(node.value)
        self._value(node.slice)
        if held in IS_TENSOR:
            return held
        is_slice = isinstance(node.slice, ast.Slice)
        if held == values.TENSORS:
            return values.TENSORS if is_slice else values.TENSOR
        if held == values.SIZE:
            return values.SIZE if is_slice else values.NUMBER
        return values.UNKNOWN

    def _display(self, node: ast.Tuple | ast.List) -> str:
        held = [self._value(one) for one in node.elts]
        if held and all(one in IS_TENSOR for one in held):
            return values.TENSORS
        return values.PLAIN if held and all(one in values._IS_PLAIN for one in held) else values.UNKNOWN

    def _text(self, node: ast.JoinedStr) -> str:
        self._children(node)
        return values.TEXT

    def _named(self, node: ast.NamedExpr) -> str:
        held = self._value(node.value)
        self._bind(node.target, held)
        return held

    def _starred(self, node: ast.Starred) -> str:
        self._value(node.value)
        return values.UNKNOWN

    def _lambda(self, node: ast.Lambda) -> str:
        arguments = node.args
        inner = {one.arg: values.UNKNOWN for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                inner[extra.arg] = values.UNKNOWN
        outer = self.scope
        self.scope = _Scope(inner, None, outer)
        self.scope.function = None
        self._value(node.body)
        self.scope = outer
        return values.PLAIN

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> str:
        outer = self._enter(node.generators)
        held = self._value(node.elt)
        self.scope = outer
        return values.TENSORS if held in IS_TENSOR else values.UNKNOWN

    def _dict_comprehension(self, node: ast.DictComp) -> str:
        outer = self._enter(node.generators)
        self._value(node.key)
        self._value(node.value)
        self.scope = outer
        return values.PLAIN

    def _enter(self, generators: list[ast.comprehension]) -> _Scope:
        outer = self.scope
        self.scope = _Scope({}, None, outer)
        for generator in generators:
            held = self._value(generator.iter)
            self._bind_iteration(generator.target, generator.iter, held)
            for test in generator.ifs:
                self._value(test)
        return outer


_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_PUBLIC_NAMES = (
    ("torch.nn.modules.module.", "torch.nn."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.nn.parameter.", "torch.nn."),
    ("torchguard.checks.", "torchguard."),
)


def _public(name: str) -> str:
    """The usual name of what can be imported from several modules."""
    for private, public in _PUBLIC_NAMES:
        if name.startswith(private):
            return public + name[len(private) :]
    return name


def _tensors_by_use(function: Function, unclear: list[str], inference: _Inference) -> Iterator[str]:
    """Parameters without annotation that can only be tensors, by how they are used before they are bound again."""
    bound: dict[str, int] = {}
    uses: dict[str, list[ast.Name]] = {name: [] for name in unclear}
    for node in function.body:
        if type(node) is ast.Name and node.id in uses:
            if type(node.ctx) is ast.Load:
                uses[node.id].append(node)
            else:
                bound.setdefault(node.id, getattr(_statement_of(node), "end_lineno", 0))
    for position, name in enumerate(unclear):
        before = [node for node in uses[name] if node.lineno <= bound.get(name, 1 << 30)]
        if any(_excludes_tensors(node, function) for node in before):
            continue
        is_first = function.is_forward and position == 0 and function.arguments[0].arg == name
        if any(_needs_a_tensor(node, function, inference) for node in before) or (is_first and before):
            yield name


def _statement_of(node: ast.AST) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = node._parent  # pyright: ignore[reportAttributeAccessIssue]
    return node


_FORWARD_METHODS = names.TENSOR_ONLY_METHODS | frozenset(
    """
    sum mean view reshape float item any all max min size dim transpose flatten std var abs sqrt exp log pow norm
    """.split()
)


def _needs_a_tensor(node: ast.Name, function: Function, inference: _Inference) -> bool:
    parent = node._parent  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(parent, ast.Attribute):
        called = isinstance(parent._parent, ast.Call) and parent._parent.func is parent  # pyright: ignore
        is_traced = function.is_forward or any(name == "torch.compile" for name in function.decorators)
        return called and parent.attr in (_FORWARD_METHODS if is_traced else names.TENSOR_ONLY_METHODS)
    if isinstance(parent, ast.Call) and parent.args and parent.args[0] is node:
        called = inference._value(parent.func)
        if called.startswith("layer:"):
            return called[6:] in names.LAYERS and called[6:] != "Identity"
        package, _, last = ref(called).rpartition(".")
        if package == "torch":
            return last in names.TENSOR_FUNCTIONS and last not in _TAKE_OTHER_THINGS
        return package == "torch.nn.functional" and last in names.FUNCTIONAL
    return False


# Functions of torch whose first argument is a list, a size or a number.
_TAKE_OTHER_THINGS = frozenset(
    """
    arange as_tensor asarray bartlett_window blackman_window block_diag cartesian_prod cat column_stack combinations
    concat concatenate dstack einsum empty empty_permuted empty_quantized empty_strided eye frombuffer from_dlpack
    from_file from_numpy full hamming_window hann_window hstack kaiser_window linspace logspace multi_dot normal
    ones chain_matmul rand randint randn randperm range row_stack scalar_tensor sparse_bsc_tensor sparse_bsr_tensor
    sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor stack tensor tril_indices
    triu_indices vander vstack where zeros
    """.split()
)


def _excludes_tensors(node: ast.Name, function: Function) -> bool:
    """Whether a tensor is not used like this: unpacked, indexed by a string, or an attribute that tensors lack."""
    parent = node._parent  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(parent, ast.Assign) and parent.value is node:
        return any(isinstance(target, ast.Tuple | ast.List) for target in parent.targets)
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return isinstance(parent.slice, ast.Constant) and isinstance(parent.slice.value, str)
    if isinstance(parent, ast.Attribute):
        return parent.attr in (
            "items",
            "keys",
            "append",
            "get",
            "pop",
            "update",
            "tensors",
            "mask",
            "astype",
            "copy",
            "named_parameters",
            "parameters",
            "modules",
        )
    if isinstance(parent, ast.Call):
        is_isinstance = isinstance(parent.func, ast.Name) and parent.func.id in ("isinstance", "callable", "len")
        return (
            parent.func is node
            or (is_isinstance and function.name != "forward")
            or (is_isinstance and isinstance(parent.func, ast.Name) and parent.func.id == "isinstance")
        )
    if isinstance(parent, ast.If | ast.While | ast.UnaryOp | ast.BoolOp):
        return not (isinstance(parent, ast.UnaryOp) and not isinstance(parent.op, ast.Not))
    return isinstance(parent, ast.Starred | ast.keyword) and isinstance(parent, ast.Starred)
