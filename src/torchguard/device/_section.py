"""A device report as a section: whether the graphs fit first, then why not, memory, and the roofline."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchguard._graphs.source_lines import SourceLine
from torchguard.device._violations import abbreviated, distinct
from torchguard.report import (
    Answer,
    Block,
    Facts,
    LineChart,
    Point,
    Roofline,
    Section,
    Series,
    Status,
    Table,
    format_cell,
)

if TYPE_CHECKING:
    from torchguard.device._report import DeviceReport, GraphReport

_LARGEST = 15  # tensors alive at a peak


def device_section(report: "DeviceReport") -> Section:
    """The section of a device report. Partitions are left out: they are expensive to compute."""
    answer = Answer(_status(report), report.verdict)
    if not report.graphs:
        return Section("Device", (answer,))
    coverage = report.coverage
    facts = Facts(
        (
            ("Device", ", ".join(dict.fromkeys(one.device.name for one in report.graphs))),
            ("Graphs", len(report.graphs)),
            ("Ops supported", f"{coverage.by_count:.1f} % of {coverage.ops:,}"),
            (
                "FLOPs supported",
                f"{coverage.by_flops:.1f} % of {coverage.flops:,}" if coverage.flops else "none counted",
            ),
            ("Violations", len(report.violations)),
            ("Peak memory", format_cell(report.peak_memory, "bytes")),
            ("Transferred for fallbacks", format_cell(report.transfer_bytes, "bytes")),
        )
    )
    largest = max(range(len(report.graphs)), key=lambda i: report.graphs[i].memory.peak)
    graphs = tuple(_graph(i, graph, is_open=i == largest) for i, graph in enumerate(report.graphs))
    return Section("Device", (answer, facts, *_violations(report), *_training(report)), graphs)


def _status(report: "DeviceReport") -> Status:
    if any(not one.holds_now for one in report.violations):
        return "bad"
    if report.failures or not report.graphs:
        return "unknown"
    memory = report.graphs[0].device.max_memory
    fits_adam = memory is None or max((one.with_adam for one in report.training), default=0) <= memory
    return "ok" if fits_adam and not report.violations else "warning"


def _violations(report: "DeviceReport") -> Iterator[Block]:
    if report.failures:
        yield Table(("rule that raised",), tuple((one,) for one in report.failures), "Not known, because rules raised")
    if not report.violations:
        return
    by_line: Counter[tuple[str, str]] = Counter()
    for one in report.violations:
        line = one.source_line
        by_line[(_where(line), line.text) if line else ("(no line)", "")] += len(one.nodes) or 1
    rows = tuple((where, text, count) for (where, text), count in by_line.most_common())
    yield Table(("line", "source", "nodes"), rows, "Violations by source line")
    rows = tuple(
        (
            one.code,
            one.graph,
            one.op,
            one.message,
            abbreviated(one.tensors) if one.tensors else "",
            one.condition,
            _where(one.source_line) if one.source_line else abbreviated(one.modules) if one.modules else "",
            one.remedy,
            max(1, len(one.nodes)) * graphs,
        )
        for one, graphs in distinct(report.violations)
    )
    columns = ("rule", "graph", "op", "what", "tensor", "needs", "where", "what to do", "nodes")
    yield Table(columns, rows, "Violations")


def _training(report: "DeviceReport") -> Iterator[Table]:
    if not report.training:
        return
    rows = tuple(
        tuple(
            format_cell(size, "bytes")
            for size in (one.peak, one.gradients, one.peak + one.adam_state // 2, one.with_adam)
        )
        for one in report.training
    )
    columns = ("peak", "of it gradients", "with momentum", "with the state of Adam")
    yield Table(columns, rows, "A training step, for each forward graph with a backward graph")


def _graph(number: int, graph: "GraphReport", is_open: bool) -> Section:
    plan, device = graph.memory, graph.device
    limits = (("memory of the device", float(device.max_memory)),) if device.max_memory else ()
    curve = tuple(float(size) for size in plan.curve.values())
    memory = LineChart(
        f"Memory of {graph.name}: peak {format_cell(plan.peak, 'bytes')} at {plan.peak_node}",
        "node",
        "alive",
        tuple(range(len(curve))),
        (Series("alive", curve),),
        tuple(plan.curve),
        "bytes",
        limits if limits and limits[0][1] < 4 * plan.peak else (),
    )
    rows = tuple(
        (one.name, format_cell(one.bytes, "bytes"), _where(one.source_line)) for one in plan.at_peak[:_LARGEST]
    )
    total = len(plan.at_peak) if len(plan.at_peak) > _LARGEST else None
    alive = Table(("tensor", "size", "where"), rows, "Alive at the peak, the largest first", total=total)
    unknown = (
        (Answer("unknown", f"Sizes not known, and not counted: {', '.join(plan.unknown)}"),) if plan.unknown else ()
    )
    return Section(f"Graph {number}: {graph.name}", (*unknown, memory, alive, *_roofline(graph)), collapsed=not is_open)


def _roofline(graph: "GraphReport") -> Iterator[Roofline]:
    """Where the device gives both rates: the ops with FLOPs, by their least time."""
    device = graph.device
    if device.peak_flops is None or device.bandwidth is None:
        return
    points = tuple(
        Point(one.op, float(one.flops), float(one.bytes), _where(one.source_line)) for one in graph.work if one.flops
    )
    if points:
        title = f"Roofline of {graph.name} on {device.name}: matrix products, convolutions and attention"
        yield Roofline(title, device.peak_flops, device.bandwidth, points)


def _where(line: SourceLine | None) -> str:
    """A source line; its file relative to the current directory, if it is below that."""
    if line is None:
        return ""
    file = line.file.removeprefix(f"{os.getcwd()}{os.sep}")
    return f"{file}:{line.line}"
