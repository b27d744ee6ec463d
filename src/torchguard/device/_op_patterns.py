"""Names and globs of ops as people write them, and the names that these ops have in a graph.

AOTAutograd decomposes some ops while it traces: no graph contains `aten.linear`, but `aten.addmm` or `aten.mm`. A
device that denies `aten.linear` means these, so a pattern is expanded by `DECOMPOSES_TO` before it is matched. The
table is written by hand: torch has none of the ops that its composite kernels call. Where an op decomposes to what many
others use, as `torch.max(x, y)` to `aten.maximum`, it is found by the call in the program (`is_call_of`).
"""

import functools
import re
import sys
import types

import torch

from torchguard._torch.ops import (
    is_composed,
    is_decomposed,
    is_traced,
    matches,
    op_name_set,
    op_names,
)

_CONVOLUTION = ("convolution",)
_PRODUCTS = ("mm", "bmm", "mv", "dot")
_BATCH_NORMS = (
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional",
    "_batch_norm_no_update",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
_FFTS = ("_fft_r2c", "_fft_c2c", "_fft_c2r")

# The ops that AOTAutograd decomposes an op to, where these do the op's essential work. In-place ops need no row.
DECOMPOSES_TO: dict[str, tuple[str, ...]] = {
    "linear": ("addmm", *_PRODUCTS),
    "matmul": _PRODUCTS,
    "linalg_matmul": _PRODUCTS,
    "inner": _PRODUCTS,
    "einsum": _PRODUCTS,
    "tensordot": _PRODUCTS,
    "chain_matmul": _PRODUCTS,
    "softmax": ("_softmax",),
    "special_softmax": ("_softmax",),
    "log_softmax": ("_log_softmax",),
    "special_log_softmax": ("_log_softmax",),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "_convolution_mode"), _CONVOLUTION),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _CONVOLUTION),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
    "batch_norm": _BATCH_NORMS,
    "native_batch_norm": _BATCH_NORMS,
    "_native_batch_norm_legit": _BATCH_NORMS,
    "_batch_norm_impl_index": _BATCH_NORMS,
    "instance_norm": _BATCH_NORMS,
    "dropout": ("native_dropout",),
    "dropout_": (),  # it decomposes to ops that many others use
    "normal": ("normal_functional",),
    "normal_": ("normal_functional",),
    "resize_": ("resize", "as_strided"),
    "max_pool1d": ("max_pool2d_with_indices",),
    "max_pool2d": ("max_pool2d_with_indices",),
    "max_pool3d": ("max_pool3d_with_indices",),
    "avg_pool1d": ("avg_pool2d",),
    "adaptive_max_pool1d": ("adaptive_max_pool2d",),
    "adaptive_avg_pool2d": ("_adaptive_avg_pool2d",),
    "adaptive_avg_pool3d": ("_adaptive_avg_pool3d",),
    # With a mask or dropout it decomposes to ops with a softmax that nothing else uses.
    "scaled_dot_product_attention": ("_scaled_dot_product_*attention*", "_safe_softmax"),
    "_scaled_dot_product_attention_math": ("_safe_softmax",),
    "embedding_bag": ("_embedding_bag", "_embedding_bag_forward_only"),
    "embedding_backward": ("embedding_dense_backward",),
    "nll_loss": ("nll_loss_forward",),
    "nll_loss2d": ("nll_loss2d_forward",),
    "nll_loss_nd": ("nll_loss_forward", "nll_loss2d_forward"),
    "cross_entropy_loss": ("nll_loss_forward", "nll_loss2d_forward"),
    "ctc_loss": ("_ctc_loss",),
    "cdist": ("_cdist_forward", "_euclidean_dist"),
    "prelu": ("_prelu_kernel",),
    "log_sigmoid": ("log_sigmoid_forward",),
    "relu6": ("hardtanh",),
    "selu": ("elu",),
    "square": ("pow",),
    "float_power": ("pow",),
    "argsort": ("sort",),
    "msort": ("sort",),
    "item": ("_local_scalar_dense",),
    "outer": ("mul",),
    "pad": ("constant_pad_nd", "reflection_pad*", "replication_pad*"),
    "grid_sampler": ("grid_sampler_2d", "grid_sampler_3d"),
    **dict.fromkeys(("norm", "linalg_norm"), ("linalg_vector_norm",)),
    "linalg_det": ("_linalg_det",),
    "linalg_slogdet": ("_linalg_slogdet",),
    "linalg_svd": ("_linalg_svd",),
    "linalg_svdvals": ("_linalg_svd",),
    "linalg_eigh": ("_linalg_eigh",),
    "linalg_eigvalsh": ("_linalg_eigh",),
    "linalg_solve": ("_linalg_solve_ex",),
    "linalg_solve_ex": ("_linalg_solve_ex",),
    "linalg_inv": ("linalg_inv_ex",),
    "inverse": ("linalg_inv_ex",),
    "linalg_cholesky": ("linalg_cholesky_ex",),
    **dict.fromkeys(
        (f"fft_{kind}fft{dims}" for kind in ("", "i", "r", "ir", "h", "ih") for dims in ("", "2", "n")), _FFTS
    ),
    **dict.fromkeys(("to", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision"), ("_to_copy",)),
    "contiguous": ("clone",),
    **dict.fromkeys(("reshape", "reshape_as", "flatten", "unflatten", "ravel", "view_as"), ("view", "_unsafe_view")),
    **dict.fromkeys(("expand_as", "broadcast_to"), ("expand",)),
    **dict.fromkeys(("swapaxes", "swapdims"), ("transpose",)),
    **dict.fromkeys(("movedim", "moveaxis"), ("permute",)),
    **dict.fromkeys(("chunk", "tensor_split"), ("split", "split_with_sizes", "slice")),
    "narrow": ("slice",),
    "tile": ("repeat",),
    **dict.fromkeys(("concat", "concatenate", "hstack", "vstack", "dstack", "row_stack", "column_stack"), ("cat",)),
    # Aliases.
    **{
        name: (other,)
        for other, names in {
            "sub": ("subtract",),
            "mul": ("multiply",),
            "div": ("divide", "true_divide"),
            "neg": ("negative",),
            "abs": ("absolute",),
            "clamp": ("clip",),
            "trunc": ("fix",),
            "ne": ("not_equal",),
            "lt": ("less",),
            "le": ("less_equal",),
            "gt": ("greater",),
            "ge": ("greater_equal",),
            "asin": ("arcsin",),
            "asinh": ("arcsinh",),
            "acos": ("arccos",),
            "acosh": ("arccosh",),
            "atan": ("arctan",),
            "atanh": ("arctanh",),
            "atan2": ("arctan2",),
            "sigmoid": ("special_expit",),
            "erf": ("special_erf",),
            "erfc": ("special_erfc",),
            "exp2": ("special_exp2",),
            "expm1": ("special_expm1",),
            "log1p": ("special_log1p",),
            "logsumexp": ("special_logsumexp",),
        }.items()
        for name in names
    },
}


# How programs write functions and classes of torch. The names of some modules are part of the names of their ops.
_PREFIXES = ("linalg", "fft", "special")
_PYTHON = ("torch", "nn", "F", "functional", "Tensor", *_PREFIXES)
# Of torch.nn: other ops than those of the same names.
_IN_NN = {"unfold": "im2col", "fold": "col2im"}


def patterns_as_written(name: str) -> list[str]:
    """The patterns that a name in any of its usual forms can mean, the most likely first.

    >>> patterns_as_written("torch.nn.functional.gelu"), patterns_as_written("nn.LeakyReLU")
    (['aten.gelu', 'aten.gelu_loss'], ['aten.leaky_relu'])
    """
    name = name.removeprefix("torch.ops.").replace("::", ".")
    *path, last = name.split(".")
    if not path:
        return [f"aten.{last}"]
    if path[0].lower() == "aten":
        return [".".join(["aten", *path[1:], last])]
    if path[0] not in _PYTHON and not _is_module(path[0]):
        return [name]
    if not set(path) <= set(_PYTHON):  # torch.masked.mean is no aten.mean
        return [f"aten.{'_'.join([*path, last]).removeprefix('torch_')}"]
    if path[-1] in ("nn", "F", "functional") and last.lower() in _IN_NN:
        return [f"aten.{_IN_NN[last.lower()]}"]
    if last[:1].isupper() and path[-1] == "nn":
        return [f"aten.{_op_of_class(last)}"]
    op = "_".join([*(one for one in path if one in _PREFIXES), last])
    return [f"aten.{op}", f"aten.{op}_loss"]  # F.cross_entropy is aten.cross_entropy_loss


def _is_module(name: str) -> bool:
    """Whether a name is that of a module of torch or of Python, and of no library of ops: `masked`, `operator`."""
    is_module = isinstance(getattr(torch, name, None), types.ModuleType) or name in sys.stdlib_module_names
    return is_module and not op_names(name)


def _op_of_class(name: str) -> str:
    """The op of a class of `torch.nn`: `leaky_relu` for `LeakyReLU`. BatchNorm2d has that of all dims."""
    bare = re.sub(r"(?<=Norm)[123]d$", "", name).lower()
    ops = (one.split(".")[1] for one in op_names())
    return next((op for op in ops if op.replace("_", "") == bare and op == op.strip("_")), name)


@functools.cache
def graph_patterns(pattern: str) -> tuple[str, ...]:
    """A name or glob of ops, and the names of the ops that they decompose to before there is a graph.

    A glob that matches an op of graphs is not expanded: `aten.linalg_*` does not mean `aten.mm`.
    """
    names = [name for name in op_names() if matches(name, pattern)] if pattern.startswith("aten.") else []
    if any(letter in pattern for letter in "*?[") and not all(map(is_decomposed, names)):
        return (pattern,)
    return tuple(dict.fromkeys([pattern, *(op for name in names for op in _decomposes_to(name))]))


@functools.cache
def first_match(name: str, patterns: tuple[str, ...]) -> str | None:
    """The first of these patterns, as it was written, that matches an op of a graph."""
    return next((p for p in patterns if any(matches(name, one) for one in graph_patterns(p))), None)


@functools.cache
def is_call_of(called: str, pattern: str) -> bool:
    """Whether a pattern names a function or a class of `torch.nn` that AOTAutograd decomposes, in some overload.

    `aten.where` names the call `torch.where(mask)`, of which a graph has only `aten.nonzero`. A glob names no call.
    """
    op = ".".join(pattern.split(".")[:2])
    is_glob = any(letter in pattern for letter in "*?[")
    if is_glob or not pattern.startswith("aten.") or not called:
        return False
    written = patterns_as_written(f"nn.{called}" if called[0].isupper() else f"torch.{called}")
    # torch.norm is composed in Python.
    is_made = op.partition(".")[2] in DECOMPOSES_TO or any(map(is_composed, _overloads(op)))
    return op in written and is_made


def _overloads(op: str) -> list[str]:
    return [name for name in op_names() if name.startswith(f"{op}.")]


@functools.cache
def matches_graph_ops(pattern: str) -> bool:
    """Whether a pattern, or what it expands to, matches an op that a graph of AOTAutograd can contain."""
    patterns = graph_patterns(pattern)
    names = (name for name in op_names() if any(matches(name, one) for one in patterns))
    return any(not is_decomposed(name) and is_traced(name) for name in names)


def similar_graph_ops(pattern: str) -> list[str]:
    """The ops that a graph can contain and whose names contain this one."""
    bare = pattern.split(".")[1].strip("_*")
    ops = {name.rpartition(".")[0] for name in op_names() if bare and bare in name and not is_decomposed(name)}
    return sorted(ops)


def _decomposes_to(name: str) -> tuple[str, ...]:
    """The names in graphs of the ops that one overload decomposes to."""
    _, op, overload = name.split(".")
    if op in DECOMPOSES_TO:
        return tuple(f"aten.{made}" for made in DECOMPOSES_TO[op])
    plain = op.removesuffix("_")
    if plain == op or op.endswith("__"):
        return ()
    # A graph contains the out-of-place op instead of the in-place one: of the same overload, if there is one.
    same = f"aten.{plain}.{overload}"
    return (
        same if same in op_name_set() else f"aten.{plain}",
        *_decomposes_to(f"aten.{plain}.{overload}"),
    )
