"""Algorithm and learner settings that contradict each other are refused, with the setting and the remedy."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
import yaml

import streamrl.losses
import streamrl.token_advantages
from streamrl.advantages import compute_advantages
from streamrl.config import AlgorithmConfig, check_config, config_from_tree, load_config
from streamrl.config_rules import ADVANTAGES, CRITIC_ADVANTAGES, LOSSES
from streamrl.errors import ConfigError

REFUSED = {
    "GRPO needs a group to compare with": (["algorithm.group_size=1"], "algorithm.group_size (1)"),
    "ReMax cannot do without its greedy response": (
        ["algorithm.advantage=remax", "buffer.incomplete_groups=min_members"],
        "Set buffer.incomplete_groups=refill",
    ),
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
    "an unknown advantage": (["algorithm.advantage=gea"], "algorithm.advantage ('gea'): must be one of grpo, dr_grpo"),
    "GAE needs a batch to be normalised over": (
        ["algorithm.group_size=1", "algorithm.advantage=gae", "learner.groups_per_step=1"],
        "gae normalises over the batch",
    ),
    "a critic loss without a critic": (["critic.value_clip=0.5"], "critic.value_clip (0.5): a critic loss without a"),
    "a critic's learning rate without a critic": (
        ["critic.lr=0.1", "algorithm.advantage=rloo"],
        "critic.lr (0.1): a critic loss without a critic: algorithm.advantage=rloo has none",
    ),
    "a clip between a value and itself": (
        ["algorithm.advantage=gae", "critic.epochs=1"],
        "critic.value_clip (0.2): with critic.epochs=1",
    ),
    "a policy that is never trained": (
        ["algorithm.advantage=gae", "critic.warmup_steps=10", "run.max_steps=10"],
        "critic.warmup_steps (10)",
    ),
    "V-trace's bounds for GAE": (
        ["algorithm.advantage=gae", "critic.c_bar=0.5"],
        "critic.c_bar (0.5): is V-trace's, and algorithm.advantage=gae",
    ),
    "V-trace with another policy gradient counts the ratio another way": (
        ["algorithm.advantage=vtrace", "algorithm.correction_cap=1"],
        "algorithm.loss (ppo_clip)",
    ),
    "V-trace without its weight": (
        ["algorithm.advantage=vtrace", "algorithm.loss=reinforce_is", "algorithm.correction=none"],
        "algorithm.correction (none)",
    ),
    "V-trace with a weight of the whole response counts later ratios twice": (
        [
            "algorithm.advantage=vtrace",
            "algorithm.loss=reinforce_is",
            "algorithm.correction=sequence_truncate",
            "algorithm.correction_cap=1",
        ],
        "already account for the ratios of later tokens",
    ),
    "V-trace with one bound in the values and another in the loss": (
        ["algorithm.advantage=vtrace", "algorithm.loss=reinforce_is"],
        "algorithm.correction_cap (2.0)",
    ),
    "V-trace's c_bar above its rho_bar": (
        [
            "algorithm.advantage=vtrace",
            "algorithm.loss=reinforce_is",
            "algorithm.correction_cap=1",
            "critic.c_bar=2",
        ],
        "critic.c_bar (2.0)",
    ),
    "GAE is normalised over the whole batch": (
        ["algorithm.advantage=gae", "learner.stream_groups=4"],
        "algorithm.advantage=gae needs the mean",
    ),
    "groups of one response have no variance": (
        ["algorithm.advantage=gae", "algorithm.group_size=1", "buffer.drop_zero_variance=true"],
        "buffer.drop_zero_variance (true)",
    ),
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
    assert PAGE.count("```yaml") == 8
    assert all(f"| `{name}` |" in PAGE for name in (*LOSSES, *ADVANTAGES))


def test_the_names_that_are_accepted_are_those_that_exist() -> None:
    assert set(LOSSES) == set(streamrl.losses.LOSSES)
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1])
    of_rollouts = [name for name in ADVANTAGES if name not in CRITIC_ADVANTAGES]
    greedy = torch.tensor([0.25, 0.25, 0.75, 0.75])
    results = {
        tuple(compute_advantages(rewards, groups, AlgorithmConfig(advantage=name), baselines=greedy))
        for name in of_rollouts
    }
    assert len(results) == len(of_rollouts)
    assert [name for name in CRITIC_ADVANTAGES if not hasattr(streamrl.token_advantages, name)] == []


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
        ["algorithm.group_size=1", "algorithm.advantage=remax", "buffer.drop_zero_variance=true"],
        ["algorithm.dual_clip=3"],
        ["algorithm.advantage=gae", "algorithm.group_size=1"],
        ["algorithm.advantage=gae", "critic.epochs=1", "critic.value_clip=0", "critic.warmup_steps=3"],
        ["algorithm.advantage=gae", "algorithm.proximal=bypass", "algorithm.correction=none"],
        [
            "algorithm.advantage=vtrace",
            "algorithm.loss=reinforce_is",
            "algorithm.correction_cap=1",
            "learner.stream_groups=4",
        ],
        [
            "algorithm.advantage=vtrace",
            "algorithm.loss=python:my_module:my_loss",
            "algorithm.correction_cap=4",
            "critic.rho_bar=4",
            "critic.c_bar=2",
        ],
    ],
)
def test_a_sound_choice_is_accepted(overrides: list[str]) -> None:
    load_config(overrides=overrides)
