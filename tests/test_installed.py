"""The wheel, installed with only its declared dependencies: everything in the README works."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest
import torch

from torchguard.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
VERBS = [verb.name for verb in app.registered_commands]

pytestmark = pytest.mark.long

# Warnings of torch itself; the same list as in pyproject.toml.
TORCH_WARNS = (
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:`torch.jit.script:FutureWarning",
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
)
STRICTLY = ["-W", "error", *(word for warning in TORCH_WARNS for word in ("-W", warning))]

# Imported, but not a requirement of the wheel. A test below checks each reason.
NOT_DECLARED = {
    "sympy": "torch requires it: symbolic sizes are expressions of the sympy that torch uses",
    "triton": "comes with the GPU builds of torch, and is only imported for tensors on a GPU",
    "pytest": "only pytest itself loads torchguard_pytest",
    "libcst": "the extra `lint`, for fixes alone",
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
        """Run a command with this environment active."""
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
    succeeded(pip("wheel", str(ROOT), "--no-deps", "--wheel-dir", str(folder)))
    (wheel,) = folder.glob("torchguard-*.whl")
    # Without pip, which would bring setuptools and hide a missing dependency on it.
    venv = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    succeeded(subprocess.run(venv, capture_output=True, text=True))
    bin = environment / "bin"
    # The torch that runs the tests. Without a constraint pip would take the newest, and several GB of CUDA with it.
    pins = re.sub("(?m)^torch==.*", f"torch=={torch.__version__.split('+')[0]}", (ROOT / "constraints.txt").read_text())
    (folder / "constraints.txt").write_text(pins)
    succeeded(pip("--python", str(bin / "python"), "install", "-c", str(folder / "constraints.txt"), str(wheel)))
    foreign = re.compile("PYTHON|VIRTUAL_ENV|TORCH|COLUMNS$|FORCE_COLOR$")
    variables = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    variables["PATH"] = f"{bin}{os.pathsep}{variables['PATH']}"
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # empty
    yield Installed(wheel, bin, variables)
    shutil.rmtree(environment)  # with CUDA, it has several GB


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def succeeded(result):
    """Assert that a command exited with 0, with its output in the message, and return its result."""
    assert result.returncode == 0, f"{result.args} exited with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return result


def test_installed_packages_are_compatible(installed):
    succeeded(pip("--python", str(installed.bin / "python"), "check"))


def test_import_prints_nothing(installed, tmp_path):
    result = succeeded(installed.python("import torchguard; print(torchguard.__file__)", tmp_path))
    assert result.stdout.strip() == str(installed.site_packages / "torchguard" / "__init__.py")
    assert not result.stderr


def test_importing_everything_does_not_warn(installed, tmp_path):
    source = "import torch, torchguard\nfor name in torchguard.__all__: getattr(torchguard, name)"
    assert not succeeded(installed.python(source, tmp_path)).stderr


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS), ["doctor"]], ids=" ".join)
def test_the_command_does_not_warn(installed, tmp_path, arguments):
    result = succeeded(installed.run("torchguard", *arguments, cwd=tmp_path))
    assert result.stdout
    assert not result.stderr


def test_python_m_runs_the_command(installed, tmp_path):
    helps = [
        succeeded(installed.run(*command, "--help", cwd=tmp_path)).stdout
        for command in (["torchguard"], ["python", "-m", "torchguard"])
    ]
    assert helps[0] == helps[1]


def test_the_python_of_the_readme_works(installed, tmp_path):
    succeeded(installed.python(python_blocks(README), tmp_path))


def test_the_commands_of_the_readme_work(installed, tmp_path):
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("torchguard ")]
    assert commands
    (tmp_path / "train.py").write_text(TRAIN)
    for command in commands:  # in one folder: the later ones show what the first one saved
        result = installed.run("bash", "-c", command, cwd=tmp_path)
        if "--fix" in command:  # needs an extra, which this environment does not have
            assert result.returncode == 2
            assert "pip install 'torchguard[lint]'" in result.stderr
        elif not command.startswith("torchguard lint") or result.returncode != 1:  # 1: it found something
            succeeded(result)
        assert "Warning" not in result.stderr


def test_certify_works(installed, tmp_path):
    source = """
        import torch
        from torchguard import compiled

        layer = compiled.compile_out(lambda x: torch.tanh(x), torch.randn(3), backend="eager")
        certificate = layer.certify()
        assert certificate.ok, certificate
    """
    assert not succeeded(installed.python(textwrap.dedent(source), tmp_path)).stderr


def test_every_import_is_a_declared_dependency(installed, tmp_path):
    declared = {normalized_name(line) for line in requirements(installed.wheel)}
    providers = providers_in(installed, tmp_path)
    undeclared = {
        name: files
        for name, files in imports_of(installed.site_packages).items()
        if name not in NOT_DECLARED and not declared.intersection({name, *providers.get(name, ())})
    }
    assert not undeclared, f"imported, but not in the dependencies of pyproject.toml: {undeclared}"


def test_every_listed_undeclared_import_exists(installed):
    assert NOT_DECLARED.keys() <= imports_of(installed.site_packages).keys()


def test_torch_itself_requires_sympy(installed, tmp_path):
    source = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('torch')))"
    required = json.loads(succeeded(installed.python(source, tmp_path)).stdout)
    assert "sympy" in {normalized_name(line) for line in required if ";" not in line}


def test_only_the_pytest_plugin_imports_pytest(installed):
    assert imports_of(installed.site_packages)["pytest"] == {"torchguard_pytest.py"}


def test_only_fixes_import_libcst(installed):
    assert imports_of(installed.site_packages)["libcst"] == {"torchguard/lint/_fixes.py"}
    assert any(line.startswith("libcst") and "extra == 'lint'" in line for line in requirements(installed.wheel))


def test_every_module_but_the_kernels_imports_without_triton(installed, tmp_path):
    source = """
        import importlib, pkgutil, sys
        import torchguard.exceptions

        sys.modules["triton"] = None  # as if it were not installed
        for module in pkgutil.walk_packages(torchguard.__path__, "torchguard."):
            if module.name == "torchguard.__main__":
                continue
            try:
                importlib.import_module(module.name)
            except torchguard.exceptions.MissingExtraError:
                assert module.name.startswith("torchguard.integrations."), module.name
            except ModuleNotFoundError as error:
                assert error.name.partition(".")[0] == "triton", error
                print(module.name)
    """
    needing = succeeded(installed.python(textwrap.dedent(source), tmp_path)).stdout.split()
    assert needing == ["torchguard._watch.kernels", "torchguard._watch.summary_kernels"]


def python_blocks(markdown):
    """The Python blocks of a page as one script, with the line numbers of the page."""
    lines, inside = [], False
    for line in markdown.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    assert any(lines)
    return "\n".join(lines) + "\n"


def imports_of(folder):
    """The files that import each third-party module, at any level of nesting."""
    found = defaultdict(set)
    for path in [*folder.glob("torchguard/**/*.py"), folder / "torchguard_pytest.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported_modules(node):
                found[name.partition(".")[0]].add(str(path.relative_to(folder)))
    assert "torch" in found
    return {name: files for name, files in found.items() if name not in {*sys.stdlib_module_names, "torchguard"}}


def imported_modules(node):
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
    """The distributions that provide each module, by normalized names."""
    source = "import importlib.metadata, json; print(json.dumps(importlib.metadata.packages_distributions()))"
    found = json.loads(succeeded(installed.python(source, cwd)).stdout)
    return {module: {normalized_name(name) for name in names} for module, names in found.items()}


def normalized_name(requirement):
    """The normalized name of the package in a requirement."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()
