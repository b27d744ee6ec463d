"""Custom rules: for which devices they run, their codes, and their errors."""

import json
import logging

import pytest
import torch
from tests.device.chip import codes, only, violations_of
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard import device
from torchguard.device import Device

x = torch.randn(4, 8)


class EvenRows(device.Constraint):
    """The number of rows of a result is even."""

    code = "MINE1"

    def check(self, graph, device):
        for node in graph.ops:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] % 2:
                yield self.violation(graph, f"{value.shape[0]} rows", node=node, remedy="add a row")


def test_a_custom_rule_is_for_every_device_or_for_one():
    odd = torch.randn(3, 8)
    own = only(violations_of(torch.relu, odd, constraints=[EvenRows()]))
    assert (own.code, own.message, own.remedy) == ("MINE1", "3 rows", "add a row")
    assert violations_of(torch.relu, odd) == ()
    device.register(EvenRows)
    try:
        assert codes(violations_of(torch.relu, odd)) == ["MINE1"]
        with pytest.raises(device.DeviceError, match="MINE1 is taken by EvenRows"):
            device.register(EvenRows())
    finally:
        device.unregister("MINE1")
    assert violations_of(torch.relu, odd) == ()


class Raises(device.Constraint):
    code = "MINE3"

    def check(self, graph, device):
        raise KeyError("a bug in the rule")


def test_a_custom_rule_needs_a_code_of_its_own():
    class Mine(EvenRows):
        code = "TGD301"

    with pytest.raises(device.DeviceError, match=r"The code TGD301 is taken by Alignment\. Choose another"):
        Device(constraints=[Mine()])
    with pytest.raises(device.DeviceError, match=r"The code MINE1 is taken by EvenRows\. Choose another"):
        Device(constraints=[EvenRows(), EvenRows()])
    own = Device(constraints=[EvenRows()])
    device.register(EvenRows)
    try:
        graph = make_fx(torch.relu, tracing_mode="fake")(x)
        with pytest.raises(device.DeviceError, match="MINE1 is taken"):
            device.check(graph, device=own)
    finally:
        device.unregister("MINE1")


def test_an_error_in_a_rule_names_the_rule():
    graph = make_fx(lambda x: x.double(), tracing_mode="fake")(x)
    with pytest.raises(device.DeviceError, match=r"rule MINE3 \(Raises\) failed on the inference graph: KeyError"):
        device.check(graph, device=Device(constraints=[Raises()]))
    report = device.check(graph, device=Device(constraints=[Raises(), EvenRows()]), strict=False)
    assert codes(report.violations) == ["TGD102"]


def test_a_device_with_a_rule_that_fails_is_not_said_to_fit():
    graph = make_fx(torch.relu, tracing_mode="fake")(x)
    report = device.check(graph, device=Device(constraints=[Raises()]), strict=False)
    assert report.verdict.startswith("Not known whether it fits mock, because rule MINE3 (Raises) failed")
    assert json.loads(report.to_json())["graphs"][0]["failures"] == [*report.failures]


def test_only_rules_can_be_registered():
    with pytest.raises(device.DeviceError, match="expected a Constraint with a code"):
        device.register(object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(device.DeviceError, match="there is no rule 'MINE2'"):
        device.unregister("MINE2")


def test_an_error_in_a_rule_is_logged_and_raised_in_strict_mode(caplog):
    its_own = Device(constraints=[Raises()], deny="aten.gelu")
    backend = device.mock_backend(its_own, mode="warning")
    with caplog.at_level(logging.WARNING, "torchguard.device"):
        torch.compile(nn.GELU(), backend=backend)(torch.randn(3, 16))
    assert any(
        "rule MINE3 (Raises) failed on the inference graph: KeyError" in one.getMessage() for one in caplog.records
    )
    assert backend.report().by_rule() == {"TGD501": 1}
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="rule MINE3") as raised:
        torch.compile(nn.GELU(), backend=device.mock_backend(its_own, mode="strict"))(torch.randn(3, 16))
    assert isinstance(raised.value.inner_exception, device.DeviceError)


class ComparesSizes(device.Constraint):
    code = "MINE4"

    def check(self, graph, device):
        for node in graph.ops:
            rows = node.meta["val"].shape[0]
            if rows > 8 or rows == 5 or rows % 3 == 0:
                yield self.violation(graph, "an odd number of rows", node=node)


def test_a_rule_may_compare_symbolic_sizes_without_adding_guards():
    backend = device.mock_backend(Device(constraints=[ComparesSizes()]), mode="warning")
    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for rows in (5, 16, 4, 20, 6):
        torch.testing.assert_close(compiled(torch.ones(rows)), torch.full((rows,), 2.0))
    assert len(backend.report().graphs) == 1
    assert backend.report().by_rule() == {"MINE4": 1}
