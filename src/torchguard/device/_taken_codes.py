"""The codes that rules for every device have, known without the rules: a device is described before there are any."""

# Each with the name of the class of its rule.
TAKEN: dict[str, str] = {}


def first_taken(codes: list[str]) -> str | None:
    """The first of these codes that is another's too."""
    return next((code for i, code in enumerate(codes) if code in TAKEN or code in codes[:i]), None)
