"""`compile_out` and `compile_scalar`: from a function or module and example arguments to a compiled function.

A module may store a tensor of its run as an attribute or in a container, and the graph would not show it. So the
attributes and containers of a module are compared before and after tracing, and restored.
"""

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from torchguard._graphs.source_lines import definition_line
from torchguard._pytrees import PytreeSpec, flatten_tensors
from torchguard._torch import tensors
from torchguard._torch.fakes import with_tracing_lock
from torchguard.compiled._functions import CallStructure, CompiledOut, CompiledScalar
from torchguard.compiled._leaves import select_leaves, type_of, with_dynamic
from torchguard.compiled._trace import Program, with_random_leaves
from torchguard.exceptions import ImpureFunctionError

_CONTAINERS = (list, dict, set, deque)
_ARGUMENT = ("compile: argument ", "Pass a tensor, or bind it with functools.partial.")
Made = TypeVar("Made", bound=CompiledOut)


def compile_out(
    f: Callable[..., Any],
    *example: Any,
    dynamic: Mapping[Any, Any] | None = None,
    nondiff: Sequence[Any] = (),
    backend: str = "inductor",
    lift_rng: bool = False,
    probe: bool = True,
) -> CompiledOut:
    """Compile a pure function of tensors, or of pytrees of them.

    A module is compiled as a function of its state, a dict of its parameters and buffers by name, and its arguments.

    Args:
        example: arguments with the shapes, dtypes, devices and strides to compile for.
        dynamic: dims that may have other sizes later, by leaf: `{"x": 0}`, or `{"x": {0: "batch"}, "y": {0: "batch"}}`
            for dims that have to agree. The function runs once more, with symbols for these sizes. That graph serves
            every size for which its assumptions hold; other sizes are traced when they are first used.
        nondiff: leaves not to differentiate with respect to, by name or position. Integers, bools and buffers never are
            differentiable.
        backend: "inductor", "aot_eager" or "eager".
        lift_rng: replace the random numbers that the function draws by additional leaves, after the others.
        probe: whether to test each derivative where it is first used.

    >>> import torchguard.compiled
    >>> c = torchguard.compiled.compile_out(lambda x: x * x, torch.ones(2), backend="eager")
    >>> c.jvp(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    (tensor([1., 4.]), tensor([2., 4.]))
    """
    return _compiled(CompiledOut, f, example, dynamic, nondiff, backend, lift_rng, probe)


def compile_scalar(
    f: Callable[..., Any],
    *example: Any,
    dynamic: Mapping[Any, Any] | None = None,
    nondiff: Sequence[Any] = (),
    backend: str = "inductor",
    lift_rng: bool = False,
    probe: bool = True,
) -> CompiledScalar:
    """Compile a pure function whose result is one number. The arguments are those of `compile_out`.

    >>> import torchguard.compiled
    >>> c = torchguard.compiled.compile_scalar(lambda x: (x * x).sum(), torch.ones(2), backend="eager")
    >>> c.backward(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    return _compiled(CompiledScalar, f, example, dynamic, nondiff, backend, lift_rng, probe)


@with_tracing_lock
def _compiled(
    kind: type[Made],
    f: Callable[..., Any],
    example: tuple[Any, ...],
    dynamic: Mapping[Any, Any] | None,
    nondiff: Sequence[Any],
    backend: str,
    lift_rng: bool,
    probe: bool,
) -> Made:
    if isinstance(f, nn.Module):
        example = (state_of(f), *example)
    arguments, leaves = flatten_tensors(example, *_ARGUMENT)
    types = [type_of(leaf, name) for leaf, name in zip(leaves, _leaf_names(f, example), strict=True)]
    buffers = {name for name, _ in f.named_buffers()} if isinstance(f, nn.Module) else set()
    is_fixed = select_leaves(types, [nondiff] if isinstance(nondiff, (str, int)) else nondiff)
    types = [
        replace(leaf, differentiable=leaf.differentiable and not fixed and leaf.name not in buffers)
        for leaf, fixed in zip(types, is_fixed, strict=True)
    ]
    run, results = _flat_function(f, arguments, _name_of(f))
    program = Program(_name_of(f), run, with_dynamic(types, dynamic or {}), _line_of(f), lift_rng=lift_rng)
    if lift_rng:
        program = with_random_leaves(program)
        random = program.leaves[len(program.leaves) - program.random_leaves :]
        is_flat = random and all(isinstance(arg, Tensor) for arg in example)
        arguments = None if is_flat else flatten_tensors((*example, *(leaf.fake() for leaf in random)), *_ARGUMENT)[0]
    examples = tuple(leaf.detach() for leaf in leaves) if not program.random_leaves else None
    return kind(program, CallStructure(arguments, results), backend=backend, probe=probe, examples=examples)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name: the first argument of the function that it is compiled to."""
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


def _flat_function(
    f: Callable[..., Any], arguments: PytreeSpec, name: str
) -> tuple[Callable[..., list[Tensor]], Callable[[], PytreeSpec]]:
    """A function of flat leaves, and the structure of its results, which is known after it has run."""
    call: Any = functools.partial(_call_module, f) if isinstance(f, nn.Module) else f
    seen: list[PytreeSpec] = []

    def run(*leaves: Tensor) -> list[Tensor]:
        args = leaves if arguments.is_tuple else arguments.unflatten(leaves)
        results, flat = flatten_tensors(call(*args), f"{name}: result", "Return tensors alone.")
        seen[:] = [results]
        return flat

    return run, lambda: seen[0]


def _leaf_names(f: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """A name for each leaf: `x` or `batch['mask']`, and the name in the state dict for the state of a module."""
    is_module = isinstance(f, nn.Module)
    parameters = _parameter_names(f.forward if is_module else f, len(args) - is_module)
    names: list[str] = list(args[0]) if is_module else []
    for parameter, arg in zip(parameters, args[is_module:], strict=True):
        found, _ = tensors.flatten(arg)
        paths = tensors.leaf_paths(arg)
        names += [f"{parameter}{path}" for path, leaf in zip(paths, found, strict=True) if leaf is not None]
    return _numbered(names)


def _parameter_names(f: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # builtins have no signature
        return [f"x{i}" for i in range(count)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return named + [f"x{i}" for i in range(len(named), count)]


def _numbered(names: Sequence[str]) -> list[str]:
    """Unique names: a number is appended to repetitions. An argument may have the name of a module's parameter."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return unique


def _line_of(f: Any) -> str:
    """The source line where a function, or the `forward` of a module, is defined."""
    code = getattr(f.forward if isinstance(f, nn.Module) else f, "__code__", None)
    return definition_line(code).short if code else _name_of(f)


def _name_of(f: Any) -> str:
    return getattr(f, "__name__", type(f).__name__)


# State of modules.


@dataclass(frozen=True)
class _Snapshot:
    """The entries of a container of a module before a run. The attributes of a module are such a container too."""

    path: str
    container: Any
    before: dict[Any, Any]
    is_attributes: bool

    def changes(self) -> Iterator[tuple[str, Any]]:
        """The new values in the container, each with a description for the case that it is a tensor."""
        for key, value in _entries(self.container).items():
            if key not in self.before or self.before[key] is not value:
                attribute = f"{self.path}.{key}".lstrip(".")
                text = f"sets the attribute '{attribute}' to a tensor"
                yield text if self.is_attributes else f"puts a tensor into '{self.path}'", value

    def restore(self) -> None:
        now = _entries(self.container)
        if now.keys() == self.before.keys() and all(now[key] is value for key, value in self.before.items()):
            return
        self.container.clear()
        if isinstance(self.container, dict):
            self.container.update(self.before)
        else:
            (self.container.update if isinstance(self.container, set) else self.container.extend)(self.before.values())


def _call_module(module: nn.Module, state: Mapping[str, Tensor], *args: Any) -> Any:
    """Run a module with a state. Raise if it stores a tensor of this run, which the next run could read."""
    snapshots = [(part, one) for name, part in module.named_modules() for one in _snapshots(name, part)]
    given = dict(state)
    known = {id(value) for value in state.values()}
    try:
        result = functional_call(module, given, args)
        for part, one in snapshots:
            for what, value in one.changes():
                # A layer may store its own parameters, as recurrent layers do.
                if any(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in tensors.flatten(value)[0]):
                    raise _state_error(part, what)
    finally:
        for _, one in snapshots:
            one.restore()
    for name, value in given.items():
        if value is not state[name]:
            raise _state_error(module, f"replaces the buffer '{name}'")
    return result


def _snapshots(name: str, part: nn.Module) -> Iterator[_Snapshot]:
    """The attributes of a module, and the containers among them or nested in those."""
    attributes = vars(part)
    yield _Snapshot(name, attributes, dict(attributes), is_attributes=True)
    todo = [(f"{name}.{key}".lstrip("."), value) for key, value in attributes.items()]
    seen: set[int] = set()
    while todo:
        path, value = todo.pop()
        if isinstance(value, (*_CONTAINERS, tuple)) and id(value) not in seen:
            seen.add(id(value))
            entries = _entries(value)
            todo.extend((path, inner) for inner in entries.values())
            if isinstance(value, _CONTAINERS):
                yield _Snapshot(path, value, entries, is_attributes=False)


def _entries(container: Any) -> dict[Any, Any]:
    """The entries of a container by key or position; those of a set by id."""
    if isinstance(container, dict):
        return dict(container)
    return {id(one): one for one in container} if isinstance(container, set) else dict(enumerate(container))


def _state_error(module: nn.Module, what: str) -> ImpureFunctionError:
    return ImpureFunctionError(
        f"{type(module).__name__}: at {_line_of(module)}: it {what}. Return it, and pass it as an argument."
    )
