"""Holding code to what was compiled."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchguard.exceptions import GuardError, RecompileError
from torchguard.guards.advice import advice_for
from torchguard.guards.inspecting import Frame, GivenUp, Miss, inspect


@contextlib.contextmanager
def expect_no_recompile(compiled: Any = None, inputs: Iterable[Any] = ()) -> Iterator[None]:
    """Raise a `RecompileError` at the end of a block in which something compiled before was compiled again.

    With `compiled`, nothing at all may be compiled in the block. An error of the block's own comes first.

    Args:
        compiled: what to call with each of `inputs` first, which may compile.
        inputs: what it is meant for: a tuple of arguments, a mapping of named ones, or a single argument each.
    """
    for one in inputs:
        if compiled is None:
            raise GuardError("expect_no_recompile: got inputs, but nothing to call with them. Give what is compiled.")
        if isinstance(one, Mapping):
            compiled(**one)
        else:
            compiled(*(one if isinstance(one, tuple) else (one,)))
    with inspect() as seen:
        yield
    found = [_told(frame, "compiled again") for frame in seen.frames if _missed_by(frame)]
    given_up = [one for one in seen.given_up if compiled is not None or _missed_by(one)]
    found += [_told(one, "not compiled again, and ran as it is") for one in given_up]
    if compiled is not None:
        found += [_told(frame, "compiled for the first time") for frame in seen.frames if not _missed_by(frame)]
    if found:
        raise RecompileError("\n".join(["Nothing was to be compiled again, but:", *found]))


def _missed_by(one: Frame | GivenUp) -> list[Miss]:
    return [miss for miss in one.recompiled_for if not miss.is_of_another_backend]


def _told(one: Frame | GivenUp, what: str) -> str:
    found = [f"{one.function} ({one.file}:{one.line}) was {what}"]
    for miss in _missed_by(one):
        for failure in miss.failures:
            found += [f"  [{miss.compile_id}] {failure}", f"      {advice_for(failure)}"]
    return "\n".join(found)
