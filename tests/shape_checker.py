"""The type checker of the runs with TORCHGUARD_CHECK_SHAPES: an int is a float, as type checkers have it."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
