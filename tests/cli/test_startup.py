"""The command starts fast, and says what it can do."""

import subprocess
import sys
from pathlib import Path

import pytest

import torchguard

VERBS = ("run", "list", "show", "diff", "clean", "analyze", "doctor")

# The package's own facade loads torch; here it is left out, so that only what the command loads is seen.
_BARE = """
import sys, types
package = types.ModuleType("torchguard")
package.__path__ = [{path!r}]
sys.modules["torchguard"] = package
from torchguard.cli import app
from typer.testing import CliRunner
result = CliRunner().invoke(app, {arguments!r})
assert result.exit_code == 0, result.output
print("torch" in sys.modules, result.output)
"""


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_loads_no_torch(arguments):
    code = _BARE.format(path=str(Path(torchguard.__file__).parent), arguments=arguments)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith("False")


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
