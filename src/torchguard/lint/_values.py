"""What an expression holds, as far as the source shows it.

A value is a short string: one of the constants below, `ref:torch.nn.Linear` for a name that was imported,
`layer:Linear` for a module of torch.nn, `def:tensor` for a function of this file that returns a tensor, or "" if the
source does not show it. Rules only report what they know: "" is never reported.
"""

import ast

from torchguard.lint import _torch_names as names

UNKNOWN = ""
TENSOR = "tensor"
BOOL = "bool tensor"
INT = "int tensor"  # or floats made of integers: what has no gradient
TENSORS = "tensors"  # a list or tuple of tensors
FLAGS = "flags"  # torchguard's
NUMBER = "number"
SIZE = "size"
TEXT = "text"
NONE = "none"
PLAIN = "plain"  # something that is no tensor
SELF = "self"
WATCHED = "watched"  # a model under torchguard.watch, which returns its output and flags
WATCHED_OUTPUT = "watched output"

IS_TENSOR = frozenset((TENSOR, BOOL, INT, FLAGS))
IS_PLAIN = frozenset((NUMBER, SIZE, TEXT, NONE, PLAIN))

_LINALG_TENSORS = frozenset("cholesky_ex eig eigh inv_ex ldl_factor lstsq lu lu_factor qr slogdet svd".split())
_FLAGS_FUNCTIONS = frozenset(
    """
    clear from_code merge new new_t push push_many push_scalar flag_nan flag_inf flag_nan_and_inf flag_oob_indices
    """.split()
)
_SAME_DTYPE = frozenset(
    """
    broadcast_to chunk clone contiguous cpu cuda cumsum detach diagonal expand expand_as flatten flip gather
    index_select masked_fill masked_select max min movedim narrow permute repeat repeat_interleave reshape
    reshape_as roll scatter select split squeeze sum T t tile to transpose tril triu unbind unflatten unfold
    unsqueeze view view_as cat stack concat amax amin abs clamp
    """.split()
)
_STILL_WITHOUT_GRADIENT = frozenset("sum cumsum mean float double half bfloat16".split())
_ANNOTATED = {
    "Tensor": TENSOR,
    "FloatTensor": TENSOR,
    "HalfTensor": TENSOR,
    "DoubleTensor": TENSOR,
    "BFloat16Tensor": TENSOR,
    "LongTensor": INT,
    "IntTensor": INT,
    "ByteTensor": INT,
    "ShortTensor": INT,
    "BoolTensor": BOOL,
}
_JAXTYPING_INT = frozenset("Int Int8 Int16 Int32 Int64 UInt UInt8 Integer".split())
_SEQUENCES = frozenset("list tuple List Tuple Sequence Iterable".split())
_BUILTIN_ANNOTATIONS = {"int": NUMBER, "float": NUMBER, "bool": NUMBER, "str": TEXT, "dict": PLAIN, "None": NONE}
_INT_DTYPES = frozenset("int int8 int16 int32 int64 long short uint8".split())


def ref(value: str) -> str:
    """The qualified name that a value stands for, or ""."""
    return value[4:] if value.startswith("ref:") else ""


def merge(a: str, b: str) -> str:
    """What a name holds after two branches."""
    if a == b or b == NONE:
        return a
    if a == NONE:
        return b
    if a in IS_TENSOR and b in IS_TENSOR:
        return TENSOR
    return PLAIN if a in IS_PLAIN and b in IS_PLAIN else UNKNOWN


def element(value: str) -> str:
    """What iterating over a value gives."""
    if value == TENSORS:
        return TENSOR
    if value in IS_TENSOR:
        return value
    return NUMBER if value == SIZE else UNKNOWN


def of_annotation(value: str, node: ast.expr, resolve) -> str:
    """What a variable with this annotation holds. `resolve` gives the value of an expression."""
    if isinstance(node, ast.Constant):
        if node.value is None:
            return NONE
        if not isinstance(node.value, str):
            return UNKNOWN
        try:
            inner = ast.parse(node.value, mode="eval").body
        except (SyntaxError, ValueError):
            return UNKNOWN
        return of_annotation(resolve(inner), inner, resolve)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return merge(
            of_annotation(resolve(node.left), node.left, resolve),
            of_annotation(resolve(node.right), node.right, resolve),
        )
    if isinstance(node, ast.Subscript):
        return _of_subscripted_annotation(node, resolve)
    qualified = ref(value)
    last = qualified.rpartition(".")[2]
    if qualified in ("torchguard.error_t", "torchguard.typing.error_t"):
        return FLAGS
    if qualified == "torch.nn.Parameter" or qualified == "torch.nn.parameter.Parameter":
        return TENSOR
    if last in _ANNOTATED and qualified.startswith("torch"):
        return _ANNOTATED[last]
    if isinstance(node, ast.Name) and not qualified:
        return _BUILTIN_ANNOTATIONS.get(node.id, UNKNOWN)
    return UNKNOWN


def _of_subscripted_annotation(node: ast.Subscript, resolve) -> str:
    outer = ref(resolve(node.value))
    last = outer.rpartition(".")[2] or (node.value.id if isinstance(node.value, ast.Name) else "")
    inner = node.slice
    if outer.startswith("jaxtyping."):
        return BOOL if last == "Bool" else INT if last in _JAXTYPING_INT else TENSOR
    if outer in ("torchguard.typing.Tensor", "torchguard.Tensor"):
        return TENSOR
    if last == "Optional":
        return of_annotation(resolve(inner), inner, resolve)
    if last == "Annotated" and isinstance(inner, ast.Tuple):
        return of_annotation(resolve(inner.elts[0]), inner.elts[0], resolve)
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    parts = [part for part in parts if not (isinstance(part, ast.Constant) and part.value is Ellipsis)]
    held = [of_annotation(resolve(part), part, resolve) for part in parts]
    if last == "Union" and held:
        merged = held[0]
        for other in held[1:]:
            merged = merge(merged, other)
        return merged
    if last in _SEQUENCES:
        return TENSORS if held and all(one in IS_TENSOR for one in held) else UNKNOWN
    return PLAIN if last in ("dict", "Dict", "Callable") else UNKNOWN


def of_call(called: str, node: ast.Call, arguments: list[str]) -> str:
    """What a call of an imported function, a layer or a function of this file gives."""
    if called.startswith("layer:"):
        return TENSOR if called[6:] in names.LAYERS else UNKNOWN
    if called.startswith("def:"):
        return called[4:]
    if called == WATCHED:
        return WATCHED_OUTPUT
    if ref(called) == "torch.compile" and arguments[:1] == [WATCHED]:
        return WATCHED
    package, _, last = ref(called).rpartition(".")
    if not package:
        return UNKNOWN
    root = package.partition(".")[0]
    if root == "torch":
        return _of_torch_call(package, last, node, arguments)
    if root == "torchguard":
        return FLAGS if last in _FLAGS_FUNCTIONS else WATCHED if last == "watch" else UNKNOWN
    if root == "numpy":
        return PLAIN
    if root == "math":
        return NUMBER
    if root == "einops" and last in ("rearrange", "reduce", "repeat") and arguments[:1] == [TENSOR]:
        return TENSOR
    return UNKNOWN


def _of_torch_call(package: str, last: str, node: ast.Call, arguments: list[str]) -> str:
    if package == "torch":
        if last in _ANNOTATED:
            return _ANNOTATED[last]
        if last in ("max", "min", "median", "nanmedian"):
            return _reduced(node, arguments[1:], TENSOR)
        if last == "where":
            return TENSORS if len(node.args) == 1 else TENSOR
        if last == "nonzero":
            return TENSORS if _keyword(node, "as_tuple") else INT
        if last in ("unique", "unique_consecutive"):
            return TENSORS if any((k.arg or "").startswith("return_") for k in node.keywords) else TENSOR
        if last in names.TENSOR_FUNCTIONS:
            held = arguments[0] if arguments and arguments[0] in (BOOL, INT) and last in _SAME_DTYPE else TENSOR
            if held == BOOL and last in _STILL_WITHOUT_GRADIENT:
                held = INT
            return _with_dtype(last, node, held)
        if last in names.TENSORS_FUNCTIONS:
            return TENSORS
        if last in ("is_tensor", "numel", "equal", "allclose", "is_floating_point", "is_grad_enabled"):
            return NUMBER
        return UNKNOWN
    if package == "torch.nn.functional":
        return _with_dtype(last, node, TENSOR) if last in names.FUNCTIONAL else UNKNOWN
    if package == "torch.nn":
        return TENSOR if last == "Parameter" else f"layer:{last}"
    if package.startswith("torch.nn.modules"):
        return f"layer:{last}"
    if package == "torch.linalg":
        return TENSORS if last in _LINALG_TENSORS else TENSOR
    if package in ("torch.fft", "torch.special"):
        return TENSOR
    if package == "torch.autograd":
        return TENSORS if last == "grad" else UNKNOWN
    if package in ("torch.nn.parameter",) and last == "Parameter":
        return TENSOR
    return UNKNOWN


def of_method(held: str, method: str, node: ast.Call, arguments: list[str], is_bool_dtype, is_int_dtype) -> str:
    """What `tensor.method(...)` gives."""
    if method in names.PLAIN_METHODS:
        return SIZE if method == "size" and not node.args else NUMBER
    if method in ("max", "min", "median", "nanmedian"):
        return _reduced(node, arguments, held)
    if method == "nonzero":
        return TENSORS if _keyword(node, "as_tuple") else INT
    if method in ("unique", "unique_consecutive"):
        return TENSORS if any((k.arg or "").startswith("return_") for k in node.keywords) else held
    if method == "type" and not node.args:
        return TEXT
    if method in ("to", "type"):
        given = [*node.args, *(k.value for k in node.keywords if k.arg in ("dtype", "device", "other"))]
        if any(is_bool_dtype(one) for one in given):
            return BOOL
        if any(is_int_dtype(one) for one in given):
            return INT
        if held in (BOOL, INT) and not all(_names_a_device(one) for one in given):
            return INT
        return held
    if method in names.TENSORS_METHODS:
        return TENSORS
    if method.endswith("_") and method in names.IN_PLACE_METHODS:
        return held
    if method in names.TENSOR_METHODS or method == "requires_grad_":
        if held in (BOOL, INT) and method in _STILL_WITHOUT_GRADIENT:
            return INT
        return _with_dtype(method, node, held if held in (BOOL, INT, FLAGS) and method in _SAME_DTYPE else TENSOR)
    return UNKNOWN


def _with_dtype(name: str, node: ast.Call, held: str) -> str:
    for keyword in node.keywords:
        if keyword.arg == "dtype":
            last = keyword.value.attr if isinstance(keyword.value, ast.Attribute) else ""
            return BOOL if last == "bool" else INT if last in _INT_DTYPES else TENSOR
    if name in names.BOOL_RESULTS:
        return BOOL
    if name == "arange" and any(isinstance(arg, ast.Constant) and isinstance(arg.value, float) for arg in node.args):
        return TENSOR
    return INT if name in names.INT_RESULTS else held


def _reduced(node: ast.Call, further: list[str], held: str) -> str:
    """`max(dim)` gives values and indices, `max(other)` one tensor."""
    if any(keyword.arg == "dim" for keyword in node.keywords):
        return TENSORS
    if not further:
        return held
    return held if further[0] in IS_TENSOR else TENSORS if further[0] == NUMBER else UNKNOWN


def _keyword(node: ast.Call, name: str) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords)


def _names_a_device(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "device" in last


def of_binary(op: ast.operator, left: str, right: str) -> str:
    if FLAGS in (left, right):
        return FLAGS
    if left in (TEXT, TENSORS):
        return left
    if left in IS_TENSOR or right in IS_TENSOR:
        if isinstance(op, ast.BitAnd | ast.BitOr | ast.BitXor) and BOOL in (left, right):
            return BOOL
        return INT if {left, right} <= {INT, BOOL, NUMBER} else TENSOR
    if left == right == NUMBER:
        return NUMBER
    return left if left == SIZE else UNKNOWN
