"""`torchguard doctor`.

Looks whether what torchguard needs is there and works.

What the doctor found.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding

from torchguard.cli._targets import AsJson
from torchguard.cli._terminal import ExitCode, console, emit_json, plain

if TYPE_CHECKING:
    import torch


SUPPORTED_PYTHON = ((3, 11), (3, 13))
SUPPORTED_TORCH = ((2, 11), (2, 14))


@dataclass(frozen=True)
class Finding:
    """One thing looked at. Where something that is not `needed` is missing, `remedy` says what one does without."""

    name: str
    is_fine: bool
    found: str
    remedy: str = ""
    needed: bool = True

    @property
    def is_broken(self) -> bool:
        return self.needed and not self.is_fine


def examine() -> Iterator[Finding]:
    """One finding after the other, as soon as it is known."""
    yield _python()
    torch_found = _torch()
    yield torch_found
    yield _compiler()
    yield _graphviz()
    if torch_found.is_fine or _is_importable():
        yield from _devices()
        yield from _seams()
        for backend, needed in (("eager", True), ("aot_eager", True), ("inductor", False)):
            yield _compiles(backend, needed)


def _python() -> Finding:
    fits = SUPPORTED_PYTHON[0] <= sys.version_info[:2] < SUPPORTED_PYTHON[1]
    return Finding("python", fits, platform.python_version(), "Use Python 3.11 or 3.12.")


def _torch() -> Finding:
    remedy = "Install torch 2.11, 2.12 or 2.13: pip install 'torch>=2.11,<2.14'."
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", False, "not installed", remedy)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return Finding("torch", SUPPORTED_TORCH[0] <= numbers < SUPPORTED_TORCH[1], version, remedy)


def _is_importable() -> bool:
    return importlib.util.find_spec("torch") is not None


def _compiler() -> Finding:
    asked = os.environ.get("CXX")
    path = shutil.which(asked) if asked else shutil.which("g++") or shutil.which("clang++")
    remedy = "Install g++ or clang++, or set CXX: Inductor needs one for the CPU. Without it, use backend='aot_eager'."
    if path is None:
        return Finding("C++ compiler", False, f"{asked!r} not found" if asked else "none found", remedy, needed=False)
    return Finding("C++ compiler", *_version_of(path, "--version"), remedy, needed=False)


def _graphviz() -> Finding:
    path = shutil.which("dot")
    remedy = "Install graphviz to draw the .dot files of artifacts; all else does without."
    if path is None:
        return Finding("graphviz", False, "no dot", remedy, needed=False)
    return Finding("graphviz", *_version_of(path, "-V"), remedy, needed=False)


def _version_of(path: str, flag: str) -> tuple[bool, str]:
    try:
        ran = subprocess.run([path, flag], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{path} does not run: {error}"
    first = (ran.stdout or ran.stderr).strip().splitlines()
    return ran.returncode == 0, f"{first[0] if first else 'runs'} ({path})"


def _devices() -> Iterator[Finding]:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    remedy = "Without a GPU everything runs on the CPU. Where there is one, install torch's build for it."
    yield Finding("GPU", bool(names), ", ".join(names) or "none", remedy, needed=False)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    needs = "Inductor needs Triton for a GPU: it comes with torch's GPU builds."
    yield Finding("triton", bool(triton) or not names, triton or "not installed", needs, needed=False)


def _seams() -> Iterator[Finding]:
    """Whether the private names of torch are there that torchguard hooks into."""
    from torchguard._torch.events import missing_for_capture, missing_for_guards

    lacking = missing_for_guards()
    yield _seam("guards", [lacking] if lacking else [])
    yield _seam("artifacts", list(missing_for_capture()))


def _seam(name: str, lacking: list[str]) -> Finding:
    remedy = f"torchguard.{name} cannot see all on this torch. Use a version that is supported."
    return Finding(f"hooks of {name}", not lacking, "; ".join(lacking) or "present", remedy)


def _compiles(backend: str, needed: bool) -> Finding:
    import torch

    x = torch.arange(8, dtype=torch.float32)
    torch.compiler.reset()
    started = time.perf_counter()
    try:
        out = torch.compile(_small, backend=backend, fullgraph=True)(x)
    except Exception as error:  # whatever a broken installation comes up with
        words = " ".join(str(error).split())[:200]
        remedy = "Read the message; a compiler or a package that it names is missing." if needed else _WITHOUT_INDUCTOR
        return Finding(f"compile {backend}", False, f"{type(error).__name__}: {words}", remedy, needed)
    took = time.perf_counter() - started
    is_right = torch.allclose(out, _small(x))
    return Finding(f"compile {backend}", is_right, f"{took:.2f} s" if is_right else "a wrong result", "", needed)


_WITHOUT_INDUCTOR = "Inductor needs a C++ compiler and Python's headers; until then use backend='aot_eager'."


def _small(x: "torch.Tensor") -> "torch.Tensor":
    return (x * 2 + 1).relu().sum()


_WIDTH = 20


def finding(one: Finding) -> list[RenderableType]:
    mark, style = ("ok", "green") if one.is_fine else ("broken", "bold red") if one.needed else ("missing", "yellow")
    line = plain(f"{mark:8}", style).append_text(plain(f"{one.name:{_WIDTH}} {one.found}", "not bold default"))
    remedy = [] if one.is_fine or not one.remedy else [Padding(plain(one.remedy, "dim"), (0, 0, 0, 8), expand=False)]
    return [line, *remedy]


EXAMPLE = """
torchguard doctor

torchguard doctor --json | jq '.findings[] | select(.is_fine | not)'
"""


def doctor(as_json: AsJson = False) -> int:
    """See whether torch, its compilers and the hooks that torchguard uses are there and work."""
    findings = []
    for one in examine():
        findings.append(one)
        if not as_json:
            console().print(*finding(one), sep="\n")
    broken = [one.name for one in findings if one.is_broken]
    if as_json:
        emit_json({"is_fine": not broken, "findings": [asdict(one) for one in findings]})
    else:
        verdict = f"Broken: {', '.join(broken)}." if broken else "torchguard can work here."
        console().print(plain(verdict, "bold red" if broken else "bold green"))
    return ExitCode.FOUND if broken else ExitCode.FINE
