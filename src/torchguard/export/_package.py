"""A guarded or watched model compiled ahead of time, as a package that runs without Python's model."""

import os
from typing import Any

from torch import nn

from torchguard._torch.inductor import compile_package, load_package
from torchguard.exceptions import ExportError
from torchguard.export._example import Dims
from torchguard.export._file import write_entry
from torchguard.export._program import trace
from torchguard.export._verify import verify_outputs


def to_package(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    batch: tuple[int, int | None] = (1, None),
    dims: Dims | None = None,
    verify: bool = True,
) -> None:
    """Compile a guarded or watched model by AOTInductor into a package. The flags are its last output.

    Args:
        model: as for `to_program`.
        example: as for `to_program`.
        path: of the package, ends in ".pt2". It is loaded by `torch._inductor.aoti_load_package`, or from C++.
        batch: as for `to_program`.
        dims: as for `to_program`.
        verify: as for `to_program`, with the compiled package.
    """
    if not os.fspath(path).endswith(".pt2"):
        raise ExportError(f"to_package: the path is {os.fspath(path)!r}. AOTInductor takes a path that ends in '.pt2'.")
    traced = trace(model, example, batch, dims or {})
    compile_package(traced.program, os.fspath(path))
    write_entry(path, traced.signature.to_json())
    if verify:
        package = load_package(os.fspath(path))
        verify_outputs(traced.example, model, lambda args, kwargs: package(*args, **kwargs), batch, "the package")
