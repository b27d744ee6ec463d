"""134 functions of arrays with the values that JAX computes for them, in float64: an oracle that shares no code with torch.

`oracle_values.npz` holds the value, JVP and VJP of most of them: `name/v/0`, `name/jvp/0`, `name/vjp/0`. Tangents and
cotangents are drawn by `directions`, in the order in which they were drawn for JAX.
"""
# ruff: noqa: E501, E731, RUF059 (the functions are one-liners, one a case)

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import linalg
from torch.func import grad, hessian, jacrev, vmap

JAX = np.load(Path(__file__).with_name("oracle_values.npz"))

# Arguments

_RNG = np.random.default_rng(7)


def normal(*s):
    return _RNG.standard_normal(s)


def positive(*s):
    return np.abs(_RNG.standard_normal(s)) + 0.5


def indices(n, *s):
    return _RNG.integers(0, n, s)


def definite(n):
    a = normal(n, n)
    return a @ a.T + n * np.eye(n)


def distinct(*s):
    n = int(np.prod(s))
    return _RNG.permutation(n).reshape(s) / n * 4 - 2


ARGUMENTS = {}
ARGUMENTS["logsumexp2"] = [normal(3, 5)]
ARGUMENTS["cumprod"] = [normal(3, 5)]
ARGUMENTS["cummax"] = [distinct(3, 5)]
ARGUMENTS["logcumsumexp"] = [normal(3, 5)]
ARGUMENTS["einsum3"] = [normal(2, 3), normal(3, 4), normal(4, 2)]
ARGUMENTS["einsum_attn"] = [normal(2, 3, 4), normal(2, 3, 4), normal(2, 3, 4)]
ARGUMENTS["topk_gather"] = [distinct(3, 6), normal(3, 6)]
ARGUMENTS["argsort_gather"] = [distinct(3, 6), normal(3, 6)]
ARGUMENTS["ce_smooth"] = [normal(4, 5), indices(5, 4)]
ARGUMENTS["ce_weight_ignore"] = [normal(4, 5), np.array([0, 1, 2, 4]), positive(5)]
ARGUMENTS["huber"] = [normal(8), normal(8)]
ARGUMENTS["instance_norm"] = [normal(2, 3, 4, 4)]
ARGUMENTS["group_norm4d"] = [normal(2, 4, 3, 3), normal(4), normal(4)]
ARGUMENTS["batch_norm_eval"] = [normal(4, 3), normal(3), positive(3), normal(3), normal(3)]
ARGUMENTS["rope"] = [normal(2, 4, 6)]
ARGUMENTS["swiglu"] = [normal(3, 4), normal(4, 6), normal(4, 6), normal(6, 4)]
ARGUMENTS["mqa_mask"] = [normal(2, 4, 3, 4), normal(2, 1, 3, 4), normal(2, 1, 3, 4)]
ARGUMENTS["sdpa_causal"] = [normal(2, 2, 4, 4), normal(2, 2, 4, 4), normal(2, 2, 4, 4)]
ARGUMENTS["sdpa_boolmask"] = [normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)]
ARGUMENTS["conv3d"] = [normal(1, 2, 4, 4, 4), normal(3, 2, 2, 2, 2)]
ARGUMENTS["conv_transpose1d"] = [normal(1, 2, 5), normal(2, 3, 3)]
ARGUMENTS["conv_depthwise_dil"] = [normal(1, 3, 7, 7), normal(3, 1, 3, 3)]
ARGUMENTS["bicubic"] = [normal(1, 2, 4, 4)]
ARGUMENTS["grid_sample"] = [normal(1, 2, 4, 4), np.clip(normal(1, 3, 3, 2) * 0.4, -0.9, 0.9)]
ARGUMENTS["pixel_shuffle"] = [normal(1, 4, 3, 3)]
ARGUMENTS["unfold_fold"] = [normal(1, 2, 5, 5)]
ARGUMENTS["rfft_power"] = [normal(8)]
ARGUMENTS["fft_conv"] = [normal(8), normal(8)]
ARGUMENTS["irfft_filter"] = [normal(8)]
ARGUMENTS["solve"] = [definite(3), normal(3)]
ARGUMENTS["inv"] = [definite(3)]
ARGUMENTS["cholesky"] = [definite(3)]
ARGUMENTS["slogdet"] = [definite(3)]
ARGUMENTS["eigh"] = [definite(3)]
ARGUMENTS["svdvals"] = [normal(4, 3)]
ARGUMENTS["svd_recon"] = [normal(4, 3)]
ARGUMENTS["lstsq"] = [normal(5, 3), normal(5, 2)]
ARGUMENTS["qr"] = [normal(4, 3)]
ARGUMENTS["pinv"] = [normal(4, 3)]
ARGUMENTS["matrix_exp"] = [normal(3, 3) * 0.3]
ARGUMENTS["cdist_p2"] = [normal(3, 4), normal(2, 4)]
ARGUMENTS["cdist_p1"] = [normal(3, 4), normal(2, 4)]
ARGUMENTS["kthvalue"] = [distinct(3, 6)]
ARGUMENTS["median"] = [distinct(3, 5)]
ARGUMENTS["quantile"] = [distinct(3, 5)]
ARGUMENTS["index_put"] = [normal(5, 3), np.array([0, 3]), normal(2, 3)]
ARGUMENTS["scatter_reduce_sum"] = [normal(5), np.array([0, 1, 0, 2, 4, 1]), normal(6)]
ARGUMENTS["scatter_reduce_amax"] = [distinct(5), np.array([0, 1, 0, 2, 4, 1]), normal(6)]
ARGUMENTS["segment_mean"] = [normal(6, 3), np.array([0, 1, 0, 2, 2, 1])]
ARGUMENTS["where_safe_log"] = [normal(6)]
ARGUMENTS["clamp_tensor"] = [normal(6), -positive(6), positive(6)]
ARGUMENTS["remainder"] = [positive(6), positive(6)]
ARGUMENTS["fmod"] = [normal(6) * 3]
ARGUMENTS["atan2"] = [normal(6), normal(6)]
ARGUMENTS["hypot"] = [normal(6), normal(6)]
ARGUMENTS["erfcx_erfinv"] = [np.clip(normal(6) * 0.3, -0.9, 0.9)]
ARGUMENTS["lgamma_digamma"] = [positive(6)]
ARGUMENTS["polygamma"] = [positive(6)]
ARGUMENTS["bessel_i0"] = [normal(6)]
ARGUMENTS["i0e_i1"] = [normal(6)]
ARGUMENTS["xlogy_entr"] = [positive(6), positive(6)]
ARGUMENTS["sinc"] = [normal(6)]
ARGUMENTS["ndtr"] = [normal(6)]
ARGUMENTS["complex_abs"] = [normal(6), normal(6)]
ARGUMENTS["complex_polar"] = [positive(6), normal(6)]
ARGUMENTS["fixed_point"] = [positive(4)]
ARGUMENTS["rk4_node"] = [normal(3), normal(3, 3) * 0.3, normal(3, 3) * 0.3]
ARGUMENTS["physics_burgers"] = [normal(5), normal(5), normal(6, 2), normal(6)]
ARGUMENTS["vmap_inside"] = [normal(4, 3), normal(3)]
ARGUMENTS["jacrev_inside"] = [normal(3), normal(3, 3)]
ARGUMENTS["hessian_trace"] = [normal(3)]
ARGUMENTS["cond"] = [normal(3)]
ARGUMENTS["while_loop"] = [normal(3)]
ARGUMENTS["scan"] = [normal(5, 3), normal(3)]
ARGUMENTS["fori_unrolled_lstm"] = [normal(2, 3, 4), normal(4, 12), normal(3, 12), normal(12)]
ARGUMENTS["zero_size"] = [normal(0, 3), normal(3, 2)]
ARGUMENTS["scalar_0d"] = [normal(), normal()]
ARGUMENTS["int_leaf_float_out"] = [indices(5, 4), normal(4)]
ARGUMENTS["bool_mask_leaf"] = [normal(4), (_RNG.standard_normal(4) > 0)]
ARGUMENTS["dict_pytree"] = [normal(3, 4), normal(4, 2), normal(2)]
ARGUMENTS["kl_div"] = [normal(3, 4), normal(3, 4)]
ARGUMENTS["nll_gauss"] = [normal(4), normal(4), positive(4)]
ARGUMENTS["cosine_sim"] = [normal(3, 4), normal(3, 4)]
ARGUMENTS["triplet"] = [normal(3, 4), normal(3, 4), normal(3, 4)]
ARGUMENTS["ctc_like_forward"] = [normal(4, 3)]
ARGUMENTS["renorm_clipgrad"] = [normal(3, 4), normal(5)]
ARGUMENTS["gumbel_softmax_given"] = [normal(3, 4), normal(3, 4)]
ARGUMENTS["moe_topk"] = [normal(3, 4), normal(4, 4), normal(4, 4, 2)]
ARGUMENTS["linear_attention_cumsum"] = [normal(2, 5, 3), normal(2, 5, 3), normal(2, 5, 3)]
ARGUMENTS["alibi_attention"] = [normal(1, 2, 4, 3), normal(1, 2, 4, 3), normal(1, 2, 4, 3)]
ARGUMENTS["nested_softmax_temp"] = [normal(3, 4), positive()]
ARGUMENTS["trapz"] = [normal(6), np.sort(normal(6))]
ARGUMENTS["diff_prepend"] = [normal(6)]
ARGUMENTS["outer_kron"] = [normal(2, 2), normal(2, 3)]
ARGUMENTS["tensordot"] = [normal(2, 3, 4), normal(4, 3, 2)]
ARGUMENTS["cross"] = [normal(4, 3), normal(4, 3)]
ARGUMENTS["trace_tril"] = [normal(4, 4)]
ARGUMENTS["repeat_interleave"] = [normal(3)]
ARGUMENTS["rot90_movedim"] = [normal(2, 3, 4)]
ARGUMENTS["masked_select_like"] = [normal(5)]
ARGUMENTS["std_ddof"] = [normal(3, 5)]
ARGUMENTS["norms_p"] = [normal(3, 4)]
ARGUMENTS["nuclear"] = [normal(3, 3)]
ARGUMENTS["embedding_bag"] = [indices(6, 2, 3), normal(6, 4)]
ARGUMENTS["bilinear"] = [normal(3, 2), normal(3, 4), normal(5, 2, 4), normal(5)]
ARGUMENTS["maxpool_ceil"] = [distinct(1, 1, 5, 5)]
ARGUMENTS["adaptive_max"] = [distinct(1, 2, 6)]
ARGUMENTS["lppool"] = [positive(1, 1, 6)]
ARGUMENTS["local_resp"] = [normal(1, 4, 3, 3)]
ARGUMENTS["searchsorted_interp"] = [np.sort(normal(5)), normal(5), np.clip(normal(4) * 0.3, -0.5, 0.5)]
ARGUMENTS["nan_to_num"] = [normal(5)]
ARGUMENTS["heaviside_ste"] = [normal(5)]
ARGUMENTS["logit"] = [np.clip(positive(5) / 4, 0.1, 0.9)]
ARGUMENTS["log_ndtr"] = [normal(5)]
ARGUMENTS["addr_baddbmm"] = [normal(2, 3), normal(2), normal(3)]
ARGUMENTS["softmin_tempered"] = [normal(3, 4)]
ARGUMENTS["selu_celu"] = [normal(6)]
ARGUMENTS["rrelu_prelu"] = [normal(3, 4), normal(4)]
ARGUMENTS["tensor_pow"] = [positive(4), normal(4)]
ARGUMENTS["float_power_int"] = [normal(4)]
ARGUMENTS["frexp_free_ldexp"] = [normal(4), indices(4, 4)]
ARGUMENTS["cov_corrcoef"] = [normal(3, 6)]
ARGUMENTS["vander"] = [normal(3)]
ARGUMENTS["block_diag"] = [normal(2, 2), normal(1, 3)]
ARGUMENTS["index_add"] = [normal(4, 2), np.array([0, 2, 2]), normal(3, 2)]
ARGUMENTS["take_along"] = [normal(3, 4), indices(4, 3, 2)]
ARGUMENTS["unfold_window"] = [normal(8)]
ARGUMENTS["masked_scatter"] = [normal(6), np.array([True, False, True, True, False, False]), normal(6)]
ARGUMENTS["addcmul_lerp"] = [normal(4), normal(4), normal(4)]
ARGUMENTS["sigmoid_focal"] = [normal(6), (_RNG.standard_normal(6) > 0).astype(float)]
ARGUMENTS["cumsum_rev"] = [normal(3, 5)]
ARGUMENTS["logaddexp"] = [normal(4), normal(4)]
ARGUMENTS["amax_ties_free"] = [distinct(3, 4)]
ARGUMENTS["multi_margin"] = [normal(3, 4), indices(4, 3)]


# Functions

FUNCTIONS = {}


def case(f):
    FUNCTIONS[f.__name__] = f
    return f


FUNCTIONS["logsumexp2"] = lambda x: torch.logsumexp(x, (0, 1)) * x.logsumexp(0)
FUNCTIONS["cumprod"] = lambda x: x.cumprod(1)
FUNCTIONS["cummax"] = lambda x: x.cummax(1).values * x
FUNCTIONS["logcumsumexp"] = lambda x: x.logcumsumexp(1)
FUNCTIONS["einsum3"] = lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c)
FUNCTIONS["einsum_attn"] = lambda q, k, v: torch.einsum(
    "bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", q, k).softmax(-1), v
)
FUNCTIONS["topk_gather"] = lambda x, y: y.gather(1, x.topk(3, 1).indices) * x.topk(3, 1).values
FUNCTIONS["argsort_gather"] = lambda x, y: torch.take_along_dim(y, x.argsort(1), 1)
FUNCTIONS["ce_smooth"] = lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)
FUNCTIONS["ce_weight_ignore"] = lambda x, y, w: F.cross_entropy(x, y, weight=w, ignore_index=2)
FUNCTIONS["huber"] = lambda x, y: F.huber_loss(x, y, delta=0.7, reduction="none")
FUNCTIONS["instance_norm"] = lambda x: F.instance_norm(x)
FUNCTIONS["group_norm4d"] = lambda x, w, b: F.group_norm(x, 2, w, b)
FUNCTIONS["batch_norm_eval"] = lambda x, m, v, g, b: F.batch_norm(x, m, v, g, b, training=False)


@case
def rope(x):
    n, d = x.shape[-2], x.shape[-1]
    f = 1.0 / (10000 ** (torch.arange(0, d, 2, dtype=x.dtype) / d))
    a = torch.outer(torch.arange(n, dtype=x.dtype), f)
    c, s = a.cos(), a.sin()
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack([x1 * c - x2 * s, x1 * s + x2 * c], -1).flatten(-2)


FUNCTIONS["swiglu"] = lambda x, w1, w2, w3: (F.silu(x @ w1) * (x @ w2)) @ w3


@case
def mqa_mask(q, k, v):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    m = torch.ones(3, 3, dtype=torch.bool).tril()
    return s.masked_fill(~m, float("-inf")).softmax(-1) @ v


FUNCTIONS["sdpa_causal"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
FUNCTIONS["sdpa_boolmask"] = lambda q, k, v: F.scaled_dot_product_attention(
    q, k, v, attn_mask=torch.tensor([[True, False, True], [True, True, False], [True, True, True]])
)
FUNCTIONS["conv3d"] = lambda x, w: F.conv3d(x, w, padding=1, stride=2)
FUNCTIONS["conv_transpose1d"] = lambda x, w: F.conv_transpose1d(x, w, stride=2)
FUNCTIONS["conv_depthwise_dil"] = lambda x, w: F.conv2d(x, w, groups=3, dilation=2, padding=2)
FUNCTIONS["bicubic"] = lambda x: F.interpolate(x, size=(6, 6), mode="bicubic", align_corners=False)
FUNCTIONS["grid_sample"] = lambda x, g: F.grid_sample(x, g, align_corners=True)
FUNCTIONS["pixel_shuffle"] = lambda x: F.pixel_shuffle(x, 2)
FUNCTIONS["unfold_fold"] = lambda x: F.fold(F.unfold(x, 3).sin(), (5, 5), 3)
FUNCTIONS["rfft_power"] = lambda x: torch.fft.rfft(x).abs().square()
FUNCTIONS["fft_conv"] = lambda x, y: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y), n=8)
FUNCTIONS["irfft_filter"] = lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.arange(5.0, dtype=x.dtype), n=8)
FUNCTIONS["solve"] = lambda a, b: linalg.solve(a, b)
FUNCTIONS["inv"] = lambda a: linalg.inv(a)
FUNCTIONS["cholesky"] = lambda a: linalg.cholesky(a)
FUNCTIONS["slogdet"] = lambda a: linalg.slogdet(a).logabsdet
FUNCTIONS["eigh"] = lambda a: linalg.eigh((a + a.mT) / 2)[0]
FUNCTIONS["svdvals"] = lambda a: linalg.svdvals(a)


@case
def svd_recon(a):
    u, s, v = linalg.svd(a, full_matrices=False)
    return (u * s.square()) @ v


FUNCTIONS["lstsq"] = lambda a, b: linalg.lstsq(a, b).solution
FUNCTIONS["qr"] = lambda a: linalg.qr(a)[1].abs()
FUNCTIONS["pinv"] = lambda a: linalg.pinv(a)
FUNCTIONS["matrix_exp"] = lambda a: torch.matrix_exp(a)
FUNCTIONS["cdist_p2"] = lambda x, y: torch.cdist(x, y)
FUNCTIONS["cdist_p1"] = lambda x, y: torch.cdist(x, y, p=1)
FUNCTIONS["kthvalue"] = lambda x: x.kthvalue(3, 1).values
FUNCTIONS["median"] = lambda x: x.median(1).values
FUNCTIONS["quantile"] = lambda x: x.quantile(0.3, dim=1)
FUNCTIONS["index_put"] = lambda x, i, v: x.index_put((i,), v)
FUNCTIONS["scatter_reduce_sum"] = lambda x, i, s: x.scatter_reduce(0, i, s, "sum")
FUNCTIONS["scatter_reduce_amax"] = lambda x, i, s: x.scatter_reduce(0, i, s, "amax")


@case
def segment_mean(x, i):
    z = torch.zeros(3, 3, dtype=x.dtype).index_add(0, i, x)
    c = torch.zeros(3, dtype=x.dtype).index_add(0, i, torch.ones(6, dtype=x.dtype))
    return z / c[:, None]


FUNCTIONS["where_safe_log"] = lambda x: torch.where(x > 0, torch.where(x > 0, x, torch.ones_like(x)).log(), x)
FUNCTIONS["clamp_tensor"] = lambda x, a, b: torch.clamp(x, a, b)
FUNCTIONS["remainder"] = lambda x, y: torch.remainder(x, y)
FUNCTIONS["fmod"] = lambda x: torch.fmod(x, 1.3)
FUNCTIONS["atan2"] = lambda x, y: torch.atan2(x, y)
FUNCTIONS["hypot"] = lambda x, y: torch.hypot(x, y)
FUNCTIONS["erfcx_erfinv"] = lambda x: torch.special.erfcx(x) + torch.erfinv(x)
FUNCTIONS["lgamma_digamma"] = lambda x: torch.lgamma(x) + torch.digamma(x)
FUNCTIONS["polygamma"] = lambda x: torch.polygamma(2, x)
FUNCTIONS["bessel_i0"] = lambda x: torch.special.i0(x)
FUNCTIONS["i0e_i1"] = lambda x: torch.special.i0e(x) + torch.special.i1(x)
FUNCTIONS["xlogy_entr"] = lambda x, y: torch.xlogy(x, y) + torch.special.entr(x)
FUNCTIONS["sinc"] = lambda x: torch.sinc(x)
FUNCTIONS["ndtr"] = lambda x: torch.special.ndtr(x)
FUNCTIONS["complex_abs"] = lambda x, y: torch.complex(x, y).exp().abs()
FUNCTIONS["complex_polar"] = lambda r, t: (torch.polar(r, t) ** 2).real


@case
def fixed_point(a):
    x = torch.ones_like(a)
    for _ in range(8):
        x = 0.5 * (x + a / x)
    return x


@case
def rk4_node(y, w1, w2):
    f = lambda y: torch.tanh(y @ w1) @ w2
    h = 0.1
    for _ in range(4):
        k1 = f(y)
        k2 = f(y + h / 2 * k1)
        k3 = f(y + h / 2 * k2)
        k4 = f(y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return y


@case
def physics_burgers(x, t, w, v):
    u = lambda a, b: (torch.tanh(w[:, 0] * a + w[:, 1] * b) * v).sum()
    ux = grad(u, 0)
    uxx = grad(ux, 0)
    ut = grad(u, 1)
    return vmap(lambda a, b: ut(a, b) + u(a, b) * ux(a, b) - 0.01 * uxx(a, b))(x, t)


FUNCTIONS["vmap_inside"] = lambda x, w: vmap(lambda r: (r * w).sum().sin() * r)(x)
FUNCTIONS["jacrev_inside"] = lambda x, w: jacrev(lambda z: torch.tanh(w @ z))(x)
FUNCTIONS["hessian_trace"] = lambda x: hessian(lambda z: (z.sin() * z.prod()).sum())(x).diagonal().sum()
FUNCTIONS["cond"] = lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))


@case
def while_loop(x):
    from torch._higher_order_ops.while_loop import while_loop as wl

    return wl(lambda i, y: i < 4, lambda i, y: (i + 1, y * 0.9 + 0.1 * y.sin()), (torch.tensor(0), x))[1]


@case
def scan(xs, h0):
    from torch._higher_order_ops.scan import scan as sc

    c, ys = sc(lambda h, x: ((hn := torch.tanh(h + x)), hn.clone()), h0, xs)
    return ys


@case
def fori_unrolled_lstm(x, wi, wh, b):
    h = x.new_zeros(2, 3)
    c = x.new_zeros(2, 3)
    for t in range(3):
        g = x[:, t] @ wi + h @ wh + b
        i, f, o, u = g.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * u.tanh()
        h = o.sigmoid() * c.tanh()
    return h


FUNCTIONS["zero_size"] = lambda x, w: (x @ w).tanh()
FUNCTIONS["scalar_0d"] = lambda x, y: x.sin() * y
FUNCTIONS["int_leaf_float_out"] = lambda i, w: (i.to(w.dtype) * w).exp()
FUNCTIONS["bool_mask_leaf"] = lambda x, m: torch.where(m, x.sin(), x**2)
FUNCTIONS["dict_pytree"] = lambda x, w, b: {"y": [x @ w + b, (x.sum(),)]}
FUNCTIONS["kl_div"] = lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
FUNCTIONS["nll_gauss"] = lambda x, y, v: F.gaussian_nll_loss(x, y, v)
FUNCTIONS["cosine_sim"] = lambda x, y: F.cosine_similarity(x, y)
FUNCTIONS["triplet"] = lambda a, p, n: F.triplet_margin_loss(a, p, n)


@case
def ctc_like_forward(x):
    lp = x.log_softmax(-1)
    a = lp[0]
    for t in range(1, 4):
        a = torch.logsumexp(torch.stack([a, a.roll(1)]), 0) + lp[t]
    return a.logsumexp(0)


@case
def renorm_clipgrad(x, y):
    n = torch.sqrt(x.square().sum() + y.square().sum())
    s = (1.0 / (n + 1e-6)).clamp(max=1.0)
    return x * s, y * s


FUNCTIONS["gumbel_softmax_given"] = lambda x, g: ((x + g) / 0.5).softmax(-1)


@case
def moe_topk(x, g, w):
    s = (x @ g).softmax(-1)
    v, i = s.topk(2, -1)
    v = v / v.sum(-1, keepdim=True)
    o = torch.einsum("bkdo,bd->bko", w[i], x)
    return (o * v[..., None]).sum(1)


FUNCTIONS["linear_attention_cumsum"] = lambda q, k, v: torch.einsum(
    "btd,btde->bte", F.elu(q) + 1, torch.einsum("btd,bte->btde", F.elu(k) + 1, v).cumsum(1)
)


@case
def alibi_attention(q, k, v):
    n = q.shape[-2]
    p = torch.arange(n, dtype=q.dtype)
    b = -(p[:, None] - p[None]).abs()
    sl = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None]
    s = q @ k.mT / math.sqrt(3) + b * sl
    s = s + torch.full((n, n), float("-inf"), dtype=q.dtype).triu(1)
    return s.softmax(-1) @ v


FUNCTIONS["nested_softmax_temp"] = lambda x, t: (x.softmax(-1) / t).log_softmax(0)
FUNCTIONS["trapz"] = lambda y, x: torch.trapezoid(y, x)
FUNCTIONS["diff_prepend"] = lambda x: torch.diff(x, n=2)
FUNCTIONS["outer_kron"] = lambda x, y: torch.kron(x, y)
FUNCTIONS["tensordot"] = lambda x, y: torch.tensordot(x, y, dims=([1, 2], [1, 0]))
FUNCTIONS["cross"] = lambda x, y: linalg.cross(x, y)
FUNCTIONS["trace_tril"] = lambda x: x.tril().trace() * x.triu(1)
FUNCTIONS["repeat_interleave"] = lambda x: x.repeat_interleave(2) * torch.tile(x, (2,))
FUNCTIONS["rot90_movedim"] = lambda x: torch.rot90(x.movedim(0, -1), 1, (0, 1)).sin()
FUNCTIONS["masked_select_like"] = lambda x: torch.where(x > 0, x, 0.0).sum() / (x > 0).sum().clamp(min=1)
FUNCTIONS["std_ddof"] = lambda x: x.std(1, correction=1) + torch.var_mean(x, 0)[0].sum()
FUNCTIONS["norms_p"] = lambda x: (
    linalg.vector_norm(x, 3, dim=1)
    + linalg.vector_norm(x, 1, dim=1)
    + linalg.vector_norm(x, float("inf"), dim=1)
    + linalg.matrix_norm(x)
)
FUNCTIONS["nuclear"] = lambda x: linalg.matrix_norm(x, "nuc")
FUNCTIONS["embedding_bag"] = lambda i, w: F.embedding_bag(i, w, mode="mean")
FUNCTIONS["bilinear"] = lambda x, y, w, b: F.bilinear(x, y, w, b)
FUNCTIONS["maxpool_ceil"] = lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True)
FUNCTIONS["adaptive_max"] = lambda x: F.adaptive_max_pool1d(x, 3)
FUNCTIONS["lppool"] = lambda x: F.lp_pool1d(x, 2, 2)
FUNCTIONS["local_resp"] = lambda x: F.local_response_norm(x, 2)


@case
def searchsorted_interp(xs, ys, q):
    i = torch.searchsorted(xs, q).clamp(1, 4)
    x0, x1 = xs[i - 1], xs[i]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (q - x0) / (x1 - x0)


FUNCTIONS["nan_to_num"] = lambda x: torch.nan_to_num(x.log()) * 0 + torch.nan_to_num(x.sin())
FUNCTIONS["heaviside_ste"] = lambda x: x.tanh() + ((x > 0).to(x.dtype) - x.tanh()).detach()
FUNCTIONS["logit"] = lambda x: torch.logit(x)
FUNCTIONS["log_ndtr"] = lambda x: torch.special.log_ndtr(x)
FUNCTIONS["addr_baddbmm"] = lambda m, a, b: torch.addr(m, a, b, beta=0.5, alpha=2)
FUNCTIONS["softmin_tempered"] = lambda x: F.softmin(x, -1) * F.tanhshrink(x)
FUNCTIONS["selu_celu"] = lambda x: F.selu(x) + F.celu(x, alpha=2.0)
FUNCTIONS["rrelu_prelu"] = lambda x, w: F.prelu(x, w)
FUNCTIONS["tensor_pow"] = lambda x, y: x**y + 2.0**y
FUNCTIONS["float_power_int"] = lambda x: x**4 + x**-2 + (x * x) ** 0.5
FUNCTIONS["frexp_free_ldexp"] = lambda x, e: torch.ldexp(x, e)
FUNCTIONS["cov_corrcoef"] = lambda x: torch.cov(x) + torch.corrcoef(x)
FUNCTIONS["vander"] = lambda x: linalg.vander(x)
FUNCTIONS["block_diag"] = lambda a, b: torch.block_diag(a, b)
FUNCTIONS["index_add"] = lambda x, i, s: x.index_add(0, i, s, alpha=2)
FUNCTIONS["take_along"] = lambda x, i: torch.take_along_dim(x, i, 1).square()
FUNCTIONS["unfold_window"] = lambda x: x.unfold(0, 3, 2).prod(-1)
FUNCTIONS["masked_scatter"] = lambda x, m, s: x.masked_scatter(m, s)
FUNCTIONS["addcmul_lerp"] = lambda a, b, c: torch.lerp(a, b, c.sigmoid()) + torch.addcdiv(a, b, c.exp(), value=0.5)


@case
def sigmoid_focal(x, y):
    p = x.sigmoid()
    ce = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    pt = p * y + (1 - p) * (1 - y)
    return (ce * (1 - pt) ** 2 * 0.25).mean()


FUNCTIONS["cumsum_rev"] = lambda x: x.flip(1).cumsum(1).flip(1)
FUNCTIONS["logaddexp"] = lambda x, y: torch.logaddexp(x, y)
FUNCTIONS["amax_ties_free"] = lambda x: x.amax((0, 1)) + x.min(0).values
FUNCTIONS["multi_margin"] = lambda x, y: F.multi_margin_loss(x, y)


def directions(arguments, outputs):
    """Tangents of the floating-point arguments and cotangents of the outputs, as they were drawn for JAX."""
    rng = np.random.default_rng(11)
    v = [torch.tensor(rng.standard_normal(x.shape)) if x.is_floating_point() else None for x in arguments]
    return v, [torch.tensor(rng.standard_normal(y.shape)) for y in outputs]
