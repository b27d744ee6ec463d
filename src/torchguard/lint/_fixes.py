"""Fixes, by libcst: it keeps formatting and comments. The rules find what to rewrite on the `ast`.

Only rewrites that cannot change results are made. Each names why: the tensor that an operation in place overwrites has
just been made and has no other name; `a.add(b)` and `a + b` are the same call; annotations are not executed.
"""

import ast
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torchguard.exceptions import LintError
from torchguard.lint import _torch_names as names
from torchguard.lint import _values as values
from torchguard.lint._check import is_silenced
from torchguard.lint._module import Module
from torchguard.lint._rules import annotations, inplace, style
from torchguard.lint._rules.base import keyword

if TYPE_CHECKING:
    import libcst

_ROUNDS = 10  # a rewrite may uncover another one inside of it
_PLAIN_DECORATORS = frozenset(("staticmethod", "classmethod", "torch.no_grad", "torch.inference_mode", "property"))


class _Edit(NamedTuple):
    """Rewrite the expression or statement at this position, or the function of this name."""

    code: str
    line: int
    column: int
    end_line: int
    end_column: int
    name: str = ""  # of a function
    text: str = ""  # what to write instead


def require_libcst() -> None:
    if importlib.util.find_spec("libcst") is None:
        raise LintError("--fix and --diff need libcst. Install it with: pip install 'torchguard[lint]'.")


def fix_source(source: str, codes: frozenset[str]) -> tuple[str, int]:
    """Source with all safe fixes of these rules applied, and their number. What cannot be parsed stays as it is."""
    require_libcst()
    import libcst

    fixed = 0
    for _ in range(_ROUNDS):
        try:
            edits = find_edits(Module(source), codes)
            if not edits:
                break
            tree = libcst.parse_module(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError, libcst.ParserSyntaxError):
            break
        changed, count = _apply(tree, edits)
        if count == 0 or changed == source:
            break
        ast.parse(changed)
        source, fixed = changed, fixed + count
    return source, fixed


def find_edits(module: Module, codes: frozenset[str]) -> list[_Edit]:
    """The rewrites that are safe, outside of lines with `# noqa`."""
    found: list[_Edit] = []
    for code, find in _FINDERS.items():
        if code in codes:
            edits = [find(node, module) for kind in _KINDS[code] for node in module.nodes[kind]]
            found += [edit for edit in edits if edit is not None]
    return [
        edit
        for edit in found
        if not any(is_silenced(module.lines[line - 1], edit.code) for line in (edit.line, edit.end_line))
    ]


def _edit(code: str, node: ast.AST, module: Module, **more: str) -> _Edit:
    line, end = node.lineno, node.end_lineno  # pyright: ignore[reportAttributeAccessIssue]
    column = _characters(module.lines[line - 1], node.col_offset)  # pyright: ignore[reportAttributeAccessIssue]
    end_column = _characters(module.lines[end - 1], node.end_col_offset)  # pyright: ignore[reportAttributeAccessIssue]
    return _Edit(code, line, column, end, end_column, **more)


def _characters(line: str, offset: int) -> int:
    """Python counts columns in bytes, libcst in characters."""
    return offset if line.isascii() else len(line.encode()[:offset].decode())


def _return_annotation(node: ast.AST, module: Module) -> _Edit | None:
    """`-> torch.Tensor`, where every return gives a tensor and torch was imported above."""
    function = module.functions[node]
    if function.node.returns is not None or function.is_stub or not annotations.returns_tensors(function, module):
        return None
    if function.name.startswith("__") or not set(function.decorators) <= _PLAIN_DECORATORS:
        return None
    if isinstance(node, ast.AsyncFunctionDef):
        return None
    for statement in module.tree.body:
        if statement.lineno >= function.node.lineno:
            break
        if isinstance(statement, ast.Import) and any(one.name == "torch" and not one.asname for one in statement.names):
            owner = function.outer
            is_shadowed = any("torch" in one.locals for one in (function, owner) if one is not None)
            if not is_shadowed and not _binds_again(module, "torch"):
                return _Edit("TG101", function.node.lineno, 0, function.node.lineno, 0, function.name, "torch.Tensor")
    return None


def _binds_again(module: Module, name: str) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load)
        for one in module.nodes[ast.Name]
    )


def _in_place_method(node: ast.AST, module: Module) -> _Edit | None:
    """`(a + b).relu_()`: the sum has no other name, so a copy has the same values. Numbers do not change the dtype."""
    assert isinstance(node, ast.Call)
    func = node.func
    if not isinstance(func, ast.Attribute) or func.attr not in names.IN_PLACE_METHODS:
        return None
    if func.attr[:-1] not in names.TENSOR_METHODS or not inplace.is_fresh(func.value, module):
        return None
    if not isinstance(func.value, ast.BinOp | ast.Compare | ast.Call) or not inplace.may_be_differentiated(
        node, module
    ):
        return None
    given = [*node.args, *(one.value for one in node.keywords)]
    if any(one.arg is None for one in node.keywords) or not all(_is_number(one) for one in given):
        return None
    if inplace._fills_fresh(func, module):
        return None
    return _edit("TG120", node, module, text=func.attr[:-1])


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _augmented(node: ast.AST, module: Module) -> _Edit | None:
    """`x += 1` right after `x = a * b`: nothing else refers to x yet, and a number does not change the dtype."""
    assert isinstance(node, ast.AugAssign)
    if not isinstance(node.target, ast.Name) or not _is_number(node.value) or type(node.op) not in inplace._SYMBOLS:
        return None
    if module.value(node.target) != values.TENSOR or not inplace.may_be_differentiated(node, module):
        return None
    parent = next(module.parents(node))
    for block in (getattr(parent, "body", None), getattr(parent, "orelse", None), getattr(parent, "finalbody", None)):
        if isinstance(block, list) and node in block and (position := block.index(node)) > 0:
            before = block[position - 1]
            if not isinstance(before, ast.Assign) or len(before.targets) != 1:
                return None
            is_same = isinstance(before.targets[0], ast.Name) and before.targets[0].id == node.target.id
            if is_same and inplace.is_fresh(before.value, module):
                return _edit("TG121", node, module, text=inplace._SYMBOLS[type(node.op)])
    return None


def _inplace_argument(node: ast.AST, module: Module) -> _Edit | None:
    """`F.relu(a + b, inplace=True)`: the sum has no other name."""
    assert isinstance(node, ast.Call)
    given = keyword(node, "inplace")
    if not (isinstance(given, ast.Constant) and given.value is True and node.args):
        return None
    is_functional = module.qualified(node.func).startswith("torch.nn.functional.")
    if not is_functional or not inplace.is_fresh(node.args[0], module):
        return None
    return _edit("TG122", node, module)


def _chain(node: ast.AST, module: Module) -> _Edit | None:
    """`a.add(b).add(c)`: on tensors the operators call the same functions."""
    assert isinstance(node, ast.Call)
    parent = next(module.parents(node), None)
    if isinstance(parent, ast.Attribute) and parent.attr in style.CHAINED:
        return None
    links = style.chain(node, module)
    if len(links) < 3 or node.lineno != node.end_lineno:
        return None
    if "#" in module.lines[node.lineno - 1] or any(
        isinstance(one, ast.NamedExpr | ast.Yield | ast.Await) for one in ast.walk(node)
    ):
        return None
    is_whole = isinstance(parent, ast.Assign | ast.Return | ast.Expr | ast.keyword)
    written = style.formula([(op, one) for op, one in links])
    return _edit("TG220", node, module, text=written if is_whole else f"({written})")


def _data(node: ast.AST, module: Module) -> _Edit | None:
    """`x.data.mean()`: the result is a new tensor, and the values are the same."""
    assert isinstance(node, ast.Attribute)
    if node.attr != "data" or not isinstance(node.ctx, ast.Load) or not module.is_tensor(node.value):
        return None
    parent = next(module.parents(node), None)
    if isinstance(parent, ast.Attribute):
        call = next(module.parents(parent), None)
        is_read = isinstance(call, ast.Call) and call.func is parent and not parent.attr.endswith("_")
        if call is None or not is_read or not inplace.is_fresh(call, module):
            return None
    elif not (isinstance(parent, ast.BinOp) and module.is_tensor(parent)):
        return None
    return _edit("TG221", node, module)


_FINDERS: dict[str, Callable[[ast.AST, Module], _Edit | None]] = {
    "TG101": _return_annotation,
    "TG120": _in_place_method,
    "TG121": _augmented,
    "TG122": _inplace_argument,
    "TG220": _chain,
    "TG221": _data,
}
_KINDS: dict[str, tuple[type[ast.AST], ...]] = {
    "TG101": (ast.FunctionDef,),
    "TG120": (ast.Call,),
    "TG121": (ast.AugAssign,),
    "TG122": (ast.Call,),
    "TG220": (ast.Call,),
    "TG221": (ast.Attribute,),
}


def _apply(tree: "libcst.Module", edits: list[_Edit]) -> tuple[str, int]:
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider

    by_place: dict[tuple[int, int, int, int], list[_Edit]] = {}
    functions: dict[tuple[str, int], _Edit] = {}
    for edit in edits:
        if edit.name:
            functions[edit.name, edit.line] = edit
        else:
            by_place.setdefault((edit.line, edit.column, edit.end_line, edit.end_column), []).append(edit)

    class Fixer(cst.CSTTransformer):
        METADATA_DEPENDENCIES = (PositionProvider,)
        count = 0

        def edits_at(self, node: cst.CSTNode) -> dict[str, _Edit]:
            place: Any = self.get_metadata(PositionProvider, node)
            found = by_place.get((place.start.line, place.start.column, place.end.line, place.end.column), ())
            return {edit.code: edit for edit in found}

        def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
            found = self.edits_at(original_node)
            if "TG120" in found and isinstance(updated_node.func, cst.Attribute):
                self.count += 1
                renamed = updated_node.func.with_changes(attr=cst.Name(found["TG120"].text))
                return updated_node.with_changes(func=renamed)
            if "TG122" in found:
                self.count += 1
                kept = [one for one in updated_node.args if one.keyword is None or one.keyword.value != "inplace"]
                if updated_node.args[-1] not in kept and kept:
                    kept[-1] = kept[-1].with_changes(comma=updated_node.args[-1].comma)
                return updated_node.with_changes(args=kept)
            if "TG220" in found:
                self.count += 1
                written = cst.parse_expression(found["TG220"].text)
                return written.with_changes(
                    lpar=[*updated_node.lpar, *written.lpar], rpar=[*written.rpar, *updated_node.rpar]
                )
            return updated_node

        def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:  # noqa: N802
            if "TG221" not in self.edits_at(original_node):
                return updated_node
            self.count += 1
            return cst.Call(updated_node.with_changes(attr=cst.Name("detach")))

        def leave_AugAssign(self, original_node: cst.AugAssign, updated_node: cst.AugAssign) -> cst.BaseSmallStatement:  # noqa: N802
            found = self.edits_at(original_node)
            if "TG121" not in found:
                return updated_node
            self.count += 1
            operator = cst.parse_expression(f"a {found['TG121'].text} b")
            assert isinstance(operator, cst.BinaryOperation)
            right = operator.with_changes(left=updated_node.target, right=updated_node.value)
            return cst.Assign([cst.AssignTarget(updated_node.target)], right, semicolon=updated_node.semicolon)

        def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:  # noqa: N802
            place: Any = self.get_metadata(PositionProvider, original_node.name)
            edit = functions.get((original_node.name.value, place.start.line))
            if edit is None or updated_node.returns is not None:
                return updated_node
            self.count += 1
            return updated_node.with_changes(returns=cst.Annotation(cst.parse_expression(edit.text)))

    fixer = Fixer()
    return MetadataWrapper(tree).visit(fixer).code, fixer.count
