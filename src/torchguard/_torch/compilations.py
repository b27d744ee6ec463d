"""Graphs and generated code of compilations as they happen.

As in `events.py`, functions of torch are patched when the first listener is set, and call the original and nothing else
without one:

| patched | what it reports | degraded where torch lacks it |
| --- | --- | --- |
| `OutputGraph._call_user_compiler` | `CompilationListener.compiling` | named by `missing_for_capture` |
| `aot_stage2_compile` | `CompilationListener.lowering` | named by `missing_for_capture` |
| `GraphLowering.save_output_code` | `CompilationListener.wrote_code` | named by `missing_for_capture` |

All of them exist in torch 2.11 to 2.15. The patches can go when torch has callbacks for compilations.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from torchguard._torch.dynamo import backend_name, current_compile_id, function_name
from torchguard._torch.events import locals_of
from torchguard._torch.process import module_state, patch_function
from torchguard._torch.settings import call_with_compilers, takes_compilers, without_graph_caches


class CompilationStart(NamedTuple):
    """A frame whose graph is about to be passed to a backend."""

    compile_id: str
    function: str
    file: str
    line: int
    backend: str


class CompilationListener(Protocol):
    """Receives the graphs and the code of compilations. Its methods must not raise."""

    def compiling(self, start: CompilationStart, graph: fx.GraphModule, /) -> contextlib.AbstractContextManager[object]:
        """Return a context manager to enter around the call of a backend."""
        ...

    def lowering(self) -> Callable[[str, fx.GraphModule], contextlib.AbstractContextManager[object]] | None:
        """Called when AOTAutograd is about to compile, in the thread of `compiling`.

        Returns a function of ("forward" | "backward" | "inference", graph) whose context manager is entered around
        that compiler. The backward compiler may run much later, in another thread.
        """
        ...

    def wrote_code(self, code: str, /) -> None:
        """Called with the code that Inductor generated, in the thread that compiles."""
        ...


_compilation_listener: list[CompilationListener] = module_state(globals(), "compilation listener", list)  # none or one


def missing_for_capture() -> tuple[str, ...]:
    """Which parts of a compilation cannot be captured on this torch, one sentence each."""
    absent = [(what, name) for what, owner, name, _ in _capture_patches() if not hasattr(owner, name)]
    if not absent and not takes_compilers(_aot_owner().aot_stage2_compile):
        signature = "aot_stage2_compile(fw_compiler=, bw_compiler=, inference_compiler=)"
        absent = [("forward and backward graphs", signature)]
    return tuple(f"{what}: torch {torch.__version__} has no {name}" for what, name in absent)


def _capture_patches() -> tuple[tuple[str, Any, str, str], ...]:
    from torch._dynamo.output_graph import OutputGraph  # here, because loading it takes seconds
    from torch._inductor.graph import GraphLowering

    return (
        ("graphs of Dynamo", OutputGraph, "_call_user_compiler", "_compile_frame"),
        ("forward and backward graphs", _aot_owner(), "aot_stage2_compile", "_compile_graphs"),
        ("output code", GraphLowering, "save_output_code", "_save_code"),
    )


def _aot_owner() -> Any:
    import torch._functorch.aot_autograd as owner  # every caller of the function looks it up here

    return owner


def set_compilation_listener(listener: CompilationListener | None) -> None:
    """Call a listener for everything that is compiled from now on; None removes it."""
    _compilation_listener[:] = [] if listener is None else [listener]
    if listener is not None:
        for _, owner, name, replacement in _capture_patches():
            patch_function(owner, name, globals(), replacement)


def _listener() -> CompilationListener | None:
    return next(iter(_compilation_listener), None)


def _compile_frame(original: Callable[..., Any], self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Replaces `OutputGraph._call_user_compiler`.

    Degraded where an `OutputGraph` has no `root_tx` or `compiler_fn`: function and backend have no name.
    """
    if (listener := _listener()) is None:
        return original(self, gm, *args, **kwargs)
    code = getattr(getattr(self, "root_tx", None), "f_code", None)
    start = CompilationStart(
        current_compile_id(),
        *(function_name(code, locals_of(self)) if code is not None else ("", "", 0)),
        backend_name(getattr(self, "compiler_fn", None)),
    )
    with listener.compiling(start, gm), without_graph_caches():
        return original(self, gm, *args, **kwargs)


def _compile_graphs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `aot_stage2_compile`."""
    listener = _listener()
    lowering = listener.lowering() if listener is not None and takes_compilers(original) else None
    if lowering is None:
        return original(*args, **kwargs)

    @contextlib.contextmanager
    def around(kind: str, graph: fx.GraphModule) -> Iterator[None]:
        with lowering(kind, graph), without_graph_caches():
            yield

    return call_with_compilers(original, args, kwargs, around)


def _save_code(original: Callable[[str], None] | None, code: str) -> None:
    """Replaces `GraphLowering.save_output_code`, which torch's own tests set and which is None otherwise."""
    if original is not None:
        original(code)
    if (listener := _listener()) is not None:
        listener.wrote_code(code)


def on_compile_start_and_end(start: Callable[[str], None], end: Callable[[], None]) -> bool:
    """Call `start` with the compile id when a compilation begins, and `end` when none is under way any more.

    Degraded where torch lacks `callback_handler`: returns False, and `torchguard run` shows no progress line.
    """
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:
        return False
    callback_handler.register_start_callback(lambda args: start(str(getattr(args, "compile_id", ""))))
    callback_handler.register_end_callback(lambda args: end())
    return True
