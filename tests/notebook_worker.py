"""Cells as in a notebook, in a real IPython shell: a user's module is edited under autoreload. Prints JSON."""

import json
import os
import sys
import time
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

SOURCE = """
import torch
from torch import nn
from torchguard import err, flag_nan, watch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.b(self.a(x).ACTIVATION())

def checked(x):
    return flag_nan(x.ACTIVATION(), "net", err.new(x))

guarded = watch(Net(), returns="output")
"""

FIRST = """
import sys, torch, mymodel
from mymodel import Net, checked, guarded
from torchguard import flags, guards, watch
mine = watch(Net(), returns="output")
compiled = torch.compile(mine, backend="eager", fullgraph=True)
x = torch.randn(6, 4)
x[2] = float("nan")
compiled(x), mine(x), checked(x)
modules = {name: id(one) for name, one in sys.modules.items() if name.startswith("torchguard")}
"""

AFTER_THE_EDIT = """
good = x[:2]
want = mine.b(mine.a(good).tanh())
found = {
    "is_new_code": [torch.equal(mine(good), want), torch.equal(compiled(good), want)],
    "edited": str(guarded(x).shape) and [str(one) for one in guarded.report()],
    "errors": len(flags.unpack_all(checked(x))[2]),
    "reloaded": [name for name, one in modules.items() if id(sys.modules[name]) != one],
}
compiled(x)
"""

SHOWN = "shown = {type(one).__name__: get_ipython().display_formatter.format(one)[0] for one in (mine.run_report(),)}"


def write(activation: str, seconds: int) -> None:
    """Write the module, with a time of change that autoreload sees."""
    file = Path("mymodel.py")
    file.write_text(SOURCE.replace("ACTIVATION", activation))
    os.utime(file, (time.time() + seconds,) * 2)


def main() -> None:
    shell = InteractiveShell.instance()

    def run(cell: str) -> None:
        shell.run_cell(cell, store_history=False).raise_error()

    sys.path.insert(0, os.getcwd())
    write("relu", 0)
    run("%load_ext autoreload\n%autoreload 2")
    run(FIRST)
    write("tanh", 10)
    run(AFTER_THE_EDIT)
    run(SHOWN)
    names = shell.user_ns
    sys.stdout.write(json.dumps({**names["found"], "html": "text/html" in names["shown"]["RunReport"]}) + "\n")


if __name__ == "__main__":
    main()
