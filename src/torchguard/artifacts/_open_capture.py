"""The session of one open capture: its directory and limit, the artifacts it published, and its problems."""

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import fx

from torchguard.artifacts._artifact import Artifact, artifact_at
from torchguard.artifacts._compilation import Graphs
from torchguard.artifacts._formats import PendingExport, svg_problem, to_svg
from torchguard.artifacts._safe_io import single_line
from torchguard.artifacts._store import Store
from torchguard.artifacts._write import Writer
from torchguard.exceptions import ArtifactError

_log = logging.getLogger("torchguard.artifacts")
# After this number of published artifacts, and at the end, the whole directory is measured: others may write there too.
_MEASURE_EVERY = 8
_DRAW_SECONDS, _DRAW_NODES = 60.0, 1500  # in total, and of one graph: Graphviz takes minutes for large ones


class CaptureSession:
    """An open capture. `standing_notes` says what none of its artifacts can hold, and why."""

    def __init__(
        self,
        root: Path,
        limit: int | None,
        on_graphs: Callable[[Graphs], object] | None,
        is_exported: bool,
        notes: tuple[str, ...],
    ) -> None:
        self.root, self.on_graphs, self.is_open = root, on_graphs, True
        self.problems: list[str] = []
        no_svg = svg_problem()
        self.standing_notes = [*notes, *([f"there is no SVG: {no_svg}"] if no_svg else [])]
        self._limit, self._is_exported = limit, is_exported
        self._writers: dict[str, Writer] = {}
        self._exports: list[tuple[Writer, PendingExport]] = []
        self._bytes_left = self._until_measured = 0

    def report(self, text: str) -> None:
        """Record that something could not be captured. Only the first is a warning: a full disk causes thousands."""
        _log.log(logging.DEBUG if self.problems else logging.WARNING, "%s: %s", self.root, text)
        self.problems.append(text)

    def published(self, writer: Writer) -> None:
        """Record that an artifact was published or extended, and remove the oldest where the limit is exceeded."""
        self._writers[writer.id] = writer
        self._bytes_left -= writer.size
        self._until_measured -= 1
        if self._bytes_left < 0 or self._until_measured <= 0:
            self._make_room(writer.id)

    def _make_room(self, newest: str) -> None:
        if self._limit is not None:
            store = Store(self.root)
            for removal in store.make_room(self._limit, {newest}):
                self._writers.pop(removal.artifact.id, None)
            self._bytes_left, self._until_measured = self._limit - sum(one.size for one in store), _MEASURE_EVERY

    def queue_export(self, writer: Writer, name: str, graph: fx.GraphModule) -> None:
        """Copy a graph, to be exported when the capture ends, if exports were asked for."""
        if self._is_exported and not name.startswith("dynamo"):
            try:
                self._exports.append((writer, PendingExport.of(name, graph)))
            except Exception as error:
                self._note_failed_export(writer, name, error)

    def artifacts(self) -> Iterator[Artifact]:
        for id in tuple(self._writers):
            if (found := artifact_at(self.root, id)) is not None:
                yield found

    def finish(self) -> None:
        """Add what would have slowed down compilations: exports and drawings."""
        try:
            self._writers = {id: writer for id, writer in self._writers.items() if writer.path.exists()}
            for id in {*self._export(), *self._draw(), *self._note_missing_graphs()}:
                self._writers[id].publish()
            if self._writers:
                self._make_room(max(self._writers))
        except Exception as error:  # the block that was captured has ended well, and must not fail now
            self.report(single_line(f"the capture could not be finished: {error}"))
        self._exports.clear()

    def _note_missing_graphs(self) -> Iterator[str]:
        for id, writer in self._writers.items():
            if waiting := writer.manifest["waiting_for"]:
                writer.manifest["notes"].append(f"not compiled while this was captured: {', '.join(waiting)}")
                writer.manifest["waiting_for"] = []
                yield id

    def _export(self) -> Iterator[str]:
        for writer, pending in [one for one in self._exports if one[0].id in self._writers]:
            try:
                self._add_file(writer, pending.name, "pt2", pending.export())
            except Exception as error:  # torch.export fails in many ways
                self._note_failed_export(writer, pending.name, error)
            yield writer.id

    def _note_failed_export(self, writer: Writer, name: str, error: Exception) -> None:
        text = single_line(f"{name}.pt2: torch.export failed: {type(error).__name__}: {error}")
        writer.manifest["notes"].append(text)

    def _draw(self) -> Iterator[str]:
        if svg_problem():
            return
        until = time.monotonic() + _DRAW_SECONDS
        for id, writer in self._writers.items():
            for graph in writer.manifest["graphs"]:
                try:
                    self._draw_graph(writer, graph, until - time.monotonic())
                except (OSError, subprocess.SubprocessError, ArtifactError) as error:
                    writer.manifest["notes"].append(single_line(f"{graph['name']}.svg: {error}"))
                yield id

    def _draw_graph(self, writer: Writer, graph: dict, seconds: float) -> None:
        if "dot" not in graph["files"] or "svg" in graph["files"]:
            return
        if graph["nodes"] > _DRAW_NODES:
            raise ArtifactError(
                f"{graph['nodes']} nodes are more than the {_DRAW_NODES} that are drawn; see {graph['files']['dot']}."
            )
        if seconds <= 0:
            raise ArtifactError(f"drawing took more than {_DRAW_SECONDS:.0f} s in total.")
        found = artifact_at(self.root, writer.id)
        if found is not None:
            dot = found.read_bytes(graph["files"]["dot"])
            self._add_file(writer, graph["name"], "svg", to_svg(dot, seconds))

    def _add_file(self, writer: Writer, name: str, extension: str, content: bytes) -> None:
        file = writer.add(f"{name}.{extension}", content)
        graph = next(one for one in writer.manifest["graphs"] if one["name"] == name)
        graph["files"][extension] = file
