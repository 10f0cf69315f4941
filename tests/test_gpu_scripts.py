"""The parts of the GPU scripts that need no GPU: the reward, the task's rows, and what is read out of a run."""

from __future__ import annotations

import json
import pathlib

import pytest

from bench.arithmetic import last_number
from bench.gpu_run import measure

ROWS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "arithmetic.jsonl"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("3 - 12 = -9.", "-9", 1.0),
        ("The result is 1,204", "1204", 1.0),
        ("9 apples, so 14.", "9", 0.0),
        ("no idea", "9", 0.0),
        ("", "0", 0.0),
    ],
)
def test_the_last_number_of_a_response_is_its_answer(response: str, answer: str, reward: float) -> None:
    assert last_number(prompt="", response=response, answer=answer, task={}) == reward


def test_the_rows_are_sums_with_their_results() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert len({row["expression"] for row in rows}) == len(rows) >= 5000
    for row in rows:
        total, sign = 0, 1
        for word in row["expression"].split():
            if word in "+-":
                sign = 1 if word == "+" else -1
            else:
                total += sign * int(word)
        assert str(total) == row["answer"], row


def test_speeds_are_of_the_steps_after_the_first_ten(tmp_path: pathlib.Path) -> None:
    def step(number: int) -> dict[str, float]:
        return {
            "step": number,
            "time": 100.0 + number * (5.0 if number <= 10 else 2.0),
            "rollout/reward/mean": 0.5,
            "learner/response_tokens": 600.0,
            "learner/rollouts": 60.0,
            "learner/tokens_per_s": 400.0,
            "learner/step_time_s": 2.0,
            "generator/tokens_per_s": 310.0,
            "generator/idle_fraction": 0.1,
        }

    steps = [step(number) for number in range(1, 21)]
    steps[9]["time"] = 120.0  # the tenth ends where the eleventh begins
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (tmp_path / "events.jsonl").write_text("")
    steady = measure(tmp_path)["steady"]
    assert (steady["steps"], steady["seconds"]) == (10, 20.0)
    assert steady["response_tokens_per_s"] == 300.0 and steady["tokens_per_s"] == 400.0
    assert steady["rollouts_per_s"] == 30.0 and steady["response_length"] == 10.0
