"""The tables of README and docs that are made from results: `python benchmarks/tables.py` writes them anew.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end of table -->`. The worst row comes first.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_NAMES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/certificates.md",
    "docs/distributed.md",
    "docs/retry.md",
    "docs/watch.md",
    "docs/lint.md",
)
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


def tracing() -> str:
    """What Dynamo takes to trace a watched model, against the unwatched one."""
    models: dict[str, Any] = _result("tracing")["models"]
    names = {"hooks called": "", "hooks traced": ", traced"}
    labels = {"GPT of ours": "the GPT of `benchmarks/models.py`"}
    cases = ("inference", "training")
    rows = [(f"{labels.get(model, model)}, {case}", models[model][case]) for model in models for case in cases]
    rows.sort(key=lambda row: -row[1]["quarantine"]["ratio"])
    return _table(
        ["ratio to unwatched: modules / quarantine", *names],
        [
            [label, *[_cell(found, "ratio", 2, tuple(f"{one}{how}" for one in VARIANTS)) for how in names.values()]]
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


# How the README names the rows of `cpu.json`.
_CHANNEL = (
    "eager `flag_nan`, clean batch, against the bare `isnan(x).any(-1)`",
    "eager `flag_nan`, 2 bad rows, against the same",
    "... 2 rows that were bad before",
    "eager `flag_nan_and_inf`, clean, against `flag_nan`",
    "... 2 bad rows",
    "`merge(2)`, clean: times faster than published",
    "... errors in different rows",
    "... errors in the same rows",
    "`summary`, 16 slots: times faster",
    "`summary`, 256 slots: times faster",
    "compile time, 12 x (Linear, GELU, `flag_nan`), against unguarded",
    "compiled run, the same",
    "compile time with `flag_nan_and_inf`",
    "compiled run, the same",
)


def channel() -> str:
    """The error channel on the CPU, against the published package."""
    rows = [
        [label, *["" if one[of] is None else f"{one[of]:.2f}" for of in ("ours", "published")]]
        for label, one in zip(_CHANNEL, _result("cpu")["ratios"], strict=True)
    ]
    return _table(["work", "2.0.0a1", "published 1.1.0"], rows)


def checked_calls() -> str:
    """What validating a call takes."""
    found = _result("typing")["microseconds"]
    base, plain = found["jaxtyped(typechecker=beartype)"], found["compiled, no check"]
    rows = [["`jaxtyped(typechecker=beartype)`", f"{base:.1f}", ""]]
    for label, name in (("jaxtyping's", "tensorcheck, jaxtyping's"), ("torchguard's", "tensorcheck, our")):
        took = found[f"{name} annotations"]
        rows.append([f"`@tensorcheck`, {label} annotations", f"{took:.1f}", f"{took / base:.2f}"])
    took = found["compiled, tensorcheck"]
    rows.append(["compiled, `@tensorcheck`, against no check", f"{took:.1f}", f"{took / plain:.2f}"])
    return _table(["three arguments and a return value", "microseconds", "ratio"], rows)


def watched() -> str:
    """Calls and compilations of our own models, against the unwatched model."""
    quarantine, once = "modules + quarantine", "`compile_once=True`"
    sources = [
        ("H200, bf16, 24 GPT blocks of width 1,024, `blocks`", "blocks", "watched-h200"),
        ("... `modules`", "modules", "watched-h200"),
        (f"... `modules`, {once}, slow host", "modules, once", "watched-h200-slow-host"),
        ("... with quarantine", quarantine, "watched-h200"),
        (f"... with quarantine, {once}", f"{quarantine}, once", "watched-h200-once"),
        ("CPU, 12 x (Linear(512), GELU), batch 32, `blocks`", "blocks", "watched-cpu"),
        ("... `modules`", "modules", "watched-cpu"),
        ("... with quarantine", quarantine, "watched-cpu"),
    ]
    rows = []
    for label, name, file in sources:
        found, works = _result(file), ("inference", "training")
        calls = [f"{found['ratios'][work][name]:.2f}" for work in works]
        rows.append([label, *calls, " / ".join(f"{found['compile ratios'][work][name]:.1f}" for work in works)])
    return _table(["", "inference", "training", "compiling, inference / training"], rows)


def guards() -> str:
    """A call with fewer guards, and with an audit, in microseconds."""
    found, ratios = _result("guards"), {one["work"]: one["ours"] for one in _result("guards")["ratios"]}
    labels = {
        "full": "all guards",
        "modules + audit": "`skip_nn_modules()`, `audit(every=100)`",
        "modules": "`skip_nn_modules()`",
        "filtered + check by hand": (
            "`skip_nn_modules() & skip_globals()`, all guards checked by hand in every 100th call"
        ),
        "filtered + audit": "the same filter, `audit(every=100)`",
        "filtered": "the same filter",
        "skip_all()": "no guards at all",
    }
    rows = []
    for name, label in labels.items():
        took = [found["microseconds"][how][name] for how in ("back to back", "swept")]
        without = name.removesuffix(" + audit")
        against = [ratios[f"{name} / {without}, {how}"] for how in ("back to back", "swept")] if without != name else []
        rows.append([label, *[f"{one:.1f}" for one in took], " / ".join(f"{one:.3f}" for one in against)])
    head = ["", "back to back", "caches evicted before each call", "audited, against not audited"]
    return _table(head, rows)


def compiled() -> str:
    """A compiled function with its VJP, against `torch.compile` and `torch.autograd.grad`."""
    cpu, h200 = ({one["work"]: one["ours"] for one in _result(name)["rows"]} for name in ("compiled", "compiled-h200"))
    rows = []
    for model in ("attention, D=1024", "attention, D=128", "attention, D=64", "tiny MLP"):
        names = [f"{model}: whole VJP / torch.compile", f"{model}: further seed / whole VJP"]
        took = [cpu.get(names[0]), cpu.get(names[1]), h200[names[0]]]
        rows.append([model, *["" if one is None else f"{one:.2f}" for one in took]])
    leaves, seconds = (
        [f"{one[work]:.{digits}f}" for one in (cpu, h200)]
        for work, digits in (("check of 4 leaves, us", 1), ("algebraic certificate of attention, s", 2))
    )
    rows.append(["checking four leaves, microseconds", leaves[0], "", leaves[1]])
    rows.append(["the algebraic certificate of an attention block, seconds", seconds[0], "", seconds[1]])
    more = "CPU: one more cotangent, relative to the value and VJP"
    return _table(["", "CPU: value and VJP", more, "H200: value and VJP"], rows)


def devices() -> str:
    """Compiling for a simulated device, and with artifacts captured, against `aot_eager`."""
    works = {
        "every rule, core decompositions / aot_eager": (
            "check every rule, with core ATen decompositions, for which the graphs are traced again"
        ),
        "every rule / aot_eager": "check every rule",
        "default device / aot_eager": "check the default device",
    }
    found = {one["work"]: one for one in _result("device")["ratios"]}
    rows = [[label, f"{found[work]['ours']:.2f}", f"{found[work]['check alone']:.2f}"] for work, label in works.items()]
    rows.insert(1, ["capture artifacts", f"{_result('artifacts')['ratios'][0]['ours']:.2f}", ""])
    return _table(["", "compiling", "compiling, and the check alone, one after the other"], rows)


def linters() -> str:
    """The command beside TorchFix, in seconds."""
    (package,) = _result("lint")["packages"]
    took = package["seconds"]
    times = f"{took['torchfix']:.1f}, {package['torchfix / ours']:.0f} times as long"
    rows = [
        ["TorchFix 0.7", times],
        ["`torchguard lint`", f"{took['torchguard, first run']:.1f}"],
        ["from the cache", f"{took['torchguard, from the cache']:.1f}"],
    ]
    return _table(["", "seconds"], rows)


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


TABLES: dict[str, Callable[[], str]] = {
    "channel": channel,
    "checked-calls": checked_calls,
    "watched": watched,
    "guards": guards,
    "compiled": compiled,
    "devices": devices,
    "linters": linters,
    "costs": costs,
    "host": host,
    "tracing": tracing,
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
    ratios, compiled = result["ratios"]["inference"], result["compile ratios"]["inference"]
    found = {
        name: {"back to back, ratio": ratios[stored], "compile, ratio": compiled[stored]}
        for name, stored in _OURS.items()
    }
    return [("the GPT of `benchmarks/models.py`, inference", found)]


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
