"""One open capture: where it writes, how much, what it was told to make, and what went wrong."""

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import fx

from torchguard.artifacts._artifact import Artifact, look
from torchguard.artifacts._export import Kept, dot_to_svg, exported, why_no_svg
from torchguard.artifacts._record import Graphs
from torchguard.artifacts._safe_io import in_a_line
from torchguard.artifacts._store import Store
from torchguard.artifacts._write import Writer
from torchguard.exceptions import ArtifactError

_log = logging.getLogger("torchguard.artifacts")
_LOOK_EVERY = 8  # artifacts: so often what others wrote into the directory is counted, too, and when all is done
_DRAW_SECONDS, _DRAW_NODES = 60.0, 1500  # in all, and a graph: Graphviz takes minutes for large ones


class Session:
    """An open capture. `standing_notes` is what no artifact of it can hold, and why."""

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
        no_svg = why_no_svg()
        self.standing_notes = [*notes, *([f"there is no SVG: {no_svg}"] if no_svg else [])]
        self._limit, self._is_exported = limit, is_exported
        self._writers: dict[str, Writer] = {}
        self._kept: list[tuple[Writer, Kept]] = []
        self._left = self._until_look = 0

    def report(self, text: str) -> None:
        """Something could not be captured. The log has the first: a full disk is one line, not a thousand."""
        _log.log(logging.DEBUG if self.problems else logging.WARNING, "%s: %s", self.root, text)
        self.problems.append(text)

    def published(self, writer: Writer) -> None:
        """An artifact is there, or has more in it. Makes room where there is too much."""
        self._writers[writer.id] = writer
        self._left -= writer.size
        self._until_look -= 1
        if self._left < 0 or self._until_look <= 0:
            self._make_room(writer.id)

    def _make_room(self, newest: str) -> None:
        if self._limit is not None:
            store = Store(self.root)
            for removal in store.make_room(self._limit, {newest}):
                self._writers.pop(removal.artifact.id, None)
            self._left, self._until_look = self._limit - sum(one.size for one in store), _LOOK_EVERY

    def keep_for_export(self, writer: Writer, name: str, graph: fx.GraphModule) -> None:
        if self._is_exported and not name.startswith("dynamo"):
            try:
                self._kept.append((writer, Kept.of(name, graph)))
            except Exception as error:
                self._no_export(writer, name, error)

    def artifacts(self) -> Iterator[Artifact]:
        for id in tuple(self._writers):
            if (found := look(self.root, id)) is not None:
                yield found

    def finish(self) -> None:
        """Add what would hold up a compilation: drawings, and graphs that can be loaded again."""
        try:
            self._writers = {id: writer for id, writer in self._writers.items() if writer.path.exists()}
            for id in {*self._export(), *self._draw(), *self._say_what_did_not_come()}:
                self._writers[id].publish()
            if self._writers:
                self._make_room(max(self._writers))
        except Exception as error:  # the block that was captured has ended well
            self.report(in_a_line(f"what was captured could not be finished: {error}"))
        self._kept.clear()

    def _say_what_did_not_come(self) -> Iterator[str]:
        for id, writer in self._writers.items():
            if waiting := writer.manifest["waiting_for"]:
                writer.manifest["notes"].append(f"not compiled while this was captured: {', '.join(waiting)}")
                writer.manifest["waiting_for"] = []
                yield id

    def _export(self) -> Iterator[str]:
        for writer, kept in [one for one in self._kept if one[0].id in self._writers]:
            try:
                self._add_file(writer, kept.name, "pt2", exported(kept))
            except Exception as error:  # torch.export says no in many ways
                self._no_export(writer, kept.name, error)
            yield writer.id

    def _no_export(self, writer: Writer, name: str, error: Exception) -> None:
        writer.manifest["notes"].append(in_a_line(f"{name}.pt2: torch.export cannot: {type(error).__name__}: {error}"))

    def _draw(self) -> Iterator[str]:
        if why_no_svg():
            return
        until = time.monotonic() + _DRAW_SECONDS
        for id, writer in self._writers.items():
            for graph in writer.manifest["graphs"]:
                try:
                    self._draw_one(writer, graph, until - time.monotonic())
                except (OSError, subprocess.SubprocessError, ArtifactError) as error:
                    writer.manifest["notes"].append(in_a_line(f"{graph['name']}.svg: {error}"))
                yield id

    def _draw_one(self, writer: Writer, graph: dict, seconds: float) -> None:
        if "dot" not in graph["files"] or "svg" in graph["files"]:
            return
        if graph["nodes"] > _DRAW_NODES:
            raise ArtifactError(f"{graph['nodes']} nodes are too many to draw; {graph['files']['dot']} is there.")
        if seconds <= 0:
            raise ArtifactError(f"drawing took more than {_DRAW_SECONDS:.0f} s in all.")
        found = look(self.root, writer.id)
        if found is not None:
            dot = found.read_bytes(graph["files"]["dot"])
            self._add_file(writer, graph["name"], "svg", dot_to_svg(dot, seconds))

    def _add_file(self, writer: Writer, name: str, extension: str, content: bytes) -> None:
        file = writer.add(f"{name}.{extension}", content)
        graph = next(one for one in writer.manifest["graphs"] if one["name"] == name)
        graph["files"][extension] = file
