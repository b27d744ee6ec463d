"""The seam to private torch: fake tensors, the tracer's switches, Inductor's inner compiler, nested containers."""

import contextlib
import contextvars
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sympy
import torch
import torch.fx.traceback as traceback
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from torchguard._torch import of_this_process
from torchguard.exceptions import CompileError

__all__ = ["DispatchMode", "TorchFunctionMode"]

# A function that takes its arguments as a list, which it empties, and returns a list or tuple.
Boxed = Callable[[list[Any]], Sequence[Any]]
Structure = pytree.TreeSpec

# Tracing changes the state of the process, and tensors without values share one mode: a thread at a time may make them.
ONE_AT_A_TIME = of_this_process("tracing", threading.RLock)
P = ParamSpec("P")
Result = TypeVar("Result")


def one_at_a_time(function: Callable[P, Result]) -> Callable[P, Result]:
    """The same function, which other threads wait for before they trace."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> Result:
        with ONE_AT_A_TIME:
            return function(*args, **kwargs)

    return alone


# The context manager takes 1.5 us, and these two calls 0.3: a whole call of a small function takes 20.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# Whether autocast is on for any device: the public way is asked device by device.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)


def in_transform() -> bool:
    """Whether a transform of `torch.func` is at work, which would not see through compiled code."""
    return _functorch.peek_interpreter_stack() is not None


def has_tangent(values: Sequence[Any]) -> bool:
    """Whether forward mode is on and a tensor carries a tangent; no other way to ask is as quick."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values)


Versions = list[tuple[Tensor, int]]


def versions_of(tensors: Sequence[Tensor]) -> Versions:
    """Tensors with how often each was changed in place."""
    return [(tensor, tensor._version) for tensor in tensors]


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, overlapping ones as well."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = tensor.untyped_storage().clone()
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def is_unchanged(versions: Versions) -> bool:
    for tensor, before in versions:  # noqa: SIM110 (a generator takes twice as long, in every call)
        if tensor._version != before:
            return False
    return True


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of nested containers, and how they are nested; the public `torch.utils.pytree` came after 2.11."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: Structure) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def detached(value: Any) -> Any:
    """Nested containers with their tensors detached."""
    return pytree.tree_map_only(Tensor, Tensor.detach, value)


def paths(value: Any) -> list[str]:
    """Where each leaf of a value lies, as it would be written: `[0]['weight']`."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]


_symbolic_mode: contextvars.ContextVar[Any] = contextvars.ContextVar("symbolic_mode", default=None)


def fake_mode() -> Any:
    """The mode graphs are traced in: that of the symbolic sizes in use, or one for all whose sizes are numbers.

    It is one, since graphs made in two cannot be put together.
    """
    return _symbolic_mode.get() or _mode_of_numbers()


@functools.cache
def _mode_of_numbers() -> Any:
    """Real tensors are let in, so that they are met where they are used and can be refused by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# What sizes, and what is computed of them, are when they are symbols, and the numbers they stand for.
_SHOWN: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class SymbolicSizes:
    """Sizes that stand for others, to trace with; what is asked of them on the way is kept.

    Torch has no public way to make a tensor without values whose sizes are symbols.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._letters, self.symbols = {}, {}
        for name, size in sizes.items():
            source = ConstantSource(name)
            self._letters[name] = self._env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
            self.symbols[name] = self._env.create_symintnode(self._letters[name], hint=size, source=source)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        before = _symbolic_mode.set(self._mode)
        try:
            yield
        finally:
            _symbolic_mode.reset(before)

    @contextlib.contextmanager
    def shown_as_numbers(self) -> Iterator[None]:
        """Have whoever is not torch see numbers where sizes are printed, which is then asked of them: `len(str(n))`."""
        before = {kind: kind.__repr__ for kind in _SHOWN}
        torchs = str(Path(torch.__file__).parent)

        def shown(value: Any) -> str:
            is_torchs = sys._getframe(1).f_code.co_filename.startswith(torchs)
            is_own = getattr(value.node, "shape_env", None) is self._env
            return repr(_SHOWN[type(value)](value)) if is_own and not is_torchs else before[type(value)](value)

        try:
            for kind in _SHOWN:
                kind.__repr__ = shown
            yield
        finally:
            for kind, own in before.items():
                kind.__repr__ = own

    def hold_at(self, sizes: Mapping[str, int]) -> bool:
        """Whether all that was asked of the symbols has the same answer for some sizes."""
        return all(self._at(guard.expr, sizes) == True for guard in self._env.guards)  # noqa: E712 (it may be neither)

    def number_at(self, size: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
        return size if isinstance(size, int) else int(self._at(size.node.expr, sizes))

    def _at(self, expression: Any, sizes: Mapping[str, int]) -> Any:
        numbers = {letter: sympy.Integer(sizes[name]) for name, letter in self._letters.items()}
        return expression.xreplace(numbers) if hasattr(expression, "xreplace") else expression


def refuse_loose_symbols(graph: GraphModule) -> None:
    """Raise where a symbol is written into a graph, and not computed in it: it would stand for the example's size."""
    for node in graph.graph.nodes:
        if any(isinstance(part, tuple(_SHOWN)) for part in flatten((node.args, node.kwargs))[0]):
            raise CompileError(f"{node.format_node()}: a size is written out.")


def is_told_its_sizes(graph: GraphModule) -> bool:
    """Whether each symbol in a graph is itself a size of one of its placeholders, or one of them: code looks there."""
    values = {node: node.meta["val"] for node in graph.graph.nodes if node.op != "output"}
    given = [value for node, value in values.items() if node.op == "placeholder"]
    sizes = [size for value in given for size in (value.shape if isinstance(value, Tensor) else (value,))]
    told = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
    leaves = [leaf for value in values.values() for leaf in flatten(value)[0]]
    used = [free_symbols(leaf) for leaf in leaves if isinstance(leaf, (Tensor, torch.SymInt))]
    return told >= set().union(*used)


def is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def fake(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without values. Each is a storage of its own, so that two leaves are never taken for one."""
    with torch.inference_mode(False), fake_mode():
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def schema_of(operation: Any) -> Any:
    """What an ATen operation is called, takes, returns and changes; None for anything else. There is no public way."""
    return getattr(operation, "_schema", None)


def sets_grad_mode(function: Any) -> bool:
    """Whether a function is what `no_grad` and `enable_grad` call, which a torch function mode sees."""
    return function is torch._C._set_grad_enabled


def runs_autograd_function(function: Any) -> bool:
    """Whether a function is what `autograd.Function.apply` calls inside a transform."""
    from torch._functorch.autograd_function import custom_function_call

    return function is custom_function_call


def has_autograd(operation: Any) -> bool:
    """Whether an operation says anything to autograd; one that does not has gradients of zero, without a word."""
    name = schema_of(operation).name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA"))


def rename(node: torch.fx.Node, name: str) -> None:
    """Give a placeholder a name, which its graph makes unique; nodes have no public way to be renamed."""
    node._rename(name)
    node.target = node.name


def current_line() -> str:
    """The line of the source noted at the node that is being run by an interpreter."""
    return traceback.get_current_meta().get("stack_trace") or "a saved graph"


def storage_of(tensor: Tensor) -> int:
    """What tells storages apart where they have no memory."""
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep fake tensors from logging what they raise: it is raised again, in words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Keep recurrent layers from becoming one operation of oneDNN's or cuDNN's, whose backward cannot be traced.

    The public `torch.backends.mkldnn.flags` and `cudnn.flags` set more than this one flag each, and warn of it.
    """
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


def trace(
    fn: Callable[..., Any], fakes: Sequence[Tensor], decompose: Any = None, *, grad_enabled: bool = False
) -> GraphModule:
    """The ATen operations that a function runs on fake tensors; whatever needs a value is an error.

    In inference mode nothing would be recorded, and gradients would be zero.
    """
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad_enabled),
        traceback.preserve_node_meta(),
        quiet(),
        _without_fused_layers(),
    ):
        traced = make_fx(fn, decompose or {}, tracing_mode="fake", _error_on_data_dependent_ops=True)
        return traced(*fakes)


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


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when a value is asked for."""
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, GuardOnDataDependentSymNode)


def dynamic_shape_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when a shape depends on values."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    return (DynamicOutputShapeException,)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast switched off for every device it is on for."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
