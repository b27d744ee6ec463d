"""What travels with an exported model: the names of its inputs and outputs, its batch, and its locations."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from torchguard._channel.codes import ErrorCode
from torchguard._channel.slot_bits import CODE_MASK
from torchguard._watch.export import location_ids
from torchguard._watch.wrapper import is_watched
from torchguard.exceptions import ExportError
from torchguard.locations._registry import names_of, registry
from torchguard.locations._tracked import location_of

FORMAT = 1
KEY = "torchguard"


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of an exported model.

    Attributes:
        model: the name of its class.
        inputs: the names of its inputs, in order.
        outputs: the names of its outputs, in order. The last one has the flags.
        batch: the least and the most samples of a call; None for no limit.
        locations: the name of each location id.
        codes: the name of each error code.
    """

    model: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: tuple[int, int | None]
    locations: dict[int, str]
    codes: dict[int, str]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def from_json(text: str, path: Any) -> "Signature":
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ExportError(f"{path} was written by another version of torchguard, in a format that is not read.")
            low, high = data["batch"]
            return Signature(
                str(data["model"]),
                tuple(map(str, data["inputs"])),
                tuple(map(str, data["outputs"])),
                (int(low), None if high is None else int(high)),
                {int(number): str(name) for number, name in data["locations"].items()},
                {int(number): str(name) for number, name in data["codes"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ExportError):
                raise
            raise ExportError(
                f"{path}: its table of locations is damaged ({error}). Export the model again."
            ) from error


def signature(
    model: nn.Module, inputs: Iterable[str], outputs: Iterable[str], batch: tuple[int, int | None]
) -> Signature:
    """The signature of a model that was traced just now: all its locations have an id."""
    ids = {*registry.named()}
    for module in model.modules():
        location = location_of(module)
        ids |= {location.id} if location is not None else set()
    if is_watched(model):
        ids |= {*location_ids(model)}
    codes = {code: ErrorCode.name(code) for code in range(CODE_MASK + 1)}
    return Signature(type(model).__name__, tuple(inputs), tuple(outputs), batch, names_of(sorted(ids)), codes)
