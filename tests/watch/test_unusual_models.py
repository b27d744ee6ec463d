"""Models as they are found: masks, regrouped batches, states, odd shapes, calls within calls."""

import copy
import gc
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from torchguard import err, flags
from torchguard._watch import graph_plan, unwatch, watch
from torchguard._watch.gradient_probes import CallOrigins, CallProbes
from torchguard.exceptions import MixedRowsWarning, WatchError

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*nested tensors.*:UserWarning")


class Made(nn.Module):
    """A model of a function and modules."""

    def __init__(self, call, **modules):
        super().__init__()
        self.call = call
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def reported(guarded):
    return [str(incident) for incident in guarded.report()]


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


class TestMasks:
    def test_padding(self, run_light):
        model, x = encoder(), torch.randn(3, 5, 8)
        pad = torch.zeros(3, 5, dtype=torch.bool)
        pad[0, 3:] = True
        want = model(x, src_key_padding_mask=pad)
        guarded = watch(model, quarantine=True)
        out, f = run_light(guarded)(x, src_key_padding_mask=pad)
        assert err.all_ok(f)
        torch.testing.assert_close(out, want)

    @pytest.mark.parametrize("quarantine", [False, True])
    def test_a_mask_of_all_samples(self, quarantine):
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        inner, x = encoder(), torch.randn(3, 5, 8)
        model = Made(lambda self, x, mask: self.inner(x, mask=mask), inner=inner)
        want = model(x, mask)
        out, f = watch(model, quarantine=quarantine)(x, mask)
        assert err.all_ok(f)
        assert torch.equal(out, want)

    def test_a_mask_by_position(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x, attn_mask):
                return self.layer(x + attn_mask.exp())

        class Blocks(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block()])

            def forward(self, x, attn_mask):
                return self.blocks[0](x, attn_mask)

        mask = torch.zeros(3, 4)
        mask[1] = float("-inf")
        model, x = Blocks(), torch.randn(3, 4)
        out, f = watch(model, level="blocks", quarantine=True)(x, mask)
        assert err.all_ok(f)
        assert torch.equal(out, model(x, mask))


class TestSamplesAlongOtherDims:
    def test_an_lstm_on_a_regrouped_batch(self):
        def call(self, x):
            batch, windows, length, width = x.shape
            _, (h, _) = self.lstm(x.view(batch * windows, length, width))
            return h[-1].view(batch, windows, 3)

        model = Made(call, lstm=nn.LSTM(4, 3, batch_first=True))
        x = torch.randn(2, 3, 5, 4)
        x[1, 2, 0, 0] = NAN
        guarded = watch(model)
        guarded(x)
        assert [incident.sample for incident in guarded.report()] == [1]

    @pytest.mark.parametrize("layers", [2, 3])
    def test_states_of_a_bad_sample_are_zero_and_the_others_exact(self, layers):
        model, x = nn.LSTM(4, 3, num_layers=layers, batch_first=True), torch.randn(3, 5, 4)
        want = model(x)
        x[1, 2, 0] = NAN
        (out, (h, c)), _ = watch(model, quarantine=True)(x)
        assert not out[1].any()
        assert not h[:, 1].any()
        assert not c[:, 1].any()
        assert torch.equal(h[:, [0, 2]], want[1][0][:, [0, 2]])

    def test_flattened_and_integer_outputs(self, run_light):
        def call(self, x):
            h = self.layer(x)
            return h.view(-1, 4), h.flatten(1).argmax(-1) + 1

        x = torch.randn(3, 5, 4)
        x[1, 2] = NAN
        (flat, best), _ = run_light(watch(Made(call, layer=nn.Linear(4, 4)), quarantine=True))(x)
        assert flat.view(3, 5, 4).flatten(1).any(1).tolist() == [True, False, True]
        assert (best > 0).tolist() == [True, False, True]

    def test_samples_along_the_last_dim(self):
        model = Made(lambda self, x: x * self.p)
        model.p = nn.Parameter(torch.ones(()))
        x = torch.randn(5, 3)
        x[2, 1] = NAN
        guarded = watch(model, batch_dim=1, quarantine=True)
        out, _ = guarded(x)
        assert [incident.sample for incident in guarded.report()] == [1]
        assert out.any(0).tolist() == [True, False, True]


class TestOddShapes:
    def test_nothing_along_a_dim(self, run_light):
        model = Made(lambda self, x, cache: (self.layer(x), x[:, :0]), layer=nn.Linear(4, 4))
        _, f = run_light(watch(model))(torch.randn(3, 4), torch.zeros(3, 0, 4))
        assert err.all_ok(f)

    @pytest.mark.parametrize("quarantine", [False, True])
    @pytest.mark.parametrize(
        ("cut", "inner"),
        [
            (lambda x: x[:, :0], nn.Linear(4, 4)),
            (lambda x: x[..., :0], nn.PReLU()),
            (lambda x: x[:0], nn.Linear(4, 4)),
        ],
        ids=["no tokens", "no width", "no samples"],
    )
    def test_a_module_that_is_given_nothing(self, run_light, cut, inner, quarantine):
        model = Made(lambda self, x: (self.layer(x), self.inner(cut(x))), layer=nn.Linear(4, 4))
        model.inner = inner
        x = torch.randn(3, 2, 4)
        x[1, 0, 0] = NAN
        (out, nothing), f = run_light(watch(model, quarantine=quarantine))(x)
        assert err.is_err(f).tolist() == [False, True, False]
        (out[[0, 2]].sum() + nothing.sum()).backward()
        assert not quarantine or model.layer.weight.grad.isfinite().all()

    def test_an_empty_batch_and_a_table(self):
        model = Made(lambda self, x: self.layer(x) + self.table(torch.arange(4)).sum(), layer=nn.Linear(4, 4))
        model.table = nn.Embedding(4, 4)
        _, f = watch(model)(torch.randn(0, 4))
        assert f.shape[0] == 0

    @pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
    def test_complex(self):
        model = Made(
            lambda self, x: (torch.fft.fft(self.layer(x)).conj(), self.layer(x).sum() * 1j), layer=nn.Linear(4, 4)
        )
        x = torch.randn(3, 4)
        (out, total), f = watch(model, quarantine=True)(x)
        assert err.all_ok(f)
        assert total.shape == ()
        assert torch.equal(out, model(x)[0])

    def test_channels_last_stays(self):
        layers = nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
        )
        model = layers.to(memory_format=torch.channels_last)
        x = torch.randn(4, 4, 8, 8).to(memory_format=torch.channels_last)
        want = model(x)
        out, _ = watch(model, quarantine=True)(x)
        assert torch.equal(out, want)
        assert out.stride() == want.stride()


class TestCalls:
    def test_indices_by_name(self):
        model = Made(lambda self, ids: self.table(input=ids).sum(1), table=nn.Embedding(4, 4))
        guarded = watch(model)
        guarded(torch.tensor([[1, 2], [3, 9]]))
        assert reported(guarded) == ["sample 1: OUT_OF_BOUNDS at table, position 0"]

    def test_a_model_that_calls_itself(self):
        def call(self, x, again=True):
            h = self.a(x)
            return self.b(self(h, again=False) if again else h)

        model, x = Made(call, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(3, 4)
        out, f = watch(model)(x)
        assert err.all_ok(f)
        assert torch.equal(out, model(x))

    def test_many_models_are_compiled_as_often_as_plain_ones(self):
        class OneLayer(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return self.layer(x)

        counter = CompileCounter()
        for _ in range(10):
            torch.compile(watch(OneLayer()), backend=counter, fullgraph=True)(torch.randn(4, 4))
        assert counter.frame_count == 1
        for i in range(10):
            other = type(f"OneLayer{i}", (OneLayer,), {"forward": lambda self, x: self.layer(x)})
            torch.compile(watch(other()), backend="eager", fullgraph=True)(torch.randn(4, 4))

    def test_inference_mode_misses_nothing(self):
        class Gate(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return (x > 0).float() * self.weight

        def call(self, x):
            h = self.layer(x)
            h[1].mul_(NAN)
            return self.gate(h)

        guarded = watch(Made(call, layer=nn.Linear(4, 4), gate=Gate()), quarantine=True)
        with torch.inference_mode():
            guarded(torch.randn(3, 4))
        assert reported(guarded) == ["sample 1: NAN at input of gate, position 0"]

    def test_the_signature_is_the_models(self):
        model = encoder()
        assert inspect.signature(watch(model).forward) == inspect.signature(model.forward)

    def test_blocks_of_a_sequential(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        guarded = watch(model, level="blocks")
        with torch.no_grad():
            model[0][0].weight.fill_(NAN)
        guarded(torch.randn(1, 4))
        assert guarded.report()[0].path == "0"

    def test_a_model_with_an_attribute_of_the_same_name_is_refused(self):
        model = nn.Linear(2, 2)
        model.flags = 3
        with pytest.raises(WatchError, match="has a 'flags' of its own"):
            watch(model)


class TestBackward:
    def model(self):
        model = Made(lambda self, x: self.b(self.a(x).sqrt()), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        with torch.no_grad():
            model.a.weight.copy_(torch.eye(4))
            model.a.bias.zero_()
        return watch(model, quarantine=True)

    def step(self, guarded, x):
        out, f = guarded(x)
        err.mean_ok(f, out.sum(-1)).backward()

    def test_a_sample_that_was_bad_before_is_not_reported_for_a_later_pass(self):
        guarded, x = self.model(), torch.rand(3, 4) + 1
        x[0] = -1.0
        self.step(guarded, x)
        self.step(guarded, torch.rand(3, 4) + 1)
        assert err.all_ok(guarded.backward_flags)

    def test_passes_of_several_sizes_add_up(self):
        guarded, x = self.model(), torch.rand(4, 4) + 1
        x[3] = 0.0
        self.step(guarded, x)
        self.step(guarded, torch.rand(2, 4) + 1)
        assert err.is_err(guarded.backward_flags).tolist() == [False, False, False, True]
        assert err.all_ok(guarded.backward_flags)

    def test_two_calls_and_one_pass_over_both(self, run_light):
        """A bad sample of one call neither hides a fault created in the other, nor is taken for one."""
        guarded = self.model()
        real, made = torch.rand(4, 4) + 1, torch.rand(2, 4) + 1
        real[0] = -1.0  # bad on the way forward
        real[3], made[0] = 0.0, 0.0  # goes bad on the way back
        call = run_light(guarded)
        (one, f), (two, g) = call(real), call(made)
        assert err.is_err(f).tolist() == [True, False, False, False]
        assert err.all_ok(g)
        (err.mean_ok(f, one.sum(-1)) + err.mean_ok(g, two.sum(-1))).backward()
        assert err.is_err(guarded.backward_flags).tolist() == [True, False, False, True]
        real, made = real.abs(), made + 1
        real[3], made[1] = 1.0, -1.0
        (one, f), (two, g) = call(real), call(made)
        (err.mean_ok(f, one.sum(-1)) + err.mean_ok(g, two.sum(-1))).backward()
        assert err.all_ok(guarded.backward_flags)

    @pytest.mark.parametrize("passes", [True, False], ids=["with backward", "without"])
    def test_calls_leave_nothing_behind(self, run_light, passes):
        guarded = self.model()
        call = run_light(guarded)
        for _ in range(3):
            out, f = call(torch.rand(3, 4) + 1)
            if passes:
                out.sum().backward()
        del out, f
        gc.collect()
        assert not [one for one in gc.get_objects() if isinstance(one, (CallProbes, CallOrigins))]

    def test_for_a_batch_that_is_too_large_there_are_no_backward_flags(self):
        guarded, x = self.model(), torch.rand(4097, 4) + 1
        x[3] = 0.0
        self.step(guarded, x)
        assert guarded.a.weight.grad.isfinite().all()
        assert guarded.backward_flags is None

    def test_a_container_of_ones_own_modules_masks_gradients(self):
        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return x.abs().sqrt() * self.weight

        model = Made(lambda self, x: self.norm(self.layer(x) + self.pos), layer=nn.Linear(4, 4, bias=False))
        model.norm = nn.Sequential(Norm())
        model.pos = nn.Parameter(torch.zeros(4))
        x = torch.randn(3, 4)
        x[1] = 0
        guarded = watch(model, quarantine=True, level="outputs", include="*")
        self.step(guarded, x)
        assert model.pos.grad.isfinite().all()
        assert "norm" in flags.unpack(guarded.backward_flags, 1)[0].location_name


def test_after_all_this_a_model_can_be_unwatched():
    model = encoder()
    assert unwatch(watch(model, quarantine=True)) is model


class OwnNorm(nn.Module):
    """A norm that keeps its width as a number: torch's own has a tuple."""

    def __init__(self, width):
        super().__init__()
        self.normalized_shape, self.weight = width, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def test_a_norm_may_have_a_number_as_its_shape():
    guarded = watch(nn.Sequential(nn.Linear(3, 3), OwnNorm(3)), quarantine=True)
    _, f = guarded(torch.tensor([[1.0, 2.0, 3.0], [1.0, NAN, 3.0]]))
    assert err.is_err(f).tolist() == [False, True]


class Detector(nn.Module):
    """Takes a list of images, pads them to one batch, and returns a dict for each image."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, images, targets=None):
        height, width = (max(one.shape[i] for one in images) for i in (1, 2))
        batch = images[0].new_zeros(len(images), 3, height, width)
        for image, place in zip(images, batch, strict=True):
            place[:, : image.shape[1], : image.shape[2]].copy_(image)
        scores = self.head(self.conv(batch).relu().mean((2, 3)))
        if targets is not None:
            scores = torch.stack([s * t["weight"] for s, t in zip(scores, targets, strict=True)])
        return [{"scores": one} for one in scores]


@pytest.mark.parametrize(
    "sizes",
    [[(5, 4), (6, 7), (4, 4), (5, 5)], pytest.param([(5, 5)] * 4, marks=pytest.mark.long)],
    ids=["ragged", "equal"],
)
def test_the_samples_of_a_list_of_images_are_the_images(run_light, sizes, recwarn):
    model = Detector().double()
    guarded = watch(model, quarantine=True)
    images = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    targets = [{"weight": torch.rand(5, dtype=torch.float64)} for _ in sizes]
    want = model(images, targets)
    call = run_light(guarded)
    out, f = call(images, targets)
    assert not err.is_err(f).any()
    assert all(torch.equal(a["scores"], b["scores"]) for a, b in zip(out, want, strict=True))
    images[2] = images[2].clone()
    images[2][1, 0, 0] = float("nan")
    out, f = call(images, targets)
    assert err.is_err(f).tolist() == [False, False, True, False]
    sum(one["scores"].square().sum() for one in out).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    good = [0, 1, 3]
    sum(one["scores"].square().sum() for one in model([images[i] for i in good], [targets[i] for i in good])).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12)
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)]  # Dynamo warns of Python 3.13.0


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.cond(x.sum() > -1e9, torch.sin, torch.cos, (self.first(x),)))


@pytest.mark.parametrize("mode", ["plain", "aot_eager"])
def test_a_model_with_torch_cond_is_declared(mode):
    guarded, x = watch(Branching(), quarantine=True, returns="output"), torch.randn(4, 3)
    call = guarded if mode == "plain" else torch.compile(guarded, backend=mode, fullgraph=True)
    with torch.set_grad_enabled(mode != "plain"):
        with pytest.warns(MixedRowsWarning, match="may mix samples"):
            call(x)
        assert not err.is_err(guarded.flags).any()
        x[1] = float("nan")
        out = call(x)
    assert not out.any()
    assert err.is_err(guarded.flags).all()
    if mode != "plain":
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in guarded.parameters())


class Flexible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x):
        q = self.first(x).unsqueeze(1)
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + 1).squeeze(1)


@torch.no_grad()
@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
def test_flex_attention_in_a_graph_keeps_samples_apart(quarantine, recwarn):
    model, x = Flexible(), torch.randn(3, 4, 16)
    want = torch.compile(model, backend="eager", fullgraph=True)(x)
    guarded = watch(model, quarantine=quarantine)
    call = torch.compile(guarded, backend="aot_eager", fullgraph=True)
    out, f = call(x)
    assert torch.equal(out, want)
    assert not err.is_err(f).any()
    x[1, 2] = float("nan")
    out, f = call(x)
    assert torch.equal(out[[0, 2]], want[[0, 2]])
    assert [one.sample for one in guarded.report()] == [1]
    assert err.is_err(f).tolist() == [False, True, False]
    assert not [one for one in recwarn if one.category is MixedRowsWarning]


@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
def test_flex_attention_in_a_graph_with_gradients_keeps_samples_apart(quarantine, monkeypatch):
    """torch refuses gradients on the CPU when it is called; its implementation for `aot_eager` has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)
    model, x = Flexible().double(), torch.randn(3, 4, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    torch.compile(plain, backend="aot_eager", fullgraph=True)(x[[0, 2]]).square().sum().backward()
    guarded = watch(model, quarantine=quarantine)
    x[1, 2] = float("nan")
    out, f = torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
    assert err.is_err(f).tolist() == [False, True, False]
    out.square().sum().backward()
    for one, two in zip(guarded.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-9) == quarantine


class VmappedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.vmap(lambda row: torch.mv(self.weight, row).tanh())(self.first(x))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_model_that_calls_vmap_is_exact_or_declared_with_gradients(backend):
    model, x = VmappedBlock().double(), torch.randn(3, 4, dtype=torch.float64)
    want = model(x)
    guarded = watch(model, quarantine=True)
    call = torch.compile(guarded, backend=backend, fullgraph=True) if backend else guarded
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out, f = call(x)
        assert torch.equal(out, want)
        assert not err.is_err(f).any()
        x[1, 2] = float("nan")
        out, f = call(x)
    is_declared = any(one.category is MixedRowsWarning for one in seen)
    assert err.is_err(f).tolist() == [is_declared, True, is_declared]
    assert is_declared or torch.equal(out[[0, 2]], want[[0, 2]])
    out.square().sum().backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())


class Biased(Flexible):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        q, bias = self.first(x).unsqueeze(1), self.bias
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[j]).squeeze(1)


@torch.no_grad()
def test_flex_attention_with_a_tensor_of_its_own_is_declared():
    call, x = torch.compile(watch(Biased(), quarantine=True), backend="eager", fullgraph=True), torch.randn(3, 4, 16)
    x[1, 2] = float("nan")
    with pytest.warns(MixedRowsWarning, match="flex_attention uses another floating-point tensor"):
        out, f = call(x)
    assert err.is_err(f).all()
    assert not out.any()


def test_a_model_with_torch_cond_is_refused_where_dynamo_would_lose_the_flags(monkeypatch):
    monkeypatch.setattr(graph_plan, "keep_writes_after_calls", lambda: False)
    with pytest.raises(RuntimeError, match=r"cond, after which Dynamo loses.*eager mode"):
        torch.compile(watch(Branching()), backend="eager")(torch.randn(4, 3))


def test_the_garbage_collector_leaves_models_alone_that_only_watch_refers_to():
    guarded, copied = watch(nn.Linear(2, 2)), watch(nn.Linear(2, 2))
    plain, x = unwatch(copy.deepcopy(copied)), torch.ones(1, 2)
    gc.collect()
    assert torch.equal(guarded(x)[0], nn.functional.linear(x, guarded.weight, guarded.bias))
    assert torch.equal(copied(x)[0], plain(x))
