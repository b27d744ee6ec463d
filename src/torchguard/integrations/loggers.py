"""What goes bad, in a logger: the rate of bad samples, errors by location, origins as text, health of layers.

A logger is whatever has a method `log(values, step)`. TensorBoard's is here. Others take three lines:

    class Wandb:
        def log(self, values, step):
            wandb.log(values, step=step)

    class MLflow:
        def log(self, values, step):
            mlflow.log_metrics({k: v for k, v in values.items() if not isinstance(v, str)}, step=step)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchguard import err
from torchguard import flags as flags_at_boundary
from torchguard._extras import require_extra
from torchguard._retry import RetryReport
from torchguard._watch.select import watched_paths
from torchguard._watch.wrapper import is_watched
from torchguard.exceptions import WatchError

__all__ = ["LayerHealth", "Logger", "TensorBoard", "flags_values", "retry_values", "run_values"]

PREFIX = "torchguard"


class Logger(Protocol):
    """Whatever takes numbers and texts by name."""

    def log(self, values: dict[str, float | str], step: int) -> None: ...


class TensorBoard:
    """A logger that writes for TensorBoard.

    Args:
        writer: a folder, or a `SummaryWriter`.
    """

    def __init__(self, writer: Any) -> None:
        require_extra("TensorBoard", "tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(writer)) if isinstance(writer, (str, Path)) else writer

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, step)
            else:
                self.writer.add_scalar(name, value, step)


def flags_values(f: Tensor) -> dict[str, float | str]:
    """Values for a logger: the rate of bad samples, and how many have which error where. Waits for the device."""
    bad = err.is_err(f)
    values: dict[str, float | str] = {f"{PREFIX}/bad_sample_rate": bad.float().mean().item() if len(bad) else 0.0}
    for location, codes in flags_at_boundary.summary(f).items():
        for code, count in codes.items():
            values[f"{PREFIX}/errors/{location}/{code}"] = float(count)
    return values


def run_values(guarded: Any) -> dict[str, float | str]:
    """Values for a logger: the flags of the last call, and the origins of all faults so far as text."""
    if not is_watched(guarded):
        raise WatchError(f"run_values: expected what watch returned, got {type(guarded).__name__}.")
    run, f = guarded.run_report(), guarded.flags
    values = {} if f is None else flags_values(f)
    values[f"{PREFIX}/bad_samples"] = float(run.total)
    if not run.ok:
        values[f"{PREFIX}/origins"] = str(run)
    return values


def retry_values(report: RetryReport) -> dict[str, float | str]:
    """Values for a logger: how many samples of a guarded step were bad, how often it was run, and why as text."""
    values: dict[str, float | str] = {
        f"{PREFIX}/bad_samples": float(len(report.bad)),
        f"{PREFIX}/runs": float(report.runs),
        f"{PREFIX}/skipped": float(report.skipped),
    }
    return values if report.ok else {**values, f"{PREFIX}/origins": str(report)}


class LayerHealth:
    """Size and sparsity of what each layer returns, computed inside the graph: nothing breaks, nothing waits.

    A forward hook on each layer writes three numbers to a table on the device: the root mean square, the largest
    magnitude, and the share of zeros. Non-finite values stay visible in the first two.

    Args:
        model: not compiled yet.
        include: glob patterns of paths of modules with parameters; None for all.

    >>> from torchguard.integrations.loggers import LayerHealth
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> health = LayerHealth(model)
    >>> _ = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3, 2))
    >>> sorted(health.values())
    ['health/0/largest', 'health/0/rms', 'health/0/zeros']
    """

    COLUMNS = ("rms", "largest", "zeros")

    def __init__(self, model: nn.Module, include: Any = None) -> None:
        self.paths = watched_paths(model, "modules", include, None)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.table = torch.full((len(self.paths), len(self.COLUMNS)), torch.nan, device=device)
        modules = dict(model.named_modules())
        self._handles = [
            modules[path].register_forward_hook(_Measure(self.table, row)) for row, path in enumerate(self.paths)
        ]

    def values(self) -> dict[str, float | str]:
        """Values for a logger, of the last call: those of layers that were not called are left out. Waits."""
        found: dict[str, float | str] = {}
        for path, numbers, called in zip(self.paths, self.table.tolist(), self._called(), strict=True):
            if called:
                found |= {f"health/{path}/{name}": one for name, one in zip(self.COLUMNS, numbers, strict=True)}
        return found

    def _called(self) -> list[bool]:
        return (self.table[:, 2] == self.table[:, 2]).tolist()  # the share of zeros is never NaN

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


class _Measure:
    def __init__(self, table: Tensor, row: int) -> None:
        self.table, self.row = table, row

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        z = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(z, Tensor) and z.is_floating_point() and z.numel():
            z = z.detach().float()
            numbers = torch.stack([z.square().mean().sqrt(), z.abs().amax(), (z == 0).float().mean()])
            self.table[self.row].copy_(numbers)
