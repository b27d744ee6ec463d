"""Compiled functions: made once, then evaluated, pushed forward and pulled back as often as needed.

Tangents and seeds: what a derivative is applied to, checked and laid out as its code takes it.
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

from torchguard._torch import tensors
from torchguard._torch.fakes import TRACING_LOCK, with_tracing_lock
from torchguard.compiled._dynamic_shapes import Shared, SharingExecutables, shared
from torchguard.compiled._executables import SAFER, Code, Executables, Graphs
from torchguard.compiled._leaves import LeafType, check_all, fits, short_name, sized, sizes_of
from torchguard.compiled._listing import Kink, Line, kinks_of, lines_of, listing_of
from torchguard.compiled._nesting import Nest
from torchguard.compiled._save import save
from torchguard.compiled._trace import Program, seed_types, tangent_types
from torchguard.compiled.certify import _adjoint
from torchguard.compiled.certify._certificate import Certificate, certify
from torchguard.exceptions import CompiledFunctionWarning, CompileError, LeafTypeError


@dataclass(frozen=True)
class Directions:
    """Tangents or seeds: one for each of some values that is differentiable, in the layout the code was made for."""

    what: str
    types: tuple[LeafType, ...]
    chosen: tuple[bool, ...]
    nest: Nest | None
    fit: Callable[[tuple[Any, ...]], bool]

    def open(self, given: Any) -> tuple[Any, ...]:
        """What the code takes, from one tensor, a flat tuple, or what is nested as the values are."""
        flat = given if type(given) is tuple else (given,)
        return flat if self.fit(flat) else self._open_slowly(given)

    def _open_slowly(self, given: Any) -> tuple[Any, ...]:
        count = len(self.chosen)
        if (
            isinstance(given, (tuple, list))
            and len(given) == count
            and all(isinstance(one, Tensor | None) for one in given)
        ):
            values = list(given)
        elif count == 1 and isinstance(given, (Tensor, int, float)):
            values = [given]
        elif self.nest is None:
            raise LeafTypeError(f"{self.what}: expected a tuple of {count} tensors, got {type(given).__name__}.")
        else:
            values = self.nest.take_apart(given, self.what)
        values = [value for value, is_chosen in zip(values, self.chosen, strict=True) if is_chosen or value is not None]
        if len(values) != len(self.types):
            raise LeafTypeError(f"{self.what}: pass None for what is not differentiable.")
        values = [_laid_out(value, leaf) for value, leaf in zip(values, self.types, strict=True)]
        check_all(self.types, values, self.what)
        return tuple(values)


def _laid_out(value: Any, leaf: LeafType) -> Any:
    """A tangent or seed with the strides the code was made for; it is a direction, so a copy will do."""
    if isinstance(value, (int, float)) and leaf.shape == ():
        return torch.full((), value, dtype=leaf.dtype, device=leaf.device)
    if isinstance(value, Tensor) and value.shape == leaf.shape and (value.stride() != leaf.stride or value.is_neg()):
        laid = torch.empty_strided(leaf.shape, leaf.stride, dtype=value.dtype, device=value.device)
        return laid.copy_(value.detach())
    return value


Close: TypeAlias = Callable[[Sequence[Any]], Any]
_PROBES_EACH_CALL = 8


@dataclass(frozen=True)
class Signature:
    """How what is passed and what is returned is nested. Of arguments, None says that they are flat."""

    arguments: Nest | None
    results: Callable[[], Nest]


class CompiledOut:
    """A function compiled to a static graph. Nothing it is given is changed, and nothing it returns is shared.

    `x` and `dx` are the tuple of the function's arguments, or of all its leaves; the tensor itself where there is only
    one. What comes back is nested as `x` is, with None at leaves that are not differentiable. Made by `compile_out`.
    """

    kind = "out"  # in files

    @with_tracing_lock
    def __init__(
        self,
        program: Program,
        signature: Signature,
        *,
        backend: str = "inductor",
        probe: bool = True,
        examples: tuple[Tensor, ...] | None = None,
        of: "CompiledOut | None" = None,
        sizes: dict[str, int] | None = None,
        serving: Shared | None = None,
    ) -> None:
        self._program, self._signature, self._probe, self.examples = program, signature, probe, examples
        self._sizes = sizes or sizes_of(program.leaves, [leaf.fake() for leaf in program.leaves])
        self.graphs = Graphs(program)
        # Those of this trace: at another size, or run again, it may nest them in another way.
        self.results = of.results if of and serving else signature.results()
        self._check_results()
        if of is None and self._sizes:
            serving = shared(self.graphs, self._sizes, signature.results, backend)
        self._shared = serving
        self._executables = (
            SharingExecutables(self.graphs, backend, self._shared, self._sizes)
            if self._shared
            else Executables(self.graphs, backend)
        )
        self._fits = fits(program.leaves)
        self._count = len(self.graphs.outputs)
        self._is_all = all(program.differentiable)
        self._ready: dict[str, Code] = {}
        self._tries: dict[str, int] = {}
        self._by_size: dict[tuple[int, ...], CompiledOut] = of._by_size if of else {tuple(self._sizes.values()): self}
        self.healed: dict[str, str] = of.healed if of else {}
        tangents, seeds = tuple(tangent_types(program)), tuple(seed_types(self.graphs.outputs))
        smooth = tuple(value.is_floating_point() for value in self.graphs.outputs)
        own = tuple(program.differentiable)
        self._tangents = Directions(f"{self.name}: tangent", tangents, own, signature.arguments, fits(tangents))
        self._seeds = Directions(f"{self.name}: seed", seeds, smooth, self.results, fits(seeds))

    # What it is.

    @property
    def name(self) -> str:
        return self._program.name

    @property
    def backend(self) -> str:
        return self._executables.backend

    @property
    def leaves(self) -> tuple[LeafType, ...]:
        return self._program.leaves

    @property
    def graph(self) -> Graph:
        """The forward graph: the leaves are its placeholders, and its operations are functional ATen ones."""
        return self.graphs.forward.graph

    @property
    def nodes(self) -> tuple[Line, ...]:
        """The operations of the forward graph in order, each with its type and the line it comes from."""
        return lines_of(self.graphs.forward)

    @property
    def kinks(self) -> tuple[Kink, ...]:
        """The operations that are not smooth everywhere, and what their derivative is taken to be there."""
        return kinks_of(self.graphs.forward)

    def listing(self, kind: str = "forward") -> str:
        """A graph as text, one operation a line, with shapes, dtypes and source lines."""
        return listing_of(self.graphs[kind], self.name if kind == "forward" else f"{kind} of {self.name}")

    def __str__(self) -> str:
        return self.listing()

    def __repr__(self) -> str:
        leaves = ", ".join(f"{leaf.name}: {leaf}" for leaf in self.leaves)
        return f"{type(self).__name__}({self.name}({leaves}), backend={self.backend!r})"

    # What it does.

    def forward(self, *x: Any) -> Any:
        """The value at x."""
        own, leaves, _ = self._open(x)
        return own.results.put_together(own._executables["forward"]([*leaves]))

    __call__ = forward

    def jvp(self, x: Any, dx: Any) -> tuple[Any, Any]:
        """The value at x, and its derivative in the direction dx."""
        own, leaves, _ = self._open(x)
        (run,) = (own._ready.get("jvp") or own._prepare("jvp", leaves)).runs
        found = run([*leaves, *own._tangents.open(dx)])
        return own.results.put_together(found[: own._count]), own._pushed(found[own._count :])

    def vjp_with_seed(self, x: Any, w: Any) -> Any:
        """The gradients of <w, f(x)>; an unused leaf gets zeros."""
        return self.value_and_vjp(x, w)[1]

    def value_and_vjp(self, x: Any, w: Any) -> tuple[Any, Any]:
        """The value at x and the gradients of <w, f(x)>, in one run."""
        own, leaves, close = self._open(x)
        (run,) = (own._ready.get("vjp") or own._prepare("vjp", leaves)).runs
        found = run([*leaves, *own._seeds.open(w)])
        return own.results.put_together(found[: own._count]), close(own._spread(found[own._count :]))

    def vjp(self, x: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The value at x, and a function from seeds to gradients that does not evaluate the value again."""
        own, leaves, close = self._open(x)
        code = own._ready.get("vjp_split") or own._prepare("vjp_split", leaves)
        outputs, residuals, kept = own._first(code, leaves)

        # Looked up once: a seed through a small function takes 17 us, and each lookup counts.
        is_unchanged, open_seeds, spread, second = tensors.is_unchanged, own._seeds.open, own._spread, code.runs[1]

        def pullback(w: Any) -> Any:
            if not is_unchanged(kept):
                raise own._changed()
            return close(spread(second([*residuals, *open_seeds(w)])))

        return own.results.put_together(outputs), pullback

    def linearize(self, x: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The value at x, and a function from tangents to tangents of the outputs that does not evaluate it again."""
        own, leaves, _ = self._open(x)
        code = own._ready.get("jvp_split") or own._prepare("jvp_split", leaves)
        outputs, residuals, kept = own._first(code, leaves)

        def pushforward(dx: Any) -> Any:
            if not tensors.is_unchanged(kept):
                raise own._changed()
            return own._pushed(code.runs[1]([*residuals, *own._tangents.open(dx)]))

        return own.results.put_together(outputs), pushforward

    def hvp(self, x: Any, dx: Any, w: Any) -> Any:
        """The derivative of the gradients of <w, f(x)> in the direction dx."""
        own, leaves, close = self._open(x)
        (run,) = (own._ready.get("hvp") or own._prepare("hvp", leaves)).runs
        return close(own._spread(run([*leaves, *own._tangents.open(dx), *own._seeds.open(w)])))

    def certify(self, level: str = "algebraic", *, at: Any = None, seed: int = 0) -> Certificate:
        """Check the compiled code and its derivatives, layer by layer, and write down what was found.

        Args:
            level: how far to go: "typed", "probe", "algebraic" or "enclosure".
            at: the point to check at; the example otherwise.
        """
        return certify(self, level, at=at, seed=seed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the forward graph to a JSON file, which `load` reads."""
        save(self, path)

    # For the rest of the package: flat leaves in, flat tensors out.

    @property
    def program(self) -> Program:
        return self._program

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def directions(self) -> tuple[Directions, Directions]:
        """What tangents and seeds have to be."""
        return self._tangents, self._seeds

    def point_at(self, x: Any) -> tuple[Tensor, ...]:
        """The leaves of a point of the size this was compiled for."""
        own, leaves, _ = self._open(x)
        if own is not self:
            raise CompileError(f"{self.name}: the point has another size than the example. Compile for that size.")
        return tuple(leaves)

    def value_at(self, point: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._executables["forward"]([*point])

    def derivative_at(self, kind: str, point: Sequence[Tensor], v: Any, w: Any) -> list[Tensor]:
        """What the code for "jvp", "vjp", or "vjp_split" returns for tangents v and seeds w."""
        code = self._ready.get(kind) or self._prepare(kind, point)
        return _adjoint.derivative_by(self.graphs, kind, code, point, v, w)

    # How it is done.

    def _open(self, x: Any) -> tuple["CompiledOut", Sequence[Tensor], Close]:
        """The code that fits a point, its flat leaves, and how to nest what comes back."""
        if type(x) is tuple and self._fits(x):
            return self, x, tuple
        return self._open_slowly(x)

    def _open_slowly(self, x: Any) -> tuple["CompiledOut", Sequence[Tensor], Close]:
        close: Close = list if type(x) is list else tuple
        nest = self._signature.arguments
        if isinstance(x, Tensor):
            x, close = (x,), _only
        if not isinstance(x, (tuple, list)):
            raise LeafTypeError(f"{self.name}: x is a {type(x).__name__}. Pass the tuple of its arguments.")
        if nest is not None and not all(isinstance(leaf, Tensor) for leaf in x):
            x, close = nest.take_apart(tuple(x), self.name), nest.put_together
        check_all(self.leaves, x, self.name)
        sizes = sizes_of(self.leaves, x)
        return self._by_size.get(tuple(sizes.values())) or self._of_size(sizes), x, close

    @with_tracing_lock
    def _of_size(self, sizes: dict[str, int]) -> "CompiledOut":
        """This function for other sizes of its dynamic dims: of the graph, where it holds, or else traced for them."""
        key = tuple(sizes.values())
        if key not in self._by_size:
            serving = self._shared if self._shared and self._shared.holds_at(sizes) else None
            leaves = tuple(sized(leaf, sizes) for leaf in self.leaves)
            program = serving.at(sizes) if serving else replace(self._program, leaves=leaves)
            self._by_size[key] = type(self)(
                program,
                self._signature,
                backend=self.backend,
                probe=self._probe,
                of=self,
                sizes=sizes,
                serving=serving,
            )
        return self._by_size[key]

    def _check_results(self) -> None:
        """Raise where the results are not what this kind of function returns."""

    def _first(self, code: Code, leaves: Sequence[Tensor]) -> tuple[Any, list[Any], tensors.Versions]:
        """The outputs, the residuals, and the versions of those tensors the caller could change them through."""
        found, split = code.runs[0]([*leaves]), code.split
        assert split is not None
        outputs = found[: self._count]
        residuals = split.found(leaves, outputs, found[self._count :])
        shared = [leaves[i] if where == "leaf" else outputs[i] for where, i in split.shared]
        for tensor in shared:
            if tensor.is_inference():  # these have no versions: nothing would tell that one was changed
                copies = [tensors.copied(one) if isinstance(one, Tensor) else one for one in residuals]
                return outputs, copies, []
        return outputs, residuals, tensors.versions_of(shared)

    def _changed(self) -> CompileError:
        return CompileError(
            f"{self.name}: a leaf or output was changed in place after the value was computed. Copy it."
        )

    def _spread(self, gradients: Sequence[Tensor]) -> Sequence[Any]:
        if self._is_all:
            return gradients
        queue = iter(gradients)
        return [next(queue) if is_own else None for is_own in self._program.differentiable]

    def _pushed(self, tangents: Sequence[Tensor]) -> Any:
        queue = iter(tangents)
        return self.results.put_together([next(queue) if smooth else None for smooth in self._seeds.chosen])

    def _prepare(self, kind: str, leaves: Sequence[Tensor]) -> Code:
        """Code for a derivative, probed where it is first used, and made again in another way where it is wrong."""
        with TRACING_LOCK:
            return self._ready.get(kind) or self._probed(kind, leaves)

    def _probed(self, kind: str, leaves: Sequence[Tensor]) -> Code:
        base = kind.partition("_")[0]
        code, used = self._executables.code(kind), self.backend
        first = code
        wrong: list[str] = []
        is_done = not self._probe or self._executables.is_trusted(code) or self.graphs.is_zero(base)
        if not is_done and not self._is_due(kind):
            return code
        while not is_done:
            gap = _adjoint.gap_at(self.graphs, kind, code, leaves)
            if not gap.tells and not wrong:
                return code
            if gap.is_small:
                break
            wrong.append(used)
            if len(wrong) > len(SAFER[self.backend]):
                break
            used = SAFER[self.backend][len(wrong) - 1]
            code = Executables(self.graphs, used).code(kind)
        if wrong:
            self._executables.distrust(kind)
            for other in self._by_size.values():
                if other._ready.get(kind) is first:
                    del other._ready[kind]
            self.healed[kind] = used
            self._warn(base, wrong, used)
        else:
            self._executables.trust(code)
        self._ready[kind] = code
        return code

    def _is_due(self, kind: str) -> bool:
        """Whether to probe: until a point tells something. If none does for long, ever more rarely."""
        tries = self._tries[kind] = self._tries.get(kind, 0) + 1
        return tries <= _PROBES_EACH_CALL or tries & (tries - 1) == 0

    def _warn(self, base: str, wrong: Sequence[str], used: str) -> None:
        what = f"{self.name}: the {base} compiled with {', and with '.join(wrong)} fails the adjoint identity here"
        then = (
            "eager mode fails it too: a rule is wrong, or rounding is large"
            if used in wrong
            else f"{used} is used instead"
        )
        warnings.warn(f"{what}; {then}.", CompiledFunctionWarning, stacklevel=6)


class CompiledScalar(CompiledOut):
    """A compiled function with one number as its result. Made by `compile_scalar`."""

    kind = "scalar"

    def _check_results(self) -> None:
        outputs = self.graphs.outputs
        if len(outputs) != 1 or outputs[0].shape != () or not outputs[0].is_floating_point():
            got = ", ".join(f"{short_name(value.dtype)}{list(value.shape)}" for value in outputs)
            raise CompileError(
                f"compile_scalar: {self.name} returns {got}, not one number of shape []. Use compile_out."
            )

    @functools.cached_property
    def _one(self) -> Tensor:
        (seed,) = self._seeds.types
        return torch.ones((), dtype=seed.dtype, device=seed.device)

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
