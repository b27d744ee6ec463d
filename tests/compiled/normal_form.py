"""The normal form of a graph. Two graphs with the same normal form compute the same function.

Nothing is evaluated. The normal form follows from laws that always hold: a copy or an alias equals its source; some
operators read only the shape of an argument; x ** 1 is x; zero times anything is zero, and so is anything made of zeros
alone; sums and products commute.
"""

from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard.compiled._nodes import op_name

_COPIES = {"alias", "clone", "detach", "contiguous", "lift_fresh"}
# Operators, and the position of the argument of which they read only the shape.
_SHAPE_ONLY = {
    "zeros_like": 0,
    "ones_like": 0,
    "empty_like": 0,
    "new_zeros": 0,
    "full_like": 0,
    "fill": 0,
    "max_pool2d_with_indices_backward": 1,
    "avg_pool2d_backward": 1,
    "_adaptive_avg_pool2d_backward": 1,
}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_ZERO_IF_ANY = {"mul", "mm", "bmm"}
_ZERO_IF_ALL = {"add", "sub", "neg", "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "cat"}
_ZERO_IF_ALL |= {"unsqueeze", "squeeze", "sum", "where", "masked_fill", "select", "flip", "tril", "triu", "diag_embed"}
_COMMUTE = {"add", "mul", "maximum", "minimum"}
ZERO = "zero"


def have_same_normal_form(a: GraphModule, b: GraphModule) -> bool:
    """Whether the outputs of two graphs are the same terms. False does not prove that they differ."""
    return _terms(a) == _terms(b)


def _terms(gm: GraphModule) -> object:
    terms: dict[Node, object] = {}
    inputs = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            terms[node], inputs = ("input", inputs), inputs + 1
        elif node.op == "output":
            return _argument(node.args[0], terms)
        else:
            terms[node] = _term(node, terms)
    return None


def _term(node: Node, terms: dict[Node, object]) -> object:
    name = op_name(node) if node.op == "call_function" else str(node.target)
    args = [_argument(a, terms) for a in node.args]
    if name in _COPIES or (name == "pow" and node.args[1] == 1):
        return args[0]
    value = node.meta.get("val")
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if name in _ZEROS or (name in ("full", "scalar_tensor") and node.args[-1] == 0):
        return (ZERO, shape)
    if name in _SHAPE_ONLY:
        position = _SHAPE_ONLY[name]
        args[position] = ("shape", tuple(node.args[position].meta["val"].shape))
    operands = args[1:] if name == "where" else args[:2] if name in ("add", "sub", "mul") else args[:1]
    if name == "cat":
        operands = list(args[0])
    if name in ("mm", "bmm"):
        operands = args
    zeros = [_is_zero(a) for a in operands]
    if (name in _ZERO_IF_ANY and any(zeros)) or (name in _ZERO_IF_ALL and all(zeros)):
        return (ZERO, shape)
    if name in _COMMUTE and not node.kwargs:
        args = sorted(args, key=repr)
    options = tuple(sorted((k, _argument(v, terms)) for k, v in node.kwargs.items()))
    return (name, tuple(args), options)


def _is_zero(term: object) -> bool:
    return term == 0 or (isinstance(term, tuple) and len(term) == 2 and term[0] == ZERO)


def _argument(value: object, terms: dict[Node, object]) -> object:
    if isinstance(value, Node):
        return terms[value]
    if isinstance(value, list | tuple):
        return tuple(_argument(v, terms) for v in value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)
