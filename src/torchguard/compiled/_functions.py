"""Compiled functions: traced once, then evaluated and differentiated as often as needed.

Every derivative is probed where it is first used: its code has to satisfy the adjoint identity <Jv, w> = <v, J'w> at
that point. If it does not, a safer backend compiles the derivative again.
"""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph

from torchguard._graphs.listing import Line, lines_of, listing_of, short_dtype
from torchguard._pytrees import PytreeSpec
from torchguard._torch import tensors
from torchguard._torch.fakes import TRACING_LOCK, with_tracing_lock
from torchguard.compiled._derivatives import NonsmoothPoint, cotangent_types, nonsmooth_points_of, tangent_types
from torchguard.compiled._dynamic_shapes import SymbolicExecutables, SymbolicProgram, trace_symbolically
from torchguard.compiled._executables import CompiledCode, Executables, ProgramGraphs
from torchguard.compiled._leaves import (
    LeafType,
    TangentSpec,
    check_leaves,
    dynamic_sizes,
    matcher,
    with_sizes,
)
from torchguard.compiled._save import save
from torchguard.compiled._trace import Program
from torchguard.compiled.certify import _probe
from torchguard.compiled.certify._certificate import Certificate
from torchguard.compiled.certify._certify import certify
from torchguard.exceptions import CompiledFunctionWarning, CompileError, LeafTypeError

# From a flat sequence, one entry for each leaf, to the structure in which the caller passed the leaves.
Unflatten: TypeAlias = Callable[[Sequence[Any]], Any]
_PROBES_EACH_CALL = 8


@dataclass(frozen=True)
class CallStructure:
    """The structure of the arguments, None if they are flat, and of the results, which tracing determines."""

    arguments: PytreeSpec | None
    results: Callable[[], PytreeSpec]


class CompiledOut:
    """A function compiled to a static graph. It changes nothing it is given, and its results share no memory.

    `x` and `dx` are the tuple of the function's arguments, or the flat tuple of all its leaves, or the tensor itself if
    there is only one. Gradients have the structure of `x`, with None for leaves that are not differentiable. `w` is a
    cotangent, of the structure of the results. Made by `compile_out`.
    """

    kind = "out"  # in files

    @with_tracing_lock
    def __init__(
        self,
        program: Program,
        signature: CallStructure,
        *,
        backend: str = "inductor",
        probe: bool = True,
        examples: tuple[Tensor, ...] | None = None,
        parent: "CompiledOut | None" = None,
        sizes: dict[str, int] | None = None,
        symbolic: SymbolicProgram | None = None,
    ) -> None:
        self.program, self.signature, self._probe, self.examples = program, signature, probe, examples
        self._sizes = sizes or dynamic_sizes(program.leaves, [leaf.fake() for leaf in program.leaves])
        self.graphs = ProgramGraphs(program)
        # The results of this trace: at another size, the function may return another structure.
        self.results = parent.results if parent and symbolic else signature.results()
        self._check_results()
        if parent is None and self._sizes:
            symbolic = trace_symbolically(self.graphs, self._sizes, signature.results, backend)
        self._symbolic = symbolic
        self._executables = (
            SymbolicExecutables(self.graphs, backend, symbolic, self._sizes)
            if symbolic
            else Executables(self.graphs, backend)
        )
        self._matches = matcher(program.leaves)
        self._output_count = len(self.graphs.outputs)
        self._all_differentiable = all(program.differentiable)
        self._codes: dict[str, CompiledCode] = {}
        self._attempts: dict[str, int] = {}
        own: dict[tuple[int, ...], CompiledOut] = {tuple(self._sizes.values()): self}
        self._by_size = parent._by_size if parent else own
        self.fallbacks: dict[str, str] = parent.fallbacks if parent else {}
        types, inputs = tuple(tangent_types(program)), tuple(program.differentiable)
        self.tangents = TangentSpec(self.name, "tangent", types, inputs, signature.arguments, matcher(types))
        types = tuple(cotangent_types(self.graphs.outputs))
        outputs = tuple(value.is_floating_point() for value in self.graphs.outputs)
        self.cotangents = TangentSpec(self.name, "cotangent", types, outputs, self.results, matcher(types))

    # Description.

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def backend(self) -> str:
        return self._executables.backend

    @property
    def leaves(self) -> tuple[LeafType, ...]:
        return self.program.leaves

    @property
    def graph(self) -> Graph:
        """The forward graph: its placeholders are the leaves, and its operations are functional ATen ones."""
        return self.graphs.forward.graph

    @property
    def nodes(self) -> tuple[Line, ...]:
        """The operations of the forward graph in order, each with its type and source line."""
        return lines_of(self.graphs.forward)

    @property
    def nonsmooth_points(self) -> tuple[NonsmoothPoint, ...]:
        """The operations that are not smooth everywhere, and the derivative that torch returns there."""
        return nonsmooth_points_of(self.graphs.forward)

    def listing(self, kind: str = "forward") -> str:
        """A graph as text, one operation a line, with shapes, dtypes and source lines."""
        return listing_of(self.graphs[kind], self.name if kind == "forward" else f"{kind} of {self.name}")

    def __str__(self) -> str:
        return self.listing()

    def __repr__(self) -> str:
        leaves = ", ".join(f"{leaf.name}: {leaf}" for leaf in self.leaves)
        return f"{type(self).__name__}({self.name}({leaves}), backend={self.backend!r})"

    # Evaluation.

    def forward(self, *x: Any) -> Any:
        """The value at x."""
        sized, leaves, _ = self._flatten(x)
        return sized.results.unflatten(sized._executables["forward"]([*leaves]))

    __call__ = forward

    def jvp(self, x: Any, dx: Any) -> tuple[Any, Any]:
        """The value at x, and its directional derivative along dx."""
        sized, leaves, _ = self._flatten(x)
        (run,) = (sized._codes.get("jvp") or sized._code("jvp", leaves)).runs
        found, n = run([*leaves, *sized.tangents.flatten(dx)]), sized._output_count
        return sized.results.unflatten(found[:n]), sized._output_tangents(found[n:])

    def vjp_with_seed(self, x: Any, w: Any) -> Any:
        """The gradients of <w, f(x)>; a leaf that is not used gets zeros."""
        return self.value_and_vjp(x, w)[1]

    def value_and_vjp(self, x: Any, w: Any) -> tuple[Any, Any]:
        """The value at x and the gradients of <w, f(x)>, in one run."""
        sized, leaves, unflatten = self._flatten(x)
        (run,) = (sized._codes.get("vjp") or sized._code("vjp", leaves)).runs
        found, n = run([*leaves, *sized.cotangents.flatten(w)]), sized._output_count
        return sized.results.unflatten(found[:n]), unflatten(sized._insert_none(found[n:]))

    def vjp(self, x: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The value at x, and a function from cotangents to gradients that does not evaluate the value again."""
        sized, leaves, unflatten = self._flatten(x)
        code = sized._codes.get("vjp_split") or sized._code("vjp_split", leaves)
        outputs, residuals, versions = sized._run_first(code, leaves)

        # Looked up once: a pullback of a small function takes 17 us, and each lookup counts.
        is_unchanged, flatten, insert_none = tensors.is_unchanged, sized.cotangents.flatten, sized._insert_none
        second = code.runs[1]

        def pullback(w: Any) -> Any:
            if not is_unchanged(versions):
                raise sized._mutation_error()
            return unflatten(insert_none(second([*residuals, *flatten(w)])))

        return sized.results.unflatten(outputs), pullback

    def linearize(self, x: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The value at x, and a function from tangents of x to those of the value that does not evaluate it again."""
        sized, leaves, _ = self._flatten(x)
        code = sized._codes.get("jvp_split") or sized._code("jvp_split", leaves)
        outputs, residuals, versions = sized._run_first(code, leaves)

        def pushforward(dx: Any) -> Any:
            if not tensors.is_unchanged(versions):
                raise sized._mutation_error()
            return sized._output_tangents(code.runs[1]([*residuals, *sized.tangents.flatten(dx)]))

        return sized.results.unflatten(outputs), pushforward

    def hvp(self, x: Any, dx: Any, w: Any) -> Any:
        """The directional derivative along dx of the gradients of <w, f(x)>."""
        sized, leaves, unflatten = self._flatten(x)
        (run,) = (sized._codes.get("hvp") or sized._code("hvp", leaves)).runs
        found = run([*leaves, *sized.tangents.flatten(dx), *sized.cotangents.flatten(w)])
        return unflatten(sized._insert_none(found))

    def certify(self, level: str = "algebraic", *, at: Any = None, seed: int = 0) -> Certificate:
        """Check the compiled code and its derivatives, layer by layer, and record the result of each check.

        Args:
            level: the last layer to check: "typed", "probe", "algebraic" or "enclosure".
            at: the point to check at; by default the example.
            seed: of the random numbers that the checks use.
        """
        return certify(self, level, at=at, seed=seed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the forward graph to a JSON file, which `load` reads."""
        save(self, path)

    # For the rest of the package: flat leaves in, flat tensors out.

    def point_at(self, x: Any) -> tuple[Tensor, ...]:
        """The leaves of a point, which has to have the sizes of the example."""
        sized, leaves, _ = self._flatten(x)
        if sized is not self:
            raise CompileError(
                f"{self.name}: expected a point of the example's sizes {list(self._sizes.values())}, "
                f"got {list(sized._sizes.values())}. Compile with an example of that size."
            )
        return tuple(leaves)

    def value_at(self, point: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._executables["forward"]([*point])

    def code_at(self, kind: str, point: Sequence[Tensor]) -> Callable[[list[Any]], Sequence[Tensor]]:
        """Code in one part for "forward", "jvp", "vjp" or "hvp", probed at a point."""
        if kind == "forward":
            return self._executables["forward"]
        return (self._codes.get(kind) or self._code(kind, point)).runs[0]

    def derivative_at(self, kind: str, point: Sequence[Tensor], v: Any, w: Any) -> list[Tensor]:
        """What the code for "jvp", "vjp", "hvp", or "vjp_split" returns for tangents v and cotangents w."""
        code = self._codes.get(kind) or self._code(kind, point)
        return _probe.run_derivative(self.graphs, kind, code, point, v, w)

    # Implementation.

    def _flatten(self, x: Any) -> tuple["CompiledOut", Sequence[Tensor], Unflatten]:
        """The function compiled for the sizes of x, the leaves of x, and how to return the structure of x."""
        if type(x) is tuple and self._matches(x):
            return self, x, tuple
        return self._flatten_slowly(x)

    def _flatten_slowly(self, x: Any) -> tuple["CompiledOut", Sequence[Tensor], Unflatten]:
        unflatten: Unflatten = list if type(x) is list else tuple
        arguments = self.signature.arguments
        if isinstance(x, Tensor):
            x, unflatten = (x,), _only
        if not isinstance(x, (tuple, list)):
            raise LeafTypeError(f"{self.name}: x: expected the tuple of its arguments, got {type(x).__name__}.")
        if arguments is not None and not all(isinstance(leaf, Tensor) for leaf in x):
            x, unflatten = arguments.flatten(tuple(x), self.name), arguments.unflatten
        check_leaves(self.leaves, x, self.name)
        sizes = dynamic_sizes(self.leaves, x)
        return self._by_size.get(tuple(sizes.values())) or self._at_sizes(sizes), x, unflatten

    @with_tracing_lock
    def _at_sizes(self, sizes: dict[str, int]) -> "CompiledOut":
        """This function for other sizes of its dynamic dims, from the symbolic graph if it is valid there."""
        key = tuple(sizes.values())
        if key not in self._by_size:
            symbolic = self._symbolic if self._symbolic and self._symbolic.is_valid_at(sizes) else None
            leaves = tuple(with_sizes(leaf, sizes) for leaf in self.leaves)
            self._by_size[key] = type(self)(
                symbolic.at(sizes) if symbolic else replace(self.program, leaves=leaves),
                self.signature,
                backend=self.backend,
                probe=self._probe,
                parent=self,
                sizes=sizes,
                symbolic=symbolic,
            )
        return self._by_size[key]

    def _check_results(self) -> None:
        """Raise if the results are not those of this kind of function."""

    def _run_first(self, code: CompiledCode, leaves: Sequence[Tensor]) -> tuple[Any, list[Any], tensors.Versions]:
        """The outputs, the residuals, and the versions of the leaves and of what the residuals share memory with."""
        found, split = code.runs[0]([*leaves]), code.split
        assert split is not None
        outputs = found[: self._output_count]
        residuals = split.collect(leaves, outputs, found[self._output_count :])
        shared = [leaves[i] if where == "leaf" else outputs[i] for where, i in split.shared]
        for tensor in shared:
            if tensor.is_inference():  # it has no version counter, so a change could not be detected
                copies = [tensors.copied(one) if isinstance(one, Tensor) else one for one in residuals]
                return outputs, copies, tensors.versions_of([leaf for leaf in leaves if not leaf.is_inference()])
        # All leaves, also those that no residual shares memory with: what raises must not depend on the code.
        rest = [leaf for leaf in leaves if not leaf.is_inference()]
        return outputs, residuals, tensors.versions_of([*rest, *shared])

    def _mutation_error(self) -> CompileError:
        return CompileError(
            f"{self.name}: a leaf or output was changed in place after the value was computed. Change a copy instead."
        )

    def _insert_none(self, gradients: Sequence[Tensor]) -> Sequence[Any]:
        """Gradients with None for the leaves that are not differentiable."""
        if self._all_differentiable:
            return gradients
        queue = iter(gradients)
        return [next(queue) if is_own else None for is_own in self.program.differentiable]

    def _output_tangents(self, tangents: Sequence[Tensor]) -> Any:
        queue = iter(tangents)
        return self.results.unflatten([next(queue) if is_own else None for is_own in self.cotangents.differentiable])

    def _code(self, kind: str, leaves: Sequence[Tensor]) -> CompiledCode:
        """Code for a derivative, probed at these leaves unless it was before."""
        with TRACING_LOCK:
            return self._codes.get(kind) or self._probed_code(kind, leaves)

    def _probed_code(self, kind: str, leaves: Sequence[Tensor]) -> CompiledCode:
        base, first = kind.partition("_")[0], self._executables.code(kind)
        choice: _probe.Choice | None = _probe.Choice(first, self.backend)
        if self._probe and not self._executables.is_probed(first) and not self.graphs.is_zero(base):
            choice = _probe.choose_code(self._executables, kind, leaves) if self._is_probe_due(kind) else None
        if choice is None:
            return first  # probe at a later point
        if choice.failed:
            self._executables.reject(kind)
            for other in self._by_size.values():
                if other._codes.get(kind) is first:
                    del other._codes[kind]
            self.fallbacks[kind] = choice.backend
            self._warn(base, choice)
        else:
            self._executables.mark_probed(first)
        self._codes[kind] = choice.code
        return choice.code

    def _is_probe_due(self, kind: str) -> bool:
        """Whether to probe in this call: in the first 8 calls, then at every power of two."""
        attempts = self._attempts[kind] = self._attempts.get(kind, 0) + 1
        return attempts <= _PROBES_EACH_CALL or attempts & (attempts - 1) == 0

    def _warn(self, base: str, choice: _probe.Choice) -> None:
        failed, used = choice.failed, choice.backend
        what = f"{self.name}: the {base} compiled with {', and with '.join(failed)} fails the adjoint identity here"
        eager_fails = "eager mode fails it too: a rule is wrong, or rounding is large"
        then = eager_fails if used in failed else f"{used} is used instead"
        warnings.warn(f"{what}; {then}.", CompiledFunctionWarning, stacklevel=6)


class CompiledScalar(CompiledOut):
    """A compiled function whose result is one number. Made by `compile_scalar`."""

    kind = "scalar"

    def _check_results(self) -> None:
        outputs = self.graphs.outputs
        if len(outputs) != 1 or outputs[0].shape != () or not outputs[0].is_floating_point():
            got = ", ".join(f"{short_dtype(value.dtype)}{list(value.shape)}" for value in outputs)
            raise CompileError(
                f"compile_scalar: {self.name}: expected one float of shape [] as result, got {got}. Use compile_out."
            )

    @functools.cached_property
    def _one(self) -> Tensor:
        (cotangent,) = self.cotangents.types
        return torch.ones((), dtype=cotangent.dtype, device=cotangent.device)

    def backward(self, x: Any) -> Any:
        """The gradients at x."""
        return self.value_and_grad(x)[1]

    def backward_with_seed(self, x: Any, s: Any) -> Any:
        """The gradients at x, times s."""
        return self.value_and_vjp(x, s)[1]

    def value_and_grad(self, x: Any) -> tuple[Any, Any]:
        """The value and the gradients at x, in one run."""
        return self.value_and_vjp(x, self._one)

    def hvp(self, x: Any, dx: Any, w: Any = 1.0) -> Any:
        """The Hessian at x times dx."""
        return super().hvp(x, dx, w)


def _only(values: Sequence[Any]) -> Any:
    return values[0]
