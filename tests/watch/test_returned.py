"""What a watched model returns, and callers that expect the model's own output."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.models import gpt2
from torch import nn
from torch.utils import _pytree as pytree

from torchguard import err, watch
from torchguard.exceptions import ReturnsError, WatchError

X, Y = torch.randn(3, 4), torch.tensor([0, 1, 1])


class TestThePair:
    def test_it_is_a_tuple(self):
        pair = watch(nn.Linear(4, 2))(X)
        out, f = pair
        assert isinstance(pair, tuple)
        assert len(pair) == 2
        assert pair[0] is out
        assert pair[-1] is f
        assert [type(one) for one in (copy.copy(pair), pickle.loads(pickle.dumps(pair)))] == [type(pair)] * 2

    def test_in_a_graph_it_is_a_plain_tuple(self):
        guarded = torch.compile(watch(nn.Linear(4, 2)), backend="aot_eager", fullgraph=True)
        assert type(guarded(X)) is tuple

    def test_tools_of_torch_see_its_tensors(self):
        pair = watch(nn.Linear(4, 2))(X)
        assert len(pytree.tree_leaves(pair)) == 2
        doubled = pytree.tree_map(lambda z: z + z, pair)
        assert torch.equal(doubled[0], pair[0] * 2)
        assert type(doubled) is type(pair)

    def test_it_can_be_given_to_a_compiled_function(self):
        guarded = watch(nn.Linear(4, 2).requires_grad_(False))

        @torch.compile(backend="aot_eager", fullgraph=True)
        def loss(pair):
            out, f = pair
            return err.mean_ok(f, out.square().mean(-1)) + pair[0].sum() * 0

        assert loss(guarded(X)).isfinite()

    def test_transforms_and_checkpoints_take_it(self):
        guarded = watch(nn.Linear(4, 2))
        jacobian, _ = torch.func.jacrev(guarded, has_aux=True)(X)
        assert jacobian.shape == (3, 2, 3, 4)
        out, _ = torch.utils.checkpoint.checkpoint(guarded, X, use_reentrant=False)
        assert out.shape == (3, 2)

    @pytest.mark.parametrize(
        "use",
        [
            lambda pair: F.cross_entropy(pair, Y),
            lambda pair: pair.loss,
            lambda pair: pair["loss"],
            lambda pair: pair.backward(),
            lambda pair: torch.relu(pair),
            lambda pair: nn.Linear(2, 2)(pair),
            lambda pair: pair * 0.5,
            lambda pair: pair - torch.ones(3, 2),
            lambda pair: nn.MSELoss()(pair, torch.ones(3, 2)),
            lambda pair: pair[:, 0],
        ],
    )
    def test_used_as_the_output_it_names_the_remedy(self, use):
        with pytest.raises(ReturnsError, match="returns='output'"):
            use(watch(nn.Linear(4, 2))(X))

    def test_the_error_is_the_one_a_caller_would_guess(self):
        pair = watch(nn.Linear(4, 2))(X)
        assert not hasattr(pair, "loss")
        assert getattr(pair, "logits", None) is None
        assert issubclass(ReturnsError, (AttributeError, TypeError, WatchError))


def model_and_ids():
    torch.manual_seed(0)
    model = gpt2().eval()
    return model, torch.randint(1, 20, (3, 5))


def test_generate_names_the_remedy():
    model, ids = model_and_ids()
    with pytest.raises(ReturnsError, match="returns='output'"):
        watch(model).generate(ids, max_new_tokens=2, do_sample=False)


class TestAForwardThatIsSetLater:
    def test_on_the_plain_model_is_refused_by_the_watched_one(self):
        model = nn.Linear(4, 2)
        guarded = watch(model, returns="output")
        model.forward = torch.compile(model.forward, backend="eager")
        assert model(X).shape == (3, 2)
        with pytest.raises(WatchError, match="was replaced after watch"):
            guarded(X)

    def test_that_calls_the_watched_one_is_fine(self):
        guarded = watch(nn.Linear(4, 2), returns="output")
        guarded.forward = torch.compile(guarded.forward, backend="aot_eager")
        for _ in range(2):
            assert guarded(X).shape == (3, 2)
        assert guarded.run_report().calls == 2


POISON = 49


@pytest.mark.filterwarnings("ignore")
class TestGenerate:
    """Requests of which the second holds a token whose embedding is NaN."""

    def requests(self):
        torch.manual_seed(0)
        model = gpt2(tie_word_embeddings=False, use_cache=True, n_layer=2).eval()
        ids = torch.randint(1, 40, (3, 5))
        return model, ids

    @pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
    @pytest.mark.parametrize(
        "how",
        [
            {"do_sample": False},
            {"do_sample": False, "cache_implementation": "static"},
            {"do_sample": False, "use_cache": False},
            {"do_sample": False, "num_beams": 2},
            {"do_sample": True, "top_k": 5},
        ],
        ids=["greedy", "static", "without", "beams", "sampling"],
    )
    def test_other_requests_get_the_same_tokens(self, how, compiled):
        model, ids = self.requests()
        how = {**how, "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
        how |= {"disable_compile": True, "suppress_tokens": [POISON]}
        torch.manual_seed(1)
        want = model.generate(ids, **how)
        model.transformer.wte.weight.data[POISON] = float("nan")
        bad = ids.clone()
        bad[1, 2] = POISON
        guarded = watch(model, quarantine=True, returns="output")
        if compiled:
            guarded.compile(backend="aot_eager")
        torch.manual_seed(1)
        got = guarded.generate(bad, **how)
        others = [0, 2] if not how["do_sample"] else [0]  # later draws follow those of the bad request
        assert torch.equal(got[others], want[others])
        beams = how.get("num_beams", 1)
        assert {one.sample // beams for one in guarded.history} == {1}
        assert guarded.history[0].step == 0
        assert {one.path for one in guarded.history} == {"transformer.wte"}
        assert guarded.run_report().calls == 4

    def test_a_clean_run_has_no_history(self):
        model, ids = self.requests()
        want = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        guarded = watch(model, returns="output")
        got = guarded.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(got, want)
        assert guarded.run_report().ok

    def test_what_the_plain_model_compiled_for_it_is_not_used(self):
        model, _ = self.requests()
        plain = model.get_compiled_call(None)
        guarded = watch(model, returns="output")
        assert guarded.get_compiled_call(None) is not plain
        assert model.get_compiled_call(None) is plain
