"""The graphs of a program and the code compiled from them. Each is made when it is first needed, and cached."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchguard._graphs.op_facts import PRODUCTS
from torchguard._progress import progress_line
from torchguard._torch import inductor, tensors, tracing
from torchguard._torch.fakes import TRACING_LOCK, trace
from torchguard.compiled._derivatives import decomposed_for, derivative_graph
from torchguard.compiled._nodes import op_name
from torchguard.compiled._split import Split, depends_on_tangents, split
from torchguard.compiled._trace import Program, fakes_of, forward_graph, output_values
from torchguard.exceptions import CompileError, TorchGuardError

KINDS = ("forward", "jvp", "vjp", "hvp", "vjp_first", "vjp_second", "jvp_first", "jvp_second")
Run = Callable[[list[Any]], Sequence[Tensor]]


def _eager(graph: GraphModule, decompositions: Any = None) -> inductor.Boxed:
    run = graph if decompositions is None else trace(graph, fakes_of(graph), decompositions)
    return lambda values: run(*values)


def _inductor(graph: GraphModule, *, layout_optimization: bool = True) -> inductor.Boxed:
    fakes = fakes_of(graph)
    decomposed = trace(graph, fakes, inductor.decompositions())
    return inductor.compile_aten_graph(decomposed, fakes, layout_optimization)


_KEEPS_LAYOUT = "inductor without layout optimisation"
BACKENDS: dict[str, Callable[[GraphModule], inductor.Boxed]] = {
    "inductor": _inductor,
    _KEEPS_LAYOUT: lambda graph: _inductor(graph, layout_optimization=False),
    "aot_eager": lambda graph: _eager(graph, inductor.decompositions()),
    "eager": _eager,
}
# The backends to try, in order, where the derivative that a backend compiled is wrong.
FALLBACKS = {
    "inductor": (_KEEPS_LAYOUT, "aot_eager"),
    _KEEPS_LAYOUT: ("aot_eager",),
    "aot_eager": ("eager",),
    "eager": (),
}


@dataclass(frozen=True, eq=False)
class CompiledCode:
    """Compiled code for a value or derivative: one run, or the two of a split."""

    runs: tuple[Run, ...]
    split: Split | None = None


class ProgramGraphs:
    """The graphs of a program, each traced once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        with TRACING_LOCK, progress_line() as show:
            show(f"{program.name}: tracing")
            self._forward = forward_graph(program)
        self.forward, self.has_autograd_function = self._forward.graph, self._forward.has_autograd_function
        self.outputs = output_values(self.forward)
        self._derivatives: dict[str, GraphModule] = {}
        self._hvps: dict[bool, GraphModule | TorchGuardError] = {}
        self._splits: dict[str, Split] = {}

    @property
    def differentiates_function(self) -> bool:
        """Whether a derivative is taken by running the function again, and not of its graph."""
        return self._forward.differentiates_function

    @property
    def eps(self) -> float:
        """The coarsest rounding of any operation in the forward graph."""
        return coarsest_eps(self.forward)

    @property
    def tolerance(self) -> float:
        """The relative error that rounding may cause in an identity. Coarse rounding in products alone adds up less."""
        return max(8 * math.sqrt(coarsest_eps(self.forward, in_products=False)), 32 * self.eps)

    def __getitem__(self, kind: str) -> GraphModule:
        if kind not in KINDS:
            raise CompileError(f"{self.program.name}: there is no graph {kind!r}. Use one of {', '.join(KINDS)}.")
        if kind == "forward":
            return self.forward
        base, _, part = kind.partition("_")
        if part:
            return getattr(self.split_of(base), part)
        if base == "hvp":
            return self._hvp()
        with TRACING_LOCK:
            if base not in self._derivatives:
                forward = decomposed_for(base, self.program, self._forward)
                self._derivatives[base] = derivative_graph(forward, base)
            return self._derivatives[base]

    def hvp_by(self, *, reverse: bool) -> GraphModule | TorchGuardError:
        """The HVP by forward over reverse mode, or by reverse mode alone; the error if an operation has no rule."""
        with TRACING_LOCK:
            if reverse not in self._hvps:
                try:
                    forward = decomposed_for("hvp", self.program, self._forward)
                    self._hvps[reverse] = derivative_graph(forward, "hvp", by_reverse=reverse)
                except TorchGuardError as error:
                    self._hvps[reverse] = error
            return self._hvps[reverse]

    def _hvp(self) -> GraphModule:
        """The HVP by forward over reverse mode, or by reverse mode alone if an operation has no tangents."""
        first = self.hvp_by(reverse=False)
        if isinstance(first, GraphModule):
            return first
        second = self.hvp_by(reverse=True)
        if isinstance(second, GraphModule):
            return second
        raise first

    @property
    def other_hvp(self) -> GraphModule | None:
        """The HVP by the mode that `self["hvp"]` does not use; None if it has no rules, or there is only one mode."""
        has_forward = isinstance(self.hvp_by(reverse=False), GraphModule)
        other = self.hvp_by(reverse=True) if has_forward else None
        return other if isinstance(other, GraphModule) else None

    def is_zero(self, base: str) -> bool:
        """Whether a derivative is zero at every point, because it does not depend on its tangents or cotangents."""
        leaves = len(self.program.leaves)
        if base == "hvp":  # a second derivative that torch lost would be zero as well, in one of the two modes
            other = self.other_hvp
            return other is not None and not any(depends_on_tangents(graph, leaves, 0) for graph in (self[base], other))
        return not depends_on_tangents(self[base], leaves, len(self.outputs))

    def split_of(self, base: str) -> Split:
        """The first and second part of "vjp" or "jvp"."""
        if base not in self._splits:
            graph = self[base]
            self._splits[base] = split(graph, len(self.program.leaves), len(self.outputs))
        return self._splits[base]


class Executables:
    """The code that one backend compiles from the graphs of a program, each graph once."""

    def __init__(self, graphs: ProgramGraphs, backend: str) -> None:
        if backend not in BACKENDS:
            raise CompileError(f"compile: there is no backend {backend!r}. Use 'inductor', 'aot_eager' or 'eager'.")
        self.graphs, self.backend = graphs, backend
        self._runs: dict[str, Run] = {}

    def __getitem__(self, kind: str) -> Run:
        return self._runs.get(kind) or self._compile(kind)

    def code(self, kind: str) -> CompiledCode:
        """Code for "forward", "jvp", "vjp" or "hvp"; in two parts for "jvp_split" or "vjp_split"."""
        base, _, is_split = kind.partition("_")
        if not is_split:
            return CompiledCode((self[base],))
        return CompiledCode((self[f"{base}_first"], self[f"{base}_second"]), self.graphs.split_of(base))

    def run(self, graph: GraphModule) -> Run:
        """Code for a graph that is none of the kinds; it is not kept."""
        return _outside_autograd(BACKENDS[self.backend](graph))

    def is_probed(self, code: CompiledCode) -> bool:
        """Whether code has passed a probe at another size."""
        return False

    def mark_probed(self, code: CompiledCode) -> None:
        """Record that code has passed a probe."""

    def reject(self, kind: str) -> None:
        """Record that code of a kind has failed a probe."""

    def _compile(self, kind: str) -> Run:
        with TRACING_LOCK:
            if kind not in self._runs:
                with progress_line() as show:
                    show(f"{self.graphs.program.name}: compiling {kind} with {self.backend}")
                    self._runs[kind] = self.run(self.graphs[kind])
            return self._runs[kind]


def _outside_autograd(run: inductor.Boxed) -> Run:
    """Run code as it was compiled: with autograd and autocast off. Raise where a derivative would be lost."""
    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, tensors.set_grad_enabled
    any_autocast, in_transform, has_tangent = tensors.any_autocast, tracing.in_transform, tensors.has_tangent

    def call(values: list[Any]) -> Sequence[Tensor]:
        if has_tangent(values):
            raise CompileError(
                "compiled function: got a dual tensor of torch.autograd.forward_ad, whose tangent would be lost. "
                "Use the jvp of the compiled function."
            )
        if in_transform():
            raise CompileError(
                "compiled function: called inside a transform of torch.func, which cannot trace compiled code. "
                "Use the jvp and vjp of the compiled function, or apply the transform inside it before compiling."
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


# Rounding. These formats have the exponents of float32 and fewer digits; torch.backends may allow them in products.
_EPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
_PRODUCTS = (*PRODUCTS, "addmv", "linear", "matmul", "attention")


def coarsest_eps(graph: GraphModule, *, in_products: bool = True) -> float:
    """The largest machine epsilon of the floating point formats in a graph; 0 if there are none.

    Args:
        in_products: whether to count the formats that the current settings of torch allow inside products.
    """
    return max((_eps_of(node, in_products) for node in graph.graph.nodes if node.op != "output"), default=0.0)


def _eps_of(node: Node, in_products: bool) -> float:
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    own = max((torch.finfo(value.dtype).eps for value in floats), default=0.0)
    if not in_products or node.op != "call_function" or not any(value.dtype == torch.float32 for value in floats):
        return own
    return max(own, _EPS.get(precision(op_name(node), floats[0].device), 0.0))


def precision(name: str, device: torch.device) -> str:
    """The format torch may compute products of float32 in. "ieee" and "none" stand for float32."""
    backends: Any = torch.backends
    words = name.removesuffix("_backward")
    if words.endswith("convolution"):
        return (backends.cudnn if device.type == "cuda" else backends.mkldnn).conv.fp32_precision
    if words.endswith(_PRODUCTS):
        return (backends.cuda if device.type == "cuda" else backends.mkldnn).matmul.fp32_precision
    return "ieee"
