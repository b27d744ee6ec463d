"""Facts about ATen operators, one row an operator.

Several parts of torchguard need to know the same things of an operator: which operands it broadcasts, which numbers it
compares with, which of its operands are indices, where it is not smooth and what torch returns as the derivative there,
whether it adds numbers up. These facts are stated here once. What a part derives from an operator (its type, its
bounds, its exact value) is a rule of that part, and stands there.

To add an operator that others define, add its definition to `torchguard.compiled.certify._definitions`: the layers use
it. To add any other, add its row here, then a rule in each layer of `torchguard.compiled.certify` that should cover
it.

The key of a row is the operator's name without namespace and overload: `add` for `aten.add.Tensor`. An operator without
a row has none of these properties.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchguard._torch.support import torch_is_at_least


@dataclass(frozen=True)
class OpFacts:
    """What is known of one operator.

    Attributes:
        pointwise: the number of leading operands that are broadcast and combined element by element; 0 if it is not
            pointwise, or if its type does not follow from this and `result` alone.
        result: the dtype of a pointwise result: the promoted dtype of the operands, the same made floating-point, or
            bool.
        identity: it returns its operand's values unchanged, in the same order.
        creates: it returns a new tensor whose values are those of no operand: made of its numbers ("filled"), made of
            its numbers in the shape of its first operand ("like"), or whatever the memory held ("uninitialized").
        has_fill_value: one of its arguments is a number that fills the result.
        compares: it compares an operand with the numbers among its arguments.
        thresholds: numbers it compares with although no argument states them.
        indexes: its integer operands are positions in another operand.
        nonsmooth: the derivative that torch returns where the operator has none; empty if it is smooth.
        is_switch: it is nonsmooth only if a floating-point leaf decides it: a comparison, or a choice by one.
        condition: for a switch that takes its condition as an argument, the position of that argument.
        accumulates: whether a floating-point result is a sum of many terms. "" leaves the answer to torch's tag
            `reduction`; "if reduced" is a loss, which is a sum only if its result is a scalar.
    """

    pointwise: int = 0
    result: Literal["promoted", "float", "bool"] = "promoted"
    identity: bool = False
    creates: Literal["", "filled", "like", "uninitialized"] = ""
    has_fill_value: bool = False
    compares: bool = False
    thresholds: tuple[float, ...] = ()
    indexes: bool = False
    nonsmooth: str = ""
    is_switch: bool = False
    condition: int | None = None
    accumulates: Literal["", "always", "if reduced", "never"] = ""


_STEPS = "0 everywhere, also at the steps"
_JOINS = "smooth, and the second derivative jumps where the parts meet"
_TIES = "at ties the derivative is shared evenly"
_FIRST = "at ties one of the largest is taken, by index"
_ENDS = "0 at both ends"
_CLAMP = "0 at an end that is a number, 1/2 at one that is a tensor" if torch_is_at_least(2, 14) else "1 at both ends"
_STEP_OR_TIES = f"over a dim: {_FIRST}; over all: {_TIES}"

_UNARY, _UNARY_FLOAT = OpFacts(pointwise=1), OpFacts(pointwise=1, result="float")
_BINARY, _TERNARY = OpFacts(pointwise=2), OpFacts(pointwise=3)
_LOGICAL = OpFacts(pointwise=2, result="bool")
_COMPARISON = OpFacts(pointwise=2, result="bool", compares=True, nonsmooth=_STEPS, is_switch=True)
_STEPPED = OpFacts(pointwise=1, nonsmooth=_STEPS)
_SWITCH = OpFacts(nonsmooth=_STEPS, is_switch=True)
_COMPARES, _INDEXES, _IDENTITY = OpFacts(compares=True), OpFacts(indexes=True), OpFacts(identity=True)
_CHOOSES_ONE = OpFacts(nonsmooth=_FIRST)
_FILLED, _LIKE, _UNINITIALIZED = OpFacts(creates="filled"), OpFacts(creates="like"), OpFacts(creates="uninitialized")
_ACCUMULATES, _LOSS = OpFacts(accumulates="always"), OpFacts(accumulates="if reduced")

FACTS: dict[str, OpFacts] = {
    # Arithmetic
    **dict.fromkeys(("neg", "square"), _UNARY),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "pow", "atan2", "logaddexp", "hypot"), _BINARY),
    **dict.fromkeys(("lerp", "addcmul", "addcdiv"), _TERNARY),
    "div": OpFacts(pointwise=2, result="float"),
    "abs": OpFacts(nonsmooth="abs'(0) = 0"),
    "copysign": OpFacts(nonsmooth="0 at 0"),
    "fill": OpFacts(pointwise=1, has_fill_value=True),
    # Functions of one number
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "rsqrt", "reciprocal"), _UNARY_FLOAT),
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"), _UNARY_FLOAT),
    **dict.fromkeys(("asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma"), _UNARY_FLOAT),
    **dict.fromkeys(
        ("special_erfcx", "special_log_ndtr", "i0", "special_i0e", "special_i1", "special_i1e"), _UNARY_FLOAT
    ),
    **dict.fromkeys(("tanh_backward", "sigmoid_backward"), OpFacts(pointwise=2, result="float")),
    "sqrt": OpFacts(pointwise=1, result="float", nonsmooth="inf at 0"),
    # Steps
    **dict.fromkeys(("sign", "sgn", "floor", "ceil", "round", "trunc"), _STEPPED),
    "heaviside": OpFacts(nonsmooth=_STEPS),
    "frac": OpFacts(pointwise=1, nonsmooth="1, also at the steps"),
    **dict.fromkeys(
        ("remainder", "fmod"), OpFacts(pointwise=2, nonsmooth="1 in the first argument, also at the steps")
    ),
    **dict.fromkeys(("isnan", "isinf", "isfinite", "isposinf", "isneginf"), OpFacts(pointwise=1, result="bool")),
    # Comparisons, logic and choices
    **dict.fromkeys(("gt", "lt", "ge", "le", "eq", "ne"), _COMPARISON),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _LOGICAL),
    "logical_not": OpFacts(pointwise=1, result="bool"),
    **dict.fromkeys(("signbit", "argmax", "argmin", "argsort", "bucketize", "searchsorted", "_to_copy"), _SWITCH),
    "where": OpFacts(nonsmooth="the derivative of the branch that is taken", is_switch=True, condition=0),
    "masked_fill": OpFacts(nonsmooth="the derivative of what is taken", is_switch=True, condition=1),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), OpFacts(compares=True, nonsmooth=_CLAMP)),
    **dict.fromkeys(("maximum", "minimum"), OpFacts(pointwise=2, nonsmooth=_TIES)),
    # Activations
    **dict.fromkeys(("celu", "silu", "mish", "gelu"), _UNARY),
    "relu": OpFacts(pointwise=1, nonsmooth="relu'(0) = 0"),
    "leaky_relu": OpFacts(pointwise=1, nonsmooth="leaky_relu'(0) = negative_slope"),
    "elu": OpFacts(pointwise=1, nonsmooth="elu'(0) = the slope from the left"),
    "prelu": OpFacts(nonsmooth="prelu'(0) = weight"),
    "_prelu_kernel": OpFacts(pointwise=1, nonsmooth="prelu'(0) = weight"),
    "threshold": OpFacts(pointwise=1, compares=True, nonsmooth="0 at the threshold"),
    "softplus": OpFacts(pointwise=1, compares=True, thresholds=(20,)),
    "hardtanh": OpFacts(pointwise=1, compares=True, thresholds=(1,), nonsmooth=_ENDS),
    "hardsigmoid": OpFacts(pointwise=1, compares=True, thresholds=(3,), nonsmooth=_ENDS),
    "hardshrink": OpFacts(pointwise=1, compares=True, thresholds=(0.5,), nonsmooth=_ENDS),
    "softshrink": OpFacts(pointwise=1, compares=True, thresholds=(0.5,), nonsmooth=_ENDS),
    "hardswish": OpFacts(pointwise=1, compares=True, thresholds=(3,), nonsmooth="0 at the lower end, 1 at the upper"),
    "threshold_backward": OpFacts(pointwise=2, compares=True),
    **dict.fromkeys(("hardswish_backward", "hardsigmoid_backward"), OpFacts(compares=True, thresholds=(3,))),
    **dict.fromkeys(
        ("softplus_backward", "hardtanh_backward", "softshrink_backward", "hardshrink_backward"), _COMPARES
    ),
    # Copies, and new tensors
    **dict.fromkeys(("clone", "alias", "contiguous", "detach", "lift_fresh"), _IDENTITY),
    **dict.fromkeys(("zeros", "ones", "arange", "eye"), _FILLED),
    **dict.fromkeys(("full", "scalar_tensor"), OpFacts(creates="filled", has_fill_value=True)),
    **dict.fromkeys(("zeros_like", "ones_like", "new_zeros", "new_ones"), _LIKE),
    **dict.fromkeys(("full_like", "new_full"), OpFacts(creates="like", has_fill_value=True)),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"), _UNINITIALIZED),
    "new_empty_strided": _UNINITIALIZED,
    # Indexing
    **dict.fromkeys(("index", "_unsafe_index", "gather", "index_select", "scatter"), _INDEXES),
    "embedding": OpFacts(indexes=True, compares=True),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _INDEXES),
    **dict.fromkeys(("scatter_add", "index_add"), OpFacts(indexes=True, accumulates="always")),
    "embedding_dense_backward": OpFacts(indexes=True, compares=True, accumulates="always"),
    **dict.fromkeys(("scatter_reduce", "index_reduce", "segment_reduce"), _ACCUMULATES),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _ACCUMULATES),
    # Reductions: the result of a maximum is one of the elements, and no sum.
    **dict.fromkeys(("amax", "amin"), OpFacts(nonsmooth=_TIES, accumulates="never")),
    **dict.fromkeys(("max", "min"), OpFacts(nonsmooth=_STEP_OR_TIES, accumulates="never")),
    "aminmax": OpFacts(accumulates="never"),
    **dict.fromkeys(("sort", "topk", "kthvalue", "median", "cummax", "cummin"), _CHOOSES_ONE),
    "linalg_vector_norm": OpFacts(nonsmooth="0 at the zero vector"),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "trace", "dist", "renorm"), _ACCUMULATES),
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist", "_pdist_forward"), _ACCUMULATES),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _ACCUMULATES),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _ACCUMULATES),
    # Normalisation and pooling
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm"), _ACCUMULATES),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _ACCUMULATES),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_functional"), _ACCUMULATES),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "native_batch_norm_backward"), _ACCUMULATES),
    **dict.fromkeys(("_batch_norm_with_update_functional", "batch_norm_backward"), _ACCUMULATES),
    **dict.fromkeys(("cudnn_batch_norm", "cudnn_batch_norm_backward"), _ACCUMULATES),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _ACCUMULATES),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d"), _CHOOSES_ONE),
    # Losses
    **dict.fromkeys(("mse_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss_forward"), _LOSS),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), _LOSS),
    **dict.fromkeys(
        ("huber_loss", "smooth_l1_loss"),
        OpFacts(compares=True, thresholds=(1,), nonsmooth=_JOINS, accumulates="if reduced"),
    ),
    **dict.fromkeys(("huber_loss_backward", "smooth_l1_loss_backward"), _COMPARES),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"), OpFacts(compares=True, indexes=True, accumulates="always")
    ),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _INDEXES),
}
_NONE = OpFacts()

# The products of matrices and vectors that graphs of AOTAutograd hold.
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
# The operators that read the shape of their first operand and none of its values.
SHAPE_ONLY = frozenset(name for name, facts in FACTS.items() if facts.creates == "like")
# The operators that return memory as it is.
UNINITIALIZED = frozenset(name for name, facts in FACTS.items() if facts.creates == "uninitialized")


# The operators whose rule for tangents is wrong in torch 2.11 to 2.15, each with the argument for which it is. Their
# gradients are right.
_WRONG_JVP = {"scatter_reduce": "prod"}


def has_wrong_jvp(name: str, arguments: Sequence[Any]) -> bool:
    """Whether torch's tangents of an operator, called with these arguments, are wrong."""
    return name in _WRONG_JVP and _WRONG_JVP[name] in arguments


def facts_of(name: str) -> OpFacts:
    """The facts about an operator, given by its name without overload: `add` or `aten.add`."""
    return FACTS.get(name.removeprefix("aten."), _NONE)
