"""Writing an artifact.

Its directory has a hidden name until the manifest is written; then it is renamed. Files can be added afterwards. The
manifest is always written last, so what it lists is complete.
"""

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

NEW = ".new"  # the suffix of a file until it is complete
_RESERVED = {MANIFEST, f"{MANIFEST}{NEW}"}


class Writer:
    """Writes one artifact. A method that raises OSError or ArtifactError leaves the published artifact intact."""

    def __init__(self, root: Path, compile_id: str, about: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.id = new_id(compile_id, secrets.token_hex(3))
        self._root, self._path = root, root / partial_name(self.id)
        self._path.mkdir()
        self._ownership_file: int | None = None
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
                self._ownership_file = _ownership.create(directory)
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
        """Write a file and return its name, which has a number appended where the name was taken."""
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
            _ownership.add_name(lock, name)
            _write(directory, name, content)
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        taken[name] = {**about, "attached_as": attached_as} if attached_as else about
        return name

    def publish(self) -> None:
        """Write the manifest. The first time, the directory also gets its final name."""
        try:
            with self._opened() as (directory, _):
                _write(directory, MANIFEST, json.dumps(self.manifest, indent=1).encode(), is_synced=True)
                if self._ownership_file is not None:
                    final = self._root / self.id
                    self._path.rename(final)
                    self._path = final
        except BaseException:
            if self._ownership_file is not None:  # never published: its files would only fill the disk
                self.remove()
            raise
        self.close()

    def close(self) -> None:
        """Release the lock. An artifact that was not published then counts as half-written."""
        if self._ownership_file is not None:
            os.close(self._ownership_file)
            self._ownership_file = None

    def remove(self) -> None:
        self.close()
        remove(self._path)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        with opened(self._path) as directory:
            if self._ownership_file is not None:
                yield directory, self._ownership_file
                return
            with _ownership.held(directory) as lock:
                if lock is None:
                    raise ArtifactError(f"{self.id} is locked by another process.")
                yield directory, lock


def _write(directory: int, name: str, content: bytes, is_synced: bool = False) -> None:
    """Write a file under a temporary name and rename it when it is complete."""
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
