"""Tracing: from a function of leaves to graphs of ATen operations, for its value and its derivatives.

Derivatives are traced from the forward graph, with torch.func, so the function does not run again. There are two
exceptions: a function that calls an `autograd.Function` runs again for each derivative, because the graph does not hold
those rules; one that takes gradients of fused attention itself runs again for forward mode. The VJP of a function with
custom operators is traced with autograd, because torch.func does not use the rules registered for them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, func
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard._graphs.op_facts import SHAPE_ONLY, UNINITIALIZED, has_wrong_jvp
from torchguard._torch import fakes, ops, tensors
from torchguard._torch.support import warn_of_missing
from torchguard.compiled._cleanup import clean_graph
from torchguard.compiled._control_flow import EXPANSIONS
from torchguard.compiled._decompositions import (
    DECOMPOSITIONS,
    ForwardModeDecomposer,
    has_attention_backward,
    lacks_tangents,
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

    _trace(program, run, program.leaves)
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

    traced = _trace(program, run, program.leaves, grad_enabled=True)
    forward = clean_graph(traced, [leaf.name for leaf in program.leaves])
    if any(value.is_complex() for value in output_values(forward)):
        raise CompileError(f"{program.name}: returns complex numbers. Return torch.view_as_real(z).")
    _refuse_uninitialized(program, forward)
    _refuse_missing_devices(program, forward)
    mode = modes[0]
    source = program if mode.has_autograd_function else program_of(forward, program.name, program.leaves)
    return Forward(forward, source, mode.has_autograd_function, tuple(mode.custom_ops))


def for_forward_mode(program: Program, forward: Forward) -> Forward:
    """The same for forward mode, with fused attention and others decomposed that have no JVP rule in torch."""
    if forward.has_autograd_function or not any(map(lacks_tangents, forward.graph.graph.nodes)):
        return forward
    if has_attention_backward(forward.graph):
        with sdpa_kernel(SDPBackend.MATH):
            return replace(forward, source=forward_graph(program).source)
    decomposed = replace(forward.source, run=lambda *leaves: list(ForwardModeDecomposer(forward.graph).run(*leaves)))
    return replace(forward, source=forward_graph(decomposed).source)


def derivative_graph(forward: Forward, kind: str, *, by_reverse: bool = False) -> GraphModule:
    """Trace a derivative, by torch's rules and those of an `autograd.Function`.

    - jvp: from leaves and tangents to outputs and their tangents;
    - vjp: from leaves and cotangents to outputs and gradients;
    - hvp: from leaves, tangents and cotangents to the tangents of the gradients.

    Args:
        by_reverse: for an hvp, differentiate the gradients in reverse mode alone. Their pullback is linear in its
            cotangents, so its own pullback maps tangents to tangents; that the Hessian is symmetric is not assumed.
    """
    program = forward.source
    tangents = tangent_types(program)
    cotangents = cotangent_types(output_values(forward.graph))
    if not tangents or not cotangents:
        missing = "leaf" if not tangents else "output"
        raise CompileError(f"{kind} of {program.name}: no {missing} is differentiable.")
    uses_forward_mode = kind != "vjp" and not by_reverse
    _refuse_missing_rules(forward, kind, uses_forward_mode)
    given = {"jvp": tangents, "vjp": cotangents, "hvp": [*tangents, *cotangents]}[kind]
    types = [*program.leaves, *given]
    n, m = len(program.leaves), len(tangents)

    vjp_of = _autograd_vjp if forward.custom_ops else _vjp

    def derivative(mode: PurityMode, *values: Tensor) -> list[Tensor]:
        leaves, rest = values[:n], values[n:]
        point = [leaf for leaf, is_own in zip(leaves, program.differentiable, strict=True) if is_own]

        def outputs(*primals: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
            queue = iter(primals)
            merged = [
                next(queue) if is_own else leaf for leaf, is_own in zip(leaves, program.differentiable, strict=True)
            ]
            with torch.enable_grad():  # so that the end of a `no_grad` block switches grad on, as the mode expects
                found = program.run_in(mode, *merged)
            return tuple(out for out in found if out.is_floating_point()), found

        def gradients(*primals: Tensor) -> tuple[Tensor, ...]:
            # Without grad, torch takes shortcuts in a pullback that cannot be differentiated again: that of `det` reads
            # the LU factors of the forward pass, which have no tangent, and the derivative of that part would be lost.
            with torch.enable_grad():
                return _vjp(outputs, primals)[1](tuple(rest[m:]))

        if kind == "jvp":
            _, output_tangents, found = _jvp(outputs, point, rest)
            return [*found, *output_tangents]
        if kind == "vjp":
            found, pullback = vjp_of(outputs, point)
            return [*found, *pullback(tuple(rest))]
        if by_reverse:
            pullback = func.vjp(gradients, *point)[1]

            def transposed(*cotangents: Tensor) -> tuple[Tensor, ...]:
                with torch.enable_grad():
                    return pullback(cotangents)

            return list(func.vjp(transposed, *map(torch.zeros_like, point))[1](tuple(rest[:m])))
        return list(func.jvp(gradients, tuple(point), tuple(rest[:m]))[1])

    # Torch has no JVP rule for fused attention, but has one for the math backend.
    with sdpa_kernel(SDPBackend.MATH) if kind != "vjp" else torch.no_grad():
        lines = {name_of(operation): where for operation, where in forward.custom_ops}
        try:
            traced = _trace(program, derivative, types, kind, lines, in_forward_mode=uses_forward_mode)
        except MissingRuleError:
            if kind != "vjp" or vjp_of is _autograd_vjp or not forward.has_autograd_function:
                raise
            # torch.func does not run an autograd.Function whose `forward` takes `ctx`. Autograd does.
            vjp_of = _autograd_vjp
            traced = _trace(program, derivative, types, kind, lines)
    return clean_graph(traced, [leaf.name for leaf in types], keep_detach=False)


def _vjp(f: Callable[..., Any], x: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    """All outputs, and the pullback of those that are differentiable."""
    found: Any = func.vjp(f, *x, has_aux=True)
    return found[2], found[1]


def _autograd_vjp(f: Callable[..., Any], x: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., Any]]:
    """The same with autograd: torch.func does not use the rules registered for a custom operator."""
    with torch.enable_grad():
        tracked = [leaf.detach().requires_grad_() for leaf in x]
        differentiable, found = f(*tracked)

    def pullback(cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = [(out, w) for out, w in zip(differentiable, cotangents, strict=True) if out.requires_grad]
        if not pairs:
            return tuple(map(torch.zeros_like, x))
        outs, weights = zip(*pairs, strict=True)
        return torch.autograd.grad(outs, tracked, weights, allow_unused=True, materialize_grads=True)

    return [out.detach() for out in found], pullback


def _jvp(f: Callable[..., Any], x: Sequence[Tensor], dx: Sequence[Tensor]) -> Any:
    return func.jvp(f, tuple(x), tuple(dx), has_aux=True)


def tangent_types(program: Program) -> list[LeafType]:
    """The type of a tangent for each differentiable leaf."""
    return [dense_type(leaf.fake(), f"d_{leaf.name}") for leaf in program.leaves if leaf.differentiable]


def cotangent_types(values: Sequence[Tensor]) -> list[LeafType]:
    """The type of a cotangent for each differentiable output."""
    return [dense_type(value, f"cotangent_{i}") for i, value in enumerate(values) if value.is_floating_point()]


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


def _refuse_missing_rules(forward: Forward, kind: str, uses_forward_mode: bool) -> None:
    """Raise for a custom operator without a rule, which torch would take to be constant, and for a wrong rule."""
    for node in forward.graph.graph.nodes:
        if uses_forward_mode and node.op == "call_function" and has_wrong_jvp(op_name(node), node.args):
            raise MissingRuleError(
                f"{kind} of {forward.source.name}: the rule of torch for the tangents of {name_of(node.target)} is "
                f"wrong, at {node.stack_trace}. Write it with other operations, or use the vjp."
            )
    for operation, where in forward.custom_ops:
        if kind != "vjp" or not ops.has_autograd(operation):
            what, advice = ("tangents", "Use the vjp") if kind != "vjp" else ("gradients", "Register one with autograd")
            raise MissingRuleError(
                f"{kind} of {forward.source.name}: {name_of(operation)} has no rule for {what}, at {where}. {advice}."
            )
