"""The optimizer step: the same weights for any number of ranks and any token budget, and that it learns."""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from buffers.shards import Shard, StepCut
from streamrl.config import Config, config_from_tree
from streamrl.critic import Critic
from streamrl.policy import Policy
from streamrl.records import Rollout, RolloutGroup, RolloutTimings
from streamrl.trainer import Trainer

VOCAB = 23
STEPS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kept": {
        "advantage": "reinforce_pp",
        "correction": "sequence_mask",
        "masked_denominator": "kept",
        "aggregation": "sequence_mean_token_mean",
        "entropy_coef": 0.01,
        "kl_coef": 0.1,
    },
    "kl in the reward": {"advantage": "reinforce_pp", "kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
    "remax": {"advantage": "remax", "kl_coef": 0.3, "kl_in": "reward"},
    "m2po": {"loss": "m2po", "correction": "none", "m2_threshold": 0.005, "rejection": "k3"},
    "interpolate": {"proximal": "interpolate", "clip_high": 0.05, "rejection": "geometric", "rejection_cap": 1.1},
    "bypass": {"advantage": "rloo", "loss": "gspo", "proximal": "bypass", "correction": "none", "clip_high": 0.05},
    "gae": {"advantage": "gae", "proximal": "bypass", "correction": "none", "kl_coef": 0.1, "kl_in": "reward"},
    "vtrace": {"advantage": "vtrace", "loss": "reinforce_is", "correction_cap": 1.0},
}
CRITICS: dict[str, dict[str, Any]] = {
    "gae": {"lr": 1e-2, "lam": 0.9, "value_clip": 0.02, "epochs": 3, "warmup_steps": 2},
    "vtrace": {"lr": 1e-2, "gamma": 0.95},
}

# Those that need nothing of the whole batch before the first backward; the others are refused in config_rules.py.
STREAMED = ("defaults", "kept in chunks", "interpolate", "bypass", "vtrace")
SETTINGS["kept in chunks"] = {**SETTINGS["kept"], "advantage": "maxrl", "kl_in": "reward"}
STREAMED_BY_SEVERAL_RANKS = [("defaults", 2), ("kept in chunks", 1), ("kept in chunks", 3), ("vtrace", 2)]
CHUNK_SIZES = (1, 2, 3)  # of 5 groups


def config_of(setting: str, *, budget: int) -> Config:
    return config_from_tree(
        {
            "algorithm": SETTINGS[setting],
            "critic": CRITICS.get(setting, {}),
            "learner": {"micro_batch_tokens": budget, "lr": 1e-2, "warmup_steps": 3},
        }
    )


def save_model(folder: pathlib.Path) -> pathlib.Path:
    torch.manual_seed(0)
    # 23 and 20 divide by neither 2 nor 3: the shards are uneven.
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=20,
            intermediate_size=28,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    return folder


def batch_of(step: int, *, num_groups: int = 5, group_size: int = 4) -> list[RolloutGroup]:
    numbers = np.random.default_rng(step)
    groups = []
    for g in range(num_groups):
        prompt = numbers.integers(0, VOCAB, numbers.integers(1, 6)).astype(np.int32)
        rollouts = []
        for m in range(group_size):
            length = int(numbers.integers(1, 9))
            rollouts.append(
                Rollout(
                    uid=str(g),
                    member=m,
                    attempt=0,
                    prompt_ids=prompt,
                    response_ids=numbers.integers(0, VOCAB, length).astype(np.int32),
                    old_log_probs=numbers.normal(-3.1, 0.1, length).astype(np.float32),
                    versions=np.full(length, max(0, step - g % 2), dtype=np.int32),
                    reward=float(numbers.integers(0, 5)) / 4,
                    finish_reason="length" if m == 0 else "stop",
                    timings=RolloutTimings(queue_s=0.5, generate_s=1.0, reward_s=0.25),
                )
            )
        greedy = msgspec.structs.replace(rollouts[0], member=group_size, reward=float(g) / num_groups)
        groups.append(RolloutGroup(uid=str(g), rollouts=tuple(rollouts), baseline=greedy))
    return groups


def shard_of(groups: list[RolloutGroup], mine: list[RolloutGroup]) -> Shard:
    rollouts = [r for group in groups for r in group.rollouts]
    return Shard(
        groups=mine,
        num_groups=len(groups),
        num_rollouts=len(rollouts),
        num_tokens=sum(r.num_tokens for r in rollouts),
        num_response_tokens=sum(len(r.response_ids) for r in rollouts),
    )


def train(
    folder: pathlib.Path, mesh: DeviceMesh, config: Config, rank: int, world_size: int, *, chunk_size: int = 0
) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """All weights in one vector after STEPS steps, the critic's last, and the metrics. The last of several ranks has
    little or no data. Several ranks checkpoint their activations, which must change nothing either. With a chunk_size a
    batch comes in chunks, cut over the ranks as the buffer does it."""
    temperature = config.generator.temperature
    policy = Policy(folder, mesh=mesh, temperature=temperature, activation_checkpointing=world_size > 1)
    reference = Policy(folder, mesh=mesh, temperature=1.0) if config.algorithm.kl_coef else None
    critic = Critic(folder, config, mesh=mesh) if config.algorithm.has_critic else None
    trainer = Trainer(policy, config, reference=reference, critic=critic)
    metrics = []
    for step in range(STEPS):
        groups = batch_of(step)
        if chunk_size:
            cut = StepCut(size=len(groups), chunk_size=chunk_size, world_size=world_size)
            cut.extend(groups)
            trainer.begin(step)
            for chunk in range(cut.num_chunks):
                trainer.add(cut.shard(chunk, rank).groups)
            metrics.append(trainer.finish(cut.shard(cut.num_chunks - 1, rank)))
            continue
        parts = {1: [groups], 2: [groups[:4], groups[4:]], 3: [groups[:2], groups[2:], []]}[world_size]
        metrics.append(trainer.step(shard_of(groups, parts[rank]), policy_version=step))
    parameters = [*policy.parameters(), *([] if critic is None else critic.parameters())]
    return torch.cat([parameter.full_tensor().reshape(-1) for parameter in parameters]).detach(), metrics


def run_rank(rank: int, world_size: int, port: int, folder: str, out: str) -> None:
    """One rank in a process of its own; rank 0 writes what every setting gives."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    results: dict[Any, Any] = {
        setting: train(pathlib.Path(folder), mesh, config_of(setting, budget=30), rank, world_size)
        for setting in SETTINGS
    }
    for setting, size in STREAMED_BY_SEVERAL_RANKS:
        config = config_of(setting, budget=30)
        results[setting, size] = train(pathlib.Path(folder), mesh, config, rank, world_size, chunk_size=size)
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_rank(folder: pathlib.Path, mesh: DeviceMesh) -> dict[str, tuple[torch.Tensor, list[dict[str, float]]]]:
    return {setting: train(folder, mesh, config_of(setting, budget=4096), 0, 1) for setting in SETTINGS}


@pytest.fixture(scope="module", params=[2, 3])
def several_ranks(
    request: pytest.FixtureRequest, folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[torch.Tensor, list[dict[str, float]]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path_factory.mktemp("ranks") / "results.pt"
    torch.multiprocessing.spawn(run_rank, (request.param, port, str(folder), str(out)), nprocs=request.param)
    results: dict[str, tuple[torch.Tensor, list[dict[str, float]]]] = torch.load(out)
    return results


@pytest.mark.parametrize("setting", SETTINGS)
def test_any_number_of_ranks_gives_the_same_weights_and_metrics(
    setting: str, one_rank: dict[str, Any], several_ranks: dict[str, Any]
) -> None:
    assert_same(several_ranks[setting], one_rank[setting])


def assert_same(ours: Any, theirs: Any) -> None:
    (weights, metrics), (expected, expected_metrics) = ours, theirs
    assert float((weights - expected).abs().max()) < 1e-5
    for one, other in zip(metrics, expected_metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("setting", "size"), STREAMED_BY_SEVERAL_RANKS)
def test_a_batch_in_chunks_gives_several_ranks_the_same_weights_and_metrics(
    setting: str, size: int, one_rank: dict[str, Any], several_ranks: dict[str, Any]
) -> None:
    assert_same(several_ranks[setting, size], one_rank[setting])


@pytest.mark.parametrize("setting", STREAMED)
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_a_batch_in_chunks_gives_one_rank_the_same_weights_and_metrics(
    setting: str, size: int, folder: pathlib.Path, mesh: DeviceMesh, one_rank: dict[str, Any]
) -> None:
    assert_same(train(folder, mesh, config_of(setting, budget=4096), 0, 1, chunk_size=size), one_rank[setting])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("budget", [14, 50])
def test_any_token_budget_gives_the_same_weights(
    setting: str, budget: int, folder: pathlib.Path, mesh: DeviceMesh, one_rank: dict[str, Any]
) -> None:
    weights, _ = train(folder, mesh, config_of(setting, budget=budget), 0, 1)
    assert float((weights - one_rank[setting][0]).abs().max()) < 1e-5


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_really_train(setting: str, folder: pathlib.Path, one_rank: dict[str, Any]) -> None:
    start = torch.cat([p.detach().reshape(-1) for p in LlamaForCausalLM.from_pretrained(folder).parameters()])
    assert float((one_rank[setting][0][: len(start)] - start).abs().max()) > 1e-3


def test_the_metrics_of_a_step_describe_its_batch(one_rank: dict[str, Any]) -> None:
    _, metrics = one_rank["defaults"]
    rollouts = [r for group in batch_of(3) for r in group.rollouts]
    rewards = np.array([r.reward for r in rollouts])
    step = metrics[3]
    assert step["rollout/reward/mean"] == pytest.approx(rewards.mean())
    assert step["rollout/reward/std"] == pytest.approx(rewards.std(ddof=1))
    assert step["rollout/length/mean"] == pytest.approx(np.mean([len(r.response_ids) for r in rollouts]))
    assert step["rollout/truncated_fraction"] == pytest.approx(0.25)
    assert step["rollout/latency_s"] == pytest.approx(1.75)
    assert step["offpolicy/staleness/mean"] == pytest.approx(0.4)  # groups 1 and 3 of five are one version old
    assert step["offpolicy/staleness/max"] == 1.0
    assert step["offpolicy/logprob_mismatch"] > 0
    assert [m["learner/lr"] for m in metrics] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2, 1e-2])


def test_the_divergence_from_the_reference_starts_at_zero_and_grows(one_rank: dict[str, Any]) -> None:
    divergences = [m["policy/kl_ref"] for m in one_rank["kept"][1]]
    assert divergences[0] == pytest.approx(0.0, abs=1e-9) and 0 < divergences[1] < divergences[4]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_divergence_in_the_reward_trains_as_a_reward_that_much_lower(
    estimator: str, folder: pathlib.Path, mesh: DeviceMesh
) -> None:
    """Against rewards from which KL(mu || reference), token by token with plain numbers, was subtracted by hand."""

    def step(coef: float, groups: list[RolloutGroup]) -> tuple[torch.Tensor, dict[str, float]]:
        algorithm = {"kl_coef": coef, "kl_in": "reward", "kl_estimator": estimator}
        config = config_from_tree({"algorithm": algorithm, "learner": {"lr": 1e-2, "micro_batch_tokens": 30}})
        policy = Policy(folder, mesh=mesh, temperature=1.0)
        trainer = Trainer(policy, config, reference=Policy(folder, mesh=mesh, temperature=1.0))
        metrics = trainer.step(shard_of(groups, groups), policy_version=0)
        return torch.cat([p.full_tensor().reshape(-1) for p in policy.parameters()]).detach(), metrics

    reference = Policy(folder, mesh=mesh, temperature=1.0)
    groups, shaped, total, tokens = batch_of(0), [], 0.0, 0
    for group in groups:
        rollouts = []
        for r in group.rollouts:
            whole = reference.probe_log_probs([[*r.prompt_ids.tolist(), *r.response_ids.tolist()]])
            divergence = 0.0
            for mu, q in zip(r.old_log_probs.tolist(), whole[len(r.prompt_ids) - 1 :], strict=True):
                divergence += {"k1": mu - q, "k2": (mu - q) ** 2 / 2, "k3": np.exp(q - mu) - 1 - (q - mu)}[estimator]
            total, tokens = total + divergence, tokens + len(r.response_ids)
            rollouts.append(_with_reward(r, r.reward - 0.3 * divergence))
        shaped.append(RolloutGroup(uid=group.uid, rollouts=tuple(rollouts)))
    weights, metrics = step(0.3, groups)
    expected, _ = step(0.0, shaped)
    plain, _ = step(0.0, groups)
    assert float((weights - expected).abs().max()) < 1e-5 < float((weights - plain).abs().max())
    assert metrics["policy/kl_ref"] == pytest.approx(total / tokens, abs=1e-6)
    assert metrics["rollout/reward/mean"] == pytest.approx(np.mean([r.reward for g in groups for r in g.rollouts]))


def test_the_mismatch_is_of_tokens_of_the_current_version_only(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    trainer = Trainer(policy, config_of("defaults", budget=4096))
    groups = batch_of(0)
    assert "offpolicy/logprob_mismatch" in trainer.step(shard_of(groups, groups), policy_version=0)
    assert "offpolicy/logprob_mismatch" not in trainer.step(shard_of(groups, groups), policy_version=1)


def test_the_mismatch_leaves_out_rollouts_that_span_two_versions(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    """Their later tokens were sampled on the older weights' attention cache: a true mu, another function."""
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    trainer = Trainer(policy, config_of("defaults", budget=4096))

    def began_at(version: int) -> list[RolloutGroup]:
        groups = []
        for group in batch_of(0):
            rollouts = []
            for rollout in group.rollouts:
                length = max(2, len(rollout.response_ids))
                versions = np.full(length, 1, dtype=np.int32)
                versions[0] = version
                fields = {name: np.resize(getattr(rollout, name), length) for name in ("response_ids", "old_log_probs")}
                rollouts.append(msgspec.structs.replace(rollout, versions=versions, **fields))
            groups.append(msgspec.structs.replace(group, rollouts=tuple(rollouts)))
        return groups

    mixed, whole = began_at(0), began_at(1)
    assert "offpolicy/logprob_mismatch" not in trainer.step(shard_of(mixed, mixed), policy_version=1)
    assert "offpolicy/logprob_mismatch" in trainer.step(shard_of(whole, whole), policy_version=1)


def test_a_step_of_another_batch_than_the_one_handed_out_is_refused(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    trainer = Trainer(policy, config_of("defaults", budget=4096))
    groups = batch_of(0)
    before = policy.probe_log_probs([[1, 2, 3]])
    with pytest.raises(RuntimeError, match="16 rollouts .* of a batch of 20"):
        trainer.step(shard_of(groups, groups[:4]), policy_version=0)
    assert policy.probe_log_probs([[1, 2, 3]]) == before


def test_remax_trains_as_rewards_less_the_greedy_one_would(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    """And on nothing else of the greedy response. A function that returns the rewards as they are takes them."""

    def step(advantage: str, groups: list[RolloutGroup]) -> tuple[list[torch.Tensor], dict[str, float]]:
        config = config_from_tree({"algorithm": {"advantage": advantage}, "learner": {"lr": 1e-2}})
        policy = Policy(folder, mesh=mesh, temperature=1.0)
        metrics = Trainer(policy, config).step(shard_of(groups, groups), policy_version=1)
        return [parameter.full_tensor().detach() for parameter in policy.parameters()], metrics

    groups = batch_of(1)
    lowered = [
        RolloutGroup(uid=g.uid, rollouts=tuple(_with_reward(r, r.reward - g.baseline.reward) for r in g.rollouts))
        for g in groups
        if g.baseline is not None
    ]
    ours, metrics = step("remax", groups)
    theirs, _ = step("python:test_trainer:rewards_as_they_are", lowered)
    assert len(lowered) == len(groups)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    rollouts = [r for g in groups for r in g.rollouts]
    assert metrics["rollout/reward/mean"] == pytest.approx(np.mean([r.reward for r in rollouts]))
    assert metrics["rollout/length/mean"] == pytest.approx(np.mean([len(r.response_ids) for r in rollouts]))


def rewards_as_they_are(rewards: torch.Tensor, group_index: torch.Tensor, config: Any) -> torch.Tensor:
    return rewards


def test_remax_refuses_a_group_without_its_greedy_response(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    trainer = Trainer(
        Policy(folder, mesh=mesh, temperature=1.0), config_from_tree({"algorithm": {"advantage": "remax"}})
    )
    groups = [msgspec.structs.replace(group, baseline=None) for group in batch_of(1)]
    with pytest.raises(RuntimeError, match="without the greedy response"):
        trainer.step(shard_of(groups, groups), policy_version=1)


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    trainer = Trainer(policy, config_of("defaults", budget=4096))
    groups = batch_of(0)
    before = policy.probe_log_probs([[1, 2, 3]])
    broken = RolloutGroup(uid="0", rollouts=tuple(_with_reward(r, float("inf")) for r in groups[0].rollouts))
    with pytest.raises(RuntimeError, match="not finite"):
        trainer.step(shard_of([broken], [broken]), policy_version=0)
    assert policy.probe_log_probs([[1, 2, 3]]) == before


def _with_reward(rollout: Rollout, reward: float) -> Rollout:
    return Rollout(
        uid=rollout.uid,
        member=rollout.member,
        attempt=0,
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        old_log_probs=rollout.old_log_probs,
        versions=rollout.versions,
        reward=reward,
    )


@pytest.mark.parametrize(
    ("lag", "algorithm"),
    [
        (0, {"correction": "none"}),
        (3, {}),
        (3, {"correction": "sequence_truncate", "advantage": "rloo"}),
        (3, {"correction": "token_mask", "advantage": "dr_grpo"}),
        (3, {"correction": "sequence_mask", "advantage": "maxrl"}),
        (3, {"proximal": "bypass", "correction": "none"}),
        (3, {"loss": "cispo", "correction": "none", "advantage": "reinforce_pp"}),
        (3, {"loss": "reinforce_is"}),
        (3, {"loss": "topr", "correction": "none"}),
        (3, {"loss": "m2po", "correction": "none"}),
        (3, {"proximal": "interpolate", "rejection": "k2", "veto_floor": 1e-4, "veto_cap": 100.0}),
        (3, {"loss": "gspo", "aggregation": "sequence_mean_token_sum"}),
        (3, {"advantage": "gae"}),
        (3, {"advantage": "vtrace", "loss": "reinforce_is", "correction_cap": 1.0}),
    ],
)
def test_a_bandit_is_learned_from_rollouts_of_old_policies(
    lag: int, algorithm: dict[str, Any], folder: pathlib.Path, mesh: DeviceMesh
) -> None:
    """One prompt, responses of two tokens sampled by the policy of `lag` steps ago; rewarded for even ones."""
    config = config_from_tree({"algorithm": algorithm, "learner": {"lr": 1e-2, "warmup_steps": 1}})
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    critic = Critic(folder, config, mesh=mesh) if config.algorithm.has_critic else None
    trainer = Trainer(policy, config, critic=critic)
    dice = torch.Generator().manual_seed(0)
    tables: list[tuple[torch.Tensor, torch.Tensor]] = []
    rewards = []
    for version in range(30):
        first = torch.tensor(policy.probe_log_probs([[0, t] for t in range(VOCAB)]))
        pairs = policy.probe_log_probs([[0, t, u] for t in range(VOCAB) for u in range(VOCAB)])
        tables.append((first, torch.tensor(pairs).reshape(VOCAB, VOCAB, 2)[:, :, 1]))
        sampled_by = max(0, version - lag)
        table, next_table = tables[sampled_by]
        groups = []
        for uid in range(8):
            rollouts = []
            for member in range(8):
                t = int(torch.multinomial(table.exp(), 1, generator=dice))
                u = int(torch.multinomial(next_table[t].exp(), 1, generator=dice))
                rollouts.append(
                    Rollout(
                        uid=str(uid),
                        member=member,
                        attempt=0,
                        prompt_ids=np.array([0], dtype=np.int32),
                        response_ids=np.array([t, u], dtype=np.int32),
                        old_log_probs=np.array([table[t], next_table[t, u]], dtype=np.float32),
                        versions=np.full(2, sampled_by, dtype=np.int32),
                        reward=((t % 2 == 0) + (u % 2 == 0)) / 2,
                    )
                )
            groups.append(RolloutGroup(uid=str(uid), rollouts=tuple(rollouts)))
        rewards.append(trainer.step(shard_of(groups, groups), policy_version=version)["rollout/reward/mean"])
    assert rewards[0] < 0.7 and np.mean(rewards[-3:]) > 0.9, rewards
