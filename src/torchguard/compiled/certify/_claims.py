"""What a certificate is made of: one claim for each thing that was checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Layer: TypeAlias = Literal["typed", "probe", "algebraic", "enclosure"]


class Verdict(StrEnum):
    """How a check ended. `INCONCLUSIVE` says that nothing was shown, neither right nor wrong."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Claim:
    """What one check says of one graph: `says` is a sentence, `details` are its numbers and names."""

    layer: Layer
    subject: str
    verdict: Verdict
    says: str
    details: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", MappingProxyType(dict(self.details)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Claim, (self.layer, self.subject, self.verdict, self.says, dict(self.details))

    def to_dict(self) -> dict[str, Json]:
        return {
            "layer": self.layer,
            "subject": self.subject,
            "verdict": self.verdict.value,
            "says": self.says,
            "details": dict(self.details),
        }

    def __str__(self) -> str:
        return f"{self.layer} {self.subject}: {self.verdict}. {self.says}"
