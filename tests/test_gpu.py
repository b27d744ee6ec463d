"""What only a GPU can show: checks never synchronize with it, and results equal those of the CPU."""

import pytest
import torch
from torch import nn

from torchguard import (
    IF,
    IS,
    DeviceMismatchError,
    ErrorConfig,
    err,
    fix,
    flag_nan,
    flag_nan_and_inf,
    flag_oob_indices,
    flags,
    tensorcheck,
)
from torchguard.exceptions import CastOverflowError
from torchguard.typing import (
    Tensor,
    bool_t,
    error_t,
    float8_e4m3fn_t,
    float32_t,
    int8_t,
    type_cast,
    uint8_t,
    uint64_t,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Warnings of torch about its matmuls and about the CUDA graphs it captures.
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning", "ignore:The CUDA Graph is empty:UserWarning"),
]
NAN, INF = float("nan"), float("inf")


def work(x, config):
    f = err.new(x, config)
    f = flag_nan_and_inf(x, 1, f, config)
    z, f = fix(x, f, 2, config=config)
    f = flag_nan(z.log(), 3, f, config)
    f = err.push_many(f, [(err.OVERFLOW, 4, z > 1), (err.SATURATED, 5, z > 2)], config)
    f = err.merge(f, err.from_code(err.NAN, 900, x.shape[0], x.device, config=config), config=config)
    z = IF(err.has_nan(f), lambda: z * 2).ELSE(lambda: z)
    z = IF(IS(err.INF, f), lambda: z + 1).ELSE(lambda: z)
    z = err.map_ok(f, z, lambda z: z / z.norm(dim=-1, keepdim=True))
    loss = err.mean_ok(f, z.sum(-1))
    return z, f, loss, err.is_ok(f), err.count_errors(f), err.max_severity(f), err.clear(f, err.NAN)


def sample():
    torch.manual_seed(0)
    x = torch.randn(16, 8, 4).abs() + 0.1
    x[3, 2, 1], x[5, 0, 0], x[9, 7, 3] = NAN, INF, -INF
    return x


def test_eager_checks_never_synchronize(no_sync, carrier):
    x = sample().cuda()
    ids = torch.randint(-1, 9, (16,), device="cuda")
    config = ErrorConfig(flag_dtype=carrier)
    with no_sync:
        work(x, config)
        flag_oob_indices(ids, 8, 1, err.new(x))


def test_eager_results_equal_those_of_the_cpu(carrier):
    config = ErrorConfig(flag_dtype=carrier)
    for got, want in zip(work(sample().cuda(), config), work(sample(), config), strict=True):
        assert_equal(got, want)


def test_compiled_results_equal_those_of_the_cpu(compiled, carrier):
    config = ErrorConfig(flag_dtype=carrier)
    for got, want in zip(compiled(work)(sample().cuda(), config), work(sample(), config), strict=True):
        assert_equal(got, want)


def assert_equal(got, want):
    if want.ndim == 2 and want.is_floating_point():  # float flags may have the bits of a NaN
        whole = torch.int32 if want.element_size() == 4 else torch.int64
        got, want = got.view(whole), want.view(whole)
    torch.testing.assert_close(got.cpu(), want, equal_nan=True)


def test_summary_of_flags_on_a_gpu():
    f = flag_nan(sample().cuda(), 7, None)
    assert flags.summary(f) == {"Location_7": {"NAN": 1}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_with_a_bad_sample(dtype, mode):
    class WithFix(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, x):
            x, f = fix(x, flag_nan_and_inf(x, 1, err.new(x)), 1)
            return self.outer(self.inner(x).relu()).squeeze(-1), f

    net = WithFix().to("cuda", dtype)
    x = torch.randn(6, 8, device="cuda", dtype=dtype)
    net(x[:5])[0].square().mean().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    x[5, 3] = NAN
    compiled = torch.compile(net, fullgraph=True, mode=mode)
    for _ in range(3):
        net.zero_grad()
        out, f = compiled(x)
        err.mean_ok(f, out.square()).backward()
    assert err.is_err(f).nonzero().flatten().tolist() == [5]
    # Half precision: the means over five and over six rows round differently.
    close = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for p, grad in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad, **close)


def test_tensorcheck_checks_devices():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n",), "cuda"], y: Tensor[float32_t, ("n",), "cuda:0"]) -> Tensor[float32_t, (), "cpu"]:
        return (x + y).sum().cpu()

    x = torch.ones(3, device="cuda")
    f(x, x)
    with pytest.raises(DeviceMismatchError) as caught:
        f(x, x.cpu())
    assert caught.value.parameter == "y"
    assert ".to('cuda:0') would match." in str(caught.value)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_tensorcheck_never_synchronizes(no_sync, declared, compiled):
    def log(x):
        return x.log(), err.new(x)

    if declared:
        log.__annotations__["return"] = tuple[Tensor[float32_t, ("n", 2)], Tensor[error_t, ("n", "words")]]
    log = tensorcheck(log)
    log = torch.compile(log, fullgraph=True) if compiled else log
    x = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [0.0, 1.0]], device="cuda")
    log(x)
    with no_sync:
        _, f = log(x)
    assert [[e.code for e in flags.unpack(f, i)] for i in range(3)] == [[], [err.NAN], [err.INF]]


def test_a_tensor_shaped_like_flags_is_returned_unchanged_on_a_gpu():
    @tensorcheck
    def two(x, y):
        return x.log(), y + 0

    x = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [0.0, 1.0]], device="cuda")
    ids = torch.tensor([[5, 3, 2, 9], [0, 1, 2, 3], [0, 0, 0, 0]], device="cuda")
    for y in (ids, ids.float().repeat(1, 2)):
        assert torch.equal(two(x, y)[1], y)
        assert torch.equal(torch.compile(two, fullgraph=True)(x, y)[1], y)


def test_type_cast_on_a_gpu():
    values = torch.tensor([1, 300, -1], device="cuda")
    assert type_cast[float32_t](values).unwrap().tolist() == [1.0, 300.0, -1.0]
    for alias in (int8_t, uint8_t, uint64_t, bool_t):
        assert type_cast[alias](values).is_err()
    assert type_cast[uint64_t](values[:2]).unwrap().device.type == "cuda"
    assert isinstance(type_cast[float8_e4m3fn_t](values.float() * 2).unwrap_err(), CastOverflowError)
