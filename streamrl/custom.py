"""Functions of the user's own in the learner: `algorithm.loss: python:my_module:my_loss`, and the same for advantages.

A module is looked for in the working directory too, as for `reward.function`. Imports no torch; the user's module may.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from streamrl.config import Config
from streamrl.errors import ConfigError

PREFIX = "python:"
_ARGUMENTS = {
    "algorithm.loss": ("inputs", "config"),
    "algorithm.advantage": ("rewards", "group_index", "config"),
}


def check_custom_functions(config: Config) -> None:
    """Refuse names of functions that cannot be had.

    Raises:
        ConfigError: naming the setting and the reason.
    """
    for setting, name in (
        ("algorithm.loss", config.algorithm.loss),
        ("algorithm.advantage", config.algorithm.advantage),
    ):
        if name.startswith(PREFIX):
            custom_function(name, setting=setting)


@functools.cache
def custom_function(name: str, *, setting: str) -> Callable[..., Any]:
    """The function that `python:module:function` names.

    Raises:
        ConfigError: the module cannot be imported, it has no such function, or the function does not take the
            arguments of its setting.
    """
    module_name, separator, function_name = name.removeprefix(PREFIX).partition(":")
    if not (module_name and separator and function_name):
        raise ConfigError(
            f"{setting} ({name}): must be {PREFIX}module:function. Set {setting}={PREFIX}my_module:my_name."
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            f"{setting} ({name}): cannot be imported: {type(error).__name__}: {error}. Name {PREFIX}module:function, "
            "with the module in the working directory or on PYTHONPATH."
        ) from None
    arguments = _ARGUMENTS[setting]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{setting} ({name}): must be a function that can be called as {function_name}({', '.join(arguments)}): "
            f"{error}. docs/algorithms.md has an example."
        ) from None
    return function
