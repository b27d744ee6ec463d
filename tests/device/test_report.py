"""The report: coverage, partitions, transfers and source lines."""

import json

import pytest
import torch
from torch import nn
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils.flop_counter import FlopCounterMode

from torchguard import artifacts, device
from torchguard.device import Device, mock_backend
from torchguard.device._partitions import _Supported


class TwoLayersAndGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        hidden = nn.functional.gelu(self.one(x))
        return self.two(hidden)


def report_of(model, x, dynamic=False, **fields):
    backend = mock_backend(Device(name="chip", **fields), mode="warning")
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic)(x)
    return backend.report()


x = torch.randn(4, 16)


def test_coverage_counts_ops_and_their_flops():
    coverage = report_of(TwoLayersAndGelu(), x, deny="aten.gelu").coverage
    assert (coverage.ops, coverage.supported_ops) == (3, 2)
    assert coverage.by_count == pytest.approx(100 * 2 / 3)
    assert coverage.by_flops == 100  # of these ops torch counts products alone
    assert report_of(TwoLayersAndGelu(), x, deny="aten.addmm").coverage.by_flops == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_flops_equal_those_of_torchs_counter(dynamic):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    image = torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(image)
    assert report_of(model, image, dynamic).coverage.flops == counted.get_total_flops() > 0


def test_flops_of_training_are_counted_in_both_graphs():
    backend = mock_backend(Device())
    model = TwoLayersAndGelu()
    torch.compile(model, backend=backend)(x).sum().backward()
    with FlopCounterMode(display=False) as counted:
        model(x).sum().backward()
    assert backend.report().coverage.flops == counted.get_total_flops()


def test_an_unsupported_op_splits_the_graph_and_its_tensors_are_transferred():
    report = report_of(TwoLayersAndGelu(), x, deny="aten.gelu")
    assert [partition.ops for partition in report.partitions] == [1, 1]
    assert [(one.bytes, one.direction) for one in report.transfers] == [
        (4 * 32 * 4, "to the host"),
        (4 * 32 * 4, "to the device"),
    ]
    assert report.transfer_bytes == 2 * 4 * 32 * 4
    assert all("nn.functional.gelu(self.one(x))" in one.source_line.text for one in report.transfers)


def test_a_supported_graph_is_one_partition_without_transfers():
    report = report_of(TwoLayersAndGelu(), x)
    assert [partition.ops for partition in report.partitions] == [3]
    assert report.transfers == ()
    assert report.coverage.by_count == 100


def test_a_tensor_is_transferred_once_for_all_its_uses():
    def fan(x):
        y = x.relu()
        return y.sin() + y.cos()

    report = report_of(fan, x, deny=["aten.sin", "aten.cos"])
    assert [one.direction for one in report.transfers].count("to the host") == 1
    assert report.transfer_bytes == 3 * 4 * 16 * 4


def bytes_to_host(fn, x, **fields):
    transfers = report_of(fn, x, **fields).transfers
    return [one.bytes for one in transfers if one.direction == "to the host"]


def test_every_used_byte_of_a_storage_is_transferred_once():
    rows = torch.randn(1000, 256)
    row = 256 * 4
    assert bytes_to_host(lambda x: x[:2].cos() + x[2:4].cos(), rows, deny="aten.cos") == [4 * row]
    assert bytes_to_host(lambda x: x[:2].cos() + x[1:3].cos(), rows, deny="aten.cos") == [3 * row]
    assert bytes_to_host(lambda x: x[:2].cos() + x[:2].sin(), rows, deny=["aten.cos", "aten.sin"]) == [2 * row]
    assert bytes_to_host(lambda x: x.expand(100, 256).cos(), rows[0], deny="aten.cos") == [row]
    assert bytes_to_host(lambda x: x[:4, ::2].cos(), rows, deny="aten.cos") == [4 * row // 2]
    assert bytes_to_host(lambda x: x[:, ::2].cos(), rows, deny="aten.cos") == [1000 * row // 2]
    assert bytes_to_host(lambda x: x[:0].cos(), rows, deny="aten.cos") == [0]


def test_an_unsupported_view_counts_as_an_unsupported_op():
    report = report_of(lambda x: x.t().sin(), x, deny="aten.t")
    assert (report.coverage.ops, report.coverage.supported_ops) == (2, 1)
    assert report.graphs[0].fallbacks == ("t",)
    assert report_of(lambda x: x.t().sin(), x).coverage.ops == 1


def test_views_run_where_their_input_is():
    report = report_of(lambda x: x.sin().t().cos().t(), x, deny=["aten.sin", "aten.cos"])
    assert report.partitions == ()
    assert sorted(one.direction for one in report.transfers) == ["to the device", "to the host"]


def test_partitions_come_from_torchs_partitioner():
    assert issubclass(_Supported, OperatorSupportBase)


def test_a_condition_that_holds_now_makes_no_op_unsupported():
    report = report_of(TwoLayersAndGelu(), torch.randn(8, 16), dynamic=True, alignment={0: 8})
    assert all(one.condition and one.holds_now for one in report.violations)
    assert report.violations
    assert report.coverage.by_count == 100


def test_violations_are_counted_by_rule_op_and_line():
    backend = mock_backend(Device(name="chip", deny=["aten.gelu", "aten.addmm"]))
    torch.compile(TwoLayersAndGelu(), backend=backend)(x)
    report = backend.report()
    assert report.by_rule() == {"TGD501": 3}
    assert report.by_op() == {"aten.addmm.default": 2, "aten.gelu.default": 1}
    assert sum(report.by_line().values()) == 3
    assert all(line.startswith(f"{__file__}:") for line in report.by_line())


def test_the_report_as_text_and_as_json():
    report = report_of(TwoLayersAndGelu(), x, deny="aten.gelu", alignment=128, max_memory="1MB")
    text = str(report)
    assert text.startswith("Does not fit chip, because ")
    assert "\n1 graph on chip: " in text
    assert "pad dim 1 from 16 to 128" in text
    assert "bytes to transfer" in text
    assert "peak " in text
    plain = json.loads(report.to_json())
    assert plain == json.loads(report.to_json(indent=2))
    assert plain["schema"] == 1
    (graph,) = plain["graphs"]
    assert graph["device"]["max_memory"] == 1_000_000
    assert len(graph["violations"]) == len(report.violations)
    assert graph["memory"]["peak"] == report.peak_memory == report.memory[0].peak
    assert plain["transfer_bytes"] == report.transfer_bytes
    assert {one["direction"] for one in graph["transfers"]} == {"to the host", "to the device"}
    assert str(device.DeviceReport()) == "nothing was compiled"


def test_the_text_has_singulars_and_says_where_no_flops_are_counted():
    text = str(report_of(torch.relu, x, deny="aten.relu"))
    assert "\n1 graph on chip: 0.0 % of 1 op, no FLOPs counted; 1 violation\n" in text
    assert "  0 partitions, 1 host fallback, " in text
    text = str(report_of(TwoLayersAndGelu(), x))
    assert "% of 3 ops, 100.0 % of 8,192 FLOPs; 0 violations" in text
    assert "  1 partition, 0 host fallbacks, 0 bytes to transfer" in text


def test_the_sum_of_reports_covers_the_graphs_of_both():
    one, other = report_of(TwoLayersAndGelu(), x, deny="aten.gelu"), report_of(TwoLayersAndGelu(), x)
    both = one + other
    assert len(both.graphs) == 2
    assert both.coverage == one.coverage + other.coverage
    assert both.violations == one.violations
    assert both.transfer_bytes == one.transfer_bytes


def test_a_capture_contains_the_report(tmp_path):
    with artifacts.capture(tmp_path) as captured:
        backend = mock_backend(Device(deny="aten.gelu"))
        torch.compile(TwoLayersAndGelu(), backend=backend)(x).sum().backward()
    (artifact,) = captured.artifacts
    (name,) = artifact.attached("device.json")
    attached = artifact.read_json(name)
    assert attached == json.loads(backend.report().to_json(partitions=False))
    assert attached["schema"] == 1
    assert {"violations", "coverage", "memory", "transfers", "fallbacks"} <= attached["graphs"][0].keys()


def test_compiling_does_not_wait_for_partitions(tmp_path):
    with artifacts.capture(tmp_path):
        backend = mock_backend(Device(deny="aten.gelu"))
        torch.compile(TwoLayersAndGelu(), backend=backend)(x)
    graph = backend.report().graphs[0]
    assert "partitions" not in vars(graph)  # a cached property that was not read
    assert graph.to_dict()["partitions"][0]["ops"] == 1


def test_a_capture_of_a_rejected_graph_contains_the_report(tmp_path):
    with artifacts.capture(tmp_path) as captured:
        backend = mock_backend(Device(deny="aten.gelu"), mode="strict")
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(TwoLayersAndGelu(), backend=backend)(x)
    attached = [artifact for artifact in captured.artifacts if artifact.attached("device.json")]
    assert len(attached) == 1


def test_the_first_line_says_whether_it_fits():
    def first_line(fn, **fields):
        return str(report_of(fn, x, **fields)).splitlines()[0]

    assert first_line(torch.relu) == "Fits chip"
    assert first_line(torch.relu, deny="relu") == (
        "Does not fit chip, because aten.relu.default: chip does not support aten.relu (TGD501)"
    )
    assert first_line(lambda x: x.relu().sin(), deny="relu, sin").endswith("(TGD501), and 1 more violation")
    dynamic = torch.compile(torch.relu, backend=(backend := mock_backend(alignment=8)), dynamic=True)
    dynamic(torch.randn(4, 8))
    assert backend.report().verdict.startswith("Fits mock at the sizes of this call, but not at all sizes: it needs ")


def test_a_training_step_has_gradients_and_the_state_of_an_optimizer():
    backend = mock_backend(Device(name="chip", max_memory=1000))
    layer = nn.Linear(8, 8)
    layer.bias.requires_grad_(False)
    torch.compile(layer, backend=backend)(torch.randn(2, 8)).sum().backward()
    (step,) = backend.report().training
    assert (step.gradients, step.adam_state) == (8 * 8 * 4, 2 * 8 * 8 * 4)
    assert step.peak == backend.report().peak_memory
    assert backend.report().verdict.startswith("Fits chip, but not with the state of Adam: a training step then needs")
    assert "outputs held to the end" in str(backend.report())
    assert report_of(torch.relu, x).training == ()


def test_a_violation_of_a_function_that_recompiles_is_printed_once():
    backend = mock_backend(Device(deny="aten.gelu"), mode="warning")
    compiled = torch.compile(nn.GELU(), backend=backend, dynamic=False)
    for rows in (2, 3):
        compiled(torch.randn(rows, 4))
    report = backend.report()
    assert len(report.violations) == 2
    assert str(report).count("TGD501 inference: aten.gelu.default") == 1
    assert "[in 2 graphs]" in str(report)
