"""The seam to what compiles: Dynamo's call of a backend, AOTAutograd's compilers, Inductor's code, caches of graphs.

Three private functions of torch are wrapped, which costs nothing where nobody listens. Where one is missing,
`missing()` says in words what cannot be captured, and the rest works without.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from torchguard._torch import kept_through_reloads, replaced_by


class Begun(NamedTuple):
    """A frame whose graph is about to be given to a backend."""

    compile_id: str
    function: str
    file: str
    line: int
    backend: str


class Listener(Protocol):
    """What is told of a compilation. Nothing of it may raise."""

    def compiling(self, begun: Begun, graph: fx.GraphModule) -> contextlib.AbstractContextManager[object]:
        """Around the call of a backend."""
        ...

    def lowering(self) -> Callable[[str, fx.GraphModule], contextlib.AbstractContextManager[object]] | None:
        """When AOTAutograd is about to compile, in the thread of `compiling`: what to call around each compiler.

        It is called with "forward", "backward" or "inference", the backward possibly much later in another thread.
        """
        ...

    def wrote_code(self, code: str) -> None:
        """Inductor has written code, in the thread of what compiles."""
        ...


# A reload of this module leaves these as they are: torch's functions stay wrapped, and are so once.
_listening: list[Listener] = kept_through_reloads(globals(), "_listening", list)  # none or one
_wrapped: set[str] = kept_through_reloads(globals(), "_wrapped", set)
_lock = kept_through_reloads(globals(), "_lock", threading.Lock)
_COMPILERS = {"forward": "fw_compiler", "backward": "bw_compiler", "inference": "inference_compiler"}


def missing() -> tuple[str, ...]:
    """What cannot be captured on this torch, in words; empty if all can be."""
    found = [
        ("graphs of Dynamo", _dynamo_owner(), "_call_user_compiler"),
        ("forward and backward graphs", _aot_owner(), "aot_stage2_compile"),
        ("output code", _inductor_owner(), "save_output_code"),
    ]
    absent = [(what, name) for what, owner, name in found if not hasattr(owner, name)]
    if not absent and not _takes_compilers(_aot_owner().aot_stage2_compile):
        absent = [
            ("forward and backward graphs", "aot_stage2_compile(fw_compiler=, bw_compiler=, inference_compiler=)")
        ]
    return tuple(f"{what}: torch {torch.__version__} has no {name}" for what, name in absent)


def _takes_compilers(function: Callable[..., Any]) -> bool:
    return {*_COMPILERS.values()} <= {*inspect.signature(function).parameters}


def listen(listener: Listener | None) -> None:
    """Tell a listener of everything that is compiled from now on; None ends it."""
    _listening[:] = [] if listener is None else [listener]
    with _lock:
        if listener is None:
            return
        for owner, name, ours in (
            (_dynamo_owner(), "_call_user_compiler", "_compile_frame"),
            (_aot_owner(), "aot_stage2_compile", "_compile_graphs"),
            (_inductor_owner(), "save_output_code", "_save_code"),
        ):
            if hasattr(owner, name) and name not in _wrapped:
                _wrapped.add(name)
                setattr(owner, name, replaced_by(globals(), ours, getattr(owner, name)))


def _listener() -> Listener | None:
    return next(iter(_listening), None)


def _dynamo_owner() -> Any:
    from torch._dynamo.output_graph import OutputGraph  # not at import: it is heavy

    return OutputGraph


def _aot_owner() -> Any:
    import torch._functorch.aot_autograd as owner  # every way into AOTAutograd looks the function up here

    return owner


def _inductor_owner() -> Any:
    from torch._inductor.graph import GraphLowering  # not at import: it is heavy

    return GraphLowering


def _compile_frame(original: Callable[..., Any], self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """In the place of `OutputGraph._call_user_compiler`."""
    if (listener := _listener()) is None:
        return original(self, gm, *args, **kwargs)
    with listener.compiling(_begun(self), gm), without_graph_caches():
        return original(self, gm, *args, **kwargs)


def _begun(output_graph: Any) -> Begun:
    from torch._guards import CompileContext

    code = getattr(getattr(output_graph, "root_tx", None), "f_code", None)
    return Begun(
        str(CompileContext.current_compile_id()),
        getattr(code, "co_qualname", ""),
        getattr(code, "co_filename", ""),
        getattr(code, "co_firstlineno", 0),
        backend_name(getattr(output_graph, "compiler_fn", None)),
    )


def backend_name(backend: Any) -> str:
    """What a backend is called: as it was given to `torch.compile`, which wraps it up to three times."""
    while (inside := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inside
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)


def _compile_graphs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the place of `aot_stage2_compile`."""
    listener = _listener()
    around = listener.lowering() if listener is not None and _takes_compilers(original) else None
    if around is None:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    # One that is not given is the forward's, as torch has it.
    given.arguments |= {
        name: _told(kind, given.arguments.get(name) or given.arguments["fw_compiler"], around)
        for kind, name in _COMPILERS.items()
    }
    return original(*given.args, **given.kwargs)


def _told(kind: str, compiler: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiler, updated=())
    def compile(gm: fx.GraphModule, example_inputs: Any) -> Any:
        with around(kind, gm), without_graph_caches():
            return compiler(gm, example_inputs)

    return compile


def _save_code(original: Callable[[str], None] | None, code: str) -> None:
    """What torch calls, where it is set, with all code that Inductor writes: its own tests set it."""
    if original is not None:
        original(code)
    if (listener := _listener()) is not None:
        listener.wrote_code(code)


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


def is_restart(error: BaseException) -> bool:
    """Whether Dynamo starts over with a frame: it says so by an exception."""
    from torch._dynamo import exc

    return isinstance(error, getattr(exc, "RestartAnalysis", ()))


def fake_tensors() -> contextlib.AbstractContextManager[object]:
    """Make tensors without memory: weights are inputs of a graph, and may be larger than what is left of it."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


def source_of(placeholder: fx.Node) -> str:
    """What Dynamo reads an input of its graph from, such as `L['x']`. Empty if that is unknown."""
    return str(getattr(_source(placeholder), "name", ""))


def keep_source(before: fx.Node, after: fx.Node) -> None:
    """Give a copy of an input of Dynamo's graph its source, which Dynamo sets on the node, where no copy has it."""
    if (source := _source(before)) is not None:
        after._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]


def _source(placeholder: fx.Node) -> Any:
    # A moment before a backend is called, Dynamo has it still where it keeps what it knows of its arguments.
    argument = placeholder.meta.get("grapharg")
    return getattr(placeholder, "_dynamo_source", None) or getattr(argument, "source", None)


def position_of(placeholder: fx.Node) -> int | None:
    """Which input of Dynamo's graph an input of AOTAutograd's is. None for tangents, and what is saved."""
    description = placeholder.meta.get("desc")
    return description.idx if type(description).__name__ == "PlainAOTInput" else None  # pyright: ignore[reportOptionalMemberAccess]


def hint_of(size: torch.SymInt) -> int | None:
    """The size at hand behind a symbol, without the guard that asking the symbol itself adds. None if unknown."""
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else None
