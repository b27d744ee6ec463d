"""The one seam to private torch.

Each access is a small function that says why it is needed and what happens where it is missing.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)
T = TypeVar("T")


def of_this_process(name: str, make: Callable[[], T]) -> T:
    """What there is one of in a process, made when it is first asked for.

    Of this package there may be several copies: it can be dropped from `sys.modules` and imported again. So it is kept
    in torch, which cannot be imported twice.
    """
    kept = sys.modules["torch"].__dict__.setdefault("_torchguard", {})
    if name not in kept:
        kept[name] = make()
    return kept[name]


def kept_through_reloads(scope: dict[str, Any], name: str, make: Callable[[], T]) -> T:
    """What a module has in its `globals()` under a name; when it is reloaded, still the same.

    It is kept outside, since IPython empties a module before it reloads it, and by which dict that is: of a module of
    this package there may be several in a process.
    """
    modules = of_this_process("modules", dict)
    _, kept = modules.setdefault(id(scope), (scope, {}))  # the dict as well: another could come to lie there
    if name not in kept:
        kept[name] = make()
    return kept[name]


def replaced_by(scope: dict[str, Any], name: str, original: Any) -> Callable[..., Any]:
    """A function of torch's, replaced by ours of that name in a module's `globals()`, which is given `original` first.

    Ours is looked up in each call: when the module is reloaded, torch's function stays as it is, and calls the new one.
    """

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return scope[name](original, *args, **kwargs)

    return replaced


def constant_in_graphs(fn: F) -> F:
    """Have Dynamo call `fn` while it traces and take the result for a constant.

    `torch.compiler.assume_constant_result` does the same, but loads all of Dynamo at import. Where the mark is no
    longer known, Dynamo traces into `fn` instead and says what it cannot trace.
    """
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


def is_traced(tensor: Tensor) -> bool:
    """Whether `tensor` stands for a value in a graph under construction.

    Fake and functional tensors are private subclasses; anything that is not a plain tensor is taken for one.
    A user's own subclass is then treated as traced as well, which costs speed, never correctness.
    """
    return type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter


def is_shape_only(tensor: Tensor) -> bool:
    """Whether nobody will ever see a value of `tensor`: it is fake, and nothing that is done to it is recorded.

    So it is when Dynamo and AOTAutograd try out what shapes come out, before they trace. Where these names are
    missing nothing counts as such, and trying out costs as much as tracing.
    """
    is_fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "is_fake", None)
    proxy_mode = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "get_proxy_mode", None)
    return is_fake is not None and proxy_mode is not None and is_fake(tensor) and proxy_mode() is None


def mutation_count(tensor: Tensor) -> int:
    """How often `tensor` was changed in place: tells whether a note made about it still holds.

    `_version` has no public name. Inference tensors have none at all: they count as never changed, and no notes
    are kept about them.
    """
    return 0 if tensor.is_inference() else tensor._version


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is just its values: no graph is being traced, and no `torch.func` transform is at work.

    The level of such a transform has no public name; without it, `vmap` over a check in eager mode would fail on
    reading a batched value. Nor have the batched gradients of `torch.autograd.grad(..., is_grads_batched=True)`, which
    are made by an older `vmap`. Nor has the state of `torch.jit.trace`, nor the stack of dispatch modes, one of which
    `make_fx` uses: without them, what a traced check saw in its example would count for every later input.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_traced(tensor)
        and torch._C._functorch.maybe_current_level() is None  # pyright: ignore[reportAttributeAccessIssue]
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` is at work: documented under `torch.jit`, but not among its exported names."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


@constant_in_graphs
def in_transform() -> bool:
    """Whether a `torch.func` transform is at work, asked while Dynamo traces through it."""
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def can_read(tensor: Tensor) -> bool:
    """Whether looking at a value of `tensor` right now is possible and costs no device sync."""
    return tensor.is_cpu and is_plain(tensor)


@constant_in_graphs
def is_exporting() -> bool:
    """Whether `torch.export` is at work.

    In torch 2.11 and 2.12, Dynamo answers `torch.compiler.is_exporting()` with True whenever it traces, so the flag
    behind it is read. Where that is missing nothing counts as an export, and an exported program may hold
    operators of ours.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def holds(condition: bool) -> bool:
    """Whether a comparison of sizes holds; for sizes that depend on values, of which a graph knows nothing, never.

    Comparing such a size ends the trace. Its guard has to be asked for by a name of `torch.fx.experimental`.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads sympy: only where a graph is traced

    return guard_or_false(condition)


def is_surely(condition: bool) -> bool:
    """Whether a comparison of sizes holds, in a graph for every size there may be: asking adds no guard.

    The way to ask without one stands in `torch.fx.experimental`.
    """
    if not torch.compiler.is_compiling() and isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy: only where a graph is traced

    return statically_known_true(condition)


def surely_equal(one: Sequence[int], two: Sequence[int]) -> bool:
    """Whether two shapes are known to be equal without adding a guard, which would cost a recompile one day."""
    return len(one) == len(two) and all(is_surely(a == b) for a, b in zip(one, two, strict=True))


def mixes_rows(module: torch.nn.Module) -> bool:
    """Whether samples of a batch touch each other while it trains. The base of all batch norms is private."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_of_torch(module: torch.nn.Module) -> bool:
    """Whether a module is one of torch's own, and holds no others."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules


def keep_static(tensor: Tensor) -> Tensor:
    """Have Dynamo take the sizes of a tensor for constants. Else it may take one for that of a batch that is as large.

    `mark_static` is documented, under a private name. Where that is missing, a model may compile once more.
    """
    import torch._dynamo  # not at import: it is heavy

    mark_static = getattr(torch._dynamo, "mark_static", None)
    if mark_static is not None:
        mark_static(tensor)
    return tensor


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` or `torch.jit` made it: the former leaves nothing but the attribute of what it wraps."""
    return hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule)


def remove_forward_hooks(module: torch.nn.Module, is_ours: Callable[[object], bool]) -> None:
    """Take off the forward hooks and pre-hooks whose object (of a bound method, that it is bound to) is ours.

    The handles that registering gives are no way: a copy of a model has copies of the hooks, and no handles.
    """
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if is_ours(getattr(hook, "__self__", hook))]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


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


def is_in_backward() -> bool:
    """Whether a backward pass of eager mode is under way: what runs then is a checkpoint running its part again.

    There is no public way to ask. Where this one is missing, quarantine and checkpoints do not go together.
    """
    return not torch.compiler.is_compiling() and backward_number() != -1


def backward_number() -> int:
    """Which backward pass is under way, traced or not: -1 for none. There is no public way to ask."""
    return torch._C._current_graph_task_id()


def keep_side_effects_under_checkpoint() -> None:
    """Let Dynamo trace hooks that take notes inside `torch.utils.checkpoint`, without taking them again in backward.

    It is a setting of Dynamo's for the whole process. Where it is missing, a watched model with checkpoints compiles
    with graph breaks, or with `fullgraph=True` says so.
    """
    import torch._dynamo  # not at import: it is heavy

    if hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def tell_copies_apart() -> None:
    """Have Dynamo look up the globals of a function of ours where they are, if this package was imported twice.

    It takes the module that has the name of a function's module, and remembers it: guards on what a function of another
    copy uses would look at this one's, and never fail. A scope without a module, as that of a namedtuple's methods, it
    knows by its identity; so one that belongs to another copy is called such while Dynamo asks. Where the method is
    missing, functions compiled with one copy do not notice that globals of theirs, such as `CONFIG`, have changed.
    """
    import torch._dynamo.symbolic_convert as dynamo  # not at import: it is heavy

    translator = getattr(dynamo, "InliningInstructionTranslator", None)
    find = getattr(translator, "get_globals_source_and_value", None)
    if translator is None or find is None or hasattr(find, "_torchguard_copies"):
        return
    import_module = getattr(dynamo, "_import_module", importlib.import_module)

    @functools.wraps(find)
    def found(self: Any, name: str) -> Any:
        scope = self.f_globals
        module = scope.get("__name__", "")
        if module.split(".")[0] != "torchguard" or vars(import_module(module)) is scope:
            return find(self, name)
        scope["__name__"] = f"namedtuple_{module}"
        try:
            return find(self, name)
        finally:
            scope["__name__"] = module

    found.__dict__["_torchguard_copies"] = True
    translator.get_globals_source_and_value = found
