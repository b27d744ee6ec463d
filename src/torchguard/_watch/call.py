"""The record of one call: what its checks found, in the order in which they ran."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.config import get_config
from torchguard._channel.detect import can_be_checked
from torchguard._operators import use_operators
from torchguard._torch.tensors import is_distributed, map_nested
from torchguard._torch.tracing import can_read, in_transform, is_in_vmap, outside_transforms, outside_vmap
from torchguard._watch.batch import FOR_ALL, MIXED, Batch, row_code
from torchguard._watch.call_summary import CallSummary, FaultHandling, first_warnings
from torchguard._watch.detect import INF, NAN, ROW_STATUS, is_finite, only_fault, row_status
from torchguard._watch.finite_gradients import record_faults_in
from torchguard._watch.gradient_probes import probes_at
from torchguard._watch.graph_plan import mark_samples
from torchguard._watch.history_table import HistoryTable
from torchguard._watch.magnitudes import REVISION
from torchguard._watch.origins import BY_SIZE, RowStatuses
from torchguard._watch.parameter_uses import Protection
from torchguard._watch.plan import FollowedCall, PlannedCall
from torchguard._watch.replace import REPLACE_NONFINITE, replace_nonfinite
from torchguard._watch.select import Checks
from torchguard._watch.summarize import summarize

NOTHING_SAID: Mapping[int, int] = {}


class OuterRecord(NamedTuple):
    """The fields of a record that a region replaces by its own, as they were before it began."""

    statuses: list[Tensor]
    warnings: list[tuple[int, int, Tensor]]
    probes: Tensor | None
    region: range | None


class CallRecord:
    """What the checks of one call found. Locations are given by their index in `WatchState.paths`.

    Args:
        batch: None where it is not known: when a checkpoint recomputes a part of the model.
        quarantine: whether to replace non-finite values.
        locations: the number of locations.
        probes: the gradient probes of the call, `(locations, MAX_PROBED_BATCH)`, if it has any.
        owners: where the row codes of tensors come from; None if sizes decide, or a graph is traced.
        sample_of: the dim along which the samples lie at some locations, as the user said.
        norm_widths: the lengths of the vectors that the model normalizes.
    """

    def __init__(
        self,
        batch: Any,
        checks: Checks,
        quarantine: bool,
        locations: int,
        probes: Any = None,
        owners: FollowedCall | PlannedCall | None = None,
        sample_of: Mapping[int, int] = NOTHING_SAID,
        norm_widths: tuple[int, ...] = (),
    ) -> None:
        self.batch: Batch = batch
        self.sample_of, self.norm_widths = sample_of, norm_widths
        self.checks, self.quarantine, self.probes, self.owners = checks, quarantine, probes, owners
        self.checks_values = quarantine or checks.nan or checks.inf
        self.replaces = quarantine  # unless a graph needs no replacement: see `graph_plan.py`
        self.only_fault = None if checks.nan and checks.inf else NAN if checks.nan else INF
        self.first_input = locations  # the number of "input of location 0", see `check`
        self.argument: int | None = None  # the number of the model's argument that is being checked
        self.ends = (0, locations - 1)  # input and output: nothing but the check reads a tensor there
        self._calls_operators = (
            use_operators() and batch is not None and batch.dim == 0 and (quarantine or self.only_fault is None)
        )
        # What `check` needs in a graph, where reading a global takes Dynamo longer than reading an attribute.
        self._by_size, self._strided, self._revision = BY_SIZE, torch.strided, REVISION
        self._samples = (0, (), None) if batch is None else (batch.size, batch.lengths, batch.dim)
        self.locations: list[int] = []
        self.statuses: list[Tensor] = []
        self.rows: list[int] = []
        self.warnings: list[tuple[int, int, Tensor]] = []
        self.in_graph = torch.compiler.is_compiling()  # the call began in the graph that is traced
        self.in_transform = in_transform()  # the call is made under a transform of torch.func
        self.is_lost = False  # whether a graph calls modules under a transform of its own
        self.needs_finite_gradients = False  # whether a graph cannot protect all uses of parameters
        self.has_distributed = False  # whether parameters are DTensors: see `finite_gradients.py`
        self.recomputed: Any = None  # the state of the model, if a checkpoint recomputes a part of it
        self.is_within_layer = False  # whether one of torch's own layers is running
        self.is_for_all = False  # whether a fault in what is checked counts for all samples
        self.last_location = 0  # that of the last check
        self.region: range | None = None  # the locations of the region that is being run
        self.region_probes: list[Tensor] = []  # for each region
        self.passed_on: list[int | None] = []  # for each tensor that the last region returned, which one it was given

    def check(
        self,
        z: Tensor,
        location: int,
        mask_gradient: bool = True,
        is_argument: bool = False,
        num_squares: int = 0,
        rows: int | None = None,
        in_place: bool = False,
        keep_neg_inf: bool = False,
    ) -> Tensor:
        """Record the status of a tensor at a location. In quarantine, returns it with non-finite vectors replaced.

        An argument is recorded as the location plus the number of locations, or as `argument` if that is set:
        `WatchState.labels` has the names of all these numbers.

        Args:
            mask_gradient: whether a non-finite gradient is masked here.
            is_argument: whether the tensor goes into a module. Unbatched arguments (tables, masks) are not checked.
            num_squares: the number of squares that the module will sum.
            rows: the row code that the module suggests, for calls whose owners are not followed.
            in_place: whether to replace in place where that can be done: no kernel that could fuse it reads the tensor.
            keep_neg_inf: whether -Inf is legitimate, as in a mask.
        """
        if self.sample_of:
            self.say_samples(z, location)
        if self.in_graph and not self.in_transform and in_transform():
            self.is_lost = True
            return z
        # Dynamo traces this method once per check: slowly each Python call in it, each global and each attribute of an
        # object that existed before. So operators do most of the work.
        if (
            self._calls_operators
            and (self.quarantine or not is_argument)
            and rows is None
            and z.is_floating_point()
            and z.layout == self._strided
            and not z.is_nested
        ):
            if not self.checks_values:
                return z
            self.locations.append(self._number(location) if is_argument else location)
            self.rows.append(self._by_size)
            if self.quarantine:
                probes = self.probes
                if self.region is not None:
                    probes, location = probes_at(location, probes, self.region)
                how = (mask_gradient, num_squares, is_argument, in_place, keep_neg_inf)
                z, status = REPLACE_NONFINITE(
                    z, probes, location, *self._samples, None, *how, False, self.norm_widths, self._revision
                )
            else:
                status = ROW_STATUS(z, location in self.ends, keep_neg_inf, self.norm_widths, self._revision)
            self.statuses.append(status)
            return z
        return self._check(z, location, mask_gradient, is_argument, num_squares, rows, in_place, keep_neg_inf)

    def _check(
        self,
        z: Tensor,
        location: int,
        mask_gradient: bool,
        is_argument: bool,
        num_squares: int,
        rows: int | None,
        in_place: bool,
        keep_neg_inf: bool,
    ) -> Tensor:
        if self.quarantine and self.owners is not None and z.is_nested and z.is_floating_point():
            how = (location, mask_gradient, is_argument, num_squares, MIXED, in_place, keep_neg_inf)
            return map_nested(z, lambda one: one if bool(one.isfinite().all()) else self._check(one, *how))
        if not self.checks_values or not can_be_checked(z):
            return z
        if is_distributed(z):
            self._check_own_part(z, location, is_argument)
            return z
        if self._has_transforms() and is_in_vmap(z):  # the model itself uses `vmap`: operations are followed below it
            how = (location, mask_gradient, is_argument, num_squares, rows, in_place, keep_neg_inf)
            return outside_vmap(z, lambda inner: self._check(inner, *how))
        if self.owners is not None:
            values = outside_transforms(z)
            if values.shape != z.shape and not self.in_transform:  # a transform within `vmap`
                self.owners.lose("a module is called under a transform of torch.func within vmap")
                return z
            rows = MIXED if rows == MIXED else self.owners.rows(values, location)
            keep_neg_inf = keep_neg_inf or self.owners.may_have_neg_inf(values)
        if is_argument and self.batch is not None and self.batch.is_unbatched(z.shape, rows):
            return z
        how = (is_argument, mask_gradient, num_squares, rows, in_place, keep_neg_inf)
        if self.owners is None:
            return self._check_rows(z, location, *how)
        with self.owners.paused():
            new = self._check_rows(z, location, *how)
        self.owners.checked(outside_transforms(z), outside_transforms(new))
        return new

    def _check_own_part(self, z: Any, location: int, is_argument: bool) -> None:
        """Record the status of the part of a DTensor that is in this process.

        It is not replaced, so that a fault in it reaches the other ranks; `finite_gradients.py` has the gradients.
        """
        if self.owners is not None:
            self.owners.rows(z, location)  # has the reason noted
        if is_argument:  # a fault in it is found in what the module returns
            return
        with nullcontext() if self.owners is None else self.owners.paused():
            status = row_status(z.detach().to_local())
        self.record(location, status if self.only_fault is None else only_fault(status, self.only_fault), MIXED)

    def _check_rows(
        self,
        z: Tensor,
        location: int,
        is_argument: bool,
        mask_gradient: bool,
        num_squares: int,
        rows: int | None,
        in_place: bool,
        keep_neg_inf: bool,
    ) -> Tensor:
        # A sample has to be a row of vectors, so samples along the last dim become vectors of one number.
        vectors = z.unsqueeze(-1) if self.batch is not None and self.batch.is_last(z.shape, rows) else z
        code, number = BY_SIZE if rows is None else rows, self._number(location) if is_argument else location
        if not self.quarantine:
            status = self._outside(row_status(vectors, location in self.ends, keep_neg_inf, self.norm_widths))
            self.record(number, status if self.only_fault is None else only_fault(status, self.only_fault), code)
            return z
        self.last_location = location
        probes, index = probes_at(location, self.probes, self.region)
        replaced, status = replace_nonfinite(
            vectors, self.batch, probes, index, rows, mask_gradient, num_squares, in_place, keep_neg_inf
        )
        if self.recomputed is not None and mask_gradient and replaced is not vectors:
            record_faults_in(self.recomputed, replaced, location)
        if status is not None:
            self.record(number, self._outside(status), FOR_ALL if self.is_for_all and not is_argument else code)
        return replaced if vectors is z else replaced.squeeze(-1)

    def protection(self) -> Protection:
        """Where the call is, for a use of a parameter."""
        return Protection(self.batch, *probes_at(self.last_location, self.probes, self.region))

    def _outside(self, status: Tensor) -> Tensor:
        """A status that outlives transforms within the model."""
        return outside_transforms(status) if self._has_transforms() else status

    def _has_transforms(self) -> bool:
        """Whether transforms that are active are the model's own, in eager mode."""
        return not self.in_graph and not self.in_transform

    def _number(self, location: int) -> int:
        """The number that stands for an argument at a location."""
        return location + self.first_input if self.argument is None else self.argument

    def enter_region(self, region: range, probes: Tensor | None) -> OuterRecord:
        """Begin a region of the model, with its probes. Returns what `leave_region` needs.

        The region records into lists of its own: tensors leave a region by being returned, and in no other way.
        """
        outer = OuterRecord(self.statuses, self.warnings, self.probes, self.region)
        self.statuses, self.warnings, self.probes, self.region = [], [], probes, region
        return outer

    def leave_region(self, outer: OuterRecord, statuses: Sequence[Tensor], warnings: Sequence[Tensor]) -> None:
        """End the region: with its statuses, and the masks of its warnings, as it returned them."""
        recorded = [(location, code) for location, code, _ in self.warnings]
        self.statuses, self.warnings, self.probes, self.region = outer
        self.statuses.extend(statuses)
        for (location, code), mask in zip(recorded, warnings, strict=True):
            self.warn(location, code, mask)

    def say_samples(self, z: Tensor, location: int) -> None:
        """Take over what the user said about a location, where owners are followed."""
        dim = self.sample_of.get(location)
        if dim is None or z.ndim <= dim:
            return
        if self.owners is not None:
            self.owners.set_samples(z, dim)
        elif use_operators():
            mark_samples(z, dim)

    def record(self, location: int, status: Tensor, rows: int = BY_SIZE) -> None:
        """Record a row status with its row code."""
        self.locations.append(location)
        self.statuses.append(status)
        self.rows.append(rows)

    def record_indices(self, location: int, ids: Tensor, status: Tensor) -> None:
        """Record the status of indices."""
        self.record(location, status, BY_SIZE if self.owners is None else self.owners.rows(ids, location))

    def set_rows(self, codes: Sequence[int]) -> None:
        """Set the row codes of all statuses, which are known only at the end of a traced call."""
        self.rows = [*codes]
        if not self.warnings:  # as mostly: Dynamo is slow to trace a loop over all checks
            return
        # Warnings were computed by sizes. Where these do not show the sample of a row, they are for all samples.
        usual = row_code(0)
        odd = [self.locations[i] for i, code in enumerate(codes) if code != usual]
        self.warnings = [
            (location, code, mask.any().expand(mask.shape) if location in odd else mask)
            for location, code, mask in self.warnings
        ]

    def warn(self, location: int, code: int, mask: Tensor) -> None:
        """Record a warning for the samples of a `(batch,)` mask."""
        self.warnings.append((location, code, mask))

    def samples_of(self, z: Tensor, location: int) -> Tensor | None:
        """A tensor with one row per sample as its first dim; None if it has none."""
        if self.owners is None:
            return self.batch.samples_first(z)
        if is_in_vmap(z):
            return None
        values = outside_transforms(z)
        return self.batch.samples_first(values, self.owners.rows(values, location))

    def has_fault_for_all(self) -> bool:
        """Whether a fault that counts for all samples is known without waiting for a device."""
        if self.in_graph or FOR_ALL not in self.rows:
            return False
        found = [status for status, code in zip(self.statuses, self.rows, strict=True) if code == FOR_ALL]
        return any(can_read(status) and not bool(is_finite(status).all()) for status in found)

    def summarize(
        self, location_ids: Tensor, mixes: bool, history: HistoryTable | None, ids: Tensor | None
    ) -> CallSummary:
        """The summary of the call. `location_ids` has the id of each location, followed by 0."""
        if not self.statuses:
            self.record(0, torch.zeros(self.batch.size, 1, dtype=torch.int8, device=self.batch.device))
        return summarize(
            RowStatuses(self.statuses, self.locations, self.rows),
            first_warnings(self.warnings),
            location_ids,
            self.batch,
            FaultHandling(self.quarantine, self.replaces, mixes),
            get_config(),
            self.probes,
            history,
            ids,
        )
