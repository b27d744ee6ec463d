"""How the command ends: codes that scripts can rely on, and errors that are one sentence."""

from enum import IntEnum

from torchguard.exceptions import TorchGuardError


class ExitCode(IntEnum):
    """What the command ends with. `run` ends as the script did, and with FLAGGED where `--strict` asks for it."""

    FINE = 0
    FOUND = 1  # something differs, breaks a rule, is broken, or failed
    USAGE = 2
    NOTHING = 3  # no such artifact, or none at all
    FLAGGED = 4


class CommandError(TorchGuardError, ValueError):
    """Something was asked for that cannot be done; the message says it in a sentence."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FOUND) -> None:
        super().__init__(message)
        self.exit_code = exit_code
