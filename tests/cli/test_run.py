"""`torchguard run`: a script behaves as under `python`, and the report says what was compiled."""

import json
import os
import signal
import subprocess
import sys

import pytest

from torchguard import artifacts

TRAIN = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 8), nn.Linear(8, 2), 1
    def forward(self, x):
        h = self.a(x).relu()
        if h.sum() > 1e9:
            h = h * 2
        return self.b(h) * self.scale

model = Net()
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
compiled(torch.randn(16, 4)).sum().backward()
model.scale = 2
compiled(torch.randn(5, 4)).sum().backward()
print("trained")
"""


@pytest.fixture
def both(command, script, tmp_path):
    """Run a script by python and by torchguard, and return both results."""

    def run(source, *args):
        name = script(source)
        expected = subprocess.run(
            [sys.executable, name, *args], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
        )
        return expected, command("run", "--quiet", name, *args)

    return run


def test_the_report_has_compilations_breaks_recompiles_and_artifacts(command, script, tmp_path):
    ran = command("run", "--report", "report.json", script(TRAIN))
    assert ran.returncode == 0
    assert ran.stdout == "trained\n"
    assert "4 compilations" in ran.stderr
    assert "script.py:12  if h.sum() > 1e9:" in ran.stderr
    assert "size mismatch at index 0. expected 16, actual 5" in ran.stderr
    assert "L['self'].scale == 1, but it is 2" in ran.stderr
    assert "make it an argument or a buffer" in ran.stderr
    assert "\x1b" not in ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(frame["seconds"] > 0 for frame in report["compiled"]["frames"])
    assert len(report["artifacts"]) == 4
    listed = json.loads(command("list", "--json").stdout)["artifacts"]
    assert {one["id"] for one in listed} == {one["id"] for one in report["artifacts"]}


def test_a_script_sees_the_same_process_as_under_python(both):
    expected, ran = both(
        "import sys, __main__\n"
        "print(__name__, __file__, sys.argv, sys.path[0], __spec__, __package__, __doc__, type(__builtins__))\n"
        "print(__main__.__dict__ is globals(), type(__loader__).__name__, __annotations__, sys.excepthook)\n"
        "print(sorted(name for name in globals()))\n"
        "x: int = 3\n",
        "--help",
        "-m",
        "two words",
    )
    assert ran.stdout == expected.stdout
    assert ran.stderr == expected.stderr == ""


def test_future_imports_of_torchguard_do_not_leak(both):
    expected, ran = both("def f(x: 1 + 1): ...\nprint(f.__annotations__)\n")
    assert ran.stdout == expected.stdout == "{'x': 2}\n"


ENDINGS = {
    "code": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('no such data')",
    "nothing": "import sys; sys.exit()",
    "bool": "raise SystemExit(True)",
    "raised": "def f():\n    raise ValueError('bad')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError",
    "hook": "import sys\nsys.excepthook = lambda *_: print('hooked')\n1 / 0",
    "syntax": "def f(:\n",
    "at exit": "import atexit\natexit.register(print, 'at exit')\nprint('first')",
    "thread": "import threading\nthreading.Timer(0.1, print, ['from a thread']).start()",
    "fork": "import os\nif os.fork() == 0:\n    print('child')\n    raise SystemExit(3)\nprint(os.wait()[1])",
    "pool": "from concurrent.futures import ThreadPoolExecutor as P\npool = P(1)\nprint(pool.submit(str, 1).result())",
    "warning": "import warnings\nwarnings.warn('careful')",
    "hard": "import os\nos.write(1, b'raw')\nos._exit(9)",
    "pickle": "import pickle\nclass A: ...\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
}


@pytest.mark.parametrize("source", ENDINGS.values(), ids=ENDINGS)
def test_a_script_ends_as_under_python(both, source):
    expected, ran = both(source)
    assert ran.returncode == expected.returncode
    assert ran.stdout == expected.stdout
    assert ran.stderr == expected.stderr


def test_a_spawned_process_finds_the_script(both):
    expected, ran = both(
        "import multiprocessing\n"
        "def work(x):\n    return x * 2, __name__\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [1, 2]))\n"
    )
    assert ran.stdout == expected.stdout == "[(2, '__mp_main__'), (4, '__mp_main__')]\n"
    assert ran.stderr == expected.stderr


def test_a_module_runs_as_by_python_m(command, script, tmp_path):
    script("", "package/__init__.py")
    script("import sys\nprint(__name__, __spec__.name, __package__, sys.argv[1:], sys.path[0])", "package/__main__.py")
    expected = subprocess.run(
        [sys.executable, "-m", "package", "-x", "1"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    ran = command("run", "-q", "-m", "package", "-x", "1")
    assert ran.stdout == expected.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.py"], "'missing.py' does not exist"),
        (["."], "is a directory"),
        (["-m", "no.such.module"], "'no.such.module'"),
        pytest.param(["--device", "no-such-device", "script.py"], "edge-npu", marks=pytest.mark.long),
        (["--strict", "script.py"], "--device or --watch"),
    ],
    ids=["file", "directory", "module", "device", "strict"],
)
def test_the_error_for_what_cannot_be_run_is_a_sentence(command, script, arguments, says):
    script("print('ran')")
    ran = command("run", *arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


# Tests that run in the background may ignore SIGINT, and their child processes inherit this.
_INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def test_an_interrupt_ends_a_run_as_under_python(script, tmp_path):
    name = script("import sys, time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    arguments = [sys.executable, "-c", _INTERRUPTIBLE, "-m", "torchguard", "run", "--quiet", name]
    with subprocess.Popen(
        arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        _, output = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert output.splitlines()[-1] == "KeyboardInterrupt"
    assert "torchguard" not in output


@pytest.mark.long
def test_a_script_that_fails_is_reported_too(command, script):
    ran = command("run", script(TRAIN + "raise RuntimeError('too late')\n"))
    assert ran.returncode == 1
    assert "RuntimeError: too late" in ran.stderr
    assert "4 compilations" in ran.stderr


@pytest.mark.long
def test_artifacts_go_where_the_command_was_started(command, script, tmp_path):
    ran = command("run", script("import os\nos.mkdir('sub')\nos.chdir('sub')\n" + TRAIN))
    assert len(list((tmp_path / "debug_artifacts").iterdir())) == 4
    assert "script.py:15  if h.sum() > 1e9:" in ran.stderr


@pytest.mark.long
def test_a_device_is_checked_without_changing_what_runs_and_without_writing(command, script, tmp_path):
    ran = command("run", "--no-capture", "--device", "edge-npu", script(TRAIN))
    assert ran.returncode == 0
    assert ran.stdout == "trained\n"
    assert "on edge-npu" in ran.stderr
    assert "pad dim 1 from 4 to 16" in ran.stderr
    assert "could not be checked" not in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.long
def test_a_report_on_the_device_goes_into_the_artifacts(command, script, tmp_path):
    ran = command("run", "--device", "edge-npu", "--report", "report.json", script(TRAIN))
    assert ran.returncode == 0
    of_all = json.loads((tmp_path / "report.json").read_text())["device"]
    of_each = [
        json.loads(one.read_text(file))
        for one in artifacts.Store(tmp_path / "debug_artifacts")
        for file in one.attached("device.json")
    ]
    assert len(of_each) == 4
    assert of_all["by_rule"]["TGD101"] == sum(one["by_rule"].get("TGD101", 0) for one in of_each) > 0
    assert len(of_all["graphs"]) == sum(len(one["graphs"]) for one in of_each) == 8


@pytest.mark.parametrize(("ending", "code"), [("", 4), ("sys.exit(5)\n", 5)], ids=["well", "badly"])
@pytest.mark.long
def test_strict_exits_with_4_if_rules_are_broken_and_the_script_exited_with_0(command, script, ending, code):
    ran = command("run", "-q", "--no-capture", "--strict", "--device", "edge-npu", script(TRAIN + ending))
    assert ran.returncode == code


@pytest.mark.long
@pytest.mark.parametrize("hidden", ["sys.stdout = None", "sys.stdout.close()", "sys.stderr = object()"])
def test_strict_exits_with_4_whatever_the_script_did_to_its_streams(command, script, hidden):
    ran = command("run", "-q", "--no-capture", "--strict", "--device", "edge-npu", script(f"{TRAIN}{hidden}\n"))
    assert ran.returncode == 4
    assert "Traceback" not in ran.stderr


def test_a_script_without_torch_runs(command, script):
    ran = command("run", script("print(1)"))
    assert ran.stdout == "1\n"
    assert "torch.compile was never called" in ran.stderr


def test_a_report_that_cannot_be_written_is_an_error_on_the_original_stderr(command, script):
    ran = command("run", "-q", "--report", "no/such/place.json", script("import sys\nsys.stderr = None\n"))
    assert ran.returncode == 0
    assert "place.json cannot be written: No such file or directory." in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_report_is_printed_on_the_original_stderr(command, script):
    ran = command("run", script("import sys\nsys.stdout.close()\nsys.stderr = None\n"))
    assert ran.returncode == 0
    assert "torch.compile was never called" in ran.stderr


@pytest.mark.long
def test_a_compilation_that_failed_beside_another_is_counted(command, script, tmp_path):
    text = """
import torch
from torchguard.device import Device, mock_backend
strict = mock_backend(Device(deny="aten.gelu"), mode="strict")
torch.compile(torch.nn.ReLU(), backend=strict)(torch.randn(3))
try:
    torch.compile(torch.nn.GELU(), backend=strict)(torch.randn(3))
except Exception as error:
    print(type(error).__name__)
"""
    ran = command("run", "--dir", tmp_path / "artifacts", script(text))
    assert "BackendCompilerFailed" in ran.stdout
    assert "1 compilation," in ran.stderr
    assert "1 compilation failed: torchguard show has the reason." in ran.stderr
    analyzed = command("analyze", "--type", "guards", "--dir", tmp_path / "artifacts")
    assert "1 compilation failed" in analyzed.stdout
