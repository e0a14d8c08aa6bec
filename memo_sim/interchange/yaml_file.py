"""Reads a YAML file of a framework: mappings, lists and plain values, and nothing that constructs objects."""

from __future__ import annotations

from typing import Any

from memo_sim.contract.errors import BadInput
from memo_sim.interchange.framework import Source

MOST_CHARACTERS = 4_000_000
"""A configuration has some thousand characters."""


def read_yaml(source: Source) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Anchors are refused: a few of them make a file as large as memory.

    Raises:
        BadInput: when it is no YAML, or no mapping.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types here
        """Refuses aliases, and reads any tag as the text behind it."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError("an alias, which memo does not follow")
            return super().compose_node(parent, index)

    Loader.add_multi_constructor("!", lambda loader, suffix, node: str(getattr(node, "value", "")))
    if len(source.text) > MOST_CHARACTERS:
        raise BadInput("the file is too large for a configuration", where=source.name)
    try:
        found = yaml.load(source.text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput("not a YAML document", where=source.name, got=str(error).splitlines()[0]) from None
    if not isinstance(found, dict):
        raise BadInput("not a YAML mapping", where=source.name, got=type(found).__name__)
    return {str(key): value for key, value in found.items()}
