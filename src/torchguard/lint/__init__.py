"""The coding guidelines as a linter: source code is read and never run, and torch is not imported."""

from torchguard.exceptions import LintError
from torchguard.lint._check import check_source
from torchguard.lint._config import Settings
from torchguard.lint._files import LintResult, check_paths
from torchguard.lint._finding import Finding
from torchguard.lint._rules.base import Rule
from torchguard.lint._rules.registry import RULES

__all__ = ["RULES", "Finding", "LintError", "LintResult", "Rule", "Settings", "check_paths", "check_source"]
