"""What Dynamo, AOTAutograd and Inductor made of your program, kept on disk: capture it, list it, compare it."""

from torchguard._sizes import bytes_of, shown_size
from torchguard.artifacts._artifact import Artifact
from torchguard.artifacts._capture import Captured, attach, capture, start_from_environment
from torchguard.artifacts._diff import Difference, diff
from torchguard.artifacts._record import Graphs
from torchguard.artifacts._safe_io import printable
from torchguard.artifacts._schema import SCHEMA, SCHEMA_VERSION
from torchguard.artifacts._store import Removal, Store
from torchguard.exceptions import ArtifactError, NoSuchArtifactError

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Artifact",
    "ArtifactError",
    "Captured",
    "Difference",
    "Graphs",
    "NoSuchArtifactError",
    "Removal",
    "Store",
    "attach",
    "bytes_of",
    "capture",
    "diff",
    "printable",
    "shown_size",
    "start_from_environment",
]

start_from_environment()
