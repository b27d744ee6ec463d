"""The tables of README and docs that are made from results: `python benchmarks/tables.py` writes them anew.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end of table -->`. The worst row comes first.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_NAMES = ("README.md", "docs/benchmarks.md", "docs/certificates.md", "docs/distributed.md", "docs/retry.md")
PAGES = [Path(__file__).parents[1] / name for name in _NAMES]
VARIANTS = ("modules", "quarantine")
# The GPT of ours is measured by `watched.py gpu`, under other names.
_OURS = {"modules": "modules", "quarantine": "modules + quarantine"}
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Row = tuple[str, dict[str, dict[str, float]]]


def costs() -> str:
    """Ratios to the unwatched model, by model and work: those of `modules` / of quarantine."""
    columns = ("back to back", "latency", "peak memory", "compile")
    head = ["H200, ratio to unwatched: modules / quarantine", *columns]
    rows = sorted([*_families(), *_ours()], key=lambda row: -row[1]["quarantine"]["back to back, ratio"])
    return _table(head, [[label, *[_cell(found, f"{one}, ratio", 2) for one in columns]] for label, found in rows])


def host() -> str:
    """What a call takes of the host, by model and work."""
    figures = {"host": "microseconds of the host", "launches": "kernels", "guards": "guards"}
    head = ["H200: unwatched / modules / quarantine", *figures.values(), "guards a watched module"]
    rows = sorted(_families(), key=lambda row: -row[1]["quarantine"]["host, ratio"])
    names = ("unwatched", *VARIANTS)
    return _table(
        head,
        [
            [label, *[_cell(found, one, 0, names) for one in figures], _cell(found, "guards a module", 1)]
            for label, found in rows
        ],
    )


def certificates() -> str:
    """How many functions pass each layer, and how many are inconclusive or fail."""
    functions: dict[str, dict[str, str]] = json.loads((RESULTS / "certificates.json").read_text())["functions"]
    layers = {
        "`typed`": ("typed forward",),
        "`algebraic`, JVP and VJP": ("algebraic jvp", "algebraic vjp"),
        "`algebraic`, all with HVP": ("algebraic jvp", "algebraic vjp", "algebraic hvp"),
        "`enclosure`": ("enclosure forward",),
    }
    rows = []
    for layer, claims in layers.items():
        # A function that the compiler refuses has no claims: nothing is shown about it.
        found = [{verdicts.get(claim, "inconclusive") for claim in claims} for verdicts in functions.values()]
        failed = sorted(name for name, one in zip(functions, found, strict=True) if "fail" in one)
        passed = sum(one == {"pass"} for one in found)
        other = len(functions) - passed - len(failed)
        names = ", ".join(f"`{name}`" for name in failed)
        rows.append([layer, f"{passed} ({passed / len(functions):.0%})", str(other), names or "none"])
    return _table([f"of {len(functions)} functions", "passed", "inconclusive", "failed"], rows)


def retry() -> str:
    """What a step guarded by `Retry` takes, in times of the same step without it."""
    head = [
        "",
        "a step, ms",
        "`wait=True`",
        "`wait=False`",
        "norm read first",
        "launched ahead",
        "a bad step",
        "memory",
    ]
    rows = []
    for path in ("retry-h200.json", "retry-cpu.json"):
        results = json.loads((RESULTS / path).read_text())
        found = results.pop("environment")
        machine, version = found["machine"].removeprefix("NVIDIA "), found["torch"].split("+")[0]
        for model, one in sorted(results.items(), key=lambda item: -item[1]["ratio"]["wait=True"]):
            ratios = [one["ratio"].get(name) for name in ("wait=True", "wait=False", "plain, waiting", "plain, ahead")]
            bad, memory = one["bad step"], one.get("memory", {}).get("wait=True")
            rows.append(
                [
                    f"{model}, {machine}, torch {version}",
                    f"{one['ms']['plain']:.1f}",
                    *["" if ratio is None else f"{ratio:.3f}" for ratio in ratios],
                    f"{bad['ratio']:.1f} ({bad['runs']} runs)",
                    "" if memory is None else f"{memory:.2f}",
                ]
            )
    return _table(head, rows)


def ranks() -> str:
    """A digest at some numbers of ranks: what a rank computes, measured, and the messages, simulated."""
    head = [
        "ranks",
        "a rank computes, measured: 32 / 1,024 samples",
        "one reduction, simulated",
        "the same gathered, simulated",
        "bytes of a rank: reduction / gather",
    ]
    rows = []
    for count, one in json.loads((RESULTS / "ranks.json").read_text())["digest"].items():
        computed = " / ".join(map(_duration, one["us by samples"].values()))
        times = [_duration(one[name]) for name in ("reduced, us", "gathered, us")]
        rows.append([f"{int(count):,}", computed, *times, f"{one['bytes']:,} / {one['gathered, bytes']:,}"])
    return _table(head, rows)


def gloo() -> str:
    """Small reductions of gloo by size, and calls of ours, on the machine of the benchmark."""
    found = json.loads((RESULTS / "ranks.json").read_text())["gloo, us"]
    names = [*next(iter(found.values()))]
    head = ["gloo on one machine, measured", *[f"`{one}`" if "bytes" not in one else one for one in names]]
    return _table(head, [[f"{size} ranks", *map(_duration, one.values())] for size, one in found.items()])


def store() -> str:
    """What `name_failures` asks of the store, by the number of ranks."""
    found = json.loads((RESULTS / "ranks.json").read_text())["store"]
    head = ["ranks", "one sign of life", "reading the notes of all ranks"]
    return _table(head, [[f"{int(ranks):,}", *map(_duration, one.values())] for ranks, one in found.items()])


def _duration(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.1f} ms" if us < 10_000 else f"{us / 1000:.0f} ms"


TABLES: dict[str, Callable[[], str]] = {
    "costs": costs,
    "host": host,
    "certificates": certificates,
    "retry": retry,
    "ranks": ranks,
    "gloo": gloo,
    "store": store,
}


def _families() -> list[Row]:
    models: dict[str, Any] = json.loads((RESULTS / "families-h200.json").read_text())["models"]
    return [
        (f"{model}, {case}", found)
        for model, cases in models.items()
        for case, found in cases.items()
        if case != "work" and "failed" not in found
    ]


def _ours() -> list[Row]:
    result = json.loads((RESULTS / "watched-h200.json").read_text())
    rows = []
    for work in ("inference", "training"):
        ratios, compiled = result["ratios"][work], result["compile ratios"][work]
        found = {
            name: {"back to back, ratio": ratios[stored], "compile, ratio": compiled[stored]}
            for name, stored in _OURS.items()
        }
        rows.append((f"the GPT of `benchmarks/models.py`, {work}", found))
    return rows


def _cell(found: dict[str, dict[str, float]], figure: str, digits: int, names: tuple[str, ...] = VARIANTS) -> str:
    values = [found[name].get(figure) for name in names]
    return "" if None in values else " / ".join(f"{value:.{digits}f}" for value in values)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(page: str) -> str:
    """A page with its tables as the results have them."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", page)


def main() -> None:
    for path in PAGES:
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
