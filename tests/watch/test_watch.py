"""`watch(model)`: nothing is edited, and every bad sample is found."""

import dataclasses
import math
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

from torchguard import err, flags, unwatch, watch
from torchguard.exceptions import MixedRowsWarning, WatchError

NAN, INF = float("nan"), float("inf")


class Block(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Encoder(nn.Module):
    def __init__(self, depth: int = 2):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 2)

    def forward(self, ids, scale):
        h = self.embed(ids) * scale[:, None, None]
        for block in self.blocks:
            h = block(h)
        return self.head(h)


IDS, SCALE = torch.arange(12).reshape(3, 4) % 10, torch.ones(3)


def found(f):
    """Code names and locations of every sample."""
    return [[(error.code_name, error.location_name) for error in flags.unpack(f, i)] for i in range(f.shape[0])]


def test_a_clean_batch_gives_what_the_model_gives(run):
    net = Encoder()
    out, f = run(watch(net))(IDS, SCALE)
    torch.testing.assert_close(out, net(IDS, SCALE))
    assert not err.any_err(f)


@pytest.mark.inductor
def test_a_bad_sample_is_recorded_where_it_went_bad_first(run):
    guarded = watch(Encoder())
    scale = torch.tensor([1.0, NAN, 1.0])
    assert found(run(guarded)(IDS, scale)[1]) == [[], [("NAN", "input")], []]
    guarded.blocks[1].linear.bias.data.fill_(INF)
    f = run(guarded)(IDS, SCALE)[1]
    assert {name for sample in found(f) for _, name in sample} == {"blocks.1.linear"}


def test_locations_that_propagate_a_fault_are_counted():
    guarded = watch(Encoder())
    guarded(IDS, torch.tensor([1.0, NAN, 1.0]))
    (incident,) = guarded.report()
    assert (incident.sample, incident.path, incident.code) == (1, "input", err.NAN)
    assert incident.times == 7  # the input, five modules behind it, the output
    assert str(incident) == "sample 1: NAN at input scale, position 0, seen at 7 locations"


def test_the_position_within_the_sample():
    class Log(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x.log())

    guarded = watch(Log())
    x = torch.ones(3, 5, 2)
    x[2, 3, 1] = -1.0
    guarded(x)
    assert [(i.sample, i.path, i.position) for i in guarded.report()] == [(2, "layer", 3)]


@pytest.mark.inductor
def test_indices_are_recorded_and_clamped(run):
    ids = IDS.clone()
    ids[0, 1], ids[2, 0] = 10, -1
    out, f = run(watch(Encoder()))(ids, SCALE)
    assert found(f) == [[("OUT_OF_BOUNDS", "embed")], [], [("NEGATIVE_IDX", "embed")]]
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"level": "outputs"}, []),
        ({"level": "blocks"}, ["blocks.0", "blocks.1"]),
        (
            {"level": "modules"},
            ["embed", "blocks.0.norm", "blocks.0.linear", "blocks.1.norm", "blocks.1.linear", "head"],
        ),
        ({"include": "blocks.*"}, ["blocks.0.norm", "blocks.0.linear", "blocks.1.norm", "blocks.1.linear"]),
        ({"include": ["*.norm", "head"]}, ["blocks.0.norm", "blocks.1.norm", "head"]),
        ({"include": "blocks.*", "exclude": "*.norm"}, ["blocks.0.linear", "blocks.1.linear"]),
        ({"level": "outputs", "include": "blocks.1"}, ["blocks.1"]),
    ],
)
def test_what_is_watched(choice, expected):
    guarded = watch(Encoder(), **choice)
    watched = [path for path in guarded._watch.paths[1:-1] if guarded.get_submodule(path)._forward_hooks]
    assert watched == expected
    assert found(guarded(IDS, torch.tensor([1.0, 1.0, INF]))[1])[2] == [("INF", "input")]


def test_only_the_checks_that_are_asked_for_run(run):
    net = Encoder()
    for checks, expected in ((("nan",), []), (("inf",), [("INF", "input")])):
        guarded = watch(net, checks=checks, level="outputs")
        scale = torch.tensor([1.0, INF, 1.0])
        assert found(run(guarded)(IDS, scale)[1])[1][:1] == (expected or [("NAN", "Encoder")])
        unwatch(guarded)


class Pass(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.layer.weight)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("check", "row", "name"),
    [
        ("overflow", [1.0, 3.3e38, 0.0], "OVERFLOW"),
        (("overflow", 0.5), [1.0, 2e38, 0.0], "OVERFLOW"),
        ("zero", [0.0, 0.0, 0.0], "ZERO_OUTPUT"),
        ("constant", [2.0, 2.0, 2.0], "CONSTANT_OUTPUT"),
        ("saturated", [1.0, -0.999, 0.998], "SATURATED"),
        (("big", lambda values: values.amax(-1) > 100), [1.0, 101.0, 2.0], "BIG"),
    ],
)
def test_checks_of_quality(run, check, row, name):
    x = torch.tensor([[1.0, 2.0, 3.0], row, [3.0, 2.0, 1.0]])
    assert found(run(watch(Pass(), checks=(check,)))(x)[1]) == [[], [(name, "layer")], []]


def test_a_warning_is_recorded_where_it_comes_up_first():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Pass(), Pass()

        def forward(self, x):
            return self.two(self.one(x))

    assert found(watch(Twice(), checks=("zero",))(torch.zeros(1, 3))[1]) == [[("ZERO_OUTPUT", "one.layer")]]


def test_a_check_of_ones_own_says_what_it_means(run):
    def spiked(values):
        return values.amax(-1) > 100

    checks = ("nan", ("spike", spiked, "the learning rate is too high"), "zero")
    guarded = watch(Pass(), checks=checks)
    run(guarded)(torch.tensor([[1.0, 101.0, 2.0], [NAN, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    assert [str(incident) for incident in guarded.report()] == [
        "sample 0: SPIKE at layer: the learning rate is too high",
        "sample 1: NAN at input x, position 0, seen at 3 locations",
        "sample 2: ZERO_OUTPUT at layer",
    ]


def test_models_share_the_names_of_checks():
    def never(values):
        return values.amax(-1) > math.inf

    def always(values):
        return values.amax(-1) < math.inf

    x = torch.ones(1, 3)
    guarded = [watch(Pass(), checks=checks) for checks in ([("a", never), ("b", always)], [("b", always)])]
    assert [found(model(x)[1]) for model in guarded] == [[[("B", "layer")]]] * 2


def test_the_output_alone_and_the_flags_beside_it(run):
    net = Encoder()
    guarded = watch(net, returns="output")
    out = run(guarded)(IDS, torch.tensor([1.0, NAN, 1.0]))
    assert out.shape == (3, 4, 2)
    assert found(guarded.flags) == [[], [("NAN", "input")], []]
    assert [str(i) for i in guarded.poll()] == [str(i) for i in guarded.report()]


def test_before_the_first_call_there_is_nothing_to_read():
    guarded = watch(Encoder())
    assert guarded.flags is None
    assert guarded.poll() is None
    assert guarded.report() == []


def test_the_model_itself_goes_on_as_before():
    net = Encoder()
    plain = net(IDS, SCALE)
    guarded = watch(net)
    assert isinstance(guarded, Encoder)
    assert torch.equal(net(IDS, SCALE), plain)
    assert list(guarded.state_dict()) == list(net.state_dict())
    assert [name for name, _ in guarded.named_parameters()] == [name for name, _ in net.named_parameters()]
    guarded.eval()
    assert not net.training
    net.train()
    assert guarded.training
    guarded.double()
    assert net.head.weight.dtype == torch.float64


def test_unwatch_gives_the_model_back():
    net = Encoder()
    guarded = watch(net, quarantine=True)
    guarded.eval()
    assert unwatch(guarded) is net
    assert not net.training
    assert net(IDS, SCALE).shape == (3, 4, 2)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    watch(net)


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Record:
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize(
    "make", [lambda a, b: (a, b), lambda a, b: [a, b], lambda a, b: {"a": a, "b": b}, Named, Record]
)
def test_outputs_keep_their_type(make, quarantine):
    class Two(Pass):
        def forward(self, x):
            return make(self.layer(x), 2 * x)

    x = torch.ones(2, 3)
    guarded = watch(Two(), quarantine=quarantine)
    for call in (guarded, torch.compile(guarded, backend="aot_eager", fullgraph=True)):
        assert type(call(x)[0]) is type(make(x, x))


def test_samples_that_were_flattened_are_told_apart(run):
    class Flat(Pass):
        def forward(self, x):
            return self.layer(x.log().flatten(0, 1)).unflatten(0, x.shape[:2])

    x = torch.ones(3, 4, 3)
    x[1, 2, 0] = -1.0
    assert found(run(watch(Flat()))(x)[1]) == [[], [("NAN", "layer")], []]


def test_a_fault_of_an_unbatched_tensor_counts_for_all_samples(run):
    class Shared(Pass):
        def __init__(self):
            super().__init__()
            self.bias = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) + self.bias(torch.full((5, 3), NAN)).sum(0)

    assert found(run(watch(Shared()))(torch.ones(2, 3))[1]) == [[("NAN", "bias")], [("NAN", "bias")]]


def test_samples_along_another_dim(run):
    x = torch.ones(5, 2, 3)
    x[4, 1, 0] = NAN
    assert found(run(watch(Pass(), batch_dim=1))(x)[1]) == [[], [("NAN", "input")]]


def test_more_locations_than_ids_keep_their_paths_in_the_report():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(1_200))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    net = Deep()
    net.layers[1_150].weight.data.fill_(NAN)
    guarded = watch(net)
    _, f = guarded(torch.ones(2, 1))
    assert err.is_err(f).all()
    assert [incident.path for incident in guarded.report()] == ["layers.1150"] * 2


def test_batch_norm_under_quarantine_is_warned_of():
    x = torch.randn(3, 2)
    guarded = watch(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), quarantine=True)
    with pytest.warns(MixedRowsWarning, match=r"Sequential may mix samples of a batch \(aten.native_batch_norm"):
        guarded(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded(x)  # once is enough
        guarded.eval()(x)
        watch(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: watch(3), "expected an nn.Module, got int"),
        (lambda: watch(watch(Encoder())), "watched already"),
        (lambda: watch(torch.compile(Encoder())), "Watch first"),
        (lambda: watch(Encoder(), level="layers"), "level is 'layers'"),
        (lambda: watch(Encoder(), include="nope.*"), "matches no module"),
        (lambda: watch(Encoder(), returns="flags"), "returns is 'flags'"),
        (lambda: watch(Encoder(), checks=("nans",)), "checks has 'nans'"),
        (lambda: watch(Encoder(), checks=(("overflow", 2.0),)), "share of the largest"),
        (lambda: watch(Encoder(), checks=[(f"own{i}", torch.isnan) for i in range(4)]), "no code is left for 'own3'"),
        (lambda: watch(Encoder(), checks=[("", torch.isnan)]), "checks has"),
        (lambda: unwatch(Encoder()), "is not watched"),
        (lambda: watch(Pass())(3), "no argument is a tensor"),
        (lambda: watch(Pass())(torch.tensor(1.0)), "no argument is a tensor with a dim 0"),
        (lambda: watch(Pass())(torch.ones(2, 3).to_sparse()), "torch.sparse_coo tensor"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(WatchError, match=message):
        make()


def test_a_forward_set_on_the_instance_is_watched(run):
    """As tools do that put layers on devices, or adapters into models."""
    model = Pass()
    plain = model.forward
    model.forward = lambda x: plain(x) * 2
    guarded = watch(model)
    x = torch.tensor([[1.0, 2.0, 3.0], [NAN, 1.0, 1.0]])
    out, f = run(guarded)(x)
    assert found(f) == [[], [("NAN", "input")]]
    assert torch.equal(out[0], 2 * x[0])
    assert torch.equal(unwatch(guarded)(x)[0], 2 * x[0])


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize(("ids", "code"), [([0, 6, 1], "OUT_OF_BOUNDS"), ([0, -1, 1], "NEGATIVE_IDX")])
def test_unbatched_indices_count_for_all_samples(run, ids, code, quarantine):
    class Positions(Pass):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 3)

        def forward(self, x):
            return self.layer(x) + self.table(torch.tensor(ids)).sum(0)

    out, f = run(watch(Positions(), quarantine=quarantine))(torch.ones(2, 3))
    assert all((code, "table") in row for row in found(f))
    assert bool(out.any()) != quarantine


def test_an_unbatched_fault_counts_for_all_samples_where_only_nan_is_checked(run):
    class Summed(Pass):
        def forward(self, x):
            return self.layer(x).sum(0).square().neg().log()

    guarded = watch(Summed(), checks=("nan",))
    assert found(run(guarded)(torch.ones(2, 3))[1]) == [[("NAN", "Summed")]] * 2


def test_an_input_that_the_model_writes_to_is_checked_before(run):
    class Overwritten(Pass):
        def forward(self, x):
            y = self.layer(x)
            x.fill_(1.0)
            return y

    class Spoilt(Pass):
        def forward(self, x):
            x[:, 0] = NAN
            return self.layer(x)

    x = torch.ones(3, 3)
    x[1], x[2, 0] = NAN, INF
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert found(run(watch(Overwritten()))(x.clone())[1]) == [[], [("NAN", "input")], [("INF", "input")]]
            assert found(run(watch(Spoilt()))(torch.ones(2, 3))[1]) == [[("NAN", "layer")]] * 2


def test_an_unbatched_argument_may_hold_inf(run):
    class Scored(Pass):
        def forward(self, x, scores):
            return self.layer(x) + scores.exp().sum()

    assert found(run(watch(Scored()))(torch.ones(2, 3), torch.full((7, 3), -INF))[1]) == [[], []]


def test_a_call_that_fails_leaves_nothing_open():
    guarded = watch(Encoder())
    with pytest.raises(RuntimeError):
        guarded(IDS, torch.ones(7))
    assert found(guarded(IDS, torch.tensor([NAN, 1.0, 1.0]))[1])[0] == [("NAN", "input")]


def test_recompiles_are_those_of_the_plain_model():
    counts = []
    for model in (Encoder(), watch(Encoder()), watch(Encoder(), quarantine=True)):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for batch in (2, 3, 4, 5):
            compiled(torch.ones(batch, 4, dtype=torch.int64), torch.ones(batch))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2]


def test_gradients_are_bit_equal_while_all_is_clean(run):
    gradients = []
    for wrap in (lambda net: net, watch):
        torch.manual_seed(0)
        net = Encoder()
        out = run(wrap(net))(IDS, SCALE)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
