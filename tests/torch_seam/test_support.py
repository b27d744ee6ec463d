"""A torch that was not tested is allowed: torchguard says so once, and each part names what it misses."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from torchguard import Retry, artifacts, compiled, device, guards, watch
from torchguard._torch import process, support
from torchguard.exceptions import GuardError, UntestedTorchWarning

ROOT = Path(__file__).parents[2]
NEWER = f"{support.TESTED[1][0]}.{support.TESTED[1][1] + 1}.0a0+git1234"


@pytest.fixture
def newer_torch(monkeypatch):
    """A torch that is newer than every tested one, of which nothing was said yet."""
    monkeypatch.setattr(torch, "__version__", NEWER)
    said = process.process_state("warnings about torch", set)
    before = set(said)
    said.clear()
    yield monkeypatch
    said.clear()
    said |= before


def warned(use):
    """The texts of the warnings about torch while `use` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    return [str(one.message) for one in caught if one.category is UntestedTorchWarning]


def check_on_a_device():
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=device.MockBackend(device.Device()), fullgraph=True)(torch.ones(2))


def capture_nothing(folder):
    with artifacts.capture(folder):
        pass


USES = {
    "watch": lambda folder: watch(nn.Linear(2, 2)),
    "Retry": lambda folder: Retry(nn.Linear(2, 2)),
    "guards": lambda folder: guards.compile(nn.Linear(2, 2), filter=guards.skip_globals(), backend="eager"),
    "device": lambda folder: check_on_a_device(),
    "artifacts": capture_nothing,
    "compiled": lambda folder: compiled.compile_out(torch.sin, torch.ones(2), backend="eager"),
}


def test_nothing_is_missing_on_this_torch():
    assert {part: support.missing(part) for part in support.PARTS} == {part: [] for part in support.PARTS}


def test_a_tested_torch_is_not_asked(monkeypatch):
    monkeypatch.setattr(support, "missing", lambda part: pytest.fail("looked something up"))
    assert warned(lambda: (support.warn_if_untested(), support.warn_of_missing("watch"))) == []


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [
        ("2.11.0", False),
        ("2.15.1+cu130", False),
        (NEWER, True),
        ("2.100.0", True),
        ("3.0", True),
        ("2.16.0.dev1", True),
    ],
)
def test_which_versions_are_newer(version, is_newer):
    assert support.is_newer(version) == is_newer


def test_an_untested_torch_is_named_once_with_the_tested_range(newer_torch):
    (text,) = warned(lambda: [support.warn_if_untested() for _ in range(2)])
    assert text.startswith(f"torch {NEWER} is newer than what torchguard was tested on: 2.11 to 2.15.")


@pytest.mark.parametrize("part", USES)
def test_a_part_that_misses_nothing_says_nothing(newer_torch, tmp_path, part):
    assert warned(lambda: USES[part](tmp_path)) == []


@pytest.mark.parametrize("part", USES)
def test_a_part_names_what_it_misses_when_it_is_first_used(newer_torch, tmp_path, part):
    lacking = [support.Missing("torch._private.name", "it is slower", is_required=False)]
    newer_torch.setattr(support, "missing", lambda asked: lacking if asked == part else [])
    texts = warned(lambda: [USES[part](tmp_path) for _ in range(2)])
    assert texts == [f"{part}: torch {NEWER} has no torch._private.name (it is slower)."]


def test_a_name_that_only_helps_is_named_with_what_happens_without(newer_torch):
    newer_torch.delattr("torch._dynamo.mark_static")
    (text,) = warned(lambda: watch(nn.Linear(2, 2)))
    assert text.endswith("has no torch._dynamo.mark_static (a watched model may recompile once).")


def test_parameters_that_are_gone_are_missing(newer_torch):
    newer_torch.setattr("torch._functorch.aot_autograd.aot_stage2_compile", lambda graph, compiler: None)
    (text,) = warned(lambda: watch(nn.Linear(2, 2)))
    assert "aot_stage2_compile(fw_compiler, bw_compiler, inference_compiler) (compile_once compiles each block" in text


def test_a_name_that_a_part_needs_is_named_and_the_part_raises(newer_torch):
    newer_torch.delattr("torch._dynamo.guards.get_guard_fail_reason")
    with pytest.raises(GuardError, match=r"has no torch\._dynamo\.guards\.get_guard_fail_reason"):
        warned(lambda: guards.compile(nn.Linear(2, 2), filter=guards.audit(guards.skip_globals())))
    (lacking,) = support.missing("guards")
    assert lacking.is_required


@pytest.mark.parametrize(
    "part", ["err", *(pytest.param(part, marks=pytest.mark.long) for part in ["guards", "device", "compiled"])]
)
def test_every_part_warns_when_it_is_imported_on_an_untested_torch(part):
    code = f"import torch; torch.__version__ = {NEWER!r}; import torchguard; torchguard.{part}; torchguard.{part}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("is newer than what torchguard was tested on") == 1


def test_every_private_name_that_is_imported_is_looked_up():
    """`from torch._x import y` anywhere in the seam: `y` is in the tables."""
    listed = {
        name.partition("(")[0] for part in support.PARTS for name in (*required(part), *support._ONLY_HELPS[part])
    }
    imported = set()
    for path in Path(support.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"torch\._|torch\.fx\.exp|functorch", node.module or ""):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    names = {name for name in imported if not is_module(name) and name not in AFTER_2_11}
    unlisted = {name for name in names if not any(f"{one}.".startswith(f"{name}.") for one in listed)}
    assert unlisted == set(), "add these to the tables of _torch/support.py"


# What the code that imports it says an older torch does instead.
AFTER_2_11 = {"torch._dynamo.backends.registry.get_default_backend"}


def required(part):
    return [f"{owner}.{name}" for owner, names in support._NEEDED[part].items() for name in names.split()]


def is_module(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def test_pip_allows_what_doctor_and_the_docs_call_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, last = (".".join(map(str, version)) for version in support.TESTED)
    assert f"torch>={first}" in project["dependencies"]
    assert f"torch {first} to {last}" in (ROOT / "README.md").read_text()
    assert f"torch {first} to {last}" in (ROOT / "docs/private-torch.md").read_text()
