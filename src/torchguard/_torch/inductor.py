"""Inductor."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx import GraphModule


def mode_options(mode: str, dynamic: bool | None) -> dict[str, object]:
    """The options of Inductor that a mode of `torch.compile` stands for.

    Torch refuses a mode beside options, and a filter travels in the options. Its docs name this function; where it
    is missing, a mode cannot be combined with a filter, and the ImportError says so.
    """
    from torch._inductor import list_mode_options  # not at import: it is heavy

    return dict(list_mode_options(mode, dynamic))


# A function that takes its arguments as a list, which it empties, and returns a list or tuple.
Boxed = Callable[[list[Any]], Sequence[Any]]


def inductor_decompositions() -> Any:
    """The rules by which Inductor takes operations apart: it has no lowering for the rest."""
    import torch._inductor.lowering  # noqa: F401 (the rules look for it, and do not load it)
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor(graph: GraphModule, fakes: Sequence[Tensor], layout_optimization: bool) -> Boxed:
    """Code for a graph by Inductor's inner compiler: `torch.compile` would add guards and autograd to every call."""
    import torch._inductor.config as config
    from torch._inductor.compile_fx import compile_fx_inner

    (output,) = graph.graph.find_nodes(op="output")
    # Every output keeps its strides: the next graph is compiled for what this one says it returns.
    tensors = [i for i, node in enumerate(output.args[0]) if isinstance(node.meta["val"], Tensor)]
    output.meta["user_visible_output_idxs"] = tensors
    settings: dict[str, Any] = {"layout_optimization": layout_optimization and config.layout_optimization}
    settings["triton.cudagraphs"] = False  # the next run would write over what this one returned
    # Leaves are checked in every call, and what one graph hands to the next is as compiled: a fifth of a small call.
    settings |= {name: False for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)}
    with config.patch(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Inductor says of its own code is not the caller's to mend
        compiled: Any = compile_fx_inner(graph, list(fakes))
    return getattr(compiled, "current_callable", None) or compiled


def run_by_inductor(dynamo: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(dynamo, list(inputs))
