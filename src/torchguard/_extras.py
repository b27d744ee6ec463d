"""Libraries that an extra of torchguard installs."""

import importlib.util

from torchguard.exceptions import MissingExtraError


def require_extra(who: str, extra: str, *modules: str) -> None:
    """Raise unless these modules can be imported; the error has the line that installs them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"{who} needs {module}. Install it with: pip install 'torchguard[{extra}]'.")
