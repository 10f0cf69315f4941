"""The schema of a run, how it is read, and the rules between settings.

One msgspec schema; YAML files that hold only what differs from the defaults; dotted overrides
(`buffer.max_staleness=8`). Reading a config imports no torch, so that a wrong key is reported in a second. Every refusal is
a `ConfigError` that names the path, the value, the rule and the remedy.
"""

from __future__ import annotations

import difflib
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from streamrl.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the config: immutable, keyword-only, no unknown keys."""


class RunConfig(_Section, frozen=True):
    name: str = "run"
    """Name of the run; also the MLflow run name."""
    dir: str = ""
    """Run directory; empty for runs/<name>-<time>. Refused if another run's files are in it."""
    max_steps: Count = 200
    """Optimizer steps after which the run ends."""
    seed: int = 0
    """Seed of the prompt order, the base model, sampling and training."""
    start_timeout_s: Seconds = 300.0
    """Longest time from launch until every process has answered its handshake."""
    stop_timeout_s: Seconds = 15.0
    """Longest time from the end of training until every process is gone."""
    stall_limit_s: Seconds = 600.0
    """Without an optimizer step for this long the run ends non-zero and prints who waited for whom."""


class WarmUpConfig(_Section, frozen=True):
    """The base model that is made offline when `model.path` is `base`."""

    hidden_size: Count = 128
    """Width of the Llama model."""
    num_layers: Count = 4
    """Depth."""
    num_heads: Count = 4
    """Attention heads; hidden_size must be a multiple."""
    steps: Count = 200
    """Supervised steps on the run's own task, so that RL has something to improve."""
    batch_size: Count = 64
    """Examples per supervised step."""
    lr: Annotated[float, Meta(gt=0)] = 2e-3
    """Peak learning rate of the warm-up."""


class ModelConfig(_Section, frozen=True):
    path: str = "base"
    """`base` (made here, offline), a folder, a hub name, or a GGUF file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the generator's weights and of the learner's computation. Log-probs are float32 in both."""
    max_length: Count = 64
    """Longest prompt plus response in tokens."""
    cache_dir: str = ""
    """Where made and converted models are kept; empty for ~/.cache/streamrl."""
    warm_up: WarmUpConfig = WarmUpConfig()


class DataConfig(_Section, frozen=True):
    source: Literal["reasoning_gym", "jsonl", "parquet"] = "reasoning_gym"
    """Where prompts come from."""
    task: str = "chain_sum"
    """reasoning-gym task name."""
    task_args: dict[str, Any] = {}
    """Arguments of the task, as reasoning-gym names them."""
    size: Count = 5000
    """Number of training prompts drawn from a reasoning-gym task."""
    path: str = ""
    """JSONL or Parquet file of training prompts."""
    eval_path: str = ""
    """JSONL or Parquet file of held-out prompts; empty: the last `eval.num_prompts` rows of `path` are held out."""
    prompt_column: str = "prompt"
    """Column of the prompt text."""
    answer_column: str = "answer"
    """Column of the reference answer; empty for none (reward.kind=python)."""
    template: str = "{prompt}"
    """Prompt text: {prompt} and other columns of the row (for a reasoning-gym task, fields of its metadata) are filled in.
    Braces are doubled to stand for themselves."""
    chat: bool = False
    """Put the prompt into the model's chat template, as one message of the user's."""
    max_prompt_tokens: Count = 48
    """Longest prompt in tokens."""
    long_prompts: Literal["skip", "refuse"] = "skip"
    """What to do with a longer prompt: skip and count it, or refuse the run."""
    epochs: Whole = 0
    """Passes over the training prompts; 0 for as many as max_steps needs."""
    shuffle: bool = True
    """Shuffle the prompts anew every epoch, by seed."""


class RewardConfig(_Section, frozen=True):
    kind: Literal["task", "exact_match", "python"] = "task"
    """`task`: the reasoning-gym verifier; `exact_match`; `python`: a function of yours."""
    function: str = ""
    """`module:function` for kind `python`; called as function(prompt=, response=, answer=, task=) -> float."""
    timeout_s: Seconds = 5.0
    """Longest time for one reward; then the member has failed with reason `reward_timeout`."""
    workers: Count = 1
    """Reward processes per generator."""


class GeneratorConfig(_Section, frozen=True):
    count: Count = 3
    """Number of generators, each with one vLLM engine."""
    concurrency: Count = 64
    """Members each generator keeps inside its engine."""
    max_new_tokens: Count = 16
    """Longest response in tokens."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Sampling temperature; the learner computes its log-probs at the same temperature."""
    top_p: Fraction = 1.0
    """Only 1.0 keeps the log-probs of generator and learner equal."""
    top_k: int = 0
    """Only 0 (all tokens) keeps the log-probs of generator and learner equal."""
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    """GPUs of each generator; a fraction shares one. 0 runs on the CPU."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.85
    """Share of GPU memory for one engine."""
    kv_cache_bytes: Whole = 256 * 1024 * 1024
    """KV cache of one CPU engine."""
    threads: Count = 1
    """CPU threads of one engine."""
    enforce_eager: bool = True
    """Do not capture CUDA graphs or compile the model."""


class BufferConfig(_Section, frozen=True):
    max_staleness: Whole = 4
    """S: no group with staleness above S is ever trained on. 0 is the synchronous loop."""
    max_bytes: Count = 1 << 30
    """Most bytes of waiting rollouts; when it is reached generators are paced, nothing is dropped."""
    max_groups: Count = 100_000
    """Most groups in flight or waiting to be sampled; when it is reached generators are paced, nothing is dropped."""
    incomplete_groups: Literal["refill", "wait", "min_members"] = "refill"
    """A member failed. `refill`: it is generated again by itself; `wait`: the group waits for it until
    group_deadline_s; `min_members`: the group is used without it, if at least min_members are there."""
    min_members: Count = 2
    """Fewest members of a group with incomplete_groups=min_members."""
    max_attempts: Count = 3
    """Attempts per member; then its group is discarded with reason `failed`."""
    group_deadline_s: Seconds = 120.0
    """A group not complete this long after it was issued is discarded with reason `straggler`."""
    drop_zero_variance: bool = False
    """Discard groups whose rewards are all equal; they carry no GRPO gradient. Counted and replaced."""
    max_times_sampled: Count = 1
    """Optimizer steps that may use one group (epochs); each use is under the staleness bound."""
    selector: Literal["fifo", "freshest", "uniform", "prioritized"] = "fifo"
    """Which group is sampled next. `prioritized` draws by the standard deviation of the group's rewards."""
    priority_exponent: Annotated[float, Meta(ge=0)] = 1.0
    """Exponent of the priorities; 0 makes every priority above 0 equally likely."""
    limiter: Literal["min_size", "ratio", "queue"] = "min_size"
    """What keeps sampling and inserting together. `min_size`: sample once min_size groups wait; `ratio`: also keep
    samples near samples_per_insert; `queue`: at most queue_size groups that were never sampled."""
    min_size: Count = 1
    """Groups that must wait in the buffer before any is sampled."""
    samples_per_insert: Annotated[float, Meta(gt=0)] = 1.0
    """Samples per inserted group with limiter=ratio. Below max_times_sampled the learner leaves groups unused."""
    error_buffer: Annotated[float, Meta(gt=0)] = 64.0
    """Groups by which samples may run ahead of or behind the ratio."""
    queue_size: Count = 64
    """Size of the queue with limiter=queue."""
    journal: Literal["off", "async", "sync"] = "off"
    """`async`: every acknowledged rollout survives the death of the buffer process; `sync`: a power cut too."""


class AlgorithmConfig(_Section, frozen=True):
    group_size: Count = 8
    """n: responses per prompt instance."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "maxrl"] = "grpo"
    """Advantage estimator over the rewards of a group."""
    loss: Literal["ppo_clip", "reinforce_is", "cispo", "gspo"] = "ppo_clip"
    """Policy loss."""
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Lower clip range of the ratio: 1 - clip_low."""
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    """Upper clip range of the ratio: 1 + clip_high (0.28 is DAPO's clip-higher)."""
    dual_clip: Annotated[float, Meta(ge=0)] = 0.0
    """Bound c > 1 on the loss of negative advantages; 0 turns it off."""
    proximal: Literal["bypass", "recompute"] = "recompute"
    """Proximal policy of PPO: `recompute` evaluates it at the start of the step and weights by exp(o - mu); `bypass`
    takes the behaviour policy itself and allows no extra weight."""
    correction: Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"] = "token_truncate"
    """Importance weight exp(o - mu): truncated at `correction_cap`, or masked outside
    [`correction_floor`, `correction_cap`]."""
    correction_cap: Annotated[float, Meta(gt=0)] = 2.0
    """Upper bound of the weight."""
    correction_floor: Annotated[float, Meta(ge=0)] = 0.5
    """Lower bound for the masks."""
    masked_denominator: Literal["original", "kept"] = "original"
    """Whether masked tokens still count in the loss denominator."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """How token losses become one number, over the global batch."""
    length_divisor: Count = 16
    """Constant divisor of `sequence_mean_token_sum` (Dr.GRPO)."""
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""


class LearnerConfig(_Section, frozen=True):
    ranks: Count = 1
    """FSDP2 ranks."""
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    """GPUs of each rank. 0 runs on the CPU with gloo."""
    groups_per_step: Count = 16
    """B: groups (uids) in one optimizer step."""
    lr: Annotated[float, Meta(gt=0)] = 1e-4
    """Peak learning rate of AdamW."""
    warmup_steps: Whole = 5
    """Linear learning-rate warm-up."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """AdamW weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Gradient clipping."""
    micro_batch_tokens: Count = 4096
    """Most packed tokens in one forward and backward."""
    publish_interval: Count = 1
    """Optimizer steps between weight publications; needs max_staleness >= publish_interval - 1."""
    threads: Count = 1
    """CPU threads of one rank."""


class WeightSyncConfig(_Section, frozen=True):
    backend: Literal["shm"] = "shm"
    """How weights travel: `shm`, a double-buffered shared segment on one host."""
    probe_prompts: Count = 4
    """Fixed sequences whose log-probs prove each update."""
    probe_tolerance: Annotated[float, Meta(ge=0)] = 0.0
    """Largest accepted |log-prob difference| of the probe; 0 picks 1e-3 for float32, 0.1 for bfloat16."""
    timeout_s: Seconds = 60.0
    """Longest time for one generator to load and prove one version."""


class EvalConfig(_Section, frozen=True):
    interval_steps: Whole = 25
    """Optimizer steps between evaluations on held-out prompts; 0 evaluates only at the start and the end."""
    num_prompts: Whole = 128
    """Held-out prompts, never trained on; 0 turns evaluation off."""
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    """0 decodes greedily."""


class TrackingConfig(_Section, frozen=True):
    mlflow_uri: str = ""
    """MLflow tracking URI; empty for a SQLite store in the run directory's parent."""
    experiment: str = "streamrl"
    """MLflow experiment."""
    mlflow_ui: bool = False
    """Start `mlflow server` on loopback beside the run and print the run's address."""
    mlflow_ui_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of that server; 0 takes a free one."""
    live_view: bool = True
    """Live terminal view when the output is a terminal, else one line a step."""


class RayConfig(_Section, frozen=True):
    address: str = ""
    """Address of a running Ray cluster; empty starts one on this machine for this run."""


class Config(_Section, frozen=True):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    generator: GeneratorConfig = GeneratorConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    ray: RayConfig = RayConfig()

    @property
    def rollouts_per_step(self) -> int:
        """groups_per_step * group_size."""
        return self.learner.groups_per_step * self.algorithm.group_size


def load_config(path: str | pathlib.Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file (or the defaults), apply `section.key=value` overrides, check everything.

    Raises:
        ConfigError: with the path, the value, the rule and the remedy.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_yaml(pathlib.Path(path))
    for override in overrides:
        _apply_override(tree, override)
    config = config_from_tree(tree)
    check_config(config)
    return config


def config_from_tree(tree: Mapping[str, Any]) -> Config:
    """Convert nested plain data to a `Config`: types and ranges only, see `check_config` for the rules between settings."""
    _refuse_unknown_keys(tree, Config, "")
    try:
        return msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), tree)) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML; `load_config` of it gives the same config."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def flatten_config(config: Config) -> dict[str, Any]:
    """`{"buffer.max_staleness": 4, ...}`: the parameters of the run as MLflow takes them."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, child in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), child)
        else:
            flat[prefix] = value

    walk("", msgspec.to_builtins(config))
    return flat


def check_config(config: Config) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: for the first contradiction found.
    """
    for broken, message in _rules(config):
        if broken:
            raise ConfigError(message)


def _rules(c: Config) -> Iterable[tuple[bool, str]]:
    a, b, d, g, m = c.algorithm, c.buffer, c.data, c.generator, c.model
    yield (
        a.group_size == 1 and a.advantage in ("grpo", "dr_grpo", "rloo", "maxrl"),
        f"algorithm.group_size (1): {a.advantage} compares the responses of one prompt, so it needs at least 2. "
        "Set algorithm.group_size=8, or algorithm.advantage=reinforce_pp.",
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
    fewest = 1 if a.advantage == "reinforce_pp" else 2
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
    group_bytes = a.group_size * m.max_length * 12  # ids, log-probs and versions, 4 bytes each
    yield (
        b.max_bytes < held * group_bytes,
        f"buffer.max_bytes ({b.max_bytes}): {held} groups of algorithm.group_size={a.group_size} responses of up to "
        f"model.max_length={m.max_length} tokens can take {held * group_bytes} bytes, and the learner may need them all. "
        f"Set buffer.max_bytes>={held * group_bytes}.",
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
        a.proximal == "bypass" and a.correction != "none",
        f"algorithm.correction ({a.correction}): with algorithm.proximal=bypass the ratio already runs from the "
        "behaviour policy; another weight would count it twice. Set algorithm.correction=none, or "
        "algorithm.proximal=recompute.",
    )
    yield (
        a.correction in ("token_mask", "sequence_mask") and a.correction_floor >= a.correction_cap,
        f"algorithm.correction_floor ({a.correction_floor}): must be below algorithm.correction_cap "
        f"({a.correction_cap}), or every weight is masked. Set algorithm.correction_floor=0.5 and "
        "algorithm.correction_cap=2.0.",
    )
    yield (
        a.dual_clip != 0 and a.dual_clip <= 1,
        f"algorithm.dual_clip ({a.dual_clip}): must be 0 (off) or above 1, or it would cut ordinary updates. "
        "Set algorithm.dual_clip=3.",
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
        f"learner.groups_per_step ({c.learner.groups_per_step}): fewer than learner.ranks ({c.learner.ranks}), so a rank "
        f"would never have data. Set learner.groups_per_step>={c.learner.ranks}.",
    )
    yield (
        m.warm_up.hidden_size % m.warm_up.num_heads != 0,
        f"model.warm_up.hidden_size ({m.warm_up.hidden_size}): must be a multiple of model.warm_up.num_heads "
        f"({m.warm_up.num_heads}).",
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


def _read_yaml(path: pathlib.Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config ({path}): no such file. Name a YAML file, e.g. configs/quickstart.yaml.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config ({path}): cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config ({path}): not valid YAML: {' '.join(str(error).split())}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config ({path}): must be a mapping of sections, not {type(tree).__name__}.")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"override ({override!r}): must be section.key=value, e.g. buffer.max_staleness=8.")
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        value = text
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override ({override!r}): {key} is a value, not a section.")
    node[keys[-1]] = value


def _refuse_unknown_keys(tree: Any, section: type, path: str) -> None:
    """msgspec would name the key but not the nearest valid one."""
    if not isinstance(tree, Mapping):
        return
    fields = {f.name: f.type for f in msgspec.structs.fields(section)}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"Did you mean {f'{path}.{near[0]}' if path else near[0]}? " if near else ""
            raise ConfigError(f"{where} ({value!r}): no such setting. {hint}Valid here: {', '.join(fields)}.")
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, _Section):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where} ({value!r}): is a section of settings, not a value. "
                    f"Set one of: {', '.join(f'{where}.{f.name}' for f in msgspec.structs.fields(kind))}."
                )
            _refuse_unknown_keys(value, kind, where)


def _explain(message: str, tree: Mapping[str, Any]) -> str:
    """`Expected `int` >= 1 - at `$.buffer.max_bytes`` -> `buffer.max_bytes (0): expected `int` >= 1.`"""
    rule, _, where = message.partition(" - at `$.")
    path = where.rstrip("`")
    value: Any = tree
    for key in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and key.isdigit():
            value = value[int(key)]
    return f"{path} ({value!r}): {rule[:1].lower()}{rule[1:]}. Set {path} to a value that follows this rule."
