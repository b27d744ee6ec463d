"""One artifact on disk, and what state it is in."""

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchguard.artifacts import _ownership
from torchguard.artifacts._safe_io import JSON_LIMIT, TEXT_LIMIT, in_a_line, opened, parsed, read, size_of
from torchguard.artifacts._schema import MARKER, SCHEMA, SCHEMA_VERSION, Schema, problem_with
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MANIFEST = "manifest.json"
HALF_WRITTEN = "half-written by a process that has ended"
_MANIFEST_LIMIT = 8 << 20
_ID = re.compile(r"(\d{8}-\d{6}-\d{6})-[0-9a-f]{6}-[0-9A-Za-z_]{1,40}", re.ASCII)
_TIME = "%Y%m%d-%H%M%S-%f"
_UNKNOWN_TIME = datetime.fromtimestamp(0, UTC)
_GRACE = 60  # seconds in which a directory without a journal may be one that is just being made

_OF_FILE = {f"{name}.json": SCHEMA[name] for name in ("guards", "recompiles", "environment")}

State = Literal["whole", "being written", "corrupt", "foreign"]


@dataclass(frozen=True)
class Artifact:
    """One compilation of one frame, as a directory. `problem` says what is wrong with it, empty if nothing is."""

    id: str
    path: Path
    created: datetime
    state: State
    problem: str
    size: int

    def manifest(self) -> dict[str, Any]:
        """What the artifact holds, checked against the schema."""
        with opened(self.path) as directory:
            return manifest_in(directory)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.manifest()["files"])

    def read_bytes(self, name: str) -> bytes:
        """A file that the manifest names, if it is as it was written."""
        with opened(self.path) as directory:
            listed = manifest_in(directory)["files"]
            if name not in listed:
                some = ", ".join(sorted(listed)) or "none"
                raise NoSuchArtifactError(f"{self.id} has no file {in_a_line(repr(name))}. It has: {some}.")
            content = read(directory, name, TEXT_LIMIT)
        if hashlib.sha256(content).hexdigest() != listed[name]["sha256"]:
            raise ArtifactError(f"{self.id}: {name} is not what was written: it was cut short or changed.")
        return content

    def read_text(self, name: str) -> str:
        return self.read_bytes(name).decode("utf-8", "replace")

    def read_json(self, name: str) -> Any:
        """A file as data; what torchguard wrote by itself, and was not attached, is checked against its schema."""
        content = self.read_bytes(name)
        if len(content) > JSON_LIMIT:
            raise ArtifactError(f"{self.id}: {name} is larger than {JSON_LIMIT} bytes, more than is parsed.")
        data = parsed(content, name)
        schema = _schema_of(self.manifest(), name)
        if schema is not None and (problem := problem_with(data, schema)):
            raise ArtifactError(f"{self.id}: {name} is not of the form it has to have: {in_a_line(problem)}.")
        return data

    def attached(self, name: str) -> tuple[str, ...]:
        """The files that were attached under a name: one for each time."""
        files = self.manifest()["files"].items()
        return tuple(file for file, about in files if about.get("attached_as") == name)

    def load_graph(self, name: str = "forward") -> "ExportedProgram":
        """The `torch.export.ExportedProgram` of a graph, where it was captured with `exported=True`."""
        from torchguard.artifacts._export import load

        return load(self, name)


def _schema_of(manifest: Mapping[str, Any], name: str) -> Schema | None:
    if "attached_as" in manifest["files"].get(name, ()):
        return None
    if any(name == graph["files"].get("json") for graph in manifest["graphs"]):
        return SCHEMA["graph"]
    return _OF_FILE.get(name)


def new_id(compile_id: str, unique: str) -> str:
    of_compilation = re.sub(r"[^0-9A-Za-z]+", "_", compile_id).strip("_")[:40] or "0"
    return f"{datetime.now(UTC).strftime(_TIME)}-{unique}-{of_compilation}"


def partial_name(id: str) -> str:
    """What the directory of an artifact is called until it is whole."""
    return f".{id}.partial"


def manifest_in(directory: int) -> dict[str, Any]:
    """The manifest in a directory. What is missing or wrong in it is an error in words."""
    manifest = parsed(read(directory, MANIFEST, _MANIFEST_LIMIT), MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("marker") != MARKER:
        raise ArtifactError(f"{MANIFEST} was not written by torchguard.")
    if manifest.get("schema") != SCHEMA_VERSION:
        version = in_a_line(str(manifest.get("schema")), 20)
        raise ArtifactError(f"{MANIFEST} has schema {version}, and this torchguard reads {SCHEMA_VERSION}.")
    try:
        problem = problem_with(manifest, SCHEMA["manifest"])
    except RecursionError:
        problem = "it is nested too deeply"
    if problem:
        raise ArtifactError(f"{MANIFEST}: {in_a_line(problem)}.")
    return manifest


def look(root: Path, name: str) -> Artifact | None:
    """What an entry of a directory of artifacts is; None if it is nothing to list: a file, or hidden."""
    id = name.removeprefix(".").removesuffix(".partial")
    is_partial = name == partial_name(id)
    is_named = _ID.fullmatch(id) is not None and (is_partial or name == id)
    try:
        mode = (root / name).lstat()
        if not stat.S_ISDIR(mode.st_mode):
            is_listed = is_named or stat.S_ISLNK(mode.st_mode)
            return _artifact(root, name, name, "foreign", "it is no directory") if is_listed else None
        if not is_named:
            is_listed = not name.startswith(".")
            return _artifact(root, name, name, "foreign", "its name is none of torchguard's") if is_listed else None
        with opened(root / name) as directory:
            state, problem = _state(directory, id, is_partial, time.time() - mode.st_mtime < _GRACE)
            return _artifact(root, name, id, state, problem, size_of(directory))
    except FileNotFoundError:  # removed meanwhile
        return None
    except (OSError, ValueError) as error:
        return _artifact(root, name, id, "foreign", in_a_line(str(error)))


def _artifact(root: Path, name: str, id: str, state: State, problem: str, size: int = 0) -> Artifact:
    found = _ID.fullmatch(id)
    created = _UNKNOWN_TIME
    if found:
        with contextlib.suppress(ValueError):  # digits that are no date
            created = datetime.strptime(found[1], _TIME).replace(tzinfo=UTC)
    return Artifact(in_a_line(id), root / name, created, state, problem, size)


def _state(directory: int, id: str, is_partial: bool, is_new: bool) -> tuple[State, str]:
    is_ours = _ownership.names_in(directory) is not None
    if (is_ours and _ownership.is_held(directory, if_unknown=is_partial)) or (is_partial and is_new and not is_ours):
        return "being written", ""
    if is_partial:
        return ("corrupt", HALF_WRITTEN) if is_ours or not os.listdir(directory) else ("foreign", "it has no journal")
    try:
        manifest = manifest_in(directory)
    except ArtifactError as error:
        return "corrupt" if is_ours else "foreign", str(error)
    if manifest["id"] != id:
        return "corrupt", f"{MANIFEST} is that of another artifact"
    found = (_problem_with_file(directory, name, about["bytes"]) for name, about in manifest["files"].items())
    problem = next(filter(None, found), "")
    return ("corrupt", problem) if problem else ("whole", "")


def _problem_with_file(directory: int, name: str, size: int) -> str:
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if not stat.S_ISREG(info.st_mode):
        return f"{name} is no plain file"
    return "" if info.st_size == size else f"{name} has {info.st_size} bytes, not {size}"
