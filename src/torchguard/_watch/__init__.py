"""Checks put in for you: `watch(model)` watches a model nobody edited."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from torchguard._torch.modules import is_compiled_or_scripted, mixes_samples, remove_forward_hooks
from torchguard._torch.settings import allow_side_effects_under_checkpoint, release_settings
from torchguard._watch import regions, state, wrapper  # whose classes are looked up there: they may be reloaded
from torchguard._watch.report import Incident
from torchguard._watch.select import DEFAULT, blocks_to_compile_once, checks_of, other_embeddings, watched_paths
from torchguard.exceptions import MixedRowsWarning, WatchError

__all__ = ["Incident", "unwatch", "watch"]

_STATE = "_watch"


def watch(
    model: nn.Module,
    *,
    level: str = "modules",
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    checks: Iterable[Any] = DEFAULT,
    quarantine: bool = False,
    returns: str = "both",
    batch_dim: int = 0,
    compile_once: bool | Sequence[str] | str = False,
) -> Any:
    """The model, watched: `out, f = watch(model)(x)`, compiled or not.

    What is returned shares everything with the model: class, modules, parameters, attributes. The model itself goes on
    as before. A sample that goes bad is recorded in `f` at the place where it went bad first.

    Args:
        level: watch what every module with parameters returns ("modules"), what the blocks of the model's lists of
            modules return ("blocks"), or inputs and outputs alone ("outputs").
        include: glob patterns of paths: of what `level` chooses ("outputs": of all), watch these alone.
        exclude: glob patterns of paths not to watch.
        checks: what to look for: "nan", "inf", "indices", "overflow" or ("overflow", share), "zero", "constant",
            "saturated", or checks of your own, (name, function from (batch, values) to a mask, message).
        quarantine: replace what is bad at module boundaries, in values and gradients, and the whole row in the output.
        returns: "both" for `(out, f)`; "output" for `out`, with the flags in `guarded.flags`.
        batch_dim: the dim of the arguments along which the samples lie.
        compile_once: compile blocks that are alike once for all of them: those at paths that match glob patterns, or
            with True the items of the model's outermost lists of modules.

    >>> from torchguard._watch import watch
    >>> guarded = watch(torch.nn.Linear(2, 1))
    >>> out, f = guarded(torch.tensor([[1.0, 2.0], [float("nan"), 1.0]]))
    >>> flags.repr(f)
    'ErrorFlags(2 samples, 1 errors: 1xNAN @ input)'
    """
    _require_model(model)
    if returns not in ("both", "output"):
        raise WatchError(f"watch: returns is {returns!r}. Give 'both' or 'output'.")
    looked_for = checks_of(checks)
    chosen = watched_paths(model, level, include, exclude)
    tables = other_embeddings(model, chosen, exclude) if looked_for.indices else []
    blocks = blocks_to_compile_once(model, compile_once)
    modules, looked_at = dict(model.named_modules()), {*chosen, *tables}
    watched = [path for path in modules if path in looked_at]
    paths = ("input", *watched, "")
    parts = {path: regions.places_within(path, paths) for path in blocks}
    about = (quarantine, returns, batch_dim, wrapper.masks_of(model), tuple(part for part in parts.values() if part))
    how = state.Watch(model, paths, looked_for, *about)
    if quarantine:
        _warn_of_mixed_rows(model)
    allow_side_effects_under_checkpoint(how)
    model.register_forward_pre_hook(wrapper.Root(how))
    eyes = {path: wrapper.Eye(how, i, modules[path], path in chosen) for i, path in enumerate(watched, start=1)}
    for path, part in parts.items():
        modules[path].__dict__["forward"] = regions.Region(how, modules[path], eyes.pop(path, None), part)
    for path, eye in eyes.items():
        module = modules[path]
        if eye.looks_after:
            module.register_forward_hook(eye.after)
        if eye.looks_before:
            module.register_forward_pre_hook(eye.before, with_kwargs=True)
    twin = wrapper.new_shell(type(model), "forward" in model.__dict__)
    object.__setattr__(twin, "__dict__", model.__dict__)
    model.__dict__[_STATE] = how
    return twin


def unwatch(guarded: Any) -> nn.Module:
    """The plain model, without a trace of having been watched.

    The setting that `watch` changes, `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint`, is put back
    when no watched model is left, unless somebody else has changed it since.
    """
    if not wrapper.is_watched(guarded):
        raise WatchError(f"unwatch: this {type(guarded).__name__} is not watched.")
    how = guarded.__dict__.pop(_STATE)
    for module in guarded.modules():  # pyright: ignore[reportAttributeAccessIssue]
        remove_forward_hooks(module, lambda hook: getattr(hook, "watch", None) is how)
        regions.remove_region(module, how)
    release_settings(how)
    object.__setattr__(how.model, "__dict__", guarded.__dict__)
    return how.model


def _require_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise WatchError(f"watch: got a {type(model).__name__}. Give an nn.Module.")
    if is_compiled_or_scripted(model):
        raise WatchError("watch: this model is compiled already. Watch first: torch.compile(watch(model)).")
    if _STATE in model.__dict__:
        raise WatchError(f"watch: this {type(model).__name__} is watched already. unwatch it first.")
    if own := [name for name in wrapper.NAMES if hasattr(model, name)]:
        raise WatchError(
            f"watch: this {type(model).__name__} has a {own[0]!r} of its own, and a watched model has one, too."
        )


def _warn_of_mixed_rows(model: nn.Module) -> None:
    mixing = [path for path, module in model.named_modules() if mixes_samples(module)]
    if mixing:
        warnings.warn(
            f"watch: {', '.join(mixing[:5])} mix samples while training: a repaired sample goes into their mean and "
            "variance as zeros. The others' outputs and gradients stay finite, but are not those of the batch without "
            "it. In eval mode they are.",
            MixedRowsWarning,
            stacklevel=3,
        )
