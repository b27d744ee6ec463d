"""Warnings of `watch`: what it cannot tell, in words."""

import warnings
from typing import Any

from torchguard._torch.tracing import constant_in_graphs
from torchguard.exceptions import CompileOnceWarning, MixedRowsWarning

# Classes of models, by name, that were warned of once, and of what.
_WARNED: set[tuple[str, str]] = set()


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
    if not watch.warned:
        watch.warned = True
        warn_of_mixing(type(watch.model).__name__, problem)


def warn_of_recurrent_layer(model: str) -> None:
    warnings.warn(
        f"watch: a fault was created inside of a recurrent layer of {model}, whose weights cannot be kept from it. All "
        "samples of the call are flagged, and zero in the output; a gradient of the layer that is not finite is zero. "
        "torchguard.Retry drops only the bad samples, on any model.",
        MixedRowsWarning,
        stacklevel=2,
    )


def warn_of_compiled_parts(model: str) -> None:
    """Say, once for each class of models, that parts which are compiled on their own run uncompiled."""
    _warn_once(
        (model, "parts"),
        f"watch: parts of {model} are compiled on their own. With quarantine they run uncompiled, because a graph of a "
        "part does not show which samples a fault affects. Compile the watched model instead: guarded.compile(), with "
        "compile_once=True for equal blocks.",
        CompileOnceWarning,
    )


@constant_in_graphs
def warn_of_unfollowed(model: str) -> None:
    """Say, once for each class of models, that a call is not followed."""
    _warn_once(
        (model, "unfollowed"),
        f"watch: {model} is called in a compiled transform of torch.func, in an export or under another dispatch mode, "
        "where operations are not followed. It is not known which samples a bad one affects: all samples of the call "
        "are flagged, and zero in the output. Gradients of parameters that the model's own code uses, and those under "
        "a compiled vmap or forward mode, may not be finite. In eager mode, transforms are followed; torchguard.export "
        "follows before it exports. torchguard.Retry is exact on any model.",
        MixedRowsWarning,
    )


@constant_in_graphs
def warn_of_float16(model: str) -> None:
    """Say, once for each class of models, that its blocks are compiled one by one.

    Float16 gradients are masked for samples that were bad going forward, which are not known inside a region.
    """
    _warn_once(
        (model, "float16"),
        f"watch: the blocks of {model} compute in float16. With quarantine, compile_once is not used there: each block "
        "is compiled on its own, which takes longer. Compute in bfloat16, or leave compile_once out.",
        CompileOnceWarning,
    )


def _warn_once(key: tuple[str, str], text: str, category: type[Warning]) -> None:
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(text, category, stacklevel=3)
