"""Settings of torch: the only module that changes them.

torch's settings (`torch._dynamo.config` and the like) are process-wide in torch 2.11. In later ones each thread has
values of its own, and a new thread starts with the defaults. So a setting is changed in the narrowest of three ways:

- around one compilation or trace, in the thread that does it (`without_graph_caches`, `without_limits`,
  `same_random_numbers`, `protect_regions`, `for_aten_graph`, `without_fused_layers`);
- while an object needs it, counted and put back when the last one is gone (`allow_side_effects_under_checkpoint`);
- for good: never.

The settings exist in torch 2.11 to 2.15. One that torch lacks is left out, and the docstrings say what is degraded
then; the two flags of `without_fused_layers` are required.

**Nested compile regions** (`compile_once`). Up to torch 2.15, Inductor does not know that a region may return what it
was given, as something to save for its backward pass, and writes other values there. Before 2.15, it also applies the
indices of buffers that a backward graph may overwrite to a region, where they mean other tensors. Gradients are
silently wrong either way, of plain models too. With `allow_buffer_reuse`, `inplace_buffers` and `donated_buffer` off,
memory goes back to the allocator instead, which knows who holds it. The patch compiles graphs that contain regions, and
no others, under these settings, in whatever thread that happens: on a GPU, and wherever `backward()` is called in
another thread, AOTAutograd compiles the backward graph in a thread that does not have the settings of the one that
compiled the forward graph. Where memory is not reused, donating it saves nothing and forbids `retain_graph`, so
`donated_buffer` stays off on 2.15, too. (None of 10 models whose gradients are wrong without the settings had wrong
gradients when only the backward graph was compiled without them, but nothing in Inductor rules it out.) The patch can
go when torch compiles nested regions correctly; `tests/torch_seam/test_workarounds.py` says when.
"""

import contextlib
import contextvars
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from torchguard._torch.process import patch_function, process_state
from torchguard._torch.support import torch_is_at_least
from torchguard._torch.tracing import constant_in_graphs

# The parameters of `aot_stage2_compile` that are compilers, by what they compile.
_COMPILERS = {"forward": "fw_compiler", "backward": "bw_compiler", "inference": "inference_compiler"}


# Settings around one compilation.


def without_limits() -> contextlib.AbstractContextManager[Any]:
    """Compile as often as necessary: a trial must not use up the recompile limits of the user's function.

    Degraded where torch names a limit otherwise: that limit stays in force.
    """
    import torch._dynamo.config as config

    names = ("accumulated_recompile_limit", "recompile_limit")
    return config.patch({name: 2**20 for name in names if hasattr(config, name)})  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Have Inductor draw the random numbers that eager mode draws, so that results can be compared.

    Degraded where Inductor has no `fallback_random`: results that depend on random numbers differ.
    """
    import torch._inductor.config as config

    names = [name for name in ("fallback_random",) if hasattr(config, name)]
    with config.patch(dict.fromkeys(names, True)):  # pyright: ignore[reportAttributeAccessIssue]
        yield


def all_tensor_guards() -> contextlib.AbstractContextManager[Any]:
    """Have a tree of guards that is built in this block check tensors in every call.

    With `skip_tensor_guards_with_matching_dict_tags`, the default, a tree of torch 2.11 that held once skips the
    tensors of a module from then on: neither Dynamo nor an audit would notice another dtype or `requires_grad`. Since
    torch 2.12 they are checked with it, too. Degraded where torch 2.11 lacks it: an audit does not notice such changes.
    """
    import torch._dynamo.config as config

    name = "skip_tensor_guards_with_matching_dict_tags"
    if torch_is_at_least(2, 12) or not hasattr(config, name):
        return contextlib.nullcontext()
    return config.patch({name: False})  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def without_graph_caches() -> Iterator[None]:
    """Compile every graph in this block: a graph that comes from a cache is not compiled, and cannot be captured.

    The caches of kernels stay on. On torch 2.11, where settings are process-wide, what another thread has switched off
    is left alone, so that it is not left off for good.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with contextlib.ExitStack() as stack:
        for config, names in (
            (functorch, ("enable_autograd_cache", "enable_remote_autograd_cache", "force_autograd_cache")),
            (inductor, ("fx_graph_cache", "fx_graph_remote_cache")),
        ):
            if settings := {name: False for name in names if getattr(config, name, False) is not False}:
                stack.enter_context(config.patch(settings))  # pyright: ignore[reportAttributeAccessIssue]
        yield


def for_aten_graph(layout_optimization: bool) -> contextlib.AbstractContextManager[Any]:
    """The settings under which Inductor compiles a graph of `compiled`.

    `size_asserts` and `alignment_asserts` are off where torch has them: leaves are checked in each call, and a graph
    returns what the next one was compiled for. They take a fifth of a small call.
    """
    import torch._inductor.config as config

    settings: dict[str, Any] = {"layout_optimization": layout_optimization and config.layout_optimization}
    settings["triton.cudagraphs"] = False  # the next run would overwrite what this one returned
    settings |= {name: False for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)}
    return config.patch(settings)  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Keep recurrent layers from becoming one oneDNN or cuDNN operation, whose backward cannot be traced.

    The public `torch.backends.mkldnn.flags` and `cudnn.flags` set more than this one flag each, and warn about it.
    Both flags are process-wide; `fakes.TRACING_LOCK` keeps two traces from undoing each other's. Required.
    """
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


@constant_in_graphs
def protect_regions() -> bool:
    """Compile graphs with nested regions under settings that give right gradients; called while one is traced.

    Patches `OutputGraph._call_user_compiler` and `aot_stage2_compile`, and `invoke_subgraph.gen_schema`: torch asks it
    at each call of a region what the region writes to, and traces the whole region for the answer, which takes half of
    AOTAutograd's time where many blocks are one region (since torch 2.13, one answer of two is cached). The patch
    caches the answers with what torch itself caches while it compiles a graph.

    Returns:
        Whether regions can be compiled. Degraded where torch lacks one of the first two functions: False, and
        `compile_once` compiles each block on its own. Where it lacks `gen_schema`, compiling takes longer.
    """
    import torch._functorch.aot_autograd as aot  # here, because loading it takes seconds
    from torch._dynamo.output_graph import OutputGraph

    if not takes_compilers(getattr(aot, "aot_stage2_compile", None)) or not hasattr(OutputGraph, "_call_user_compiler"):
        return False
    patch_function(OutputGraph, "_call_user_compiler", globals(), "_compile_frame")
    patch_function(aot, "aot_stage2_compile", globals(), "_compile_graphs")
    regions = sys.modules.get("torch._higher_order_ops.invoke_subgraph")  # torch has loaded it if there is a region
    if hasattr(regions, "get_invoke_subgraph_cache"):
        patch_function(getattr(regions, "invoke_subgraph", None), "gen_schema", globals(), "_gen_schema")
    return True


@contextlib.contextmanager
def _protected() -> Iterator[None]:
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    # Two threads that patch settings of the process, as they are in torch 2.11, would undo each other's.
    with (
        process_state("regions", threading.RLock),
        functorch.patch(donated_buffer=False),  # pyright: ignore[reportAttributeAccessIssue]
        inductor.patch(allow_buffer_reuse=False, inplace_buffers=False),  # pyright: ignore[reportAttributeAccessIssue]
    ):
        yield


def _protected_if_nested(graph: Any) -> contextlib.AbstractContextManager[None]:
    return _protected() if _has_regions(graph) else contextlib.nullcontext()


def _has_regions(graph: Any) -> bool:
    if not isinstance(graph, fx.GraphModule):
        return False
    region = torch.ops.higher_order.invoke_subgraph
    graphs = (module.graph for module in graph.modules() if isinstance(module, fx.GraphModule))
    return any(node.target is region for one in graphs for node in one.nodes)


def _compile_frame(original: Callable[..., Any], self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Replaces `OutputGraph._call_user_compiler`: cache keys, the joint graph, and the forward graph."""
    with _protected_if_nested(gm):
        return original(self, gm, *args, **kwargs)


def _compile_graphs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `aot_stage2_compile`: the backward graph, whenever and in whatever thread it is compiled."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    captured = getattr(given.get("aot_graph_capture"), "graph_module", None)
    with _protected_if_nested(captured):
        if _has_regions(captured):
            metadata = getattr(given.get("aot_state"), "fw_metadata", None)
            # "None are donated", not "unknown": torch would refuse a backward pass with `retain_graph`.
            if getattr(metadata, "bw_donated_idxs", ()) is None:
                metadata.bw_donated_idxs = []  # pyright: ignore[reportOptionalMemberAccess]
        return call_with_compilers(original, args, kwargs, lambda kind, graph: _protected_if_nested(graph))


def _gen_schema(original: Callable[..., Any], subgraph: Any, identifier: str | None, *operands: Any) -> Any:
    """Replaces `invoke_subgraph.gen_schema`."""
    from torch._higher_order_ops.invoke_subgraph import get_invoke_subgraph_cache

    cache = get_invoke_subgraph_cache()
    if cache is None:
        return original(subgraph, identifier, *operands)
    schemas = vars(cache).setdefault("_torchguard_schemas", {})
    key = (subgraph, identifier, *map(type, operands))
    if key not in schemas:
        schemas[key] = original(subgraph, identifier, *operands)
    return schemas[key]


def takes_compilers(aot_stage2_compile: Callable[..., Any] | None) -> bool:
    """Whether AOTAutograd's second stage is passed its three compilers by the names that torch 2.11 to 2.15 have."""
    return aot_stage2_compile is not None and {*_COMPILERS.values()} <= {
        *inspect.signature(aot_stage2_compile).parameters
    }


def call_with_compilers(
    aot_stage2_compile: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Callable[[str, fx.GraphModule], contextlib.AbstractContextManager[object]],
) -> Any:
    """Call AOTAutograd's second stage so that each compiler runs within `around("forward" | ..., graph)`."""

    def within(kind: str, compiler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiler, updated=())
        def compile(gm: fx.GraphModule, example_inputs: Any) -> Any:
            with around(kind, gm):
                return compiler(gm, example_inputs)

        return compile

    given = inspect.signature(aot_stage2_compile).bind(*args, **kwargs)
    # A compiler that is not given is the forward's, as in torch.
    given.arguments |= {
        name: within(kind, given.arguments.get(name) or given.arguments["fw_compiler"])
        for kind, name in _COMPILERS.items()
    }
    return aot_stage2_compile(*given.args, **given.kwargs)


# Settings while an object needs them.

# By setting and thread: the ids of the objects that need the setting, and the value to put back. Plain data, since all
# copies of this package share it.
_needed: dict[tuple[str, int], dict[str, Any]] = process_state("needed settings", dict)
_lock = process_state("settings lock", threading.RLock)  # a finalizer may run while this thread holds it


def allow_side_effects_under_checkpoint(holder: object) -> None:
    """Let Dynamo trace hooks that record inside `torch.utils.checkpoint`, while `holder` exists.

    Sets `skip_fwd_side_effects_in_bwd_under_checkpoint`: in backward, the hooks record nothing a second time. After
    torch 2.11 it is set in this thread alone. Degraded where torch lacks it: a watched model with checkpoints compiles
    with graph breaks, and with `fullgraph=True` Dynamo raises.
    """
    import torch._dynamo.config as config  # here, because loading it takes seconds

    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if hasattr(config, name):
        _need(holder, config, name, True)


def release_settings(holder: object) -> None:
    """Put back what was set for an object, unless others need it or other code has changed it since."""
    _release(id(holder))


def _need(holder: object, config: Any, name: str, value: object) -> None:
    thread = weakref.ref(threading.current_thread())
    key = (f"{config.__name__}.{name}", threading.get_ident() if _is_per_thread(config, name) else 0)
    with _lock:
        if not _is_current(key):
            _needed[key] = {"holders": set(), "thread": thread, "config": config, "name": name, "value": value}
        state = _needed[key]
        state["holders"].add(id(holder))
        found = getattr(config, name)
        if found != value:
            state["found"] = found
            setattr(config, name, value)
        _put_back()
    weakref.finalize(holder, _release, id(holder)).atexit = False


def _is_per_thread(config: Any, name: str) -> bool:
    """After torch 2.11 a setting is a context variable. Degraded where it is stored elsewhere: counted per process."""
    entry = getattr(config, "_config", {}).get(name)
    return isinstance(getattr(entry, "user_override", None), contextvars.ContextVar)


def _is_current(key: tuple[str, int]) -> bool:
    """Whether there is a state for a setting of the process or of this thread, not of an ended one with the same id."""
    return key in _needed and (key[1] == 0 or _needed[key]["thread"]() is threading.current_thread())


def _release(holder: int) -> None:
    with _lock:
        for state in tuple(_needed.values()):
            state["holders"].discard(holder)
        _put_back()


def _put_back() -> None:
    """Put back the settings that no object needs. Those of another thread wait until that thread calls this."""
    for key in [key for key in tuple(_needed) if key[1] in (0, threading.get_ident()) and _is_current(key)]:
        if _needed[key]["holders"]:
            continue
        state = _needed.pop(key)
        config, name = state["config"], state["name"]
        if "found" in state and getattr(config, name) == state["value"]:
            setattr(config, name, state["found"])


# Settings that are read.


def settings() -> dict[str, str]:
    """The settings of Dynamo, AOTAutograd and Inductor that shape what is compiled, as far as this torch has them."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    wanted = (
        ("dynamo", dynamo, _DYNAMO_SETTINGS),
        ("functorch", functorch, _FUNCTORCH_SETTINGS),
        ("inductor", inductor, _INDUCTOR_SETTINGS),
    )
    return {
        f"{prefix}.{name}": str(getattr(config, name))
        for prefix, config, names in wanted
        for name in names
        if hasattr(config, name)
    }


_DYNAMO_SETTINGS = (
    "assume_static_by_default",
    "automatic_dynamic_shapes",
    "capture_dynamic_output_shape_ops",
    "capture_scalar_outputs",
    "optimize_ddp",
    "recompile_limit",
    "specialize_float",
    "specialize_int",
    "suppress_errors",
)
_FUNCTORCH_SETTINGS = (
    "activation_memory_budget",
    "functionalize_rng_ops",
    "treat_parameters_as_free_to_save",
)
_INDUCTOR_SETTINGS = (
    "cpp_wrapper",
    "epilogue_fusion",
    "fallback_random",
    "freezing",
    "layout_optimization",
    "max_autotune",
    "pattern_matcher",
)
