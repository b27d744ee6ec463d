"""Artifacts on disk are listed, read and removed, and nothing else is, also in hostile directories."""

import hashlib
import json
import os
import shutil
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchguard import artifacts
from torchguard.artifacts import Store

OUTSIDE = "not to be read, and not to be removed"


@pytest.fixture
def one(root):
    return Store(root).find()


@pytest.fixture
def outside(tmp_path):
    """A directory beside the artifacts, with a file in it."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "precious.txt").write_text(OUTSIDE)
    return directory


def again(artifact):
    """The same artifact, read again."""
    return next(one for one in Store(artifact.path.parent) if one.path == artifact.path)


def change_manifest(artifact, **changes):
    path = artifact.path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestList:
    def test_newest_first(self, root):
        new, old = Store(root)
        assert (new.state, old.state) == ("whole", "whole")
        assert new.created > old.created
        assert new.id > old.id
        assert [one.manifest()["compile_id"] for one in (new, old)] == ["0/1", "0/0"]
        assert new.size == sum(path.stat().st_size for path in new.path.iterdir())

    def test_a_missing_directory_has_no_artifacts(self, tmp_path):
        assert list(Store(tmp_path / "never made")) == []

    def test_the_root_is_an_argument_or_the_environment_or_debug_artifacts(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("TORCHGUARD_ARTIFACTS", raising=False)
        assert Store().root == tmp_path / "debug_artifacts"
        monkeypatch.setenv("TORCHGUARD_ARTIFACTS", "elsewhere")
        assert Store().root == tmp_path / "elsewhere"
        assert Store("here").root == tmp_path / "here"

    def test_other_directories_are_foreign(self, root):
        (root / "notes").mkdir()
        (root / "readme.txt").write_text("a file is nothing to list")
        foreign = [one for one in Store(root) if one.state == "foreign"]
        assert [(one.id, one.problem) for one in foreign] == [("notes", "it does not have the name of an artifact")]

    def test_a_directory_with_only_the_name_of_an_artifact_is_foreign(self, one):
        for path in one.path.iterdir():
            path.unlink()
        (one.path / "thesis.tex").write_text(OUTSIDE)
        assert again(one).state == "foreign"
        assert Store(one.path.parent).clean(keep=0)
        assert (one.path / "thesis.tex").read_text() == OUTSIDE

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda path: (path / "manifest.json").write_bytes(b"\x00\xff\x80"), "not valid JSON"),
            (lambda path: (path / "manifest.json").write_text('{"marker": "torchguard art'), "not valid JSON"),
            (lambda path: (path / "manifest.json").write_text("[" * 100_000), "not valid JSON"),
            (lambda path: (path / "manifest.json").write_text("[]"), "not written by torchguard"),
            (lambda path: (path / "manifest.json").unlink(), "is missing"),
            (lambda path: os.truncate(path / "manifest.json", 1 << 30), "larger than the limit"),
            (lambda path: os.truncate(path / "dynamo.py", 3), "dynamo.py has 3 bytes"),
            (lambda path: (path / "guards.json").unlink(), "guards.json: No such file"),
        ],
        ids=["binary", "truncated", "deep", "another", "no manifest", "huge", "file cut short", "file missing"],
    )
    def test_a_damaged_artifact_is_corrupt(self, one, damage, problem):
        damage(one.path)
        assert again(one).state == "corrupt"
        assert problem in again(one).problem

    def test_an_artifact_of_a_later_schema_is_corrupt(self, one):
        change_manifest(one, schema=99)
        assert again(one).problem == "manifest.json has schema 99, expected at most 2. Update torchguard to read it."

    def test_an_artifact_of_schema_1_is_listed_and_removed_but_its_graphs_are_not_read(self, one):
        path = one.path / "dynamo.json"
        content = json.dumps({**json.loads(path.read_text()), "schema": 1}).encode()
        path.write_bytes(content)
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        change_manifest(one, schema=1, files={**one.manifest()["files"], "dynamo.json": about})
        assert again(one).state == "whole"
        assert one.read_json("guards.json")["count"] > 0
        with pytest.raises(artifacts.ArtifactError, match=r"dynamo\.json has schema 1, .*\. Capture it again\."):
            one.read_json("dynamo.json")
        assert [removal.artifact.id for removal in Store(one.path.parent).clean(keep=0)][-1] == one.id

    def test_control_characters_in_names_are_escaped(self, root):
        (root / "\x1b[2Jgone\nline").mkdir()
        (found,) = [one for one in Store(root) if one.state == "foreign"]
        assert found.id == "\\x1b[2Jgone line"

    @given(content=st.binary(max_size=300))
    def test_any_bytes_for_a_manifest_are_listed(self, one, content):
        (one.path / "manifest.json").write_bytes(content)
        assert again(one).state == "corrupt"

    @given(data=st.data())
    def test_any_json_for_a_manifest_is_listed_and_harms_nothing(self, one, outside, data):
        anything = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=8,
        )
        names = st.sampled_from(
            ["files", "graphs", "id", "created", "notes", "line", "schema", "marker", "waiting_for"]
        )
        changes = data.draw(st.dictionaries(names, anything, max_size=4))
        original = (one.path / "manifest.json").read_bytes()
        try:
            change_manifest(one, **changes)
            found = again(one)
            assert found.state in ("whole", "corrupt")
            assert (found.state == "whole") == (found.problem == "")
        finally:
            (one.path / "manifest.json").write_bytes(original)
        assert (outside / "precious.txt").exists()


class TestFind:
    def test_by_id_or_the_start_of_it(self, root):
        new, old = Store(root)
        assert Store(root).find(new.id) == Store(root).find(new.id[:-1]) == new
        assert Store(root).find(old.id) == old

    def test_without_an_id_the_newest_whole_one(self, root):
        new, old = Store(root)
        (new.path / "manifest.json").unlink()
        assert Store(root).find() == old

    def test_the_error_says_how_many_there_are(self, root):
        with pytest.raises(artifacts.NoSuchArtifactError, match=r"There is no artifact 'nothing' among the 2 in"):
            Store(root).find("nothing")
        with pytest.raises(LookupError, match=r"matches 2 in .* Give more of the id"):
            Store(root).find("20")
        with pytest.raises(LookupError, match="no whole artifact"):
            Store(root / "empty").find()


class TestRead:
    def test_files_that_the_manifest_lists(self, one):
        assert "sin" in one.read_text("dynamo.py")
        assert one.read_json("dynamo.json")["kind"] == "dynamo"
        assert "guards.json" in one.files

    @pytest.mark.parametrize(
        "name", ["nothing.py", "../outside/precious.txt", "/etc/passwd", "manifest.json", "", "\x00"]
    )
    def test_other_files_are_refused(self, one, outside, name):
        with pytest.raises(artifacts.NoSuchArtifactError, match="has no file"):
            one.read_text(name)

    @pytest.mark.parametrize("name", ["../../outside/precious.txt", "/etc/passwd", "..", ".torchguard", "a/b", "x\n"])
    def test_a_manifest_with_a_path_outside_is_corrupt(self, one, outside, name):
        about = {"bytes": len(OUTSIDE), "sha256": "0" * 64}
        change_manifest(one, files={name: about})
        assert again(one).state == "corrupt"
        with pytest.raises(artifacts.ArtifactError, match="is not a file name"):
            one.read_text(name)

    def test_no_link_is_followed_to_a_file(self, one, outside):
        (one.path / "dynamo.py").unlink()
        (one.path / "dynamo.py").symlink_to(outside / "precious.txt")
        assert again(one).problem == "dynamo.py is not a regular file"
        with pytest.raises(artifacts.ArtifactError, match=r"dynamo\.py cannot be read"):
            one.read_text("dynamo.py")

    def test_no_link_is_followed_to_a_manifest(self, one, tmp_path):
        shutil.move(one.path / "manifest.json", tmp_path / "manifest.json")
        (one.path / "manifest.json").symlink_to(tmp_path / "manifest.json")
        assert again(one).state == "corrupt"

    def test_no_link_is_followed_to_an_artifact(self, one, root, tmp_path):
        shutil.move(one.path, tmp_path / "moved")
        one.path.symlink_to(tmp_path / "moved")
        assert (again(one).state, again(one).problem) == ("foreign", "it is not a directory")
        with pytest.raises(artifacts.ArtifactError, match="cannot be opened"):
            one.read_text("dynamo.py")
        Store(root).clean(keep=0)
        assert (tmp_path / "moved" / "manifest.json").exists()
        assert one.path.is_symlink()

    def test_opening_a_pipe_does_not_block(self, one):
        (one.path / "manifest.json").unlink()
        os.mkfifo(one.path / "manifest.json")
        assert again(one).problem == "manifest.json is not a regular file."

    def test_a_changed_file_is_an_error(self, one):
        text = (one.path / "dynamo.py").read_text()
        (one.path / "dynamo.py").write_text(text.replace("sin", "cos"))
        with pytest.raises(artifacts.ArtifactError, match="cut short or changed"):
            one.read_text("dynamo.py")


class TestClean:
    def test_keeps_the_newest(self, root):
        new, old = Store(root)
        (removal,) = Store(root).clean(keep=1)
        assert (removal.artifact, removal.why) == (old, "beyond the newest 1")
        assert list(Store(root)) == [new]

    def test_what_keep_keeps_stays_whatever_its_age_and_size(self, root):
        new, old = Store(root)
        assert Store(root).clean(older_than=timedelta(0), keep=3, max_bytes=1) == []
        (removal,) = Store(root).clean(older_than=timedelta(0), keep=1, max_bytes=1)
        assert removal.artifact == old
        assert list(Store(root)) == [new]

    def test_remove_removes_what_a_dry_run_returned(self, root):
        new, old = Store(root)
        named = Store(root).clean(keep=0, dry_run=True)
        assert {one.why for one in named} == {"all"}
        (new.path / "more.txt").write_text("since")
        assert [one.artifact for one in Store(root).remove(named)] == [old]
        assert [one.id for one in Store(root)] == [new.id]
        assert Store(root).remove(named) == []

    def test_removes_old_artifacts(self, root):
        assert Store(root).clean(older_than=timedelta(days=1)) == []
        assert len(Store(root).clean(older_than=timedelta(0))) == 2
        assert list(root.iterdir()) == []

    def test_removes_the_oldest_beyond_a_size(self, root):
        new, old = Store(root)
        assert [one.artifact for one in Store(root).clean(max_bytes=new.size + old.size - 1)] == [old]
        assert [one.artifact for one in Store(root).clean(max_bytes=0)] == [new]

    def test_a_dry_run_removes_nothing(self, root):
        assert len(Store(root).clean(keep=0, dry_run=True)) == 2
        assert len(list(Store(root))) == 2

    def test_without_a_limit_whole_artifacts_stay(self, root):
        assert Store(root).clean() == []

    def test_corrupt_artifacts_are_removed_too(self, root, one):
        (one.path / "manifest.json").write_text("?")
        Store(root).clean(keep=0)
        assert list(root.iterdir()) == []

    def test_a_file_of_the_user_stays(self, root, one):
        (one.path / "notes.txt").write_text(OUTSIDE)
        Store(root).clean(keep=0)
        assert [path.name for path in one.path.iterdir()] == ["notes.txt"]
        assert again(one).state == "foreign"

    def test_foreign_directories_stay(self, root, outside):
        (root / "notes").mkdir()
        (root / "link").symlink_to(outside)
        Store(root).clean(keep=0)
        assert sorted(path.name for path in root.iterdir()) == ["link", "notes"]

    def test_a_link_in_an_artifact_is_unlinked_and_not_followed(self, root, one, outside):
        (one.path / "dynamo.py").unlink()
        (one.path / "dynamo.py").symlink_to(outside / "precious.txt")
        Store(root).clean(keep=0)
        assert list(root.iterdir()) == []
        assert (outside / "precious.txt").read_text() == OUTSIDE

    def test_paths_outside_in_an_ownership_file_are_not_removed(self, root, one, outside):
        with (one.path / ".torchguard").open("a") as file:
            file.write("\n../../outside/precious.txt\n" + str(outside / "precious.txt") + "\n..\n.\n")
        Store(root).clean(keep=0)
        assert (outside / "precious.txt").read_text() == OUTSIDE
        assert list(root.iterdir()) == []
