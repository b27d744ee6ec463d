"""Reading what travels in an exported file, with nothing but that file.

The table of locations is JSON: in an ONNX file a property of the model, in the archives of torch (`.pt2`) an entry.
An ONNX file is read without the package `onnx`, which machines that serve a model need not have: of the protobuf
message only the properties (field 14) are read, and the graph is skipped.
"""

import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torchguard.exceptions import ExportError
from torchguard.export._signature import KEY, Signature
from torchguard.flags import UnpackedError, unpack_named

ENTRY = f"extra/{KEY}.json"
# Numbers of the protobuf schema of ONNX: of the properties in a model, and of key and value in a property.
_PROPERTIES, _KEY, _VALUE = 14, 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def signature_of(path: str | os.PathLike[str]) -> Signature:
    """The inputs, outputs, batch and locations of an exported model."""
    text = None
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entry = next((name for name in archive.namelist() if name.endswith(ENTRY)), None)
            text = None if entry is None else archive.read(entry).decode()
    else:
        with Path(path).open("rb") as file:
            text = next((value for key, value in _properties(file, path) if key == KEY), None)
    if text is None:
        raise ExportError(f"{path} has no table of locations. Export the model with torchguard.export.")
    return Signature.from_json(text, path)


def flags_of(path: str | os.PathLike[str], output: Any) -> list[list[UnpackedError]]:
    """The errors of every sample, with the names that the file has.

    Args:
        path: of an ONNX file, a program or a package that `torchguard.export` wrote.
        output: what the runtime returned: all outputs, of which the last one has the flags, a mapping with "flags", or
            the flags alone.

    >>> import tempfile
    >>> from torchguard import export, watch
    >>> model = watch(torch.nn.Sequential(torch.nn.Linear(2, 1))).eval()
    >>> path = tempfile.mkdtemp() + "/linear.pt2"
    >>> program = export.to_program(model, torch.ones(3, 2), path)
    >>> ((error,),) = export.flags_of(path, program.module()(torch.full((1, 2), torch.nan)))
    >>> error.code_name, error.location_name.endswith("input")
    ('NAN', True)
    """
    found = signature_of(path)
    name = found.outputs[-1]
    if isinstance(output, Mapping):
        if name not in output:
            raise ExportError(f"flags_of: the output has no {name!r}. It has {', '.join(map(str, output))}.")
        output = output[name]
    elif isinstance(output, Sequence):
        if not output:
            raise ExportError("flags_of: the output is empty. Give what the runtime returned.")
        output = output[-1]
    f = output if isinstance(output, Tensor) else torch.as_tensor(output)
    low, high = found.batch
    if f.ndim and (f.shape[0] < low or (high is not None and f.shape[0] > high)):
        limits = f"{low} or more" if high is None else f"{low} to {high}"
        raise ExportError(f"flags_of: the output is of {f.shape[0]} samples, and {path} is for {limits}.")
    return unpack_named("export.flags_of", f, found.locations, found.codes)


def write_entry(path: str | os.PathLike[str], text: str) -> None:
    """Add the table to an archive of torch, below its root."""
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/{ENTRY}", text)


def _properties(file: BinaryIO, path: Any) -> Iterator[tuple[str, str]]:
    """Keys and values of the properties of an ONNX model."""
    try:
        for message in _fields(file, os.fstat(file.fileno()).st_size, (_PROPERTIES,)):
            key, value = _fields(io.BytesIO(message), len(message), (_KEY, _VALUE))
            yield key.decode(), value.decode()
    except (EOFError, ValueError) as error:  # also of bytes that are no text
        raise ExportError(f"{path} is neither an ONNX file nor an archive of torch. Give what export wrote.") from error


def _fields(file: BinaryIO, end: int, numbers: tuple[int, ...]) -> Iterator[bytes]:
    """The fields of a protobuf message that have one of these numbers, all of which hold bytes."""
    while file.tell() < end:
        number, kind = divmod(_varint(file), 8)
        if kind == _VARINT:
            _varint(file)
            continue
        length = {_FIXED64: 8, _FIXED32: 4}.get(kind) or (_varint(file) if kind == _BYTES else end + 1)
        if not number or file.tell() + length > end:
            raise EOFError("a field ends after the message")
        if number in numbers:
            yield file.read(length)
        else:
            file.seek(length, os.SEEK_CUR)


def _varint(file: BinaryIO) -> int:
    value, shift = 0, 0
    while True:
        byte = file.read(1)
        if not byte or shift > 63:
            raise EOFError("a number ends after the message")
        value, shift = value | (byte[0] & 0x7F) << shift, shift + 7
        if byte[0] < 0x80:
            return value
