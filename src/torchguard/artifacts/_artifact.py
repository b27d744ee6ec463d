"""One artifact on disk: its state, its manifest and its files."""

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
from torchguard.artifacts._safe_io import JSON_LIMIT, TEXT_LIMIT, opened, parse_json, read_file, single_line, size_of
from torchguard.artifacts._schema import MARKER, READABLE_VERSIONS, SCHEMA, SCHEMA_VERSION, Schema, problem_with
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MANIFEST = "manifest.json"
HALF_WRITTEN = "half-written by a process that has ended"
_MANIFEST_LIMIT = 8 << 20
_ID = re.compile(r"(\d{8}-\d{6}-\d{6})-[0-9a-f]{6}-[0-9A-Za-z_]{1,40}", re.ASCII)
_TIME = "%Y%m%d-%H%M%S-%f"
_UNKNOWN_TIME = datetime.fromtimestamp(0, UTC)
_GRACE = 60  # seconds in which a directory without an ownership file may be one that is just being created

_OF_FILE = {f"{name}.json": SCHEMA[name] for name in ("guards", "recompiles", "environment")}

State = Literal["whole", "being written", "corrupt", "foreign"]


@dataclass(frozen=True)
class Artifact:
    """One compilation of one frame, as a directory. `problem` says what is wrong with it; empty if it is whole."""

    id: str
    path: Path
    created: datetime
    state: State
    problem: str
    size: int

    def manifest(self) -> dict[str, Any]:
        """The manifest, checked against the schema."""
        with opened(self.path) as directory:
            return manifest_in(directory)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that the manifest lists."""
        return tuple(self.manifest()["files"])

    def read_bytes(self, name: str) -> bytes:
        """The content of a file that the manifest lists. Raises ArtifactError if it is not what was written."""
        with opened(self.path) as directory:
            listed = manifest_in(directory)["files"]
            if name not in listed:
                some = ", ".join(sorted(listed)) or "none"
                raise NoSuchArtifactError(f"{self.id} has no file {single_line(repr(name))}. It has: {some}.")
            content = read_file(directory, name, TEXT_LIMIT)
        if hashlib.sha256(content).hexdigest() != listed[name]["sha256"]:
            raise ArtifactError(f"{self.id}: {name} is not what was written: it was cut short or changed.")
        return content

    def read_text(self, name: str) -> str:
        return self.read_bytes(name).decode("utf-8", "replace")

    def read_json(self, name: str) -> Any:
        """A JSON file as data. Files that torchguard wrote, and were not attached, are checked against their schema."""
        content = self.read_bytes(name)
        if len(content) > JSON_LIMIT:
            raise ArtifactError(f"{self.id}: {name} is larger than the limit of {JSON_LIMIT} bytes for JSON.")
        return _checked(self, parse_json(content, name), name, _schema_of(self.manifest(), name))

    def attached(self, name: str) -> tuple[str, ...]:
        """The files that were attached under a name, one for each call of `attach`."""
        files = self.manifest()["files"].items()
        return tuple(file for file, about in files if about.get("attached_as") == name)

    def load_graph(self, name: str = "forward") -> "ExportedProgram":
        """The `torch.export.ExportedProgram` of a graph that was captured with `exported=True`."""
        from torchguard.artifacts._formats import load

        return load(self, name)


def read_as(artifact: Artifact, name: str, schema: Schema) -> Any:
    """A JSON file as data that satisfies a schema, also where the manifest says that the file was attached."""
    return _checked(artifact, artifact.read_json(name), name, schema)


def _checked(artifact: Artifact, data: Any, name: str, schema: Schema | None) -> Any:
    if schema is None:
        return data
    if schema is SCHEMA["graph"] and isinstance(data, dict) and data.get("schema") == 1:
        raise ArtifactError(
            f"{artifact.id}: {name} has schema 1, and this torchguard reads graphs of schema {SCHEMA_VERSION}. "
            "Capture it again."
        )
    try:
        problem = problem_with(data, schema)
    except RecursionError:
        problem = "it is nested too deeply"
    if problem:
        raise ArtifactError(f"{artifact.id}: {name} violates its schema: {single_line(problem)}.")
    return data


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
    """The name of the directory of an artifact until it is published."""
    return f".{id}.partial"


def manifest_in(directory: int) -> dict[str, Any]:
    """The manifest in a directory. Raises ArtifactError if it is missing or malformed."""
    manifest = parse_json(read_file(directory, MANIFEST, _MANIFEST_LIMIT), MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("marker") != MARKER:
        raise ArtifactError(f"{MANIFEST} was not written by torchguard.")
    if manifest.get("schema") not in READABLE_VERSIONS:
        version = single_line(str(manifest.get("schema")), 20)
        raise ArtifactError(
            f"{MANIFEST} has schema {version}, expected at most {SCHEMA_VERSION}. Update torchguard to read it."
        )
    try:
        problem = problem_with(manifest, SCHEMA["manifest"])
    except RecursionError:
        problem = "it is nested too deeply"
    if problem:
        raise ArtifactError(f"{MANIFEST}: {single_line(problem)}.")
    return manifest


def artifact_at(root: Path, name: str) -> Artifact | None:
    """The artifact, or foreign entry, at a name in a store; None for plain files and other hidden directories."""
    id = name.removeprefix(".").removesuffix(".partial")
    is_partial = name == partial_name(id)
    is_named = _ID.fullmatch(id) is not None and (is_partial or name == id)
    try:
        mode = (root / name).lstat()
        if not stat.S_ISDIR(mode.st_mode):
            is_listed = is_named or stat.S_ISLNK(mode.st_mode)
            return _artifact(root, name, name, "foreign", "it is not a directory") if is_listed else None
        if not is_named:
            is_listed = not name.startswith(".")
            return (
                _artifact(root, name, name, "foreign", "it does not have the name of an artifact")
                if is_listed
                else None
            )
        with opened(root / name) as directory:
            state, problem = _state(directory, id, is_partial, time.time() - mode.st_mtime < _GRACE)
            return _artifact(root, name, id, state, problem, size_of(directory))
    except FileNotFoundError:  # removed in the meantime
        return None
    except (OSError, ValueError) as error:
        return _artifact(root, name, id, "foreign", single_line(str(error)))


def _artifact(root: Path, name: str, id: str, state: State, problem: str, size: int = 0) -> Artifact:
    found = _ID.fullmatch(id)
    created = _UNKNOWN_TIME
    if found:
        with contextlib.suppress(ValueError):  # digits that are not a date
            created = datetime.strptime(found[1], _TIME).replace(tzinfo=UTC)
    return Artifact(single_line(id), root / name, created, state, problem, size)


def _state(directory: int, id: str, is_partial: bool, is_new: bool) -> tuple[State, str]:
    is_owned = _ownership.names_in(directory) is not None
    if (is_owned and _ownership.is_held(directory, if_unknown=is_partial)) or (is_partial and is_new and not is_owned):
        return "being written", ""
    if is_partial:
        return (
            ("corrupt", HALF_WRITTEN)
            if is_owned or not os.listdir(directory)
            else ("foreign", "it has no ownership file")
        )
    try:
        manifest = manifest_in(directory)
    except ArtifactError as error:
        return "corrupt" if is_owned else "foreign", str(error)
    if manifest["id"] != id:
        return "corrupt", f"{MANIFEST} belongs to another artifact"
    found = (_problem_with_file(directory, name, about["bytes"]) for name, about in manifest["files"].items())
    problem = next(filter(None, found), "")
    return ("corrupt", problem) if problem else ("whole", "")


def _problem_with_file(directory: int, name: str, size: int) -> str:
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if not stat.S_ISREG(info.st_mode):
        return f"{name} is not a regular file"
    return "" if info.st_size == size else f"{name} has {info.st_size} bytes, expected {size}"
