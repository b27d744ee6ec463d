"""Parameters without annotation that can only be tensors, by how a function uses them."""

import ast
from collections.abc import Callable, Iterator

from torchguard.lint import _torch_names as names
from torchguard.lint._syntax import Function
from torchguard.lint._values import ref


def tensors_by_use(function: Function, unclear: list[str], value: Callable[[ast.expr], str]) -> Iterator[str]:
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
        if any(_needs_a_tensor(node, function, value) for node in before) or (is_first and before):
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


def _needs_a_tensor(node: ast.Name, function: Function, value: Callable[[ast.expr], str]) -> bool:
    parent = node._parent  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(parent, ast.Attribute):
        called = isinstance(parent._parent, ast.Call) and parent._parent.func is parent  # pyright: ignore
        is_traced = function.is_forward or any(name == "torch.compile" for name in function.decorators)
        return called and parent.attr in (_FORWARD_METHODS if is_traced else names.TENSOR_ONLY_METHODS)
    if isinstance(parent, ast.Call) and parent.args and parent.args[0] is node:
        called = value(parent.func)
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
