"""Settings of the buffer that contradict each other are refused, with a remedy that works."""

from __future__ import annotations

import re

import pytest

from streamrl.config import load_config
from streamrl.errors import ConfigError

BROKEN: list[tuple[list[str], list[str]]] = [
    (
        ["buffer.max_staleness=1", "buffer.max_times_sampled=3"],
        ["buffer.max_times_sampled (3)", "for 2 steps only", "buffer.max_times_sampled<=2", "buffer.max_staleness>=2"],
    ),
    (
        ["buffer.incomplete_groups=min_members", "buffer.min_members=9"],
        ["buffer.min_members (9)", "from 2 to algorithm.group_size (8)", "buffer.min_members=4"],
    ),
    (
        ["buffer.incomplete_groups=min_members", "buffer.min_members=1"],
        ["buffer.min_members (1)", "algorithm.advantage=grpo", "buffer.min_members=4"],
    ),
    (
        ["buffer.limiter=ratio", "buffer.samples_per_insert=2.5", "buffer.max_times_sampled=2"],
        ["buffer.samples_per_insert (2.5)", "max_times_sampled=2", "buffer.samples_per_insert<=2"],
    ),
    (
        ["buffer.limiter=ratio", "buffer.error_buffer=4"],
        ["buffer.error_buffer (4.0)", "learner.groups_per_step (16)", "buffer.error_buffer>=8.5"],
    ),
    (
        ["buffer.limiter=queue", "buffer.queue_size=15"],
        ["buffer.queue_size (15)", "learner.groups_per_step (16)", "buffer.queue_size>=16"],
    ),
    (
        ["buffer.limiter=queue", "buffer.max_times_sampled=2"],
        ["buffer.max_times_sampled (2)", "a queue hands out each group once", "buffer.max_times_sampled=1"],
    ),
    (["buffer.max_groups=8"], ["buffer.max_groups (8)", "up to 16 groups", "buffer.max_groups>=16"]),
    (
        ["buffer.max_groups=50", "buffer.min_size=60"],
        ["buffer.max_groups (50)", "up to 60 groups", "buffer.max_groups>=60"],
    ),
    (
        ["buffer.max_groups=100", "buffer.limiter=ratio", "buffer.samples_per_insert=0.5"],
        ["buffer.max_groups (100)", "up to 208 groups", "buffer.max_groups>=208"],
    ),
    (
        ["buffer.max_bytes=50000"],
        ["buffer.max_bytes (50000)", "16 groups of algorithm.group_size=8", "buffer.max_bytes>=98304"],
    ),
    (
        ["learner.stream_groups=17"],
        ["learner.stream_groups (17)", "learner.groups_per_step (16)", "Set learner.stream_groups=4"],
    ),
    (
        ["learner.stream_groups=4", "algorithm.advantage=reinforce_pp"],
        ["learner.stream_groups (4)", "reinforce_pp", "whole batch", "Set learner.stream_groups=0"],
    ),
    (
        ["learner.stream_groups=4", "algorithm.loss=m2po", "algorithm.correction=none"],
        ["learner.stream_groups (4)", "m2po", "whole batch", "Set learner.stream_groups=0"],
    ),
    (
        ["learner.stream_groups=4", "buffer.max_times_sampled=2"],
        ["learner.stream_groups (4)", "buffer.max_times_sampled (2)", "Set learner.stream_groups=0"],
    ),
    (
        ["learner.stream_groups=4", "buffer.limiter=ratio"],
        ["learner.stream_groups (4)", "buffer.limiter=ratio", "Set learner.stream_groups=0"],
    ),
    (
        ["learner.stream_groups=4", "buffer.min_size=8"],
        ["learner.stream_groups (4)", "buffer.min_size=8", "Set learner.stream_groups=0"],
    ),
]


@pytest.mark.parametrize(("overrides", "parts"), BROKEN, ids=lambda value: value[-1] if "=" in value[0] else "")
def test_a_contradiction_is_refused_with_everything_needed_to_mend_it(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("overrides", [overrides for overrides, _ in BROKEN])
def test_the_remedy_that_a_refusal_names_works(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    remedy = str(caught.value).split(" Set ")[-1].split(", or ")[0].rstrip(".")
    load_config(None, [*overrides, re.sub("[<>]=", "=", remedy)])
