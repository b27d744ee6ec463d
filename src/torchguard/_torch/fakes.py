"""Fake tensors, symbolic sizes, and ATen graphs traced with them.

Fake tensors (`torch._subclasses`), `make_fx` and symbolic shapes (`torch.fx.experimental`) have no public names. All of
it is required but for two functions that name a degraded mode: `compiled` and `torchguard analyze` cannot do without,
and importing this module or the call raises ImportError where a name is missing. Importing it loads sympy. The names
are the same in torch 2.11 to 2.15.
"""

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
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_symbols, free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from torchguard._torch.process import process_state
from torchguard._torch.settings import without_fused_layers
from torchguard._torch.support import torch_is_at_least
from torchguard._torch.tensors import flatten
from torchguard.exceptions import CompileError

__all__ = ["DispatchMode", "TorchFunctionMode"]

# Tracing changes the state of the process, and fake tensors share one mode: one thread at a time may trace.
TRACING_LOCK = process_state("tracing", threading.RLock)
P = ParamSpec("P")
Result = TypeVar("Result")


def with_tracing_lock(function: Callable[P, Result]) -> Callable[P, Result]:
    """The same function, which holds `TRACING_LOCK` while it runs."""

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> Result:
        with TRACING_LOCK:
            return function(*args, **kwargs)

    return locked


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context in which new tensors have a device and a storage, but no memory."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


_symbolic_mode: contextvars.ContextVar[Any] = contextvars.ContextVar("symbolic_mode", default=None)


def fake_mode() -> Any:
    """The mode that graphs are traced in: that of the active symbolic sizes, or the one for all concrete sizes.

    There is only one for concrete sizes, since graphs traced in two modes cannot be combined.
    """
    return _symbolic_mode.get() or _concrete_mode()


@functools.cache
def _concrete_mode() -> Any:
    """Real tensors are allowed, so that the operation that uses one can be refused by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# The types of symbolic sizes and of what is computed from them, and the types of the numbers that they stand for.
_NUMBER_TYPES: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class SymbolicSizes:
    """Symbols for named sizes, to trace with. The guards that tracing adds on them are recorded.

    torch has no public way to make a fake tensor with symbolic sizes outside of `torch.export`.
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
    def active(self) -> Iterator[None]:
        """Make fake tensors of the block have these symbols."""
        before = _symbolic_mode.set(self._mode)
        try:
            yield
        finally:
            _symbolic_mode.reset(before)

    @contextlib.contextmanager
    def printed_as_numbers(self) -> Iterator[None]:
        """Have `repr` of a symbol give its number, and record a guard on it, to all callers but torch: `len(str(n))`.

        Replaces `SymInt.__repr__`, `SymFloat.__repr__` and `SymBool.__repr__` for the block, under `TRACING_LOCK`;
        symbols of others print as before.
        """
        before = {kind: kind.__repr__ for kind in _NUMBER_TYPES}
        torch_folder = str(Path(torch.__file__).parent)

        def number(value: Any) -> str:
            is_torch = sys._getframe(1).f_code.co_filename.startswith(torch_folder)
            is_own = getattr(value.node, "shape_env", None) is self._env
            return repr(_NUMBER_TYPES[type(value)](value)) if is_own and not is_torch else before[type(value)](value)

        try:
            for kind in _NUMBER_TYPES:
                kind.__repr__ = number
            yield
        finally:
            for kind, own in before.items():
                kind.__repr__ = own

    def satisfied_by(self, sizes: Mapping[str, int]) -> bool:
        """Whether sizes satisfy all guards that tracing added."""
        return all(self._at(guard.expr, sizes) == True for guard in self._env.guards)  # noqa: E712 (it may be neither)

    def evaluate(self, size: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
        """A symbolic size for concrete ones."""
        return size if isinstance(size, int) else int(self._at(size.node.expr, sizes))

    def _at(self, expression: Any, sizes: Mapping[str, int]) -> Any:
        numbers = {letter: sympy.Integer(sizes[name]) for name, letter in self._letters.items()}
        return expression.xreplace(numbers) if hasattr(expression, "xreplace") else expression


def require_no_symbol_constants(graph: GraphModule) -> None:
    """Raise CompileError if a symbol is a constant of a graph, not computed in it: it would be the example's size."""
    for node in graph.graph.nodes:
        if any(isinstance(part, tuple(_NUMBER_TYPES)) for part in flatten((node.args, node.kwargs))[0]):
            raise CompileError(f"{node.format_node()}: a size is a constant of the graph.")


def inputs_have_all_symbols(graph: GraphModule) -> bool:
    """Whether each symbol of a graph is a size of a placeholder, or a placeholder: generated code reads it there."""
    values = {node: node.meta["val"] for node in graph.graph.nodes if node.op != "output"}
    given = [value for node, value in values.items() if node.op == "placeholder"]
    sizes = [size for value in given for size in (value.shape if isinstance(value, Tensor) else (value,))]
    known = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
    leaves = [leaf for value in values.values() for leaf in flatten(value)[0]]
    used = [free_symbols(leaf) for leaf in leaves if isinstance(leaf, (Tensor, torch.SymInt))]
    return known >= set().union(*used)


def constant_of(value: Tensor) -> float | None:
    """The number of a fake tensor that torch knows: of a literal, and of what is computed from literals alone.

    Fake tensors keep it in `constant`, which is read with all modes off. Degraded where torch names it otherwise: no
    number is known, and a `while_loop` is refused.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    known = getattr(value, "constant", None)
    if known is None:
        return None
    with _disable_current_modes():
        return known.item()


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def has_unbacked_size(tensor: Tensor) -> bool:
    """Whether a size of a fake tensor depends on values."""
    return any(free_unbacked_symbols(size) for size in tensor.shape)


def fake(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fake tensor. Each has a storage of its own, so that two leaves never count as one."""
    with torch.inference_mode(False), fake_mode():
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


@contextlib.contextmanager
def without_fake_tensor_logs() -> Iterator[None]:
    """Keep fake tensors from logging what they raise: torchguard raises it again with a message of its own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def trace(
    fn: Callable[..., Any], fakes: Sequence[Tensor], decompose: Any = None, *, grad_enabled: bool = False
) -> GraphModule:
    """The ATen graph of a function on fake tensors. An operation that needs a value raises.

    Inference mode is switched off: in it nothing would be recorded, and gradients would be zero.
    """
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad_enabled),
        traceback.preserve_node_meta(),
        without_fake_tensor_logs(),
        without_fused_layers(),
    ):
        traced = make_fx(fn, decompose or {}, tracing_mode="fake", _error_on_data_dependent_ops=True)
        return traced(*fakes)


@contextlib.contextmanager
def expanded_control_flow(expansions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """A context in which torch's control flow runs as plain Python in this thread, by the name of what torch would run.

    `torch.cond` and `scan` run through `_hop_compile_and_call`, which makes graphs of the functions they are given with
    Dynamo. Dynamo does not trace under torchguard's modes, and never compiles a function that it first met under one: a
    later `torch.cond` outside would fail. So this function is replaced while torchguard traces, by thread. torch 2.11
    does not have it and calls `torch.compile` itself, which is replaced there. Degraded where a later torch calls
    neither: control flow reaches the modes as a higher-order operation, and is refused.
    """
    from torch._higher_order_ops import utils

    thread = threading.get_ident()
    owner, name = (utils, "_hop_compile_and_call") if torch_is_at_least(2, 12) else (torch, "compile")
    plain = getattr(owner, name, None)
    if plain is None:
        yield
        return

    def call(fn: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        if threading.get_ident() != thread:
            return plain(fn, args, kwargs)
        return expansions.get(fn.__name__, fn)(*args, **(kwargs or {}))

    def compile(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_torchs_own = getattr(fn, "__module__", "").startswith("torch._higher_order_ops.")
        if threading.get_ident() != thread or not is_torchs_own:
            return plain(fn, *args, **kwargs)
        return expansions.get(fn.__name__, fn)

    setattr(owner, name, call if owner is utils else compile)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when a value is needed."""
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, GuardOnDataDependentSymNode)


def dynamic_shape_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when a shape depends on values."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    return (DynamicOutputShapeException,)
