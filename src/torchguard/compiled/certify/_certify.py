"""Run the layers of a certificate on a compiled function."""

import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import torchguard
from torchguard._progress import progress_line
from torchguard.compiled._executables import precision
from torchguard.compiled._save import graph_hash
from torchguard.compiled.certify._certificate import Certificate, Claim, Verdict
from torchguard.compiled.certify._probe import probe_claims, random_like
from torchguard.compiled.certify.algebra import check_derivatives
from torchguard.compiled.certify.enclosure._check import enclosure_claims
from torchguard.compiled.certify.types import check_types
from torchguard.exceptions import CompileError, MissingRuleError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut


def certify(compiled: "CompiledOut", level: str, *, at: Any, seed: int) -> Certificate:
    """Check a compiled function with each layer up to a level.

    Args:
        level: the last layer that is run: "typed", "probe", "algebraic" or "enclosure".
        at: the point of the probe and enclosure layers. By default the example that the function was compiled with,
            or random numbers if it has none.
        seed: of all random numbers.
    """
    if level not in _LAYERS:
        raise CompileError(f"certify: level is one of {', '.join(_LAYERS)}, not {level!r}.")
    point, names = _point(compiled, at, seed), list(_LAYERS)
    claims = []
    with progress_line() as show:
        for name in names[: names.index(level) + 1]:
            show(f"certify {compiled.name}: {name} layer")
            claims += _LAYERS[name](compiled, point, seed)
    return Certificate(
        compiled.name,
        level,
        seed,
        graph_hash(compiled.graphs.forward),
        _point_hash(point),
        tuple(f"{leaf.name}: {leaf.in_full()}" for leaf in compiled.leaves),
        tuple(sorted(_versions().items())),
        tuple(sorted(_flags(compiled).items())),
        tuple(map(str, compiled.nonsmooth_points)),
        tuple(claims),
    )


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version(), "torchguard": torchguard.__version__}


def _flags(compiled: "CompiledOut") -> dict[str, str]:
    """The settings of the function and of torch that its results may depend on."""
    leaves = compiled.leaves
    devices = {str(leaf.device): leaf.device for leaf in leaves if leaf.device.type != "cpu"}
    return {
        "backend": compiled.backend,
        "grad by": ",".join(leaf.name for leaf in leaves if leaf.differentiable),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        **{f"convolution precision on {name}": precision("convolution", device) for name, device in devices.items()},
        **{f"fallback for {kind}": backend for kind, backend in compiled.fallbacks.items()},
    }


def _point(compiled: "CompiledOut", at: Any, seed: int) -> tuple[Tensor, ...]:
    if at is not None:
        return compiled.point_at(at)
    if compiled.examples is not None:
        return compiled.examples
    values = random_like(compiled.leaves, seed)
    return tuple(value if value.is_floating_point() else torch.zeros_like(value) for value in values)


def _point_hash(point: Sequence[Tensor]) -> str:
    """A hash of the bits of all numbers of a point."""
    digest = hashlib.sha256()
    for leaf in point:
        digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        digest.update(leaf.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _type_claims(compiled: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    yield check_types(compiled.graphs.forward, compiled.leaves)


def _algebraic_claims(compiled: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    graphs: dict[str, GraphModule | None] = {}
    for kind in ("jvp", "vjp", "hvp"):
        try:
            graphs[kind] = compiled.graphs[kind]
        except (MissingRuleError, CompileError) as error:
            graphs[kind] = None
            yield Claim("algebraic", kind, Verdict.INCONCLUSIVE, f"The function has no {kind}: {error}")
    differentiable = [leaf.differentiable for leaf in compiled.leaves]
    yield from check_derivatives(
        compiled.graphs.forward,
        graphs["jvp"],
        graphs["vjp"],
        hvp=graphs["hvp"],
        differentiable=differentiable,
        seed=seed,
    )


# In the order of the levels: a level includes those before it.
_LAYERS: dict[str, Callable[["CompiledOut", tuple[Tensor, ...], int], Iterator[Claim]]] = {
    "typed": _type_claims,
    "probe": probe_claims,
    "algebraic": _algebraic_claims,
    "enclosure": enclosure_claims,
}
