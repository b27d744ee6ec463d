"""Lists in a batch: one item per sample, or one for each of several inputs. What cannot be told is refused."""

import copy

import pytest
import torch
from torch import nn

from torchguard import Retry, RetryError

nan = float("nan")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def detection(counts):
    """Images, and for each of them a dict of boxes, as DETR takes them."""
    boxes = [{"boxes": torch.rand(count, 3), "classes": torch.randint(3, (count,))} for count in counts]
    return {"images": torch.randn(len(counts), 3), "labels": boxes}


def detection_loss(model):
    def closure(batch):
        pairs = zip(batch["images"], batch["labels"], strict=True)
        return torch.stack([(model(image) - one["boxes"]).abs().mean() for image, one in pairs]).mean()

    return closure


def without(batch, sample):
    kept = [row for row in range(len(batch["labels"])) if row != sample]
    return {"images": batch["images"][kept], "labels": [batch["labels"][row] for row in kept]}


def assert_equals_the_rest(model, closure_of, spoilt, rest, **options):
    """A guarded backward pass leaves out sample 2, and gives the gradients of the rest."""
    expected = copy.deepcopy(model)
    assert Retry(model, **options).backward(closure_of(model), spoilt).bad == [2]
    closure_of(expected)(rest).mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


@pytest.mark.parametrize("counts", [[2, 2, 2, 2], [1, 4, 3, 2], [4, 4, 2, 4]])
def test_a_dict_of_boxes_for_each_image(model, counts):
    batch = detection(counts)
    spoilt = copy.deepcopy(batch)
    spoilt["labels"][2]["boxes"][1] = nan
    options = {"size": lambda batch: len(batch["images"])}
    assert_equals_the_rest(model, detection_loss, spoilt, without(batch, 2), **options)


def test_sequences_one_of_which_is_as_long_as_the_batch(model):
    sequences = [torch.randn(length, 3) for length in (4, 2, 4, 3)]
    spoilt = copy.deepcopy(sequences)
    spoilt[2][1] = nan
    each = lambda model: lambda b: torch.stack([model(one).square().mean() for one in b["x"]])  # noqa: E731
    batch = {"x": spoilt, "y": torch.randn(4)}
    assert_equals_the_rest(model, each, batch, {"x": [sequences[row] for row in (0, 1, 3)]})


def test_a_list_of_inputs_that_is_as_long_as_the_batch(model):
    views = [torch.randn(3, 3) for _ in range(3)]
    spoilt = [one.clone() for one in views]
    spoilt[0][2] = nan
    each = lambda model: lambda b: sum(model(one).square().mean(1) for one in b["views"])  # noqa: E731
    rest = {"views": [one[:2] for one in views]}
    assert_equals_the_rest(model, each, {"views": spoilt, "y": torch.randn(3)}, rest)


def test_boxes_that_are_more_frequent_than_images_are_not_taken_for_samples(model):
    with pytest.raises(RetryError, match=r"do not tell which are samples \(2\?\)"):
        Retry(model).backward(detection_loss(model), detection([2, 2, 2, 2]))


def test_one_loss_for_lists_of_which_no_other_tensor_tells_the_samples(model):
    closure = lambda b: torch.stack([model(one).square().mean() for one in b["x"]]).mean()  # noqa: E731
    with pytest.raises(RetryError, match="do not tell which are samples"):
        Retry(model).backward(closure, {"x": [torch.randn(2, 3) for _ in range(4)]})


def test_one_loss_and_a_list_that_may_be_either_is_refused_where_it_matters(model):
    batch = detection([4, 4, 4, 4])
    assert Retry(model).backward(detection_loss(model), batch).ok
    batch["labels"][2]["boxes"][1] = nan
    with pytest.raises(RetryError, match="a list of 4 items, as many as it has samples"):
        Retry(model).backward(detection_loss(model), batch)


@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, lambda x: x.to(torch.float8_e4m3fn)])
def test_inputs_that_are_sparse_or_of_eight_bits(model, kind):
    x = torch.randn(6, 3)
    x[2] = nan
    assert Retry(model).backward(lambda x: model(x.to_dense().float()).square().mean(1), kind(x)).bad == [2]


def bags(**numbers):
    """The tokens of four samples one after the other: 2, 1, 3 and 2 of them."""
    batch = {"y": torch.randn(4, 3), "z": torch.zeros(4), "tokens": torch.randn(8, 3), **numbers}
    batch["y"][2] = nan
    return batch


RAGGED = {
    "lengths": torch.tensor([2, 1, 3, 2]),
    "offsets": torch.tensor([0, 2, 3, 6]),
    "ends": torch.tensor([0, 2, 3, 6, 8]),
    "index": torch.tensor([0, 0, 1, 2, 2, 2, 3, 3]),
}


@pytest.mark.parametrize("name", RAGGED)
def test_rows_that_lengths_offsets_or_indices_give_to_samples_are_refused(model, name):
    batch = bags(**{name: RAGGED[name]})
    closure = lambda b: (model(b["tokens"]).mean() - b["y"]).square().mean(1)  # noqa: E731
    with pytest.raises(RetryError, match=f"tokens of the batch has 8 rows for 4 samples, and {name} seems to tell"):
        Retry(model).backward(closure, batch)
    assert Retry(model, shared=["tokens", name]).backward(closure, batch).bad == [2]


@pytest.mark.parametrize(
    "numbers", [[0, 0, 1, 1], [0, 1, 2, 3], [3, 1, 3, 2], [2, 2, 2, 2, 0], [0, 1, 1, 0, 0, 1, 1, 0], [5]]
)
def test_numbers_that_give_rows_to_no_sample(model, numbers):
    closure = lambda b: (model(b["tokens"]).mean() - b["y"]).square().mean(1)  # noqa: E731
    report = Retry(model).backward(closure, bags(numbers=torch.tensor(numbers)))
    assert (report.bad, report.note) == ([2], "")


def test_a_tensor_that_was_passed_whole_is_named_if_the_losses_do_not_show_that_it_belongs_to_no_sample(model):
    closure = lambda b: (model(b["tokens"]).mean() - b["y"]).square().mean()  # noqa: E731
    report = Retry(model, size=lambda b: 4).backward(closure, bags())
    assert report.bad == [2]
    assert report.note.startswith("tokens of the batch was passed whole")
    assert Retry(model, shared=["tokens"]).backward(closure, bags()).note == ""
