"""Functions for training loops: what the guide's own versions get wrong is right here."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.nn.utils.rnn import pack_sequence

from torchguard import training


class Batch(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    name: str = "train"


class TestFreezing:
    def test_no_step_changes_a_frozen_model(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 3)).sum().backward()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert training.freeze_model(model) is model
        assert not model(torch.randn(4, 3)).requires_grad
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class TestInference:
    def test_each_module_is_in_its_own_mode_again(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)).train()
        model[2].eval()
        with training.inference(model) as same:
            assert same is model
            assert not any(module.training for module in model.modules())
            assert model(torch.ones(3, 2)).is_inference()
        assert [module.training for module in model.modules()] == [True, True, True, False]
        assert not torch.is_inference_mode_enabled()

    def test_also_after_an_exception(self):
        model = nn.Dropout()
        with pytest.raises(ValueError, match="stop"), training.inference(model):
            raise ValueError("stop")
        assert model.training

    def test_models_that_do_more_in_train(self):
        """Adapters merge their weights in `eval`, and split them off in `train`."""

        class Adapter(nn.Module):
            is_merged = False

            def train(self, mode=True):
                self.is_merged = not mode
                return super().train(mode)

        model = Adapter()
        with training.inference(model):
            assert model.is_merged
        assert not model.is_merged


class TestMoving:
    def test_the_dtype_is_applied_on_the_same_device(self):
        assert training.safe_to_device(torch.ones(2), "cpu", torch.float64).dtype == torch.float64

    def test_what_is_there_is_returned_as_it_is(self):
        batch = Batch(torch.ones(2), torch.arange(2))
        assert training.safe_to_device(batch, "cpu") is batch

    def test_pytrees_keep_their_classes_and_indices_their_dtype(self):
        batch = Batch(torch.ones(2), torch.arange(2))
        moved = training.safe_to_device({"a": [batch, (None, 3)], "mask": torch.ones(2).bool()}, "meta", torch.bfloat16)
        found = moved["a"][0]
        assert type(found) is Batch
        assert (found.x.dtype, found.ids.dtype, moved["mask"].dtype) == (torch.bfloat16, torch.int64, torch.bool)
        assert {found.x.device.type, found.ids.device.type, moved["mask"].device.type} == {"meta"}
        assert found.name == "train"
        assert moved["a"][1] == (None, 3)

    def test_packed_sequences_keep_their_sizes_on_the_cpu(self):
        packed = pack_sequence([torch.ones(3), torch.ones(1)])
        moved = training.safe_to_device(packed, "meta")
        assert moved.data.device.type == "meta"
        assert moved.batch_sizes.device.type == "cpu"


class TestProperties:
    def test_of_a_good_tensor(self):
        found = training.check_tensor_properties(torch.tensor([[1.0, -2.0]], requires_grad=True))
        assert found == ((1, 2), torch.float32, torch.device("cpu"), True, -2.0, 1.0)
        assert training.check_tensor_properties(torch.ones(0)).smallest is None
        assert training.check_tensor_properties(torch.tensor([True])).largest is None
        assert training.check_tensor_properties(torch.tensor([3])).largest == 3

    def test_of_a_bad_tensor(self):
        x = torch.ones(2, 3)
        x[1, 2], x[1, 0] = float("nan"), float("-inf")
        with pytest.raises(training.NonFiniteError, match=r"logits: 1 NaN and 1 Inf in 6 .*first at \(1, 0\)"):
            training.check_tensor_properties(x, "logits")
        with pytest.raises(ValueError, match="1 NaN"):
            training.check_tensor_properties(torch.tensor([complex(0, float("nan"))]))

    @pytest.mark.compiled
    def test_in_a_graph(self):
        with pytest.raises(Unsupported, match="flag_nan_and_inf"):  # Dynamo's, of the TracingError
            torch.compile(training.check_tensor_properties, backend="eager", fullgraph=True)(torch.ones(2))
