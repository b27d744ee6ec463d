"""A backend for torch.compile that checks what it compiles against a device.

`mock_backend` is two things at once:

    torch.compile(model, backend=mock_backend)                         # a backend, configured by the environment
    torch.compile(model, backend=mock_backend(device, mode="strict"))  # a factory, called to configure a backend

It has to be a backend, because a backend that is configured by `MOCK_*` variables alone is passed without being called;
and it has to be callable with a device, because torch.compile passes nothing but `mode` and `options` on. torch.compile
calls a backend with a GraphModule and its inputs. A GraphModule is never a device, so the type of the first argument
says which call it is.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

from torch import fx

from torchguard import artifacts
from torchguard._torch import aot, inductor
from torchguard.artifacts._capture import add_graphs, start_from_environment
from torchguard.device._check import check
from torchguard.device._device import FIELDS, RUN, STRICT, Device, check_names, did_you_mean, read_bool
from torchguard.device._report import DeviceReport
from torchguard.device._violations import DeviceViolation, without_nodes
from torchguard.exceptions import DeviceError, DeviceRejectionError

logger = logging.getLogger("torchguard.device")

MODES, RUNS = ("strict", "warning"), ("eager", "inductor")


class MockBackend:
    """Checks graphs against a device, and runs them with torch on the actual machine.

    Args:
        device: what to check against. None: the device that the environment describes at the time of each compilation.
        mode: `strict` raises one error with all violations of a graph and its backward graph, before anything runs;
            `warning` logs them. None: `strict` if `MOCK_STRICT` is set.
        run: what runs the graphs, `eager` or `inductor`. None: the value of `MOCK_RUN`, or `eager`.
    """

    def __init__(self, device: Device | None = None, mode: str | None = None, run: str | None = None) -> None:
        self.__name__ = "mock_backend"  # the backend's name in Dynamo's errors
        self._device, self._mode, self._run = device, _one_of(MODES, mode, "mode"), _one_of(RUNS, run, "run")
        self._lock = threading.Lock()  # the autograd engine may compile in its own threads
        self._reports: list[DeviceReport] = []
        self._logged: set[DeviceViolation] = set()
        start_from_environment()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MockBackend":
        """Itself: Lightning copies the arguments of `torch.compile`, and the reports are those of this backend."""
        return self

    def report(self) -> DeviceReport:
        """The report of all graphs compiled so far."""
        with self._lock:
            return sum(self._reports, DeviceReport())

    def clear(self) -> None:
        """Forget the graphs compiled so far, and which violations were logged."""
        with self._lock:
            self._reports.clear()
            self._logged.clear()

    def __call__(self, dynamo: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile a graph: torch.compile calls this. `options` are its `mode` and `options`."""
        settings = self._settings(options)

        def check_and_record(forward: fx.GraphModule, backward: fx.GraphModule | None = None) -> None:
            is_strict = settings.mode == "strict"
            report = check(forward, backward, device=settings.device, dynamo=dynamo, strict=is_strict)
            try:
                self._record(report, settings.mode)
            except DeviceRejectionError:  # AOTAutograd ends here, before the graphs are captured
                kinds = ("inference",) if backward is None else ("forward", "backward")
                add_graphs(dict(zip(kinds, (forward, backward), strict=False)))
                raise

        def partition(joint: fx.GraphModule, values: Sequence[Any], **partition_options: Any) -> Any:
            # The only point at which both graphs exist and nothing has run: AOTAutograd compiles the backward graph
            # when it is first called.
            graphs = aot.split_joint(joint, values, **partition_options)
            check_and_record(*graphs)
            return graphs

        def inference(module: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
            check_and_record(module)
            return aot.compile_boxed(module, values)

        if settings.run == "eager":
            return aot.compile_aot_eager(dynamo, inputs, partition, inference)
        aot.trace_only(dynamo, inputs, partition, inference)
        return inductor.compile_dynamo_graph(dynamo, inputs)

    def _settings(self, options: Mapping[str, Any]) -> "_Settings":
        """The options of torch.compile win over the arguments of this backend, and these over the environment."""
        merged = {name: value for name, value in options.items() if name != "options"}
        merged |= dict(options.get("options") or {})
        check_names(merged, ("mode", "run", "device"), "mock_backend, options of torch.compile")
        device, strict = merged.get("device", self._device), os.environ.get(STRICT, "").strip()
        return _Settings(
            Device.from_environment() if device is None else _to_device(device),
            _one_of(MODES, merged.get("mode", self._mode), "mode") or ("strict" if _is_true(strict) else "warning"),
            _one_of(RUNS, merged.get("run", self._run), "run") or _one_of(RUNS, os.environ.get(RUN), RUN) or "eager",
        )

    def _record(self, report: DeviceReport, mode: str) -> None:
        with self._lock:
            self._reports.append(report)
            new = [one for one in report.violations if without_nodes(one) not in self._logged]
            self._logged.update(map(without_nodes, new))
        # Without partitions: compiling waits for this, and they are the most expensive part of a report.
        artifacts.attach("device.json", lambda: report.to_json(partitions=False))
        if mode == "strict" and report.violations:
            raise DeviceRejectionError(report)
        for violation in new:
            logger.warning("%s", violation)


class _Settings(NamedTuple):
    device: Device
    mode: str
    run: str


class _BackendFactory(MockBackend):
    """The type of `mock_backend`: a backend configured by the environment that also makes configured backends."""

    @overload
    def __call__(self, device: fx.GraphModule, inputs: Sequence[Any], /, **options: Any) -> Callable[..., Any]: ...
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

    def __call__(self, device: Any = None, inputs: Any = None, /, **options: Any) -> Any:
        """Make a backend for a device: a `Device`, a TOML file, or None for the environment, with fields replaced."""
        if isinstance(device, fx.GraphModule):
            return super().__call__(device, inputs, **options)
        mode, run = options.pop("mode", None), options.pop("run", None)
        if device is not None or options:
            device = _to_device(device, **options)
        return MockBackend(device, mode, run)


def _to_device(device: Any, **fields: Any) -> Device:
    if device is None:
        return Device.from_environment(**fields)
    if isinstance(device, Device):
        check_names(fields, FIELDS, "mock_backend")
        return replace(device, **fields)
    if isinstance(device, (str, os.PathLike)):
        return Device.from_toml(device, **fields)
    raise DeviceError(f"mock_backend: expected a Device or the path of a TOML file, got {device!r}.")


def _one_of(allowed: tuple[str, ...], value: Any, where: str) -> str | None:
    if not value or value in allowed:
        return value or None
    hint = did_you_mean(str(value), allowed)
    raise DeviceError(f"{where}: {value!r} is not allowed.{hint} Use {' or '.join(allowed)}.")


def _is_true(value: str) -> bool:
    try:
        return bool(value) and read_bool(value)
    except ValueError:
        raise DeviceError(f"{STRICT}: {value!r} is not allowed. Use 1 or 0.") from None


mock_backend = _BackendFactory()
aot.replace_registered_backend("torchguard_mock", mock_backend)
