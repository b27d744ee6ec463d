"""`Session`: one imperative program, run eagerly or compiled, with the same results."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from torchguard._torch.tensors import flatten
from torchguard.compiled._builder import Builder, Var
from torchguard.compiled._functions import CompiledOut
from torchguard.compiled._leaves import LeafType, check_leaves, type_of
from torchguard.exceptions import CompileError

_BACKENDS = {"eager": "eager", "compiled": "inductor"}


class Session:
    """Parameters, inputs and variables computed from them. Torch functions apply to the variables.

    >>> from torchguard.compiled import Session
    >>> s = Session(mode="eager")
    >>> w, x = s.param("w", torch.ones(2)), s.input("x", torch.tensor([1.0, 2.0]))
    >>> loss = (w * x).sum()
    >>> s.backward(loss)["w"]
    tensor([1., 2.])
    >>> s.sgd_step(0.5)
    >>> s.value(w)
    tensor([0.5000, 0.0000])
    """

    def __init__(self, mode: Literal["eager", "compiled"] = "compiled") -> None:
        if mode not in _BACKENDS:
            raise CompileError(f"Session: mode: expected 'eager' or 'compiled', got {mode!r}.")
        self.mode, self.builder = mode, _EagerBuilder(self) if mode == "eager" else Builder("session")
        self._values: dict[str, Tensor] = {}
        self._types: dict[str, LeafType] = {}
        self._params: set[str] = set()
        self._gradients: dict[str, Tensor] | None = None
        self._functions: dict[tuple[str, int], CompiledOut] = {}
        self._computed: dict[Node, Any] = {}

    def param(self, name: str, value: Tensor) -> Var:
        """Add a leaf that `sgd_step` updates."""
        self._params.add(name)
        return self._leaf(name, value)

    def input(self, name: str, value: Tensor) -> Var:
        """Add a leaf that `set` assigns."""
        return self._leaf(name, value)

    def set(self, **values: Tensor) -> None:
        """Assign new values, of the same types, to leaves."""
        for name, value in values.items():
            if name not in self._types:
                raise CompileError(f"Session: there is no leaf {name!r}. There are {', '.join(self._types)}.")
            check_leaves([self._types[name]], [value], "Session")
        self._values |= {name: value.detach().clone() for name, value in values.items()}
        self._computed.clear()

    def value(self, variable: Var) -> Tensor:
        """The current value of a variable."""
        node = self.builder.node_of(variable)
        if self.mode == "eager":
            return self.run(node).clone()
        if node.op == "placeholder":
            return self._values[self._name_of(node)].clone()
        return self._compiled(variable)(*self._values.values())

    def backward(self, loss: Var) -> dict[str, Tensor]:
        """The gradients of a scalar with respect to every differentiable leaf. They are never accumulated."""
        function = self._compiled(loss)
        output = function.graphs.outputs[0]
        if output.shape != ():
            raise CompileError(f"Session: backward: expected a loss of shape [], got shape {list(output.shape)}.")
        one = torch.ones((), dtype=output.dtype, device=output.device)
        gradients = function.vjp_with_seed(tuple(self._values.values()), one)
        self._gradients = {name: g for name, g in zip(self._values, gradients, strict=True) if g is not None}
        return dict(self._gradients)

    def jvp(self, variable: Var, **tangents: Tensor) -> tuple[Tensor, Tensor]:
        """The value of a variable, and its directional derivative along tangents of leaves; other tangents are zero."""
        zeros = {
            name: torch.zeros_like(value) if self._types[name].differentiable else None
            for name, value in self._values.items()
        }
        if unknown := set(tangents) - set(zeros):
            raise CompileError(f"Session: there is no leaf {min(unknown)!r}. There are {', '.join(self._types)}.")
        return self._compiled(variable).jvp(tuple(self._values.values()), tuple({**zeros, **tangents}.values()))

    def sgd_step(self, rate: float) -> None:
        """Subtract `rate` times the gradients of the last `backward` from the parameters."""
        if self._gradients is None:
            raise CompileError("Session: call backward before sgd_step.")
        gradients = {name: g for name, g in self._gradients.items() if name in self._params}
        self._values |= {name: self._values[name] - rate * g for name, g in gradients.items()}
        self._gradients = None
        self._computed.clear()

    def run(self, node: Node) -> Any:
        """The eager value of a node. The values of the nodes it depends on are cached until a leaf changes."""
        if node not in self._computed:
            if node.op == "placeholder":
                self._computed[node] = self._values[self._name_of(node)]
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.run)
                with torch.no_grad():
                    self._computed[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return self._computed[node]

    def _leaf(self, name: str, value: Tensor) -> Var:
        value = value.detach().clone(memory_format=torch.contiguous_format)
        leaf = type_of(value, name)
        variable = self.builder.leaf(name, leaf.shape, leaf.dtype, device=leaf.device)
        self._values[name], self._types[name] = value, leaf
        return variable

    def _name_of(self, node: Node) -> str:
        placeholders = self.builder.graph.find_nodes(op="placeholder")
        return list(self._values)[placeholders.index(node)]

    def _compiled(self, variable: Var) -> CompiledOut:
        key = (self.builder.node_of(variable).name, len(self._values))
        if key not in self._functions:
            self._functions[key] = self.builder.compile_out(variable, backend=_BACKENDS[self.mode])
        return self._functions[key]


class _EagerBuilder(Builder):
    """A builder that runs each operation as soon as it is recorded."""

    def __init__(self, session: Session) -> None:
        super().__init__("session")
        self._session = session

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().apply(func, *args, **kwargs)
        for part in flatten(result)[0]:
            if isinstance(part, Var):
                self._session.run(self.node_of(part))
        return result
