"""What a module keeps of a run: noticed by comparing what it holds before and after, which is then put back."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from torchguard.compiled._torch import flatten

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
