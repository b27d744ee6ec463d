"""Checking many files: find them, read them, check them in several processes, and remember the results."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from torchguard.exceptions import LintError
from torchguard.lint import _config
from torchguard.lint._check import LONGEST, Checked, check_bytes, from_data, key_of, selected, to_data
from torchguard.lint._config import Settings
from torchguard.lint._finding import UNREADABLE, Finding
from torchguard.lint._formats import statistics
from torchguard.lint._rules.testing import MissingLossTests
from torchguard.report import Answer, Section, Shown, Table

_MOST_SHOWN = 1_000  # findings in a report
_FEW = 40  # files: fewer are checked faster than a second process starts


@dataclass
class LintResult(Shown):
    """The findings in some paths, and how many files were checked."""

    findings: list[Finding] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    cached: int = 0

    def section(self) -> Section:
        """The number of findings by rule, and each finding."""
        findings, files = self.findings, len(self.files)
        of = f"{files:,} file{'' if files == 1 else 's'}"
        if not findings:
            return Section("Lint", (Answer("ok" if files else "unknown", f"No finding in {of}."),))
        count = f"{len(findings):,} finding{'' if len(findings) == 1 else 's'}"
        rules = tuple((one["code"], one["name"], one["count"]) for one in statistics(findings))
        shown = findings[:_MOST_SHOWN]
        rows = tuple((f"{one.file}:{one.line}:{one.column}", one.code, one.message) for one in shown)
        total = len(findings) if len(findings) > _MOST_SHOWN else None
        return Section(
            "Lint",
            (
                Answer("warning", f"{count} in {of}."),
                Table(("rule", "name", "findings"), rules, "By rule"),
                Table(("where", "rule", "what to do"), rows, "Findings", total=total),
            ),
        )


def check_paths(
    paths: Iterable[str | Path],
    *,
    select: Iterable[str] | None = None,
    ignore: Iterable[str] = (),
    settings: Settings | None = None,
    jobs: int | None = None,
    cache: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LintResult:
    """Check files, and the Python files below directories.

    Args:
        select: codes or their beginnings, in place of what pyproject.toml selects.
        ignore: codes to leave out.
        settings: used for every file, in place of the nearest pyproject.toml.
        jobs: number of processes; by default, one for each core that this process may use.
        cache: a directory that remembers results by content; None for none.
        progress: called with the number of files checked and of all files.

    Raises:
        LintError: a path does not exist, a code is unknown, or a pyproject.toml is wrong.

    >>> import tempfile, pathlib
    >>> from torchguard import lint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (pathlib.Path(folder) / "net.py").write_text("import torch\\nx = torch.zeros(3)\\n")
    ...     [finding.code for finding in lint.check_paths([folder]).findings]
    ['TG110']
    """
    select = None if select is None else tuple(select)
    ignore = tuple(ignore)

    @functools.cache
    def settings_of(directory: str) -> Settings:
        found = settings or _config.settings_for(Path(directory))
        return found.with_options(select, ignore)

    def settings_for(file: str) -> Settings:
        return settings_of(os.path.dirname(os.path.abspath(file)))

    settings_of(os.getcwd())  # an unknown code is an error even where there are no files
    result = LintResult()
    result.files = list(dict.fromkeys(find_files(paths, settings_for)))
    store = _Cache(Path(cache)) if cache is not None else None
    checked = _check_files(result, settings_for, store, _number_of_jobs(jobs), progress)
    for file in result.files:
        result.findings += selected(checked[file], file, settings_for(file).codes_for(file))
    result.findings += _missing_tests(result.files, checked, settings_for)
    result.findings.sort()
    return result


def find_files(paths: Iterable[str | Path], settings_for: Callable[[str], Settings]) -> Iterator[str]:
    """The given files, and all Python files below the given directories that are not excluded."""
    for path in map(str, paths):
        if os.path.isdir(path):
            for folder, folders, files in os.walk(path):
                folders[:] = sorted(
                    name
                    for name in folders
                    if not _config.is_skipped(name)
                    and not settings_for(os.path.join(folder, name)).is_excluded(os.path.join(folder, name))
                )
                for name in sorted(files):
                    file = os.path.normpath(os.path.join(folder, name))
                    if name.endswith(".py") and not settings_for(file).is_excluded(file):
                        yield file
        elif os.path.lexists(path):
            yield os.path.normpath(path)
        else:
            raise LintError(f"{path}: no such file or directory.")


def _check_files(
    result: LintResult,
    settings_for: Callable[[str], Settings],
    store: "_Cache | None",
    jobs: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Checked]:
    checked: dict[str, Checked] = {}
    waiting: list[tuple[str, bytes, int]] = []
    sizes = 0

    def advance() -> None:
        if progress is not None:
            progress(len(checked), len(result.files))

    for file in result.files:
        content = read(file)
        if isinstance(content, str):
            checked[file] = Checked([(1, 1, UNREADABLE, f"the file {content}")], [])
            continue
        longest = settings_for(file).max_statements
        known = store.get(key_of(content, longest)) if store is not None else None
        if known is not None:
            checked[file] = known
            result.cached += 1
        else:
            sizes += len(content)
            waiting.append((file, content, longest))
    advance()
    with contextlib.closing(_checked(waiting, jobs)) as results:
        for (file, content, longest), found in zip(waiting, results, strict=True):
            checked[file] = found
            if store is not None:
                store.put(key_of(content, longest), found)
            advance()
    return checked


def _checked(waiting: list[tuple[str, bytes, int]], jobs: int) -> Generator[Checked, None, None]:
    if jobs < 2 or len(waiting) < _FEW:
        yield from (check_bytes(content, longest) for _, content, longest in waiting)
        return
    # Not forked: a process that has loaded torch has threads, and a fork of it may hang.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    done = 0
    try:
        contents = [content for _, content, _ in waiting]
        with _interrupts_blocked():
            results = pool.map(check_bytes, contents, [longest for *_, longest in waiting], chunksize=8)
        for found in results:
            done += 1
            yield found
    except BrokenProcessPool as error:
        raise LintError(
            f"a process that checks files died near {waiting[done][0]}. Try again with --jobs 1."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Have processes that are started in this block ignore Ctrl-C.

    A terminal sends it to all processes, and a pool whose processes died of it may wait for them forever. Without it,
    they end with the files that they have.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def read(file: str) -> bytes | str:
    """The content of a file, or a sentence about why it cannot be read."""
    try:
        about = os.stat(file)
        if not stat.S_ISREG(about.st_mode):
            return "is no regular file."
        if about.st_size > LONGEST:
            return f"has {about.st_size} bytes, more than {LONGEST}: too long to check."
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}."


def _number_of_jobs(jobs: int | None) -> int:
    if jobs is not None:
        return max(1, jobs)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _missing_tests(
    files: list[str], checked: dict[str, Checked], settings_for: Callable[[str], Settings]
) -> Iterator[Finding]:
    """`MissingLossTests`, which needs all files at once."""
    rule = MissingLossTests()
    wanted = [file for file in files if checked[file].losses and rule.code in settings_for(file).codes_for(file)]
    wanted = [file for file in wanted if not _is_test(file)]
    if not wanted:
        return
    tests = [
        content.decode(errors="replace")
        for file in files
        if _is_test(file) and isinstance(content := read(file), bytes)
    ]
    for file in wanted:
        for name, line, column, is_distributed in checked[file].losses:
            if missing := rule.missing(name, is_distributed, tests):
                yield Finding(file, line, column + 1, rule.code, rule.message(name, missing))


def _is_test(file: str) -> bool:
    name = os.path.basename(file)
    return name.startswith("test_") or name.endswith("_test.py")


def default_cache() -> Path:
    """`torchguard/lint` in the user's directory for caches."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torchguard" / "lint"


class _Cache:
    """Results by the content of a file, in a directory that is named after the content of the linter itself."""

    def __init__(self, root: Path) -> None:
        self.folder = root / _checksum()
        self.is_writable = True
        if not self.folder.exists() and root.is_dir():
            for old in root.iterdir():  # of other versions of the rules
                if old.is_dir() and len(old.name) == 16:
                    shutil.rmtree(old, ignore_errors=True)

    def get(self, key: str) -> Checked | None:
        try:
            return from_data(json.loads((self.folder / key[:2] / key).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # missing, or damaged: check again
            return None

    def put(self, key: str, checked: Checked) -> None:
        if not self.is_writable:
            return
        target = self.folder / key[:2] / key
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
                json.dump(to_data(checked), file)
            os.replace(file.name, target)
        except OSError:  # a read-only home: go on without
            self.is_writable = False


@functools.cache
def _checksum() -> str:
    """Changes with the source of the linter and with the version of Python."""
    digest = hashlib.sha256(sys.version.encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
