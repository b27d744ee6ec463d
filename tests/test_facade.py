"""What `import torchguard` exports, and what it does not load."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import torchguard
from torchguard import ErrorCode, ErrorDomain, Severity, err, experimental

ROOT = Path(__file__).parents[1]
DOCUMENTED = """
    report err flags error_t has_err find push fix flag_nan flag_inf flag_nan_and_inf flag_oob_indices tracked
    ErrorCode ErrorDomain Severity ErrorFlags UnpackedError ErrorLocation
    ErrorConfig AccumulationConfig Priority Order Dedupe CONFIG get_config set_config
    SLOT_BITS SLOTS_PER_WORD SLOT_MASK SEVERITY_SHIFT SEVERITY_BITS SEVERITY_MASK CODE_SHIFT CODE_BITS CODE_MASK
    LOCATION_SHIFT LOCATION_BITS LOCATION_MASK
    IF HAS IS OR AND NOT Ok Err Result as_result as_exception unwrap experimental TorchGuardError __version__
    Retry RetryReport RetryError TensorHealth check_params check_grads is_retrying
    watch unwatch Incident WatchError tensorcheck AnnotationError ValidationError
    DimensionMismatchError DTypeMismatchError DeviceMismatchError
    InvalidParameterError TypeMismatchError InvalidReturnTypeError
    guards artifacts device compiled typing lint distributed training testing export integrations
"""


def test_the_facade_is_the_documented_list():
    documented = DOCUMENTED.split()
    assert set(torchguard.__all__) == set(documented)
    assert all(getattr(torchguard, name) is not None for name in documented)


def test_codes_are_attributes_of_err():
    assert (err.OK, err.NAN, err.INF, err.OVERFLOW) == (0, 1, 2, 3)
    assert (err.OUT_OF_BOUNDS, err.OOB, err.NEGATIVE_IDX, err.EMPTY_INPUT) == (5, 5, 6, 7)
    assert (err.ZERO_OUTPUT, err.CONSTANT_OUTPUT, err.SATURATED) == (9, 10, 11)
    assert (err.FALLBACK_VALUE, err.VALUE_CLAMPED, err.UNKNOWN) == (13, 14, 15)
    assert (err.WARN, err.ERROR, err.CRITICAL) == (1, 2, 3)


def test_domains():
    assert (ErrorDomain.NUMERIC, ErrorDomain.INDEX, ErrorDomain.QUALITY, ErrorDomain.RUNTIME) == (0, 1, 2, 3)
    assert ErrorCode.domain_name(err.OOB) == "INDEX"
    assert ErrorCode.in_domain(err.SATURATED, ErrorDomain.QUALITY)
    assert ErrorCode.subcode(err.SATURATED) == 3
    assert ErrorDomain.name(9) == "DOMAIN_9"


def test_names():
    assert [ErrorCode.name(code) for code in (0, 1, 5, 8, 15)] == ["OK", "NAN", "OUT_OF_BOUNDS", "CODE_8", "UNKNOWN"]
    assert [Severity.name(level) for level in range(5)] == ["OK", "WARN", "ERROR", "CRITICAL", "SEVERITY_4"]
    assert Severity.is_critical(3)
    assert Severity.is_error_or_worse(2)
    assert not Severity.is_warn_or_worse(0)
    assert ErrorCode.is_critical(err.NAN)
    assert not ErrorCode.is_critical(err.OOB)


def test_experimental_has_the_same_namespace():
    assert set(err.__all__) <= set(experimental.err.__all__)
    assert all(hasattr(experimental.err, name) for name in experimental.err.__all__)


def test_importing_is_light():
    script = (
        "import sys, torch, jaxtyping; before = set(sys.modules); import torchguard;"
        "print({name.split('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "{'torchguard'}"


def public_modules():
    for found in pkgutil.walk_packages(torchguard.__path__, "torchguard."):
        if not any(part.startswith("_") for part in found.name.split(".")[1:]):
            yield importlib.import_module(found.name)


def test_public_modules_list_their_names_and_each_is_documented():
    for module in public_modules():
        assert module.__all__, module.__name__
        for name in module.__all__:
            thing = getattr(module, name)
            is_undocumented = inspect.isclass(thing) or inspect.isfunction(thing)
            assert not is_undocumented or inspect.getdoc(thing), f"{module.__name__}.{name} has no docstring"


def documented_tree() -> dict[str, list[str]]:
    """Each folder of the tree in docs/architecture.md, and what is listed in it; nothing for a folder as a whole."""
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    folders, path = {"": []}, [""]
    for line in tree.strip().splitlines()[1:]:
        branch = re.fullmatch(r"((?:│   |    )*)[├└]── (.+?)(?:  .*)?", line)
        depth = len(branch[1]) // 4
        for name in branch[2].split(", "):
            folders[path[depth]].append(name.removesuffix("/"))
            if name.endswith("/"):
                path[depth + 1 :] = [f"{path[depth]}{name}"]
                folders[path[-1]] = []
    return folders


def test_the_tree_in_the_docs_is_the_tree():
    package = ROOT / "src/torchguard"
    for folder, listed in documented_tree().items():
        names = {path.name for path in (package / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
        names -= {"__init__.py", "__main__.py", "__pycache__"}
        assert not listed or names == set(listed) - {"__init__.py"}, folder


def test_the_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = [*re.findall(r"`([\w./-]+)`", text), *re.findall(r"\]\(([\w./-]+)\)", text)]
    paths = {one for one in named if "/" in one or one.endswith((".md", ".toml", ".txt"))}
    assert len(paths) > 30
    assert {
        one for one in paths if not any((folder / one).exists() for folder in (ROOT, ROOT / "src/torchguard"))
    } == set()


MOST_LINES, FEWEST_LINES = 400, 80
# Short files with at most one importer that are files of their own, by the reason. Public modules need none.
SHORT_FILES = {
    "one file a verb": ("cli._diff", "cli._list", "cli._show"),
    "one file a topic of rules": ("device._rules.memory", "device._rules.ops"),
    "part of the seam to private torch": ("_torch.collectives",),
    "an entry point of flake8": ("lint._flake8",),
}


def source_files() -> dict[str, Path]:
    """The modules of src by name, without `torchguard.`; a package is named like its folder."""
    package = ROOT / "src/torchguard"
    names = {path: ".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")}
    return {name.removesuffix("__init__").rstrip("."): path for path, name in names.items()}


def importers(files: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that import each module; a package does not count as an importer of its own modules."""
    found = {name: set() for name in files}
    for importer, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
            else:
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in {one.removeprefix("torchguard.") for one in names} & files.keys():
                if name.rpartition(".")[0] != importer:
                    found[name].add(importer)
    return found


def test_no_file_is_long():
    sizes = {name: len(path.read_text().splitlines()) for name, path in source_files().items()}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}


def test_a_short_file_has_several_importers_or_a_reason():
    files = source_files()
    alone = {
        name
        for name, users in importers(files).items()
        if len(users) < 2
        and any(part.startswith("_") for part in name.split("."))
        and files[name].name not in ("__init__.py", "__main__.py")
        and len(files[name].read_text().splitlines()) < FEWEST_LINES
    }
    assert alone - {name for names in SHORT_FILES.values() for name in names} == set()


def test_a_public_class_name_means_one_thing():
    classes = {}
    for name, path in source_files().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(name)
    public = {name for module in public_modules() for name in module.__all__}
    several = {name: modules for name, modules in classes.items() if name in public and len(modules) > 1}
    # Two trainers, each with its own.
    assert set(several) == {"RetryMixin", "TorchGuardCallback"}
