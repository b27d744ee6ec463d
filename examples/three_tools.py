"""Three tools and one NaN: torch's anomaly mode, Inductor's NaN asserts, and torchguard, on the same compiled step.

One sample of sixteen overflows in the forward pass. Who says which sample it was, where it began, and goes on?
"""

import copy
import traceback
import warnings

import torch
from torch import Tensor, nn

from torchguard import Retry, watch

BATCH, BAD = 16, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).exp())).squeeze(-1)


def anomaly_mode(model: nn.Module, x: Tensor) -> str:
    """Names the operation whose gradient is NaN. Under compile that is the whole graph."""
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            torch.compile(model, backend="aot_eager")(x).sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "nothing"


def nan_asserts(model: nn.Module, x: Tensor) -> str:
    """Checks inputs and outputs of the kernels that Inductor generates, and stops the program."""
    try:
        torch.compile(model, options={"nan_asserts": True})(x)
    except AssertionError as error:
        return f"AssertionError: {traceback.extract_tb(error.__traceback__)[-1].line}"
    return "nothing"


def torchguard(model: nn.Module, x: Tensor) -> str:
    """Names sample, module and code, and trains on the other fifteen."""
    guarded = watch(model, returns="output")
    torch.compile(guarded, backend="aot_eager", fullgraph=True)(x)
    (incident,) = guarded.report()
    step = Retry(model, torch.optim.SGD(model.parameters(), lr=0.1)).step(lambda x: model(x).square(), x)
    if incident.sample != BAD or step.bad != [BAD]:
        raise SystemExit(f"another sample was named: {incident}, {step}")
    return f"{incident}\n{step}"


def main() -> None:
    warnings.simplefilter("ignore")  # anomaly mode warns that it is slow
    torch.manual_seed(0)
    model, x = Net(), torch.randn(BATCH, 8)
    x[BAD] = 1e4
    for tool in (anomaly_mode, nan_asserts, torchguard):
        torch._dynamo.reset()
        print(f"{tool.__name__}: {tool.__doc__}\n  " + tool(copy.deepcopy(model), x).replace("\n", "\n  ") + "\n")


if __name__ == "__main__":
    main()
