"""`Builder`: a graph built by hand, from ordered leaves and operations on them in SSA form."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchguard._graphs.listing import Line, lines_of, listing_of
from torchguard._graphs.source_lines import caller_line
from torchguard._pytrees import flatten_tensors
from torchguard._torch import fakes, ops, tensors
from torchguard._torch.tensors import flatten, unflatten
from torchguard.compiled._functions import CallStructure, CompiledOut, CompiledScalar
from torchguard.compiled._leaves import LeafType, dense_type, is_available
from torchguard.compiled._purity import PurityMode, name_of
from torchguard.compiled._trace import program_of
from torchguard.exceptions import CompileError, TorchGuardError

_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow", "matmul", "mod", "and", "or", "xor")
_OPERATORS = (*_ARITHMETIC, "radd", "rsub", "rmul", "rtruediv", "rpow", "rmatmul", "neg", "abs", "invert", "getitem")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Var:
    """A variable of a builder. It has a shape and a dtype but no value; torch functions and methods apply to it."""

    def __init__(self, builder: "Builder", value: Tensor) -> None:
        self._builder, self._value = builder, value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [part for part in flatten((args, kwargs or {}))[0] if isinstance(part, Var)]
        return found[0]._builder.apply(func, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name)  # raises an AttributeError that names it, if there is none
        if not callable(method):
            return self._builder.apply(method.__get__, self)
        return lambda *args, **kwargs: self._builder.apply(method, self, *args, **kwargs)

    def __bool__(self) -> bool:
        raise CompileError(
            f"{self._builder.name}: at {caller_line().short}: a variable has no value to branch on. Use torch.where."
        )

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __repr__(self) -> str:
        return f"%{self._builder.node_of(self).name}: {self._builder.type_of(self)}"

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, f"__{name}__")
    return lambda self, *args: self._builder.apply(method, self, *args)


for _name in (*_OPERATORS, *_COMPARISONS):
    setattr(Var, f"__{_name}__", _operator(_name))


class _Recorder(PurityMode):
    """Records each operation in the graph of a builder. Only functional operations are allowed."""

    def __init__(self, builder: "Builder") -> None:
        super().__init__(builder.name)
        self._builder = builder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ops.schema_of(func).is_mutable:
            raise self.error(
                caller_line().short, f"{name_of(func)} changes a variable in place", "Use the out-of-place form"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._builder.record(func, args, kwargs or {}, result)
        return result


class Builder:
    """Builds a graph operation by operation.

    >>> from torchguard.compiled import Builder
    >>> b = Builder("square")
    >>> x = b.leaf("x", (2,))
    >>> c = b.compile_scalar((x * x).sum(), backend="eager")
    >>> c.backward(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """

    def __init__(self, name: str = "built") -> None:
        self.name, self.graph = name, Graph()
        self._leaves: list[LeafType] = []
        # The tensors are stored as well: the id of one that is freed could be used again.
        self._known: dict[int, tuple[Tensor, Node]] = {}

    @property
    def leaves(self) -> tuple[LeafType, ...]:
        return tuple(self._leaves)

    @property
    def nodes(self) -> tuple[Line, ...]:
        """The operations so far, in order."""
        return lines_of(self._module([]))

    def __str__(self) -> str:
        last = [node for node in self.graph.nodes if isinstance(node.meta["val"], Tensor)][-1:]
        return listing_of(self._module(last), self.name)

    @fakes.with_tracing_lock
    def leaf(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        device: torch.device | str = "cpu",
        differentiable: bool = True,
    ) -> Var:
        """Add a leaf after the existing ones."""
        if any(leaf.name == name for leaf in self._leaves):
            raise CompileError(f"{self.name}: there is a leaf {name!r} already. Choose another name.")
        if not is_available(torch.device(device)):
            raise CompileError(f"{self.name}: leaf {name!r} is on {device}, and this machine has no such device.")
        with fakes.fake_mode():
            value = torch.empty(tuple(shape), dtype=dtype, device=device)
        leaf = replace(dense_type(value, name), differentiable=differentiable and dtype.is_floating_point)
        self._leaves.append(leaf)
        last = ([None, *self.graph.find_nodes(op="placeholder")])[-1]
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(last) if last else self.graph.inserting_before(first):
            node = self.graph.placeholder(name if name.isidentifier() else f"leaf_{len(self._leaves)}")
        node.meta["val"] = value
        self._known[id(value)] = value, node
        return Var(self, value)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an ATen operation, which may be given by name: `b.op("aten.mm", x, w)`."""
        if isinstance(target, str):
            namespace, _, name = target.partition(".")
            packet, _, overload = name.partition(".")
            if namespace not in ("aten", "prims") or not hasattr(getattr(torch.ops, namespace), packet):
                raise CompileError(f"{self.name}: there is no operation {target!r}. Use a name such as 'aten.mm'.")
            found = getattr(getattr(torch.ops, namespace), packet)
            target = getattr(found, overload) if overload else found
        return self.apply(target, *args, **kwargs)

    def compile_out(self, *outputs: Any, backend: str = "inductor", probe: bool = True) -> CompiledOut:
        """Compile the graph with these variables as its outputs."""
        return self._compiled(CompiledOut, outputs[0] if len(outputs) == 1 else outputs, backend, probe)

    def compile_scalar(self, output: Var, *, backend: str = "inductor", probe: bool = True) -> CompiledScalar:
        """Compile the graph with one variable of shape () as its output."""
        return self._compiled(CompiledScalar, output, backend, probe)

    @fakes.with_tracing_lock
    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Apply a torch function to variables, and record the operations it runs."""
        parts, structure = tensors.flatten((args, kwargs))
        for part in parts:
            if isinstance(part, Var) and part._builder is not self:
                raise CompileError(
                    f"{self.name}: at {caller_line().short}: expected a variable of this builder, "
                    f"got one of the builder {part._builder.name}."
                )
        given = unflatten([part._value if isinstance(part, Var) else part for part in parts], structure)
        try:
            with torch.no_grad(), fakes.without_fake_tensor_logs(), fakes.fake_mode(), _Recorder(self):
                result = func(*given[0], **given[1])
        except TorchGuardError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CompileError(f"{self.name}: at {caller_line().short}: {type(error).__name__}: {reason}") from error
        found, structure = tensors.flatten(result)
        return tensors.unflatten([Var(self, part) if isinstance(part, Tensor) else part for part in found], structure)

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that was run on variables. Queries, which return no tensor, are not recorded."""
        if not any(isinstance(part, Tensor) for part in tensors.flatten(result)[0]):
            return
        parts, structure = flatten((args, kwargs))
        args, kwargs = unflatten([self._known[id(p)][1] if isinstance(p, Tensor) else p for p in parts], structure)
        node = self.graph.create_node("call_function", func, args, kwargs, name=name_of(func).split(".")[1])
        node.meta["val"], node.stack_trace = result, caller_line().short
        if isinstance(result, Tensor):
            self._known[id(result)] = result, node
            return
        for index, part in enumerate(result if isinstance(result, (tuple, list)) else ()):
            picked = self.graph.call_function(operator.getitem, (node, index))
            picked.meta["val"], picked.stack_trace = part, node.stack_trace
            self._known[id(part)] = part, picked

    def node_of(self, variable: Var) -> Node:
        return self._known[id(variable._value)][1]

    def type_of(self, variable: Var) -> LeafType:
        return dense_type(variable._value, "")

    def _compiled(self, kind: Any, outputs: Any, backend: str, probe: bool) -> Any:
        parts, structure = flatten(outputs)
        if not parts or not all(isinstance(part, Var) and part._builder is self for part in parts):
            raise CompileError(f"{self.name}: outputs: expected variables of this builder.")
        values = tensors.unflatten([part._value for part in parts], structure)
        results, _ = flatten_tensors(values, f"{self.name}: output", "")
        graph = self._module([self.node_of(part) for part in parts])
        program = program_of(graph, self.name, self.leaves)
        return kind(program, CallStructure(None, lambda: results), backend=backend, probe=probe)

    def _module(self, results: Sequence[Node]) -> GraphModule:
        graph, copies = Graph(), {}
        graph.graph_copy(self.graph, copies)
        for old, new in copies.items():
            new.meta = dict(old.meta)
        graph.output([copies[node] for node in results])
        return GraphModule(torch.nn.Module(), graph)
