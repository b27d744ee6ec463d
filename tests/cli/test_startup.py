"""The command starts fast, and says what it can do."""

import subprocess
import sys

import pytest

VERBS = ("run", "list", "show", "diff", "clean", "analyze", "doctor")

_HELP = """
import sys
from torchguard.cli import app
from typer.testing import CliRunner
result = CliRunner().invoke(app, {arguments!r})
assert result.exit_code == 0, result.output
print("torch" in sys.modules, result.output)
"""


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_loads_no_torch(arguments):
    told = subprocess.run(
        [sys.executable, "-c", _HELP.format(arguments=arguments)], capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("False")


def test_a_script_can_set_what_torch_reads_when_it_is_loaded(tmp_path):
    script = tmp_path / "early.py"
    script.write_text(
        "import os, sys\nassert 'torch' not in sys.modules\nimport torch\nprint('loaded', torch.__name__)\n"
    )
    command = [sys.executable, "-m", "torchguard", "run", "--no-capture", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "loaded torch" in told.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_shows_an_example(invoke, verb):
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    assert f"torchguard {verb}" in result.stdout.split("Examples:")[1]


def test_help_names_every_verb_and_the_exit_codes(invoke):
    told = invoke("--help").stdout
    assert all(f" {verb} " in told for verb in VERBS)
    assert "Ends with 0" in told


def test_an_unknown_verb_is_wrong_usage_and_close_ones_are_named(invoke):
    result = invoke("lst")
    assert result.exit_code == 2
    assert "list" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["analyze"], ["analyze", "--type", "speed"], ["clean", "--keep", "-1"], ["diff"]]
)
def test_wrong_options_are_wrong_usage(invoke, arguments):
    assert invoke(*arguments).exit_code == 2
