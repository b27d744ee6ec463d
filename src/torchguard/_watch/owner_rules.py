"""How the owners of an operation's outputs follow from those of its inputs: see `owners.py`.

A rule gets a `Call` and returns the owners of each output, None for no owners. What it returns may be broadcast to the
shape of the output. Operations without a rule mix all that they are given. A new operation is one entry in `RULES`, or
a name in one of the tables of names.
"""

from typing import Any

import torch
from torch import Tensor

from torchguard._torch.dispatch import positional_names
from torchguard._watch.owner_indices import (
    embedding,
    gather,
    index,
    index_add,
    index_put,
    index_select,
    scatter,
)
from torchguard._watch.owner_layers import (
    attention,
    batch_norm,
    convolution,
    distances,
    group_norm,
    grouped_product,
    layer_norm,
    linear,
    loss_by_class,
    product,
    recurrent,
)
from torchguard._watch.sample_intervals import NO_HIGH, NO_LOW, Call, Owners, Rule, compact, everything, nobody, union


def pointwise(call: Call) -> Owners | None:
    return union([call.owner(z) for z in call.tensors()])


def first_argument(call: Call) -> Owners | None:
    return call.owner(call.tensors()[0])


def nothing(call: Call) -> None:
    return None


def filled(call: Call) -> Owners | None:
    return call.of("value")


def random_around(call: Call) -> Owners | None:
    return union([call.of("mean"), call.of("std")])


def source(call: Call) -> Owners | None:
    """Copies: what was in the output before does not matter."""
    return call.of("src")


# What only moves elements: the same operation on the owners.

_CREATION = ("dtype", "layout", "device", "pin_memory", "memory_format")


def moved(call: Call) -> Any:
    low = [_on_owners(call, "low", NO_LOW), _on_owners(call, "high", NO_HIGH)]
    if isinstance(low[0], Tensor):
        return Owners(*low)
    return [Owners(*both) for both in zip(*low, strict=True)]


def _on_owners(call: Call, which: str, default: int) -> Any:
    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            owners = call.owner(value)
            if owners is not None:
                return getattr(owners, which)
            return torch.tensor(default, dtype=torch.int32).expand(value.shape)
        return [replaced(one) for one in value] if isinstance(value, (list, tuple)) else value

    arguments = {name: replaced(value) for name, value in call.arguments.items() if name not in _CREATION}
    if call.name == "constant_pad_nd":
        arguments["value"] = default
    return call.op(*[arguments[name] for name in positional_names(call.op)])


def joined(call: Call) -> Any:
    """`cat`: what the parts store once along a dim is stored once of the whole, and is not copied out."""
    parts = [z for z in call.tensors() if z.numel()]
    if not parts:
        return moved(call)
    owners = [call.owner(z) or nobody(z.shape) for z in parts]
    dim, shape = call.arguments.get("dim", 0) % parts[0].ndim, call.outputs[0].shape
    return Owners(*[_joined([getattr(one, which) for one in owners], dim, shape) for which in Owners._fields])


def _joined(parts: list[Tensor], dim: int, shape: torch.Size) -> Tensor:
    small = [compact(one) for one in parts]
    if all(one.shape[dim] == 1 and torch.equal(one, small[0]) for one in small):
        return small[0].expand(shape)
    sizes = torch.broadcast_shapes(*[one.narrow(dim, 0, 1).shape for one in small])
    spread = [
        one.expand([*sizes[:dim], part.shape[dim], *sizes[dim + 1 :]]) for one, part in zip(small, parts, strict=True)
    ]
    return torch.cat(spread, dim).expand(shape)


def reshaped(call: Call) -> Owners | None:
    owners = call.owner(call.tensors()[0])
    return None if owners is None else owners.reshape(call.outputs[0].shape)


def as_real(call: Call) -> Owners | None:
    owners = call.of("self")
    return None if owners is None else owners.apply(lambda z: z.unsqueeze(-1))


def as_complex(call: Call) -> Owners | None:
    owners = call.of("self")
    return None if owners is None else owners.over([-1]).apply(lambda z: z.squeeze(-1))


def of_other_dtype(call: Call) -> Owners | None:
    owners = call.of("self")
    if owners is None or call.outputs[0].shape == owners.shape:
        return owners
    return owners.over([-1])


# Operations along dims.


def reduction(call: Call) -> Any:
    """Each output depends on all elements along `dim`, which is left out or has the size 1."""
    z, owners = call.tensors()[0], pointwise(call)
    if owners is None or len(call.tensors()) > 1:  # such as `max` of two tensors
        return owners
    dims = call.dims("dim", z.ndim)
    reduced = owners.expand(z.shape).over(dims)
    found = []
    for output in call.outputs:
        if output.ndim == z.ndim:
            found.append(reduced)
        elif output.ndim == z.ndim - len(dims):
            found.append(reduced.reshape([size for i, size in enumerate(reduced.shape) if i not in dims]))
        else:
            found.append(reduced.all())
    return found


def along(call: Call) -> Any:
    """Each output depends on all elements along `dim`; its size there may differ from that of the input."""
    z = call.tensors()[0]
    owners = pointwise(call)
    if owners is None:
        return None
    return owners.expand(z.shape).over(call.dims("dim", z.ndim))


def along_last(count: int) -> Rule:
    """Each output depends on all elements along the last dims: pooling, resampling."""

    def rule(call: Call) -> Owners | None:
        z = call.tensors()[0]
        owners = call.owner(z)
        return None if owners is None else owners.over(range(z.ndim - count, z.ndim))

    return rule


def within_first(call: Call) -> Owners | None:
    """Each output depends on everything with the same index along the first dim."""
    found = []
    for z in call.tensors():
        owners = call.owner(z)
        if owners is not None:
            if z.ndim == 0 or z.shape[0] != call.outputs[0].shape[0]:
                return everything(call)
            kept = owners.over(range(1, z.ndim)).reshape([z.shape[0]])
            found.append(kept.reshape([-1, *[1] * (call.outputs[0].ndim - 1)]))
    return union(found)


def batch_of_matrices(call: Call) -> Any:
    """Linear algebra: each output depends on everything with the same index along the leading dims."""
    found = []
    for z in call.tensors():
        owners = call.owner(z)
        if owners is not None:
            if z.ndim < 2:
                return everything(call)
            found.append(owners.over([z.ndim - 2, z.ndim - 1]))
    owners = union(found)
    if owners is None:
        return None
    batch = owners.reshape(owners.shape[:-2])
    count = len(batch.shape)
    if any(output.ndim < count for output in call.outputs):
        return everything(call)
    return [batch.reshape([*batch.shape, *[1] * (output.ndim - count)]) for output in call.outputs]


def _table(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_table(
        pointwise,
        "clone _to_copy lift_fresh native_dropout _fused_dropout bernoulli where masked_fill addr ger tril triu "
        "conj _conj _conj_physical _neg_view resolve_conj prelu _prelu_kernel rrelu_with_noise "
        "floor_divide polar complex "
        "leaky_relu leaky_relu_ celu_ elu_ hardsigmoid_ hardtanh_ selu_",  # tagged as pointwise since torch 2.12
    ),
    **_table(
        moved,
        "stack roll flip repeat constant_pad_nd pixel_shuffle pixel_unshuffle channel_shuffle slice_scatter "
        "select_scatter diagonal_scatter unsafe_split unsafe_chunk unsafe_split_with_sizes split_with_sizes_copy "
        "split_copy unbind_copy permute_copy transpose_copy expand_copy slice_copy select_copy diag_embed rot90 "
        "_stack hstack vstack block_diag",
    ),
    "cat": joined,
    **_table(reshaped, "view _unsafe_view reshape _reshape_alias _reshape_copy view_copy"),
    **_table(
        along,
        "_softmax _log_softmax softmax log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin "
        "_cummax_helper _cummin_helper sort argsort topk _fft_r2c _fft_c2c _fft_c2r glu cross linalg_cross",
    ),
    **_table(
        reduction,
        "norm linalg_vector_norm logsumexp var_mean std_mean var std max min median nanmedian kthvalue mode "
        "argmax argmin nansum nanmean prod any all sum mean amax amin aminmax count_nonzero",
    ),
    **_table(
        within_first,
        "grid_sampler_2d grid_sampler_3d grid_sampler cudnn_grid_sampler _thnn_fused_lstm_cell _thnn_fused_gru_cell "
        "affine_grid_generator _native_multi_head_attention _transformer_encoder_layer_fwd",
    ),
    **_table(
        along_last(1),
        "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_linear1d upsample_nearest1d "
        "_upsample_nearest_exact1d reflection_pad1d replication_pad1d max_pool1d_with_indices multinomial",
    ),
    **_table(
        along_last(2),
        "max_pool2d max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
        "fractional_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d replication_pad2d",
    ),
    **_table(
        along_last(3),
        "max_pool3d max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d "
        "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d reflection_pad3d replication_pad3d",
    ),
    **_table(within_first, "im2col col2im"),
    **_table(
        batch_of_matrices,
        "linalg_inv_ex linalg_cholesky_ex _linalg_solve_ex linalg_qr _linalg_svd _linalg_eigh linalg_eig _linalg_det "
        "_linalg_slogdet linalg_lu_factor_ex linalg_lu linalg_solve_triangular linalg_pinv linalg_matrix_exp "
        "linalg_lstsq linalg_lu_solve cholesky_solve cholesky_inverse triangular_solve linalg_householder_product",
    ),
    **_table(product("self", "mat2"), "mm bmm"),
    **_table(product("self", "other"), "matmul"),
    **_table(product("self", "mat1", "mat2"), "addmm"),
    **_table(product("self", "batch1", "batch2"), "baddbmm"),
    **_table(product("self", "vec"), "mv"),
    "addmv": product("self", "mat", "vec"),
    "linear": linear,
    **_table(convolution, "convolution _convolution mkldnn_convolution cudnn_convolution convolution_overrideable"),
    **_table(
        attention,
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math",
    ),
    "_grouped_mm": grouped_product,
    "_cdist_forward": distances,
    **_table(layer_norm, "native_layer_norm _fused_rms_norm"),
    "fill": filled,
    "normal": random_around,
    "native_group_norm": group_norm,
    **_table(
        batch_norm,
        "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _batch_norm_with_update "
        "_batch_norm_no_update _native_batch_norm_legit_functional _native_batch_norm_legit_no_training",
    ),
    "embedding": embedding,
    "gather": gather,
    **_table(scatter, "scatter scatter_add scatter_reduce"),
    "index_select": index_select,
    **_table(index_add, "index_add index_copy index_fill index_reduce"),
    **_table(index, "index _unsafe_index"),
    **_table(index_put, "index_put _unsafe_index_put _index_put_impl"),
    **_table(recurrent, "mkldnn_rnn_layer _cudnn_rnn miopen_rnn"),
    **_table(loss_by_class, "nll_loss_forward nll_loss2d_forward"),
    "view_as_real": as_real,
    "view_as_complex": as_complex,
    "copy": source,
    **_table(
        nothing,
        "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones "
        "full full_like new_full scalar_tensor arange eye rand rand_like randn randn_like randint "
        "randint_like randperm zero uniform exponential random geometric cauchy log_normal "
        "tril_indices triu_indices hann_window hamming_window",
    ),
}
