"""Compilations as they happen."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from torchguard._torch.process import kept_through_reloads, replaced_by
from torchguard._torch.settings import without_graph_caches


class Compilation(NamedTuple):
    """A frame whose graph is about to be given to a backend."""

    compile_id: str
    function: str
    file: str
    line: int
    backend: str


class Listener(Protocol):
    """What is told of a compilation. Nothing of it may raise."""

    def compiling(self, compilation: Compilation, graph: fx.GraphModule) -> contextlib.AbstractContextManager[object]:
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
    with listener.compiling(_compilation_of(self), gm), without_graph_caches():
        return original(self, gm, *args, **kwargs)


def _compilation_of(output_graph: Any) -> Compilation:
    from torch._guards import CompileContext

    code = getattr(getattr(output_graph, "root_tx", None), "f_code", None)
    return Compilation(
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


def is_restart(error: BaseException) -> bool:
    """Whether Dynamo starts over with a frame: it says so by an exception."""
    from torch._dynamo import exc

    return isinstance(error, getattr(exc, "RestartAnalysis", ()))


def on_compiling(start: Callable[[str], None], end: Callable[[], None]) -> bool:
    """Call `start` with the compile id when something begins to be compiled, and `end` when nothing is any more.

    There is no public way to hear of it. Where this one is missing there is no progress line, and False is returned.
    """
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:
        return False
    callback_handler.register_start_callback(lambda args: start(str(getattr(args, "compile_id", ""))))
    callback_handler.register_end_callback(lambda args: end())
    return True
