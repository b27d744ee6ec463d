"""Start-up without torch, help, versions and shell completion."""

import importlib.metadata
import subprocess
import sys

import pytest
import typer
from typer.core import TyperOption

import torchguard
from torchguard import device
from torchguard.cli import app

VERBS = ("run", "list", "show", "diff", "clean", "analyze", "report", "lint", "doctor")

_HELP = """
import sys
from torchguard.cli import app
from typer.testing import CliRunner
result = CliRunner().invoke(app, {arguments!r})
assert result.exit_code == 0, result.output
print("torch" in sys.modules, result.output)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_and_versions_load_no_torch(arguments):
    output = subprocess.run(
        [sys.executable, "-c", _HELP.format(arguments=arguments)], capture_output=True, text=True, check=True
    ).stdout
    assert output.startswith("False")


@pytest.fixture
def complete(invoke, monkeypatch):
    """The completions that bash gets for the last of these words."""

    def completions(*words):
        monkeypatch.setenv("_TORCHGUARD_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["torchguard", *map(str, words)]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        result = invoke()
        assert result.exit_code == 0
        return result.stdout.split()

    return completions


def test_a_completion_loads_no_torch(tmp_path):
    code = "import sys\nfrom torchguard.cli import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={"_TORCHGUARD_COMPLETE": "complete_bash", "COMP_WORDS": "torchguard show ", "COMP_CWORD": "2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == ["False"]


def test_verbs_and_options_are_completed(complete):
    assert complete("") == [*VERBS]
    assert complete("--v") == ["--version"]
    assert {"--watch", "--device", "--help"} <= {*complete("run", "--")}
    assert complete("analyze", "--type", "") == ["guards", "device", "memory", "graph"]


def test_completing_behind_version_does_not_print_it(complete):
    assert complete("--version", "") == [*VERBS]


def test_names_of_example_devices_are_completed(complete):
    assert complete("run", "--device", "") == sorted(device.examples())
    assert complete("analyze", "--device", "ed") == ["edge-npu"]


def test_ids_of_artifacts_are_completed_the_newest_first(complete, captured):
    ids = [artifact.id for artifact in captured]
    assert complete("show", "--dir", captured.root, "") == ids
    assert complete("diff", "--dir", captured.root, ids[0], ids[1]) == [ids[1]]
    assert complete("analyze", "--dir", captured.root, ids[2][:-1]) == [ids[2]]


@pytest.mark.parametrize("words", [["--"], ["--device", ""]], ids=["option", "value"])
def test_behind_the_script_no_option_of_torchguard_is_completed(complete, words):
    assert complete("run", "train.py", *words) == []


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_completion_can_be_installed(invoke, option):
    assert option in invoke("--help").stdout


def test_version_prints_those_of_torchguard_and_torch(invoke):
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"torchguard {torchguard.__version__}\ntorch {importlib.metadata.version('torch')}\n"


def test_version_works_without_torch(invoke, monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert "torch is not installed" in invoke("--version").stdout


def flags_of(command):
    params = command.get_params(typer.Context(command))
    return [name for param in params if isinstance(param, TyperOption) and param.is_flag for name in param.opts]


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_shows_flags_without_a_type(invoke, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "200")
    group = typer.main.get_command(app)
    flags = flags_of(group.commands[verb] if verb else group)
    output = invoke(*([verb] if verb else []), "--help").stdout
    assert "--help" in flags
    assert all(flag in output for flag in flags)
    assert "bool" not in output.lower()
    assert "--dir" not in output or "<path>" in output  # options with a value are still printed with their type


def test_a_script_can_set_what_torch_reads_when_it_is_loaded(tmp_path):
    script = tmp_path / "early.py"
    script.write_text(
        "import os, sys\nassert 'torch' not in sys.modules\nimport torch\nprint('loaded', torch.__name__)\n"
    )
    command = [sys.executable, "-m", "torchguard", "run", "--no-capture", str(script)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "loaded torch" in output.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_shows_an_example(invoke, verb):
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    assert f"torchguard {verb}" in result.stdout.split("Examples:")[1]


def test_help_names_every_verb_and_the_exit_codes(invoke):
    output = invoke("--help").stdout
    assert all(f" {verb} " in output for verb in VERBS)
    assert "Exits with 0" in output


def test_an_unknown_verb_is_wrong_usage_and_similar_ones_are_named(invoke):
    result = invoke("lst")
    assert result.exit_code == 2
    assert "list" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["analyze"], ["analyze", "--type", "speed"], ["clean", "--keep", "-1"], ["diff"]]
)
def test_wrong_options_are_wrong_usage(invoke, arguments):
    assert invoke(*arguments).exit_code == 2
