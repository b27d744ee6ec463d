"""From a function of leaves to graphs of ATen operations: its value, and its derivatives."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, func
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard.compiled import _torch
from torchguard.compiled.leaves import LeafType, cotangent_type
from torchguard.compiled.purity import LINE, Watch, branches_on_values, line_of, name_of
from torchguard.compiled.tidying import tidied
from torchguard.exceptions import CompileError, MissingRuleError, TorchGuardError

# How torch words that a rule is missing, in forward mode, of an operation of its own, and of an autograd.Function.
_NO_FORWARD_RULE = re.compile(r"forward AD with (\S+) that does not support it")
_NO_RULE = re.compile(r"derivative for (\S+) is not implemented|backward through (\S+) ")
_NO_FUNCTION_RULE = re.compile(r"(?:implement|override).*(?:jvp|setup_context|vmap)", re.IGNORECASE | re.DOTALL)


def _copied(there: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    return values.to(there.dtype).expand(there.shape).clone(memory_format=torch.contiguous_format)


# Changes in place become these where they are rewritten, and torch has no derivative for them.
_WRITTEN_OUT = {torch.ops.aten.copy.default: _copied}


@dataclass(frozen=True)
class Program:
    """What is compiled: a function of flat leaves that returns a list of tensors.

    `lifted` says how many leaves, the last ones, stand for random numbers; `knows_its_lines`, that it is a graph whose
    operations have been given lines of the source already.
    """

    name: str
    run: Callable[..., list[Tensor]]
    leaves: tuple[LeafType, ...]
    lifts_rng: bool = False
    lifted: int = 0
    knows_its_lines: bool = False

    @property
    def differentiable(self) -> list[bool]:
        return [leaf.differentiable for leaf in self.leaves]

    def watched(self, watch: Watch, *leaves: Tensor) -> list[Tensor]:
        with watch:
            return self.run(*leaves[: len(leaves) - self.lifted])


class _KeepsLines(torch.fx.Interpreter):
    """Runs a graph; an error takes along the line of the node it is raised at."""

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            setattr(error, LINE, n.stack_trace)
            raise


def program_of(graph: GraphModule, name: str, leaves: tuple[LeafType, ...]) -> Program:
    """A graph as something to compile, which keeps the lines of the source it came from."""

    def run(*values: Tensor) -> list[Tensor]:
        runs = _KeepsLines(graph)
        runs.extra_traceback = False
        return list(runs.run(*values))

    return Program(name, run, leaves, knows_its_lines=True)


def with_lifted_leaves(program: Program) -> Program:
    """The same program with a leaf for each random operation in it."""
    drawn: list[tuple[str, Tensor]] = []

    def run(watch: Watch, *leaves: Tensor) -> list[Tensor]:
        found = program.watched(watch, *leaves)
        drawn[:] = watch.drawn
        return found

    _trace(program, run, program.leaves)
    types = [replace(cotangent_type(value, name), differentiable=False) for name, value in drawn]
    return replace(program, leaves=(*program.leaves, *types), lifted=len(types))


def forward_graph(program: Program) -> tuple[GraphModule, Program]:
    """Leaves to outputs; and what to take derivatives of: that graph, or the function if it has rules of its own.

    Raises where the function is not pure.
    """
    has_own_rules = []

    def run(watch: Watch, *leaves: Tensor) -> list[Tensor]:
        found = program.watched(watch, *leaves)
        has_own_rules.append(watch.has_own_rules)
        return found

    traced = _trace(program, run, program.leaves, grad_enabled=True)
    forward = tidied(traced, [leaf.name for leaf in program.leaves])
    if any(value.is_complex() for value in output_values(forward)):
        raise CompileError(f"{program.name}: returns complex numbers. Return torch.view_as_real(z).")
    source = program if has_own_rules[0] else program_of(forward, program.name, program.leaves)
    return forward, source


def without_fused_attention(program: Program, forward: GraphModule, source: Program) -> Program:
    """What to push tangents through: fused attention has no rule for them, and what it is made of has."""
    fused = any("scaled_dot_product" in str(node.target) for node in forward.graph.nodes)
    if not fused or source is program:
        return source
    with sdpa_kernel(SDPBackend.MATH):
        return forward_graph(program)[1]


def derivative_graph(program: Program, forward: GraphModule, kind: str) -> GraphModule:
    """A derivative as a graph, by torch's rules for the function itself, custom ones included.

    - jvp: leaves and tangents to outputs and their tangents;
    - vjp: leaves and seeds to outputs and gradients;
    - hvp: leaves, tangents and seeds to the tangents of the gradients.
    """
    tangents = tangent_types(program)
    seeds = seed_types(forward)
    if not tangents or not seeds:
        missing = "leaf" if not tangents else "output"
        raise CompileError(f"{kind} of {program.name}: no {missing} is differentiable.")
    if kind != "vjp":
        _refuse_foreign(program, forward, kind)
    given = {"jvp": tangents, "vjp": seeds, "hvp": [*tangents, *seeds]}[kind]
    types = [*program.leaves, *given]
    n, m = len(program.leaves), len(tangents)

    def derivative(watch: Watch, *values: Tensor) -> list[Tensor]:
        leaves, rest = values[:n], values[n:]
        own = [leaf for leaf, is_own in zip(leaves, program.differentiable, strict=True) if is_own]

        def outputs(*moved: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
            queue = iter(moved)
            chosen = [
                next(queue) if is_own else leaf for leaf, is_own in zip(leaves, program.differentiable, strict=True)
            ]
            found = program.watched(watch, *chosen)
            return tuple(out for out in found if out.is_floating_point()), found

        def gradients(*moved: Tensor) -> tuple[Tensor, ...]:
            return _vjp(outputs, moved)[1](tuple(rest[m:]))

        if kind == "jvp":
            _, pushed, found = _jvp(outputs, own, rest)
            return [*found, *pushed]
        if kind == "vjp":
            found, pull = _vjp(outputs, own)
            return [*found, *pull(tuple(rest))]
        return list(func.jvp(gradients, tuple(own), tuple(rest[:m]))[1])

    # Fused attention has no rule for tangents; what it is made of has.
    with sdpa_kernel(SDPBackend.MATH) if kind != "vjp" else torch.no_grad():
        traced = _trace(program, derivative, types, kind, _foreign(forward))
    return tidied(traced, [leaf.name for leaf in types], keep_detach=False)


def _vjp(f: Callable[..., Any], x: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    """All outputs, and the pullback of those that are differentiable."""
    made: Any = func.vjp(f, *x, has_aux=True)
    return made[2], made[1]


def _jvp(f: Callable[..., Any], x: Sequence[Tensor], dx: Sequence[Tensor]) -> Any:
    return func.jvp(f, tuple(x), tuple(dx), has_aux=True)


def tangent_types(program: Program) -> list[LeafType]:
    """A tangent for each differentiable leaf."""
    return [cotangent_type(leaf.fake(), f"d_{leaf.name}") for leaf in program.leaves if leaf.differentiable]


def seed_types(forward: GraphModule) -> list[LeafType]:
    """A seed for each differentiable output."""
    values = output_values(forward)
    return [cotangent_type(value, f"seed_{i}") for i, value in enumerate(values) if value.is_floating_point()]


def output_values(graph: GraphModule) -> list[Tensor]:
    """The outputs of a graph as fake tensors."""
    (output,) = graph.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]


def fakes_of(graph: GraphModule) -> list[Tensor]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def _trace(
    program: Program,
    fn: Callable[..., Any],
    types: Sequence[LeafType],
    kind: str = "",
    foreign: Sequence[tuple[str, str]] = (),
    *,
    grad_enabled: bool = False,
) -> GraphModule:
    """Trace `fn(watch, *values)`. Changes of what is its own are rewritten; a transform could not see through that."""
    if _torch.any_autocast():
        raise CompileError(
            f"{program.name}: autocast is on. Switch it on inside the function, so that it is part of it."
        )
    lifted = slice(len(program.leaves) - program.lifted, len(program.leaves))

    def watched(*values: Tensor) -> Any:
        random = values[lifted] if program.lifts_rng else None
        own = {_torch.storage_of(value) for value in values}
        watch = Watch(program.name, random, own, finds_lines=not program.knows_its_lines, detaches=grad_enabled)
        return fn(watch, *values)

    try:
        traced = _torch.trace(watched, [leaf.fake() for leaf in types], grad_enabled=grad_enabled)
        if any((schema := _torch.schema_of(node.target)) and schema.is_mutable for node in traced.graph.nodes):
            run = torch.fx.Interpreter(traced).run
            functional = func.functionalize(run, remove="mutations")
            traced = _torch.trace(functional, [leaf.fake() for leaf in types], _WRITTEN_OUT)
        return traced
    except TorchGuardError:
        raise
    except _torch.data_dependent_errors() as error:
        raise branches_on_values(program.name, line_of(error)) from error
    except Exception as error:
        raise _in_words(program, error, kind, foreign) from error


def _in_words(program: Program, error: Exception, kind: str, foreign: Sequence[tuple[str, str]]) -> TorchGuardError:
    text, where = str(error), line_of(error)
    found = _NO_FORWARD_RULE.search(text) or _NO_RULE.search(text)
    if found and kind:
        name = next(group for group in found.groups() if group)
        advice = "Write it with operations that have one, or use the other mode."
        return MissingRuleError(
            f"{kind} of {program.name}: {name} has no rule for this derivative, at {where}. {advice}"
        )
    if kind and _NO_FUNCTION_RULE.search(text):
        name, where = foreign[0] if foreign else ("an autograd.Function", where)
        said = "" if foreign else f": {text.splitlines()[0]}"
        return MissingRuleError(f"{kind} of {program.name}: {name} has no rule for this derivative, at {where}{said}")
    if "does not require grad" in text:
        return CompileError(f"{program.name}: at {where}: autograd does not record here. Use torch.func.grad inside.")
    return CompileError(
        f"{program.name}: at {where}: {type(error).__name__}: {text.strip().splitlines()[0] if text else ''}"
    )


def _refuse_foreign(program: Program, forward: GraphModule, kind: str) -> None:
    """An operation that is not ATen's may have no rule for tangents, and torch then takes them for zero."""
    foreign = _foreign(forward)
    if foreign:
        name, where = foreign[0]
        raise MissingRuleError(f"{kind} of {program.name}: {name} has no rule for tangents, at {where}. Use the vjp.")


def _foreign(forward: GraphModule) -> list[tuple[str, str]]:
    """The operations that are not ATen's, and where they are."""
    nodes = [node for node in forward.graph.nodes if _torch.schema_of(node.target) is not None]
    named = [(name_of(node.target), node.stack_trace or "an unknown line") for node in nodes]
    return [(name, where) for name, where in named if name.partition(".")[0] not in ("aten", "prims")]
