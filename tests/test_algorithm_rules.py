"""Algorithm and learner settings that contradict each other are refused, with the setting and the remedy."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
import yaml

import streamrl.losses
from streamrl.advantages import compute_advantages
from streamrl.config import AlgorithmConfig, check_config, config_from_tree, load_config
from streamrl.config_rules import ADVANTAGES, LOSSES
from streamrl.errors import ConfigError

REFUSED = {
    "GRPO needs a group to compare with": (["algorithm.group_size=1"], "algorithm.group_size (1)"),
    "REINFORCE++ needs a batch to compare with": (
        ["algorithm.group_size=1", "algorithm.advantage=reinforce_pp", "learner.groups_per_step=1"],
        "reinforce_pp",
    ),
    "bypass and a weight count the ratio twice": (["algorithm.proximal=bypass"], "count it twice"),
    "gspo too": (["algorithm.proximal=bypass", "algorithm.loss=gspo"], "count it twice"),
    "cispo and a weight count the ratio twice": (["algorithm.loss=cispo"], "count it twice"),
    "T32: a ratio of 1 and no weight is no correction": (["algorithm.correction=none"], "as if it were fresh"),
    "REINFORCE without a weight is no correction": (
        ["algorithm.correction=none", "algorithm.loss=reinforce_is"],
        "as if it were fresh",
    ),
    "a mask that drops fresh data": (
        ["algorithm.correction=token_mask", "algorithm.correction_cap=0.9"],
        "algorithm.correction_cap (0.9)",
    ),
    "a floor above the cap": (
        ["algorithm.correction=sequence_mask", "algorithm.correction_floor=3.0"],
        "algorithm.correction_floor (3.0)",
    ),
    "topr and a weight count the ratio twice": (["algorithm.loss=topr"], "count it twice"),
    "m2po too": (["algorithm.loss=m2po"], "count it twice"),
    "interpolation corrects for one version only": (
        ["algorithm.proximal=interpolate", "algorithm.correction=none"],
        "corrects for the last version only",
    ),
    "a loss without a proximal policy cannot interpolate one": (
        ["algorithm.proximal=interpolate", "algorithm.loss=reinforce_is"],
        "algorithm.proximal (interpolate)",
    ),
    "an unknown loss": (["algorithm.loss=ppo_clop"], "Did you mean algorithm.loss=ppo_clip?"),
    "an unknown advantage": (["algorithm.advantage=gae"], "algorithm.advantage ('gae'): must be one of grpo, dr_grpo"),
    "a loss of one's own with a weight that is always 1": (
        ["algorithm.loss=python:my_module:my_loss", "algorithm.proximal=bypass"],
        "count it twice",
    ),
    "a rejection of fresh data": (
        ["algorithm.rejection=geometric", "algorithm.rejection_cap=0.999"],
        "algorithm.rejection_cap (0.999)",
    ),
    "a bound of no rejection": (["algorithm.rejection_cap=2"], "algorithm.rejection_cap (2.0)"),
    "a veto of fresh data": (["algorithm.veto_cap=0.5"], "algorithm.veto_cap (0.5)"),
    "a veto of fresh data from below": (["algorithm.veto_floor=1"], "algorithm.veto_floor (1.0)"),
    "a dual clip that cuts ordinary updates": (["algorithm.dual_clip=0.9"], "algorithm.dual_clip (0.9)"),
    "a dual clip with nothing to clip": (
        ["algorithm.dual_clip=3", "algorithm.loss=reinforce_is"],
        "algorithm.dual_clip (3.0)",
    ),
    "more ranks than groups": (["learner.ranks=3", "learner.groups_per_step=2"], "learner.groups_per_step (2)"),
    "a sequence that fits in no micro-batch": (["learner.micro_batch_tokens=10"], "learner.micro_batch_tokens (10)"),
    "AdamW cannot average for ever": (["learner.betas=[0.9, 1.0]"], "learner.betas"),
    "publishing more rarely than the bound allows": (
        ["learner.publish_interval=3", "buffer.max_staleness=1"],
        "buffer.max_staleness (1)",
    ),
}


PAGE = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", re.findall(r"```yaml\n(.+?)```", PAGE, re.S))
def test_every_recipe_of_the_documentation_is_accepted(recipe: str) -> None:
    check_config(config_from_tree(yaml.safe_load(recipe)))


def test_the_documentation_has_every_loss_and_estimator_and_its_recipes() -> None:
    assert PAGE.count("```yaml") == 6
    assert all(f"| `{name}` |" in PAGE for name in (*LOSSES, *ADVANTAGES))


def test_the_names_that_are_accepted_are_those_that_exist() -> None:
    assert set(LOSSES) == set(streamrl.losses.LOSSES)
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1])
    results = {name: tuple(compute_advantages(rewards, groups, AlgorithmConfig(advantage=name))) for name in ADVANTAGES}
    assert len(set(results.values())) == len(ADVANTAGES)


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_is_refused(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=overrides)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.proximal=bypass", "algorithm.correction=none"],
        ["algorithm.loss=cispo", "algorithm.correction=none"],
        ["algorithm.loss=topr", "algorithm.correction=none"],
        ["algorithm.loss=m2po", "algorithm.correction=none"],
        ["algorithm.proximal=interpolate"],
        ["algorithm.loss=python:my_module:my_loss", "algorithm.advantage=python:my_module:mine"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
        ["algorithm.proximal=interpolate", "algorithm.correction=none", "buffer.max_staleness=1"],
        ["algorithm.correction=none", "algorithm.rejection=geometric"],
        ["algorithm.rejection=k3", "algorithm.veto_floor=1e-4", "algorithm.veto_cap=100"],
        ["algorithm.correction=token_mask", "algorithm.correction_cap=5"],
        ["algorithm.loss=reinforce_is"],
        ["algorithm.loss=gspo", "algorithm.correction=sequence_mask"],
        ["algorithm.correction=none", "buffer.max_staleness=0"],
        ["algorithm.group_size=1", "algorithm.advantage=reinforce_pp"],
        ["algorithm.dual_clip=3"],
    ],
)
def test_a_sound_choice_is_accepted(overrides: list[str]) -> None:
    load_config(overrides=overrides)
