"""Inductor: the options of a mode, its decompositions, and its compilers.

None of these has a public name; they are the same in torch 2.11 to 2.15. All but `mode_options` and `compile_in_place`
are required: the call raises ImportError where a name is missing. Every function imports Inductor itself: loading it
takes seconds.
"""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from torchguard._torch.ops import is_view
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


def compile_in_place(functional: Any, in_place: Any, function: str) -> None:
    """Have Inductor compile an op that returns its first argument, changed, as one that changes a buffer.

    Of an op that changes its argument, Inductor makes copies that fuse with nothing: of an argument that has another
    use, and of one that is a view of what is not in memory yet (to which it copies the result back). Here the buffer is
    the argument's own if nothing else uses it; else the kernel that computes the argument writes it. Degraded where
    torch has no `register_lowering`: Inductor calls the op, which makes a copy.

    Args:
        functional: the op. It has the arguments of `in_place`, and may have more, which are left out.
        in_place: the op that changes its first argument and returns nothing.
        function: `module:name` of a function that does what `in_place` does for sizes that are known. It is called
            instead, since calling an op takes the host longer than launching a kernel.
    """
    try:
        from torch._inductor import ir
        from torch._inductor.lowering import register_lowering
        from torch._inductor.virtualized import V
    except ImportError:
        return

    module, name = function.split(":")

    class Call(ir.FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                self.python_kernel_name = f"torchguard_{name}"
                wrapper.add_import_once(f"from {module} import {name} as torchguard_{name}")
            super().codegen(wrapper)

    @register_lowering(functional.default, type_promotion_kind=None)
    def lower(*args: Any) -> Any:
        node, (z, *others) = V.graph.current_node, args[: len(in_place.default._schema.arguments)]
        result = node.meta["val"]
        buffer = z if _is_own_buffer(node.args[0]) else ir.ExternKernel.copy_input(z)
        buffer = ir.ExternKernel.require_exact_strides(buffer, result.stride())
        is_static = all(isinstance(size, int) for size in result.shape)
        (Call if is_static else ir.FallbackKernel).create(in_place.default, buffer, *others)
        return buffer


def _is_own_buffer(node: Any) -> bool:
    """Whether a node is in memory that the graph being lowered allocates, and has no use but one."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def in_memory(value: Any) -> Any:
        while isinstance(value, (ir.MutableBox, ir.BaseView)):
            value = value.data
        return value

    memory, views = in_memory(V.graph.env[node]), set()
    if not ir.IRNode.is_realized_node(memory) or isinstance(memory, (ir.InputBuffer, ir.NopKernel)):  # Nop: of a `cat`
        return False
    while node.op == "call_function" and len(node.users) == 1:
        views.add(node)
        if not is_view(node.target):
            op = node.args[0].target if node.target is operator.getitem else node.target
            is_new = isinstance(op, torch._ops.OpOverload) and not any(one.alias_info for one in op._schema.returns)
            # Inductor may make nothing of an op, such as a cast to the same dtype.
            return is_new and all(one in views or in_memory(value) is not memory for one, value in V.graph.env.items())
        node = node.args[0]
    return False
