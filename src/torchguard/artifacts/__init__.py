"""Artifacts on disk of what Dynamo, AOTAutograd and Inductor compile: capture them, list them, compare them."""

from torchguard.artifacts._artifact import Artifact
from torchguard.artifacts._capture import Captured, attach, capture, start_from_environment
from torchguard.artifacts._compilation import Graphs
from torchguard.artifacts._diff import Difference, diff
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
    "capture",
    "diff",
]

start_from_environment()
