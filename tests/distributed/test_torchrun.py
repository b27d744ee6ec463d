"""The step of a script that `torchrun` starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.torchrun_worker import batch, new_model

pytestmark = pytest.mark.long


def results_of(folder, what):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = Path(__file__).with_name("torchrun_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*launch, worker, folder, what], env=environment, capture_output=True, text=True, check=False)
    return ran, {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_loss_and_gradients_are_those_of_one_process_with_the_good_samples(tmp_path):
    ran, found = results_of(tmp_path, "lives")
    assert ran.returncode == 0, ran.stderr
    model = new_model()
    x = torch.cat([batch(0), batch(1)])
    loss = model(x[x.isfinite().all(1)]).square().mean()
    loss.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    for rank in (0, 1):
        assert found[rank]["loss"] == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(torch.tensor(found[rank]["gradients"], dtype=torch.float64), want)
        assert found[rank]["skips"]


def test_the_others_name_rank_0_that_dies(tmp_path):
    """The agent hosts the store: it is there after any rank has died."""
    ran, found = results_of(tmp_path, "dies")
    assert ran.returncode != 0
    assert found.keys() == {1}, ran.stderr
    assert found[1]["failed"] == [0]
    assert found[1]["message"].startswith("rank 0 died: its process has ended")
