"""The dtype aliases for annotations. A static type checker sees `torch.Tensor` in each of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchguard._channel.config import CARRIERS
from torchguard.exceptions import AnnotationError


@dataclass(frozen=True)
class DType:
    """The meaning of an alias such as `float32_t`: a name and a set of dtypes."""

    name: str
    members: frozenset[torch.dtype]

    def __repr__(self) -> str:
        return self.name


class TensorKind(type):
    """The type of `float32_t` and of `Tensor[float32_t, ("batch",)]`.

    They are classes rather than `Annotated[torch.Tensor, ...]`, which `torch.fx.symbolic_trace` cannot print.
    """

    dtype: DType
    spec: Any

    def __new__(cls, name: str, dtype: DType, spec: Any = None) -> "TensorKind":
        doc = f"The annotation for a tensor of dtype {dtype.name.removesuffix('_t')}."
        kind = super().__new__(cls, name, (), {"__module__": "torchguard.typing", "__doc__": doc})
        kind.dtype, kind.spec = dtype, spec
        return kind

    def __init__(cls, name: str, dtype: DType, spec: Any = None) -> None: ...

    @property
    def _dtype(cls) -> torch.dtype:
        """The torch dtype, for settings as 1.x documents them: `CONFIG.flag_dtype = float32_t._dtype`."""
        return torch.int64 if cls.dtype is ERROR else next(iter(cls.dtype.members))

    def __instancecheck__(cls, instance: Any) -> bool:
        # For other runtime type checkers: to them it is just a tensor.
        return isinstance(instance, torch.Tensor)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AnnotationError(f"{cls!r} is for annotations. Make tensors with torch.")

    def __getitem__(cls, item: Any) -> Any:
        raise AnnotationError(f"{cls!r}[{item!r}]: write Tensor[{cls.dtype!r}, (...)].")

    def __repr__(cls) -> str:
        return repr(cls.spec or cls.dtype)


if TYPE_CHECKING:
    float16_t: TypeAlias = torch.Tensor
    bfloat16_t: TypeAlias = torch.Tensor
    float32_t: TypeAlias = torch.Tensor
    float64_t: TypeAlias = torch.Tensor
    float8_e4m3fn_t: TypeAlias = torch.Tensor
    float8_e4m3fnuz_t: TypeAlias = torch.Tensor
    float8_e5m2_t: TypeAlias = torch.Tensor
    float8_e5m2fnuz_t: TypeAlias = torch.Tensor
    int8_t: TypeAlias = torch.Tensor
    int16_t: TypeAlias = torch.Tensor
    int32_t: TypeAlias = torch.Tensor
    int64_t: TypeAlias = torch.Tensor
    uint8_t: TypeAlias = torch.Tensor
    uint16_t: TypeAlias = torch.Tensor
    uint32_t: TypeAlias = torch.Tensor
    uint64_t: TypeAlias = torch.Tensor
    complex32_t: TypeAlias = torch.Tensor
    complex64_t: TypeAlias = torch.Tensor
    complex128_t: TypeAlias = torch.Tensor
    bool_t: TypeAlias = torch.Tensor
    qint8_t: TypeAlias = torch.Tensor
    qint32_t: TypeAlias = torch.Tensor
    quint8_t: TypeAlias = torch.Tensor
    quint4x2_t: TypeAlias = torch.Tensor
    quint2x4_t: TypeAlias = torch.Tensor
    error_t: TypeAlias = torch.Tensor

_NAMES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "qint8",
    "qint32",
    "quint8",
    "quint4x2",
    "quint2x4",
]

DTYPES: dict[str, DType] = {f"{name}_t": DType(f"{name}_t", frozenset({getattr(torch, name)})) for name in _NAMES}
DTYPES["error_t"] = ERROR = DType("error_t", frozenset(CARRIERS))

if not TYPE_CHECKING:
    globals().update({name: TensorKind(name, dtype) for name, dtype in DTYPES.items()})


def dtype_of(alias: Any) -> DType:
    """The `DType` of an alias or a `torch.dtype`.

    >>> from torchguard.typing import int64_t
    >>> dtype_of(int64_t)
    int64_t
    """
    if isinstance(alias, TensorKind) and alias.spec is None:
        return alias.dtype
    if isinstance(alias, torch.dtype):
        return DType(str(alias), frozenset({alias}))
    hint = next((name for name in DTYPES if isinstance(alias, str) and name.startswith(alias)), "float32_t")
    raise AnnotationError(f"{alias!r} is no dtype. Use an alias such as {hint} from torchguard.typing.")


def is_dtype_name(text: str) -> bool:
    return text in DTYPES or isinstance(getattr(torch, text, None), torch.dtype)
