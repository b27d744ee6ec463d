"""`guarded.compile()`, `model.compile()`, and blocks that are compiled one by one."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from torchguard import err, flags, unwatch, watch
from torchguard.exceptions import CompileOnceWarning, WatchError

NAN = float("nan")
# Dynamo asks the arguments of a block, which are no leaves, for their gradient: torch warns, with or without `watch`.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Own(nn.Module):
    """Two parameters, and a fault between them for samples with a large number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 4) * 0.5) for _ in range(2))

    def forward(self, x):
        return ((x @ self.first).square().exp() @ self.second).tanh()


class Blocks(nn.Module):
    def __init__(self, depth=12):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, ids, scale):
        h = self.embed(ids) * scale[:, None]
        for block in self.blocks:
            h = block(h)
        return h


IDS, SCALE = torch.arange(3), torch.tensor([1.0, NAN, 1.0])


def found(f):
    return [[(error.code_name, error.location_name) for error in flags.unpack(f, i)] for i in range(len(f))]


class TestWholeModels:
    def test_the_watched_model_is_compiled_and_the_plain_one_is_not(self):
        model, counter = Blocks(2), CompileCounterWithBackend("aot_eager")
        guarded = watch(model)
        guarded.compile(backend=counter, fullgraph=True)
        out, f = guarded(IDS, SCALE)
        assert counter.frame_count == 1
        assert found(f) == [[], [("NAN", "input")], []]
        assert torch.equal(model(IDS, SCALE)[0], out[0])
        assert counter.frame_count == 1  # the plain model runs in eager mode, and returns a tensor

    def test_the_plain_model_is_compiled_and_the_watched_one_is_watched(self):
        model, counter = Blocks(2), CompileCounterWithBackend("aot_eager")
        guarded = watch(model)
        model.compile(backend=counter)
        assert isinstance(model(IDS, SCALE), torch.Tensor)
        assert counter.frame_count == 1
        assert found(guarded(IDS, SCALE)[1]) == [[], [("NAN", "input")], []]
        assert counter.frame_count == 1

    def test_both_are_compiled_each_on_its_own(self):
        model, counters = Blocks(2), [CompileCounterWithBackend("aot_eager") for _ in range(2)]
        guarded = watch(model, quarantine=True)
        model.compile(backend=counters[0])
        guarded.compile(backend=counters[1])
        for _ in range(2):
            plain, (out, f) = model(IDS, SCALE), guarded(IDS, SCALE)
            assert torch.equal(out[0], plain[0])
            assert not out[1].any()
            assert found(f)[1][0] == ("NAN", "input")
        assert [counter.frame_count for counter in counters] == [1, 1]
        assert unwatch(guarded) is model
        assert isinstance(model(IDS, SCALE), torch.Tensor)

    def test_a_compiled_function_calls_the_watched_model(self):
        guarded = watch(Blocks(2))
        _, f = torch.compile(lambda ids, scale: guarded(ids, scale), backend="aot_eager", fullgraph=True)(IDS, SCALE)
        assert found(f) == [[], [("NAN", "input")], []]

    def test_copies_of_compiled_models_are_watched_and_not_compiled(self):
        counter = CompileCounterWithBackend("aot_eager")
        guarded = watch(Blocks(2))
        guarded._watch.model.compile(backend=counter)
        guarded.compile(backend=counter)
        for other in (copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))):
            assert found(other(IDS, SCALE)[1])[1] == [("NAN", "input")]
        assert counter.frame_count == 0

    @pytest.mark.parametrize(
        ("compile", "what"),
        [
            (lambda model: model.compile(), "this model"),
            (lambda model: model.blocks[1].compile(), "'blocks.1' of this model"),
            (lambda model: model.blocks.__setitem__(0, torch.compile(model.blocks[0])), "'blocks.0' of this model"),
        ],
    )
    def test_a_model_that_was_compiled_before_is_refused(self, compile, what):
        model = Blocks(2)
        compile(model)
        with pytest.raises(WatchError, match=f"{what} is compiled already.*guarded.compile()"):
            watch(model)


def in_place(model, counter):
    for block in model.blocks:
        block.compile(backend=counter)


def replaced(model, counter):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=counter)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("compile", [in_place, replaced])
class TestBlocks:
    def test_they_are_compiled_as_often_as_without_watch(self, compile, backend):
        counts = []
        for watches in (False, True):
            torch._dynamo.reset()
            counter, model = CompileCounterWithBackend(backend), Blocks()
            guarded = watch(model) if watches else model
            compile(model, counter)
            for _ in range(3):  # the first call of a watched model is followed, in eager mode
                guarded(IDS, torch.ones(3))
            counts.append(counter.frame_count)
        assert counts[0] == counts[1] <= 2

    def test_a_fault_inside_is_recorded_where_it_is(self, compile, backend):
        model = Blocks(3)
        guarded = watch(model)
        compile(model, CompileCounterWithBackend(backend))
        model.blocks[1].linear.weight.data[0] = 3e38  # overflows for some samples
        want = watch(Blocks(3))
        want.load_state_dict({name.replace("._orig_mod", ""): z for name, z in model.state_dict().items()})
        for ids in (IDS, IDS + 4):
            out, f = guarded(ids, torch.ones(3))
            wanted, wanted_f = want(ids, torch.ones(3))
            torch.testing.assert_close(out, wanted, equal_nan=True)
            assert found(f) == found(wanted_f)
            assert {one.path for one in guarded.report()} <= {"blocks.1.linear", "blocks.2.norm"}
            out.sum().backward()

    @pytest.mark.filterwarnings("ignore::torchguard.exceptions.CompileOnceWarning")
    def test_in_quarantine_the_results_are_right(self, compile, backend):
        model = Blocks(3)
        model.blocks.append(Own())
        want = copy.deepcopy(model)
        guarded = watch(model, quarantine=True)
        compile(model, CompileCounterWithBackend(backend))
        want(IDS[[0, 2]], torch.ones(2)).sum(-1).mean().backward()
        for fault in (NAN, 1e5, 1e5):
            model.zero_grad()
            out, f = guarded(IDS, torch.tensor([1.0, fault, 1.0]))
            assert err.is_err(f).tolist() == [False, True, False]
            assert not out[1].any()
            torch.testing.assert_close(out[[0, 2]], want(IDS, torch.ones(3))[[0, 2]])
            err.mean_ok(f, out.sum(-1)).backward()
            for got, expected in zip(model.parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-5)

    def test_a_recurrent_block_and_indices(self, compile, backend):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.rnn = nn.Embedding(10, 4), nn.GRU(4, 4, batch_first=True)

            def forward(self, ids):
                return self.rnn(self.embed(ids))[0]

        model = nn.Module()
        model.blocks = nn.ModuleList([Recurrent()])
        model.forward = lambda ids: model.blocks[0](ids)
        guarded = watch(model)
        compile(model, CompileCounterWithBackend(backend))
        _, f = guarded(torch.tensor([[1, 2], [11, 3], [2, -1]]))
        assert [[code for code, _ in sample] for sample in found(f)] == [[], ["OUT_OF_BOUNDS"], ["NEGATIVE_IDX"]]


@pytest.mark.filterwarnings("ignore::torchguard.exceptions.CompileOnceWarning")
@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("compile", [in_place, replaced])
def test_a_checkpoint_around_a_compiled_block_works_from_the_first_call_on(compile, quarantine):
    class Checkpointed(Blocks):
        def forward(self, ids, scale):
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed(2)
    plain = copy.deepcopy(model)
    guarded = watch(model, quarantine=quarantine)
    compile(model, CompileCounterWithBackend("aot_eager"))
    want = plain(IDS, torch.ones(3))
    want.square().sum().backward()
    for _ in range(3):
        model.zero_grad()
        out, f = guarded(IDS, torch.ones(3))
        out.square().sum().backward()
        torch.testing.assert_close(out, want)
        assert not err.is_err(f).any()
        for p, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, of_plain.grad)


def test_in_quarantine_blocks_run_uncompiled_which_is_said():
    for _ in range(2):  # of each model, also of one class
        model, counter = Blocks(2), CompileCounterWithBackend("eager")
        guarded = watch(model, quarantine=True)
        in_place(model, counter)
        with pytest.warns(CompileOnceWarning, match=r"run uncompiled.*guarded.compile\(\)"):
            guarded(IDS, SCALE)
        guarded(IDS, SCALE)
        assert counter.frame_count == 0
