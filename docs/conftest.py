"""Keeps pytest, which collects the examples of the docs pages, out of `hooks/`: those need mkdocs, tests do not."""

collect_ignore = ["hooks"]
