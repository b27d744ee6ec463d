"""Inductor: the options of a mode, its decompositions, and its compilers.

None of these has a public name; they are the same in torch 2.11 to 2.15. All but `mode_options`, `store_partial_tiles`
and the functions that have an op compiled (`compile_in_place`, `compile_to_call`, `compile_row_maxima`,
`compile_largest_magnitudes`) are required: the call raises ImportError where a name is missing. Every function imports
Inductor itself: loading it takes seconds.
"""

import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from torchguard._torch.ops import is_view
from torchguard._torch.process import patch_function
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


def compile_in_place(
    functional: Any, in_place: Any, function: str, any_strides: bool = False, for_all_uses: bool = False
) -> None:
    """Have Inductor compile an op that returns its first argument, changed, as one that changes a buffer.

    Of an op that changes its argument, Inductor makes copies that fuse with nothing: of an argument that has another
    use, and of one that is a view of what is not in memory yet (to which it copies the result back). Here the buffer is
    the argument's own if nothing uses it later; else the kernel that computes the argument writes it. Degraded where
    torch has no `register_lowering`: Inductor calls the op, which makes a copy.

    Args:
        functional: the op. It has the arguments of `in_place`, and may have more, which are left out.
        in_place: the op that changes its first argument and returns nothing.
        function: `module:name` of a function that does what `in_place` does for sizes that are known. It is called
            instead, since calling an op takes the host longer than launching a kernel.
        any_strides: whether it takes a buffer with other strides than the result should have. Inductor may pad rows.
        for_all_uses: whether what uses the argument later may as well read the result, and the op leaves its own
            result unchanged. Then the argument is not kept beside the result, nor computed once more, and a second op
            after the first is left out.
    """
    try:
        from torch._inductor import ir
        from torch._inductor.lowering import register_lowering
        from torch._inductor.virtualized import V
    except ImportError:
        return

    @register_lowering(functional.default, type_promotion_kind=None)
    def lower(*args: Any) -> Any:
        node, (z, *others) = V.graph.current_node, args[: len(in_place.default._schema.arguments)]
        argument: Any = node.args[0]
        result = node.meta["val"]
        if for_all_uses and _viewed(argument).target is functional.default:
            return z
        is_own = _is_own_buffer(argument, for_all_uses)
        buffer = z if is_own else ir.ExternKernel.copy_input(z)
        if not (is_own and any_strides):
            buffer = ir.ExternKernel.require_exact_strides(buffer, result.stride())
        V.graph.mark_buffer_mutated(buffer.get_name())  # has what was not computed yet computed before
        is_static = all(isinstance(size, int) for size in result.shape)
        (_call_of(function) if is_static else ir.FallbackKernel).create(in_place.default, buffer, *others)
        if for_all_uses:
            V.graph.env[argument] = buffer
        return buffer


def compile_to_call(op: Any, function: str) -> None:
    """Have Inductor's code call a function in place of an op, whose first argument is a list of flat tensors, and the
    second the number of tensors in each group of them. Calling an op takes the host longer, and so does allocating each
    of the tensors: those of a group are given as one tensor, where Inductor's kernels can write them side by side.

    Degraded where torch has no `register_lowering`: Inductor calls the op.

    Args:
        function: `module:name` of a function that does what the op does.
    """
    try:
        from torch._inductor import ir
        from torch._inductor.lowering import register_lowering
        from torch._inductor.virtualized import V
    except ImportError:
        return

    @register_lowering(op.default, type_promotion_kind=None)
    def lower(*args: Any) -> Any:
        given = [_constant_of(node) or arg for node, arg in zip(V.graph.current_node.args, args, strict=True)]
        given[0] = [one for group in _groups(*args[:2]) for one in _side_by_side(group)]
        before, V.fake_mode.allow_non_fake_inputs = V.fake_mode.allow_non_fake_inputs, True  # for constants
        try:
            results = _call_of(function).create(op.default, *given)
        finally:
            V.fake_mode.allow_non_fake_inputs = before
        return [ir.TensorBox.create(one) if isinstance(one, ir.IRNode) else one for one in results]


def _groups(tensors: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    ends = [*itertools.accumulate(sizes)]
    return [tensors[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _side_by_side(tensors: Sequence[Any]) -> Sequence[Any]:
    """Flat tensors of a graph that is being lowered as one tensor, if each is all of a buffer that a kernel writes.

    Inductor does the same for `cat`, but copies what is a view. Here the buffer that is viewed becomes a part of the
    memory of all. One that is given twice is copied.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def viewed(z: Any) -> Any:
        while isinstance(z, (ir.MutableBox, ir.BaseView)):
            z = z.data
        return z

    buffers = []
    for z in tensors:
        z.realize()
        buffer = viewed(z)
        if any(buffer is other for other in buffers):
            buffer = viewed(ir.ExternKernel.copy_input(z))
        if not isinstance(buffer, ir.ComputedBuffer) or type(buffer.layout) not in (ir.FixedLayout, ir.FlexibleLayout):
            return tensors
        is_whole = math.prod(z.get_size()) == math.prod(buffer.get_size()) and buffer.layout.is_contiguous()
        if not is_whole or (z.get_dtype(), z.get_device()) != (tensors[0].get_dtype(), tensors[0].get_device()):
            return tensors
        buffers.append(buffer)
    if len(buffers) < 2:
        return tensors
    placed: dict[str, Any] = {"device": tensors[0].get_device(), "dtype": tensors[0].get_dtype()}
    starts: list[Any] = [0, *itertools.accumulate(math.prod(one.get_size()) for one in buffers)]
    joined = ir.ConcatKernel(name=None, layout=ir.FixedLayout(**placed, size=[starts[-1]]), inputs=[])
    memory = ir.StorageBox(joined)
    for buffer, start in zip(buffers, starts, strict=False):
        strides = ir.FlexibleLayout.contiguous_strides(buffer.get_size())
        part = ir.FixedLayout(**placed, size=buffer.get_size(), stride=strides, offset=start)
        buffer.layout = ir.NonOwningLayout(ir.ReinterpretView(data=memory, layout=part))
    joined.inputs = ir.ConcatKernel.unwrap_storage(buffers)
    joined.name = V.graph.register_buffer(joined)
    V.graph.register_operation(joined)
    return [ir.TensorBox(memory)]


def _constant_of(node: Any) -> Any:
    """The constant of the graph that a node copies, if it does: nothing changes it."""
    from torch._inductor.virtualized import V

    is_copy = isinstance(node, fx.Node) and node.target is torch.ops.aten.lift_fresh_copy.default
    constant: Any = node.args[0] if is_copy else None
    return V.graph.get_attr(constant.target, (), {}) if is_copy else None


def _call_of(function: str) -> Any:
    """The class of Inductor's calls of ops, with that function (`module:name`) in place of the op."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    module, name = function.split(":")

    class Call(ir.FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                self.python_kernel_name = f"torchguard_{name}"
                wrapper.add_import_once(f"from {module} import {name} as torchguard_{name}")
            super().codegen(wrapper)

    return Call


def compile_row_maxima(op: Any) -> bool:
    """Have Inductor compile an op as reductions of a tensor that is in memory. Returns whether it will.

    Inductor computes the input of a reduction once more inside its loop, unless a heuristic (too many reads, `exp` but
    not `erf`, an output of the graph) has it written to memory first. So the kernel of a layer would compute its
    activation twice, and that of the last layer would have another source, which takes the C++ compiler most of a
    second. Degraded where torch has no `register_lowering`, `lowerings` or `make_pointwise`: False.

    Args:
        op: `(z, nan, inf, revision)`, returns a list: if `nan`, the maxima along the last dim of `z`, and if `inf`,
            zeros with NaN where `z` holds Inf.
    """
    try:
        from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
        from torch._inductor.virtualized import V, ops
    except ImportError:
        return False

    store_partial_tiles()
    maximum = lowerings[torch.ops.aten.amax.default]

    def nan_where_inf(number: Any, dtype: torch.dtype) -> Any:
        zero, nan, inf = (ops.constant(value, dtype) for value in (0.0, math.nan, math.inf))
        return ops.where(ops.eq(ops.abs(number), inf), nan, zero)

    @register_lowering(op.default, type_promotion_kind=None)
    def lower(z: Any, nan: bool, inf: bool, revision: int) -> list[Any]:
        (checked,) = V.graph.current_node.all_input_nodes
        if len(checked.users) > 1:  # else nothing would read it again
            z.realize()
        marks = make_pointwise(functools.partial(nan_where_inf, dtype=z.get_dtype()))
        return [maximum(one, [-1]) for one in ([z] if nan else []) + ([marks(z)] if inf else [])]

    return True


def compile_largest_magnitudes(op: Any, bits: Mapping[torch.dtype, torch.dtype]) -> bool:
    """Have Inductor compile an op as the reduction that it is. Returns whether it will.

    Degraded where torch has no `register_lowering`, `lowerings` or `make_pointwise`: False.

    Args:
        op: `(z, pieces, limit, inf, revision)`, returns a list: the largest magnitude of each of so many pieces of the
            vectors of `z`, those from `limit` on as `inf`.
        bits: the dtypes whose magnitudes are read as bits on a GPU, and the integers that hold these.
    """
    try:
        from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
        from torch._inductor.virtualized import ops
    except ImportError:
        return False

    store_partial_tiles()
    aten = torch.ops.aten

    @register_lowering(op.default, type_promotion_kind=None)
    def lower(z: Any, pieces: int, limit: float, inf: float, revision: int) -> list[Any]:
        dtype = bits.get(z.get_dtype()) if z.get_device().type != "cpu" else None
        if dtype is None:
            magnitudes = lowerings[aten.abs.default](z)
        else:
            magnitudes = lowerings[aten.view.dtype](z, dtype)
            magnitudes = lowerings[aten.bitwise_and.Scalar](magnitudes, torch.iinfo(dtype).max)
        if pieces > 1:
            *outer, width = z.get_size()
            magnitudes = lowerings[aten.view.default](magnitudes, [*outer, pieces, width // pieces])
        largest = lowerings[aten.amax.default](magnitudes, [-1], pieces == 1)

        def counted(number: Any) -> Any:
            at, most = (ops.constant(value, largest.get_dtype()) for value in (limit, inf))
            return ops.where(ops.ge(number, at), ops.maximum(number, most), number)

        return [largest if limit == inf else make_pointwise(counted)(largest)]

    return True


@functools.cache
def store_partial_tiles() -> None:
    """Keep Inductor's C++ code from writing behind the results of a reduction.

    Where Inductor computes a reduction for a tile of rows at once (of a transposed tensor, as after a convolution), it
    stores the results of a whole tile, also for the last rows, which are fewer: up to 15 numbers behind the tensor. It
    crashes the process or changes other tensors (seen in torch 2.13). Checks are such reductions. Here the number of
    results to store is limited to the rows that are left, and torch's cache of compiled graphs serves none that were
    compiled without the limit. Degraded where torch has no such kernel or cache: nothing is changed.
    """
    try:
        from torch._inductor.codecache import FxGraphHashDetails
        from torch._inductor.codegen.cpp import CppVecKernel
    except ImportError:
        return

    if patch_function(CppVecKernel, "store_reduction", globals(), "_store_rows_left"):
        patch_function(FxGraphHashDetails, "__init__", globals(), "_list_details")


def _store_rows_left(store: Callable[..., None], kernel: Any, *args: Any) -> None:
    """In place of `store_reduction`: store the results of the rows that are left, at most those of a tile."""
    import sympy  # a dependency of torch, which loads it when it compiles

    before = kernel.num_elems, kernel.tail_size
    rows = kernel.ranges[kernel.tiling_idx]
    if kernel.tail_size is None and kernel.tiling_idx < kernel.reduction_depth and rows % kernel.tiling_factor != 0:
        left = rows - kernel.itervars[kernel.tiling_idx]
        kernel.num_elems = kernel.tail_size = sympy.Min(kernel.tiling_factor, left)
    try:
        store(kernel, *args)
    finally:
        kernel.num_elems, kernel.tail_size = before


def _list_details(list_details: Callable[..., None], details: Any, *args: Any, **options: Any) -> None:
    """In place of `__init__`: what a graph is known by in torch's cache says how results of reductions are stored."""
    list_details(details, *args, **options)
    details.torchguard_stores_partial_tiles = True


def _viewed(node: Any) -> Any:
    """The node that a node is a view of, or itself."""
    while is_view(node.target):
        node = node.args[0]
    return node


def _is_own_buffer(node: Any, for_all_uses: bool) -> bool:
    """Whether a node is in memory that the graph being lowered allocates, and the current node is its last use; with
    `for_all_uses`, the last but for those of the node itself.

    Inductor runs earlier uses before one that changes the memory.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def in_memory(value: Any) -> Any:
        while isinstance(value, (ir.MutableBox, ir.BaseView)):
            value = value.data
        return value

    memory = in_memory(V.graph.env[node])
    if not ir.IRNode.is_realized_node(memory) or isinstance(memory, (ir.InputBuffer, ir.NopKernel)):  # Nop: of a `cat`
        return False
    # Not by views alone: Inductor may make nothing of an op, such as a cast to the same dtype.
    same = [one for one, value in V.graph.env.items() if in_memory(value) is memory]
    if for_all_uses:
        same.remove(node)
    later, one = set(), V.graph.current_node.next
    while one.op != "root":
        later.add(one)
        one = one.next
    node = _viewed(node)
    op = node.args[0].target if node.target is operator.getitem else node.target
    is_new = isinstance(op, torch._ops.OpOverload) and not any(one.alias_info for one in op._schema.returns)
    return is_new and not any(user in later for one in same for user in one.users)
