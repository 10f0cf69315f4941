"""Reading a config: what is accepted, and that every refusal names the path, the value, the rule and the remedy."""

from __future__ import annotations

import pathlib
import re

import msgspec
import pytest
import yaml

from streamrl.config import Config, check_config, config_from_tree, dump_config, flatten_config, load_config
from streamrl.config_reference import render_reference
from streamrl.errors import ConfigError
from streamrl.weight_sync.choice import Placement, choose_backend, with_backend

ROOT = pathlib.Path(__file__).resolve().parent.parent


def refusal(*overrides: str, path: pathlib.Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    message = str(error.value)
    assert "\n" not in message, "a refusal is one line"
    return message


def test_the_defaults_are_valid() -> None:
    assert load_config() == Config()


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("buffer: {max_staleness: 2}\nlearner: {lr: 1e-3}\n")
    config = load_config(path, ["buffer.max_staleness=8", "buffer.max_staleness=9"])
    assert (config.buffer.max_staleness, config.learner.lr) == (9, 1e-3)


def test_the_resolved_config_is_itself_a_config(tmp_path: pathlib.Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["data.task_args.max_word_len=5", "run.name=on: off"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_an_empty_file_means_the_defaults(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path) == Config()


def test_flattened_settings_have_dotted_names() -> None:
    flat = flatten_config(load_config(None, ["data.task_args={min: 3}"]))
    assert flat["buffer.max_staleness"] == 4
    assert flat["data.task_args.min"] == 3
    assert flat["model.warm_up.lr"] == 2e-3


def test_rollouts_per_step_is_groups_times_members() -> None:
    assert load_config(None, ["learner.groups_per_step=6", "algorithm.group_size=4"]).rollouts_per_step == 24


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("123", "123"),
        ("yes", "yes"),
        ("null", "null"),
        ("a: b", "a: b"),
        ("'quoted'", "quoted"),
        ('"1"', "1"),
        ("a=b", "a=b"),
    ],
)
def test_a_text_setting_takes_the_text_as_it_stands(text: str, value: str) -> None:
    assert load_config(None, [f"run.name={text}"]).run.name == value


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("learner.lr=1e-4", "learner", "lr", 1e-4),
        ("learner.betas=[0.8, 0.9]", "learner", "betas", (0.8, 0.9)),
        ("tracking.mlflow_ui=true", "tracking", "mlflow_ui", True),
        ("data.template={prompt}=", "data", "template", "{prompt}="),
        ("run.dir=", "run", "dir", ""),
        ("data.task_args={a: [1, x]}", "data", "task_args", {"a": [1, "x"]}),
    ],
)
def test_an_override_is_read_by_the_type_of_its_setting(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_config(None, [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("buffer.max_stalenes=3", ["buffer.max_stalenes (3)", "no such setting", "Did you mean buffer.max_staleness?"]),
        ("bufer.max_staleness=3", ["bufer", "Did you mean buffer?", "tracking"]),
        ("model.warm_up.stps=3", ["model.warm_up.stps (3)", "Did you mean model.warm_up.steps?"]),
        ("run.max_steps=many", ["run.max_steps ('many')", "must be an integer", "run.max_steps=200"]),
        ("run.max_steps=1.5", ["run.max_steps (1.5)", "must be an integer"]),
        ("run.max_steps=true", ["run.max_steps (True)", "must be an integer"]),
        ("run.max_steps=", ["run.max_steps ('')", "must be an integer"]),
        ("generator.count=0", ["generator.count (0)", "must be an integer >= 1", "generator.count=3"]),
        ("run.seed=-1", ["run.seed (-1)", "must be an integer >= 0"]),
        ("run.seed=4294967296", ["run.seed (4294967296)", "must be an integer <= 4294967295"]),
        ("learner.lr=-1", ["learner.lr (-1)", "must be a number > 0"]),
        ("learner.lr=.inf", ["learner.lr (inf)", "must be a finite number"]),
        ("learner.lr=.nan", ["learner.lr (nan)"]),
        ("learner.betas=[0.9]", ["learner.betas ([0.9])", "a list of length 2"]),
        ("learner.betas=[0.9, x]", ["learner.betas[1] ('x')", "must be a number"]),
        ("algorithm.loss=ppo", ["algorithm.loss ('ppo')", "must be one of ppo_clip", "algorithm.loss=ppo_clip?"]),
        ("tracking.mlflow_ui=maybe", ["tracking.mlflow_ui ('maybe')", "true or false", "tracking.mlflow_ui=false"]),
        ("run=3", ["run (3)", "is a section", "run.max_steps"]),
        ("data.task_args=3", ["data.task_args (3)", "must be a mapping"]),
        ("run.max_steps", ["'run.max_steps'", "section.key=value"]),
        (".x=1", ["'.x=1'", "section.key=value"]),
        ("run.name.x=1", ["run.name"]),
    ],
)
def test_a_wrong_setting_is_refused_with_path_value_rule_and_remedy(override: str, parts: list[str]) -> None:
    message = refusal(override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.group_size=1"], ["algorithm.group_size (1)", "at least 2", "algorithm.group_size=8"]),
        (
            ["buffer.max_staleness=1", "learner.publish_interval=3"],
            ["buffer.max_staleness (1)", "every 3 steps", "buffer.max_staleness>=2", "learner.publish_interval=2"],
        ),
        (["generator.top_p=0.9"], ["generator.top_p (0.9)", "old_log_probs", "Set generator.top_p=1.0"]),
        (["generator.top_k=20"], ["generator.top_k (20)", "Set generator.top_k=0"]),
        (["learner.ranks=4", "learner.groups_per_step=3"], ["learner.groups_per_step (3)", "learner.ranks (4)"]),
        (["generator.max_new_tokens=60"], ["model.max_length (64)", "Set model.max_length>=108"]),
        (["learner.micro_batch_tokens=10"], ["learner.micro_batch_tokens (10)", "Set learner.micro_batch_tokens>=64"]),
        (["model.warm_up.hidden_size=130"], ["model.warm_up.hidden_size (130)", "multiple"]),
        (["model.warm_up.hidden_size=64"], ["model.warm_up.num_heads (4)", "Set model.warm_up.num_heads=2"]),
        (["data.chat=true"], ["data.chat (true)", "Set data.chat=false"]),
        (["data.path=x.jsonl"], ["data.path (x.jsonl)", "Set data.source=jsonl"]),
        (["data.source=jsonl"], ["data.path (empty)", "Set data.path=FILE"]),
        (["data.source=jsonl", "data.path=x"], ["reward.kind (task)", "exact_match"]),
        (["reward.kind=python"], ["reward.function ('')", "module:function"]),
        (["algorithm.proximal=bypass"], ["algorithm.correction (token_truncate)", "twice"]),
        (["run.name=a/b"], ["run.name ('a/b')", "Set run.name"]),
        (["tracking.mlflow_ui=true", "tracking.mlflow_uri=http://x"], ["tracking.mlflow_ui (true)", "http://x"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], parts: list[str]) -> None:
    message = refusal(*overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("- a\n- b\n", "must be a mapping of sections, not list"),
        ("a: [1\n", "not valid YAML"),
        (b"\xff\xfe\x00x", "cannot be read"),
        ("run: null\n", "is a section of settings"),
        ("run: {max_steps: 5, max_steps: 6}\n", "max_steps is given twice"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: pathlib.Path, content: str | bytes, part: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert part in refusal(path=path)


def test_a_missing_config_file_is_refused(tmp_path: pathlib.Path) -> None:
    assert "no such file" in refusal(path=tmp_path / "none.yaml")
    assert "cannot be read" in refusal(path=tmp_path)


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(AttributeError):
        load_config().run.seed = 3  # type: ignore[misc]


def test_checking_and_converting_are_separate_steps() -> None:
    config = config_from_tree({"generator": {"top_k": 3}})
    with pytest.raises(ConfigError, match="top_k"):
        check_config(config)


def test_every_setting_has_a_docstring_and_the_page_is_up_to_date() -> None:
    page = render_reference()
    for path in flatten_config(Config()):
        assert f"| `{path}` |" in page
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page, "run `make docs`"


def test_every_setting_is_read_somewhere() -> None:
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for layer in ("streamrl", "buffers", "actors")
        for path in (ROOT / layer).rglob("*.py")
        if path.name not in ("config.py", "config_rules.py", "config_reference.py")
    )
    refused = {"generator.top_p", "generator.top_k"}  # there to be refused with the reason, in config_rules.py
    unread = [p for p in flatten_config(Config()) if not re.search(rf"\.{re.escape(p.rsplit('.', 1)[-1])}\b", code)]
    assert set(unread) == refused


def test_sparse_files_only_hold_what_differs() -> None:
    for path in (ROOT / "configs").glob("*.yaml"):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        defaults = msgspec.to_builtins(Config())
        for section, settings in tree.items():
            for key, value in settings.items():
                assert defaults[section][key] != value, f"{path.name}: {section}.{key} is the default"


# -- which weight backend --------------------------------------------------------------------------------------------


def test_auto_picks_shared_memory_on_one_host_and_tcp_on_several_and_says_why() -> None:
    one = Placement(learner_hosts=("a", "a"), generator_hosts=("a",))
    two = Placement(learner_hosts=("a",), generator_hosts=("a", "b"))
    assert choose_backend(Config(), one) == ("shm", "learner and generators are on one host")
    assert choose_backend(Config(), two) == ("tcp", "learner and generators are on 2 hosts")
    assert choose_backend(with_backend(Config(), "tcp"), one) == ("tcp", "weight_sync.backend says so")


def test_shared_memory_across_hosts_is_refused() -> None:
    two = Placement(learner_hosts=("a",), generator_hosts=("b",))
    with pytest.raises(ConfigError, match=r"weight_sync.backend \(shm\).*this run is on 2 \(a, b\).*backend=tcp"):
        choose_backend(with_backend(Config(), "shm"), two)


def test_a_drain_longer_than_the_limit_of_its_update_is_refused() -> None:
    slow = ["weight_sync.in_flight=drain", "weight_sync.drain_s=60"]
    assert all(part in refusal(*slow) for part in ("weight_sync.drain_s (60)", "weight_sync.timeout_s=120"))
    load_config(None, [*slow, "weight_sync.timeout_s=120"])
    load_config(None, ["weight_sync.drain_s=60"])
