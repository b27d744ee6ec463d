"""A backend for torch.compile that checks what it compiles against a device."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

from torch import fx

from torchguard import artifacts
from torchguard._torch import aot, inductor
from torchguard.device._check import check
from torchguard.device._device import FIELDS, RUN, STRICT, Device, check_names, like, read_bool
from torchguard.device._report import DeviceReport
from torchguard.device._violations import Violation, without_nodes
from torchguard.exceptions import DeviceError, DeviceRejectionError

logger = logging.getLogger("torchguard.device")

MODES, RUNS = ("strict", "warning"), ("eager", "inductor")


class MockBackend:
    """Compiles for a device that is not there: graphs are checked, and run by torch on the device that is.

    Args:
        device: what to check against. None: what the environment says whenever something is compiled.
        mode: `strict` raises one error for all that does not fit in a graph and its backward, before anything runs;
            `warning` logs it. None: strict if `MOCK_STRICT` is set.
        run: who runs it, `eager` or `inductor`. None: what `MOCK_RUN` says, else `eager`.
    """

    def __init__(self, device: Device | None = None, mode: str | None = None, run: str | None = None) -> None:
        self.__name__ = "mock_backend"  # what errors of Dynamo call it
        self._device, self._mode, self._run = device, _one_of(MODES, mode, "mode"), _one_of(RUNS, run, "run")
        self._lock = threading.Lock()  # the autograd engine may compile in threads of its own
        self._reports: list[DeviceReport] = []
        self._logged: set[Violation] = set()
        artifacts.start_from_environment()

    def report(self) -> DeviceReport:
        """About all that was compiled so far."""
        with self._lock:
            return sum(self._reports, DeviceReport())

    def clear(self) -> None:
        """Forget what was compiled so far, and what was logged."""
        with self._lock:
            self._reports.clear()
            self._logged.clear()

    def __call__(self, dynamo: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
        """What torch.compile calls; `given` are its `mode` and `options`."""
        settings = self._settings(given)

        def look(forward: fx.GraphModule, backward: fx.GraphModule | None = None) -> None:
            is_strict = settings.mode == "strict"
            found = check(forward, backward, device=settings.device, dynamo=dynamo, strict=is_strict)
            self._take(found, settings.mode)

        def partition(joint: fx.GraphModule, values: Sequence[Any], **options: Any) -> Any:
            # Both halves are there and nothing has run; the backward is compiled when it is first called.
            halves = aot.split_joint(joint, values, **options)
            look(*halves)
            return halves

        def inference(module: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
            look(module)
            return aot.compile_boxed(module, values)

        if settings.run == "eager":
            return aot.compile_aot_eager(dynamo, inputs, partition, inference)
        aot.trace_only(dynamo, inputs, partition, inference)
        return inductor.compile_dynamo_graph(dynamo, inputs)

    def _settings(self, given: Mapping[str, Any]) -> "_Settings":
        """What torch.compile was told, else what this was made with, else what the environment says."""
        words = {name: value for name, value in given.items() if name != "options"} | dict(given.get("options") or {})
        check_names(words, ("mode", "run", "device"), "mock_backend, options of torch.compile")
        device, is_strict = words.get("device", self._device), os.environ.get(STRICT, "").strip()
        return _Settings(
            Device.from_environment() if device is None else _to_device(device),
            _one_of(MODES, words.get("mode", self._mode), "mode") or ("strict" if _is_set(is_strict) else "warning"),
            _one_of(RUNS, words.get("run", self._run), "run") or _one_of(RUNS, os.environ.get(RUN), RUN) or "eager",
        )

    def _take(self, report: DeviceReport, mode: str) -> None:
        with self._lock:
            self._reports.append(report)
            new = [one for one in report.violations if without_nodes(one) not in self._logged]
            self._logged.update(map(without_nodes, new))
        # Compiling waits for this, and finding partitions takes longest.
        artifacts.attach("device.json", lambda: report.to_json(partitions=False))
        if mode == "strict" and report.violations:
            raise DeviceRejectionError(report)
        for violation in new:
            logger.warning("%s", violation)


class _Settings(NamedTuple):
    device: Device
    mode: str
    run: str


class UnconfiguredBackend(MockBackend):
    """A backend that does what the environment says, and that called with a device makes one for it."""

    @overload
    def __call__(self, device: fx.GraphModule, inputs: Sequence[Any], /, **given: Any) -> Callable[..., Any]: ...
    @overload
    def __call__(
        self,
        device: Device | str | os.PathLike[str] | None = None,
        /,
        *,
        mode: str | None = None,
        run: str | None = None,
        **fields: Any,
    ) -> MockBackend: ...

    def __call__(self, device: Any = None, inputs: Any = None, /, **given: Any) -> Any:
        """A backend for a device: one as it is, a TOML file, or what the environment says, with other fields."""
        if isinstance(device, fx.GraphModule):
            return super().__call__(device, inputs, **given)
        mode, run = given.pop("mode", None), given.pop("run", None)
        if device is not None or given:
            device = _to_device(device, **given)
        return MockBackend(device, mode, run)


def _to_device(device: Any, **fields: Any) -> Device:
    if device is None:
        return Device.from_environment(**fields)
    if isinstance(device, Device):
        check_names(fields, FIELDS, "mock_backend")
        return replace(device, **fields)
    if isinstance(device, (str, os.PathLike)):
        return Device.from_toml(device, **fields)
    raise DeviceError(f"mock_backend: {device!r} is no device. Use a Device, or the path of a TOML file.")


def _one_of(allowed: tuple[str, ...], value: Any, where: str) -> str | None:
    if not value or value in allowed:
        return value or None
    raise DeviceError(f"{where}: {value!r} is not allowed.{like(str(value), allowed)} Use {' or '.join(allowed)}.")


def _is_set(value: str) -> bool:
    try:
        return bool(value) and read_bool(value)
    except ValueError:
        raise DeviceError(f"{STRICT}: {value!r} is not allowed. Use 1 or 0.") from None


mock_backend = UnconfiguredBackend()
aot.replace_registered_backend("torchguard_mock", mock_backend)
