"""Renders docstring examples as code on the reference page, and fails the build if an example or a member is missing.

torchguard's docstrings end in a doctest without a heading, but Google style recognises examples only under `Examples:`.
Without the heading they are Markdown text, in which `>>>` opens three nested quotes and the brackets of an output are
links. mkdocs.yml lists this file twice: as an extension of griffe, which reads the docstrings, and as a mkdocs hook.

The hook raises errors instead of logging them: `mkdocs build --strict --quiet` drops warnings before it counts them.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

# An example ends at a blank line, unless another example follows.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+|\n(?=\n>>> ))*", re.MULTILINE)
_CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
_QUOTED_EXAMPLE = re.compile(r"(?:<blockquote>\s*){3}(?:<p>)?(.*)|&gt;&gt;&gt;(.*)")
_CHOSEN_MEMBERS = re.compile(r"^::: (\S+)\n +options: .*members: \[(.*?)\]", re.MULTILINE)


class ExamplesHeading(griffe.Extension):
    """Inserts the heading `Examples:` above examples that have none."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_under_heading, obj.docstring.value)


def on_page_content(html: str, /, *, page: Any, **_: Any) -> None:
    problems = [*_examples_as_text(html), *_members_missing(page.markdown, html)]
    if problems:
        raise PluginError("\n".join(f"{page.file.src_uri}: {problem}" for problem in problems))


def _under_heading(example: re.Match[str]) -> str:
    return "\nExamples:\n" + textwrap.indent(example[0], "    ")


def _examples_as_text(html: str) -> Iterator[str]:
    for quoted, prompted in _QUOTED_EXAMPLE.findall(_CODE.sub("", html)):
        yield f"an example is rendered as text: {quoted or prompted!r}. Put it under `Examples:`, indented."


def _members_missing(markdown: str, html: str) -> Iterator[str]:
    """Names that `members:` lists but mkdocstrings left out silently.

    It leaves out a function that has the name of its module: griffe, which runs no code, takes the name for the module.
    """
    for module, members in _CHOSEN_MEMBERS.findall(markdown):
        for member in members.split(", "):
            if f'id="{module}.{member}"' not in html:
                yield f"{module}.{member} is not rendered. Write a docstring, or `:::` and the module that defines it."
