"""DDP and FSDP take a watched model as any other: two processes, and what one process does with both batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.watch.parallel_worker import BAD, model_and_batches

WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param("ddp", "plain", marks=pytest.mark.long),
        pytest.param("ddp", "aot_eager", marks=pytest.mark.long),
        pytest.param("ddp, once", "aot_eager", marks=pytest.mark.long),
        ("ddp, once", "inductor"),
        ("fsdp2", "plain"),
        pytest.param("fsdp1", "plain", marks=pytest.mark.long),
    ],
)
def test_one_bad_sample_in_each_process(kind, backend, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", WORKER, kind, backend, str(rank), tmp_path], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=180)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)

    model, batches = model_and_batches()
    for x in batches:
        good = torch.arange(len(x)) != BAD
        (model(x[good]).square().mean(-1).mean() / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["flags"] == "ErrorFlags(3 samples, 2 errors: 1xNAN @ input, 1xFALLBACK_VALUE @ input)"
        for got, want in zip(found["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(got), want.detach().flatten())
