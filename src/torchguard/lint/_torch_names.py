"""Names of torch's functions, methods and layers by what they return.

Tables, because the linter must not import torch: it has to start fast, and to run where torch is not installed. They
were read off the stubs of torch 2.13. A test compares them with the installed torch.
"""

# `torch.x(...)` that return one tensor. Names that end in an underscore work in place.
TENSOR_FUNCTIONS = frozenset(
    """
    abs abs_ absolute acos acos_ acosh acosh_ adaptive_avg_pool1d add addbmm addcdiv addcmul addmm addmv addmv_ addr
    adjoint affine_grid_generator all alpha_dropout alpha_dropout_ amax amin angle any arange arccos arccos_ arccosh
    arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan_ arctanh arctanh_ argmax argmin argsort argwhere
    as_strided as_strided_ as_strided_scatter as_tensor asarray asin asin_ asinh asinh_ atan atan2 atan_ atanh
    atanh_ avg_pool1d baddbmm bartlett_window batch_norm bernoulli bilinear binary_cross_entropy_with_logits
    bincount binomial bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    blackman_window block_diag bmm broadcast_to bucketize cartesian_prod cat cdist ceil ceil_ celu celu_
    chain_matmul channel_shuffle cholesky cholesky_inverse cholesky_solve clamp clamp_ clamp_max clamp_max_
    clamp_min clamp_min_ clip clip_ clone column_stack combinations complex concat concatenate conj conj_physical
    conj_physical_ constant_pad_nd conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution copysign corrcoef cos cos_ cosh cosh_ cosine_embedding_loss cosine_similarity count_nonzero cov
    cross ctc_loss cumprod cumsum cumulative_trapezoid deg2rad deg2rad_ det detach detach_ diag diag_embed diagflat
    diagonal diagonal_scatter diff digamma dist div divide dot dropout dropout_ dstack einsum embedding
    embedding_renorm_ empty empty_like empty_permuted empty_quantized empty_strided eq erf erf_ erfc erfc_ erfinv
    exp exp2 exp2_ exp_ expm1 expm1_ eye feature_alpha_dropout feature_alpha_dropout_ feature_dropout
    feature_dropout_ fill fill_ fix fix_ flatten flip fliplr flipud float_power floor floor_ floor_divide fmax fmin
    fmod frac frac_ frobenius_norm from_dlpack from_file from_numpy frombuffer full full_like
    fused_moving_avg_obs_fake_quant gather gcd gcd_ ge ger greater greater_equal grid_sampler grid_sampler_2d
    grid_sampler_3d group_norm gru_cell gt hamming_window hann_window hardshrink hash_tensor heaviside
    hinge_embedding_loss histc hstack hypot i0 i0_ igamma igammac imag index_add index_fill index_put index_put_
    index_reduce index_select inner instance_norm int_repr inverse isclose isfinite isin isinf isnan isneginf
    isposinf isreal istft kaiser_window kl_div kron layer_norm lcm lcm_ ldexp ldexp_ le lerp less less_equal lgamma
    linspace log log10 log10_ log1p log1p_ log2 log2_ log_ log_softmax logaddexp logaddexp2 logcumsumexp logdet
    logical_and logical_not logical_or logical_xor logit logit_ logspace logsumexp lt lu_solve margin_ranking_loss
    masked_fill masked_scatter masked_select matmul matrix_exp matrix_power max_pool1d max_pool2d max_pool3d maximum
    mean minimum mm moveaxis movedim msort mul multinomial multiply mv mvlgamma nan_to_num nan_to_num_
    nanmean nanquantile nansum narrow native_channel_shuffle native_norm ne neg neg_ negative negative_ nextafter
    nonzero_static norm norm_except_dim normal not_equal nuclear_norm ones ones_like orgqr ormqr outer
    pairwise_distance pdist permute pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma
    positive pow prelu prod put q_per_channel_scales q_per_channel_zero_points quantile quantize_per_channel
    quantize_per_tensor_dynamic rad2deg rad2deg_ rand rand_like randint randint_like randn randn_like randperm range
    ravel real reciprocal reciprocal_ relu relu_ remainder renorm repeat_interleave reshape resize_as_
    resize_as_sparse_ resolve_conj resolve_neg rms_norm rnn_relu_cell rnn_tanh_cell roll rot90 round round_
    row_stack rrelu rrelu_ rsqrt rsqrt_ rsub scalar_tensor scatter scatter_add scatter_reduce searchsorted
    segment_reduce select select_scatter selu selu_ sgn sigmoid sigmoid_ sign signbit sin sin_ sinc sinc_ sinh sinh_
    slice_inverse slice_scatter smm softmax sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor
    sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor spmm sqrt sqrt_ square square_ squeeze stack std stft sub
    subtract sum swapaxes swapdims t take take_along_dim tan tan_ tanh tanh_ tensor tensordot threshold threshold_
    tile trace transpose trapezoid trapz tril tril_indices triplet_margin_loss triu triu_indices true_divide trunc
    trunc_ unflatten unsqueeze vander var vdot view_as_complex view_as_real vstack where xlogy xlogy_ zero_ zeros
    zeros_like
    """.split()
)

# `torch.x(...)` that return several tensors.
TENSORS_FUNCTIONS = frozenset(
    """
    adaptive_max_pool1d aminmax broadcast_tensors choose_qparams_optimized chunk cummax cummin dsplit eig
    embedding_bag frexp geqrf gradient gru histogram histogramdd hsplit kthvalue lstm lstm_cell lstsq lu_unpack
    max_pool1d_with_indices meshgrid mode native_batch_norm native_dropout native_group_norm native_layer_norm
    pca_lowrank qr rnn_relu rnn_tanh slogdet sort split split_with_sizes std_mean svd svd_lowrank symeig
    tensor_split topk triangular_solve unbind unsafe_chunk unsafe_split unsafe_split_with_sizes var_mean
    vsplit
    """.split()
)

# `torch.nn.functional.x(...)` that return one tensor.
FUNCTIONAL = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d affine_grid alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm bilinear
    binary_cross_entropy binary_cross_entropy_with_logits celu celu_ channel_shuffle conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity cross_entropy
    ctc_loss dropout dropout1d dropout2d dropout3d elu elu_ embedding embedding_bag feature_alpha_dropout fold
    fractional_max_pool2d fractional_max_pool3d gaussian_nll_loss gelu glu grid_sample group_norm grouped_mm
    gumbel_softmax hardshrink hardsigmoid hardswish hardtanh hardtanh_ hinge_embedding_loss huber_loss instance_norm
    interpolate kl_div l1_loss layer_norm leaky_relu leaky_relu_ linear linear_cross_entropy local_response_norm
    log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss max_pool1d max_pool2d max_pool3d
    max_unpool1d max_unpool2d max_unpool3d mish mse_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss native_channel_shuffle nll_loss normalize one_hot pad pairwise_distance pdist
    pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu relu6 relu_ rms_norm rrelu rrelu_
    scaled_dot_product_attention scaled_grouped_mm scaled_mm selu selu_ sigmoid silu smooth_l1_loss soft_margin_loss
    softmax softmin softplus softshrink softsign tanh tanhshrink threshold threshold_ triplet_margin_loss
    triplet_margin_with_distance_loss unfold upsample upsample_bilinear upsample_nearest
    """.split()
)

# `tensor.x(...)` that return one tensor.
TENSOR_METHODS = frozenset(
    """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all amax amin angle any arccos
    arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_strided as_strided_scatter
    as_subclass asin asinh atan atan2 atanh baddbmm bernoulli bfloat16 bincount bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bool broadcast_to byte ccol_indices ceil chalf char
    cholesky cholesky_inverse cholesky_solve clamp clamp_max clamp_min clip clone coalesce col_indices conj
    conj_physical contiguous copysign corrcoef cos cosh count_nonzero cov cpu cross crow_indices cuda cumprod cumsum
    deg2rad dequantize det detach diag diag_embed diagflat diagonal diagonal_scatter diff digamma dist div divide
    dot double eq erf erfc erfinv exp exp2 expand expand_as expm1 fix flatten flip fliplr flipud float float_power
    floor floor_divide fmax fmin fmod frac gather gcd ge ger greater greater_equal gt half hardshrink hash_tensor
    heaviside histc hypot i0 igamma igammac index_add index_fill index_put index_reduce index_select indices inner
    int int_repr inverse isclose isfinite isinf isnan isneginf isposinf isreal istft kron lcm ldexp le lerp less
    less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and
    logical_not logical_or logical_xor logit logsumexp long lt lu_solve masked_fill masked_scatter masked_select
    matmul matrix_exp matrix_power maximum mean minimum mm moveaxis movedim msort mul multinomial multiply mv
    mvlgamma nan_to_num nanmean nanquantile nansum narrow ne neg negative new new_empty new_empty_strided new_full
    new_ones new_tensor new_zeros nextafter nonzero_static norm not_equal orgqr ormqr outer permute pin_memory
    pinverse polygamma positive pow prelu prod put q_per_channel_scales q_per_channel_zero_points quantile rad2deg
    ravel reciprocal relu remainder renorm repeat repeat_interleave reshape reshape_as resolve_conj resolve_neg roll
    rot90 round row_indices rsqrt scatter scatter_add scatter_reduce select select_scatter sgn short sigmoid sign
    signbit sin sinc sinh slice_inverse slice_scatter smm softmax sparse_mask sqrt square squeeze std stft sub
    subtract sum sum_to_size swapaxes swapdims t take take_along_dim tan tanh tile to to_dense to_mkldnn
    to_padded_tensor to_sparse to_sparse_bsc to_sparse_bsr to_sparse_csc to_sparse_csr trace transpose tril triu
    true_divide trunc type_as unflatten unfold unsqueeze values var vdot view view_as where xlogy xpu
    """.split()
)

# `tensor.x_(...)` that change the values of the tensor.
IN_PLACE_METHODS = frozenset(
    """
    abs_ absolute_ acos_ acosh_ add_ addbmm_ addcdiv_ addcmul_ addmm_ addmv_ addr_ apply_ arccos_ arccosh_ arcsin_
    arcsinh_ arctan2_ arctan_ arctanh_ as_strided_ asin_ asinh_ atan2_ atan_ atanh_ baddbmm_ bernoulli_ bitwise_and_
    bitwise_left_shift_ bitwise_not_ bitwise_or_ bitwise_right_shift_ bitwise_xor_ cauchy_ ceil_ clamp_ clamp_max_
    clamp_min_ clip_ conj_physical_ copy_ copysign_ cos_ cosh_ cumprod_ cumsum_ deg2rad_ detach_ digamma_ div_
    divide_ eq_ erf_ erfc_ erfinv_ exp2_ exp_ expm1_ exponential_ fill_ fill_diagonal_ fix_ float_power_ floor_
    floor_divide_ fmod_ frac_ gcd_ ge_ geometric_ greater_ greater_equal_ gt_ heaviside_ hypot_ i0_ igamma_ igammac_
    index_add_ index_copy_ index_fill_ index_put_ index_reduce_ lcm_ ldexp_ le_ lerp_ less_ less_equal_ lgamma_
    log10_ log1p_ log2_ log_ log_normal_ logical_and_ logical_not_ logical_or_ logical_xor_ logit_ lt_ map2_ map_
    masked_fill_ masked_scatter_ mul_ multiply_ mvlgamma_ nan_to_num_ ne_ neg_ negative_ nextafter_ normal_
    not_equal_ polygamma_ pow_ put_ rad2deg_ random_ reciprocal_ relu_ remainder_ renorm_ resize_ resize_as_
    resize_as_sparse_ round_ rsqrt_ scatter_ scatter_add_ scatter_reduce_ set_ sgn_ sigmoid_ sign_ sin_ sinc_ sinh_
    sparse_resize_ sparse_resize_and_clear_ sqrt_ square_ squeeze_ sub_ subtract_ swapaxes_ swapdims_ t_ tan_ tanh_
    transpose_ tril_ triu_ true_divide_ trunc_ uniform_ unsqueeze_ xlogy_ zero_
    """.split()
)

# `tensor.x(...)` that return several tensors.
TENSORS_METHODS = frozenset(
    """
    aminmax chunk cummax cummin dsplit frexp geqrf histogram hsplit kthvalue mode qr slogdet sort split
    split_with_sizes svd tensor_split topk triangular_solve unbind unsafe_chunk unsafe_split unsafe_split_with_sizes
    vsplit
    """.split()
)

# Layers of `torch.nn` that return one tensor when called with one.
LAYERS = frozenset(
    """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
    AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss BatchNorm1d BatchNorm2d BatchNorm3d
    Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d
    ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss
    CosineSimilarity CrossEntropyLoss CrossMapLRN2d Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag
    FeatureAlphaDropout Flatten Fold GELU GLU GRUCell GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish
    Hardtanh HingeEmbeddingLoss HuberLoss Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss
    LPPool1d LPPool2d LPPool3d LayerNorm LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d
    LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d
    LazyInstanceNorm3d LazyLinear LeakyReLU Linear LinearCrossEntropyLoss LocalResponseNorm LogSigmoid LogSoftmax
    MSELoss MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish
    MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss NLLLoss2d PReLU PairwiseDistance
    PixelShuffle PixelUnshuffle PoissonNLLLoss RMSNorm RNNCell RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d
    ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU SiLU Sigmoid SmoothL1Loss SoftMarginLoss
    Softmax Softmax2d Softmin Softplus Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold
    TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer TripletMarginLoss
    TripletMarginWithDistanceLoss Unflatten Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d
    ZeroPad2d ZeroPad3d
    """.split()
)

# `tensor.x(...)` and `torch.x(tensor)` that return a Python number, string or list.
PLAIN_METHODS = frozenset(
    """
    allclose backward data_ptr dense_dim dim element_size equal get_device is_coalesced is_complex is_conj
    is_contiguous is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_shared
    is_signed item ndimension nelement numel numpy register_hook retain_grad size sparse_dim storage storage_offset
    stride tolist untyped_storage
    """.split()
)

# Attributes of a tensor that are tensors themselves.
TENSOR_ATTRIBUTES = frozenset("T mT H mH real imag data grad".split())

# Comparisons and predicates: their result is a bool tensor.
BOOL_RESULTS = frozenset(
    """
    all any bool eq ge greater greater_equal gt isclose isfinite isin isinf isnan isneginf isposinf isreal le less
    less_equal logical_and logical_not logical_or logical_xor lt ne not_equal signbit
    """.split()
)

# Integer results, which have no gradient.
INT_RESULTS = frozenset(
    """
    arange argmax argmin argsort argwhere bincount bucketize count_nonzero int long multinomial one_hot randint
    randint_like randperm searchsorted tril_indices triu_indices short byte
    """.split()
)

# Methods that no array, number, module or container beside a tensor has: whatever they are called on is a tensor.
TENSOR_ONLY_METHODS = frozenset(
    """
    unsqueeze permute detach expand expand_as contiguous new_zeros new_ones new_full new_empty new_tensor softmax
    log_softmax sigmoid masked_fill masked_select gather index_select unbind chunk type_as view_as repeat_interleave
    scatter scatter_add bmm matmul masked_scatter logsumexp amax amin movedim baddbmm requires_grad_ index_add
    unflatten is_floating_point log1p rsqrt clamp clamp_min clamp_max long numel backward masked_fill_ narrow
    """.split()
)

# What torch creates in the default dtype if no dtype is given.
DEFAULT_DTYPE_FACTORIES = frozenset("empty eye linspace logspace ones rand randn zeros normal".split())
FACTORIES = DEFAULT_DTYPE_FACTORIES | frozenset(
    "arange as_tensor full randint randperm tensor tril_indices triu_indices".split()
)

COLLECTIVES = frozenset(
    """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced
    all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object monitored_barrier
    reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list
    """.split()
)
