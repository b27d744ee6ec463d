"""Unsafe guards made safe: dropping guards on modules makes calls faster, and hides `model.eval()`. An audit notices.

torch's own helper, `skip_guard_on_inbuilt_nn_modules_unsafe`, drops the guards on the state of torch's modules. After
`eval()` the compiled code is the one for training: dropout stays on.
"""

import torch
from torch import Tensor, nn

from torchguard import guards


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))


def outputs_differ(compiled: nn.Module, x: Tensor) -> bool:
    """Whether two calls differ: dropout is on."""
    return not torch.equal(compiled(x), compiled(x))


def main() -> None:
    x = torch.randn(4, 64)

    model = make()
    skip = torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe
    unsafe = torch.compile(model, backend="eager", options={"guard_filter_fn": skip})
    unsafe(x)
    model.eval()
    is_wrong = outputs_differ(unsafe, x)
    print(f"unsafe filter, after eval(): dropout is {'still on, and nothing said so' if is_wrong else 'off'}\n")

    torch._dynamo.reset()
    model = make()
    audit = guards.audit(skip, every=10, action="recompile")
    safe = guards.compile(model, filter=audit, backend="eager")
    safe(x)
    model.eval()
    is_right = not outputs_differ(safe, x)
    print(f"the same filter under an audit, after eval(): dropout is {'off' if is_right else 'still on'}")
    report = audit.report()
    print(report)
    if not (is_wrong and is_right and report.violations):
        raise SystemExit("the audit did not notice, or torch's filter is safe now")


if __name__ == "__main__":
    main()
