"""The error channel over float carriers.

It has the functions of `torchguard.err`, but new flags are float32, or float64 if `CONFIG.flag_dtype` is. It exists for
code written for 1.x: int64 flags also train under `torch.compile(fullgraph=True)`.
"""

from torchguard.control import AND, HAS, IF, IS, NOT, OR
from torchguard.experimental import err

__all__ = ["AND", "HAS", "IF", "IS", "NOT", "OR", "err"]
