"""What a newcomer and the gate rely on: the README's commands, the Makefile, the lock."""

from __future__ import annotations

import pathlib
import re
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def marked_command() -> str:
    """The command that .ci/run takes from the README."""
    match = re.search(r"<!-- ci: test -->\n```sh\n(.+?)\n```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert match is not None
    return match[1]


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_the_readme_says_make_test_and_the_gate_takes_it_from_there() -> None:
    assert marked_command() == "make test"
    gate = ROOT / ".ci" / "run"
    assert gate.stat().st_mode & 0o111, ".ci/run is executable"
    extraction = re.search(r"^command=\$\((awk .+)\)$", gate.read_text(encoding="utf-8"), re.M)
    assert extraction is not None
    found = subprocess.run(["bash", "-c", extraction[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == marked_command()


def test_quickstart_runs_the_command_that_everything_is_about() -> None:
    plan = subprocess.run(["make", "-n", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv/bin/streamrl launch --generators 3 --learner 1 --config configs/quickstart.yaml" in plan


def test_the_lock_pins_every_dependency_and_nothing_that_breaks_transformers() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", pin) for pin in pins), (
        "a version without a local part each"
    )
    pinned = {name_of(pin) for pin in pins}
    assert not pinned & {"torchvision", "torchaudio", "torchcodec", "streamrl"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {name_of(r) for r in [*project["dependencies"], *extras["cpu"], *extras["dev"]]}
    assert wanted <= pinned


def test_every_link_between_the_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_file_the_architecture_page_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:streamrl|buffers|actors|tests)/[\w/.]*)`", text))
    assert len(named) > 15
    assert {name for name in named if not (ROOT / name).exists()} == set()
