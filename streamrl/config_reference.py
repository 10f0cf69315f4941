"""Writes docs/configuration.md from the schema: `python -m streamrl.config_reference > docs/configuration.md`.

The text of a setting is the docstring under its field in streamrl/config.py, so that there is one place to write it.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from streamrl import config

_HEAD = """\
# Configuration

Made from `streamrl/config.py` by `make docs`; do not edit.

A config is a YAML file of sections that holds only what differs from the defaults, for example

```yaml
run: {name: my-run, max_steps: 500}
buffer: {max_staleness: 8}
```

Any setting can be given on the command line, and wins over the file: `streamrl launch --config my.yaml
buffer.max_staleness=8 learner.lr=1e-4`. Without `--config`, a checkout's `configs/quickstart.yaml` is used, and the
defaults below where there is none. The run's resolved settings are in its `config.yaml`, which is itself a config.
`streamrl launch --dry-run` checks them and prints the plan.
"""


def render_reference() -> str:
    """The whole page, in Markdown."""
    texts = _field_texts()
    lines = [_HEAD]
    for path, section in _sections(config.Config, ""):
        lines += [f"## {path}", ""]
        if summary := (texts.get((section.__name__, "")) or ""):
            lines += [summary, ""]
        lines += ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
        defaults = msgspec.to_builtins(section())
        for field in msgspec.structs.fields(section):
            if not _is_section(field.type):
                text = texts[section.__name__, field.name]
                default = json.dumps(defaults[field.name])
                lines.append(f"| `{path}.{field.name}` | {_values(field.type)} | `{default}` | {_cell(text)} |")
        lines.append("")
    return "\n".join(lines)


def _sections(section: type[msgspec.Struct], path: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every section that has settings of its own, in the order of the schema."""
    for field in msgspec.structs.fields(section):
        if _is_section(field.type):
            where = f"{path}.{field.name}" if path else field.name
            yield where, field.type
            yield from _sections(field.type, where)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _field_texts() -> dict[tuple[str, str], str]:
    """(class, field) to the docstring under the field; (class, "") to the one of the class."""
    texts: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts[node.name, ""] = " ".join((ast.get_docstring(node) or "").split())
        for statement, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[node.name, statement.target.id] = " ".join(str(after.value.value).split())
    return texts


def _values(kind: Any) -> str:
    """`int >= 1`, `float in (0, 1]`, or the choices."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is Annotated:
        base, meta = get_args(kind)
        if meta.examples:
            return ", ".join(f"`{example}`" for example in meta.examples)
        bounds = [
            f"{sign} {bound:.15g}"
            for sign, bound in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
            if bound is not None
        ]
        return f"{_values(base)} {' and '.join(bounds)}"
    if get_origin(kind) is tuple:
        return f"[{', '.join(_values(item) for item in get_args(kind))}]"
    return "mapping" if get_origin(kind) is dict else str(kind.__name__)


def _cell(text: str) -> str:
    """Escape what a Markdown table would take for its own; inside code spans only the column mark needs it."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;").replace(">", "&gt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    print(render_reference(), end="")
