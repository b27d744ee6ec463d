"""`torchguard doctor`: checks of Python, torch, its compilers and the private functions that torchguard hooks."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType

from torchguard.cli._targets import AsJson
from torchguard.cli._terminal import ExitCode, console, indent, one_line, plain, print_json

if TYPE_CHECKING:
    import torch


_TESTED_PYTHON = ((3, 11), (3, 13))  # the first and the last
_NEEDS_COMPILER = "Inductor needs a C++ compiler and Python's headers. Without them, use backend='aot_eager'."
_NAME_WIDTH = 20


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        found: the version, or what is wrong.
        remedy: what to do if it is not fine; if it is not `needed`, what does not work without it.
        needed: whether torchguard cannot work without it.
        if_not: the word for what is not fine and not needed.
    """

    name: str
    is_fine: bool
    found: str
    remedy: str = ""
    needed: bool = True
    if_not: str = "missing"

    @property
    def is_broken(self) -> bool:
        return self.needed and not self.is_fine


EXAMPLE = """
torchguard doctor

torchguard doctor --json | jq '.findings[] | select(.is_fine | not)'
"""


def doctor(as_json: AsJson = False) -> int:
    """Check that torch, its compilers and the functions that torchguard hooks are present and work."""
    findings = []
    for one in checks():
        findings.append(one)
        if not as_json:
            console().print(*finding_lines(one), sep="\n")
    broken = [one.name for one in findings if one.is_broken]
    if as_json:
        print_json({"is_fine": not broken, "findings": [asdict(one) for one in findings]})
    else:
        summary = f"Broken: {', '.join(broken)}." if broken else "torchguard works here."
        console().print(plain(summary, "bold red" if broken else "bold green"))
    return ExitCode.FAILURE if broken else ExitCode.OK


def finding_lines(one: CheckResult) -> list[RenderableType]:
    """The line of a finding, and if it is not fine its remedy."""
    status, style = ("ok", "green") if one.is_fine else ("broken", "bold red") if one.needed else (one.if_not, "yellow")
    line = plain(f"{status:8}", style).append_text(plain(f"{one.name:{_NAME_WIDTH}} {one.found}", "not bold default"))
    remedy = [] if one.is_fine or not one.remedy else [indent(one.remedy, "dim", by=8)]
    return [line, *remedy]


def checks() -> Iterator[CheckResult]:
    """Run the checks one by one, and yield each result as soon as it is known."""
    yield _python()
    torch_found = _torch()
    yield torch_found
    yield _compiler()
    yield _graphviz()
    if torch_found.is_fine or importlib.util.find_spec("torch") is not None:
        yield from _gpus()
        yield from _private_names()
        for backend, needed in (("eager", True), ("aot_eager", True), ("inductor", False)):
            yield _compile(backend, needed)


def _python() -> CheckResult:
    return _version("python", platform.python_version(), _TESTED_PYTHON)


def _torch() -> CheckResult:
    from torchguard._torch import support

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return CheckResult("torch", False, "not installed", f"Install torch, tested are {support.tested_range()}.")
    return _version("torch", version, support.TESTED)


def _version(name: str, found: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> CheckResult:
    """A version before the tested ones is broken, one after them is newer."""
    from torchguard._torch.support import minor_version

    first, last = (".".join(map(str, version)) for version in tested)
    minor = minor_version(found)
    if minor > tested[1]:
        remedy = f"torchguard was tested on {name} {first} to {last}. What it misses is listed below."
        return CheckResult(name, False, found, remedy, needed=False, if_not="newer")
    return CheckResult(name, minor >= tested[0], found, f"Install {name} {first} to {last}.")


def _compiler() -> CheckResult:
    given = os.environ.get("CXX")
    path = shutil.which(given) if given else shutil.which("g++") or shutil.which("clang++")
    remedy = "Install g++ or clang++, or set CXX: Inductor needs one for the CPU. Without one, use backend='aot_eager'."
    if path is None:
        return CheckResult(
            "C++ compiler", False, f"{given!r} not found" if given else "none found", remedy, needed=False
        )
    return CheckResult("C++ compiler", *_version_of(path, "--version"), remedy, needed=False)


def _graphviz() -> CheckResult:
    path = shutil.which("dot")
    remedy = "Install graphviz to draw the .dot files of artifacts; nothing else needs it."
    if path is None:
        return CheckResult("graphviz", False, "dot not found", remedy, needed=False)
    return CheckResult("graphviz", *_version_of(path, "-V"), remedy, needed=False)


def _version_of(path: str, flag: str) -> tuple[bool, str]:
    try:
        ran = subprocess.run([path, flag], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{path} does not run: {error}"
    first = (ran.stdout or ran.stderr).strip().splitlines()
    return ran.returncode == 0, f"{first[0] if first else 'runs'} ({path})"


def _gpus() -> Iterator[CheckResult]:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    remedy = "Without a GPU everything runs on the CPU. If this machine has one, install torch's build for it."
    yield CheckResult("GPU", bool(names), ", ".join(names) or "none", remedy, needed=False)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    remedy = "Inductor needs Triton for a GPU; it comes with torch's GPU builds."
    yield CheckResult("triton", bool(triton) or not names, triton or "not installed", remedy, needed=False)


def _private_names() -> Iterator[CheckResult]:
    """Whether this torch has the private names that each part of torchguard uses."""
    from torchguard._torch import support

    for part in support.PARTS:
        missing = support.missing(part)
        found = "; ".join(f"no {one.name} ({one.without})" for one in missing)
        remedy = f"Install torch {support.tested_range()}."
        needed = any(one.is_required for one in missing)
        yield CheckResult(f"torch for {part}", not missing, found or "complete", remedy, needed)


def _compile(backend: str, needed: bool) -> CheckResult:
    import torch

    x = torch.arange(8, dtype=torch.float32)
    torch.compiler.reset()
    started = time.perf_counter()
    try:
        out = torch.compile(_small, backend=backend, fullgraph=True)(x)
    except Exception as error:  # a broken installation may raise anything
        remedy = "Install the compiler or package that the message names." if needed else _NEEDS_COMPILER
        return CheckResult(
            f"compile {backend}", False, f"{type(error).__name__}: {one_line(error, 200)}", remedy, needed
        )
    seconds = time.perf_counter() - started
    is_correct = torch.allclose(out, _small(x))
    return CheckResult(
        f"compile {backend}", is_correct, f"{seconds:.2f} s" if is_correct else "a wrong result", "", needed
    )


def _small(x: "torch.Tensor") -> "torch.Tensor":
    return (x * 2 + 1).relu().sum()
