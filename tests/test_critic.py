"""The critic: its values, its loss, how it is trained, and what the trainer makes of it."""

from __future__ import annotations

import copy
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_token_advantages import reference_gae, reference_vtrace
from test_trainer import batch_of, config_of, save_model, shard_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaForCausalLM

import streamrl.trainer
from streamrl.config import Config, config_from_tree
from streamrl.critic import Critic, value_loss
from streamrl.packing import MicroBatch, filler_micro_batch, pack_rollouts
from streamrl.policy import Policy
from streamrl.records import RolloutGroup
from streamrl.trainer import Trainer


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("critic") / "model")


def flat(parameters: list[Any]) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().reshape(-1).clone() for p in parameters])


def packed(step: int = 0) -> MicroBatch:
    rollouts = [r for group in batch_of(step) for r in group.rollouts]
    (batch,) = pack_rollouts(rollouts, torch.zeros(len(rollouts)), max_tokens=4096)
    return batch


# -- the loss --


def reference_loss(v: list[float], old: list[float], r: list[float], clip: float) -> tuple[float, list[float], int]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, its derivative for each V, how many are clipped."""
    total, slopes, held = 0.0, [], 0
    for value, before, target in zip(v, old, r, strict=True):
        plain, slope = (value - target) ** 2 / 2, value - target
        moved = min(max(value, before - clip), before + clip)
        if clip and (moved - target) ** 2 / 2 > plain:  # beyond the bound: a constant
            plain, slope, held = (moved - target) ** 2 / 2, 0.0, held + 1
        total, slopes = total + plain, [*slopes, slope]
    return total, slopes, held


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(
        st.tuples(st.floats(-3, 3), st.sampled_from([0.0, 0.05, -0.3, 5.0]), st.floats(-3, 3), st.booleans()),
        max_size=12,
    ),
    clip=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_the_value_loss_and_its_gradient_equal_their_reference(
    tokens: list[tuple[float, float, float, bool]], clip: float
) -> None:
    """`tokens`: V, V - V_old, R, whether it is a response token."""
    v, moved, r, mask = (list(column) for column in zip(*tokens, strict=True)) if tokens else ([], [], [], [])
    old = [value - by for value, by in zip(v, moved, strict=True)]
    values = torch.tensor(v, dtype=torch.float64, requires_grad=True)
    nonsense = [x if m else math.inf for x, m in zip(r, mask, strict=True)]
    loss, clipped = value_loss(
        values,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(nonsense, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.float64),
        clip=clip,
    )
    loss.backward()
    inside = [i for i, m in enumerate(mask) if m]
    expected, slopes, held = reference_loss(*([column[i] for i in inside] for column in (v, old, r)), clip)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert values.grad is not None
    assert [float(values.grad[i]) for i in inside] == pytest.approx(slopes, rel=1e-6, abs=1e-6)
    assert all(float(values.grad[i]) == 0.0 for i in range(len(v)) if i not in inside)
    assert int(clipped.sum()) == held


# -- the model --


def test_values_are_zero_at_first_and_the_head_of_the_last_hidden_state_later(
    folder: pathlib.Path, mesh: DeviceMesh
) -> None:
    """Against plain transformers, one sequence at a time: the value of a token is read from the token before it."""
    critic = Critic(folder, config_of("gae", budget=4096), mesh=mesh)
    batch = packed()
    assert critic.values(batch).abs().max() == 0.0
    weight = torch.randn(1, 20)
    with torch.no_grad():
        critic._module.head.weight.copy_(torch.distributed.tensor.distribute_tensor(weight, mesh))
    ours = critic.values(batch)
    model = LlamaForCausalLM.from_pretrained(folder)
    rollouts = [r for group in batch_of(0) for r in group.rollouts]
    start, seen = 0, 0
    for place in batch.rollouts:
        rollout = rollouts[place]
        prompt = len(rollout.prompt_ids)
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]])
        with torch.no_grad():
            expected = (model.model(ids).last_hidden_state[0] @ weight[0])[prompt - 1 : -1]
        mine = ours[start : start + rollout.num_tokens]
        assert torch.allclose(mine[prompt:], expected, atol=1e-5)
        assert mine[:prompt].abs().max() == 0.0
        start, seen = start + rollout.num_tokens, seen + len(expected)
    assert seen == int(batch.tokens["response_mask"].sum()) > 50


def test_values_in_bfloat16_are_close_to_float32_and_trained_in_float32(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    results = []
    for dtype in ("float32", "bfloat16"):
        tree = {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}, "model": {"dtype": dtype}}
        config = config_from_tree({**tree, "learner": {"warmup_steps": 0}})
        critic, batch = Critic(folder, config, mesh=mesh), packed()
        for _ in range(3):
            batch.tokens["values"], batch.tokens["returns"] = critic.values(batch), torch.ones(batch.num_tokens)
            critic.fit([batch])
        assert {p.dtype for p in critic.parameters()} == {torch.float32}
        results.append(critic.values(batch))
    assert results[1].dtype == torch.float32 and not torch.equal(results[0], results[1])
    assert torch.allclose(results[0], results[1], atol=0.02) and results[0].abs().max() > 0.1


def test_fitting_lowers_the_loss_and_explains_the_returns(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    config = config_from_tree(
        {"algorithm": {"advantage": "gae"}, "critic": {"lr": 3e-3}, "learner": {"warmup_steps": 0}}
    )
    critic = Critic(folder, config, mesh=mesh)
    batch = packed()
    batch.tokens["returns"] = batch.tokens["position_ids"].float() / 10
    reports = []
    for _ in range(80):
        batch.tokens["values"] = critic.values(batch)
        reports.append(critic.fit([batch]))
    chosen = batch.tokens["response_mask"].bool()
    returns = batch.tokens["returns"][chosen]
    assert reports[0]["critic/loss"] == pytest.approx(float((returns**2).mean()) / 2, rel=1e-5)
    assert reports[0]["critic/value_mean"] == 0.0 and reports[0]["critic/explained_variance"] == pytest.approx(0.0)
    assert reports[0]["critic/return_mean"] == pytest.approx(float(returns.mean()), rel=1e-5)
    last = reports[-1]
    assert last["critic/loss"] < 0.1 * reports[0]["critic/loss"]
    assert last["critic/explained_variance"] > 0.8
    errors = returns - batch.tokens["values"][chosen]
    explained = 1 - float(errors.var(correction=0) / returns.var(correction=0))
    assert last["critic/explained_variance"] == pytest.approx(explained, abs=1e-4)


def test_a_clip_keeps_a_batch_from_moving_values_all_the_way(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    def moved(clip: float) -> tuple[float, float]:
        tree = {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3, "value_clip": clip, "epochs": 40}}
        critic = Critic(folder, config_from_tree({**tree, "learner": {"warmup_steps": 0}}), mesh=mesh)
        batch = packed()
        batch.tokens["returns"] = torch.ones(batch.num_tokens)
        batch.tokens["values"] = critic.values(batch)
        clipped = critic.fit([batch])["critic/clip_fraction"]
        return float(critic.values(batch)[batch.tokens["response_mask"].bool()].mean()), clipped

    free, none = moved(0.0)
    held, most = moved(0.1)
    assert none == 0.0 and free > 0.8
    assert most > 0.9 and 0.1 <= held < 0.5  # momentum carries it on after the gradient is gone


def test_a_filler_gives_the_critic_no_gradient(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    critic = Critic(folder, config_of("gae", budget=4096), mesh=mesh)
    (critic(filler_micro_batch()).sum() * 3).backward()
    assert all(p.grad is None or float(p.grad.full_tensor().abs().max()) == 0.0 for p in critic.parameters())


def test_a_gradient_of_the_critic_that_is_not_finite_is_refused(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    critic = Critic(folder, config_of("gae", budget=4096), mesh=mesh)
    before, batch = flat(critic.parameters()), packed()
    batch.tokens["values"] = critic.values(batch)
    batch.tokens["returns"] = torch.full((batch.num_tokens,), math.inf)
    with pytest.raises(RuntimeError, match="the gradient of the critic is not finite"):
        critic.fit([batch])
    assert torch.equal(flat(critic.parameters()), before)


def test_a_restored_critic_goes_on_as_if_nothing_had_happened(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    config, batch = config_of("gae", budget=4096), packed()
    batch.tokens["returns"] = batch.tokens["position_ids"].float() / 10

    def train(critic: Critic, steps: int) -> torch.Tensor:
        for _ in range(steps):
            batch.tokens["values"] = critic.values(batch)
            critic.fit([batch])
        return flat(critic.parameters())

    first = Critic(folder, config, mesh=mesh)
    train(first, 2)
    state = copy.deepcopy(first.state_dict())
    second = Critic(folder, config, mesh=mesh)
    second.load_state_dict(state)
    assert torch.equal(train(second, 1), train(first, 1))


# -- the trainer with a critic --


def test_the_policy_stays_while_the_critic_warms_up(folder: pathlib.Path, mesh: DeviceMesh) -> None:
    config = config_of("gae", budget=4096)  # two steps of warm-up
    policy, critic = Policy(folder, mesh=mesh, temperature=1.0), Critic(folder, config, mesh=mesh)
    trainer = Trainer(policy, config, reference=Policy(folder, mesh=mesh, temperature=1.0), critic=critic)
    before, of_critic = flat(policy.parameters()), flat(critic.parameters())
    for version in range(3):
        groups = batch_of(version)
        metrics = trainer.step(shard_of(groups, groups), policy_version=version)
        stays = torch.equal(flat(policy.parameters()), before)
        assert stays == (version < 2) == (metrics["learner/lr"] == 0.0) == (metrics["learner/grad_norm"] == 0.0)
        assert metrics["policy/entropy"] > 0 and metrics["critic/grad_norm"] > 0
        assert not torch.equal(flat(critic.parameters()), of_critic)
        of_critic = flat(critic.parameters())
    assert metrics["learner/lr"] == pytest.approx(1e-2 / 3)  # the policy's own first step


def advantages_of(
    trainer: Trainer, groups: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch, *, version: int
) -> list[tuple[list[float], list[float]]]:
    """What the loss is given for the response of each rollout, in the order of `groups`: advantages and log-probs."""
    seen: list[tuple[list[float], list[float]]] = []
    order: list[int] = []
    true_loss, true_pack = streamrl.trainer.policy_loss, streamrl.trainer.pack_rollouts

    def pack(*args: Any, **kwargs: Any) -> list[MicroBatch]:
        batches = true_pack(*args, **kwargs)
        order.extend(place for batch in batches for place in batch.rollouts)
        return batches

    def loss(
        log_probs: torch.Tensor,
        mu: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        index = rest[0]
        for sequence in range(int(index.max()) + 1):
            tokens = (index == sequence) & mask.bool()
            seen.append((advantages[tokens].tolist(), log_probs[tokens].tolist()))
        return true_loss(log_probs, mu, advantages, mask, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(streamrl.trainer, "policy_loss", loss)
        patch.setattr(streamrl.trainer, "pack_rollouts", pack)
        trainer.step(shard_of(groups, groups), policy_version=version)
    return [seen[order.index(i)] for i in range(len(order))]


def made(folder: pathlib.Path, mesh: DeviceMesh, config: Config) -> tuple[Trainer, Policy, Critic | None]:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    reference = Policy(folder, mesh=mesh, temperature=1.0) if config.algorithm.kl_coef else None
    critic = Critic(folder, config, mesh=mesh) if config.algorithm.has_critic else None
    return Trainer(policy, config, reference=reference, critic=critic), policy, critic


def normalised(of_rollouts: list[list[float]]) -> list[float]:
    tokens = [a for advantages in of_rollouts for a in advantages]
    mean = math.fsum(tokens) / len(tokens)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in tokens) / (len(tokens) - 1))
    return [(a - mean) / (std + 1e-6) for a in tokens]


@pytest.mark.parametrize("setting", ["gae", "vtrace", "kl in the reward"])
def test_the_loss_is_given_the_advantages_of_the_papers(
    setting: str, folder: pathlib.Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two steps, so that values, ratios and the reference are all different; every number done by hand."""
    config = config_of(setting, budget=40)
    trainer, policy, critic = made(folder, mesh, config)
    for version in range(2):
        groups = batch_of(version)
        trainer.step(shard_of(groups, groups), policy_version=version)
    groups = batch_of(2)
    rollouts = [r for group in groups for r in group.rollouts]
    (batch,) = pack_rollouts(rollouts, torch.zeros(len(rollouts)), max_tokens=4096)
    values = torch.zeros(batch.num_tokens) if critic is None else critic.values(batch)
    reference = Policy(folder, mesh=mesh, temperature=1.0)
    seen = advantages_of(trainer, groups, monkeypatch, version=2)

    algorithm, own = config.algorithm, config.critic
    expected = []
    for i, (rollout, (_, log_probs)) in enumerate(zip(rollouts, seen, strict=True)):
        mine = (batch.tokens["sequence_index"] == batch.rollouts.index(i)) & batch.tokens["response_mask"].bool()
        v = values[mine].tolist()
        rewards = [0.0] * len(v)
        rewards[-1] = rollout.reward
        if algorithm.kl_coef:
            ids = [*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]
            q = reference.probe_log_probs([ids])[len(rollout.prompt_ids) - 1 :]
            for t, mu in enumerate(rollout.old_log_probs.tolist()):
                x = q[t] - mu
                rewards[t] -= algorithm.kl_coef * (-x if algorithm.kl_estimator == "k1" else math.exp(x) - 1 - x)
        if setting == "gae":
            expected.append(reference_gae(rewards, v, own.gamma, own.lam))
        elif setting == "vtrace":
            ratios = [p - mu for p, mu in zip(log_probs, rollout.old_log_probs.tolist(), strict=True)]
            expected.append(reference_vtrace(rewards, v, ratios, own.gamma, own.lam, own.rho_bar, own.c_bar)[0])
        else:
            expected.append([math.fsum(rewards[t:]) for t in range(len(rewards))])
    numbers = [a for advantages in expected for a in advantages] if setting == "vtrace" else normalised(expected)
    assert [a for advantages, _ in seen for a in advantages] == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    assert np.std(numbers) > 0.1


def test_a_response_that_was_cut_is_worth_its_reward_and_no_more(
    folder: pathlib.Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bootstrap: the same responses give the same advantages whether they stopped or were cut."""
    results = []
    for reason in ("stop", "length"):
        trainer, _, _ = made(folder, mesh, config_of("vtrace", budget=4096))
        groups = [
            RolloutGroup(
                uid=g.uid, rollouts=tuple(msgspec.structs.replace(r, finish_reason=reason) for r in g.rollouts)
            )
            for g in batch_of(0)
        ]
        trainer.step(shard_of(groups, groups), policy_version=0)
        results.append(advantages_of(trainer, groups, monkeypatch, version=1))
    assert results[0] == results[1]
