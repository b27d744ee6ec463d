"""torchguard in trainers, loggers and servers. Each module is imported by its name, and needs its own library.

- `integrations.transformers`: Hugging Face's `Trainer`
- `integrations.lightning`: Lightning's `Trainer`
- `integrations.loggers`: TensorBoard, and every logger with a method `log(values, step)`
- `integrations.torchmetrics`: the rate of bad samples as a metric
- `integrations.serving`: one bad request in a batch of `generate()`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchguard.integrations import lightning, loggers, serving, torchmetrics, transformers

__all__ = ["lightning", "loggers", "serving", "torchmetrics", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
