"""`compile_once`: blocks that are alike are compiled once, and nothing else is different."""

import copy
import functools
import gc
import pickle
import re

import pytest
import torch
from tests.models import Residual
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch._functorch import config as functorch_settings
from torch._inductor import config as inductor_settings
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchguard import err, flags
from torchguard._torch.region_calls import REGION
from torchguard._watch import regions, replace, unwatch, watch
from torchguard._watch.gradient_probes import CallOrigins, CallProbes
from torchguard.exceptions import CompileOnceWarning, WatchError

NAN = float("nan")
BATCH, TOKENS, WIDTH = 4, 3, 8

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks or [Block() for _ in range(4)]), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def settings_as_they_were():
    with (
        functorch_settings.patch(donated_buffer=True),
        inductor_settings.patch(inplace_buffers=True, allow_buffer_reuse=True),
    ):
        yield


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request):
    return request.param


def sample(bad=()):
    x = torch.randn(BATCH, TOKENS, WIDTH)
    for row in bad:
        x[row, 1, 2] = NAN
    return x


def outcome(model, x, backend, **settings):
    """The results of a call and a backward pass: output, flags, report, gradients and faults created in backward."""
    model = copy.deepcopy(model)
    guarded = watch(model, **settings)
    out, f = torch.compile(guarded, backend=backend, fullgraph=True)(x)
    out = out[0] if isinstance(out, tuple) else out
    if settings.get("quarantine"):
        err.mean_ok(f, out.square().flatten(1).mean(-1)).backward()
    else:
        out.nan_to_num().square().mean().backward()
    created = guarded.backward_flags
    created = created if created is None else flags.repr(created)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return out, flags.repr(f), [str(one) for one in guarded.report()], grads, created


def regions_of(model, x, **settings):
    """How often a region is called in the graph of a model, and how many there are."""
    backend = AotEagerAndRecordGraphs()
    torch.compile(watch(model, **settings), backend=backend, fullgraph=True)(x)
    (graph,) = backend.graphs
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    return len(calls), len({node.args[1] for node in calls})


def assert_same_outcome(one, two):
    torch.testing.assert_close(one[0], two[0], equal_nan=True)
    assert one[1] == two[1]
    assert one[2] == two[2]
    torch.testing.assert_close(one[3], two[3], equal_nan=True)
    assert one[4] == two[4]


@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
def test_it_changes_nothing_but_what_is_compiled(backend, quarantine):
    model, x = Stack(), sample(bad=[1])
    one, two = (outcome(model, x, backend, quarantine=quarantine, compile_once=once) for once in (False, True))
    assert_same_outcome(one, two)
    assert one[2]


@pytest.mark.parametrize("quarantine", [False, True])
def test_blocks_that_are_alike_are_one_region(quarantine):
    x = sample().requires_grad_()
    assert regions_of(Stack(), x, quarantine=quarantine, compile_once=True) == (4, 1)


@pytest.mark.long
def test_more_blocks_are_not_traced_more_often(monkeypatch):
    traced = []
    original = replace._replace
    monkeypatch.setattr(replace, "_replace", lambda *args: traced.append(1) or original(*args))

    def times(blocks):
        torch._dynamo.reset()
        traced.clear()
        outcome(Stack(*(Block() for _ in range(blocks))), sample(), "aot_eager", quarantine=True, compile_once=True)
        return len(traced)

    assert times(8) == times(4)


def test_blocks_that_are_not_alike_are_several():
    class Wide(Block):
        def forward(self, x):
            return super().forward(x).tanh()

    blocks = [kind() for kind in (Block, Wide) for _ in range(3)]
    assert regions_of(Stack(*blocks), sample().requires_grad_(), compile_once=True) == (6, 2)


def test_without_it_nothing_is_a_region():
    assert regions_of(Stack(), sample(), compile_once=False) == (0, 0)


@pytest.mark.parametrize("level", [pytest.param("outputs", marks=pytest.mark.long), "blocks"])
@pytest.mark.long
def test_at_every_level(backend, level):
    model, x = Stack(), sample(bad=[2])
    settings = {"level": level, "quarantine": True}
    assert_same_outcome(*(outcome(model, x, backend, compile_once=once, **settings) for once in (False, True)))


def test_a_fault_in_a_block_is_reported_at_its_module(backend):
    model = Stack()
    with torch.no_grad():
        model.blocks[2].up.bias[0] = NAN
    guarded = watch(model, compile_once=True)
    torch.compile(guarded, backend=backend, fullgraph=True)(sample())
    assert {incident.path for incident in guarded.report()} == {"blocks.2.up"}


@pytest.mark.inductor
@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_a_block_saves_for_its_backward_pass_is_not_written_over(backend, quarantine):
    model, x = Residual(), sample()
    model(x).square().flatten(1).mean(-1).mean().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.testing.assert_close(outcome(model, x, backend, quarantine=quarantine, compile_once=True)[3], want)


@pytest.mark.long
def test_a_model_that_was_pickled_has_right_gradients():
    model, x = Residual(), sample()
    pickled = pickle.dumps(watch(model, compile_once=True))
    inductor_settings.inplace_buffers = inductor_settings.allow_buffer_reuse = True  # as in another process
    model(x).square().mean().backward()
    twin = pickle.loads(pickled)
    torch.compile(twin, fullgraph=True)(x)[0].square().mean().backward()
    torch.testing.assert_close([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


class Root(nn.Module):
    """The gradient of a root at 0 is Inf; by `at` it is 0 in some samples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x).abs().sqrt())


def test_a_fault_created_in_backward_is_reported_at_its_module(backend):
    model = nn.Sequential(Root(), nn.Tanh(), Root(), nn.Tanh(), Root())
    with torch.no_grad():
        model[2].second.bias.zero_()
        model[2].second.weight.zero_()
    guarded = watch(model, quarantine=True, compile_once=["0", "2", "4"])
    x = torch.randn(BATCH, WIDTH)
    out, f = torch.compile(guarded, backend=backend, fullgraph=True)(x)
    assert err.is_ok(f).all()
    out.sum().backward()
    assert flags.repr(guarded.backward_flags) == f"ErrorFlags({BATCH} samples, {BATCH} errors: {BATCH}xNAN @ 4.first)"
    assert all(p.grad.isfinite().all() for p in model.parameters())


def all_probes():
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, (CallProbes, CallOrigins))]


def test_calls_leave_nothing_behind():
    before = all_probes()
    compiled = torch.compile(watch(Stack(), quarantine=True, compile_once=True), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(sample())[0].sum().backward()
    assert len(all_probes()) <= len(before)


def test_two_calls_and_one_backward_pass():
    model = Stack()
    guarded = watch(model, quarantine=True, compile_once=True)
    compiled = torch.compile(guarded, backend="aot_eager", fullgraph=True)
    (one, f), (two, g) = compiled(sample(bad=[0])), compiled(sample(bad=[3]))
    (err.mean_ok(f, one.mean((1, 2))) + err.mean_ok(g, two.mean((1, 2)))).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert err.is_ok(guarded.backward_flags).all()


class Passing(nn.Module):
    """Returns what it was given, beside what it made."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        return self.inner(x) * mask, mask, None


class Handing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(3))

    def forward(self, x):
        mask = (x[..., :1] > 0).to(x.dtype)
        for block in self.blocks:
            x, mask, _ = block(x, mask=mask)
        return x, mask


def test_a_block_may_return_what_it_was_given(backend):
    model, x = Handing(), sample(bad=[0])
    assert_same_outcome(*(outcome(model, x, backend, quarantine=True, compile_once=once) for once in (False, True)))


class Parting(Passing):
    def forward(self, x, mask=None):
        return {"x": self.inner(x) * mask, "mask": mask}


@pytest.mark.long
def test_a_block_may_return_what_it_was_given_in_a_dict():
    class Handing(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Parting() for _ in range(3))

        def forward(self, x):
            parts = {"x": x, "mask": (x[..., :1] > 0).to(x.dtype)}
            for block in self.blocks:
                parts = block(**parts)
            return parts["x"]

    model, x = Handing(), sample(bad=[0])
    assert_same_outcome(*(outcome(model, x, "aot_eager", quarantine=True, compile_once=once) for once in (False, True)))


class Indexing(nn.Module):
    """A block with a table of its own."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x + self.table(x[..., 0].nan_to_num().round().long()))


@pytest.mark.long
def test_indices_and_checks_of_your_own_within_blocks(backend):
    model, x = Stack(*[Indexing() for _ in range(3)]), torch.zeros(BATCH, TOKENS, WIDTH)
    x[2, 0, 0] = 7.0
    checks = ["nan", "inf", "indices", "zero", ("large", lambda z: z > 0.5, "is large")]
    one, two = (outcome(model, x, backend, checks=checks, compile_once=once) for once in (False, True))
    assert_same_outcome(one, two)
    assert any("OUT_OF_BOUNDS at blocks.0.table" in line for line in one[2])


@pytest.mark.parametrize("quarantine", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.long
def test_a_checkpoint_around_blocks(backend, quarantine):
    class Saving(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    model, x = Saving(), sample(bad=[1])
    settings = {"quarantine": quarantine}
    assert_same_outcome(*(outcome(model, x, backend, compile_once=once, **settings) for once in (False, True)))


@pytest.mark.long
def test_sizes_that_change_along_another_dim():
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    guarded = watch(Stack(), quarantine=True, batch_dim=1, compile_once=True)
    call = torch.compile(guarded, backend=backend, fullgraph=True)
    for size in (5, 6, 7, 9):
        x = torch.randn(TOKENS, size, WIDTH)
        torch._dynamo.mark_dynamic(x, 1)
        out, f = call(x)
        err.mean_ok(f, out.square().mean((0, 2))).backward()
        assert err.is_ok(guarded.backward_flags).tolist() == [True] * size
    assert backend.frame_count == 1


@pytest.mark.long
def test_sizes_that_change_are_compiled_as_often_as_without():
    counts = []
    for once in (False, True):
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("aot_eager")
        guarded = watch(Stack(), quarantine=True, compile_once=once)
        compiled = torch.compile(guarded, backend=backend, fullgraph=True)
        for size in (4, 6, 5, 9):
            x = torch.randn(size, TOKENS, WIDTH)
            x[size - 1] = NAN
            out, f = compiled(x)
            assert err.is_err(f).nonzero().flatten().tolist() == [size - 1]
            out.sum().backward()
        counts.append(backend.frame_count)
    assert counts[0] == counts[1] == 2


def test_in_eager_mode_it_is_as_without():
    model, x = Stack(), sample(bad=[3])
    reports = []
    for once in (False, True):
        guarded = watch(copy.deepcopy(model), quarantine=True, compile_once=once)
        out, f = guarded(x)
        out.sum().backward()
        reports.append((out, flags.repr(f), [str(one) for one in guarded.report()]))
    torch.testing.assert_close(reports[0][0], reports[1][0])
    assert reports[0][1:] == reports[1][1:]


def test_the_model_goes_on_as_before_and_unwatch_leaves_no_trace():
    model, x = Stack(), sample()
    expected, keys = model(x), [*model.state_dict()]
    guarded = watch(model, compile_once=True)
    assert torch.equal(model(x), expected)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    assert [*guarded.state_dict()] == keys
    plain = unwatch(guarded)
    assert plain is model
    assert all(REGION not in block.__dict__ for block in plain.blocks)


def test_a_forward_of_the_instance_is_kept():
    model, x = Stack(), sample()
    own = model.blocks[1].forward = lambda x: x * 2
    expected = model(x)
    guarded = watch(model, compile_once=True)
    out, _ = torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out, expected)
    assert unwatch(guarded).blocks[1].__dict__["forward"] is own


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.long
def test_a_copy_has_regions_of_its_own(copied):
    guarded = watch(Stack(), compile_once=True)
    twin = copied(guarded)
    with torch.no_grad():
        twin.head.weight.fill_(NAN)
        twin.blocks[0].down.bias.fill_(NAN)
    x = sample()
    _, f = torch.compile(twin, backend="aot_eager", fullgraph=True)(x)
    assert err.is_err(f).all()
    assert {incident.path for incident in twin.report()} == {"blocks.0.down"}
    _, f = torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
    assert err.is_ok(f).all()


def test_patterns_choose_the_blocks():
    assert regions_of(Stack(), sample().requires_grad_(), compile_once="blocks.[123]") == (3, 1)


def test_a_block_with_a_batch_norm_is_left_as_it_is():
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(TOKENS)

    x = sample().requires_grad_()
    assert regions_of(Stack(Block(), Block(), Normed(), Normed()), x, compile_once=True) == (2, 1)


class Stages(nn.Module):
    """A list of lists, and modules that all blocks are handed."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.stages = nn.ModuleList(nn.ModuleList(Handed() for _ in range(2)) for _ in range(2))

    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x, self.shared)
        return x


class Handed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shared):
        return self.inner(shared(x).abs().sqrt())


def test_lists_of_lists():
    x = sample().requires_grad_()
    assert regions_of(Stages(), x, compile_once=True) == (4, 1)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"compile_once": True}, {"level": "blocks"}])
def test_a_block_in_two_lists(settings):
    class Twice(Stack):
        def __init__(self):
            super().__init__()
            self.again = nn.ModuleList([self.blocks[0], Block()])

        def forward(self, x):
            for block in self.again:
                x = block(x)
            return super().forward(x)

    model, x = Twice(), sample(bad=[2])
    found = [outcome(model, x, "aot_eager", **one) for one in ({**settings, "compile_once": False}, settings)]
    assert_same_outcome(*found)
    assert "NAN at input" in found[0][2][0]


@pytest.mark.long
def test_a_module_that_a_block_is_handed(backend):
    model, x = Stages(), sample(bad=[1])
    with torch.no_grad():
        model.shared.weight[0] = 0  # the gradient of a root at 0 is not finite
    one, two = (outcome(model, x, backend, quarantine=True, compile_once=once) for once in (False, True))
    assert_same_outcome(one[:4] + (None,), two[:4] + (None,))
    assert "shared" in one[4]
    assert all(grad.isfinite().all() for grad in two[3].values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the probes of a call
@pytest.mark.filterwarnings("ignore::torchguard.exceptions.CompileOnceWarning")  # with quarantine they run uncompiled
@pytest.mark.long
def test_blocks_that_are_compiled_one_by_one():
    created = []
    for once in (False, True):
        model = nn.Sequential(Root(), Root())
        with torch.no_grad():
            model[0].second.weight.zero_()
            model[0].second.bias.zero_()
        guarded = watch(model, quarantine=True, compile_once=once)
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
        out, _ = guarded(torch.randn(BATCH, WIDTH))
        out.sum().backward()
        created.append(flags.repr(guarded.backward_flags))
    assert created[0] == created[1]
    assert "1.first" in created[0]


@pytest.mark.long
def test_a_part_that_is_frozen_is_not_compiled_for_every_size():
    model = Stack(*[Indexing() for _ in range(3)])
    for block in model.blocks:
        block.table.requires_grad_(False)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(watch(model, quarantine=True, compile_once=True), backend=backend, fullgraph=True)
    for size in (4, 6, 5, 9):
        compiled(torch.randn(size, TOKENS, WIDTH))[0].sum().backward()
    assert backend.frame_count == 2


@pytest.mark.long
def test_a_block_may_return_what_it_was_given_in_a_tuple():
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, angles):
            return self.inner(x) * angles[0] + angles[1], angles

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Turning() for _ in range(2))

        def forward(self, x):
            angles = (x.cos(), x.sin())
            for block in self.blocks:
                x, angles = block(x, angles)
            return x

    model, x = Turned(), sample(bad=[0])
    assert_same_outcome(*(outcome(model, x, "aot_eager", quarantine=True, compile_once=once) for once in (False, True)))


@pytest.mark.long
def test_a_part_named_input():
    class Named(Stack):
        def __init__(self):
            super().__init__()
            self.input = Block()

        def forward(self, x):
            return super().forward(self.input(x))

    x = sample().requires_grad_()
    assert regions_of(Named(), x, quarantine=True, compile_once=["blocks.*", "input"]) == (5, 1)


def test_a_part_and_the_whole_are_unwatched_in_any_order():
    model = nn.ModuleDict({"body": Stack()})["body"]
    part = watch(model.blocks[0], compile_once="up")
    whole = watch(model, compile_once="blocks.*.up")
    unwatch(part)
    unwatch(whole)
    assert all(REGION not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("nothing", [False, [], ""])
@pytest.mark.long
def test_nothing_to_compile_once(nothing):
    assert regions_of(Stack(), sample(), compile_once=nothing) == (0, 0)


@pytest.mark.long
def test_of_blocks_within_each_other_the_outer_is_the_region():
    assert regions_of(Stack(), sample().requires_grad_(), compile_once=["blocks.*", "blocks.0"]) == (4, 1)


@pytest.mark.long
def test_a_block_that_shares_a_module_with_another_is_left_as_it_is():
    model = Stack()
    model.blocks[1].up = model.blocks[0].up
    x = sample(bad=[0])
    assert regions_of(copy.deepcopy(model), x.clone().requires_grad_(), compile_once=True) == (3, 1)
    assert_same_outcome(*(outcome(model, x, "aot_eager", quarantine=True, compile_once=once) for once in (False, True)))


@pytest.mark.parametrize(
    ("model", "which", "message"),
    [
        (nn.Linear(2, 2), True, "has no list of modules"),
        (nn.Sequential(nn.BatchNorm1d(2)), True, r"all blocks ('0' is one) have batch norms"),
        (Stack(), "blocks", "compile_once has 'blocks', which matches no module"),
        (Stack(), "layers.*", "compile_once has 'layers.*', which matches no module"),
    ],
)
def test_where_there_is_nothing_to_compile_once_it_says_so(model, which, message):
    with pytest.raises(WatchError, match=re.escape(message)):
        watch(model, compile_once=which)


@pytest.mark.parametrize("how", ["half", "autocast"])
def test_in_float16_blocks_are_compiled_one_by_one_and_gradients_masked(how):
    class Fragile(Block):
        def forward(self, x):
            return x + self.down(self.up(self.norm(x)) - (x.exp() - x.exp()).repeat(1, 1, 2))

    model = Stack(*[Fragile() for _ in range(2)])
    model = model.half() if how == "half" else model
    guarded = watch(model, quarantine=True, compile_once=True)
    call = torch.compile(guarded, backend="aot_eager", fullgraph=True)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float16 if how == "half" else torch.float32)
    x[1] = 100  # exp overflows
    with torch.autocast("cpu", torch.float16, how == "autocast"), pytest.warns(CompileOnceWarning, match="float16"):
        out, f = call(x)
    assert err.is_err(f).tolist() == [False, True, False, False]
    err.mean_ok(f, out.float().square().mean((1, 2))).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


class Viewing(Block):
    """Returns a view of its argument."""

    def forward(self, x):
        return super().forward(x), x[:, :2]


class Writing(Block):
    """Writes to its argument."""

    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


class Caching(Block):
    """Writes to a dict that it is given."""

    def forward(self, x, cache):
        cache[len(cache)] = self.up(x)
        return super().forward(x)


class Passed(Stack):
    """Takes what a block returns first, and gives blocks a cache if they want one."""

    def forward(self, x):
        x, cache = x * 1, {}
        for block in self.blocks:
            x = block(x, cache) if isinstance(block, Caching) else block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x) + sum(one.sum() for one in cache.values())


@pytest.mark.parametrize("kind", [Viewing, Writing, Caching])
@pytest.mark.filterwarnings("ignore::torchguard.exceptions.CompileOnceWarning")
def test_blocks_that_torch_cannot_compile_once_are_compiled_one_by_one(kind):
    model, x = Passed(*[kind() for _ in range(4)]), sample(bad=[1])
    one, two = (outcome(model, x, "aot_eager", compile_once=once) for once in (False, True))
    assert_same_outcome(one, two)


def test_it_says_that_torch_cannot_compile_blocks_once():
    guarded = watch(Passed(*[Viewing() for _ in range(4)]), compile_once=True)
    call = torch.compile(guarded, backend="aot_eager", fullgraph=True)
    with pytest.warns(CompileOnceWarning, match=r"compiling the blocks of Passed once raised an error.*The error: "):
        call(sample())


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.CompileOnceWarning")
@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_block_that_breaks_the_graph():
    class Breaking(Block):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    model, x = Stack(*[Breaking() for _ in range(4)]), sample()
    guarded = watch(copy.deepcopy(model), compile_once=True)
    out, f = torch.compile(guarded, backend="aot_eager")(x)
    torch.testing.assert_close(out, model(x))
    assert err.is_ok(f).all()


def test_a_backend_that_refuses_regions_gets_a_graph_without():
    refused = []

    def backend(graph, inputs):
        if any(node.target is torch.ops.higher_order.invoke_subgraph for node in graph.graph.nodes):
            refused.append(graph)
            raise NotImplementedError("no regions here")
        return graph.forward

    model, x = Stack(), sample(bad=[2])
    guarded = watch(copy.deepcopy(model), compile_once=True)
    with pytest.warns(CompileOnceWarning, match="no regions here"):
        out, f = torch.compile(guarded, backend=backend, fullgraph=True)(x)
    assert len(refused) == 1
    assert err.is_err(f).tolist() == [False, False, True, False]
    torch.testing.assert_close(out, model(x), equal_nan=True)


def test_an_error_of_the_model_itself_stays_that_error():
    class Wrong(Block):
        def forward(self, x):
            return self.up(self.up(x))

    guarded = watch(Stack(*[Wrong() for _ in range(4)]), compile_once=True)
    with pytest.raises(Exception, match=r"same reduction dim|shapes"), pytest.warns(CompileOnceWarning):
        torch.compile(guarded, backend="aot_eager", fullgraph=True)(sample())


@pytest.fixture
def chosen_on_the_cpu(monkeypatch):
    """Have `watch` choose blocks of any size on the CPU."""
    monkeypatch.setattr(regions, "_DEVICES", ("cpu",))
    monkeypatch.setattr(regions, "_MANY_WEIGHTS", 0)
    monkeypatch.setattr(regions, "_MANY_PRODUCTS", 0)


def test_watch_compiles_equal_blocks_once_where_there_are_no_gradients(chosen_on_the_cpu):
    with torch.no_grad():
        assert regions_of(Stack(), sample()) == (4, 1)
        assert regions_of(Stack(), sample(), quarantine=True) == (4, 1)
    assert regions_of(Stack(), sample().requires_grad_()) == (0, 0)


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_watch_compiles_once_has_the_same_outcome(chosen_on_the_cpu, backend, quarantine, mode):
    model, x = Stack().eval(), sample(bad=[1])
    found = []
    for once in (False, None):
        torch._dynamo.reset()
        guarded = watch(copy.deepcopy(model), quarantine=quarantine, compile_once=once)
        with mode():
            out, f = torch.compile(guarded, backend=backend, fullgraph=True)(x)
            found.append((out, flags.repr(f), [str(one) for one in guarded.report()]))
    torch.testing.assert_close(found[0][0], found[1][0], equal_nan=True)
    assert found[0][1:] == found[1][1:]
    assert found[0][2]


@pytest.mark.parametrize(
    "least",
    [{"_MANY_WEIGHTS": 10**3}, {"_MANY_PRODUCTS": 10**6}, {"_DEVICES": ("cuda",)}],
    ids=lambda one: next(iter(one)),
)
def test_watch_does_not_compile_small_blocks_once(chosen_on_the_cpu, monkeypatch, least):
    for name, value in least.items():
        monkeypatch.setattr(regions, name, value)
    with torch.no_grad():
        assert regions_of(Stack(), sample()) == (0, 0)


def test_watch_does_not_compile_few_blocks_once(chosen_on_the_cpu):
    with torch.no_grad():
        assert regions_of(Stack(*[Block() for _ in range(3)]), sample()) == (0, 0)


def test_watch_is_silent_where_torch_cannot_compile_once_what_watch_chose(chosen_on_the_cpu, recwarn):
    model, x = Passed(*[Viewing() for _ in range(4)]).eval(), sample(bad=[3])
    guarded = watch(copy.deepcopy(model))
    with torch.no_grad():
        out, f = torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out, model(x), equal_nan=True)
    assert err.is_err(f).tolist() == [False, False, False, True]
    assert not [one for one in recwarn if one.category is CompileOnceWarning]


def test_quarantine_within_regions_only_checks_where_that_is_enough(chosen_on_the_cpu):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def operations():
        modules = [module for module in graphs[-1].modules() if isinstance(module, torch.fx.GraphModule)]
        return [node for module in modules for node in module.graph.nodes if "replace_nonfinite" in str(node.target)]

    for grad, once in ((False, None), (True, True)):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            call = torch.compile(watch(Stack(), quarantine=True, compile_once=once), backend=keep, fullgraph=True)
            call(sample())
        assert operations()
        assert {node.args[12] for node in operations()} == {not grad}


class Running(Stack):
    """Runs its blocks in a way of its own."""

    def __init__(self, run, *blocks):
        super().__init__(*blocks)
        self.run = run

    def forward(self, x):
        return self.head(self.run(self.blocks, x))


def assert_once_changes_nothing(model, x, **how):
    """The outputs, flags, reports and gradients of a watched model, with and without regions."""
    found = []
    for once in (False, None, True):
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        guarded = watch(copied, compile_once=once, **how)
        with torch.no_grad():
            inference = torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
        out, f = torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
        err.mean_ok(f, out.square().mean((1, 2))).backward()
        grads = [None if p.grad is None else p.grad.clone() for p in copied.parameters()]
        found.append((inference[0], out, grads, flags.repr(f), flags.repr(inference[1])))
    for other in found[1:]:
        torch.testing.assert_close(found[0][:2], other[:2], rtol=0, atol=0, equal_nan=True)
        assert [one is None for one in found[0][2]] == [one is None for one in other[2]]
        given = [(a, b) for a, b in zip(found[0][2], other[2], strict=True) if a is not None]
        torch.testing.assert_close(*map(list, zip(*given, strict=True)), equal_nan=True)
        assert found[0][3:] == other[3:]


def one_by_one(blocks, x):
    for block in blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_wrapped_forward_is_called_once(chosen_on_the_cpu, quarantine, late):
    model = Running(one_by_one, *[Block() for _ in range(4)])

    def wrap():
        for block in model.blocks:
            block.forward = functools.partial(lambda old, x: old(x) + 1, block.forward)

    x, outcomes = sample(bad=[1]), []
    if not late:
        wrap()
    for once in (False, None, True):
        guarded = watch(model, quarantine=quarantine, compile_once=once)
        call = torch.compile(guarded, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            if late:
                call(x)
                wrap()
            outcomes.append(call(x)[0])
        model = unwatch(guarded)
        torch._dynamo.reset()
        if late:
            for block in model.blocks:
                del block.forward
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0], equal_nan=True)


class Returning(Block):
    """Returns what it is given beside its output."""

    def forward(self, x, state):
        return super().forward(x) + state[:, :, :1], {"state": state, "x": x}


def write_to_what_was_returned(blocks, x):
    state = torch.zeros_like(x)
    for i, block in enumerate(blocks):
        x, returned = block(x, state)
        returned["state"][:, :, i] = i + 1.0
    return x + state


def write_to_what_was_given(blocks, x):
    state = torch.zeros_like(x)
    for i, block in enumerate(blocks):
        x, returned = block(x, state)
        state[:, :, i] = i + 1.0
        x = x + returned["state"]
    return x


def ask_for_identity(blocks, x):
    state, same = torch.zeros_like(x), 0
    for block in blocks:
        x, returned = block(x, state)
        same += returned["state"] is state
    return x * same


class Skipped(Block):
    def forward(self, x):
        return x


def write_behind_a_skipped_block(blocks, x):
    for block in blocks:
        before = x = x * 1
        x = block(x)
        x += 1
        x = x + before
    return x


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (write_to_what_was_returned, Returning),
        (write_to_what_was_given, Returning),
        (ask_for_identity, Returning),
        (write_behind_a_skipped_block, Skipped),
    ],
)
@pytest.mark.filterwarnings(
    "ignore::torchguard.exceptions.CompileOnceWarning"
)  # torch saves all that a region is given
def test_an_argument_that_a_block_returns_is_that_argument(chosen_on_the_cpu, run, kind, quarantine):
    model = Running(run, *[kind() for _ in range(4)])
    assert_once_changes_nothing(model, sample(bad=[2]), quarantine=quarantine)


def half_of_them_in_autocast(first):
    def run(blocks, x):
        for i, block in enumerate(blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=(i < 2) == first):
                x = block(x).float()
        return x

    return run


def half_of_them_without_gradients(first):
    def run(blocks, x):
        between = []
        for i, block in enumerate(blocks):
            with torch.set_grad_enabled((i < 2) != first):
                x = block(x)
            between.append(x)
        return one_by_one(blocks, x) if first else between[1] + one_by_one(blocks, x)

    return run


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("half", [half_of_them_in_autocast, half_of_them_without_gradients])
@pytest.mark.parametrize("quarantine", [False, pytest.param(True, marks=pytest.mark.long)])
def test_blocks_under_other_states_of_torch_are_not_one(chosen_on_the_cpu, half, first, quarantine):
    model = Running(half(first), *[Block() for _ in range(4)])
    assert_once_changes_nothing(model, sample(bad=[2]), quarantine=quarantine)


def use_no_gradients_of_the_first_time(blocks, x):
    return one_by_one(blocks, one_by_one(blocks, x).detach())


# torch 2.11 and 2.12 raise an error for such regions, which are given up.
@pytest.mark.filterwarnings("default::torchguard.exceptions.CompileOnceWarning")
@pytest.mark.parametrize("quarantine", [False, pytest.param(True, marks=pytest.mark.long)])
def test_blocks_whose_gradients_are_not_used(chosen_on_the_cpu, quarantine):
    model = Running(use_no_gradients_of_the_first_time, *[Block() for _ in range(4)])
    assert_once_changes_nothing(model, sample(bad=[2]), quarantine=quarantine)


def test_the_eager_backend_has_gradients():
    model, x = Stack(), sample(bad=[1])
    one, two = (outcome(model, x, "eager", compile_once=once) for once in (False, True))
    assert_same_outcome(one, two)


class Applying(nn.Module):
    """A block with a function of its own."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return x + self.function(self.layer(x))


@pytest.mark.parametrize("is_swapped", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "functions",
    [
        (F.gelu, lambda x: F.gelu(x, approximate="tanh")),
        (lambda x: x.clamp(min=0), lambda x: x.clamp(max=0)),
        (
            lambda x: F.scaled_dot_product_attention(x, x, x),
            lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.0, True),
        ),
        pytest.param((lambda x: x.logsumexp(-1, True), lambda x: x.logsumexp((-1, 1), True)), marks=pytest.mark.long),
        pytest.param((lambda x: x.flip(1), lambda x: x.flip(1, 2)), marks=pytest.mark.long),
        pytest.param((lambda x: x.round(), lambda x: x.round(decimals=1)), marks=pytest.mark.long),
        pytest.param((lambda x: x * 0.0, lambda x: x * -0.0), marks=pytest.mark.long),
    ],
    ids=["gelu", "clamp", "attention", "logsumexp", "flip", "round", "zero"],
)
def test_blocks_that_differ_in_an_optional_argument_are_not_one(chosen_on_the_cpu, functions, is_swapped):
    functions = functions[::-1] if is_swapped else functions
    model = Running(one_by_one, *[Applying(functions[i % 2]) for i in range(4)])
    assert_once_changes_nothing(model, sample(), quarantine=True)


class Adding(Block):
    """Adds to its argument, and returns it."""

    def forward(self, x):
        x += self.down(F.gelu(self.up(self.norm(x))))
        return x


def add_what_came_before(blocks, x):
    x = x * 1
    for block in blocks:
        x = block(x) + x
    return x


def test_blocks_that_write_to_an_argument_are_compiled_one_by_one(chosen_on_the_cpu, backend):
    model, x = Running(add_what_came_before, *[Adding() for _ in range(4)]), sample()
    with torch.no_grad():
        want = model(x)
        torch.testing.assert_close(torch.compile(watch(copy.deepcopy(model)), backend=backend)(x)[0], want)
        call = torch.compile(watch(copy.deepcopy(model), compile_once=True), backend=backend)
        with pytest.warns(CompileOnceWarning, match="compiling the blocks of Running once raised an error"):
            torch.testing.assert_close(call(x)[0], want)


class Calling(Block):
    """Has a call of its own, as transformers' layers had that can be checkpointed."""

    def __call__(self, *args):
        return super().__call__(*args)


def call_bound_methods(blocks, x):
    for call in [block.__call__ for block in blocks]:
        x = call(x)
    return x


@pytest.mark.parametrize("level", ["modules", "blocks"])
@pytest.mark.parametrize(
    "model",
    [
        lambda: Stack(),
        lambda: Stack(*[Calling() for _ in range(4)]),
        lambda: Running(call_bound_methods, *[Block() for _ in range(4)]),
    ],
    ids=["usual", "call of its own", "bound methods"],
)
def test_blocks_are_found_however_they_are_called(model, level):
    assert regions_of(model(), sample().requires_grad_(), level=level, compile_once=True) == (4, 1)


@pytest.mark.parametrize("which", [{"level": "outputs"}, {"include": "head"}, {"include": ["blocks.*.second", "head"]}])
def test_a_fault_created_in_backward_where_blocks_are_no_locations(which):
    model, x = Stack(*[Root() for _ in range(4)]), sample()
    with torch.no_grad():
        model.blocks[1].second.weight.zero_()
        model.blocks[1].second.bias.zero_()
    guarded = watch(model, quarantine=True, compile_once=True, **which)
    torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)[0].square().mean().backward()
    assert err.is_err(guarded.backward_flags).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
