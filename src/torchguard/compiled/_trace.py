"""From a function of leaves to graphs of ATen operations: its value, and its derivatives."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, func
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard._graphs.op_facts import SHAPE_ONLY, UNINITIALIZED
from torchguard._torch import fakes, ops, tensors
from torchguard.compiled._cleanup import tidied
from torchguard.compiled._decompositions import CELLS, WritesOutAttention, is_fused, is_pulled_through
from torchguard.compiled._leaves import LeafType, cotangent_type, is_there
from torchguard.compiled._nodes import op_name
from torchguard.compiled._purity import LINE, Watch, branches_on_values, line_of, name_of
from torchguard.exceptions import CompileError, ImpureFunctionError, MissingRuleError, TorchGuardError

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
    where: str = "an unknown line"
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


@dataclass(frozen=True)
class Forward:
    """Leaves to outputs as a graph, and what to take derivatives of.

    That is the graph, or the function itself if it has rules of its own. `foreign` are the operations that are not
    ATen's, and their lines.
    """

    graph: GraphModule
    source: Program
    has_own_rules: bool
    foreign: tuple[tuple[Any, str], ...]

    @property
    def is_all(self) -> bool:
        """Whether every derivative is taken of the graph, and none of the function itself."""
        return not self.has_own_rules and not is_pulled_through(self.graph)


def forward_graph(program: Program) -> Forward:
    """What a function computes. Raises where it is not pure."""
    watches: list[Watch] = []

    def run(watch: Watch, *leaves: Tensor) -> list[Tensor]:
        watches.append(watch)
        found = program.watched(watch, *leaves)
        for i, out in enumerate(found):
            if not fakes.is_fake(out):
                what = f"result [{i}] is a tensor that is no argument (a hidden constant)"
                raise watch.error(program.where, what, "Make it an argument")
        return found

    traced = _trace(program, run, program.leaves, grad_enabled=True)
    forward = tidied(traced, [leaf.name for leaf in program.leaves])
    if any(value.is_complex() for value in output_values(forward)):
        raise CompileError(f"{program.name}: returns complex numbers. Return torch.view_as_real(z).")
    _refuse_uninitialised(program, forward)
    _refuse_missing_devices(program, forward)
    own = watches[0].has_own_rules
    source = program if own else program_of(forward, program.name, program.leaves)
    return Forward(forward, source, own, tuple(watches[0].foreign))


def without_fused_attention(program: Program, forward: Forward) -> Forward:
    """What to push tangents through: fused attention has no rule for them, and what it is made of has."""
    if forward.has_own_rules or not any(map(is_fused, forward.graph.graph.nodes)):
        return forward
    if is_pulled_through(forward.graph):
        with sdpa_kernel(SDPBackend.MATH):
            return replace(forward, source=forward_graph(program).source)
    written_out = replace(forward.source, run=lambda *leaves: list(WritesOutAttention(forward.graph).run(*leaves)))
    return replace(forward, source=forward_graph(written_out).source)


def derivative_graph(forward: Forward, kind: str) -> GraphModule:
    """A derivative as a graph, by torch's rules for the function itself, custom ones included.

    - jvp: leaves and tangents to outputs and their tangents;
    - vjp: leaves and seeds to outputs and gradients;
    - hvp: leaves, tangents and seeds to the tangents of the gradients.
    """
    program = forward.source
    tangents = tangent_types(program)
    seeds = seed_types(output_values(forward.graph))
    if not tangents or not seeds:
        missing = "leaf" if not tangents else "output"
        raise CompileError(f"{kind} of {program.name}: no {missing} is differentiable.")
    _refuse_foreign(forward, kind)
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
            with torch.enable_grad():  # so that leaving a `no_grad` is seen to be that
                found = program.watched(watch, *chosen)
            return tuple(out for out in found if out.is_floating_point()), found

        def gradients(*moved: Tensor) -> tuple[Tensor, ...]:
            return _vjp(outputs, moved)[1](tuple(rest[m:]))

        if kind == "jvp":
            _, pushed, found = _jvp(outputs, own, rest)
            return [*found, *pushed]
        if kind == "vjp":
            found, pull = (_recorded_vjp if forward.foreign else _vjp)(outputs, own)
            return [*found, *pull(tuple(rest))]
        return list(func.jvp(gradients, tuple(own), tuple(rest[:m]))[1])

    # Fused attention has no rule for tangents; what it is made of has.
    with sdpa_kernel(SDPBackend.MATH) if kind != "vjp" else torch.no_grad():
        lines = {name_of(operation): where for operation, where in forward.foreign}
        traced = _trace(program, derivative, types, kind, lines)
    return tidied(traced, [leaf.name for leaf in types], keep_detach=False)


def _vjp(f: Callable[..., Any], x: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    """All outputs, and the pullback of those that are differentiable."""
    made: Any = func.vjp(f, *x, has_aux=True)
    return made[2], made[1]


def _recorded_vjp(f: Callable[..., Any], x: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    """The same by autograd: rules registered for an operation of one's own are not for transforms."""
    with torch.enable_grad():
        tracked = [leaf.detach().requires_grad_() for leaf in x]
        smooth, found = f(*tracked)

    def pull(seeds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        chosen = [(out, seed) for out, seed in zip(smooth, seeds, strict=True) if out.requires_grad]
        if not chosen:
            return tuple(map(torch.zeros_like, x))
        outs, weights = zip(*chosen, strict=True)
        return torch.autograd.grad(outs, tracked, weights, allow_unused=True, materialize_grads=True)

    return [out.detach() for out in found], pull


def _jvp(f: Callable[..., Any], x: Sequence[Tensor], dx: Sequence[Tensor]) -> Any:
    return func.jvp(f, tuple(x), tuple(dx), has_aux=True)


def tangent_types(program: Program) -> list[LeafType]:
    """A tangent for each differentiable leaf."""
    return [cotangent_type(leaf.fake(), f"d_{leaf.name}") for leaf in program.leaves if leaf.differentiable]


def seed_types(values: Sequence[Tensor]) -> list[LeafType]:
    """A seed for each differentiable output."""
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
    lines: Mapping[str, str] = MappingProxyType({}),
    *,
    grad_enabled: bool = False,
) -> GraphModule:
    """Trace `fn(watch, *values)`. Changes of what is its own are rewritten; a transform could not see through that."""
    if tensors.any_autocast():
        raise CompileError(
            f"{program.name}: autocast is on. Switch it on inside the function, so that it is part of it."
        )
    lifted = slice(len(program.leaves) - program.lifted, len(program.leaves))

    def watched(*values: Tensor) -> Any:
        random = values[lifted] if program.lifts_rng else None
        own = {tensors.storage_of(value) for value in values}
        runs_a_graph = program.knows_its_lines
        pushes = kind in ("jvp", "hvp") and not runs_a_graph
        watch = Watch(program.name, random, own, finds_lines=not runs_a_graph, detaches=grad_enabled, pushes=pushes)
        return fn(watch, *values)

    try:
        traced = fakes.trace(watched, [leaf.fake() for leaf in types], CELLS, grad_enabled=grad_enabled)
        if any((schema := ops.schema_of(node.target)) and schema.is_mutable for node in traced.graph.nodes):
            run = torch.fx.Interpreter(traced).run
            functional = func.functionalize(run, remove="mutations")
            traced = fakes.trace(functional, [leaf.fake() for leaf in types], _WRITTEN_OUT)
            _refuse_changes(program, traced)
        return traced
    except TorchGuardError:
        raise
    except fakes.data_dependent_errors() as error:
        raise branches_on_values(program.name, line_of(error)) from error
    except Exception as error:
        raise _in_words(program, error, kind, lines) from error


def _refuse_changes(program: Program, traced: GraphModule) -> None:
    """What is left of changes in place once they were rewritten is what nobody knows how to rewrite."""
    for node in traced.graph.nodes:
        if (schema := ops.schema_of(node.target)) and schema.is_mutable:
            raise ImpureFunctionError(
                f"{program.name}: at {node.stack_trace}: {name_of(node.target)} changes a tensor in place, and cannot "
                "be rewritten. Use the out-of-place form."
            )


def _refuse_missing_devices(program: Program, forward: GraphModule) -> None:
    """Tensors without values may be on a device that is not there; taking derivatives of them ends the process."""
    for node in forward.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not is_there(value.device):
            raise CompileError(
                f"{program.name}: %{node.name} is on {value.device}, and this machine has no such device."
            )


def _refuse_uninitialised(program: Program, forward: GraphModule) -> None:
    """Memory that nobody wrote to may be used for its shape alone."""
    for node in forward.graph.nodes:
        is_left = op_name(node) in UNINITIALIZED and node.meta["val"].numel() > 0
        if is_left and not all(op_name(user) in {"fill", "zero", "copy", *SHAPE_ONLY} for user in node.users):
            raise ImpureFunctionError(
                f"{program.name}: at {node.stack_trace}: {name_of(node.target)} returns memory as it was left. "
                "Use torch.zeros."
            )


def _in_words(program: Program, error: Exception, kind: str, lines: Mapping[str, str]) -> TorchGuardError:
    text, where = str(error), line_of(error)
    found = _NO_FORWARD_RULE.search(text) or _NO_RULE.search(text)
    if found and kind:
        name = next(group for group in found.groups() if group)
        name, where = next(((known, line) for known, line in lines.items() if known in name), (name, where))
        advice = "Write it with operations that have one, or use the other mode."
        return MissingRuleError(
            f"{kind} of {program.name}: {name} has no rule for this derivative, at {where}. {advice}"
        )
    if kind and _NO_FUNCTION_RULE.search(text):
        return MissingRuleError(
            f"{kind} of {program.name}: an autograd.Function has no rule for this derivative, at {where}: "
            f"{text.splitlines()[0]}"
        )
    if "does not require grad" in text:
        return CompileError(f"{program.name}: at {where}: autograd does not record here. Use torch.func.grad inside.")
    return CompileError(
        f"{program.name}: at {where}: {type(error).__name__}: {text.strip().splitlines()[0] if text else ''}"
    )


def _refuse_foreign(forward: Forward, kind: str) -> None:
    """An operation that is not ATen's may have no rule, and torch then takes its derivative for zero."""
    for operation, where in forward.foreign:
        if kind != "vjp" or not ops.has_autograd(operation):
            what, advice = ("tangents", "Use the vjp") if kind != "vjp" else ("gradients", "Register one with autograd")
            raise MissingRuleError(
                f"{kind} of {forward.source.name}: {name_of(operation)} has no rule for {what}, at {where}. {advice}."
            )
