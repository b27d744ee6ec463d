"""Writing an artifact: under a hidden name until it is whole, then by adding to it, the manifest always last."""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchguard.artifacts import _ownership
from torchguard.artifacts._artifact import MANIFEST, new_id, partial_name
from torchguard.artifacts._safe_io import open_file, opened
from torchguard.artifacts._schema import MARKER, NAME, SCHEMA_VERSION
from torchguard.artifacts._store import remove
from torchguard.exceptions import ArtifactError

NEW = ".new"  # what a file ends with until it is whole
_RESERVED = {MANIFEST, f"{MANIFEST}{NEW}"}


class Writer:
    """Writes one artifact. Every method may raise OSError or ArtifactError, and leaves what was whole as it was."""

    def __init__(self, root: Path, compile_id: str, about: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.id = new_id(compile_id, secrets.token_hex(3))
        self._root, self._path = root, root / partial_name(self.id)
        self._path.mkdir()
        self._journal: int | None = None
        self.manifest: dict[str, Any] = {
            "marker": MARKER,
            "schema": SCHEMA_VERSION,
            "id": self.id,
            "created": datetime.now(UTC).isoformat(),
            "compile_id": compile_id,
            **about,
            "pid": os.getpid(),
            "graphs": [],
            "files": {},
            "waiting_for": [],
            "notes": [],
        }
        try:
            with opened(self._path) as directory:
                self._journal = _ownership.create(directory)
        except BaseException:
            self.remove()
            raise

    @property
    def path(self) -> Path:
        return self._path

    @property
    def size(self) -> int:
        return sum(about["bytes"] for about in self.manifest["files"].values())

    def add(self, name: str, content: bytes, attached_as: str = "") -> str:
        """Write a file. Where the name is taken it gets a number; the name it got is returned."""
        if not re.fullmatch(NAME, name) or name in _RESERVED or name.endswith(NEW):
            raise ArtifactError(
                f"{name!r:.200} cannot be the name of a file in an artifact. Use letters, digits, . _ -"
            )
        stem, dot, extension = name.partition(".")
        taken, number = self.manifest["files"], 1
        while name in taken:
            number += 1
            name = f"{stem}_{number}{dot}{extension}"
        with self._opened() as (directory, lock):
            _ownership.note(lock, name)
            _write(directory, name, content)
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        taken[name] = {**about, "attached_as": attached_as} if attached_as else about
        return name

    def publish(self) -> None:
        """Write the manifest. The first time, the artifact gets its name, and whoever lists it sees it whole."""
        try:
            with self._opened() as (directory, _):
                _write(directory, MANIFEST, json.dumps(self.manifest, indent=1).encode(), is_synced=True)
                if self._journal is not None:
                    final = self._root / self.id
                    self._path.rename(final)
                    self._path = final
        except BaseException:
            if self._journal is not None:  # it never was whole, and what there is of it fills the disk
                self.remove()
            raise
        self.close()

    def close(self) -> None:
        """Let go of it. What was not published is then half-written."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def remove(self) -> None:
        self.close()
        remove(self._path)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        with opened(self._path) as directory:
            if self._journal is not None:
                yield directory, self._journal
                return
            with _ownership.held(directory) as lock:
                if lock is None:
                    raise ArtifactError(f"{self.id} is locked by another process.")
                yield directory, lock


def _write(directory: int, name: str, content: bytes, is_synced: bool = False) -> None:
    """Write a file under another name, and give it its own when it is whole."""
    fd = open_file(directory, name + NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if is_synced:
                file.flush()
                os.fsync(fd)
        os.replace(name + NEW, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(name + NEW, dir_fd=directory)
        raise
    if is_synced:
        os.fsync(directory)
