"""`watch(model)`: checks on a model that nobody edited.

State that is not visible in signatures, here and in the rest of torchguard, and why it is there:

- On tensors, since traced values have no other carrier. `_torchguard_clean` on a tensor that quarantine replaced, so
  that it is not checked again (`replace.py`). `_torchguard_source` on a row status whose scan is deferred
  (`detect.py`). `_torchguard_call` on a call's gradient probes: the parts they were split into, once
  (`gradient_probes.py`). And of the error channel, `_torchguard_note` on flags: what was pushed since they were empty
  (`_channel/deferred.py`).
- Between forward and backward, since a backward pass returns gradients and nothing else: the cells
  `CallOrigins.origins` and `ProbeTable.opened`, and a hook on the leaf of the gradient probes that saves their gradient
  (`gradient_probes.py`, `state.py`).
- For one call: `WatchState.begin` notes the call record before the model's own `forward`, and `end` removes it, since
  module hooks get no argument from the call. In eager mode each thread has its own (`state.Running`; `parts.py` has it
  by the key of the model). `CallRecord.enter_region` swaps five fields of the record, since tensors leave a region by
  being returned (`regions.py`).
- On modules, and removed by `unwatch`: forward hooks, and `_torchguard_identity` (`_torch/hook_guards.py`);
  `_torchguard_region` of blocks that may be compiled once (`_torch/region_calls.py`); the `WatchState` as attribute
  `_watch` of the model. The watched model and the model share one `__dict__`. Of `@tracked`, and not removed:
  `_fx_path` and `_fx_location` on modules; and `_fx_building` on a model while its `__init__` runs
  (`locations/_tracked.py`).
- On torch: the operators, which stay for the process since compiled code calls them; Dynamo's marks on the tensors of a
  `WatchState` that their sizes are static (`_torch/dynamo.py`) and on functions that are constant in graphs
  (`_torch/tracing.py`); `_torchguard_has_global_hooks`, `_torchguard_regions` and `_torchguard_region_state` on the
  graph that it is building (`_torch/hook_calls.py`, `region_calls.py`); `_torchguard_schemas` on torch's cache of
  nested regions, with a patch of `invoke_subgraph.gen_schema` (`_torch/settings.py`); and what survives a second import
  of torchguard: `_torchguard` on the module `torch`, and `_torchguard_copies` on a function of Dynamo
  (`_torch/process.py`). docs/private-torch.md lists the settings and patches.
- On exceptions, since Dynamo and `make_fx` raise them again: `torchguard_line`, the source line of the operation that
  raised, while `compiled` traces (`compiled/_purity.py`).
- Caches: classes of watched models (`wrapper.py`), constants by device (`origins.py`, `path_bits.py`), configurations
  (`summarize.py`), compiled kernels (`kernels.py`). And the orders of checks that calls had (`path_bits.py`), since a
  graph can return no more than the number of its order.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from torchguard._torch.dynamo_graph import keep_writes_after_calls, list_attributes_of_new_objects
from torchguard._torch.hook_calls import call_hooks_while_tracing
from torchguard._torch.hook_guards import renew_identity, skip_guards_on_hooks
from torchguard._torch.modules import (
    is_compiled_in_place,
    is_compiled_or_scripted,
    remove_forward_hooks,
    skip_frame,
)
from torchguard._torch.settings import allow_side_effects_under_checkpoint, release_settings
from torchguard._torch.support import warn_of_missing
from torchguard._watch import hooks, regions, state, wrapper  # classes are looked up there: they may be reloaded
from torchguard._watch.finite_derivatives import allow_in_graphs
from torchguard._watch.report import Incident
from torchguard._watch.select import (
    DEFAULT_CHECKS,
    blocks_to_compile_once,
    checks_of,
    enclosing_location,
    mask_positions,
    other_embeddings,
    protected_paths,
    sample_dims,
    watched_paths,
)
from torchguard.exceptions import WatchError

__all__ = ["Incident", "WatchError", "unwatch", "watch"]

_STATE = "_watch"


def watch(
    model: nn.Module,
    *,
    level: str = "modules",
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    checks: Iterable[Any] = DEFAULT_CHECKS,
    quarantine: bool = False,
    returns: str = "both",
    batch_dim: int = 0,
    sample_of: Mapping[str, int] | None = None,
    compile_once: bool | Sequence[str] | str | None = None,
) -> Any:
    """The watched model: `out, f = watch(model)(x)`, compiled or not.

    It shares everything with the model: class, modules, parameters, attributes. The model itself can be used as before.
    A sample that goes bad is recorded in `f` at the location where it went bad first.

    Args:
        level: check the outputs of all modules with parameters ("modules"), of the items of the model's lists of
            modules ("blocks"), or the model's input and output only ("outputs").
        include: glob patterns of paths: of the modules that `level` selects ("outputs": of all), check only these.
        exclude: glob patterns of paths not to check.
        checks: "nan", "inf", "indices", "overflow" or ("overflow", share), "zero", "constant", "saturated", or checks
            of your own: (name, function from (batch, values) to a mask, message).
        quarantine: replace non-finite values by zeros at the boundaries of all modules with parameters, whatever the
            level, mask non-finite gradients, and zero bad samples in the output.
        returns: "both" for `(out, f)`; "output" for `out`, with the flags in `guarded.flags`.
        batch_dim: the dim of the arguments along which the samples lie.
        sample_of: by glob pattern of paths ("" for the model), the dim of a module's tensors along which the samples
            lie, where the operations do not determine it. It is not checked.
        compile_once: compile equal blocks once for all of them: those at paths that match glob patterns, or with True
            the items of the model's outermost lists of modules. By default, these are where it costs nothing: on a GPU,
            without gradients, if they are large. Blocks that torch cannot compile once are compiled one by one.

    >>> from torchguard._watch import watch
    >>> guarded = watch(torch.nn.Linear(2, 1))
    >>> out, f = guarded(torch.tensor([[1.0, 2.0], [float("nan"), 1.0]]))
    >>> flags.repr(f)
    'ErrorFlags(2 samples, 1 errors: 1xNAN @ input)'
    """
    warn_of_missing("watch")
    _require_model(model)
    if returns not in ("both", "output"):
        raise WatchError(f"watch: returns is {returns!r}. Give 'both' or 'output'.")
    selected = checks_of(checks)
    chosen = watched_paths(model, level, include, exclude)
    embeddings = other_embeddings(model, chosen, exclude) if selected.indices else []
    blocks = blocks_to_compile_once(model, compile_once)
    modules, checked = dict(model.named_modules()), {*chosen, *embeddings}
    watched = [path for path in modules if path in checked]
    paths = ("input", *watched, "")
    of_blocks = {path: regions.locations_within(path, paths) for path in blocks}
    watch_state = state.WatchState(
        model,
        paths,
        selected,
        quarantine,
        returns,
        batch_dim,
        masks=mask_positions(model),
        regions=tuple(locations for locations in of_blocks.values() if locations),
        asks_for_regions=bool(compile_once),
        sample_of=sample_dims(paths, sample_of or {}),
    )
    allow_side_effects_under_checkpoint(watch_state)
    skip_guards_on_hooks()
    call_hooks_while_tracing()
    keep_writes_after_calls()
    list_attributes_of_new_objects()
    root_hook = wrapper.RootHook(watch_state)
    model.register_forward_pre_hook(root_hook)
    model.register_forward_hook(root_hook.after)
    skip_frame(wrapper.RootHook.after)
    on_modules = {
        path: hooks.ModuleHooks(watch_state, location, modules[path], path in chosen)
        for location, path in enumerate(watched, start=1)
    }
    if quarantine:
        allow_in_graphs()
        for path in protected_paths(model, watched, exclude):
            on_modules[path] = hooks.ModuleHooks(watch_state, enclosing_location(path, paths), modules[path], True)
    regions.add_regions(watch_state, {modules[path]: locations for path, locations in of_blocks.items()})
    for path, on_module in on_modules.items():
        module = modules[path]
        if on_module.checks_output:
            module.register_forward_hook(on_module.after)
        if on_module.checks_input:
            module.register_forward_pre_hook(on_module.before, with_kwargs=True)
        renew_identity(module)
    guarded = wrapper.new_wrapper(type(model), "forward" in model.__dict__)
    _share_attributes(model, guarded)
    model.__dict__[_STATE] = watch_state
    return guarded


def unwatch(guarded: Any) -> nn.Module:
    """The plain model. Hooks and attributes of `watch` are removed from it.

    The setting that `watch` changes, `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint`, is restored
    when no watched model is left, unless other code has changed it since.
    """
    if not wrapper.is_watched(guarded):
        raise WatchError(f"unwatch: this {type(guarded).__name__} is not watched. Give what watch returned.")
    watch_state = guarded._watch
    del guarded.__dict__[_STATE]
    for module in guarded.modules():  # pyright: ignore[reportAttributeAccessIssue]
        remove_forward_hooks(module, lambda hook: getattr(hook, "watch", None) is watch_state)
        renew_identity(module)
        regions.remove_region(module, watch_state)
    for _, hook in watch_state.gradient_hooks.values():
        hook.remove()
    release_settings(watch_state)
    _share_attributes(guarded, watch_state.model)
    return watch_state.model


def _share_attributes(owner: object, other: object) -> None:
    """Have another object use the dict of its owner's attributes.

    In Python 3.13 this dict may be a part of the owner. The garbage collector then does not follow it from the other
    object, and clears an owner that is alive (https://github.com/python/cpython/issues/130327). A dict that was
    assigned is an object of its own.
    """
    if sys.version_info >= (3, 13):
        object.__setattr__(owner, "__dict__", dict(owner.__dict__))
    object.__setattr__(other, "__dict__", owner.__dict__)


def _require_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise WatchError(f"watch: expected an nn.Module, got {type(model).__name__}.")
    for path, module in model.named_modules():
        if is_compiled_or_scripted(module) or is_compiled_in_place(module):
            what = f"{path!r} of this model" if path else "this model"
            raise WatchError(
                f"watch: {what} is compiled already, and what was compiled has no checks. Watch first, then compile: "
                "torch.compile(watch(model)), or guarded.compile()."
            )
    if _STATE in model.__dict__:
        raise WatchError(f"watch: this {type(model).__name__} is watched already. unwatch it first.")
    if own := [name for name in wrapper.ADDED_NAMES if hasattr(model, name)]:
        raise WatchError(
            f"watch: this {type(model).__name__} has a {own[0]!r} of its own, which watching would hide. Rename it."
        )
