"""Artifacts as a section of a report: for each compilation its graphs and generated code, beside the user's source."""

import linecache
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchguard.artifacts._artifact import Artifact
from torchguard.exceptions import ArtifactError
from torchguard.report import Answer, Block, Code, Facts, Pane, Section, Table, Text

_MOST = 20  # artifacts with listings; all are in the table
_MOST_LINES = 1_500  # of a listing
# In the listing of a graph, before the nodes of a source line.
_SOURCE = re.compile(r"^\s*# File: (.*):(\d+) in .*?, code: (.*)$")
_NODES = re.compile(r"^\s*# (?:Topologically Sorted )?Source Nodes: \[([^\]]*)\]")  # in the code of Inductor
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # checks of a watched model
_AROUND = 3  # lines of source shown around those that a graph names


def artifacts_section(artifacts: Sequence[Artifact], name: Callable[[str], str] = str) -> Section:
    """What was captured. An artifact that cannot be read is named, with the reason. `name` writes a function."""
    rows, sections, problems = [], [], []
    for artifact in artifacts:
        try:
            manifest = artifact.manifest()
            graphs = ", ".join(f"{one['name']} ({one['nodes']} nodes)" for one in manifest["graphs"])
            rows.append((artifact.id, manifest["compile_id"], name(manifest["function"]), graphs, manifest["backend"]))
            if manifest["graphs"] and len(sections) < _MOST:
                sections.append(_section(artifact, manifest, name))
        except (ArtifactError, OSError) as error:
            problems.append(Answer("unknown", f"{artifact.id} cannot be read: {error}"))
    count = f"{len(rows)} artifact{'' if len(rows) == 1 else 's'}, {len(sections)} with graphs beside the source."
    table = Table(("artifact", "id", "function", "graphs", "backend"), tuple(rows), "Artifacts")
    return Section("Graphs and code", (Answer("ok", count), *problems, table), tuple(sections))


def _section(artifact: Artifact, manifest: Mapping[str, Any], name: Callable[[str], str]) -> Section:
    facts = Facts((("Artifact", str(artifact.path)), ("Backend", manifest["backend"])))
    failed = [note for note in manifest["notes"] if note.startswith("the backend failed")]
    notes = [Answer("bad", one) if one in failed else Text(one) for one in manifest["notes"]]
    title = f"{manifest['compile_id']} {name(manifest['function'])}"
    return Section(title, (facts, *notes, *_code(artifact, manifest)), collapsed=True)


def _code(artifact: Artifact, manifest: Mapping[str, Any]) -> Iterator[Block]:
    listings = {
        one["name"]: artifact.read_text(one["files"]["py"]).splitlines()
        for one in manifest["graphs"]
        if "py" in one["files"]
    }
    panes = [Pane(f"{name} graph", *_with_keys(lines, _keys_of_graph(lines))) for name, lines in listings.items()]
    lines_of_node = dict(_lines_of_nodes(artifact, manifest))
    for name in sorted(manifest["files"]):
        if name.startswith("output_code."):
            lines = artifact.read_text(name).splitlines()
            panes.append(Pane(f"Generated: {name}", *_with_keys(lines, _keys_of_code(lines, lines_of_node))))
    if panes:
        sources = _sources([line for lines in listings.values() for line in lines])
        yield Code("Your source, and what became of it", (*sources, *panes))


def _with_keys(lines: Sequence[str], keys: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    left_out = len(lines) - _MOST_LINES
    more = (f"# ... and {left_out} more lines",) if left_out > 0 else ()
    return (*lines[:_MOST_LINES], *more), (*keys[:_MOST_LINES], *("" for _ in more))


def _keys_of_graph(lines: Sequence[str]) -> list[str]:
    """The source line of each line of a listing: that of the comment above it."""
    keys, key = [], ""
    for line in lines:
        found = _SOURCE.match(line)
        key = f"{found[1]}:{found[2]}" if found else key if line.strip() else ""
        keys.append(key)
    return keys


def _lines_of_nodes(artifact: Artifact, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The source line of each node of Dynamo's graph, which Inductor names in its code."""
    for one in manifest["graphs"]:
        if one["kind"] == "dynamo" and "json" in one["files"]:
            for node in artifact.read_json(one["files"]["json"])["nodes"]:
                if "source" in node:
                    yield node["name"], f"{node['source']['file']}:{node['source']['line']}"


def _keys_of_code(lines: Sequence[str], lines_of_node: Mapping[str, str]) -> list[str]:
    """The source line of each line of generated code: that of the first node that the comment above it names."""
    keys, key = [], ""
    for line in lines:
        if found := _NODES.match(line):
            names = (name.strip() for name in found[1].split(","))
            key = next((lines_of_node[name] for name in names if name in lines_of_node), "")
        elif not line.strip() or line.startswith(("def ", "class ")):
            key = ""
        keys.append(key)
    return keys


def _sources(listings: Sequence[str]) -> Iterator[Pane]:
    """The part of each source file that the listings name.

    Only where the file still has, in each of these lines, what the listings say: it may have changed since, and the
    artifact may come from another machine.
    """
    files: dict[str, dict[int, str]] = {}
    for found in filter(None, map(_SOURCE.match, listings)):
        files.setdefault(found[1], {})[int(found[2])] = found[3].strip()
    for file, lines in files.items():
        text = [line.rstrip("\n") for line in linecache.getlines(file)] if not file.startswith(_PACKAGE) else []
        if all(line <= len(text) and text[line - 1].strip() == code for line, code in lines.items()):
            first, last = max(1, min(lines) - _AROUND), min(len(text), max(lines) + _AROUND)
            shown = text[first - 1 : last]
            yield Pane(file, tuple(shown), tuple(f"{file}:{first + i}" for i in range(len(shown))), first)
