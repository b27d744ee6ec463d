"""The error channel over float carriers.

The same functions as `torchguard.err`; only new flags differ: float32, or float64 if `CONFIG.flag_dtype` says so.
int64 flags train under `torch.compile(fullgraph=True)` as well: nothing needs this package, code written for 1.x does.
"""

from torchguard.control import AND, HAS, IF, IS, NOT, OR
from torchguard.experimental import err

__all__ = ["AND", "HAS", "IF", "IS", "NOT", "OR", "err"]
