"""Servers: one bad request in a batch does not touch the others, and is marked.

With `generate()`, a request is a row of the batch: `watch(model, quarantine=True, returns="output")` isolates it, in
eager mode and compiled, and `bad_requests` names it.

Continuous batching of transformers packs the tokens of all requests into one row, where `watch` sees one sample. There,
`RequestGuard` isolates token by token: hooks on the modules with parameters put zeros in place of vectors that are not
finite, so that neither attention (0 * NaN is NaN, also behind a mask) nor the shared key-value cache passes them on. To
which request a token belongs is read from the block table of the cache.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchguard._watch.report import Incident
from torchguard._watch.select import watched_paths
from torchguard._watch.wrapper import is_watched
from torchguard.exceptions import WatchError

__all__ = ["BadRequest", "RequestGuard", "bad_requests"]


def bad_requests(guarded: Any, requests: int, since: int = 0) -> dict[int, Incident]:
    """The first fault of each bad request of `guarded.generate(...)`, by its number. Waits for the device.

    Args:
        guarded: `watch(model, quarantine=True, returns="output")`.
        requests: how many `generate` was given. With beams, or several answers to each, the model sees more rows.
        since: the first call of the model that counts: `guarded.run_report().calls` before `generate`.
    """
    if not is_watched(guarded):
        raise WatchError(f"bad_requests: expected what watch returned, got {type(guarded).__name__}.")
    run = guarded.run_report()
    if run.lost:
        raise WatchError(f"bad_requests: {run.lost} faults of the run were not kept. Ask after each generate().")
    found: dict[int, Incident] = {}
    for incident, entry in zip(guarded.history, guarded._watch.history.entries()[0], strict=True):
        if entry.step < since:
            continue
        if requests < 1 or entry.size % requests:
            raise WatchError(
                f"bad_requests: call {entry.step} had a batch of {entry.size} rows, which {requests} requests cannot "
                "share. Give the number of prompts that generate() was given, and the first of its calls as since=."
            )
        found.setdefault(entry.sample // (entry.size // requests), incident)
    return found


class BadRequest(NamedTuple):
    """Where a request went bad first: the module, and the number of the forward pass."""

    path: str
    step: int

    def __str__(self) -> str:
        return f"not finite at {self.path or 'the output'} in step {self.step}"


class RequestGuard:
    """Isolates the requests of transformers' continuous batching: `with RequestGuard(model) as guard: ...`.

    `guard.bad` has the requests that were not finite somewhere, by their ids, for `generate_batch` "req_0", "req_1" and
    so on. Their tokens mean nothing; those of the others are what they are without them. CUDA graphs do not run hooks:
    `ContinuousBatchingConfig(use_cuda_graph=False)`.

    Args:
        model: a model of transformers, not watched and not compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        if is_watched(model):
            raise WatchError(
                "RequestGuard: this model is watched. Continuous batching needs the plain one: unwatch it."
            )
        self.model, self.bad, self.steps = model, dict[str, BadRequest](), 0
        self._found: list[tuple[str, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "RequestGuard":
        modules = dict(self.model.named_modules())
        for path in watched_paths(self.model, "modules", None, None):
            self._handles.append(modules[path].register_forward_hook(_Replace(self._found, path)))
        self._handles.append(self.model.register_forward_hook(self._after, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """After a forward pass: mark the requests whose tokens were replaced."""
        found, step = [*self._found], self.steps
        self._found.clear()
        self.steps += 1
        if "cu_seq_lens_q" not in kwargs:
            raise WatchError(
                "RequestGuard: this is no step of continuous batching. For generate() use "
                'watch(model, quarantine=True, returns="output").'
            )
        ids = kwargs.get("input_ids")
        tokens = (ids if ids is not None else kwargs["inputs_embeds"]).shape[1]
        owners: list[str | None] | None = None
        for path, bad in found:
            if not bool(bad.any()):
                continue
            owners = owners or _owners(kwargs, tokens)
            for request in _requests(bad, owners, kwargs):
                self.bad.setdefault(request, BadRequest(path, step))


class _Replace:
    """A hook that replaces vectors that are not finite by zeros, and notes which."""

    def __init__(self, found: list[tuple[str, Tensor]], path: str) -> None:
        self.found, self.path = found, path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim < 2:
            return None
        if output.is_cuda and torch.cuda.is_current_stream_capturing():
            raise WatchError("RequestGuard: CUDA graphs do not run hooks. Give use_cuda_graph=False.")
        finite = output.isfinite().all(-1)
        self.found.append((self.path, ~finite))
        return torch.where(finite.unsqueeze(-1), output, 0)


def _owners(kwargs: dict[str, Any], tokens: int) -> list[str | None]:
    """The request of each token: the one whose block of the cache it is written to."""
    allocator = next(iter(kwargs["cache"].cache_allocators.values()))
    written = kwargs["write_index"][allocator.index].tolist()
    of_block = {block: request for request, blocks in allocator.block_table.items() for block in blocks}
    owners = [of_block.get(at // allocator.block_physical_stride) for at in written[:tokens]]
    return [*owners, *[None] * (tokens - len(owners))]  # the rest is padding


def _requests(bad: Tensor, owners: Sequence[str | None], kwargs: dict[str, Any]) -> list[str]:
    """The requests of the tokens that a mask marks; all of them if the mask is not one over tokens."""
    bad = bad.squeeze(0) if bad.ndim > 1 and len(bad) == 1 else bad
    per_row = bad.flatten(1).any(1) if bad.ndim > 1 else bad
    rows = per_row.nonzero().flatten().tolist()
    kept = kwargs.get("logits_to_keep")
    if len(per_row) == len(owners):
        found = [owners[row] for row in rows]
    elif isinstance(kept, Tensor) and len(per_row) == len(kept):
        at = kept.tolist()
        found = [owners[at[row]] for row in rows]
    else:
        found = [*owners]
    return [*dict.fromkeys(request for request in found if request is not None)]
