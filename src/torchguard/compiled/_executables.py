"""Code for graphs: traced when first asked for, compiled when first asked for, and kept."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchguard._torch import inductor, tensors, tracing
from torchguard._torch.fakes import TRACING_LOCK, trace
from torchguard.compiled._rounding import coarsest_eps
from torchguard.compiled._split import Split, depends_on_directions, split
from torchguard.compiled._trace import (
    Program,
    derivative_graph,
    fakes_of,
    forward_graph,
    output_values,
    without_fused_attention,
)
from torchguard.exceptions import CompileError

KINDS = ("forward", "jvp", "vjp", "hvp", "vjp_first", "vjp_second", "jvp_first", "jvp_second")
Run = Callable[[list[Any]], Sequence[Tensor]]


def _eager(graph: GraphModule, decompose: Any = None) -> inductor.Boxed:
    run = graph if decompose is None else trace(graph, fakes_of(graph), decompose)
    return lambda values: run(*values)


def _inductor(graph: GraphModule, *, layout_optimization: bool = True) -> inductor.Boxed:
    fakes = fakes_of(graph)
    decomposed = trace(graph, fakes, inductor.decompositions())
    return inductor.compile_aten_graph(decomposed, fakes, layout_optimization)


_LAYOUT_KEPT = "inductor without layout optimisation"
BACKENDS: dict[str, Callable[[GraphModule], inductor.Boxed]] = {
    "inductor": _inductor,
    _LAYOUT_KEPT: lambda graph: _inductor(graph, layout_optimization=False),
    "aot_eager": lambda graph: _eager(graph, inductor.decompositions()),
    "eager": _eager,
}
# What to try where a backend's derivative is wrong, in order.
SAFER = {"inductor": (_LAYOUT_KEPT, "aot_eager"), _LAYOUT_KEPT: ("aot_eager",), "aot_eager": ("eager",), "eager": ()}


@dataclass(frozen=True, eq=False)
class Code:
    """What to run for a value or derivative, in one part or in the two of a split."""

    runs: tuple[Run, ...]
    split: Split | None = None


class Graphs:
    """The graphs of a program, each traced once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        with TRACING_LOCK:
            self._forward = forward_graph(program)
        self.forward, self.has_own_rules = self._forward.graph, self._forward.has_own_rules
        self.outputs = output_values(self.forward)
        self._derivatives: dict[str, GraphModule] = {}
        self._splits: dict[str, Split] = {}

    @property
    def need_the_function(self) -> bool:
        """Whether a derivative is taken of the function itself, and not of its graph."""
        return not self._forward.is_all

    @property
    def eps(self) -> float:
        """The coarsest rounding anywhere inside."""
        return coarsest_eps(self.forward)

    @property
    def tolerance(self) -> float:
        """What rounding may make of an identity. Where products alone are rounded coarsely, it adds up less."""
        return max(8 * math.sqrt(coarsest_eps(self.forward, in_products=False)), 32 * self.eps)

    def __getitem__(self, kind: str) -> GraphModule:
        if kind not in KINDS:
            raise CompileError(f"{self.program.name}: there is no graph {kind!r}. There are {', '.join(KINDS)}.")
        if kind == "forward":
            return self.forward
        base, _, part = kind.partition("_")
        if part:
            return getattr(self.split_of(base), part)
        with TRACING_LOCK:
            if base not in self._derivatives:
                forward = self._forward
                if base != "vjp":
                    forward = without_fused_attention(self.program, forward)
                self._derivatives[base] = derivative_graph(forward, base)
            return self._derivatives[base]

    def is_zero(self, base: str) -> bool:
        """Whether no result of a derivative depends on its tangents or seeds, at any point."""
        count = 0 if base == "hvp" else len(self.outputs)
        return not depends_on_directions(self[base], len(self.program.leaves), count)

    def split_of(self, base: str) -> Split:
        """The first and second part of "vjp" or "jvp"."""
        if base not in self._splits:
            graph = self[base]
            self._splits[base] = split(graph, len(self.program.leaves), len(self.outputs))
        return self._splits[base]


class Executables:
    """Code for the graphs of a program by one backend, each compiled once."""

    def __init__(self, graphs: Graphs, backend: str) -> None:
        if backend not in BACKENDS:
            raise CompileError(f"compile: there is no backend {backend!r}. Use 'inductor', 'aot_eager' or 'eager'.")
        self.graphs, self.backend = graphs, backend
        self._made: dict[str, Run] = {}

    def __getitem__(self, kind: str) -> Run:
        return self._made.get(kind) or self._make(kind)

    def code(self, kind: str) -> Code:
        """Code for "forward", "jvp", "vjp" or "hvp"; for "jvp_split" or "vjp_split" that in two parts."""
        base, _, parted = kind.partition("_")
        if not parted:
            return Code((self[base],))
        return Code((self[f"{base}_first"], self[f"{base}_second"]), self.graphs.split_of(base))

    def is_trusted(self, code: Code) -> bool:
        """Whether code has been probed already: at another size, that is."""
        return False

    def trust(self, code: Code) -> None:
        """Take note that code was probed."""

    def distrust(self, kind: str) -> None:
        """Take note that code of a kind is wrong."""

    def _make(self, kind: str) -> Run:
        with TRACING_LOCK:
            if kind not in self._made:
                self._made[kind] = as_compiled(BACKENDS[self.backend](self.graphs[kind]))
            return self._made[kind]


def as_compiled(run: inductor.Boxed) -> Run:
    """Run code the way it was compiled: without recording for autograd, and without autocast."""
    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, tensors.set_grad_enabled
    any_autocast, in_transform, has_tangent = tensors.any_autocast, tracing.in_transform, tensors.has_tangent

    def call(values: list[Any]) -> Sequence[Tensor]:
        if has_tangent(values):
            raise CompileError(
                "compiled function: given a dual tensor of torch.autograd.forward_ad, whose tangent would be lost. "
                "Use its own jvp."
            )
        if in_transform():
            raise CompileError(
                "compiled function: called inside a transform of torch.func, which cannot see into it. "
                "Use its own jvp and vjp, or apply the transform inside the function before compiling."
            )
        if any_autocast():
            with tensors.without_autocast(), torch.no_grad():
                return run(values)
        before = is_grad_enabled()
        set_grad_enabled(False)
        try:
            return run(values)
        finally:
            set_grad_enabled(before)

    return call
