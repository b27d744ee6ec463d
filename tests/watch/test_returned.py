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
