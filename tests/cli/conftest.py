import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from torchguard import artifacts
from torchguard.cli import app


class ScaledResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.scale = 1

    def forward(self, x):
        return (x + self.layers(x)) * self.scale


@pytest.fixture(scope="session")
def captured(tmp_path_factory):
    """A store with three artifacts: a model trained, its recompile for another batch, and a function with a break."""
    root = tmp_path_factory.mktemp("captured") / "artifacts"

    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch._dynamo.reset()
    torch.manual_seed(0)
    with artifacts.capture(root):
        model = torch.compile(ScaledResidual(), backend="aot_eager", dynamic=False)
        model(torch.randn(16, 16)).sum().backward()
        model(torch.randn(8, 16)).sum().backward()
        torch.compile(broken, backend="aot_eager")(torch.randn(4))
    return artifacts.Store(root)


@pytest.fixture
def invoke(monkeypatch):
    """Call the command in this process, with output as wide as in a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    runner = CliRunner()
    return lambda *args: runner.invoke(app, [str(arg) for arg in args])


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Write a module with a unique name into the current directory, and return the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source, name=None):
        name = name or "target_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    for name in [
        name for name, found in sys.modules.items() if str(getattr(found, "__file__", "")).startswith(str(tmp_path))
    ]:
        del sys.modules[name]


@pytest.fixture
def script(tmp_path):
    """Write a script into the directory that `command` runs in, and return its name."""

    def write(source, name="script.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(source)
        return name

    return write


@pytest.fixture
def command(tmp_path):
    """Run `python -m torchguard` in an empty directory, in its own process."""

    def run(*args, cwd=tmp_path, **environment):
        path = [str(Path(artifacts.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        variables = {name: value for name, value in variables.items() if name not in ("COLUMNS", "FORCE_COLOR")}
        return subprocess.run(
            [sys.executable, "-m", "torchguard", *map(str, args)],
            cwd=cwd,
            env={**variables, **environment},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )

    return run
