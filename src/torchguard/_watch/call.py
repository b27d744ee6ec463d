"""The record of one call: what its checks found, in the order in which they ran."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.config import get_config
from torchguard._operators import use_operators
from torchguard._watch.batch import Batch
from torchguard._watch.detect import INF, NAN, call_row_status, only_fault, row_status
from torchguard._watch.origins import UNKNOWN_DIM, RowStatuses
from torchguard._watch.quarantine import call_replace_nonfinite, replace_nonfinite
from torchguard._watch.select import Checks
from torchguard._watch.summarize import CallSummary, first_warnings, summarize
from torchguard.checks import can_be_checked


class OuterRecord(NamedTuple):
    """The fields of a record that a region replaces by its own, as they were before it began."""

    statuses: list[Tensor]
    warnings: list[tuple[int, int, Tensor]]
    known_dims: list[tuple[Tensor, int]]
    probes: Tensor | None
    region: range | None


class CallRecord:
    """What the checks of one call found. Locations are given by their index in `WatchState.paths`.

    Args:
        batch: None where it is not known: when a checkpoint recomputes a part of the model.
        quarantine: whether to replace non-finite values.
        locations: the number of locations.
        probes: the gradient probes of the call, `(locations, MAX_PROBED_BATCH)`, if it has any.
    """

    def __init__(self, batch: Any, checks: Checks, quarantine: bool, locations: int, probes: Any = None) -> None:
        self.batch: Batch = batch
        self.checks, self.quarantine, self.probes = checks, quarantine, probes
        self.checks_values = quarantine or checks.nan or checks.inf
        self.only_fault = None if checks.nan and checks.inf else NAN if checks.nan else INF
        self.first_input = locations  # the number of "input of location 0", see `check`
        self.argument: int | None = None  # the number of the model's argument that is being checked
        self.ends = (0, locations - 1)  # input and output: nothing but the check reads a tensor there
        self._batch_is_not_first = batch is not None and batch.dim > 0
        self._calls_operators = (
            use_operators() and batch is not None and batch.dim == 0 and (quarantine or self.only_fault is None)
        )
        self.locations: list[int] = []
        self.statuses: list[Tensor] = []
        self.dims: list[int] = []
        self.warnings: list[tuple[int, int, Tensor]] = []
        self.in_graph = torch.compiler.is_compiling()  # the call began in the graph that is traced
        self.region: range | None = None  # the locations of the region that is being run
        self.region_probes: list[Tensor] = []  # for each region
        self._known_dims: list[tuple[Tensor, int]] = []

    def check(
        self,
        z: Tensor,
        location: int,
        mask_gradient: bool = True,
        is_argument: bool = False,
        num_squares: int = 0,
        dim: int | None = None,
        in_place: bool = False,
    ) -> Tensor:
        """Record the status of a tensor at a location. In quarantine, returns it with non-finite vectors replaced.

        An argument is recorded as the location plus the number of locations, or as `argument` if that is set:
        `WatchState.labels` has the names of all these numbers.

        Args:
            mask_gradient: whether a non-finite gradient is masked here.
            is_argument: whether the tensor goes into a module. Unbatched arguments (tables, masks) are not checked.
            num_squares: the number of squares that the module will sum.
            dim: the dim along which the samples lie, if it is known.
            in_place: whether to replace in place where that can be done: no kernel that could fuse it reads the tensor.
        """
        # Dynamo traces this method once per check, and each Python call in it slowly. So operators do most of the work.
        if (
            self._calls_operators
            and (self.quarantine or not is_argument)
            and dim is None
            and not self._known_dims
            and z.is_floating_point()
            and z.layout == torch.strided
            and not z.is_nested
        ):
            if not self.checks_values:
                return z
            self.locations.append(self._number(location) if is_argument else location)
            self.dims.append(UNKNOWN_DIM)
            if self.quarantine:
                probes, location = self._probes_at(location) if self.region else (self.probes, location)
                z, status = call_replace_nonfinite(
                    z, self.batch, probes, location, None, mask_gradient, num_squares, is_argument, in_place
                )
            else:
                status = call_row_status(z, location in self.ends)
            self.statuses.append(status)
            return z
        return self._check(z, location, mask_gradient, is_argument, num_squares, dim, in_place)

    def _check(
        self,
        z: Tensor,
        location: int,
        mask_gradient: bool,
        is_argument: bool,
        num_squares: int,
        dim: int | None,
        in_place: bool,
    ) -> Tensor:
        if not self.checks_values or not can_be_checked(z) or (is_argument and self.is_unbatched(z)):
            return z
        dim, number = self.dim_of(z, dim), self._number(location) if is_argument else location
        vectors = z.unsqueeze(-1) if self._batch_is_not_first and self.batch.dim == z.ndim - 1 else z
        if not self.quarantine:
            status = row_status(vectors, alone=location in self.ends)
            self.record(number, status if self.only_fault is None else only_fault(status, self.only_fault), dim)
            return z
        probes, index = self._probes_at(location)
        replaced, status = replace_nonfinite(
            vectors, self.batch, probes, index, dim, mask_gradient, num_squares, in_place
        )
        if status is not None:
            self.record(number, status, dim)
        replaced = replaced if vectors is z else replaced.squeeze(-1)
        self.dim_of(replaced, dim)
        return replaced

    def _number(self, location: int) -> int:
        """The number that stands for an argument at a location."""
        return location + self.first_input if self.argument is None else self.argument

    def _probes_at(self, location: int) -> tuple[Tensor | None, int]:
        """The probes that include that of a location, and its index in them. In a region, other locations have none."""
        region = self.region
        if region is None:
            return self.probes, location
        return (self.probes, location - region.start) if region.start <= location < region.stop else (None, 0)

    def enter_region(self, region: range, probes: Tensor | None) -> OuterRecord:
        """Begin a region of the model, with its probes. Returns what `leave_region` needs.

        The region records into lists of its own: tensors leave a region by being returned, and in no other way.
        """
        outer = OuterRecord(self.statuses, self.warnings, self._known_dims, self.probes, self.region)
        self.statuses, self.warnings, self._known_dims, self.probes, self.region = [], [], [], probes, region
        return outer

    def leave_region(self, outer: OuterRecord, statuses: Sequence[Tensor], warnings: Sequence[Tensor]) -> None:
        """End the region: with its statuses, and the masks of its warnings, as it returned them."""
        recorded = [(location, code) for location, code, _ in self.warnings]
        self.statuses, self.warnings, self._known_dims, self.probes, self.region = outer
        self.statuses.extend(statuses)
        for (location, code), mask in zip(recorded, warnings, strict=True):
            self.warn(location, code, mask)

    def record(self, location: int, status: Tensor, dim: int | None = None) -> None:
        """Record a row status; its samples lie along `dim`, if that is known."""
        self.locations.append(location)
        self.statuses.append(status)
        self.dims.append(UNKNOWN_DIM if dim is None else dim)

    def warn(self, location: int, code: int, mask: Tensor) -> None:
        """Record a warning for the samples of a `(batch,)` mask."""
        self.warnings.append((location, code, mask))

    def dim_of(self, z: Tensor, given: int | None) -> int | None:
        """The dim along which the samples of a tensor lie, if it was given now or in an earlier check of the tensor."""
        if given is not None:
            self._known_dims.append((z, given))
        elif self._known_dims:
            return next((known for other, known in self._known_dims if other is z), None)
        return given

    def is_unbatched(self, z: Tensor) -> bool:
        """Whether a tensor has no entry for each sample."""
        return self.batch is not None and not self.batch.has_samples(z.shape, self.dim_of(z, None))

    def summarize(self, location_ids: Tensor) -> CallSummary:
        """The summary of the call. `location_ids` has the id of each location, followed by 0."""
        if not self.statuses:
            self.record(0, torch.zeros(self.batch.size, 1, dtype=torch.int8, device=self.batch.device))
        return summarize(
            RowStatuses(self.statuses, self.locations, self.dims),
            first_warnings(self.warnings),
            location_ids,
            self.batch,
            self.quarantine,
            get_config(),
            self.probes,
        )
