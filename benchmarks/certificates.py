"""What certificates say about 134 functions: `python benchmarks/certificates.py` writes results/certificates.json.

The functions are those that the tests compare with JAX (tests/compiled/oracle.py). `python benchmarks/tables.py` makes
the table in docs/certificates.md of it.
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from record import RESULTS, environment
from tests.compiled.oracle import ARGUMENTS, FUNCTIONS

from torchguard.compiled import compile_out
from torchguard.exceptions import TorchGuardError

_WORST = ("pass", "inconclusive", "fail")


def verdicts_of(name: str) -> dict[str, str]:
    """The worst verdict of each layer and subject; nothing if the compiler refuses the function."""
    x = tuple(torch.tensor(argument) for argument in ARGUMENTS[name])
    try:
        certificate = compile_out(FUNCTIONS[name], *x, backend="eager", probe=False).certify("enclosure")
    except TorchGuardError:
        return {}
    found: dict[str, str] = {}
    for claim in certificate.claims:
        key = f"{claim.layer} {claim.subject}"
        found[key] = max(str(claim.verdict), found.get(key, "pass"), key=_WORST.index)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    functions = {name: verdicts_of(name) for name in sorted(FUNCTIONS)}
    result = {"environment": environment(), "functions": functions}
    (RESULTS / "certificates.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
