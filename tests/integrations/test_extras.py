"""Libraries that are not installed."""

import importlib
import importlib.util
import sys

import pytest

from torchguard.exceptions import MissingExtraError


@pytest.mark.parametrize(
    ("module", "extra"),
    [("transformers", "transformers"), ("lightning", "lightning"), ("torchmetrics", "torchmetrics")],
)
def test_a_missing_library_is_named_with_the_line_that_installs_it(module, extra, monkeypatch):
    name = f"torchguard.integrations.{module}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'torchguard\[{extra}\]'"):
        importlib.import_module(name)
