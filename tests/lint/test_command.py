"""`torchguard lint`, the plugin of flake8 and the pages of the rules."""

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchguard import lint
from torchguard.cli import _lint, app
from torchguard.lint import _config, _formats
from torchguard.lint._flake8 import Plugin

ROOT = Path(__file__).parents[2]
FAULTY = "import torch\nimport torch.nn.functional as F\nx = torch.zeros(3)\ny = F.relu(x + 1, inplace=True)\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write a.py, and run the command on it in its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    _config.settings_for.cache_clear()

    def invoke(*options, source=FAULTY):
        (tmp_path / "a.py").write_text(source)
        return CliRunner().invoke(app, ["lint", *options, "a.py"])

    return invoke


def test_text(run):
    result = run()
    assert result.exit_code == 1
    assert result.stdout == (
        "a.py:3:5: TG110 torch.zeros: no dtype, so the global default decides. Pass dtype=, such as that of an input.\n"
        "a.py:4:5: TG122 relu(inplace=True) overwrites its input. Leave inplace out.\n"
        "2 findings in 1 file.\n"
    )


def test_a_clean_file(run):
    result = run(source="x = 1\n")
    assert (result.exit_code, result.stdout) == (0, "No findings in 1 file.\n")


@pytest.mark.parametrize(
    "options", [["--select", "TG9"], ["--ignore", "E501"], ["gone.py"], ["--jobs", "0"], ["--output-format", "xml"]]
)
def test_what_is_asked_wrongly_exits_with_2(run, options):
    assert run(*options).exit_code == 2


def test_json_is_a_list_of_objects(run):
    data = json.loads(run("--output-format", "json").stdout)
    assert [{**one, "message": ""} for one in data] == [
        {"file": "a.py", "line": 3, "column": 5, "code": "TG110", "message": ""},
        {"file": "a.py", "line": 4, "column": 5, "code": "TG122", "message": ""},
    ]
    assert json.loads(run("--output-format", "json", source="").stdout) == []


def test_sarif(run):
    log = json.loads(run("--output-format", "sarif").stdout)
    (scan,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert [rule["id"] for rule in scan["tool"]["driver"]["rules"]] == ["TG110", "TG122"]
    (first, _) = scan["results"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a.py"
    assert place["region"] == {"startLine": 3, "startColumn": 5}
    assert (first["ruleId"], first["ruleIndex"], first["level"]) == ("TG110", 0, "error")


def test_github_annotations_escape_what_would_end_them():
    finding = lint.Finding("a,b:c.py", 1, 2, "TG110", "100 %\nsure")
    assert _formats.as_github([finding]) == (
        "::error title=torchguard (TG110),file=a%2Cb%3Ac.py,line=1,col=2::a,b:c.py:1:2: TG110 100 %25%0Asure"
    )


def test_statistics(run):
    assert run("--statistics").stdout == "     1  TG110  no-dtype\n     1  TG122  inplace-argument\n"
    assert json.loads(run("--statistics", "--output-format", "json").stdout)[0] == {
        "code": "TG110",
        "name": "no-dtype",
        "count": 1,
    }


def test_select_takes_commas_and_repetition(run):
    assert "TG110" not in run("--select", "TG122,TG2").stdout
    assert "2 findings" in run("--select", "TG110", "--select", "TG122").stdout


def test_diff_changes_nothing_and_fix_does(run, tmp_path):
    result = run("--diff")
    assert result.exit_code == 1
    assert "-y = F.relu(x + 1, inplace=True)\n+y = F.relu(x + 1)\n" in result.stdout
    assert (tmp_path / "a.py").read_text() == FAULTY
    fixed = run("--fix")
    assert fixed.exit_code == 1  # of the other finding
    assert "TG122" not in fixed.stdout
    assert (tmp_path / "a.py").read_text() == FAULTY.replace(", inplace=True", "")
    assert run("--diff", source="x = 1\n").exit_code == 0


def test_fix_without_libcst_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("--fix")
    assert result.exit_code == 2
    assert "pip install 'torchguard[lint]'" in result.stderr


def test_results_are_remembered_in_the_users_cache(run, tmp_path):
    run("--no-cache")
    assert not (tmp_path / "cache").exists()
    run()
    assert any(one.is_file() for one in (tmp_path / "cache" / "torchguard" / "lint").rglob("*"))


def test_control_characters_in_file_names_are_escaped(run, tmp_path):
    (tmp_path / "\x1b[31mred.py").write_text(FAULTY)
    result = CliRunner().invoke(app, ["lint", "--no-cache", "."])
    assert "\x1b" not in result.stdout


def test_progress_is_shown_on_a_terminal_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    with _lint._progress() as progress:
        assert progress is None
    monkeypatch.setattr("sys.stderr", Terminal())
    with _lint._progress() as progress:
        assert progress is not None
        progress(1, 2)
    assert "checking" in sys.stderr.getvalue()


def test_nothing_imports_torch(tmp_path):
    (tmp_path / "a.py").write_text(FAULTY)
    code = (
        "import sys\nfrom torchguard.cli import app\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['lint', '--no-cache', 'a.py']).exit_code == 1\n"
        "import torchguard.lint._flake8\nprint('torch' in sys.modules, 'libcst' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ran.stdout == "False False\n"


def test_the_plugin_of_flake8_reports_the_same(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(FAULTY)
    _config.settings_for.cache_clear()
    found = [*Plugin(ast.parse(FAULTY), str(path), FAULTY.splitlines(keepends=True)).run()]
    assert [(line, column, message[:5]) for line, column, message, _ in found] == [(3, 4, "TG110"), (4, 4, "TG122")]


def test_every_rule_has_a_page_and_a_code_of_its_level():
    for code, rule in lint.RULES.items():
        page = _formats.page(rule)
        assert all(f"\n## {title}\n" in page for title in ("Why", "Wrong", "Right", "When to silence it"))
        assert code == rule.code
        assert code[:3] in ("TG1", "TG2", "TG3")
        for example in (rule.wrong, rule.right):
            compile(example, rule.code, "exec")
    assert len({rule.name for rule in lint.RULES.values()}) == len(lint.RULES) >= 25


@pytest.mark.long
def test_our_own_tree_is_clean(monkeypatch):
    monkeypatch.chdir(ROOT)
    _config.settings_for.cache_clear()
    result = lint.check_paths(["src", "tests", "examples", "benchmarks"], jobs=1)
    assert [str(finding) for finding in result.findings] == []
    assert len(result.files) > 200
