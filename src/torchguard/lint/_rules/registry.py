"""Every rule, by its code."""

from torchguard.lint._rules import (
    annotations,
    channel,
    creation,
    distributed,
    export,
    gradients,
    graph,
    inplace,
    modes,
    numerics,
    style,
    testing,
)
from torchguard.lint._rules.base import Rule

_TOPICS = (
    *(annotations, creation, inplace, modes, gradients, distributed),
    *(graph, export, channel, numerics, style, testing),
)
RULES: dict[str, Rule] = {
    rule.code: rule for rule in sorted((rule for topic in _TOPICS for rule in topic.RULES), key=lambda rule: rule.code)
}
