"""Derivatives: from the forward graph to the graphs of its JVP, VJP and HVP, and where they are conventions.

Derivatives are traced from the forward graph, with torch.func, so the function does not run again. There are two
exceptions: a function that calls an `autograd.Function` runs again for each derivative, because the graph does not hold
those rules; one that takes gradients of fused attention itself runs again for forward mode. The VJP of a function with
custom operators is traced with autograd, because torch.func does not use the rules registered for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, func
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchguard._graphs.op_facts import facts_of, has_wrong_jvp
from torchguard._torch import ops
from torchguard.compiled._cleanup import clean_graph
from torchguard.compiled._decompositions import Decomposer, has_attention_backward, without_rule
from torchguard.compiled._leaves import LeafType, dense_type
from torchguard.compiled._nodes import op_name
from torchguard.compiled._purity import PurityMode, name_of
from torchguard.compiled._trace import Forward, Program, forward_graph, output_values, trace
from torchguard.exceptions import CompileError, MissingRuleError


def decomposed_for(kind: str, program: Program, forward: Forward) -> Forward:
    """The same for one kind of derivative, with fused attention and others decomposed that have no rule in torch."""
    nodes = without_rule(forward.graph, program.differentiable, kind)
    if forward.has_autograd_function or not nodes:
        return forward
    if has_attention_backward(forward.graph):
        with sdpa_kernel(SDPBackend.MATH):
            return replace(forward, source=forward_graph(program).source)
    decomposed = replace(forward.source, run=lambda *leaves: list(Decomposer(forward.graph, nodes).run(*leaves)))
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
            traced = trace(program, derivative, types, kind, lines, in_forward_mode=uses_forward_mode)
        except MissingRuleError:
            if kind != "vjp" or vjp_of is _autograd_vjp or not forward.has_autograd_function:
                raise
            # torch.func does not run an autograd.Function whose `forward` takes `ctx`. Autograd does.
            vjp_of = _autograd_vjp
            traced = trace(program, derivative, types, kind, lines)
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


@dataclass(frozen=True)
class NonsmoothPoint:
    """An operation that is not differentiable everywhere, and the derivative that torch returns where it is not."""

    op: str
    convention: str
    source: str

    def __str__(self) -> str:
        return f"{self.op}: {self.convention}" + (f" ({self.source})" if self.source else "")


def nonsmooth_points_of(graph: GraphModule) -> tuple[NonsmoothPoint, ...]:
    """The operations of a graph whose derivative is a convention somewhere, once for each source line."""
    found: dict[tuple[str, str | None], NonsmoothPoint] = {}
    varying: set[Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        is_leaf = node.op == "placeholder" and value.is_floating_point()
        if is_leaf or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
        convention = _convention(node, varying) if node.op == "call_function" else None
        if convention is not None:
            name = op_name(node)
            found[name, node.stack_trace] = NonsmoothPoint(f"aten.{name}", convention, node.stack_trace or "")
    return tuple(found.values())


def _convention(node: Node, varying: set[Node]) -> str | None:
    """The derivative that torch returns for an operation where it has none; None if the operation is smooth."""
    name = op_name(node)
    facts = facts_of(name)
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        return facts_of("floor").nonsmooth
    if not facts.nonsmooth:
        return None
    if name == "elu":
        given: tuple[Any, ...] = (*node.args, 1, 1, 1)
        _, alpha, _, input_scale = given[:4]
        return facts.nonsmooth if alpha * input_scale != 1 else None
    if not facts.is_switch:
        return facts.nonsmooth
    is_varying = (node if facts.condition is None else node.args[facts.condition]) in varying
    if name == "_to_copy":
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        is_varying = is_varying and before.is_floating_point() and not after.is_floating_point()
    return facts.nonsmooth if is_varying else None
