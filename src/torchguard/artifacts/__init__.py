"""What Dynamo, AOTAutograd and Inductor made of your program, kept on disk: capture it, list it, compare it."""

from torchguard.artifacts.artifact import Artifact
from torchguard.artifacts.capturing import Captured, capture, start_from_environment
from torchguard.artifacts.comparing import Difference, diff
from torchguard.artifacts.inside import printable
from torchguard.artifacts.listening import attach
from torchguard.artifacts.recording import Graphs
from torchguard.artifacts.schema import SCHEMA, SCHEMA_VERSION
from torchguard.artifacts.sizes import bytes_of, shown_size
from torchguard.artifacts.store import Removal, Store
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
