"""Settings as plain data on their way to a `Config`: YAML files, overrides, and refusals in words a person can use.

Knows nothing of the settings themselves: the schema is an argument. Every refusal is one line that names the path, the
value, the rule and the remedy.
"""

from __future__ import annotations

import difflib
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin

import msgspec
import yaml

from streamrl.errors import ConfigError

_Schema = TypeVar("_Schema", bound=msgspec.Struct)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which PyYAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises:
        ConfigError: it cannot be read or is no mapping.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise ConfigError(f"--config ({path}): no such file. Name a YAML file, e.g. configs/quickstart.yaml.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config ({path}): cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config ({path}): not valid YAML: {' '.join(str(error).split())}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config ({path}): must be a mapping of sections, not {type(tree).__name__}.")
    return tree


def apply_override(tree: dict[str, Any], override: str, schema: type[msgspec.Struct]) -> None:
    """Put one `section.key=value` into the tree. A text setting takes the value as it stands, any other one as YAML."""
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"{override!r}: must be section.key=value, e.g. buffer.max_staleness=8.")
    value: Any = text
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if text and (quoted or _type_at(schema, keys) is not str):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            pass
    node = tree
    for key in keys[:-1]:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(f"{override!r}: {key} is a value, not a section of settings.")
    node[keys[-1]] = value


def _is_section(kind: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _type_at(schema: type[msgspec.Struct], keys: Iterable[str]) -> Any:
    """The type of the setting at this path; None if there is none."""
    kind: Any = schema
    for key in keys:
        if not _is_section(kind):
            return None
        kind = {f.name: f.type for f in msgspec.structs.fields(kind)}.get(key)
    return kind


def convert_tree(tree: Mapping[str, Any], schema: type[_Schema]) -> _Schema:
    """The tree as an instance of `schema`: no unknown keys, types and ranges as declared, no nan or inf.

    Raises:
        ConfigError: for the first setting that does not fit.
    """
    _refuse_unknown_keys(tree, schema, "")
    try:
        converted = msgspec.convert(tree, schema, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), tree, schema)) from None
    _refuse_non_finite(msgspec.to_builtins(converted), "")
    return converted


def _refuse_unknown_keys(tree: Any, section: type[msgspec.Struct], path: str) -> None:
    """msgspec would name the key but not the nearest valid one."""
    if not isinstance(tree, Mapping):
        return
    fields = {f.name: f.type for f in msgspec.structs.fields(section)}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"Did you mean {f'{path}.{near[0]}' if path else near[0]}? " if near else ""
            raise ConfigError(f"{where} ({value!r}): no such setting. {hint}Valid here: {', '.join(fields)}.")
        kind = fields[key]
        if _is_section(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where} ({value!r}): is a section of settings, not a value. "
                    f"Set one of: {', '.join(f'{where}.{f.name}' for f in msgspec.structs.fields(kind))}."
                )
            _refuse_unknown_keys(value, kind, where)


def _explain(message: str, tree: Mapping[str, Any], schema: type[msgspec.Struct]) -> str:
    """`Expected `int` >= 1 - at `$.buffer.max_bytes`` -> `buffer.max_bytes (0): must be an integer >= 1. ...`"""
    rule, _, where = message.partition(" - at `$.")
    path = where.rstrip("`")
    keys = path.replace("[", ".").replace("]", "").split(".")
    value: Any = tree
    for key in keys:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and key.isdigit():
            value = value[int(key)]
    setting = path.split("[")[0]
    kind, default = _type_at(schema, setting.split(".")), _default_at(schema, setting.split("."))
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        near = [choice for choice in choices if str(value) in choice] or difflib.get_close_matches(str(value), choices)
        hint = f" Did you mean {setting}={near[0]}?" if near else ""
        return f"{path} ({value!r}): must be one of {', '.join(choices)}.{hint}"
    for name, said in _TYPE_NAMES.items():
        rule = rule.replace(f"Expected `{name}`", f"must be {said}")
    rule = re.sub(r", got `(\w+)`", "", rule)
    rule = re.sub(r"(?<=[<>=] )(\d+)\.0\b", r"\1", rule)
    return f"{path} ({value!r}): {rule[:1].lower()}{rule[1:]}. The default is {setting}={default}."


_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a mapping",
}


def _default_at(schema: type[msgspec.Struct], keys: Iterable[str]) -> Any:
    value: Any = msgspec.to_builtins(schema())
    for key in keys:
        value = value[key]
    if isinstance(value, bool | None):
        return yaml.safe_dump(value).split("\n")[0]
    return list(value) if isinstance(value, tuple) else value


def _refuse_non_finite(tree: Any, path: str) -> None:
    """nan and inf pass msgspec's bounds, or fail them with a misleading sentence."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _refuse_non_finite(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            _refuse_non_finite(value, f"{path}[{position}]")
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise ConfigError(f"{path} ({tree}): must be a finite number. For no limit in practice set a large one.")
