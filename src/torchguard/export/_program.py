"""A guarded or watched model as a program of `torch.export`, and as a package that AOTInductor compiles of it."""

import contextlib
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from torchguard._channel.config import CARRIERS
from torchguard._files import replaced_whole
from torchguard._progress import progress_line
from torchguard._pytrees import children
from torchguard._torch.inductor import compile_package, load_package
from torchguard._torch.tensors import unflatten
from torchguard._watch.export import batch_dim, planned
from torchguard._watch.wrapper import is_watched
from torchguard.exceptions import ExportError
from torchguard.export._example import Dims, Example
from torchguard.export._file import ENTRY, write_entry
from torchguard.export._signature import Signature, signature
from torchguard.export._verify import verify_outputs

FLAGS = "flags"


def to_program(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    batch: tuple[int, int | None] = (1, None),
    dims: Dims | None = None,
    verify: bool = True,
) -> ExportedProgram:
    """Export a guarded or watched model by `torch.export`, for inference. The flags are its last output.

    Args:
        model: in eval mode: a watched model, or one that returns flags last.
        example: one tensor, a tuple of positional arguments, or a mapping of keyword arguments, of two samples or more.
        path: where to save the program as well, for `torch.export.load` and `flags_of`.
        batch: the least and the most samples of a call, None for no limit. `(8, 8)`: always 8.
        dims: other dims that vary: `{"input_ids": {1: "length"}}`; dims of one name have one size.
        verify: compare the program with the model on the example, on other batch sizes and with NaN and Inf in it.
    """
    with progress_line() as show:
        show(f"to_program: exporting {type(model).__name__}")
        traced = trace(model, example, batch, dims or {})
        if verify:
            show("to_program: comparing the program with the model")
            program = traced.program.module()
            verify_outputs(traced.example, model, lambda args, kwargs: program(*args, **kwargs), batch, "the program")
        if path is not None:
            extra: Any = {ENTRY.split("/")[-1]: traced.signature.to_json()}
            with replaced_whole(path) as new:
                torch.export.save(traced.program, new, extra_files=extra)
    return traced.program


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
    with progress_line() as show:
        show(f"to_package: exporting {type(model).__name__}")
        traced = trace(model, example, batch, dims or {})
        show("to_package: compiling")
        with replaced_whole(path) as new:
            compile_package(traced.program, os.fspath(new))
            write_entry(new, traced.signature.to_json())
            if verify:
                show("to_package: comparing the package with the model")
                package = load_package(os.fspath(new))
                run = lambda args, kwargs: package(*args, **kwargs)  # noqa: E731
                verify_outputs(traced.example, model, run, batch, "the package")


@dataclass(frozen=True)
class Traced:
    """An exported model, its example, and what will travel with it."""

    program: ExportedProgram
    example: Example
    signature: Signature


def trace(model: nn.Module, given: Any, batch: tuple[int, int | None], dims: Dims) -> Traced:
    """Export a model. The last of its outputs are the flags.

    Raises:
        ExportError: the model is in training mode, returns no flags, or `torch.export` fails.
    """
    if not isinstance(model, nn.Module):
        raise ExportError(f"export: expected an nn.Module, got {type(model).__name__}.")
    if model.training:
        raise ExportError(f"export: this {type(model).__name__} is in training mode. Call model.eval() first.")
    dim = batch_dim(model) if is_watched(model) else 0
    example = Example(model, given, dim)
    shapes = example.shapes(batch, dims)
    is_dynamic = shapes is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's, about itself
        try:
            if is_watched(model):
                stack.enter_context(planned(model, example.args, example.kwargs, is_dynamic))
            how: Any = {"dynamic_shapes": shapes, "strict": False}
            program = torch.export.export(model, example.args, example.kwargs, **how)
        except Exception as error:
            kind = type(error).__name__
            raise ExportError(f"export: this {type(model).__name__} cannot be traced: {kind}: {error}") from error
    outputs = _output_names(model, program, example)
    return Traced(program, example, signature(model, example.names, outputs, batch))


def _output_names(model: nn.Module, program: ExportedProgram, example: Example) -> tuple[str, ...]:
    """A name for each output: the keys that lead to it. The flags, which come last, are "flags"."""
    (node,) = program.graph.find_nodes(op="output")
    values = [getattr(one, "meta", {}).get("val") for one in node.args[0][-len(program.graph_signature.user_outputs) :]]
    last = values[-1]
    if not isinstance(last, Tensor) or last.dtype not in CARRIERS or last.ndim != 2:
        got = f"{last.dtype} of {last.ndim} dims" if isinstance(last, Tensor) else type(last).__name__
        raise ExportError(
            f"export: the last output of this {type(model).__name__} is {got}, not flags. Give watch(model), or return "
            "the flags last."
        )
    returned = unflatten(range(len(values)), program.call_spec.out_spec)  # pyright: ignore[reportArgumentType]
    paths = dict(_paths(returned))
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and not hasattr(returned, "_fields")
    names = []
    for number in range(len(values) - 1):
        keys = paths[number][1:] if is_pair else paths[number]
        name = ".".join(map(str, keys))
        names.append(name if name and not isinstance(keys[0], int) else f"output_{name}" if name else "output")
    return (*names, FLAGS)


def _paths(value: Any) -> list[tuple[int, tuple[Any, ...]]]:
    """The keys that lead to each number in a pytree."""
    if isinstance(value, int):
        return [(value, ())]
    return [(number, (key, *keys)) for key, child in children(value) for number, keys in _paths(child)]
