"""Makes the reference page show docstring examples as code, and fails the build where it shows less than it should.

Our docstrings end in a doctest without a heading. Google style knows examples only under `Examples:`. Anything else is
Markdown text, where `>>>` opens a quote in a quote in a quote and the brackets of an output are links. mkdocs.yml lists
this file twice: as an extension of griffe, which reads the docstrings, and as a hook of mkdocs.

Errors are raised, not logged: `mkdocs build --strict --quiet` drops warnings before it counts them.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

# An example ends at a blank line, unless the next one follows it.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+|\n(?=\n>>> ))*", re.MULTILINE)
_CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
_QUOTED_EXAMPLE = re.compile(r"(?:<blockquote>\s*){3}(?:<p>)?(.*)|&gt;&gt;&gt;(.*)")
_CHOSEN_MEMBERS = re.compile(r"^::: (\S+)\n +options: .*members: \[(.*?)\]", re.MULTILINE)


class ExamplesHeading(griffe.Extension):
    """Puts the heading `Examples:` over examples that have none."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_under_heading, obj.docstring.value)


def on_page_content(html: str, /, *, page: Any, **_: Any) -> None:
    problems = [*_examples_not_code(html), *_members_not_shown(page.markdown, html)]
    if problems:
        raise PluginError("\n".join(f"{page.file.src_uri}: {problem}" for problem in problems))


def _under_heading(example: re.Match[str]) -> str:
    return "\nExamples:\n" + textwrap.indent(example[0], "    ")


def _examples_not_code(html: str) -> Iterator[str]:
    for quoted, prompted in _QUOTED_EXAMPLE.findall(_CODE.sub("", html)):
        yield f"an example is shown as text: {quoted or prompted!r}. Put it under `Examples:`, indented."


def _members_not_shown(markdown: str, html: str) -> Iterator[str]:
    """Names that `members:` lists and mkdocstrings left out without a word, as it does with a function named like its
    module: to griffe, which runs nothing, `torchguard.guards.why` is the module."""
    for module, members in _CHOSEN_MEMBERS.findall(markdown):
        for member in members.split(", "):
            if f'id="{module}.{member}"' not in html:
                yield f"{module}.{member} is not shown. Write a docstring, or `:::` and the module that defines it."
