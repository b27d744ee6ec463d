"""The operations that a file may name, and the arguments that their kernels do not check themselves.

A file is not trusted, and a kernel may read or write foreign memory if its arguments contradict each other: torch's own
callers never pass such arguments, so many kernels do not look. Only operations on this list are looked up. Those that
rely on their callers have a check here. Backward operations take what a forward operation saved, and are not on the
list, except for those of pointwise operations and of views.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard._torch import ops
from torchguard.exceptions import SavedGraphError

# Operations whose kernels check their arguments. Those with torch's tag `pointwise` are allowed as well.
_ALLOWED = {
    "views, copies, and moved elements": """
        view _unsafe_view reshape permute transpose t expand unsqueeze squeeze select slice diagonal unfold flip
        roll repeat alias clone contiguous detach lift_fresh _to_copy copy tril triu diag_embed constant_pad_nd
        cat stack split unsafe_split split_with_sizes unbind chunk select_scatter slice_scatter diagonal_scatter
        select_backward slice_backward diagonal_backward rot90 movedim pixel_shuffle pixel_unshuffle
        channel_shuffle block_diag reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
        replication_pad2d replication_pad3d view_as_real view_as_complex complex polar real imag _conj _neg_view
        resolve_conj
    """,
    "indexing, whose kernels check that positions are in range": """
        gather index index_select embedding scatter scatter_add scatter_reduce index_add index_put masked_fill
        masked_scatter take searchsorted bucketize
    """,
    "new tensors": """
        full zeros ones arange eye scalar_tensor linspace full_like zeros_like ones_like new_full new_zeros
        new_ones fill tril_indices triu_indices
    """,
    "reductions and scans": """
        sum nansum mean var var_mean std std_mean amax amin aminmax max min argmax argmin sort argsort topk
        kthvalue median nanmedian mode cumsum cumprod cummax cummin logcumsumexp prod any all logsumexp
        linalg_vector_norm norm dist count_nonzero trace renorm _softmax _log_softmax _safe_softmax
        _softmax_backward_data _log_softmax_backward_data _cdist_forward _euclidean_dist _pdist_forward
    """,
    "matrices": """
        mm bmm matmul addmm baddbmm addbmm addmv addr mv dot vdot outer linalg_inv_ex _linalg_solve_ex
        _linalg_det _linalg_slogdet linalg_solve_triangular linalg_cholesky_ex _linalg_eigh _linalg_svd
        linalg_qr linalg_matrix_exp linalg_lu linalg_lu_factor_ex linalg_cross linalg_pinv linalg_eig
        _linalg_eigvals
    """,
    "layers and losses": """
        convolution native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training _fused_rms_norm glu log_sigmoid_forward _prelu_kernel hardswish
        max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d
        _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        grid_sampler_2d grid_sampler_3d _scaled_dot_product_flash_attention_for_cpu mse_loss huber_loss
        smooth_l1_loss soft_margin_loss nll_loss_forward nll_loss2d_forward binary_cross_entropy
        binary_cross_entropy_with_logits _fft_r2c _fft_c2r _fft_c2c im2col col2im
    """,
}
_NAMES = frozenset(name for names in _ALLOWED.values() for name in names.split())


def is_allowed(operation: Any) -> bool:
    """Whether a file may name an operation: it is pure, returns tensors, and is on the list."""
    schema = ops.schema_of(operation)
    namespace, _, name = schema.name.partition("::")
    returns_tensors = any("Tensor" in str(result.type) for result in schema.returns)
    is_pointwise = torch.Tag.pointwise in operation.tags and "polynomial" not in name  # their degree is a loop
    is_listed = name in _NAMES or is_pointwise
    # Attention is random with dropout alone, which `_attention` refuses.
    is_random = torch.Tag.nondeterministic_seeded in operation.tags and _CHECKS.get(name) is not _attention
    return namespace == "aten" and is_listed and returns_tensors and not schema.is_mutable and not is_random


def check_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise SavedGraphError for arguments that contradict each other. Tensors are fake.

    Every float has to be finite where an operation computes positions from it.
    """
    schema = ops.schema_of(operation)
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    given |= dict(kwargs)
    for argument in schema.arguments:
        wanted = next((kind for name, kind in _NUMBERED.items() if name in str(argument.real_type)), None)
        if wanted is not None and not isinstance(given[argument.name], wanted | None):
            raise SavedGraphError(f"{argument.name}: expected {wanted.__name__}, got {given[argument.name]!r:.60}.")
    name = schema.name.partition("::")[2]
    check = _CHECKS.get(name) or next((one for prefix, one in _PREFIXES.items() if name.startswith(prefix)), None)
    if check is not None and not check(given):
        raise SavedGraphError(f"the arguments of {name} contradict each other.")


Given = Mapping[str, Any]
# Torch also takes these as numbers, and does not check that they are in range.
_NUMBERED: dict[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}


def _group_norm(given: Given) -> bool:
    x, n, c, rest, groups = (given[name] for name in ("input", "N", "C", "HxW", "group"))
    is_same = x.dim() >= 2 and tuple(x.shape[:2]) == (n, c) and math.prod(x.shape[2:]) == rest
    return is_same and groups > 0 and c % groups == 0 and _have_shape(given, ("weight", "bias"), (c,))


def _batch_norm(given: Given) -> bool:
    x = given["input"]
    return x.dim() >= 2 and _have_shape(given, ("weight", "bias", "running_mean", "running_var"), (x.shape[1],))


def _layer_norm(given: Given) -> bool:
    shape = tuple(given["normalized_shape"])
    is_inner = 0 < len(shape) <= given["input"].dim() and tuple(given["input"].shape[-len(shape) :]) == shape
    return is_inner and _have_shape(given, ("weight", "bias"), shape)


def _have_shape(given: Given, names: Sequence[str], shape: tuple[int, ...]) -> bool:
    return all(tuple(given[name].shape) == shape for name in names if given.get(name) is not None)


def _attention(given: Given) -> bool:
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    is_same = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    is_same = is_same and q.shape[3] == k.shape[3] == v.shape[3] and k.shape[2] == v.shape[2]
    if not is_same or q.dtype != k.dtype or q.dtype != v.dtype or given["dropout_p"] != 0:
        return False
    whole = (*q.shape[:3], k.shape[2])
    return mask is None or (mask.dim() in (2, 4) and _broadcasts(tuple(mask.shape), whole[-mask.dim() :]))


def _broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return all(size in (1, full) for size, full in zip(shape, whole, strict=True))


def _upsample(given: Given) -> bool:
    """The factors are those of the sizes, up to rounding: positions are computed from them."""
    x, sizes = given["self" if "self" in given else "input"], given["output_size"]
    if sizes is None:
        return False
    scales = [given.get(name) for name in given if name.startswith("scales")]
    if x.dim() != len(sizes) + 2 or not all(size > 0 for size in (*x.shape[1:], *sizes)):
        return False
    pairs = zip(x.shape[2:], sizes, scales, strict=True) if len(scales) == len(sizes) else ()
    fits = (scale is None or (0 < scale < 2**20 and abs(n * scale - m) <= 1) for n, m, scale in pairs)
    return len(scales) == len(sizes) and all(fits)


def _grid_sampler(given: Given) -> bool:
    x, grid = given["input"], given["grid"]
    is_same = x.dim() == grid.dim() and x.shape[0] == grid.shape[0] and grid.shape[-1] == x.dim() - 2
    is_full = x.numel() > 0 and x.dtype == grid.dtype
    return is_same and is_full and given["interpolation_mode"] in (0, 1, 2) and given["padding_mode"] in (0, 1, 2)


def _fourier(given: Given) -> bool:
    x, dims, size = given["self"], given["dim"], given.get("last_dim_size")
    wrapped = {dim % x.dim() for dim in dims if -x.dim() <= dim < x.dim()} if x.dim() else set()
    if not dims or len(wrapped) != len(dims) or given["normalization"] not in (0, 1, 2) or not x.numel():
        return False
    return size is None or (size > 0 and x.shape[dims[-1]] == size // 2 + 1)


def _reinterpretation(given: Given) -> bool:
    """A byte that is neither 0 nor 1 is no boolean."""
    return given.get("dtype") != torch.bool


def _search(given: Given) -> bool:
    return given.get("sorter") is None


def _pad(given: Given) -> bool:
    """A reflection reaches no further than the tensor, a replication needs an edge."""
    x, pad = given["self"], given["padding"]
    return x.dim() >= len(pad) // 2 and x.numel() > 0 and all(abs(width) < 2**20 for width in pad)


def _softmax_backward(given: Given) -> bool:
    g, y = given["grad_output"], given["output"]
    return g.shape == y.shape and g.dtype == y.dtype == given["input_dtype"]


def _prelu(given: Given) -> bool:
    return isinstance(given["weight"], Tensor) and given["weight"].dtype == given["self"].dtype


_CHECKS: dict[str, Callable[[Given], bool]] = {
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": lambda given: _layer_norm(given),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "view": _reinterpretation,
    "searchsorted": _search,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "_prelu_kernel": _prelu,
}
_PREFIXES: dict[str, Callable[[Given], bool]] = {
    "upsample_": _upsample,
    "grid_sampler_": _grid_sampler,
    "_fft_": _fourier,
    "reflection_pad": _pad,
    "replication_pad": _pad,
}
