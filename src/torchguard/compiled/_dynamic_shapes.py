"""One piece of code for many sizes: a graph with symbols for them, used where what was asked of them holds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from torchguard._torch import fakes
from torchguard._torch.fakes import SymbolicSizes, with_tracing_lock
from torchguard._torch.tensors import flatten
from torchguard.compiled._executables import Code, Executables, Graphs, Run
from torchguard.compiled._leaves import sized
from torchguard.compiled._nesting import Nest
from torchguard.compiled._trace import Program, forward_graph, program_of
from torchguard.exceptions import CompileError

_log = logging.getLogger(__name__)
# Torch takes sizes 0 and 1 for special.
_LEAST = 2


def shared(graphs: Graphs, sizes: Mapping[str, int], nest: Callable[[], Nest], backend: str) -> "Shared | None":
    """What serves sizes besides the example's; None where sizes cannot be symbols, or make another graph if they are.

    Args:
        graphs: those of the example.
        sizes: those of the example.
        nest: how the results of the last run are nested.
    """
    program, before = graphs.program, nest()
    if graphs.need_the_function or program.lifted or min(sizes.values()) < _LEAST:
        return None
    try:
        symbols = SymbolicSizes(sizes)
        with symbols.active(), symbols.printed_as_numbers():
            graph = forward_graph(_sized(program, symbols.symbols)).graph
        fakes.require_no_symbol_constants(graph)
        made = Shared(program_of(graph, program.name, program.leaves), symbols, sizes, backend)
        # A function may ask whether a size is a number, and nothing tells of that but what it then does.
        is_same = nest() == before and _steps(Graphs(made.at(sizes)).forward) == _steps(graphs.forward)
        return made if is_same else None
    except Exception as error:  # whatever it is: one size may well be compiled, or says in words why not
        _log.debug("%s: no code for many sizes: %s", program.name, error)
        return None


class Shared:
    """A graph with symbols for sizes, traced once, and what is made of it: the function is not run again."""

    def __init__(self, program: Program, symbols: SymbolicSizes, example: Mapping[str, int], backend: str) -> None:
        self._program, self._symbols, self._example, self._backend = program, symbols, example, backend
        self._pieces: dict[str, _Piece | None] = {}
        self.trusted: set[Code] = set()

    def holds_at(self, sizes: Mapping[str, int]) -> bool:
        return min(sizes.values()) >= _LEAST and self._symbols.satisfied_by(sizes)

    def at(self, sizes: Mapping[str, int]) -> Program:
        """The program at some sizes it holds for."""
        return _sized(self._program, sizes)

    @with_tracing_lock
    def code(self, kind: str, sizes: Mapping[str, int], outputs: Sequence[Tensor]) -> Code | None:
        """Code of a kind for sizes the graph holds for, if it holds too, and lays out its outputs as it should."""
        if kind not in self._pieces:
            self._pieces[kind] = self._made(kind)
        piece = self._pieces[kind]
        return piece.code if piece and piece.serves(sizes, outputs) else None

    def refuse(self, kind: str) -> None:
        """Compile a kind of code for each size from now on."""
        self._pieces[kind] = None

    def _made(self, kind: str) -> "_Piece | None":
        try:
            return _Piece(self._program, self._example, self._backend, kind)
        except Exception as error:  # as above: code for one size says why, if it cannot be made either
            _log.debug("%s: no %s for many sizes: %s", self._program.name, kind, error)
            return None


class _Piece:
    """One kind of code. Each has symbols of its own: what one kind asks of sizes is nothing to the others."""

    def __init__(self, program: Program, example: Mapping[str, int], backend: str, kind: str) -> None:
        self._symbols = SymbolicSizes(example)
        with self._symbols.active():
            graphs = Graphs(_sized(program, self._symbols.symbols))
            fakes.require_no_symbol_constants(graphs[kind.partition("_")[0]])
            self.code = Executables(graphs, backend).code(kind)
        self._outputs = graphs.outputs
        if self.code.split and not fakes.inputs_have_all_symbols(self.code.split.second):
            raise CompileError(f"{program.name}: the second part of {kind} is not told all sizes.")

    def serves(self, sizes: Mapping[str, int], outputs: Sequence[Tensor]) -> bool:
        if not self._symbols.satisfied_by(sizes):
            return False
        at = lambda parts: tuple(self._symbols.evaluate(part, sizes) for part in parts)  # noqa: E731
        found = [(at(out.shape), at(out.stride()), out.dtype, out.device) for out in self._outputs]
        return found == [_layout(out) for out in outputs]


class SharingExecutables(Executables):
    """Code for one size: that for many where there is any, and its own otherwise."""

    def __init__(self, graphs: Graphs, backend: str, shared: Shared, sizes: Mapping[str, int]) -> None:
        super().__init__(graphs, backend)
        self._shared, self._sizes = shared, sizes

    def code(self, kind: str) -> Code:
        return self._shared.code(kind, self._sizes, self.graphs.outputs) or super().code(kind)

    def is_trusted(self, code: Code) -> bool:
        return code in self._shared.trusted

    def trust(self, code: Code) -> None:
        self._shared.trusted.add(code)

    def distrust(self, kind: str) -> None:
        self._shared.refuse(kind)

    def _make(self, kind: str) -> Run:
        # Derivatives are asked for by `code`, since they are probed and may be refused: here is their own.
        found = self._shared.code(kind, self._sizes, self.graphs.outputs) if kind == "forward" else None
        return self._made.setdefault(kind, found.runs[0]) if found else super()._make(kind)


def _sized(program: Program, sizes: Mapping[str, Any]) -> Program:
    return replace(program, leaves=tuple(sized(leaf, sizes) for leaf in program.leaves))


def _steps(graph: GraphModule) -> list[str]:
    """What a graph does, node by node and to the last digit, whatever its nodes are called."""
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    return [_step(node, place) for node in place]


def _step(node: Node, place: Mapping[Node, int]) -> str:
    args, kwargs = map_arg((node.args, node.kwargs), lambda part: f"%{place[part]}")
    values = [_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flatten(node.meta.get("val"))[0]]
    return repr((node.op, str(node.target) if node.op == "call_function" else "", args, kwargs, values))


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device
