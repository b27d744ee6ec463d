"""Ranks that are told by environment variables and not by `torchrun`: gloo on the CPU, NCCL on a GPU.

NCCL refuses two ranks on one GPU of one machine. With one GPU, each rank says that it is on a machine of its own: they
send by sockets, as between machines.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long
ON_ONE_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"), "0"),
}
ROOT = Path(__file__).parents[2]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def started(check, device, size):
    """Start the ranks of a check, and wait for them."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ranks = []
    for rank in range(size):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        environment |= {name: str(value) for name, value in told.items()}
        if device == "cuda":
            environment |= {**ON_ONE_GPU, "NCCL_HOSTID": f"machine {rank}"} if torch.cuda.device_count() < size else {}
        command = [sys.executable, "-m", "tests.distributed.backend_worker", check, device]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    try:
        return [(process.communicate(timeout=300)[0], process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("check", ["eager", "training"])
def test_two_ranks_compute_what_gloo_and_one_process_do(check, device):
    assert_all_pass(check, device, 2)


@pytest.mark.gpu
@NEEDS_GPU
def test_nccl_in_a_graph():
    assert_all_pass("graph", "cuda", 1)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("check", ["eager", "training"])
def test_nccl_with_one_rank_that_sends_to_itself(check):
    assert_all_pass(check, "cuda", 1)


def assert_all_pass(check, device, size):
    found = started(check, device, size)
    assert [code for _, code in found] == [0] * size, "\n".join(text for text, _ in found)


def test_the_error_names_the_rank_that_died():
    """With gloo. Under NCCL a rank waits on the GPU, where no error reaches it."""
    (text, code), (_, killed) = started("death", "cpu", 2)
    assert code == 0, text
    assert killed < 0
