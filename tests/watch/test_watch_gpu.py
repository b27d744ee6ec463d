"""What only a GPU can show of a watched model: nothing waits for it, and no device assert ends the run."""

import copy

import pytest
import torch
from tests.compare import take_gradients
from tests.models import gpt2
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import flex_attention

from torchguard import err, flags
from torchguard._watch import regions, watch
from torchguard._watch.batch import Batch
from torchguard._watch.detect import is_finite, scan
from torchguard._watch.gradient_mask import masked_gradient
from torchguard._watch.zeros import zero_nonfinite_, zero_vectors
from torchguard.exceptions import MixedRowsWarning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own, about its matmuls, the graphs it captures, and tracing a module's hooks.
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning", "ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
NAN = float("nan")
GOOD, BAD = [0, 2, 3], [1]


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, ids, scale):
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(self.norm(x * scale[:, None, None]).sigmoid())


def arguments(dtype):
    ids = torch.randint(0, 10, (4, 6), device="cuda")
    return ids, torch.ones(4, device="cuda", dtype=dtype)


def spoiled(arguments, value=NAN):
    ids, scale = arguments
    scale = scale.clone()
    scale[BAD] = value
    return ids, scale


@pytest.fixture(params=["plain", "inductor", "reduce-overhead"])
def run(request):
    if request.param == "plain":
        return lambda model: model
    mode = "reduce-overhead" if request.param == "reduce-overhead" else None
    return lambda model: torch.compile(model, fullgraph=True, mode=mode)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("quarantine", [False, True])
def test_the_sample_and_the_location(run, dtype, quarantine):
    guarded = watch(TokenModel().to("cuda", dtype), quarantine=quarantine)
    call = run(guarded)
    good = arguments(dtype)
    with torch.no_grad():
        for _ in range(3):  # CUDA graphs are recorded in the second call, and run in the third
            _, f = call(*good)
            assert err.all_ok(f).item()
            for value, name in ((NAN, "NAN"), (float("inf"), "INF")):
                _, f = call(*spoiled(good, value))
                found = [[(e.code_name, e.location_name) for e in errors] for errors in flags.unpack_all(f)]
                replaced = [("FALLBACK_VALUE", "input")] if quarantine else []
                assert found == [[], [(name, "input"), *replaced], [], []]
                assert [(i.sample, i.path) for i in guarded.report()] == [(1, "input")]


def test_nothing_waits(run, dtype, no_sync):
    guarded = watch(TokenModel().to("cuda", dtype), returns="output")
    call, good = run(guarded), arguments(dtype)
    bad = spoiled(good)
    with torch.no_grad():
        for _ in range(3):
            call(*good)
        torch.cuda.synchronize()
        with no_sync:
            call(*bad)
            guarded.poll()
        torch.cuda.synchronize()
        assert [str(i) for i in guarded.poll()] == ["sample 1: NAN at input scale, position 0, seen at 4 locations"]


def test_indices_out_of_range_end_no_run(run):
    guarded = watch(TokenModel().cuda())
    ids, scale = arguments(torch.float32)
    ids[1, 2], ids[3, 0] = 10, -1
    with torch.no_grad():
        _, f = run(guarded)(ids, scale)
    torch.cuda.synchronize()
    assert [[e.code_name for e in errors] for errors in flags.unpack_all(f)] == [
        [],
        ["OUT_OF_BOUNDS"],
        [],
        ["NEGATIVE_IDX"],
    ]


@pytest.mark.parametrize("mode", ["plain", "inductor"])
def test_gradients_are_those_of_the_batch_without_the_bad_row(mode, dtype):
    model = TokenModel().to("cuda", dtype)
    good = arguments(dtype)
    model(*(z[GOOD] for z in good)).square().flatten(1).mean(1).mean().backward()
    want = take_gradients(model)
    guarded = watch(model, quarantine=True)
    call = torch.compile(guarded, fullgraph=True) if mode == "inductor" else guarded
    out, f = call(*spoiled(good))
    err.mean_ok(f, out.square().flatten(1).mean(1)).backward()
    for name, got in take_gradients(model).items():
        close = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 3e-3}
        torch.testing.assert_close(got, want[name], **close)


class Deep(nn.Module):
    """Blocks that are alike."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_blocks_that_are_compiled_once(mode):
    model, x = Deep().cuda(), torch.randn(4, 6, 16, device="cuda")
    model(x[GOOD]).square().flatten(1).mean(1).mean().backward()
    want = take_gradients(model)
    x[BAD, 2] = NAN
    guarded = watch(model, quarantine=True, compile_once=True)
    call = torch.compile(guarded, fullgraph=True, mode=mode)
    for _ in range(3):
        out, f = call(x)
        assert err.is_err(f).tolist() == [False, True, False, False]
        err.mean_ok(f, out.square().flatten(1).mean(1)).backward()
        for name, got in take_gradients(model).items():
            torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)
        assert err.is_ok(guarded.backward_flags).all()


@pytest.mark.parametrize("quarantine", [False, True])
def test_blocks_that_watch_chooses_are_compiled_once(monkeypatch, quarantine):
    monkeypatch.setattr(regions, "_MANY_WEIGHTS", 0)
    monkeypatch.setattr(regions, "_MANY_PRODUCTS", 0)
    model = gpt2(n_layer=4, tie_word_embeddings=False).cuda().eval()
    ids = torch.randint(1, 50, (4, 6), device="cuda")
    ids[1, 2] = 0
    with torch.no_grad():
        model.transformer.wte.weight[0] = NAN
    found, code = [], []
    for once in (False, None):
        torch._dynamo.reset()
        guarded = watch(copy.deepcopy(model), quarantine=quarantine, compile_once=once)
        with torch.no_grad():
            (out, f), sources = run_and_get_code(torch.compile(guarded, fullgraph=True), ids)
        code.append("\n".join(sources))
        found.append((out.logits, flags.repr(f), [str(one) for one in guarded.report()]))
    assert ["subgraph" in source for source in code] == [False, True]
    torch.testing.assert_close(found[0][0], found[1][0], equal_nan=True)
    assert found[0][1:] == found[1][1:]
    assert len(found[0][2]) == 1


class Root(nn.Module):
    """The square root of 0 is finite, its derivative is not."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head((self.first(x) * x).sqrt())


@pytest.mark.parametrize("dims", [(), (5,), (3, 700)], ids=["vectors", "tokens", "images"])
@pytest.mark.parametrize("mode", ["plain", "inductor"])
def test_a_fault_created_in_backward(mode, dims):
    model = Root().cuda()
    nn.init.ones_(model.first.weight)
    x = torch.rand(4, *dims, 4, device="cuda") + 1
    share = model(x[GOOD]).square().flatten(1).mean(1).sum() / len(x)
    want = torch.autograd.grad(share, [*model.first.parameters()])
    x[(1, *(-1 for _ in dims))] = 0  # one vector of the sample
    guarded = watch(model, quarantine=True)
    call = torch.compile(guarded, fullgraph=True) if mode == "inductor" else guarded
    out, f = call(x)
    assert err.all_ok(f).item()
    err.mean_ok(f, out.square().flatten(1).mean(1)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close([p.grad for p in model.first.parameters()], [*want])
    assert err.is_err(guarded.backward_flags).tolist() == [False, True, False, False]


class Wide(nn.Module):
    """Vectors so long that a GPU scans them in pieces."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 4096), nn.Linear(4096, 2)

    def forward(self, x):
        return self.down(self.up(x).log())


@pytest.mark.parametrize("flat", [False, True], ids=["tokens", "flattened"])
def test_the_token_of_a_long_vector(run, dtype, flat):
    model = Wide().to("cuda", dtype)
    nn.init.zeros_(model.up.weight)
    nn.init.ones_(model.up.bias)
    x = torch.zeros(4, 6, 16, device="cuda", dtype=dtype)
    with torch.no_grad():
        model.up.weight[3000] = 1  # in the third piece, and nowhere else
        x[1, 4], x[2, 5] = -1, NAN
        shape = nn.Sequential(nn.Flatten(0, 1), model, nn.Unflatten(0, (4, 6))) if flat else model
        guarded = watch(shape, quarantine=True)
        run(guarded)(x)
    found = [(i.sample, i.path.split(".")[-1], i.position) for i in guarded.report()]
    assert found[0] == (1, "down", 4)
    assert found[1][0] == 2
    assert found[1][2] == 5


@pytest.mark.parametrize("mode", ["plain", "inductor"])
def test_gradients_through_long_vectors(mode):
    model = Wide().cuda()
    nn.init.uniform_(model.up.weight, 0.1, 0.2)
    nn.init.ones_(model.up.weight[:1024].detach())
    x = torch.rand(4, 6, 16, device="cuda") + 1
    model(x[GOOD]).square().flatten(1).mean(1).mean().backward()
    want = take_gradients(model)
    x[BAD, 2] = 1e38  # overflows in the first piece of the vector
    guarded = watch(model, quarantine=True)
    call = torch.compile(guarded, fullgraph=True) if mode == "inductor" else guarded
    out, f = call(x)
    assert err.is_err(f).tolist() == [False, True, False, False]
    err.mean_ok(f, out.square().flatten(1).mean(1)).backward()
    for name, got in take_gradients(model).items():
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("per_sample", [7, 4096, 3 * 4096 + 16, 300_000])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_gradient_is_masked_whatever_is_bad_in_it_and_wherever(kind, per_sample):
    grad = torch.randn(6, per_sample, device="cuda", dtype=kind)
    grad[0, 0] = torch.finfo(kind).max
    grad[1, -1], grad[2, per_sample // 2], grad[3, 0] = NAN, float("-inf"), float("inf")
    grad[4, :2] = torch.tensor([float("inf"), NAN], device="cuda").neg()  # the sign of a NaN counts for nothing
    want, probe = masked_gradient(grad, Batch(6, (), 0, grad.device), None, None, 0)
    table = torch.zeros(2, 3, 6, device="cuda")
    for location in (2, 0, 2):
        got = grad.clone()
        torch.ops.torchguard.mask_gradient_(got, table, location, 6)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(table[0], torch.stack([probe, torch.zeros_like(probe), probe]))
    assert not table[1].any()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 2, 1), (1, 0, 2, 3), (3, 1, 2, 0)])
def test_a_gradient_is_masked_however_it_lies_in_memory(order):
    shape = (6, 4, 5, 8)
    grad = torch.randn([shape[dim] for dim in order], device="cuda").permute([order.index(dim) for dim in range(4)])
    grad[1, 3, 2, 7], grad[4, 0, 0, 0] = NAN, float("inf")
    want = grad.clone()
    want[[1, 4]] = 0
    table = torch.zeros(2, 1, 6, device="cuda")
    torch.ops.torchguard.mask_gradient_(grad, table, 0, 6)
    torch.testing.assert_close(grad, want, rtol=0, atol=0)
    assert table[0, 0].nonzero().flatten().tolist() == [1, 4]


def test_a_gradient_mask_in_a_graph_is_that_of_eager_mode():
    def step(grad, location):
        table, masked = torch.zeros(2, 3, 6, device="cuda"), grad.clone()
        torch.ops.torchguard.mask_gradient_(masked, table, location, 6)
        torch.ops.torchguard.mask_gradient_(masked.mul_(2), table, 1, 6)
        return masked, table

    grad = torch.randn(6, 5, 7, device="cuda", dtype=torch.bfloat16)
    grad[1, 2, 3], grad[4, 0, 0] = NAN, float("inf")
    grad[3] = torch.finfo(torch.bfloat16).max  # is Inf when doubled
    masked, table = step(grad, 2)
    assert table[0].nonzero().tolist() == [[1, 3], [2, 1], [2, 4]]
    for got, want in zip(torch.compile(step, fullgraph=True)(grad, 2), (masked, table), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_kernel_that_masks_is_launched_by_the_graph():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).cuda(), torch.randn(4, 6, 8, device="cuda")
    call = torch.compile(watch(model, quarantine=True), fullgraph=True)
    _, codes = run_and_get_code(lambda: call(x)[0].sum().backward())
    assert "torchguard_mask_gradient(" in codes[-1]
    assert "torchguard.mask_gradient" not in codes[-1].split("def call")[-1]


class Residual(nn.Module):
    """Blocks around a residual stream of 2,048. `sqrt` has an infinite gradient at 0, its value is fine."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(2048) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(4))
        self.head = nn.Linear(2048, 3)

    def forward(self, x, root_of):
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = x + layer(norm(x))
            x = x + (x * root_of).abs().sqrt() if i == 1 else x
        return self.head(x)


@pytest.mark.parametrize("fault", ["input", "backward"])
@pytest.mark.parametrize("mode", ["plain", "inductor"])
def test_gradients_of_a_residual_stream(mode, fault):
    model, x = Residual().cuda().double(), torch.randn(4, 512, 2048, device="cuda", dtype=torch.float64)
    root_of = torch.ones(4, 1, 1, device="cuda", dtype=torch.float64)
    model(x[GOOD], root_of[GOOD]).square().flatten(1).mean(1).mean().backward()
    want = take_gradients(model)
    if fault == "input":
        x[BAD, 7] = NAN
    else:
        root_of[BAD] = 0
    guarded = watch(model, quarantine=True)
    call = torch.compile(guarded, fullgraph=True) if mode == "inductor" else guarded
    out, f = call(x, root_of)
    (err.mean_ok(f, out.square().flatten(1).mean(1)) if fault == "input" else out[GOOD].square().mean()).backward()
    found = take_gradients(model)
    if fault == "input":
        assert err.is_err(f).tolist() == [False, True, False, False]
    else:  # 0 * Inf: a gradient of zeros goes into `sqrt`
        assert err.is_err(guarded.backward_flags).tolist() == [False, True, False, False]
    for name, got in found.items():
        torch.testing.assert_close(got, want[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [16, 48, 1024, 3072, 5000, 4097])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_replacing_in_place(kind, width):
    z = torch.randn(3, 5, width, device="cuda", dtype=kind)
    z[0, 0, 0] = torch.finfo(kind).max
    z[1, 2, width // 2], z[2, 4, -1], z[0, 3] = NAN, float("-inf"), float("inf")
    status = scan(z)
    want = zero_vectors(is_finite(status), z)
    for _ in range(2):  # the kernel is compiled, and then reused
        replaced = z.clone()
        torch.testing.assert_close(zero_nonfinite_(replaced), status, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(replaced, want, rtol=0, atol=0)


class Attention(nn.Module):
    """Whose queries, keys and values come from one matrix."""

    def __init__(self, width=32):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("width", [32, 1056])
def test_what_attention_reads_is_replaced_in_place(run, dtype, width):
    model = nn.Sequential(Attention(width), Attention(width)).to("cuda", dtype)
    x = torch.randn(4, 6, width, device="cuda", dtype=dtype)
    with torch.no_grad():
        model[0].qkv.weight[0, 0] = torch.finfo(dtype).max / 2
        x[..., 0] = 0
        x[BAD, 4, 0] = 8
        want = model(x)[GOOD]
        guarded = watch(model, quarantine=True)
        out, f = run(guarded)(x)
    assert err.is_err(f).tolist() == [False, True, False, False]
    assert [(i.sample, i.path, i.position) for i in guarded.report()] == [(1, "0.qkv", 4)]
    torch.testing.assert_close(out[GOOD], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", ["as many", "any number"])
def test_the_kernel_that_replaces_is_in_the_graph(rows):
    guarded = watch(Attention().cuda(), quarantine=True)
    call = torch.compile(guarded, fullgraph=True, dynamic=rows == "any number")
    x = torch.randn(4, 6, 32, device="cuda")
    _, (code, *_) = run_and_get_code(call, x)
    assert ("_zero_nonfinite_kernel" in code) is (rows == "as many")


@pytest.mark.parametrize("once", [False, True])
def test_gradients_through_attention(once):
    model = nn.Sequential(*(Attention() for _ in range(3))).cuda()
    x = torch.randn(4, 6, 32, device="cuda")
    model(x[GOOD]).square().flatten(1).mean(1).mean().backward()
    want = take_gradients(model)
    x[BAD, 3] = 3e38
    guarded = watch(model, quarantine=True, compile_once=["0", "1", "2"] if once else False)
    out, f = torch.compile(guarded, fullgraph=True)(x)
    assert err.is_err(f).tolist() == [False, True, False, False]
    err.mean_ok(f, out.square().flatten(1).mean(1)).backward()
    for name, got in take_gradients(model).items():
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)


class Flexible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 96), nn.Linear(32, 2)

    def forward(self, x):
        q, k, v = self.first(x).reshape(len(x), -1, 3, 2, 16).permute(2, 0, 3, 1, 4)
        mixed = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -1e9))
        return self.last(mixed.transpose(1, 2).reshape(x.shape))


def test_gradients_through_flex_attention():
    model, x = Flexible().cuda(), torch.randn(4, 128, 32, device="cuda")
    torch.compile(model, fullgraph=True)(x[GOOD]).square().mean().backward()
    want = take_gradients(model)
    x[BAD, 3] = NAN
    out, f = torch.compile(watch(model, quarantine=True), fullgraph=True)(x)
    assert err.is_err(f).tolist() == [False, True, False, False]
    err.mean_ok(f, out.square().flatten(1).mean(1)).backward()
    for name, got in take_gradients(model).items():
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,)))


def test_a_model_with_torch_cond_is_declared():
    guarded, x = watch(Branching().cuda(), quarantine=True), torch.randn(4, 32, device="cuda")
    x[BAD] = NAN
    with pytest.warns(MixedRowsWarning, match="cond cannot be followed"):
        out, f = torch.compile(guarded, fullgraph=True)(x, sample_ids=torch.arange(4, device="cuda"))
    assert err.is_err(f).all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in guarded.parameters())


class Halves(nn.Module):
    """One on the CPU, one on the GPU."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2, device="cuda")

    def forward(self, x):
        return self.second((self.first(x) * x.sum(-1, keepdim=True)).sqrt().cuda())


@pytest.mark.parametrize("mode", ["plain", "aot_eager", "inductor"])
def test_a_model_on_two_devices(mode):
    model = Halves()
    nn.init.ones_(model.first.weight)
    x = torch.rand(5, 4) + 1
    good = [0, 2, 4]
    share = model(x[good]).square().mean(-1).sum() / (len(x) - 1)
    want = torch.autograd.grad(share, [*model.parameters()])
    x[1, 2], x[3] = NAN, 0  # bad at the input; finite, but for the derivative of the root
    guarded = watch(model, quarantine=True)
    call = guarded if mode == "plain" else torch.compile(guarded, fullgraph=True, backend=mode)
    out, f = call(x)
    assert err.is_err(f).tolist() == [False, True, False, False, False]
    loss = out.square().mean(-1)
    err.mean_ok(f.to(loss.device), loss).backward()
    torch.testing.assert_close([p.grad for p in model.first.parameters()], [*want[:2]])
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert err.is_err(guarded.backward_flags).tolist() == [False, False, False, True, False]
