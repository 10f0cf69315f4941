"""Who may import what: the layers, the owners of heavy packages, and what starts quickly."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest

from streamrl.config import load_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS = ["streamrl", "buffers", "actors"]  # each may import itself and those before it
OWNERS = {
    "zmq": {"streamrl/sockets.py"},
    "mlflow": {"streamrl/tracking.py"},
    "vllm": {"actors/engine.py", "streamrl/weight_sync/vllm_plugin.py"},
    "ray": {"actors/launch.py"},
}
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def imported_by(path: pathlib.Path) -> Iterator[str]:
    """Every module named in an import statement of the file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name_of(path)}: relative import"
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_the_layers_only(path: pathlib.Path) -> None:
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    for module in imported_by(path):
        top = module.split(".")[0]
        assert top not in [*LAYERS[layer + 1 :], "tests", "bench"], f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("package", OWNERS)
def test_only_its_owners_import_a_package(package: str) -> None:
    found = {name_of(path) for path in MODULES if any(m.split(".")[0] == package for m in imported_by(path))}
    assert found <= OWNERS[package], f"{package} is imported by {found - OWNERS[package]}"


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    declared = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}
    owners = packages_distributions()
    missing = {
        f"{package} in {name_of(path)}"
        for path in MODULES
        for package in {module.partition(".")[0] for module in imported_by(path)}
        if package not in sys.stdlib_module_names
        and package not in LAYERS
        and not declared & {owner.lower().replace("_", "-") for owner in owners.get(package, [])}
    }
    assert missing == set()


def test_ray_remote_is_applied_in_launch_only() -> None:
    users = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "remote" and isinstance(node.value, ast.Name):
                if node.value.id == "ray":
                    users.add(name_of(path))
    assert users <= {"actors/launch.py"}


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=name_of)
def test_a_package_init_holds_a_docstring_and_nothing_else(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_its_role_and_stays_short(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), f"{name_of(path)} has no module docstring"
    assert len(text.splitlines()) <= 500, f"{name_of(path)} is longer than 500 lines"
    assert text.isascii(), f"{name_of(path)} is not plain ASCII"
    assert path.stem not in ("utils", "helpers", "common")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("streamrl.config", ["torch", "ray", "mlflow", "transformers", "vllm", "zmq", "matplotlib"]),
        ("streamrl.errors", ["torch", "ray", "mlflow", "transformers", "vllm", "zmq", "matplotlib"]),
        ("streamrl.tracking", ["torch", "ray", "mlflow", "transformers", "vllm", "zmq", "matplotlib"]),
        ("actors.cli", ["torch", "ray", "mlflow", "transformers", "vllm", "zmq", "matplotlib", "rich"]),
        ("actors.plan", ["torch", "ray", "mlflow", "transformers", "vllm", "zmq", "matplotlib", "reasoning_gym"]),
        ("buffers.replay", ["torch", "ray", "mlflow", "transformers", "vllm", "zmq"]),
        ("buffers.server", ["torch", "ray", "mlflow", "transformers", "vllm"]),
    ],
)
def test_what_starts_quickly_imports_nothing_heavy(module: str, heavy: list[str]) -> None:
    script = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_every_config_file_is_valid(path: pathlib.Path) -> None:
    load_config(path)


def test_there_are_config_files() -> None:
    assert CONFIGS
