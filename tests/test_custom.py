"""Losses and advantages of the user's own: used as named, and refused at launch when they cannot be had."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

from actors import cli
from streamrl.advantages import compute_advantages
from streamrl.config import AlgorithmConfig, Config
from streamrl.custom import check_custom_functions, custom_function
from streamrl.errors import ConfigError
from streamrl.losses import policy_loss

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The examples of docs/algorithms.md and some wrong functions, as a module in the working directory."""
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.+?)```", page, re.S)
    name = f"my_{tmp_path.name}"  # modules are cached
    (tmp_path / f"{name}.py").write_text(
        example
        + """
def too_few(inputs):
    return inputs.log_probs


def summed(inputs, config):
    return inputs.log_probs.sum()


def one_number(rewards, group_index, config):
    return rewards.mean()


not_a_function = 3
"""
    )
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path])
    return name


def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    mu = -torch.rand(12)
    p = (mu + 0.3 * torch.randn(12)).requires_grad_()
    mask = torch.ones(12)
    mask[[0, 6]] = 0.0
    return p, mu, torch.randn(12), mask, torch.arange(12) // 6


def test_the_loss_of_the_documentation_is_what_it_says(module: str) -> None:
    """`my_loss` is REINFORCE with the importance weight, written by hand."""
    results = []
    for loss in (f"python:{module}:my_loss", "reinforce_is"):
        p, *others = batch()
        value, sums = policy_loss(p, *others, AlgorithmConfig(loss=loss, rejection="k2", rejection_cap=0.02))
        value.backward()
        assert p.grad is not None and p.grad.any()
        assert float(sums["rejected_tokens"]) == 5.0  # what is around a loss is around this one too
        results.append((value.detach(), p.grad))
    assert torch.allclose(results[0][0], results[1][0]) and torch.allclose(results[0][1], results[1][1])


def test_the_advantages_of_the_documentation_are_what_they_say(module: str) -> None:
    config = AlgorithmConfig(advantage=f"python:{module}:my_advantages")
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([4, 4, 4, 2, 2])
    assert compute_advantages(rewards, groups, config).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]  # minus the median
    assert len(compute_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), config)) == 0


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        ("python:no_such_module:f", "No module named 'no_such_module'"),
        ("python:MODULE_broken:f", "No module named 'no_such_package'"),
        ("python:MODULE:no_such_function", "has no attribute 'no_such_function'"),
        ("python:MODULE:too_few", r"too_few\(inputs, config\): too many positional arguments"),
        ("python:MODULE:not_a_function", "not a callable"),
        ("python:MODULE", "must be python:module:function"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_at_launch(
    loss: str, reason: str, module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name = loss.replace("MODULE", module)
    assert cli.run(["launch", "--dry-run", f"algorithm.loss={name}"]) == 2
    error = capfd.readouterr().err
    assert re.search(reason, error) and f"algorithm.loss ({name})" in error
    with pytest.raises(ConfigError, match=r"algorithm\.advantage"):
        check_custom_functions(Config(algorithm=AlgorithmConfig(advantage=name)))


def test_one_that_can_be_had_is_planned(module: str) -> None:
    assert cli.run(["launch", "--dry-run", f"algorithm.loss=python:{module}:my_loss"]) == 0
    assert custom_function(f"python:{module}:my_loss", setting="algorithm.loss").__name__ == "my_loss"


def test_a_result_of_the_wrong_shape_is_refused(module: str) -> None:
    p, *others = batch()
    with pytest.raises(ConfigError, match="loss of every token"):
        policy_loss(p, *others, AlgorithmConfig(loss=f"python:{module}:summed"))
    config = AlgorithmConfig(advantage=f"python:{module}:one_number")
    with pytest.raises(ConfigError, match="one number per rollout"):
        compute_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), config)
