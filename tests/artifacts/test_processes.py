"""Several processes capture into one directory, are killed, and run out of disk."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from torchguard import artifacts
from torchguard.artifacts import Store

PROGRAM = """
import sys, torch
from torchguard import artifacts

def mine(graph, inputs):
    return graph.forward

def run(root, backend=mine, rows=range(1, 6), **options):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.sin(x).exp() + 1, backend=backend, dynamic=False)
    with artifacts.capture(root, **options) as captured:
        for n in rows:
            assert torch.equal(compiled(torch.ones(n)), torch.sin(torch.ones(n)).exp() + 1)
    return captured
"""


def start(program, *arguments, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", PROGRAM + program, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.long
def test_two_capture_into_one_directory_at_once(tmp_path):
    free, limited = tmp_path / "free", tmp_path / "limited"
    both = [start("run(sys.argv[1]); run(sys.argv[2], limit='30 KB')", free, limited) for _ in range(2)]
    for process in both:
        finished(process)
    found = list(Store(free))
    assert [one.state for one in found] == ["whole"] * 10
    assert {one.manifest()["pid"] for one in found} == {process.pid for process in both}
    assert {one.state for one in Store(limited)} == {"whole"}
    assert sum(one.size for one in Store(limited)) <= 30_000


WAITING = """
def waiting(graph, inputs):
    print("compiling", flush=True)
    sys.stdin.readline()
    sys.stdin.readline()

run(sys.argv[1], waiting)
"""


@pytest.fixture
def in_the_middle(tmp_path):
    """A process that is compiling, and captured: it has written something, and waits."""
    read, write = os.pipe()
    with os.fdopen(read) as its_input, os.fdopen(write, "w"):
        command = [sys.executable, "-c", PROGRAM + WAITING, str(tmp_path / "store")]
        process = subprocess.Popen(command, stdin=its_input, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        yield process
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_artifact_being_written_stays_and_is_half_written_once_its_process_is_killed(in_the_middle, tmp_path):
    root = tmp_path / "store"
    (one,) = Store(root)
    assert (one.state, one.path.name[0]) == ("being written", ".")
    assert Store(root).clean(keep=0, max_bytes=0) == []
    with artifacts.capture(root, limit=0):
        assert list(Store(root)) == [one]

    in_the_middle.send_signal(signal.SIGKILL)
    in_the_middle.wait()
    (one,) = Store(root)
    assert (one.state, one.problem) == ("corrupt", "half-written by a process that has ended")

    shutil.copytree(root, tmp_path / "copy")
    (removal,) = Store(root).clean()
    assert removal.why == "half-written by a process that has ended"
    assert list(root.iterdir()) == []
    with artifacts.capture(tmp_path / "copy"):
        assert list((tmp_path / "copy").iterdir()) == []


FULL_DISK = """
import resource
for size in (0, 10, 100, 1500):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.sin(x), backend=mine, dynamic=False)
    with artifacts.capture(f"{sys.argv[1]}/{size}") as captured:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        for n in (1, 2, 3):
            assert torch.equal(compiled(torch.ones(n)), torch.sin(torch.ones(n)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(size, len(captured.artifacts), bool(captured.problems))
"""


@pytest.mark.long
def test_a_full_disk_is_one_warning(tmp_path):
    out, err = finished(start(FULL_DISK, tmp_path))
    assert out == "0 0 True\n10 0 True\n100 0 True\n1500 3 True\n"
    assert err.count("could not be captured") == 4
    for size, whole in ((0, 0), (10, 0), (100, 0), (1500, 3)):
        root = tmp_path / str(size)
        Store(root).clean()
        assert [one.state for one in Store(root)] == ["whole"] * whole
        assert len(list(root.iterdir())) == whole


FROM_THE_ENVIRONMENT = """
torch.compile(torch.sin, backend=mine)(torch.ones(2))
print(torch.equal(torch.compile(torch.cos, backend=mine)(torch.ones(2)), torch.cos(torch.ones(2))))
"""


def test_the_environment_starts_a_capture_of_the_whole_process(tmp_path):
    finished(start(FROM_THE_ENVIRONMENT, TORCHGUARD_CAPTURE="1", TORCHGUARD_ARTIFACTS=str(tmp_path / "store")))
    assert [one.state for one in Store(tmp_path / "store")] == ["whole", "whole"]


@pytest.mark.long
def test_an_unwritable_directory_in_the_environment_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("mine")
    out, err = finished(start(FROM_THE_ENVIRONMENT, TORCHGUARD_CAPTURE=str(tmp_path / "file")))
    assert out == "True\n"
    assert "Cannot capture into" in err
