"""The text of a prompt: `data.template` with the fields of one row filled in."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from streamrl.errors import ConfigError


class Template:
    """`data.template`: text with {prompt} and other fields of the row in it."""

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise ConfigError(f"data.template ({text!r}): {error}. Double a brace that stands for itself.") from None
        for name in names:
            if not name.isidentifier():
                raise ConfigError(
                    f"data.template ({text!r}): {{{name}}} is not a field name. Use {{prompt}}, or a column."
                )
        if not names:
            raise ConfigError(
                f"data.template ({text!r}): names no field, so every prompt would be the same. Add {{prompt}}."
            )
        self.names = frozenset(names)

    def render(self, fields: Mapping[str, Any], *, where: str) -> str:
        """The prompt text for one row."""
        try:
            text = self._text.format_map(fields)
        except KeyError as error:
            raise ConfigError(
                f"data.template ({self._text!r}): {where} has no field {error.args[0]}. "
                f"It has: {', '.join(map(str, fields))}."
            ) from None
        if not text:
            raise ConfigError(f"{where}: the prompt is empty. Every prompt needs at least one character.")
        return text
