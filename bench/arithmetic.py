"""The arithmetic task of the GPU runs: rows drawn from reasoning-gym's `basic_arithmetic`, and the reward of an answer.

The rows are in configs/arithmetic.jsonl, so that a run needs no reasoning-gym. Made anew by:

    python -m bench.arithmetic > configs/arithmetic.jsonl
"""

from __future__ import annotations

import json
import re
from typing import Any

COUNT = 6000
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(*, prompt: str, response: str, answer: str, task: dict[str, Any]) -> float:
    """1.0 if the last number of the response is the answer, else 0.0.

    Example: last_number(prompt="What is 3 - 12?", response="3 - 12 = -9.", answer="-9", task={}) == 1.0
    """
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(answer))


def main() -> None:
    import reasoning_gym

    rows = reasoning_gym.create_dataset(
        "basic_arithmetic",
        seed=2_000_000,
        size=2 * COUNT,
        min_terms=2,
        max_terms=3,
        min_digits=1,
        max_digits=2,
        operators=["+", "-"],
        allow_parentheses=False,
    )
    drawn = {row["metadata"]["expression"]: str(row["answer"]) for row in rows}
    for expression, answer in list(drawn.items())[:COUNT]:
        print(json.dumps({"expression": expression, "answer": answer}))


if __name__ == "__main__":
    main()
