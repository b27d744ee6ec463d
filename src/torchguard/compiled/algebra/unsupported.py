"""Why a graph cannot be evaluated exactly."""


class UnsupportedError(Exception):
    """An operator, or a way to call one, is in no table. It ends as an inconclusive claim and never reaches a user."""


class UnfitError(Exception):
    """A rule cannot take what a node is given. It ends as an inconclusive claim and never reaches a user."""
