"""Settings of the error channel: how flags are stored, and which errors stay when a sample has more than its slots."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from torchguard._channel.codes import Severity
from torchguard._channel.slot_bits import SLOT_BITS
from torchguard.exceptions import ConfigError

MAX_SLOTS = 32_768


class Carrier(NamedTuple):
    """A flags dtype: the integer dtype its bits are read as, and the number of slots in one word."""

    bits: torch.dtype
    slots_per_word: int


CARRIERS: dict[torch.dtype, Carrier] = {
    torch.int64: Carrier(torch.int64, 4),
    torch.int32: Carrier(torch.int32, 2),
    torch.float64: Carrier(torch.int64, 4),
    torch.float32: Carrier(torch.int32, 2),
}


class Priority(IntEnum):
    """What makes one error more important than another."""

    CHRONO = 0
    SEVERITY = 1
    LOCATION = 2


class Order(IntEnum):
    """Which end of the priority axis stays: its minimum or its maximum."""

    FIRST = 0
    LAST = 1


class Dedupe(IntEnum):
    """Which errors of a sample count as the same error."""

    NONE = 0
    CODE = 1
    LOCATION = 2
    UNIQUE = 3


@dataclass(frozen=True)
class AccumulationConfig:
    """Which errors of a sample stay: `docs/accumulation.md` explains each combination."""

    priority: Priority = Priority.CHRONO
    order: Order = Order.FIRST
    dedupe: Dedupe = Dedupe.UNIQUE

    def __post_init__(self) -> None:
        for name, kind in (("priority", Priority), ("order", Order), ("dedupe", Dedupe)):
            if not _is_a(kind, getattr(self, name)):
                raise ConfigError(f"AccumulationConfig.{name} is {getattr(self, name)!r}. Give a {kind.__name__}.")


@dataclass
class ErrorConfig:
    """Settings of the error channel. Each assignment is checked.

    Args:
        num_slots: the number of errors a sample can hold, 1 to 32,768.
        accumulation: which errors stay when there are more.
        default_severity: severity of a push whose code has no default of its own.
        strict_validation: raise rather than warn where `@tensorcheck` cannot validate; a mismatch always raises.
        flag_dtype: the dtype of flags: int64, int32, float32 or float64.
        use_transposed_layout: store large batches word by word rather than sample by sample.
        transpose_threshold: the batch size above which `use_transposed_layout` applies.
    """

    num_slots: int = 16
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    default_severity: int = Severity.ERROR
    strict_validation: bool = False
    flag_dtype: torch.dtype = torch.int64
    use_transposed_layout: bool = False
    transpose_threshold: int = 10_000

    def __setattr__(self, name: str, value: Any) -> None:
        _require_setting(name, value)
        object.__setattr__(self, name, value)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same as `flag_dtype`."""
        return self.flag_dtype

    @property
    def torch_int_dtype(self) -> torch.dtype:
        """The integer dtype that the bits of a word are read as."""
        return CARRIERS[self.flag_dtype].bits

    @property
    def word_bits(self) -> int:
        return SLOT_BITS * self.slots_per_word

    @property
    def slots_per_word(self) -> int:
        return CARRIERS[self.flag_dtype].slots_per_word

    @property
    def num_words(self) -> int:
        return self.words_for(self.flag_dtype)

    def words_for(self, flag_dtype: torch.dtype) -> int:
        """The number of words that `num_slots` take in a carrier."""
        return -(-self.num_slots // CARRIERS[flag_dtype].slots_per_word)

    def should_transpose(self, batch_size: int) -> bool:
        """Whether new flags for a batch of that size are stored word by word."""
        return self.use_transposed_layout and batch_size > self.transpose_threshold


def _require_setting(name: str, value: Any) -> None:
    if name not in ErrorConfig.__dataclass_fields__:
        known = ", ".join(ErrorConfig.__dataclass_fields__)
        raise ConfigError(f"ErrorConfig has no setting {name!r}. It has: {known}.")
    if name == "num_slots" and not (_is_int(value) and 1 <= value <= MAX_SLOTS):
        raise ConfigError(f"ErrorConfig.num_slots is {value!r}. Give a whole number from 1 to {MAX_SLOTS}.")
    if name == "flag_dtype" and value not in CARRIERS:
        known = ", ".join(str(dtype) for dtype in CARRIERS)
        raise ConfigError(f"ErrorConfig.flag_dtype is {value!r}. Flags can be stored in one of: {known}.")
    if name == "default_severity" and not (_is_int(value) and 0 <= value <= 3):
        raise ConfigError(f"ErrorConfig.default_severity is {value!r}. Give a Severity, 0 to 3.")
    if name == "transpose_threshold" and not (_is_int(value) and value >= 0):
        raise ConfigError(f"ErrorConfig.transpose_threshold is {value!r}. Give a batch size, 0 or more.")
    if name == "accumulation" and not _is_a(AccumulationConfig, value):
        raise ConfigError(f"ErrorConfig.accumulation is {value!r}. Give an AccumulationConfig(...).")


def _is_a(kind: type, value: Any) -> bool:
    """`isinstance`, also for the class of this name from before a reload of this module."""
    own = type(value)
    return isinstance(value, kind) or (own.__module__, own.__qualname__) == (kind.__module__, kind.__qualname__)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


CONFIG = ErrorConfig()


def get_config() -> ErrorConfig:
    """The settings used by every call without `config=`."""
    return CONFIG


def config_of(who: str, config: ErrorConfig | None) -> ErrorConfig:
    """The settings of a call with `config=config`: those of every call if it is None."""
    if config is None:
        return CONFIG
    if not isinstance(config, ErrorConfig) and not _is_a(ErrorConfig, config):
        hint = " A mask is where=mask." if isinstance(config, torch.Tensor) else ""
        raise ConfigError(f"{who}: config is of type {type(config).__name__}. Give an ErrorConfig(...).{hint}")
    return config


def set_config(config: ErrorConfig) -> None:
    """Make `config` the settings of every call without `config=`."""
    global CONFIG
    if not _is_a(ErrorConfig, config):
        raise ConfigError(f"set_config: got {type(config).__name__}. Give an ErrorConfig(...).")
    CONFIG = config


@contextlib.contextmanager
def scoped_config(config: ErrorConfig) -> Iterator[None]:
    """Use `config` in a block, and the previous settings after it."""
    before = get_config()
    set_config(config)
    try:
        yield
    finally:
        set_config(before)
