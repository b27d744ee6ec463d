"""Several processes guard a step together: what one process does with all of their samples, without the bad ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchguard import Retry
from torchguard.exceptions import RetryError

WORKER = Path(__file__).with_name("ranks_worker.py")

FEW = [
    "a_sample_that_shows:ddp",
    "a_rank_without_good_samples:ddp",
    "weighted_losses_over_micro_batches:ddp",
    "running_statistics:ddp",
    "without_waiting:ddp",
    "hooks_with_state:ddp",
    "a_sample_that_shows:fsdp2",
    "a_rank_without_good_samples:fsdp2",
    "an_empty_batch:ddp",
]
OF_FOUR = [
    "a_sample_that_shows_only_in_the_gradient",
    "bad_samples_on_every_rank",
    "a_rank_without_good_samples",
    "weighted_losses_over_micro_batches",
    "running_statistics",
    "without_waiting",
]
FOR_BOTH = [
    "an_empty_batch",
    "empty_batches_on_all_ranks",
    "loaders_of_different_lengths",
    "a_sample_that_shows",
    "a_sample_that_shows_only_in_the_gradient",
    "bad_samples_on_every_rank",
    "a_rank_without_good_samples",
    "weighted_losses_over_micro_batches",
    "scalar_losses",
    "running_statistics",
    "micro_batches_leave_no_statistics_of_other_ranks",
    "exceptions_on_one_rank",
    "a_smallest_part",
    "samples_that_cannot_be_trained_alone",
    "all_bad",
    "too_many_bad",
    "a_bad_parameter",
    "optimizers_in_backward",
    "without_waiting",
    "accumulation",
    "frozen_parameters",
    "interrupted",
    "health",
    "statistics_of_all_ranks",
    "twenty_steps",
]
FOR_ONE = [
    "in_join:ddp",
    "no_sync:ddp",
    "exceptions_in_backward_on_one_rank:ddp",
    "buffers_after_a_skipped_step:ddp",
    "parameters_without_gradients:ddp",
    "an_overflow_by_the_scale:ddp",
    "a_static_graph:ddp",
    "unused_parameters:ddp",
    "compiled:ddp",
    "hooks_with_state:ddp",
    "a_batch_that_cannot_be_sent:ddp",
    "a_closure_that_returns_something_else:ddp",
    "after_an_evaluation:fsdp2",
    "gradients_that_are_not_averaged:fsdp2",
    "an_exception_inside_of_a_pass:fsdp2",
    "older_sharding:fsdp1",
]


def run(cases: list[str], size: int, folder: Path, timeout: int) -> None:
    """Run cases in some processes, one start for all of them."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", WORKER, str(rank), str(size), folder, *cases], stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(errors)
    for rank in range(size):
        found = json.loads((folder / f"{rank}.json").read_text())
        failed = [f"rank {rank}, {name}:\n{error}" for name, error in found.items() if error]
        assert not failed, "\n".join(failed)
        assert [*found] == cases


def test_two_ranks(tmp_path):
    run(FEW, 2, tmp_path, timeout=120)


def test_an_empty_batch_in_one_process():
    model = torch.nn.Linear(4, 1)
    with pytest.raises(RetryError, match=r"the batch \(Tensor\) has no samples"):
        Retry(model).backward(lambda x: model(x).squeeze(1), torch.zeros(0, 4))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
class TestBothKinds:
    def test_two_ranks(self, kind, tmp_path):
        run([f"{name}:{kind}" for name in FOR_BOTH], 2, tmp_path, timeout=300)

    def test_four_ranks(self, kind, tmp_path):
        run([f"{name}:{kind}" for name in OF_FOUR], 4, tmp_path, timeout=300)


@pytest.mark.long
def test_cases_of_one_kind(tmp_path):
    run(FOR_ONE, 2, tmp_path, timeout=300)
