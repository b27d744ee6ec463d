"""Runs through a file in the order of execution, and notes what each name and expression holds."""

import ast

from torchguard.lint import _values as values
from torchguard.lint._expressions import Expressions, Scope, public_name
from torchguard.lint._parameters import tensors_by_use
from torchguard.lint._syntax import SETUP, Class, Function, FunctionNode, Tree
from torchguard.lint._values import IS_TENSOR, ref

_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Inference(Expressions):
    """Runs statements. Functions run after what surrounds them, and see what it binds in the end."""

    def __init__(self, module: Tree) -> None:
        super().__init__(module)
        self.waiting: list[tuple[Function, Scope]] = []
        self.classes: dict[str, Class] = {}
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
        self.block(self.module.tree.body)
        # Constructors first: what they assign to self is known in the other methods then.
        self.waiting.sort(key=lambda entry: entry[0].name not in SETUP)
        while self.waiting:
            function, outer = self.waiting.pop(0)
            self._run_function(function, outer)

    def block(self, statements: list[ast.stmt]) -> bool:
        """Run statements; True if the last of them leaves the block."""
        table = self.statements
        for statement in statements:
            run = table.get(type(statement))
            if run is not None:
                run(statement)
            else:
                self.children(statement)
        return bool(statements) and type(statements[-1]) in _LEAVING

    def _assign(self, node: ast.Assign) -> None:
        held = self.value(node.value)
        for target in node.targets:
            if type(target) in (ast.Tuple, ast.List) and type(node.value) in (ast.Tuple, ast.List):
                parts, sources = target.elts, node.value.elts  # pyright: ignore[reportAttributeAccessIssue]
                if len(parts) == len(sources) and not any(type(one) is ast.Starred for one in (*parts, *sources)):
                    for part, source in zip(parts, sources, strict=True):
                        self.bind(part, self.module.value(source))
                    continue
            self.bind(target, held)

    def _annotated(self, node: ast.AnnAssign) -> None:
        held = self.annotation(node.annotation)
        given = self.value(node.value) if node.value is not None else values.UNKNOWN
        if isinstance(node.target, ast.Name) and node.value is None:
            owner = getattr(node, "_parent", None)
            if owner in self.module.classes:
                self.module.classes[owner].attributes[node.target.id] = held
        self.bind(node.target, held or given)

    def _augmented(self, node: ast.AugAssign) -> None:
        right = self.value(node.value)
        target = node.target
        left = self.value(target)
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
            self.scope.bound[alias.asname or alias.name] = f"ref:{public_name(f'{package}{dot}{alias.name}')}"

    def _function(self, node: FunctionNode) -> None:
        function = self.module.functions[node]
        arguments = node.args
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.value(default)
        for decorator in node.decorator_list:
            self.value(decorator)
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            qualified = ref(self.module.value(called))
            if qualified in ("functools.partial", "partial") and isinstance(decorator, ast.Call) and decorator.args:
                qualified = ref(self.module.value(decorator.args[0]))
            function.decorators.append(
                qualified or (called.id if isinstance(called, ast.Name) else ast.unparse(called))
            )
        returned = self.annotation(node.returns) if node.returns is not None else values.UNKNOWN
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
            cls.bases.append(self.value(base))
            if isinstance(base, ast.Name) and base.id in self.classes:
                parent = self.classes[base.id]
                cls.parents.extend([parent, *parent.parents])
        for decorator in node.decorator_list:
            self.value(decorator)
        self.classes[node.name] = cls
        outer = self.scope
        self.scope = Scope({}, None, outer)
        self.block(node.body)
        self.scope = outer
        outer.bound[node.name] = f"class:{node.name}"

    def _run_function(self, function: Function, outer: Scope) -> None:
        scope = self.scope = Scope({}, function, outer)
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
                held = self.annotation(one.annotation)
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
            for name in tensors_by_use(function, unclear, self.value):
                scope.bound[name] = values.TENSOR
        function.parameters = {one.arg: scope.bound[one.arg] for one in function.arguments}
        self.block(node.body)

    def _branches(self, *blocks: list[ast.stmt]) -> None:
        """Run blocks of which one is executed, and merge what they bind."""
        scope = self.scope
        before = scope.bound
        ends: list[dict[str, str]] = []
        for block in blocks:
            scope.bound = dict(before)
            self._narrow(block)
            if not self.block(block):
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
                is_tensor = self.annotation(one.args[1]) in IS_TENSOR
            elif self.module.qualified(one.func) == "torch.is_tensor":
                is_tensor = True
            else:
                continue
            if is_tensor and is_true and self.scope.bound.get(name) not in IS_TENSOR:
                self.scope.bound[name] = values.TENSOR
            elif is_tensor != is_true and name in self.scope.bound:
                self.scope.bound[name] = values.UNKNOWN

    def _if(self, node: ast.If) -> None:
        self.value(node.test)
        self._branches(node.body, node.orelse)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        held = self.value(node.iter)
        self.bind_iteration(node.target, node.iter, held)
        self._branches(node.body, [])
        self.block(node.orelse)

    def _while(self, node: ast.While) -> None:
        self.value(node.test)
        self._branches(node.body, [])
        self.block(node.orelse)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, values.UNKNOWN)
        self.block(node.body)

    def _try(self, node: ast.Try) -> None:
        before = dict(self.scope.bound)
        left = self.block(node.body)
        after = self.scope.bound
        for handler in node.handlers:
            self.scope.bound = {**before, **after}
            if handler.type is not None:
                self.value(handler.type)
            if self.block(handler.body):
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
        self.block(node.orelse)
        self.block(node.finalbody)
