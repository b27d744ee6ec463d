"""Dynamic shapes: one graph with symbols for sizes, and code compiled from it that serves many sizes.

The function is traced once with numbers for its sizes and once with symbols. Torch records each comparison of symbols
as an assumption. The symbolic graph is used at every size for which all assumptions hold, but only if, at the example's
sizes, it equals the graph that was traced with numbers. Each kind of code (forward, vjp, ...) is then made from a copy
of that graph with symbols of its own, so that the assumptions of one kind do not restrict the others.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from torchguard._pytrees import PytreeSpec
from torchguard._torch import fakes, tensors
from torchguard._torch.fakes import SymbolicSizes, with_tracing_lock
from torchguard.compiled._executables import CompiledCode, Executables, ProgramGraphs, Run
from torchguard.compiled._leaves import with_sizes
from torchguard.compiled._trace import Program, forward_graph, program_of
from torchguard.exceptions import CompileError

_log = logging.getLogger(__name__)
# Torch specializes on sizes 0 and 1.
_SMALLEST = 2


def trace_symbolically(
    graphs: ProgramGraphs, sizes: Mapping[str, int], results: Callable[[], PytreeSpec], backend: str
) -> "SymbolicProgram | None":
    """The program with symbols for its sizes; None if it cannot be traced with symbols, or gives another graph then.

    Args:
        graphs: those of the example.
        sizes: those of the example.
        results: the structure of the results of the last run.
    """
    program, before = graphs.program, results()
    if graphs.differentiates_function or program.random_leaves or min(sizes.values()) < _SMALLEST:
        return None
    try:
        symbols = SymbolicSizes(sizes)
        with symbols.active(), symbols.printed_as_numbers():
            graph = forward_graph(_at_sizes(program, symbols.symbols)).graph
        fakes.require_no_symbol_constants(graph)
        symbolic = SymbolicProgram(program_of(graph, program.name, program.leaves), symbols, sizes, backend)
        # Torch does not record that a function tests whether a size is an int. Only the graph shows it.
        is_same = results() == before and _steps(ProgramGraphs(symbolic.at(sizes)).forward) == _steps(graphs.forward)
        return symbolic if is_same else None
    except Exception as error:  # any failure: each size is then compiled on its own, and raises its own errors
        _log.debug("%s: cannot be traced with symbolic sizes: %s", program.name, error)
        return None


class SymbolicProgram:
    """A graph with symbols for sizes, and the code made from it. The function itself does not run again."""

    def __init__(self, program: Program, symbols: SymbolicSizes, example: Mapping[str, int], backend: str) -> None:
        self._program, self._symbols, self._example, self._backend = program, symbols, example, backend
        self._codes: dict[str, _SymbolicCode | None] = {}
        self.probed: set[CompiledCode] = set()

    def is_valid_at(self, sizes: Mapping[str, int]) -> bool:
        return min(sizes.values()) >= _SMALLEST and self._symbols.satisfied_by(sizes)

    def at(self, sizes: Mapping[str, int]) -> Program:
        """The program at sizes for which it is valid."""
        return _at_sizes(self._program, sizes)

    @with_tracing_lock
    def code(self, kind: str, sizes: Mapping[str, int], outputs: Sequence[Tensor]) -> CompiledCode | None:
        """Code of a kind; None if it cannot be made, or is not valid at these sizes, or returns other strides."""
        if kind not in self._codes:
            self._codes[kind] = self._compile(kind)
        found = self._codes[kind]
        return found.code if found and found.is_valid_at(sizes, outputs) else None

    def reject(self, kind: str) -> None:
        """Compile a kind of code for each size from now on."""
        self._codes[kind] = None

    def _compile(self, kind: str) -> "_SymbolicCode | None":
        try:
            return _SymbolicCode(self._program, self._example, self._backend, kind)
        except Exception as error:  # any failure, as above
            _log.debug("%s: no %s for symbolic sizes: %s", self._program.name, kind, error)
            return None


class _SymbolicCode:
    """One kind of code, with symbols of its own."""

    def __init__(self, program: Program, example: Mapping[str, int], backend: str, kind: str) -> None:
        self._symbols = SymbolicSizes(example)
        with self._symbols.active():
            graphs = ProgramGraphs(_at_sizes(program, self._symbols.symbols))
            fakes.require_no_symbol_constants(graphs[kind.partition("_")[0]])
            self.code = Executables(graphs, backend).code(kind)
        self._outputs = graphs.outputs
        if self.code.split and not fakes.inputs_have_all_symbols(self.code.split.second):
            raise CompileError(f"{program.name}: the inputs of the second part of {kind} do not determine all sizes.")

    def is_valid_at(self, sizes: Mapping[str, int], outputs: Sequence[Tensor]) -> bool:
        if not self._symbols.satisfied_by(sizes):
            return False
        at = lambda parts: tuple(self._symbols.evaluate(part, sizes) for part in parts)  # noqa: E731
        found = [(at(out.shape), at(out.stride()), out.dtype, out.device) for out in self._outputs]
        return found == [_layout(out) for out in outputs]


class SymbolicExecutables(Executables):
    """Code for one size: the symbolic code where it is valid, and code compiled for that size otherwise."""

    def __init__(
        self, graphs: ProgramGraphs, backend: str, symbolic: SymbolicProgram, sizes: Mapping[str, int]
    ) -> None:
        super().__init__(graphs, backend)
        self._symbolic, self._sizes = symbolic, sizes

    def code(self, kind: str) -> CompiledCode:
        return self._symbolic.code(kind, self._sizes, self.graphs.outputs) or super().code(kind)

    def is_probed(self, code: CompiledCode) -> bool:
        return code in self._symbolic.probed

    def mark_probed(self, code: CompiledCode) -> None:
        self._symbolic.probed.add(code)

    def reject(self, kind: str) -> None:
        self._symbolic.reject(kind)

    def _compile(self, kind: str) -> Run:
        # Derivatives may be rejected by a probe, so `code` looks them up; here they are compiled for this size.
        found = self._symbolic.code(kind, self._sizes, self.graphs.outputs) if kind == "forward" else None
        return self._runs.setdefault(kind, found.runs[0]) if found else super()._compile(kind)


def _at_sizes(program: Program, sizes: Mapping[str, Any]) -> Program:
    return replace(program, leaves=tuple(with_sizes(leaf, sizes) for leaf in program.leaves))


def _steps(graph: GraphModule) -> list[str]:
    """The nodes of a graph as text, with positions for names, to compare two graphs."""
    positions = {node: i for i, node in enumerate(graph.graph.nodes)}
    return [_step(node, positions) for node in positions]


def _step(node: Node, positions: Mapping[Node, int]) -> str:
    args, kwargs = map_arg((node.args, node.kwargs), lambda part: f"%{positions[part]}")
    values = [_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tensors.flatten(node.meta.get("val"))[0]]
    return repr((node.op, str(node.target) if node.op == "call_function" else "", args, kwargs, values))


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device
