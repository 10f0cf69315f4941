"""The schema of a run, how it is read, and the rules between settings.

One msgspec schema; YAML files that hold only what differs from the defaults; dotted overrides
(`buffer.max_staleness=8`). Reading a config imports no torch, so that a wrong key is reported in a second. A refusal
is a `ConfigError` that names the path, the value, the rule and the remedy.
"""

from __future__ import annotations

import ipaddress
import pathlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from streamrl.config_rules import ADVANTAGES, CRITIC_ADVANTAGES, LOSSES, rules
from streamrl.config_tree import apply_override, convert_tree, read_yaml
from streamrl.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]  # what numpy, torch and vLLM all take
Seconds = Annotated[float, Meta(gt=0)]
CPU_KV_CACHE_BYTES = 256 * 1024 * 1024  # generator.kv_cache_bytes=0 on a CPU
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
    seed: Seed = 0
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
    wrong_share: Fraction = 0.0
    """Share of the warm-up's demonstrations whose answer is written back to front. Above 0.5 the base model can do the
    task but mostly does something else, as a pretrained model does, and RL has to find out what is wanted."""


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
    task: str = "basic_arithmetic"
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
    """Prompt text: {prompt} and other columns of the row (for a reasoning-gym task, fields of its metadata) are filled
    in. Braces are doubled to stand for themselves."""
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
    """GPUs of each generator: 1, or a fraction that shares one. 0 runs on the CPU."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.85
    """Share of its GPU's memory that must be free when an engine starts, and is filled unless kv_cache_bytes is set."""
    kv_cache_bytes: Whole = 0
    """KV cache of one engine; 0 for 256 MB on a CPU, and for the rest of gpu_memory_utilization on a GPU of its own.
    Engines that share a GPU need it set."""
    threads: Count = 1
    """CPU threads of one engine."""
    enforce_eager: bool = True
    """Do not capture CUDA graphs or compile the model."""


class BufferConfig(_Section, frozen=True):
    max_staleness: Whole = 4
    """S: no group with staleness above S is ever trained on. 0 is the synchronous loop. docs/staleness.md has measured
    what it costs, and why this default."""
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
    """n: responses per prompt instance that are trained on."""
    advantage: Annotated[str, Meta(examples=[*ADVANTAGES, "python:module:function"])] = "grpo"
    """Advantage estimator, or a function of yours; docs/algorithms.md has the formulas. gae and vtrace train a
    critic."""
    loss: Annotated[str, Meta(examples=[*LOSSES, "python:module:function"])] = "ppo_clip"
    """Policy loss, or a function of yours; docs/algorithms.md has the formulas."""
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Lower clip range of the ratio: 1 - clip_low."""
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    """Upper clip range of the ratio: 1 + clip_high (0.28 is DAPO's clip-higher)."""
    dual_clip: Annotated[float, Meta(ge=0)] = 0.0
    """Bound c > 1 on the loss of negative advantages; 0 turns it off."""
    m2_threshold: Annotated[float, Meta(gt=0)] = 0.04
    """Largest mean of (p - mu)^2 over the tokens that m2po keeps."""
    proximal: Literal["bypass", "recompute", "interpolate"] = "recompute"
    """Proximal policy o of the ratio exp(p - o) of ppo_clip and gspo. `recompute`: the policy at the start of the step,
    and exp(o - mu) is the weight; with one optimizer step a batch the ratio is 1, the weight the whole correction.
    `bypass`: the behaviour policy itself; the clip is the whole correction and there is no weight. `interpolate`: a
    point between the two that stands for the policy of one version ago; the clip corrects for the last version, the
    weight for those before."""
    correction: Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"] = "token_truncate"
    """Importance weight of a token, or of the whole response for `sequence_`: truncated at `correction_cap`, or set to
    0 outside [`correction_floor`, `correction_cap`]. docs/staleness.md compares them on data of exact staleness."""
    correction_cap: Annotated[float, Meta(gt=0)] = 2.0
    """Upper bound of the weight."""
    correction_floor: Annotated[float, Meta(ge=0)] = 0.5
    """Lower bound for the masks."""
    rejection: Literal["none", "geometric", "k2", "k3"] = "none"
    """Drop whole responses that are too far from the policy, whatever the correction: by the geometric mean of their
    token ratios, or by their mean KL (estimators k2 and k3)."""
    rejection_cap: Annotated[float, Meta(ge=0)] = 0.0
    """Upper bound of the rejection; 0 picks 1.01 for `geometric`, 2.0 for `k2`, 0.01 for `k3`."""
    rejection_floor: Annotated[float, Meta(ge=0)] = 0.99
    """Lower bound of `geometric`."""
    veto_floor: Annotated[float, Meta(ge=0)] = 0.0
    """A response with a token ratio below this is dropped (1e-4 is usual); 0 turns it off."""
    veto_cap: Annotated[float, Meta(ge=0)] = 0.0
    """A response with a token ratio above this is dropped (100 is usual); 0 turns it off."""
    masked_denominator: Literal["original", "kept"] = "original"
    """Whether masked tokens still count in the loss denominator."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """How token losses become one number, over the global batch."""
    length_divisor: Count = 16
    """Constant divisor of `sequence_mean_token_sum` (Dr.GRPO)."""
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL divergence to the reference policy, the model that the run started from; 0 loads none."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it counts. `loss`: its gradient is added at every token; `reward`: it is subtracted from the reward of the
    response before advantages are computed, summed over its tokens, with mu in place of p."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence, from p and the reference's log-prob q of the token: k1 = p - q (no gradient in
    expectation), k2 = (p - q)^2 / 2, k3 = exp(q - p) - 1 - (q - p)."""

    @property
    def has_critic(self) -> bool:
        """Whether advantages need the values of a critic."""
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def has_baseline(self) -> bool:
        """Whether every group has a greedy response beside the sampled ones: member number group_size."""
        return self.advantage == "remax"

    @property
    def num_members(self) -> int:
        """Members that are generated for a group: group_size, and the greedy one if there is one."""
        return self.group_size + self.has_baseline


class CriticConfig(_Section, frozen=True):
    """The value model of advantage=gae and vtrace; it shares the learner's betas, weight decay and warm-up of lr."""

    lr: Annotated[float, Meta(gt=0)] = 3e-4
    """Peak learning rate of the critic's AdamW."""
    warmup_steps: Whole = 0
    """First optimizer steps in which only the critic trains; the policy stays, and its version counts on."""
    epochs: Count = 2
    """Optimizer steps of the critic in one step of the learner, each over the whole batch."""
    value_clip: Annotated[float, Meta(ge=0)] = 0.2
    """How far one batch may move a value: the loss is max((V - R)^2, (clip(V, V_old -+ value_clip) - R)^2) / 2; 0 turns
    the clip off."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Gradient clipping of the critic."""
    gamma: Fraction = 1.0
    """Discount from one token to the next."""
    lam: Fraction = 1.0
    """Lambda of gae and vtrace: 1 believes the rewards, less believes the critic too."""
    rho_bar: Annotated[float, Meta(gt=0)] = 1.0
    """vtrace: bound of the ratio with which a token's own error counts; must be algorithm.correction_cap too, the bound
    of the weight in the policy's loss."""
    c_bar: Annotated[float, Meta(gt=0)] = 1.0
    """vtrace: bound of the ratios through which later errors reach a token; at most rho_bar."""


class LearnerConfig(_Section, frozen=True):
    ranks: Count = 1
    """FSDP2 ranks."""
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    """GPUs of each rank. 0 runs on the CPU with gloo."""
    groups_per_step: Count = 16
    """B: groups (uids) in one optimizer step."""
    stream_groups: Whole = 0
    """Groups of a step that are handed out as soon as so many are there: forward and backward begin on them while the
    others are still being generated. 0 waits for the whole batch."""
    lr: Annotated[float, Meta(gt=0)] = 1e-4
    """Peak learning rate of AdamW."""
    warmup_steps: Whole = 5
    """Linear learning-rate warm-up."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """AdamW weight decay."""
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Gradient clipping."""
    micro_batch_tokens: Count = 4096
    """Most packed tokens in one forward and backward."""
    compile: bool = False
    """`torch.compile` the layers and the log-probs. The first step takes up to some minutes longer; it needs a C++
    compiler on a CPU. It pays off on a GPU."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and compute the rest again: less memory, about a third
    more computation."""
    publish_interval: Count = 1
    """Optimizer steps between weight publications; needs max_staleness >= publish_interval - 1."""
    threads: Count = 1
    """CPU threads of one rank."""


class WeightSyncConfig(_Section, frozen=True):
    backend: Literal["auto", "shm", "tcp"] = "auto"
    """How weights travel: `shm`, a double-buffered shared segment on one host; `tcp`, to any host, from every learner
    rank its own part. `auto` picks, and says why."""
    in_flight: Literal["keep", "recompute", "drain"] = "keep"
    """What happens to responses that are being sampled when new weights come. `keep`: they go on where they are, on
    top of what the old weights have read. `recompute`: the new weights read prompt and response again, then go on;
    the log-probs of the tokens before stay those of the weights that sampled them. `drain`: no request enters and the
    new weights wait for those that run, `drain_s` at most; what runs on is kept."""
    drain_s: Seconds = 30.0
    """Longest wait of `in_flight: drain`, a part of `timeout_s`."""
    probe_prompts: Count = 4
    """Fixed sequences whose log-probs prove each update."""
    probe_tolerance: Annotated[float, Meta(ge=0)] = 0.0
    """Accepted |log-prob difference| of the probe: the largest in float32, where 0 picks 1e-4, the mean in bfloat16,
    where 0 picks 0.3."""
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


class NetworkConfig(_Section, frozen=True):
    host: str = "127.0.0.1"
    """IPv4 address of this machine on which the buffer and the learner listen. On any but a loopback address, peers are
    let in only with CURVE keys that are made for this run and handed out through Ray."""

    @property
    def is_loopback(self) -> bool:
        return ipaddress.IPv4Address(self.host).is_loopback

    @property
    def bind(self) -> str:
        """Address of a socket on a free port."""
        return f"tcp://{self.host}:0"


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
    critic: CriticConfig = CriticConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    network: NetworkConfig = NetworkConfig()
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
        tree = read_yaml(pathlib.Path(path))
    for override in overrides:
        apply_override(tree, override, Config)
    config = config_from_tree(tree)
    check_config(config)
    return config


def config_from_tree(tree: Mapping[str, Any]) -> Config:
    """Convert nested plain data to a `Config`: types and ranges only; `check_config` has the rules between settings."""
    return convert_tree(tree, Config)


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
    """Refuse settings that contradict each other, by the rules of streamrl/config_rules.py.

    Raises:
        ConfigError: for the first contradiction found.
    """
    for broken, message in rules(config):
        if broken:
            raise ConfigError(message)
