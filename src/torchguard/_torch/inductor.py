"""Inductor: the options of a mode, its decompositions, and its compilers.

None of these has a public name; they are the same in torch 2.11 to 2.15. All but `mode_options` are required: the call
raises ImportError where a name is missing. Every function imports Inductor itself: loading it takes seconds.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from torchguard._torch.settings import for_aten_graph
from torchguard.exceptions import GuardError

# A function that takes its arguments as a list, which it empties, and returns a list or tuple.
Boxed = Callable[[list[Any]], Sequence[Any]]


def mode_options(mode: str, dynamic: bool | None) -> dict[str, object]:
    """The Inductor options that a mode of `torch.compile` stands for.

    torch refuses a mode together with options, and a guard filter is passed in the options. torch's docs name
    `list_mode_options`. Degraded where it is missing: GuardError, and a mode cannot be combined with a filter.
    """
    try:
        from torch._inductor import list_mode_options
    except ImportError:
        raise GuardError(
            f"compile: torch {torch.__version__} has no list_mode_options, so mode={mode!r} and filter= do not go "
            "together. Leave the mode out and pass what it stands for as options."
        ) from None

    return dict(list_mode_options(mode, dynamic))


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions that Inductor applies: it has no lowering for the ops that they remove."""
    import torch._inductor.lowering  # noqa: F401 (the table uses it, and does not load it)
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def compile_aten_graph(graph: GraphModule, fakes: Sequence[Tensor], layout_optimization: bool) -> Boxed:
    """Compile an ATen graph with Inductor's inner compiler: `torch.compile` would add guards and autograd to a call."""
    from torch._inductor.compile_fx import compile_fx_inner

    (output,) = graph.graph.find_nodes(op="output")
    # Each output keeps its strides: the next graph is compiled for the strides that this one declares.
    tensors = [i for i, node in enumerate(output.args[0]) if isinstance(node.meta["val"], Tensor)]
    output.meta["user_visible_output_idxs"] = tensors
    with for_aten_graph(layout_optimization), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's warnings about its own code are of no use to the caller
        compiled: Any = compile_fx_inner(graph, list(fakes))
    return getattr(compiled, "current_callable", None) or compiled


def compile_dynamo_graph(dynamo: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """What `torch.compile(backend="inductor")` does with a graph of Dynamo's."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(dynamo, list(inputs))


def compile_package(program: torch.export.ExportedProgram, path: str) -> None:
    """Compile a program ahead of time into a package. Documented under this private name."""
    from torch._inductor import aoti_compile_and_package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's warnings about its own code are of no use to the caller
        aoti_compile_and_package(program, package_path=path)


def load_package(path: str) -> Any:
    """A package that `compile_package` wrote, as a function."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(path)
