"""The store: a directory of artifacts that lists, finds and removes them, whatever state they are in."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from torchguard._sizes import format_size
from torchguard.artifacts import _ownership
from torchguard.artifacts._artifact import HALF_WRITTEN, MANIFEST, Artifact, artifact_at, manifest_in
from torchguard.artifacts._safe_io import opened, single_line
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

ROOT_VARIABLE, DEFAULT_ROOT = "TORCHGUARD_ARTIFACTS", "debug_artifacts"


@dataclass(frozen=True)
class Removal:
    """An artifact that was removed, or would be without `dry_run`, and why."""

    artifact: Artifact
    why: str


class Store:
    """The artifacts in a directory: `root`, else what TORCHGUARD_ARTIFACTS says, else `debug_artifacts`."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        given = root if root is not None else os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT
        self.root = Path(given).absolute()  # the program may change its working directory

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def __iter__(self) -> Iterator[Artifact]:
        """All artifacts, newest first; corrupt and foreign entries are included with that state."""
        found = [artifact_at(self.root, name) for name in self._names()]
        return iter(sorted(filter(None, found), key=lambda one: (one.created, one.id), reverse=True))

    def find(self, id: str | None = None) -> Artifact:
        """The artifact with this id, or the only one whose id starts with it; without an id, the newest whole one."""
        artifacts = [one for one in self if one.state != "foreign"]
        if id is None:
            matching = [one for one in artifacts if one.state == "whole"][:1]
        else:
            matching = [one for one in artifacts if one.id == id] or [one for one in artifacts if one.id.startswith(id)]
        what = "whole artifact" if id is None else f"artifact {single_line(repr(id))}"
        if not matching:
            raise NoSuchArtifactError(f"There is no {what} among the {len(artifacts)} in {self.root}.")
        if len(matching) > 1:
            some = ", ".join(one.id for one in matching[:5])
            raise NoSuchArtifactError(f"{what} matches {len(matching)} in {self.root}: {some}. Give more of the id.")
        return matching[0]

    def clean(
        self,
        older_than: timedelta | None = None,
        keep: int | None = None,
        max_bytes: int | None = None,
        dry_run: bool = False,
    ) -> list[Removal]:
        """Remove artifacts that exceed a limit, oldest first, and those that a killed process left half-written.

        Artifacts that are being written stay, and so does everything that torchguard did not write. What `keep` keeps
        stays whatever its age and size.

        Args:
            older_than: remove artifacts of at least this age.
            keep: keep this number of artifacts, the newest.
            max_bytes: keep the newest artifacts that together take no more than this.
            dry_run: remove nothing, and return what would be removed.
        """
        before = None if older_than is None else datetime.now(UTC) - older_than
        chosen = _Rules(before, keep, max_bytes).removals(self._own())
        return chosen if dry_run else [one for one in chosen if remove(one.artifact.path)]

    def remove(self, removals: Iterable[Removal]) -> list[Removal]:
        """Remove what a dry run of `clean` returned, except what has changed since. Returns those that were removed."""
        return [one for one in removals if _is_unchanged(one.artifact) and remove(one.artifact.path)]

    def make_room(self, max_bytes: int, spared: Set[str]) -> list[Removal]:
        """Remove the oldest until at most `max_bytes` are left. The ids in `spared` stay."""
        chosen = _Rules(None, None, max_bytes).removals(self._own())
        return [one for one in chosen if one.artifact.id not in spared and remove(one.artifact.path)]

    def _own(self) -> list[Artifact]:
        return [one for one in self if one.state != "foreign"]

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArtifactError(f"{self.root} cannot be listed: {error.strerror}.") from None


@dataclass(frozen=True)
class _Rules:
    before: datetime | None
    keep: int | None
    max_bytes: int | None

    def removals(self, newest_first: list[Artifact]) -> list[Removal]:
        """What to remove, oldest first. Artifacts that are being written count towards the limits, and stay."""
        count, total, found = 0, 0, []
        for one in newest_first:
            if one.problem == HALF_WRITTEN:
                found.append(Removal(one, HALF_WRITTEN))
                continue
            count, total = count + 1, total + one.size
            why = self._why(one.created, count, total)
            if why and one.state != "being written":
                found.append(Removal(one, why))
        return found[::-1]

    def _why(self, created: datetime, count: int, total: int) -> str:
        if self.keep is not None and count <= self.keep:
            return ""
        if self.before is not None and created < self.before:
            return f"older than {self.before:%Y-%m-%d %H:%M} UTC"
        if self.keep == 0:
            return "all"
        if self.keep is not None and count > self.keep:
            return f"beyond the newest {self.keep}"
        if self.max_bytes is not None and total > self.max_bytes:
            return f"beyond {format_size(self.max_bytes)} in all"
        return ""


def _is_unchanged(artifact: Artifact) -> bool:
    return artifact_at(artifact.path.parent, artifact.path.name) == artifact


def remove(path: Path) -> bool:
    """Remove the files that torchguard wrote, and the directory if then empty. False if a process writes there."""
    try:
        with opened(path) as directory:
            names = {*(_ownership.names_in(directory) or ())}
            with contextlib.suppress(ArtifactError):
                names |= {*manifest_in(directory)["files"]}
            if _ownership.names_in(directory) is None:
                _unlink(directory, [MANIFEST, *names])
            else:
                with _ownership.held(directory) as lock:
                    if lock is None:
                        return False
                    # The ownership file last: if the process is killed here, the rest is still known as torchguard's.
                    _unlink(directory, [MANIFEST, *names, _ownership.FILE])
        with contextlib.suppress(OSError):  # it holds a file that torchguard did not write
            path.rmdir()
    except (OSError, ArtifactError):  # another process removed it, or this one lacks permission
        return not path.exists()
    return True


def _unlink(directory: int, names: list[str]) -> None:
    for name in names:
        for one in (name, f"{name}.new"):  # the second, where writing was interrupted
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one, dir_fd=directory)
