"""The rules between settings: every contradiction that can be seen in a config alone, with its remedy.

Each rule is (broken, message); the message names the setting, its value, the reason and what to set instead. What needs
the data, the model or the machine is refused where those are looked at.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from streamrl.config import Config

LOSSES = ("ppo_clip", "reinforce_is", "cispo", "gspo", "topr", "m2po")
CRITIC_ADVANTAGES = ("gae", "vtrace")
TOKEN_ADVANTAGES = ("reinforce_pp", *CRITIC_ADVANTAGES)  # one number per token, not per rollout
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "maxrl", "remax", *CRITIC_ADVANTAGES)


def rules(c: Config) -> Iterable[tuple[bool, str]]:
    """Every rule, in the order in which they are checked."""
    yield (
        not c.run.name.strip(". ") or "/" in c.run.name,
        f"run.name ({c.run.name!r}): names the run's directory too, so it must be plain. Set run.name=quickstart.",
    )
    a, b, d, g, m = c.algorithm, c.buffer, c.data, c.generator, c.model
    for setting, name, known in (("loss", a.loss, LOSSES), ("advantage", a.advantage, ADVANTAGES)):
        near = [one for one in known if name in one] or difflib.get_close_matches(name, known)
        hint = f" Did you mean algorithm.{setting}={near[0]}?" if near else ""
        yield (
            name not in known and not name.startswith("python:"),
            f"algorithm.{setting} ({name!r}): must be one of {', '.join(known)}, or python:module:function for one of "
            f"your own.{hint}",
        )
    yield (
        a.group_size == 1 and a.advantage in ("grpo", "dr_grpo", "rloo", "maxrl"),
        f"algorithm.group_size (1): {a.advantage} compares the responses of one prompt, so it needs at least 2. "
        "Set algorithm.group_size=8, or algorithm.advantage=reinforce_pp or remax.",
    )
    yield (
        a.advantage in ("reinforce_pp", "gae") and c.rollouts_per_step < 2,
        f"algorithm.group_size (1) * learner.groups_per_step (1): {a.advantage} normalises over the batch, and one "
        "response has nothing to be compared with. Set algorithm.group_size=8.",
    )
    weighted, own = a.loss in ("ppo_clip", "gspo"), a.loss.startswith("python:")
    uncorrected = a.correction == "none" and a.rejection == "none"
    yield (
        (weighted or own) and a.proximal == "bypass" and a.correction != "none",
        f"algorithm.correction ({a.correction}): with algorithm.proximal=bypass the ratio of {a.loss} is already taken "
        "against the behaviour policy; a weight would count it twice. Set algorithm.correction=none, or "
        "algorithm.proximal=recompute.",
    )
    yield (
        a.loss in ("cispo", "topr", "m2po") and a.correction != "none",
        f"algorithm.correction ({a.correction}): the ratio in the loss of {a.loss} is itself the importance weight; "
        "another would count it twice. Set algorithm.correction=none, or algorithm.loss=reinforce_is.",
    )
    yield (
        not (weighted or own) and a.proximal == "interpolate",
        f"algorithm.proximal (interpolate): {a.loss} has no proximal policy. Leave it out, or set "
        "algorithm.loss=ppo_clip.",
    )
    yield (
        weighted and a.proximal == "recompute" and uncorrected and b.max_staleness > 0,
        f"algorithm.correction (none): with algorithm.proximal=recompute the ratio of {a.loss} is 1 at the only "
        f"optimizer step of a batch, so data up to {b.max_staleness} versions old would be trained on as if it were "
        "fresh. Set algorithm.correction=token_truncate, or algorithm.proximal=bypass.",
    )
    yield (
        weighted and a.proximal == "interpolate" and uncorrected and b.max_staleness > 1,
        f"algorithm.correction (none): with algorithm.proximal=interpolate the ratio of {a.loss} corrects for the last "
        f"version only, so data up to {b.max_staleness} versions old would be trained on as if it were 1 version old. "
        "Set algorithm.correction=token_truncate, or algorithm.proximal=bypass.",
    )
    yield (
        a.loss == "reinforce_is" and uncorrected and b.max_staleness > 0,
        f"algorithm.correction (none): reinforce_is has no other correction, so data up to {b.max_staleness} versions "
        "old would be trained on as if it were fresh. Set algorithm.correction=token_truncate.",
    )
    yield from _critic_rules(c)
    yield (
        a.correction.endswith("mask") and not a.correction_floor <= 1.0 <= a.correction_cap,
        f"algorithm.correction_floor ({a.correction_floor}), algorithm.correction_cap ({a.correction_cap}): "
        f"{a.correction} drops weights outside them, and 1 is outside, so even fresh data would be dropped. Set "
        "algorithm.correction_floor=0.5 algorithm.correction_cap=2.0.",
    )
    yield (
        a.rejection == "geometric" and not a.rejection_floor <= 1.0 <= (a.rejection_cap or 1.0),
        f"algorithm.rejection_floor ({a.rejection_floor}), algorithm.rejection_cap ({a.rejection_cap}): geometric "
        "rejection drops responses whose mean ratio is outside them, and 1 is outside, so even fresh data would be "
        "dropped. Set algorithm.rejection_floor=0.99 algorithm.rejection_cap=1.01.",
    )
    yield (
        a.rejection == "none" and a.rejection_cap > 0,
        f"algorithm.rejection_cap ({a.rejection_cap}): algorithm.rejection=none rejects nothing. Set "
        "algorithm.rejection=geometric, k2 or k3, or algorithm.rejection_cap=0.",
    )
    yield (
        a.veto_floor >= 1 or 0 < a.veto_cap <= 1,
        f"algorithm.veto_floor ({a.veto_floor}), algorithm.veto_cap ({a.veto_cap}): a token's ratio outside them drops "
        "its response, and 1 is outside, so even fresh data would be dropped. Set algorithm.veto_floor=1e-4 "
        "algorithm.veto_cap=100.",
    )
    yield (
        0 < a.dual_clip <= 1,
        f"algorithm.dual_clip ({a.dual_clip}): must be above 1, since it bounds the ratio of bad responses from above. "
        "Set algorithm.dual_clip=3.0, or 0 to turn it off.",
    )
    yield (
        a.dual_clip > 0 and not (weighted or own),
        f"algorithm.dual_clip ({a.dual_clip}): {a.loss} has no clipped ratio for it to act on. Set "
        "algorithm.dual_clip=0, or algorithm.loss=ppo_clip.",
    )
    yield (
        b.max_staleness < c.learner.publish_interval - 1,
        f"buffer.max_staleness ({b.max_staleness}): weights published every {c.learner.publish_interval} steps are "
        f"already {c.learner.publish_interval - 1} steps old before the next ones, so the bound can never be met. Set "
        f"buffer.max_staleness>={c.learner.publish_interval - 1}, or learner.publish_interval={b.max_staleness + 1}.",
    )
    yield (
        b.max_times_sampled > b.max_staleness + 1,
        f"buffer.max_times_sampled ({b.max_times_sampled}): a group is within max_staleness={b.max_staleness} for "
        f"{b.max_staleness + 1} steps only. Set buffer.max_times_sampled<={b.max_staleness + 1}, or "
        f"buffer.max_staleness>={b.max_times_sampled - 1}.",
    )
    yield (
        b.drop_zero_variance and a.num_members == 1,
        "buffer.drop_zero_variance (true): the rewards of a group of one response are always equal, so every group "
        "would be discarded. Set buffer.drop_zero_variance=false, or algorithm.group_size=8.",
    )
    yield (
        a.has_baseline and b.incomplete_groups == "min_members",
        f"buffer.incomplete_groups (min_members): with algorithm.advantage={a.advantage} a group without its greedy "
        "response has nothing to be compared with. Set buffer.incomplete_groups=refill.",
    )
    fewest = 1 if a.advantage == "reinforce_pp" or a.has_critic or a.advantage.startswith("python:") else 2
    yield (
        b.incomplete_groups == "min_members" and not fewest <= b.min_members <= a.group_size,
        f"buffer.min_members ({b.min_members}): must be from {fewest} to algorithm.group_size ({a.group_size}) for "
        f"algorithm.advantage={a.advantage}. Set buffer.min_members={max(fewest, a.group_size // 2)}.",
    )
    yield (
        b.limiter == "ratio" and b.samples_per_insert > b.max_times_sampled,
        f"buffer.samples_per_insert ({b.samples_per_insert}): a group can be sampled max_times_sampled="
        f"{b.max_times_sampled} times at most, so the ratio can never be reached and generators would wait for ever. "
        f"Set buffer.samples_per_insert<={b.max_times_sampled}.",
    )
    yield (
        b.limiter == "ratio" and 2 * b.error_buffer < c.learner.groups_per_step + b.samples_per_insert,
        f"buffer.error_buffer ({b.error_buffer}): one step samples learner.groups_per_step "
        f"({c.learner.groups_per_step}) groups at once; with less room samples and inserts could block each other. Set "
        "buffer.error_buffer>="
        f"{(c.learner.groups_per_step + b.samples_per_insert) / 2}.",
    )
    yield (
        b.limiter == "queue" and b.queue_size < c.learner.groups_per_step,
        f"buffer.queue_size ({b.queue_size}): one step samples learner.groups_per_step ({c.learner.groups_per_step}) "
        f"groups at once. Set buffer.queue_size>={c.learner.groups_per_step}.",
    )
    yield (
        b.limiter == "queue" and b.max_times_sampled > 1,
        f"buffer.max_times_sampled ({b.max_times_sampled}): a queue hands out each group once. Set "
        "buffer.max_times_sampled=1, or buffer.limiter=min_size.",
    )
    held = max(b.min_size, c.learner.groups_per_step)
    if b.limiter == "ratio":  # unused groups stay until they are stale
        held += math.ceil((b.max_staleness + 2) * c.learner.groups_per_step / b.samples_per_insert)
    yield (
        b.max_groups < held,
        f"buffer.max_groups ({b.max_groups}): the learner needs up to {held} groups to be held before it can sample. "
        f"Set buffer.max_groups>={held}.",
    )
    group_bytes = a.num_members * m.max_length * 12  # ids, log-probs and versions, 4 bytes each
    yield (
        b.max_bytes < held * group_bytes,
        f"buffer.max_bytes ({b.max_bytes}): {held} groups of algorithm.group_size={a.group_size} responses"
        f"{' and a greedy one' if a.has_baseline else ''} of up to "
        f"model.max_length={m.max_length} tokens can take {held * group_bytes} bytes, and the learner may need them "
        f"all. Set buffer.max_bytes>={held * group_bytes}.",
    )
    yield (
        g.top_p != 1.0,
        f"generator.top_p ({g.top_p}): truncated sampling makes old_log_probs differ from the learner's log-probs, "
        "which sees all tokens. Set generator.top_p=1.0.",
    )
    yield (
        g.top_k != 0,
        f"generator.top_k ({g.top_k}): truncated sampling makes old_log_probs differ from the learner's log-probs, "
        "which sees all tokens. Set generator.top_k=0.",
    )
    yield (
        g.gpus > 1,
        f"generator.gpus ({g.gpus:g}): one engine uses one GPU, or a share of one. Set generator.gpus=1 and start more "
        "generators with generator.count.",
    )
    yield (
        0 < g.gpus < 1 and g.gpu_memory_utilization > g.gpus,
        f"generator.gpu_memory_utilization ({g.gpu_memory_utilization:g}): engines that take generator.gpus={g.gpus:g} "
        f"of a GPU each would take more memory than it has. Set generator.gpu_memory_utilization={g.gpus:g} or less.",
    )
    yield (
        0 < g.gpus < 1 and not g.kv_cache_bytes,
        f"generator.kv_cache_bytes (0): engines that share a GPU (generator.gpus={g.gpus:g}) would measure each "
        "other's memory while they start. Set generator.kv_cache_bytes=4000000000, or less than the share of each.",
    )
    yield (
        d.max_prompt_tokens + g.max_new_tokens > m.max_length,
        f"model.max_length ({m.max_length}): data.max_prompt_tokens ({d.max_prompt_tokens}) + generator.max_new_tokens "
        f"({g.max_new_tokens}) do not fit. Set model.max_length>={d.max_prompt_tokens + g.max_new_tokens}.",
    )
    yield (
        c.learner.micro_batch_tokens < m.max_length,
        f"learner.micro_batch_tokens ({c.learner.micro_batch_tokens}): one sequence may have model.max_length "
        f"({m.max_length}) tokens and would fit in no micro-batch. Set learner.micro_batch_tokens>={m.max_length}.",
    )
    yield (
        c.learner.groups_per_step < c.learner.ranks,
        f"learner.groups_per_step ({c.learner.groups_per_step}): fewer than learner.ranks ({c.learner.ranks}), so a "
        f"rank would never have data. Set learner.groups_per_step>={c.learner.ranks}.",
    )
    stream = c.learner.stream_groups
    yield (
        stream > c.learner.groups_per_step,
        f"learner.stream_groups ({stream}): more than the learner.groups_per_step ({c.learner.groups_per_step}) of a "
        f"whole step. Set learner.stream_groups={max(1, c.learner.groups_per_step // 4)}, or 0 to wait for the whole "
        "batch.",
    )
    yield (
        stream > 0 and a.advantage in ("reinforce_pp", "gae"),
        f"learner.stream_groups ({stream}): algorithm.advantage={a.advantage} needs the mean and standard deviation of "
        "the whole batch before the first backward. Set learner.stream_groups=0, or algorithm.advantage=grpo.",
    )
    yield (
        stream > 0 and a.loss == "m2po",
        f"learner.stream_groups ({stream}): algorithm.loss=m2po needs the log-ratios of the whole batch before the "
        "first backward. Set learner.stream_groups=0, or algorithm.loss=ppo_clip.",
    )
    yield (
        stream > 0 and b.max_times_sampled > 1,
        f"learner.stream_groups ({stream}): a group that buffer.max_times_sampled ({b.max_times_sampled}) lets be used "
        "again could come twice in one step. Set learner.stream_groups=0, or buffer.max_times_sampled=1.",
    )
    yield (
        stream > 0 and (b.limiter == "ratio" or b.min_size > 1),
        f"learner.stream_groups ({stream}): buffer.limiter={b.limiter} with buffer.min_size={b.min_size} holds groups "
        "back until many are there. Set learner.stream_groups=0, or buffer.limiter=min_size with buffer.min_size=1.",
    )
    w = c.weight_sync
    yield (
        w.in_flight == "drain" and w.drain_s >= w.timeout_s,
        f"weight_sync.drain_s ({w.drain_s:g}): waiting for running responses is a part of weight_sync.timeout_s "
        f"({w.timeout_s:g}), which ends the generator. Set weight_sync.timeout_s={2 * w.drain_s:g}.",
    )
    yield (
        m.warm_up.hidden_size % m.warm_up.num_heads != 0,
        f"model.warm_up.hidden_size ({m.warm_up.hidden_size}): must be a multiple of model.warm_up.num_heads "
        f"({m.warm_up.num_heads}).",
    )
    yield (
        m.path == "base" and m.warm_up.hidden_size // m.warm_up.num_heads not in (32, 64, 96, 128, 256),
        f"model.warm_up.num_heads ({m.warm_up.num_heads}): model.warm_up.hidden_size ({m.warm_up.hidden_size}) over it "
        "is the width of a head, and vLLM's attention knows 32, 64, 96, 128 and 256. "
        f"Set model.warm_up.num_heads={max(m.warm_up.hidden_size // 32, 1)}, with a hidden_size that 32 divides.",
    )
    yield (
        m.path == "base" and d.chat,
        "data.chat (true): model.path=base has no chat template. Set data.chat=false, or name a chat model.",
    )
    yield (
        d.source == "reasoning_gym" and bool(d.path or d.eval_path),
        f"data.path ({d.path or d.eval_path}): data.source=reasoning_gym reads no file. Set data.source=jsonl or "
        "data.source=parquet, or leave data.path and data.eval_path empty.",
    )
    yield (
        d.source != "reasoning_gym" and not d.path,
        f"data.path (empty): data.source={d.source} needs a file. Set data.path=FILE.",
    )
    yield (
        d.source != "reasoning_gym" and c.reward.kind == "task",
        f"reward.kind (task): data.source={d.source} has no verifier of its own. Set reward.kind=exact_match, or "
        "reward.kind=python with reward.function=module:function.",
    )
    yield (
        d.source != "reasoning_gym" and not d.answer_column and (c.reward.kind == "exact_match" or m.path == "base"),
        "data.answer_column (empty): reward.kind=exact_match and the warm-up of model.path=base need answers. Set "
        "data.answer_column, or reward.kind=python with a model.path of your own.",
    )
    yield (
        c.reward.kind == "python" and ":" not in c.reward.function,
        f"reward.function ({c.reward.function!r}): reward.kind=python needs `module:function`. "
        "Set reward.function=my_module:my_reward.",
    )
    yield (
        not _is_host(c.network.host),
        f"network.host ({c.network.host}): must be the IPv4 address of one interface of this machine, because peers "
        "are told to connect to it. Set network.host=127.0.0.1, or to an address that `hostname -I` lists.",
    )
    remote = c.tracking.mlflow_uri.startswith(("http://", "https://"))
    yield (
        c.tracking.mlflow_ui and remote,
        f"tracking.mlflow_ui (true): tracking.mlflow_uri ({c.tracking.mlflow_uri}) is a server with a UI of its own. "
        "Leave out one of the two.",
    )


def _critic_rules(c: Config) -> Iterable[tuple[bool, str]]:
    """What a critic needs, and what needs a critic."""
    a, critic = c.algorithm, c.critic
    given = _given(critic)
    yield (
        bool(given) and not a.has_critic,
        f"critic.{given} ({getattr(critic, given, None)}): a critic loss without a critic: algorithm.advantage="
        f"{a.advantage} has none. Leave the section critic out, or set algorithm.advantage=gae.",
    )
    yield (
        a.has_critic and critic.warmup_steps >= c.run.max_steps,
        f"critic.warmup_steps ({critic.warmup_steps}): only the critic trains in these steps, and the run has "
        f"run.max_steps ({c.run.max_steps}), so the policy would never be trained. Set critic.warmup_steps=0.",
    )
    yield (
        a.has_critic and critic.value_clip > 0 and critic.epochs == 1,
        f"critic.value_clip ({critic.value_clip}): with critic.epochs=1 the values of the only step are those from "
        "before it, so the clip would never act. Set critic.epochs=2, or critic.value_clip=0.",
    )
    if a.advantage != "vtrace":
        of_vtrace = _given(critic, ("rho_bar", "c_bar"))
        yield (
            bool(of_vtrace),
            f"critic.{of_vtrace} ({getattr(critic, of_vtrace, None)}): is V-trace's, and algorithm.advantage="
            f"{a.advantage}. Leave it out, or set algorithm.advantage=vtrace.",
        )
        return
    yield (
        a.loss != "reinforce_is" and not a.loss.startswith("python:"),
        f"algorithm.loss ({a.loss}): V-trace brings its own policy gradient, min(rho_bar, exp(p - mu)) times its "
        f"advantage; the ratio of {a.loss} is another one. Set algorithm.loss=reinforce_is, or "
        "algorithm.advantage=gae.",
    )
    yield (
        a.correction != "token_truncate" or a.correction_cap != critic.rho_bar,
        f"algorithm.correction ({a.correction}), algorithm.correction_cap ({a.correction_cap}): the weight of "
        f"V-trace's policy gradient is min(rho_bar, exp(p - mu)) with critic.rho_bar={critic.rho_bar}, and its values "
        "already account for the ratios of later tokens. Set algorithm.correction=token_truncate "
        f"algorithm.correction_cap={critic.rho_bar}.",
    )
    yield (
        critic.c_bar > critic.rho_bar,
        f"critic.c_bar ({critic.c_bar}): above critic.rho_bar ({critic.rho_bar}) the targets no longer converge to the "
        f"value of one policy. Set critic.c_bar={critic.rho_bar}.",
    )


def _given(section: msgspec.Struct, names: Iterable[str] | None = None) -> str:
    """The first of the names (or of all keys) that does not have its default; empty without one."""
    defaults = type(section)()
    differing = (n for n in names or section.__struct_fields__ if getattr(section, n) != getattr(defaults, n))
    return next(differing, "")


def _is_host(text: str) -> bool:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast)
