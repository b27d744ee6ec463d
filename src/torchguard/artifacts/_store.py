"""Artifacts on disk: listed, found and cleaned up, whatever state they are in."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from torchguard._sizes import shown_size
from torchguard.artifacts import _ownership
from torchguard.artifacts._artifact import HALF_WRITTEN, MANIFEST, Artifact, look, manifest_in
from torchguard.artifacts._safe_io import in_a_line, opened
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

ROOT_VARIABLE, DEFAULT_ROOT = "TORCHGUARD_ARTIFACTS", "debug_artifacts"


@dataclass(frozen=True)
class Removal:
    """An artifact that was removed, or would be in a dry run, and why."""

    artifact: Artifact
    why: str


class Store:
    """The artifacts in a directory: `root`, else what TORCHGUARD_ARTIFACTS says, else `debug_artifacts`."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        given = root if root is not None else os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT
        self.root = Path(given).absolute()  # the program may change its directory

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def __iter__(self) -> Iterator[Artifact]:
        """All there is, newest first, the broken and the foreign as such."""
        found = [look(self.root, name) for name in self._names()]
        return iter(sorted(filter(None, found), key=lambda one: (one.created, one.id), reverse=True))

    def find(self, id: str | None = None) -> Artifact:
        """The artifact with this id, or the only one whose id starts so; without one, the newest whole one."""
        artifacts = [one for one in self if one.state != "foreign"]
        if id is None:
            fitting = [one for one in artifacts if one.state == "whole"][:1]
        else:
            fitting = [one for one in artifacts if one.id == id] or [one for one in artifacts if one.id.startswith(id)]
        what = "whole artifact" if id is None else f"artifact {in_a_line(repr(id))}"
        if not fitting:
            raise NoSuchArtifactError(f"There is no {what} in {self.root}, which has {len(artifacts)}.")
        if len(fitting) > 1:
            some = ", ".join(one.id for one in fitting[:5])
            raise NoSuchArtifactError(f"{what} is any of {len(fitting)} in {self.root}: {some}. Write more of the id.")
        return fitting[0]

    def clean(
        self,
        older_than: timedelta | None = None,
        keep: int | None = None,
        max_bytes: int | None = None,
        dry_run: bool = False,
    ) -> list[Removal]:
        """Remove what is too old, too many or too large, oldest first, and what a killed process left half-written.

        What is being written stays, and so does everything that torchguard did not write.

        Args:
            keep: how many to keep, the newest.
            max_bytes: how large those kept may be together.
        """
        before = None if older_than is None else datetime.now(UTC) - older_than
        chosen = _Rules(before, keep, max_bytes).removals(self._ours())
        return chosen if dry_run else [one for one in chosen if remove(one.artifact.path)]

    def remove(self, removals: Iterable[Removal]) -> list[Removal]:
        """Remove what a dry run of `clean` named, and nothing else; not what has changed since. Those that went."""
        return [one for one in removals if _is_as_it_was(one.artifact) and remove(one.artifact.path)]

    def make_room(self, max_bytes: int, spared: Set[str]) -> list[Removal]:
        """Remove the oldest until no more than `max_bytes` are left, but for the ids that are spared."""
        chosen = _Rules(None, None, max_bytes).removals(self._ours())
        return [one for one in chosen if one.artifact.id not in spared and remove(one.artifact.path)]

    def _ours(self) -> list[Artifact]:
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
        """What to remove, oldest first. What is being written counts, and stays."""
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
        if self.before is not None and created < self.before:
            return f"older than {self.before:%Y-%m-%d %H:%M} UTC"
        if self.keep == 0:
            return "all"
        if self.keep is not None and count > self.keep:
            return f"beyond the newest {self.keep}"
        if self.max_bytes is not None and total > self.max_bytes:
            return f"beyond {shown_size(self.max_bytes)} in all"
        return ""


def _is_as_it_was(artifact: Artifact) -> bool:
    return look(artifact.path.parent, artifact.path.name) == artifact


def remove(path: Path) -> bool:
    """Remove the files torchguard wrote, and the directory if nothing else is in it. False if someone writes there."""
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
                    # The journal last: with it, what is left of a removal that was killed is still known as ours.
                    _unlink(directory, [MANIFEST, *names, _ownership.JOURNAL])
        with contextlib.suppress(OSError):  # something that torchguard did not write is in it
            path.rmdir()
    except (OSError, ArtifactError):  # someone else was faster, or may remove it and we may not
        return not path.exists()
    return True


def _unlink(directory: int, names: list[str]) -> None:
    for name in names:
        for one in (name, f"{name}.new"):  # the latter, where writing it was cut off
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one, dir_fd=directory)
