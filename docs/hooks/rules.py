"""Makes a page for each rule of the linter from what the rule says of itself, and lists the pages under `Rules`."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from torchguard.lint import RULES
from torchguard.lint._formats import page


def on_config(config: MkDocsConfig, /, **_: Any) -> None:
    pages = [{f"{code} {rule.name}": f"lint/{code}.md"} for code, rule in RULES.items()]
    (guides,) = [entry["Guides"] for entry in config.nav if "Guides" in entry]
    position = next(i for i, entry in enumerate(guides) if "lint.md" in entry.values())
    guides.insert(position + 1, {"Rules": pages})


def on_files(files: Files, /, *, config: MkDocsConfig, **_: Any) -> None:
    for code, rule in RULES.items():
        files.append(File.generated(config, f"lint/{code}.md", content=page(rule)))
