"""`list`, `show`, `diff` and `clean`."""

import json
import os
import pty
import shutil
import subprocess
import sys

import pytest

from torchguard import artifacts


@pytest.fixture
def store(captured, tmp_path):
    """A copy of the artifacts that the test may change."""
    shutil.copytree(captured.root, tmp_path / "copy")
    return artifacts.Store(tmp_path / "copy")


def ids(store):
    return [artifact.id for artifact in store]


def test_list_shows_the_newest_first(invoke, captured):
    result = invoke("list", "--dir", captured.root)
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.splitlines()[1:]]
    assert listed == ids(captured)
    assert "ScaledResidual.forward" in result.stdout


def test_list_as_json_is_json_alone(invoke, captured):
    output = json.loads(invoke("list", "--dir", captured.root, "--json").stdout)
    assert [one["id"] for one in output["artifacts"]] == ids(captured)
    assert {"forward", "backward"} <= {graph["kind"] for one in output["artifacts"] for graph in one["graphs"]}


def test_list_is_readable_in_forty_columns(invoke, store, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    own = ids(store)
    (store.root / "notes.txt").write_text("mine")
    (store.root / "empty").mkdir()
    result = invoke("list", "--dir", store.root)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.strip() for line in lines if not line.startswith(" ")] == own
    assert "also holds 2 entries that torchguard did not write" in result.stderr


def test_tables_are_never_cut_where_stdout_is_no_terminal(invoke, captured, monkeypatch):
    whole = invoke("show", "--dir", captured.root).stdout
    monkeypatch.setenv("COLUMNS", "20")
    assert invoke("show", "--dir", captured.root).stdout == whole


def test_guards_are_analyzed_over_the_whole_run(invoke, captured):
    found = json.loads(invoke("analyze", "--type", "guards", "--dir", captured.root, "--json").stdout)
    assert len(found["frames"]) == len(ids(captured)) > 1
    one = json.loads(invoke("analyze", "--type", "guards", ids(captured)[0], "--dir", captured.root, "--json").stdout)
    assert len(one["frames"]) == 1


def test_analyze_reads_the_device_of_the_environment(invoke, captured, monkeypatch):
    monkeypatch.setenv("MOCK_DENY", "aten.*")
    result = invoke("analyze", "--type", "device", "--dir", captured.root)
    assert result.exit_code == 1
    assert result.stdout.startswith("Does not fit mock, because aten.")
    monkeypatch.setenv("MOCK_DENY", "F.nothing")
    assert invoke("analyze", "--type", "device", "--dir", captured.root).exit_code == 2


def test_list_takes_the_directory_of_the_environment(invoke, captured, monkeypatch):
    monkeypatch.setenv("TORCHGUARD_ARTIFACTS", str(captured.root))
    assert captured.find().id in invoke("list").stdout


@pytest.mark.parametrize(
    "verb", [["list"], ["show"], ["diff", "a", "b"], ["analyze", "--type", "guards"]], ids=" ".join
)
def test_without_artifacts_a_message_says_how_to_capture_some(invoke, tmp_path, verb):
    result = invoke(*verb, "--dir", tmp_path / "none")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "torchguard run SCRIPT" in result.stderr
    assert not (tmp_path / "none").exists()


def test_an_empty_list_as_json_is_still_json(invoke, tmp_path):
    result = invoke("list", "--dir", tmp_path, "--json")
    assert json.loads(result.stdout)["artifacts"] == []
    assert result.exit_code == 3


def test_a_corrupt_artifact_is_listed_as_such(invoke, store):
    (store.find().path / "manifest.json").write_text("{")
    result = invoke("list", "--dir", store.root)
    assert result.exit_code == 0
    assert "corrupt" in result.stdout
    output = json.loads(invoke("list", "--dir", store.root, "--json").stdout)
    assert output["artifacts"][0]["state"] == "corrupt"
    assert output["artifacts"][0]["problem"]


def test_show_takes_the_start_of_an_id(invoke, captured):
    first = captured.find()
    assert str(first.path) in invoke("show", first.id[:-1], "--dir", captured.root).stdout


def test_show_prints_graphs_recompiles_and_advice(invoke, captured):
    recompiled = next(one for one in captured if "recompiles.json" in one.files and "0_1" in one.id)
    output = invoke("show", recompiled.id, "--dir", captured.root).stdout
    assert "forward.py" in output
    assert "size mismatch at index 0. expected 16, actual 8" in output
    assert "mark_dynamic(x, 0)" in output


def test_show_prints_graph_breaks_with_the_source_line(invoke, captured):
    broken = next(one for one in captured if "broken" in one.manifest()["function"] and "recompiles.json" in one.files)
    output = invoke("show", broken.id, "--dir", captured.root).stdout
    assert "1 graph break" in output
    assert "torch._dynamo.graph_break()" in output


def test_show_as_json(invoke, captured):
    output = json.loads(invoke("show", "--dir", captured.root, "--json").stdout)
    assert output["id"] == captured.find().id
    assert output["guards"]["frames"][0]["guard_count"] > 0


def test_show_writes_a_file_to_stdout(invoke, captured):
    artifact = next(one for one in captured if "forward.py" in one.files)
    result = invoke("show", artifact.id, "--file", "forward.py", "--dir", captured.root)
    assert result.stdout == artifact.read_text("forward.py")


def test_show_of_a_missing_file_names_those_that_exist(invoke, captured):
    result = invoke("show", "--file", "../secret", "--dir", captured.root)
    assert result.exit_code == 1
    assert "guards.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_id_gets_close_matches(invoke, captured):
    known = captured.find().id
    result = invoke("show", known[:-5] + "x" + known[-4:], "--dir", captured.root)
    assert result.exit_code == 3
    assert f"Did you mean {known}" in result.stderr


def test_an_ambiguous_id_is_refused(invoke, captured):
    result = invoke("show", "2", "--dir", captured.root)
    assert result.exit_code == 3
    assert "Give more" in result.stderr


@pytest.mark.parametrize("verb", [["show"], ["analyze", "--type", "guards"]], ids=" ".join)
def test_partly_written_artifacts_alone_are_not_found(invoke, store, verb):
    for one in store:
        (one.path / "manifest.json").unlink()
        one.path.rename(store.root / f".{one.id}.partial")
    result = invoke(*verb, "--dir", store.root)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "There is no whole artifact" in result.stderr


def test_diff_of_an_artifact_with_itself_exits_with_0(invoke, captured):
    known = captured.find().id
    assert invoke("diff", known, known, "--dir", captured.root).exit_code == 0


def test_diff_prints_shapes_that_differ(invoke, captured):
    a, b = sorted(one.id for one in captured if "ScaledResidual" in one.manifest()["function"])
    result = invoke("diff", a, b, "--dir", captured.root)
    assert result.exit_code == 1
    assert "[16, 16] -> [8, 16]" in result.stdout
    assert json.loads(invoke("diff", a, b, "--dir", captured.root, "--json").stdout)


def test_clean_keeps_the_newest(invoke, store):
    kept = ids(store)[:1]
    result = invoke("clean", "--keep", 1, "--yes", "--dir", store.root)
    assert result.exit_code == 0
    assert ids(store) == kept


def test_clean_without_options_removes_artifacts_older_than_a_week(invoke, store):
    before = ids(store)
    result = invoke("clean", "--yes", "--dir", store.root)
    assert result.exit_code == 0
    assert ids(store) == before
    assert "nothing to remove" in result.stderr


def test_clean_by_size(invoke, store):
    largest = max(artifact.size for artifact in store)
    invoke("clean", "--max-size", largest, "--yes", "--dir", store.root)
    assert sum(artifact.size for artifact in store) <= largest


def test_clean_by_age(invoke, store):
    assert invoke("clean", "--older-than", "1w", "--yes", "--dir", store.root).exit_code == 0
    assert len(ids(store)) > 1
    invoke("clean", "--older-than", "0s", "--yes", "--dir", store.root)
    assert ids(store) == []


def test_a_dry_run_removes_nothing(invoke, store):
    before = ids(store)
    output = json.loads(invoke("clean", "--all", "--dry-run", "--json", "--dir", store.root).stdout)
    assert sorted(one["id"] for one in output["removed"]) == sorted(before)
    assert ids(store) == before


def test_without_a_terminal_and_without_yes_clean_refuses(invoke, store):
    before = ids(store)
    result = invoke("clean", "--all", "--dir", store.root)
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert ids(store) == before


def test_clean_says_why_each_is_removed(invoke, store):
    output = json.loads(invoke("clean", "--all", "--dry-run", "--json", "--dir", store.root).stdout)
    assert {one["why"] for one in output["removed"]} == {"all"}


def test_clean_removes_only_what_torchguard_wrote(invoke, store):
    (store.root / "notes.txt").write_text("mine")
    (store.root / "weights").mkdir()
    invoke("clean", "--all", "--yes", "--dir", store.root)
    assert sorted(path.name for path in store.root.iterdir()) == ["notes.txt", "weights"]


@pytest.mark.parametrize(
    "wrong", [["--older-than", "soon"], ["--max-size", "much"], ["--all", "--keep", "3"]], ids=" ".join
)
def test_clean_refuses_wrong_options(invoke, store, wrong):
    result = invoke("clean", *wrong, "--yes", "--dir", store.root)
    assert result.exit_code == 2
    assert len(ids(store)) > 1


@pytest.mark.parametrize(("answer", "left"), [("y", 0), pytest.param("n", 4, marks=pytest.mark.long)])
def test_on_a_terminal_clean_asks(store, answer, left):
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchguard", "clean", "--all", "--dir", store.root],
        stdin=child,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(terminal, f"{answer}\n".encode())
    _, asked = process.communicate(timeout=100)
    os.close(terminal)
    os.close(child)
    assert "Remove them?" in asked
    assert len(ids(store)) == left


@pytest.mark.long
def test_clean_removes_what_it_listed_and_nothing_added_or_changed_since(store):
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchguard", "clean", "--all", "--dir", store.root],
        stdin=child,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    asked = ""
    while "Remove them?" not in asked:
        asked += process.stderr.read(1)
    changed, *rest = store
    added = store.root / changed.id.replace("20", "21", 1)
    shutil.copytree(rest[0].path, added)
    (changed.path / "more.json").write_text("{}")
    os.write(terminal, b"y\n")
    process.communicate(timeout=100)
    os.close(terminal)
    os.close(child)
    assert sorted(path.name for path in store.root.iterdir()) == sorted([changed.id, added.name])


def test_text_in_artifacts_cannot_control_the_terminal(invoke, store):
    path = store.find().path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["function"] = "[bold]f[/bold]\x1b[2J\x9b31m\u202e"
    path.write_text(json.dumps(manifest))
    for verb in ("list", "show"):
        output = invoke(verb, "--dir", store.root).stdout
        assert "[bold]f[/bold]" in output
        assert not {"\x1b", "\x9b", "\u202e"} & set(output)
