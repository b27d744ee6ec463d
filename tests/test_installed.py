"""The wheel alone, in an environment with what it declares and nothing else: all that the README shows works there."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

from torchguard.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
VERBS = [verb.name for verb in app.registered_commands]

pytestmark = pytest.mark.long

# torch, of itself: the same as in pyproject.toml.
TORCH_WARNS = (
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
)
STRICTLY = ["-W", "error", *(word for warning in TORCH_WARNS for word in ("-W", warning))]

# Imported, and yet no requirement of the wheel's. A test below holds each to its reason.
NOT_DECLARED = {
    "sympy": "torch requires it: its symbolic sizes are expressions of the sympy that it works with",
    "triton": "comes with the builds of torch for a GPU, and is only imported for tensors that are on one",
    "pytest": "loads torchguard_pytest, which nothing else does",
}

TRAIN = '''
"""Fits a small model to noise. An option that it does not know is an error."""

import argparse

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class Installed:
    wheel: Path
    bin: Path
    variables: dict[str, str]

    def run(self, *command, cwd):
        """Run a command as somebody would who has this environment active."""
        return subprocess.run(command, cwd=cwd, env=self.variables, capture_output=True, text=True)

    def python(self, source, cwd):
        """Run a script in which every warning is an error."""
        script = cwd / "script.py"
        script.write_text(source)
        return self.run("python", *STRICTLY, str(script), cwd=cwd)

    @property
    def site_packages(self):
        (found,) = self.bin.parent.glob("lib/python*/site-packages")
        return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    done(pip("wheel", str(ROOT), "--no-deps", "--wheel-dir", str(folder)))
    (wheel,) = folder.glob("torchguard-*.whl")
    # Without pip: setuptools would come along, and hide that something needs it.
    venv = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    done(subprocess.run(venv, capture_output=True, text=True))
    bin = environment / "bin"
    done(pip("--python", str(bin / "python"), "install", "-c", str(ROOT / "constraints.txt"), str(wheel)))
    foreign = re.compile("PYTHON|VIRTUAL_ENV|TORCH|COLUMNS$|FORCE_COLOR$")
    variables = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    variables["PATH"] = f"{bin}{os.pathsep}{variables['PATH']}"
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # nothing of what was compiled before
    return Installed(wheel, bin, variables)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def done(result):
    """The result of a command that has to end with 0; what it said, if it does not."""
    assert result.returncode == 0, f"{result.args} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return result


def test_what_is_installed_fits_together(installed):
    done(pip("--python", str(installed.bin / "python"), "check"))


def test_import_alone_works_and_says_nothing(installed, tmp_path):
    result = done(installed.python("import torchguard; print(torchguard.__file__)", tmp_path))
    assert result.stdout.strip() == str(installed.site_packages / "torchguard" / "__init__.py")
    assert not result.stderr


def test_importing_everything_warns_of_nothing(installed, tmp_path):
    source = "import torch, torchguard\nfor name in torchguard.__all__: getattr(torchguard, name)"
    assert not done(installed.python(source, tmp_path)).stderr


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS), ["doctor"]], ids=" ".join)
def test_the_command_works_and_warns_of_nothing(installed, tmp_path, arguments):
    result = done(installed.run("torchguard", *arguments, cwd=tmp_path))
    assert result.stdout
    assert not result.stderr


def test_the_module_is_the_command(installed, tmp_path):
    helps = [
        done(installed.run(*command, "--help", cwd=tmp_path)).stdout
        for command in (["torchguard"], ["python", "-m", "torchguard"])
    ]
    assert helps[0] == helps[1]


def test_the_python_of_the_readme_works(installed, tmp_path):
    done(installed.python(python_of(README), tmp_path))


def test_the_commands_of_the_readme_work(installed, tmp_path):
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("torchguard ")]
    assert commands
    (tmp_path / "train.py").write_text(TRAIN)
    for command in commands:  # in one folder: what the first one leaves, the next one shows
        result = done(installed.run("bash", "-c", command, cwd=tmp_path))
        assert "Warning" not in result.stderr


def test_certify_works(installed, tmp_path):
    source = """
        import torch
        from torchguard import compiled

        layer = compiled.compile_out(lambda x: torch.tanh(x), torch.randn(3), backend="eager")
        certificate = layer.certify()
        assert certificate.ok, certificate
    """
    assert not done(installed.python(textwrap.dedent(source), tmp_path)).stderr


def test_what_is_imported_is_declared(installed, tmp_path):
    declared = {normal(line) for line in requirements(installed.wheel)}
    providers = providers_in(installed, tmp_path)
    undeclared = {
        name: files
        for name, files in imports_of(installed.site_packages).items()
        if name not in NOT_DECLARED and not declared.intersection(providers.get(name, ()))
    }
    assert not undeclared, f"imported, but not in the dependencies of pyproject.toml: {undeclared}"


def test_every_undeclared_import_is_still_there(installed):
    assert NOT_DECLARED.keys() <= imports_of(installed.site_packages).keys()


def test_torch_itself_requires_sympy(installed, tmp_path):
    source = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('torch')))"
    required = json.loads(done(installed.python(source, tmp_path)).stdout)
    assert "sympy" in {normal(line) for line in required if ";" not in line}


def test_pytest_is_imported_for_pytest_alone(installed):
    assert imports_of(installed.site_packages)["pytest"] == {"torchguard_pytest.py"}


def test_every_module_loads_without_triton_but_those_for_the_gpu(installed, tmp_path):
    source = """
        import importlib, pkgutil, sys
        import torchguard

        sys.modules["triton"] = None  # as if it were not installed
        for module in pkgutil.walk_packages(torchguard.__path__, "torchguard."):
            if module.name == "torchguard.__main__":
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name.partition(".")[0] == "triton", error
                print(module.name)
    """
    needing = done(installed.python(textwrap.dedent(source), tmp_path)).stdout.split()
    assert needing == ["torchguard._watch.kernels"]


def python_of(markdown):
    """The Python blocks of a page as one script, each line where it stands on the page."""
    kept, inside = [], False
    for line in markdown.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            kept.append("")
        else:
            kept.append(line if inside else "")
    assert any(kept)
    return "\n".join(kept) + "\n"


def imports_of(folder):
    """The files that import each module from elsewhere, wherever in them that is."""
    found = defaultdict(set)
    for path in [*folder.glob("torchguard/**/*.py"), folder / "torchguard_pytest.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            for name in modules_named(node):
                found[name.partition(".")[0]].add(str(path.relative_to(folder)))
    assert "torch" in found
    return {name: files for name, files in found.items() if name not in {*sys.stdlib_module_names, "torchguard"}}


def modules_named(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module]
    return []


def requirements(wheel):
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(files.read(metadata).decode()).get_all("Requires-Dist")


def providers_in(installed, cwd):
    """The distributions that bring each module, by their normal names."""
    source = "import importlib.metadata, json; print(json.dumps(importlib.metadata.packages_distributions()))"
    found = json.loads(done(installed.python(source, cwd)).stdout)
    return {module: {normal(name) for name in names} for module, names in found.items()}


def normal(requirement):
    """The name in a requirement, as the index spells it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()
