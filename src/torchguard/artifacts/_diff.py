"""The differences between two artifacts: graphs node by node, guards, and the metadata of the compilation."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchguard._graphs.listing import arguments_text, line_of
from torchguard.artifacts._artifact import Artifact, read_as
from torchguard.artifacts._safe_io import printable
from torchguard.artifacts._schema import SCHEMA
from torchguard.report import Answer, Section, Shown, Text

_MOST_PAIRS = 30_000_000  # nodes times nodes: aligning larger graphs takes minutes
_IDENTITY = re.compile(r"(___check_(?:obj|type)_id\(.*?,\s*)\d+")
_ABOUT = ("compile_id", "function", "file", "line", "backend")
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Change:
    """Something that both have and that differs. `what` is a node and its attribute, or a key of the metadata."""

    what: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.what}: {self.was} -> {self.now}"


@dataclass(frozen=True)
class GraphDifference:
    """How a graph differs: nodes added, removed and changed, and a unified diff of the code."""

    name: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    text: str

    def __str__(self) -> str:
        counts = f"{len(self.added)} added, {len(self.removed)} removed, {len(self.changed)} changed"
        nodes = [*(f"  + {one}" for one in self.added), *(f"  - {one}" for one in self.removed)]
        return "\n".join([f"graph {self.name}: {counts}", *nodes, *(f"  ~ {one}" for one in self.changed)])


@dataclass(frozen=True)
class Difference(Shown):
    """What differs from the first artifact to the second."""

    first: str
    second: str
    graphs: tuple[GraphDifference, ...]
    guards_added: tuple[str, ...]
    guards_removed: tuple[str, ...]
    metadata: tuple[Change, ...]

    @property
    def same(self) -> bool:
        """Whether graphs and guards are the same. Metadata does not count: it differs between most compilations."""
        return not (self.graphs or self.guards_added or self.guards_removed)

    def section(self) -> Section:
        """Whether graphs and guards are the same, and what differs."""
        head, *rest = str(self).splitlines()
        details = (Text("\n".join(rest), preformatted=True),) if rest else ()
        return Section("Difference of two artifacts", (Answer("ok" if self.same else "warning", f"{head}."), *details))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        guards = [*(f"  + {one}" for one in self.guards_added), *(f"  - {one}" for one in self.guards_removed)]
        counts = f"guards: {len(self.guards_added)} added, {len(self.guards_removed)} removed"
        lines = [
            f"{self.first} -> {self.second}: graphs and guards are {'the same' if self.same else 'not the same'}",
            *map(str, self.graphs),
            *([counts, *guards] if guards else []),
            *(["metadata:", *(f"  ~ {one}" for one in self.metadata)] if self.metadata else []),
        ]
        return printable("\n".join(lines))


def diff(first: Artifact, second: Artifact) -> Difference:
    """Compare two artifacts. Raises ArtifactError if one cannot be read."""
    graphs = _graphs(first, second)
    was, now = _guards(first), _guards(second)
    about = _changes(_metadata(first), _metadata(second))
    added, removed = tuple((now - was).elements()), tuple((was - now).elements())
    return Difference(first.id, second.id, tuple(graphs), added, removed, tuple(about))


def _graphs(first: Artifact, second: Artifact) -> Iterator[GraphDifference]:
    was, now = ({one["name"]: one["files"] for one in artifact.manifest()["graphs"]} for artifact in (first, second))
    for name in dict.fromkeys([*was, *now]):
        nodes = _nodes(first, was.get(name, {})), _nodes(second, now.get(name, {}))
        text = "".join(
            difflib.unified_diff(
                _lines(first, was.get(name, {})), _lines(second, now.get(name, {})), first.id, second.id, n=1
            )
        )
        added, removed, changed = _compared(*nodes)
        if added or removed or changed or (name in was) != (name in now):
            yield GraphDifference(name, tuple(added), tuple(removed), tuple(changed), text)


def _nodes(artifact: Artifact, files: Mapping[str, str]) -> list[dict[str, Any]]:
    return read_as(artifact, files["json"], SCHEMA["graph"])["nodes"] if "json" in files else []


def _lines(artifact: Artifact, files: Mapping[str, str]) -> list[str]:
    return artifact.read_text(files["py"]).splitlines(keepends=True) if "py" in files else []


def _compared(was: list[dict[str, Any]], now: list[dict[str, Any]]) -> tuple[list[str], list[str], list[Change]]:
    """The nodes that were added, removed and changed. They are aligned by what they call, since names shift."""
    added, removed, pairs = [], [], []
    for tag, i, j, k, m in _aligned([_call(node) for node in was], [_call(node) for node in now]):
        if tag == "equal" or (tag == "replace" and j - i == m - k):
            pairs += zip(was[i:j], now[k:m], strict=True)
        else:
            removed += [str(line_of(node)) for node in was[i:j]]
            added += [str(line_of(node)) for node in now[k:m]]
    renamed = {old["name"]: new["name"] for old, new in pairs}
    return added, removed, [change for old, new in pairs for change in _node_changes(old, new, renamed)]


def _aligned(was: list[str], now: list[str]) -> list[tuple[str, int, int, int, int]]:
    same = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    head = [("equal", 0, same, 0, same)]
    was, now = was[same:], now[same:]
    if len(was) * len(now) > _MOST_PAIRS:
        return [*head, ("delete", same, same + len(was), same, same), ("insert", same, same, same, same + len(now))]
    rest = difflib.SequenceMatcher(None, was, now, autojunk=False).get_opcodes()
    return [*head, *((tag, i + same, j + same, k + same, m + same) for tag, i, j, k, m in rest)]


def _call(node: dict[str, Any]) -> str:
    return node["op"] if node["op"] in ("placeholder", "output") else f"{node['op']} {node['target']}"


def _node_changes(old: dict[str, Any], new: dict[str, Any], renamed: Mapping[str, str]) -> Iterator[Change]:
    if _call(old) != _call(new):
        yield Change(f"{new['name']} op", old["target"], new["target"])
    for part in ("shape", "dtype", "stride", "device"):
        was, now = (_tensors(node, part) for node in (old, new))
        if was != now:
            yield Change(f"{new['name']} {part}", was, now)
    was, now = _arguments(old), _arguments(new)
    if was != now:
        yield Change(f"{new['name']} args", was, now)
    inputs = [renamed.get(name, name) for name in old["inputs"]]
    if inputs != new["inputs"]:
        yield Change(f"{new['name']} inputs", ", ".join(old["inputs"]), ", ".join(new["inputs"]))


def _tensors(node: dict[str, Any], part: str) -> str:
    return ", ".join(str(one["tensor"].get(part, _ABSENT)) for one in node["values"] if "tensor" in one)


def _arguments(node: dict[str, Any]) -> str:
    """The arguments without the names of nodes, which shift."""
    return f"({arguments_text(node.get('args', ()), node.get('kwargs', {}), lambda name: '%')})"


def _guards(artifact: Artifact) -> Counter[str]:
    if "guards.json" not in artifact.files:
        return Counter()
    guards = read_as(artifact, "guards.json", SCHEMA["guards"])["guards"]
    # Addresses of objects differ from process to process.
    return Counter(" ".join([one["type"], _IDENTITY.sub(r"\1...", one["code"])]) for one in guards)


def _metadata(artifact: Artifact) -> dict[str, str]:
    manifest = artifact.manifest()
    found = {name: str(manifest[name]) for name in _ABOUT}
    if "environment.json" in manifest["files"]:
        environment = read_as(artifact, "environment.json", SCHEMA["environment"])
        for part in ("versions", "platform", "variables", "torch"):
            found |= {f"{part}.{name}": value for name, value in environment[part].items()}
    return found


def _changes(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) != now.get(name):
            yield Change(name, was.get(name, _ABSENT), now.get(name, _ABSENT))
