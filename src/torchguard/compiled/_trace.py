"""Tracing: from a function of leaves to a graph of ATen operations."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, func
from torch.fx import GraphModule, Node

from torchguard._graphs.op_facts import SHAPE_ONLY, UNINITIALIZED
from torchguard._torch import fakes, ops, tensors
from torchguard._torch.support import warn_of_missing
from torchguard.compiled._cleanup import clean_graph
from torchguard.compiled._control_flow import EXPANSIONS
from torchguard.compiled._decompositions import (
    DECOMPOSITIONS,
    has_attention_backward,
)
from torchguard.compiled._leaves import LeafType, dense_type, is_available
from torchguard.compiled._nodes import op_name
from torchguard.compiled._purity import LINE_ATTRIBUTE, PurityMode, branch_error, line_of, name_of
from torchguard.exceptions import CompileError, ImpureFunctionError, MissingRuleError, TorchGuardError

# Torch's messages for a missing rule: in forward mode, in reverse mode, and of an autograd.Function.
_NO_FORWARD_RULE = re.compile(r"forward AD with (\S+) that does not support it")
_NO_RULE = re.compile(r"derivative for (\S+) is not implemented|backward through (\S+) ")
_NO_ARGUMENT_RULE = re.compile(r"is not differentiable (?:with respect to|wrt)")
_NO_FUNCTION_RULE = re.compile(r"(?:implement|override).*(?:jvp|setup_context|vmap)", re.IGNORECASE | re.DOTALL)


def _copy(target: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    return values.to(target.dtype).expand(target.shape).clone(memory_format=torch.contiguous_format)


# functionalize rewrites changes in place with `aten.copy`, for which torch has no derivative.
_COPY_DECOMPOSITION = {torch.ops.aten.copy.default: _copy}


@dataclass(frozen=True)
class Program:
    """What is compiled: a function of flat leaves that returns a list of tensors.

    Args:
        where: the source line of the function.
        lift_rng: whether random numbers become leaves.
        random_leaves: the number of such leaves; they are the last ones.
        is_graph: whether `run` interprets a graph, whose nodes have source lines already.
    """

    name: str
    run: Callable[..., list[Tensor]]
    leaves: tuple[LeafType, ...]
    where: str = "an unknown line"
    lift_rng: bool = False
    random_leaves: int = 0
    is_graph: bool = False

    @property
    def differentiable(self) -> list[bool]:
        return [leaf.differentiable for leaf in self.leaves]

    def run_in(self, mode: PurityMode, *leaves: Tensor) -> list[Tensor]:
        with mode:
            return self.run(*leaves[: len(leaves) - self.random_leaves])


class _LineInterpreter(torch.fx.Interpreter):
    """Runs a graph, and attaches the source line of a node to the exception it raises."""

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            setattr(error, LINE_ATTRIBUTE, n.stack_trace)
            raise


def program_of(graph: GraphModule, name: str, leaves: tuple[LeafType, ...]) -> Program:
    """A graph as a program. Its nodes pass on their source lines."""

    def run(*values: Tensor) -> list[Tensor]:
        interpreter = _LineInterpreter(graph)
        interpreter.extra_traceback = False
        return list(interpreter.run(*values))

    return Program(name, run, leaves, is_graph=True)


def with_random_leaves(program: Program) -> Program:
    """The same program with a leaf for each random operation in it."""
    drawn: list[tuple[str, Tensor]] = []

    def run(mode: PurityMode, *leaves: Tensor) -> list[Tensor]:
        found = program.run_in(mode, *leaves)
        drawn[:] = mode.random_tensors
        return found

    trace(program, run, program.leaves)
    types = [replace(dense_type(value, name), differentiable=False) for name, value in drawn]
    return replace(program, leaves=(*program.leaves, *types), random_leaves=len(types))


@dataclass(frozen=True)
class Forward:
    """The forward graph, from leaves to outputs.

    Args:
        source: what to differentiate: the graph, or the function itself if it calls an `autograd.Function`.
        custom_ops: the operations that are not ATen's, with their source lines.
    """

    graph: GraphModule
    source: Program
    has_autograd_function: bool
    custom_ops: tuple[tuple[Any, str], ...]

    @property
    def differentiates_function(self) -> bool:
        """Whether a derivative is taken by running the function again, and not of its graph."""
        return self.has_autograd_function or has_attention_backward(self.graph)


def forward_graph(program: Program) -> Forward:
    """Trace what a function computes. Raises if it is not pure."""
    warn_of_missing("compiled")
    modes: list[PurityMode] = []

    def run(mode: PurityMode, *leaves: Tensor) -> list[Tensor]:
        modes.append(mode)
        found = program.run_in(mode, *leaves)
        for i, out in enumerate(found):
            if not fakes.is_fake(out):
                what = f"result [{i}] is a tensor that is not an argument (a hidden constant)"
                raise mode.error(program.where, what, "Make it an argument")
        return found

    traced = trace(program, run, program.leaves, grad_enabled=True)
    forward = clean_graph(traced, [leaf.name for leaf in program.leaves])
    if any(value.is_complex() for value in output_values(forward)):
        raise CompileError(f"{program.name}: returns complex numbers. Return torch.view_as_real(z).")
    _refuse_uninitialized(program, forward)
    _refuse_missing_devices(program, forward)
    mode = modes[0]
    source = program if mode.has_autograd_function else program_of(forward, program.name, program.leaves)
    return Forward(forward, source, mode.has_autograd_function, tuple(mode.custom_ops))


def output_values(graph: GraphModule) -> list[Tensor]:
    """The outputs of a graph as fake tensors."""
    (output,) = graph.graph.find_nodes(op="output")
    return [node.meta["val"] for node in output.args[0]]


def fakes_of(graph: GraphModule) -> list[Tensor]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def trace(
    program: Program,
    fn: Callable[..., Any],
    types: Sequence[LeafType],
    kind: str = "",
    lines: Mapping[str, str] = MappingProxyType({}),
    *,
    grad_enabled: bool = False,
    in_forward_mode: bool = False,
) -> GraphModule:
    """Trace `fn(mode, *values)`.

    Changes in place are rewritten in the traced graph, not while tracing: torch.func cannot differentiate through
    functionalize.
    """
    if tensors.any_autocast():
        raise CompileError(
            f"{program.name}: autocast is on. Use autocast inside the function, so that it becomes part of the graph."
        )
    random = slice(len(program.leaves) - program.random_leaves, len(program.leaves))

    def run(*values: Tensor) -> Any:
        mode = PurityMode(
            program.name,
            values[random] if program.lift_rng else None,
            {tensors.storage_of(value): leaf.name for value, leaf in zip(values, types, strict=True)},
            search_stack=not program.is_graph,
            detach_constants=grad_enabled,
            in_forward_mode=in_forward_mode and not program.is_graph,
        )
        return fn(mode, *values)

    try:
        with fakes.expanded_control_flow(EXPANSIONS):
            traced = fakes.trace(run, [leaf.fake() for leaf in types], DECOMPOSITIONS, grad_enabled=grad_enabled)
        if any((schema := ops.schema_of(node.target)) and schema.is_mutable for node in traced.graph.nodes):
            functional = func.functionalize(torch.fx.Interpreter(traced).run, remove="mutations")
            traced = fakes.trace(functional, [leaf.fake() for leaf in types], _COPY_DECOMPOSITION)
            _refuse_mutations(program, traced)
        return traced
    except TorchGuardError:
        raise
    except fakes.data_dependent_errors() as error:
        if kind and program.is_graph:  # the function itself has been traced: it is a rule that reads values
            raise MissingRuleError(
                f"{kind} of {program.name}: the control flow of torch's rule depends on the value of a tensor, at "
                f"{line_of(error)}. Write it with other operations, or use another derivative."
            ) from error
        raise branch_error(program.name, line_of(error)) from error
    except Exception as error:
        raise _explain(program, error, kind, lines) from error


def _refuse_mutations(program: Program, traced: GraphModule) -> None:
    """Raise for a change in place that functionalize could not rewrite."""
    for node in traced.graph.nodes:
        if (schema := ops.schema_of(node.target)) and schema.is_mutable:
            raise ImpureFunctionError(
                f"{program.name}: at {node.stack_trace}: {name_of(node.target)} changes a tensor in place, which "
                "cannot be rewritten. Use the out-of-place form."
            )


def _refuse_missing_devices(program: Program, forward: GraphModule) -> None:
    """Raise for a device that this machine lacks. Differentiating fake tensors on it would end the process."""
    for node in forward.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not is_available(value.device):
            raise CompileError(
                f"{program.name}: %{node.name} is on {value.device}, and this machine has no such device."
            )


def _refuse_uninitialized(program: Program, forward: GraphModule) -> None:
    """Raise if uninitialized memory is read. Operations that use its shape alone are fine."""
    for node in forward.graph.nodes:
        is_uninitialized = op_name(node) in UNINITIALIZED and node.meta["val"].numel() > 0
        if is_uninitialized and not all(op_name(user) in {"fill", "zero", "copy", *SHAPE_ONLY} for user in node.users):
            raise ImpureFunctionError(
                f"{program.name}: at {node.stack_trace}: {name_of(node.target)} returns uninitialized memory. "
                "Use torch.zeros."
            )


def _explain(program: Program, error: Exception, kind: str, lines: Mapping[str, str]) -> TorchGuardError:
    """The error of torchguard for an error of torch, with the source line and what to do."""
    text, where = str(error), line_of(error)
    found = _NO_FORWARD_RULE.search(text) or _NO_RULE.search(text)
    if found and kind:
        name = next(group for group in found.groups() if group)
        name, where = next(((known, line) for known, line in lines.items() if known in name), (name, where))
        advice = "Write it with operations that have one, or use the other mode."
        return MissingRuleError(
            f"{kind} of {program.name}: {name} has no rule for this derivative, at {where}. {advice}"
        )
    if kind and _NO_ARGUMENT_RULE.search(text):
        return MissingRuleError(
            f"{kind} of {program.name}: at {where}: {text.splitlines()[0].rstrip('.')}. Pass that leaf as nondiff=, to "
            "differentiate with respect to the others."
        )
    if kind and _NO_FUNCTION_RULE.search(text):
        return MissingRuleError(
            f"{kind} of {program.name}: an autograd.Function has no rule for this derivative, at {where}: "
            f"{text.splitlines()[0]}"
        )
    if "does not require grad" in text:
        return CompileError(
            f"{program.name}: at {where}: autograd does not record while a function is traced. Use torch.func.grad."
        )
    return CompileError(
        f"{program.name}: at {where}: {type(error).__name__}: {text.strip().splitlines()[0] if text else ''}"
    )
