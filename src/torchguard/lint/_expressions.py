"""What each expression holds, given what the names in scope hold."""

import ast
from abc import ABC, abstractmethod

from torchguard.lint import _torch_names as names
from torchguard.lint import _values as values
from torchguard.lint._syntax import Function, Tree
from torchguard.lint._values import IS_TENSOR


class Scope:
    """The names of a function, a class body or the file."""

    __slots__ = ("bound", "function", "outer")

    def __init__(self, bound: dict[str, str], function: Function | None, outer: "Scope | None") -> None:
        self.bound = bound
        self.function = function
        self.outer = outer

    def lookup(self, name: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bound:
                return scope.bound[name]
            function = scope.function
            if function is not None and name in function.locals and name not in function.not_local:
                return values.UNKNOWN  # bound further down
            scope = scope.outer
        return None


class Expressions(ABC):
    """Evaluates expressions, and notes what each holds."""

    def __init__(self, module: Tree) -> None:
        self.module = module
        self.scope = Scope({}, None, None)
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

    def value(self, node: ast.expr) -> str:
        evaluate = self.expressions.get(type(node))
        if evaluate is None:
            self.children(node)
            held = values.PLAIN if type(node) in (ast.Dict, ast.Set) else values.UNKNOWN
        else:
            held = evaluate(node)
        if held:
            node._held = held  # pyright: ignore[reportAttributeAccessIssue]
        return held

    def annotation(self, node: ast.expr) -> str:
        return values.of_annotation(self.value(node), node, self.value)

    def _name(self, node: ast.Name) -> str:
        held = self.scope.lookup(node.id)
        return values.UNKNOWN if held is None else held

    def _attribute(self, node: ast.Attribute) -> str:
        held = self.value(node.value)
        if held.startswith("ref:"):
            return f"ref:{public_name(f'{held[4:]}.{node.attr}')}"
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
        called = self.value(node.func)
        arguments = [self.value(one) for one in node.args]
        for keyword in node.keywords:
            self.value(keyword.value)
        if called.startswith("ref:torch."):  # what torch compares are tensors
            pairs = zip(node.args, arguments, strict=True)
            arguments = [values.BOOL if not held and type(one) is ast.Compare else held for one, held in pairs]
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
        return values.of_binary(node.op, self.value(node.left), self.value(node.right))

    def _unary(self, node: ast.UnaryOp) -> str:
        held = self.value(node.operand)
        return values.NUMBER if isinstance(node.op, ast.Not) else held

    def _compare(self, node: ast.Compare) -> str:
        held = [self.value(node.left), *map(self.value, node.comparators)]
        if all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            return values.NUMBER
        if any(one in IS_TENSOR for one in held):
            others = [one for one in held if one not in IS_TENSOR]
            # `tensor == "auto"` and `tensor == None` are Python bools
            return values.BOOL if all(one in (values.NUMBER, values.UNKNOWN) for one in others) else values.UNKNOWN
        return values.NUMBER if all(one in values.IS_PLAIN for one in held) else values.UNKNOWN

    def _boolean(self, node: ast.BoolOp) -> str:
        held = [self.value(one) for one in node.values]
        merged = held[0]
        for one in held[1:]:
            merged = values.merge(merged, one)
        return merged

    def _conditional(self, node: ast.IfExp) -> str:
        self.value(node.test)
        return values.merge(self.value(node.body), self.value(node.orelse))

    def _subscript(self, node: ast.Subscript) -> str:
        held = self.value(node.value)
        self.value(node.slice)
        if held in IS_TENSOR:
            return held
        is_slice = isinstance(node.slice, ast.Slice)
        if held == values.TENSORS:
            return values.TENSORS if is_slice else values.TENSOR
        if held == values.SIZE:
            return values.SIZE if is_slice else values.NUMBER
        return values.UNKNOWN

    def _display(self, node: ast.Tuple | ast.List) -> str:
        held = [self.value(one) for one in node.elts]
        if held and all(one in IS_TENSOR for one in held):
            return values.TENSORS
        return values.PLAIN if held and all(one in values.IS_PLAIN for one in held) else values.UNKNOWN

    def _text(self, node: ast.JoinedStr) -> str:
        self.children(node)
        return values.TEXT

    def _named(self, node: ast.NamedExpr) -> str:
        held = self.value(node.value)
        self.bind(node.target, held)
        return held

    def _starred(self, node: ast.Starred) -> str:
        self.value(node.value)
        return values.UNKNOWN

    def _lambda(self, node: ast.Lambda) -> str:
        arguments = node.args
        inner = {one.arg: values.UNKNOWN for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                inner[extra.arg] = values.UNKNOWN
        outer = self.scope
        self.scope = Scope(inner, None, outer)
        self.scope.function = None
        self.value(node.body)
        self.scope = outer
        return values.PLAIN

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> str:
        outer = self._enter(node.generators)
        held = self.value(node.elt)
        self.scope = outer
        return values.TENSORS if held in IS_TENSOR else values.UNKNOWN

    def _dict_comprehension(self, node: ast.DictComp) -> str:
        outer = self._enter(node.generators)
        self.value(node.key)
        self.value(node.value)
        self.scope = outer
        return values.PLAIN

    def _enter(self, generators: list[ast.comprehension]) -> Scope:
        outer = self.scope
        self.scope = Scope({}, None, outer)
        for generator in generators:
            held = self.value(generator.iter)
            self.bind_iteration(generator.target, generator.iter, held)
            for test in generator.ifs:
                self.value(test)
        return outer

    def children(self, node: ast.AST) -> None:
        for field in node._fields:
            child = getattr(node, field)
            if type(child) is list:
                for one in child:
                    if isinstance(one, ast.stmt):
                        self.block([one])
                    elif isinstance(one, ast.expr):
                        self.value(one)
                    elif isinstance(one, ast.AST):
                        self.children(one)
            elif isinstance(child, ast.expr):
                self.value(child)

    def bind(self, target: ast.expr, held: str) -> None:
        kind = type(target)
        if kind is ast.Name:
            self.scope.bound[target.id] = held  # pyright: ignore[reportAttributeAccessIssue]
            target._held = held  # pyright: ignore[reportAttributeAccessIssue]
        elif held == values.WATCHED_OUTPUT and kind is ast.Tuple and len(target.elts) == 2:  # pyright: ignore
            output, flags = target.elts  # pyright: ignore[reportAttributeAccessIssue]
            self.bind(output, values.UNKNOWN)
            self.bind(flags, values.FLAGS)
        elif kind is ast.Tuple or kind is ast.List:
            for one in target.elts:  # pyright: ignore[reportAttributeAccessIssue]
                if type(one) is ast.Starred:
                    self.bind(one.value, held if held == values.TENSORS else values.UNKNOWN)
                else:
                    self.bind(one, values.element(held))
        elif kind is ast.Attribute:
            self.value(target.value)  # pyright: ignore[reportAttributeAccessIssue]
            self._bind_attribute(target, held)  # pyright: ignore[reportArgumentType]
        elif kind is ast.Subscript:
            self.value(target)

    def _bind_attribute(self, target: ast.Attribute, held: str) -> None:
        function = self.scope.function
        if self.module.value(target.value) == values.SELF and function is not None and function.cls is not None:
            known = function.cls.attributes
            known[target.attr] = values.merge(known[target.attr], held) if target.attr in known else held

    def bind_iteration(self, target: ast.expr, iterated: ast.expr, held: str) -> None:
        called = iterated.func.id if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) else ""
        if isinstance(iterated, ast.Call) and isinstance(target, ast.Tuple):
            parts = [values.element(self.module.value(one)) for one in iterated.args]
            if called == "enumerate" and len(target.elts) == 2 and parts:
                parts = [values.NUMBER, parts[0]]
            if called in ("enumerate", "zip") and len(parts) == len(target.elts):
                for one, part in zip(target.elts, parts, strict=True):
                    self.bind(one, part)
                return
        self.bind(target, values.NUMBER if called == "range" else values.element(held))

    @abstractmethod
    def block(self, statements: list[ast.stmt]) -> bool:
        """Run statements; True if the last of them leaves the block."""


_PUBLIC_NAMES = (
    ("torch.nn.modules.module.", "torch.nn."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.nn.parameter.", "torch.nn."),
    ("torchguard.checks.", "torchguard."),
)


def public_name(name: str) -> str:
    """The usual name of what can be imported from several modules."""
    for private, public in _PUBLIC_NAMES:
        if name.startswith(private):
            return public + name[len(private) :]
    return name
