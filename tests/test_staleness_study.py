"""The staleness study: its data is exactly as stale as it says, and a study that was killed goes on where it was."""

from __future__ import annotations

import json
import pathlib

import pytest

from bench import staleness_study
from bench.staleness_report import BEGIN, END, measured
from bench.staleness_study import ENGINES, RESULTS, ROOT, Cell, cell_config, main, read_results
from streamrl.config import check_config, load_config
from streamrl.errors import ConfigError
from tests.tiny_llama import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_tiny_llama(tmp_path_factory.mktemp("study") / "model", tied=True)


def different_letters(*, response: str, **_: object) -> float:
    """A reward that differs between the answers of a model that was never trained."""
    return len(set(response)) / 8


def study(model: pathlib.Path, results: pathlib.Path, *, staleness: str, corrections: str = "none") -> None:
    small = ["learner.groups_per_step=2", "algorithm.group_size=2", "eval.num_prompts=4", "data.size=64"]
    reward = ["reward.kind=python", f"reward.function={__name__}:different_letters"]
    cells = ["--staleness", staleness, "--corrections", corrections, "--steps=5", "--lr=1e-4", "--seeds=1"]
    main([f"--results={results}", "--jobs=1", *cells, f"model.path={model}", *small, *reward])


def test_every_batch_is_as_stale_as_the_cell_says_and_fresh_data_is_of_the_policy_itself(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    study(model, tmp_path / "results.jsonl", staleness="0,2", corrections="none,sequence_mask")
    lines = read_results(tmp_path / "results.jsonl")
    assert len(lines) == 4
    for line in lines:
        assert line["curves"]["staleness"] == [min(step, line["staleness"]) for step in range(5)]
        drift = [abs(k1) for k1 in line["curves"]["kl_k1"]]
        fresh = [k1 for k1, staleness in zip(drift, line["curves"]["staleness"], strict=True) if staleness == 0]
        assert max(fresh) < 1e-5
        if line["staleness"]:
            assert min(drift[1:]) > 1e-5, "p has moved away from mu"


def test_a_study_that_was_killed_goes_on_with_the_cells_that_it_has_not_finished(
    model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.jsonl"
    study(model, results, staleness="1,0")
    first, second = results.read_text().splitlines()
    results.write_text(first + "\n" + second[: len(second) // 2])  # killed while it wrote
    ran: list[Cell] = []
    run_cell = staleness_study.run_cell
    monkeypatch.setattr(
        staleness_study, "run_cell", lambda base, cell, *a, **k: ran.append(cell) or run_cell(base, cell, *a, **k)
    )
    study(model, results, staleness="0,1")
    assert [cell.staleness for cell in ran] == [0]
    without_times = [[line["curves"]["reward"], line["evals"]] for line in read_results(results)]
    assert without_times == [[line["curves"]["reward"], line["evals"]] for line in map(json.loads, (first, second))]


def test_the_page_shows_the_numbers_of_the_results_files() -> None:
    page = (ROOT / "docs" / "staleness.md").read_text(encoding="utf-8")
    shown = page.split(BEGIN)[1].split(END)[0].strip()
    assert shown == measured(read_results(RESULTS), read_results(ENGINES)).strip(), "run with --report"


def test_only_the_uncorrected_cells_are_what_a_run_refuses() -> None:
    base = load_config()
    for correction in staleness_study.CORRECTIONS:
        cell = Cell(correction=correction, staleness=4, lr=1e-4, seed=0, steps=1)
        config = cell_config(base, cell)
        if correction == "none":
            with pytest.raises(ConfigError, match="as if it were fresh"):
                check_config(config)
        else:
            check_config(config)
