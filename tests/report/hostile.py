"""A report with every block, whose text tries to run scripts and to leave its place in the page."""

from torchguard.report import (
    Answer,
    Code,
    Facts,
    FlameGraph,
    Frame,
    HeatMap,
    LineChart,
    Pane,
    Point,
    Report,
    Roofline,
    Section,
    Series,
    Span,
    Table,
    Text,
    Timeline,
)

EVIL = (
    '</script></details><script>window.hacked=1</script><img src=x onerror="window.hacked=1">\'\\"\u2028\x1b[31m{{7*7}}'
)


def hostile_report(evil: str = EVIL, rows: int = 60) -> Report:
    """Every kind of block, with `evil` wherever text can stand."""
    values = Section(
        f"Values {evil}",
        (
            Answer("bad", f"Samples went bad at {evil}"),
            Text(evil),
            Text(evil, preformatted=True),
            Facts(((evil, evil),)),
            LineChart(
                evil,
                "step",
                evil,
                (0, 1, 2),
                (Series(evil, (1.0, None, 3.0)), Series("b", (1.0, 2.0, 0.0))),
                (evil,) * 3,
            ),
            HeatMap(evil, "module", "step", (evil, "layer.1", "layer.2"), 4, ((0, 1, 2), (1, 3, 5)), "samples"),
            Table(("step", "module"), tuple((i, f"{evil} {i}") for i in range(rows)), evil, ("incident",) * rows),
        ),
        (Section(f"Incident {evil}", (Text(evil),), id="incident", collapsed=True),),
    )
    compiled = Section(
        "Compile",
        (
            Answer("warning", "One recompile."),
            Timeline(evil, (Span(evil, 0.0, 1.0, evil, "ok", (evil,)), Span("b", 1.0, 0.0, evil, "bad"))),
            FlameGraph(evil, "us", Frame(evil, 10.0, (Frame(evil, 6.0),))),
            Code(evil, (Pane(evil, (evil, "b"), (evil, "")), Pane("b", ("one", "two"), (evil, "")))),
            Roofline(evil, 1e12, 1e11, (Point(evil, 1e6, 1e5, evil), Point("view", 0.0, 10.0))),
        ),
    )
    return Report(evil, (values, compiled), ((evil, evil),))
