"""Options of `torchguard run` behind the script: passed to it if it takes them, refused with a message if not."""

import shlex

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from torchguard.cli import _script_options, app
from torchguard.cli._terminal import CommandError

PARSER = "import argparse\nparser = argparse.ArgumentParser()\n"
FIRE = "import fire\n"


def parsed(*arguments):
    """The context of `torchguard run` with these arguments; nothing runs."""
    return typer.main.get_command(app).commands["run"].make_context("run", [*arguments])


def check(*arguments):
    context = parsed(*arguments)
    given = context.params
    return _script_options.check(context, given["name"], given["arguments"] or [], given["as_module"])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_option_that_the_script_does_not_take_stops_before_it_runs(invoke, script, here):
    name = script("open('ran', 'w').close()\n", "train.py")
    result = invoke("run", name, "--epochs", "3", "--watch", "--device", "edge-npu", "two words")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "does not take --watch and --device." in result.stderr
    assert "\n  torchguard run --watch --device edge-npu train.py --epochs 3 'two words'\n" in result.stderr
    assert "\n  torchguard run -- train.py --epochs 3 --watch --device edge-npu 'two words'\n" in result.stderr
    assert not (here / "ran").exists()


def test_it_stops_before_the_packages_above_a_module_run(invoke, script, here):
    script("open('ran', 'w').close()\n", "package_that_writes/__init__.py")
    script("", "package_that_writes/train.py")
    result = invoke("run", "-m", "package_that_writes.train", "--watch")
    assert result.exit_code == 2
    assert "\n  torchguard run --watch -m package_that_writes.train\n" in result.stderr
    assert not (here / "ran").exists()


def test_options_in_front_stay_there(invoke, script, here):
    result = invoke("run", "--strict", script(""), "--watch")
    assert "\n  torchguard run --watch --strict script.py\n" in result.stderr
    assert "\n  torchguard run --strict -- script.py --watch\n" in result.stderr


@pytest.mark.parametrize(
    ("behind", "moved"),
    [
        (["--device=edge-npu", "x"], "--device=edge-npu script.py x"),
        (["--device", "my npu.toml"], "--device 'my npu.toml' script.py"),
        (["-q", "x"], "-q script.py x"),
        (["-d", "there", "x"], "-d there script.py x"),
        (["--watch=1"], "--watch script.py"),
        (["--device"], "--device DEVICE script.py"),
        (["--device", "--epochs", "3"], "--device DEVICE script.py --epochs 3"),
        (["--device", "--watch"], "--device DEVICE --watch script.py"),
        (["--watch", "--", "--strict"], "--watch script.py -- --strict"),
    ],
    ids=" ".join,
)
def test_the_right_order_has_options_with_their_values_in_front(script, here, behind, moved):
    with pytest.raises(CommandError) as stopped:
        check(script(""), *behind)
    assert str(stopped.value).splitlines()[1] == f"  torchguard run {moved}"


@pytest.mark.parametrize("behind", [["--", "--watch"], ["--help"], ["-h"], ["-m", "1"], ["--watching"], ["-qx"], ["x"]])
def test_arguments_that_are_no_option_of_run_go_to_the_script(script, here, behind):
    assert check(script(""), *behind).options == ()


WORDS = [
    "--watch",
    "--device",
    "--device=a",
    "-q",
    "-d",
    "--watch=1",
    "--",
    "-",
    "-x",
    "--lr",
    "1e-3",
    "a b",
    "it's",
    "",
]


@given(st.lists(st.sampled_from(WORDS), max_size=6))
def test_the_right_order_is_parsed_as_meant(words):
    """The printed command has all options of torchguard in front, and keeps every argument of the script."""
    options = parsed("x.py").command.params
    found = _script_options.misplaced(options, words)
    line = _script_options.moved_to_front(["--strict"], "x.py", words, found)
    context = parsed(*shlex.split(line)[2:])
    left = context.params["arguments"] or []
    assert context.params["name"] == "x.py"
    assert context.params["strict"]
    assert context.params["watch"] == any(one.name == "--watch" for one in found)
    assert _script_options.misplaced(options, left) == ()
    assert left == [word for at, word in enumerate(words) if not any(at in one.at for one in found)]


TAKEN = {
    "argparse": f"{PARSER}parser.add_argument('-D', '--device')\nparser.parse_args()",
    "one of click's names": "import click\n@click.command()\n@click.option('--dev', '--device/--cpu')\ndef f(): ...",
    "optparse": "import optparse\noptparse.OptionParser().add_option('--device')",
    "getopt": "import getopt, sys\ngetopt.getopt(sys.argv[1:], 'ab:', ['device='])",
    "docopt": '"""Usage: x.py [--device=<d>]"""\nimport docopt\ndocopt.docopt(__doc__)',
    "in sys.argv": "import sys\nif '--device' in sys.argv: ...",
    "typer": "import typer\ndef f(device: str = 'cpu'): ...\ntyper.run(f)",
    "fire": f"{FIRE}class A:\n    def f(self, device): ...\nfire.Fire(A)",
    "absl": "from absl import app, flags\nflags.DEFINE_string('device', 'cpu', '')",
    "a field": "from transformers import HfArgumentParser\nclass A:\n    device: str = 'cpu'\nHfArgumentParser(A)",
    "a class of a package": "import transformers\nclass A:\n    device: str\ntransformers.HfArgumentParser((A,))",
}


@pytest.mark.parametrize("source", TAKEN.values(), ids=TAKEN)
def test_an_option_that_the_script_takes_goes_to_it_without_a_note(script, here, source):
    assert _script_options.read(script(source), as_module=False).takes("--device") is True
    assert not check(script(source), "--device", "cpu").note


NOT_TAKEN = {
    "no parser": "import torch\ndevice = torch.device('cpu')\ndef f(device): return device\nf(device=device)",
    "other options": f"{PARSER}parser.add_argument('--device-id', '--my--device')\nparser.parse_args()",
    "a positional": f"{PARSER}parser.add_argument('device')\nparser.parse_args()",
    "a docstring": f'"""torchguard run --device npu x.py"""\n{PARSER}parser.parse_args()',
    "one element": "import sys\nif len(sys.argv) > 1: print(sys.argv[1], sys.argv[-1], sys.argv)",
    "exact parsing": f"import sys\n{PARSER}parser.parse_args(args=sys.argv[1:])",
    "unknown ones dropped": f"{PARSER}args, rest = parser.parse_known_args()\n",
    "unknown ones dropped, too": f"import sys\n{PARSER}args = parser.parse_known_args(sys.argv[1:])[0]\n",
    "fire, another name": f"{FIRE}def f(devices):\n    device = devices[0]\nfire.Fire(f)",
    "a variable beside typer": "import typer\ndevice: str = 'cpu'\ndef f(lr: float): ...\ntyper.run(f)",
    "argv set": "import sys\nsys.argv = ['x.py']\nsys.argv[1:] = []",
}


@pytest.mark.parametrize("source", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_an_option_that_the_script_does_not_take_is_refused(script, here, source):
    assert _script_options.read(script(source), as_module=False).takes("--device") is False


DOUBTFUL = {
    "argv as a whole": "import sys\nmain(sys.argv[1:])",
    "argv by another name": "from sys import argv as a\nfor x in a: ...",
    "argv for a process": "import subprocess, sys\nsubprocess.run(['python', *sys.argv])",
    "a name in argv": "import sys\nif name in sys.argv: ...",
    "unknown ones kept": f"{PARSER}args, rest = parser.parse_known_args()\nprint(rest)",
    "unknown ones returned": f"{PARSER}\ndef f():\n    return parser.parse_known_args()",
    "the rest": f"{PARSER}parser.add_argument('rest', nargs=argparse.REMAINDER)",
    "the rest, as text": f"{PARSER}parser.add_argument('rest', nargs='...')",
    "click": "import click\n@click.command(context_settings={'ignore_unknown_options': True})\ndef f(): ...",
    "computed names": f"{PARSER}for name in config:\n    parser.add_argument(f'--{{name}}')",
    "code run": "exec(open('configurator.py').read())",
    "a module named elsewhere": "import importlib\nimportlib.import_module(name).add_options()",
    "a path added": "import sys\nsys.path.insert(0, '..')\nfrom options import Options\nOptions().parse()",
    "a parser from elsewhere": "from detectron2.engine import default_argument_parser as p\np().parse_args()",
    "options from elsewhere": f"import deepspeed\n{PARSER}deepspeed.add_config(parser)",
    "main from elsewhere": "import unittest\nunittest.main()",
    "fire and elsewhere": f"{FIRE}from recipes import train\nfire.Fire(train)",
    "fire and keywords": f"{FIRE}def f(**kwargs): ...\nfire.Fire(f)",
    "mentioned, not read": "import subprocess\nsubprocess.run(['other', '--device', 'cpu'])",
    "a module that is no Python": "import beside",
}


@pytest.mark.parametrize("source", DOUBTFUL.values(), ids=DOUBTFUL)
def test_if_there_is_a_doubt_a_note_says_why(script, here, source):
    script("def f(:\n", "beside.py")
    passed = check(script(source), "--device", "edge-npu")
    assert passed.doubt
    assert "It is unknown whether it takes --device: " in passed.note
    assert passed.note.endswith("\n  torchguard run --device edge-npu script.py")


def test_a_doubt_names_its_source_line(script, here):
    assert check(script("import sys\n\nprint(*sys.argv)\n"), "--watch").doubt == "script.py:3 uses sys.argv as a whole"


def test_more_source_than_the_limit_is_a_doubt(script, here):
    script("# " + "x" * (3 << 20), "large.py")
    assert "more" in check(script("import large"), "--watch").doubt


def test_a_flag_that_argparse_negates_is_taken(script, here):
    source = f"{PARSER}parser.add_argument('--capture', action=argparse.BooleanOptionalAction)"
    assert _script_options.read(script(source), as_module=False).takes("--no-capture")


def test_a_short_option_of_a_library_that_makes_them_is_a_doubt(script, here):
    source = _script_options.read(script(f"{FIRE}def f(dropout): ...\nfire.Fire(f)"), as_module=False)
    assert source.takes("-d") is None
    assert source.takes("--dir") is False


IMPORTS = {
    "a module": ("import options", "options.py"),
    "a package": ("from lib import options", "lib/options.py"),
    "a package itself": ("import lib.other", "lib/__init__.py"),
    "a directory": ("from lib.sub.options import parse", "lib/sub/options.py"),
    "in a function": ("def main():\n    from options import parse", "options.py"),
}


@pytest.mark.parametrize(("source", "file"), IMPORTS.values(), ids=IMPORTS)
def test_options_may_be_in_a_module_beside_the_script(script, here, source, file):
    script(TAKEN["argparse"], file)
    assert not check(script(source), "--device", "cpu").note
    with pytest.raises(CommandError):
        check(script(source), "--watch")


def test_modules_may_import_each_other(script, here):
    script("import second", "first.py")
    script("import first\nimport script\n" + TAKEN["argparse"], "second.py")
    assert not check(script("import first"), "--device", "cpu").note
    with pytest.raises(CommandError):
        check("script.py", "--watch")


def test_a_script_in_another_directory_has_its_modules_beside_it(script, here):
    script(TAKEN["argparse"], "scripts/options.py")
    script("", "options.py")
    assert not check(script("import options", "scripts/train.py"), "--device", "cpu").note


@pytest.mark.parametrize("name", ["package_of_options", "package_of_options.train"])
def test_options_of_a_module_are_found_in_its_package_and_beside(script, here, name):
    script("", "package_of_options/__init__.py")
    script("from . import sub", "package_of_options/__main__.py")
    script("from .sub import options", "package_of_options/train.py")
    script("from ..shared import parse", "package_of_options/sub/__init__.py")
    script("import options_beside", "package_of_options/shared.py")
    script(TAKEN["argparse"], "options_beside.py")
    assert not check("-m", name, "--device", "cpu").note
    with pytest.raises(CommandError):
        check("-m", name, "--watch")


def test_an_installed_module_is_a_doubt(here):
    assert check("-m", "pytest", "-q").doubt == "pytest is installed, and installed modules are not read"


@pytest.mark.parametrize("arguments", [["missing.py"], ["."], ["broken.py"], ["-m", "no.such.module"]], ids=" ".join)
def test_without_source_there_is_no_note(script, here, arguments):
    script("def f(:\n", "broken.py")
    assert not check(*arguments, "--watch").note


def test_a_bare_dash_before_the_script_passes_everything_to_it(command, script):
    ran = command("run", "-q", "--", script("import sys\nprint(sys.argv)"), "--watch", "--device", "x", "--", "-q")
    assert ran.returncode == 0
    assert ran.stdout == "['script.py', '--watch', '--device', 'x', '--', '-q']\n"
    assert ran.stderr == ""


def test_a_script_with_a_device_of_its_own_is_given_it(command, script):
    source = f"{PARSER}parser.add_argument('--device')\nprint(parser.parse_args().device)"
    ran = command("run", "--no-capture", script(source), "--device", "cpu")
    assert ran.stdout == "cpu\n"
    assert "--device" not in ran.stderr


def test_a_note_is_printed_before_the_script_runs(command, script):
    ran = command("run", script("import sys\nprint(*sys.argv, file=sys.stderr)"), "--watch")
    assert ran.returncode == 0
    note, right_order, output = ran.stderr.splitlines()[:3]
    assert note.startswith(
        "torchguard: options behind script.py go to the script. It is unknown whether it takes --watch:"
    )
    assert right_order == "  torchguard run --watch script.py"
    assert output == "script.py --watch"


def test_after_a_script_that_exits_with_2_the_right_order_is_printed(command, script):
    source = f"{PARSER}parser.add_argument('--device', choices=['cpu'])\nparser.parse_args()"
    ran = command("run", script(source), "--device", "edge-npu")
    assert ran.returncode == 2
    assert "invalid choice: 'edge-npu'" in ran.stderr
    assert ran.stderr.endswith(
        "torchguard: script.py exited with 2, and was given --device. "
        "Put options of torchguard in front:\n  torchguard run --device edge-npu script.py\n"
    )
