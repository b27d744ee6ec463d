"""Pytest looks here for the examples of the pages. The hooks need mkdocs, which the tests do without."""

collect_ignore = ["hooks"]
