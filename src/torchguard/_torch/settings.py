"""Settings of torch: read, changed around a compilation, or changed for the whole process."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torchguard._torch.tracing import constant_in_graphs


@constant_in_graphs
def keep_what_regions_are_given() -> None:
    """Have Inductor write to no memory that was used for something else, and have backward graphs take none over.

    Up to torch 2.13, Inductor does not know that a nested region may hand out what it was given, as something to save
    for its backward pass, and writes something else there. And it takes the numbers of what a backward graph may
    overwrite for those of a region, where they mean other tensors. Gradients come out wrong either way, of plain models
    too. The memory goes back to the allocator instead, which knows who holds it. These are settings for the whole
    process, and made while a region is traced: a model may have come here by pickle.
    """
    import torch._functorch.config  # not at import: they are heavy
    import torch._inductor.config

    torch._functorch.config.donated_buffer = False
    torch._inductor.config.allow_buffer_reuse = False
    torch._inductor.config.inplace_buffers = False


@constant_in_graphs
def describe_regions_once() -> None:
    """Have torch ask once what a nested region writes to, instead of at every call of it.

    It traces the whole region for the answer, and takes half of AOTAutograd's time for it where many blocks are one
    region. Since 2.13 it remembers one answer of two. They are kept with what torch itself keeps of regions while it
    compiles a graph, and for no longer. Where these names are missing, compiling takes as long as it takes.
    """
    regions = sys.modules.get("torch._higher_order_ops.invoke_subgraph")  # loaded, since there is a region
    region, notes = getattr(regions, "invoke_subgraph", None), getattr(regions, "get_invoke_subgraph_cache", None)
    describe = getattr(region, "gen_schema", None)
    if region is None or describe is None or notes is None or "gen_schema" in vars(region):
        return

    def described(subgraph: Any, identifier: str | None, *operands: Any) -> Any:
        kept = notes()
        if kept is None:
            return describe(subgraph, identifier, *operands)
        known = vars(kept).setdefault("_torchguard_described", {})
        about = (subgraph, identifier, *map(type, operands))
        if about not in known:
            known[about] = describe(subgraph, identifier, *operands)
        return known[about]

    region.gen_schema = described


def keep_side_effects_under_checkpoint() -> None:
    """Let Dynamo trace hooks that take notes inside `torch.utils.checkpoint`, without taking them again in backward.

    It is a setting of Dynamo's for the whole process. Where it is missing, a watched model with checkpoints compiles
    with graph breaks, or with `fullgraph=True` says so.
    """
    import torch._dynamo  # not at import: it is heavy

    if hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def without_limits() -> contextlib.AbstractContextManager[Any]:
    """Compile as often as it takes: a trial should not use up what Dynamo grants a function in all."""
    import torch._dynamo.config as config

    named = ("accumulated_recompile_limit", "recompile_limit")
    return config.patch({name: 2**20 for name in named if hasattr(config, name)})  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def without_graph_caches() -> Iterator[None]:
    """Compile every graph, in this thread: what comes from a cache of graphs is not compiled, and never seen.

    The caches of kernels stay on. Settings are per thread, so they are set around each compilation. On torch 2.11 they
    are not: what another thread has switched off already is left to it, and so is not left off for good.
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


def settings() -> dict[str, str]:
    """The settings of Dynamo, AOTAutograd and Inductor that shape what is compiled; those torch knows."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    wanted = (
        ("dynamo", dynamo, _DYNAMO_SETTINGS),
        ("functorch", functorch, _FUNCTORCH_SETTINGS),
        ("inductor", inductor, _INDUCTOR_SETTINGS),
    )
    return {
        f"{of}.{name}": str(getattr(config, name))
        for of, config, names in wanted
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
