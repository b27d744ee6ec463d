"""From a function or module and an example of its arguments to a compiled function.

What a module keeps of a run: noticed by comparing what it holds before and after, which is then put back.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from torchguard._torch.fakes import with_tracing_lock
from torchguard._torch.tensors import flatten
from torchguard.compiled._functions import CompiledOut, CompiledScalar, Signature
from torchguard.compiled._leaves import names_to_flags, type_of, with_dynamic
from torchguard.compiled._nesting import Nest, leaf_names, nest_of
from torchguard.compiled._trace import Program, with_lifted_leaves
from torchguard.exceptions import ImpureFunctionError

_CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True)
class _Held:
    """A container a module holds, and what was in it. Attributes are the container of their module."""

    place: str
    container: Any
    before: dict[Any, Any]
    is_attributes: bool

    def changes(self) -> Iterator[tuple[str, Any]]:
        """What is in it that was not, each with what was done if it is a tensor."""
        for key, value in _entries(self.container).items():
            if key not in self.before or self.before[key] is not value:
                attribute = f"{self.place}.{key}".lstrip(".")
                done = f"sets the attribute '{attribute}' to a tensor"
                yield done if self.is_attributes else f"puts a tensor into '{self.place}'", value

    def put_back(self) -> None:
        now = _entries(self.container)
        if now.keys() == self.before.keys() and all(now[key] is value for key, value in self.before.items()):
            return
        self.container.clear()
        if isinstance(self.container, dict):
            self.container.update(self.before)
        else:
            (self.container.update if isinstance(self.container, set) else self.container.extend)(self.before.values())


def call_module(
    module: nn.Module, refuse: Callable[[nn.Module, str], Exception], state: Mapping[str, Tensor], *args: Any
) -> Any:
    """What a module returns. One that keeps a tensor of this run for the next has a state that is no argument."""
    held = [(part, one) for name, part in module.named_modules() for one in _held(name, part)]
    given = dict(state)
    known = {id(value) for value in state.values()}
    try:
        result = functional_call(module, given, args)
        for part, one in held:
            for what, value in one.changes():
                # A layer may well gather its own parameters, as recurrent ones do.
                if any(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in flatten(value)[0]):
                    raise refuse(part, what)
    finally:
        for _, one in held:
            one.put_back()
    for name, value in given.items():
        if value is not state[name]:
            raise refuse(module, f"replaces the buffer '{name}'")
    return result


def _held(name: str, part: nn.Module) -> Iterator[_Held]:
    """The attributes of a module, and the containers among them or nested in those."""
    attributes = vars(part)
    yield _Held(name, attributes, dict(attributes), is_attributes=True)
    todo = [(f"{name}.{key}".lstrip("."), value) for key, value in attributes.items()]
    seen: set[int] = set()
    while todo:
        place, value = todo.pop()
        if isinstance(value, (*_CONTAINERS, tuple)) and id(value) not in seen:
            seen.add(id(value))
            entries = _entries(value)
            todo.extend((place, inner) for inner in entries.values())
            if isinstance(value, _CONTAINERS):
                yield _Held(place, value, entries, is_attributes=False)


def _entries(container: Any) -> dict[Any, Any]:
    """What is in a container, by key or by position."""
    if isinstance(container, dict):
        return dict(container)
    return {id(one): one for one in container} if isinstance(container, set) else dict(enumerate(container))


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
    """Compile a pure function of tensors, or of containers of them.

    A module is compiled as a function of its state, a dict of its parameters and buffers by name, and its arguments.

    Args:
        example: arguments that say what shapes, dtypes, devices and strides to compile for.
        dynamic: dims that may have other sizes later, by leaf: `{"x": 0}`, or `{"x": {0: "batch"}, "y": {0: "batch"}}`
            where they have to agree. The function is run once more, with symbols for these sizes, and what is made of
            that serves all sizes that are alike; others are traced when they are first met.
        nondiff: leaves not to differentiate by, by name or position. Integers, bools and buffers never are.
        backend: "inductor", "aot_eager" or "eager".
        lift_rng: make random numbers drawn in the function leaves of their own, the last ones.
        probe: whether to test each derivative once, where it is first used.

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
    """Compile a pure function whose result is one number; the arguments are those of `compile_out`.

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
    nest, leaves = nest_of(example, *_ARGUMENT)
    types = [type_of(leaf, name) for leaf, name in zip(leaves, leaf_names(f, example), strict=True)]
    buffers = {name for name, _ in f.named_buffers()} if isinstance(f, nn.Module) else set()
    fixed = names_to_flags(types, [nondiff] if isinstance(nondiff, (str, int)) else nondiff)
    fixed = [off or leaf.name in buffers for leaf, off in zip(types, fixed, strict=True)]
    types = [
        replace(leaf, differentiable=leaf.differentiable and not off) for leaf, off in zip(types, fixed, strict=True)
    ]
    run, results = _flat(f, nest, _name_of(f))
    program = Program(_name_of(f), run, with_dynamic(types, dynamic or {}), _line_of(f), lifts_rng=lift_rng)
    if lift_rng:
        program = with_lifted_leaves(program)
        nest = (
            None
            if program.lifted and all(isinstance(arg, Tensor) for arg in example)
            else _with_more(nest, example, program)
        )
    examples = tuple(leaf.detach() for leaf in leaves) if not program.lifted else None
    return kind(program, Signature(nest, results), backend=backend, probe=probe, examples=examples)


def _with_more(nest: Nest, example: tuple[Any, ...], program: Program) -> Nest:
    """The nest of arguments followed by the lifted leaves."""
    lifted = program.leaves[len(program.leaves) - program.lifted :]
    return nest_of((*example, *(leaf.fake() for leaf in lifted)), *_ARGUMENT)[0]


def _flat(f: Callable[..., Any], nest: Nest, name: str) -> tuple[Callable[..., list[Tensor]], Callable[[], Nest]]:
    """A function of flat leaves, and how its results are nested, which is known once it was traced."""
    call: Any = functools.partial(call_module, f, _keeps) if isinstance(f, nn.Module) else f
    seen: list[Nest] = []

    def run(*leaves: Tensor) -> list[Tensor]:
        args = leaves if nest.is_tuple else nest.put_together(leaves)
        results, flat = nest_of(call(*args), f"{name}: what is returned", "Return tensors alone.")
        seen[:] = [results]
        return flat

    return run, lambda: seen[0]


def _keeps(module: nn.Module, what: str) -> ImpureFunctionError:
    return ImpureFunctionError(
        f"{type(module).__name__}: at {_line_of(module)}: it {what}. Return it, and pass it as an argument."
    )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name: the first argument of what it is compiled to."""
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


def _line_of(f: Any) -> str:
    """Where a function is defined, or the `forward` of a module."""
    code = getattr(f.forward if isinstance(f, nn.Module) else f, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}" if code else _name_of(f)


def _name_of(f: Any) -> str:
    return getattr(f, "__name__", type(f).__name__)
