"""Tensors without values, sizes that are symbols, and graphs traced with them."""

import contextlib
import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sympy
import torch
import torch.fx.traceback as traceback
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from torchguard._torch.process import of_this_process
from torchguard._torch.pytrees import flatten
from torchguard.exceptions import CompileError


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Make tensors that have a device and a storage, but no memory. The mode for it has no public name."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


__all__ = ["DispatchMode", "TorchFunctionMode"]

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


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when a value is asked for."""
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, GuardOnDataDependentSymNode)


def dynamic_shape_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when a shape depends on values."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    return (DynamicOutputShapeException,)
