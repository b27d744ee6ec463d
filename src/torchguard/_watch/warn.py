"""Warnings of `watch`: what it cannot tell, in words.

In eager mode each is shown once for each watched model, in a graph whenever it is traced: what is written to the state
of the model there happens only when the graph runs.
"""

import warnings
from typing import Any

import torch

from torchguard._torch.tracing import constant_in_graphs
from torchguard.exceptions import CompileOnceWarning, MixedRowsWarning


def warn_of_mixing(model: str, problem: str | None) -> None:
    warnings.warn(
        f"watch: {model} may mix samples of a batch ({problem or 'the order of its samples is not known'}). If one "
        "goes bad, it is not known which others it affects: all samples of the call are flagged, and zero in the "
        "output. torchguard.Retry drops only the bad samples, on any model.",
        MixedRowsWarning,
        stacklevel=2,
    )


def warn_once_of_mixing(watch: Any, problem: str | None) -> None:
    """The same once for each watched model. `watch` is its state."""
    if _is_new(watch, "mixing"):
        warn_of_mixing(type(watch.model).__name__, problem)


def warn_of_recurrent_layer(watch: Any) -> None:
    """Say once that a fault inside of a recurrent layer counts for all samples."""
    if _is_new(watch, "recurrent"):
        warnings.warn(
            f"watch: a fault was created inside of a recurrent layer of {type(watch.model).__name__}, whose weights "
            "cannot be kept from it. All samples of the call are flagged, and zero in the output; a gradient of the "
            "layer that is not finite is zero. torchguard.Retry drops only the bad samples, on any model.",
            MixedRowsWarning,
            stacklevel=2,
        )


def warn_of_compiled_parts(watch: Any) -> None:
    """Say once that parts which are compiled on their own run uncompiled."""
    if _is_new(watch, "parts"):
        warnings.warn(
            f"watch: parts of {type(watch.model).__name__} are compiled on their own. With quarantine they run "
            "uncompiled, because a graph of a part does not show which samples a fault affects. Compile the watched "
            "model instead: guarded.compile(), with compile_once=True for equal blocks.",
            CompileOnceWarning,
            stacklevel=2,
        )


def warn_of_unfollowed(watch: Any) -> None:
    """Say that a call is not followed."""
    if torch.compiler.is_compiling() or _is_new(watch, "unfollowed"):
        _warn_of_unfollowed(type(watch.model).__name__)


@constant_in_graphs
def _warn_of_unfollowed(model: str) -> None:
    warnings.warn(
        f"watch: {model} is called in a compiled transform of torch.func, in an export or under another dispatch mode, "
        "where operations are not followed. It is not known which samples a bad one affects: all samples of the call "
        "are flagged, and zero in the output, and gradients that are not finite are zero. In eager mode, transforms "
        "are followed; torchguard.export follows before it exports. torchguard.Retry is exact on any model.",
        MixedRowsWarning,
        stacklevel=3,
    )


def warn_of_float16(watch: Any) -> None:
    """Say once that the blocks of a model are compiled one by one.

    Float16 gradients are masked for samples that were bad going forward, which are not known inside a region.
    """
    if _is_new(watch, "float16"):
        warnings.warn(
            f"watch: the blocks of {type(watch.model).__name__} compute in float16. With quarantine, compile_once is "
            "not used there: each block is compiled on its own, which takes longer. Compute in bfloat16, or leave "
            "compile_once out.",
            CompileOnceWarning,
            stacklevel=2,
        )


def warn_of_no_regions(watch: Any, error: Exception) -> None:
    """Say that the blocks of a model are compiled one by one, since torch raised an error for a region."""
    error = getattr(error, "inner_exception", error)  # of a backend
    reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    warnings.warn(
        f"watch: compiling the blocks of {type(watch.model).__name__} once raised an error, so each is compiled on its "
        f"own, which takes longer. Leave compile_once out, or give patterns of other blocks. The error: {reason}",
        CompileOnceWarning,
        stacklevel=2,
    )


def _is_new(watch: Any, what: str) -> bool:
    """Whether a watched model was not warned of this before. It is noted."""
    is_new = what not in watch.warned
    watch.warned.add(what)
    return is_new
