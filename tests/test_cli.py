"""The command line: quick, refusing in one sentence with exit code 2, before anything is started or written."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
from typing import Any

import pytest

from actors import cli
from actors.plan import count_gpus, make_plan
from actors.run_view import RunView, write_status
from streamrl.config import load_config
from streamrl.errors import ConfigError, DeadlineExceededError
from streamrl.records import BufferStats, LearnerStatus
from streamrl.run_directory import create_run_dir, lock_run_dir
from streamrl.warm_up import make_character_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAVY = ("torch", "ray", "mlflow", "transformers", "vllm", "zmq")


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on stderr of a command line that is refused; nothing was written."""
    assert cli.run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("streamrl: ")
    assert list(pathlib.Path.cwd().iterdir()) == []
    return lines[0]


def finished_run(
    run_dir: pathlib.Path, *overrides: str, trained: int = 32, issued: int = 40, **ledger: Any
) -> pathlib.Path:
    """A run directory as a run of two steps of 16 groups leaves it behind."""
    create_run_dir(run_dir, load_config(None, ["learner.groups_per_step=16", *overrides]))
    stats = {"issued": issued, "in_flight": 0, "buffered": 5, "trained": trained, "discarded": {"stale": 3}, **ledger}
    (run_dir / "ledger.json").write_text(json.dumps({"final": True, **stats}))
    steps = [{"step": s, "time": 0.0, "offpolicy/staleness/max": 4.0, "buffer/trained": 16.0 * s} for s in (1, 2)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (run_dir / "events.jsonl").write_text(json.dumps({"kind": "end", "policy_version": 2}) + "\n")
    return run_dir


# -- speed --


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["launch", "--help"], 0),
        (["launch", "--dry-run"], 0),
        (["launch", "buffer.max_stalenes=3"], 2),
        (["launch", "--config", "none.yaml"], 2),
        (["launch", "generator.gpus=1000"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_help_dry_run_and_refusals_take_a_second_and_import_nothing_heavy(arguments: list[str], code: int) -> None:
    script = (
        "import sys; from actors import cli\n"
        f"try: code = cli.run({arguments!r})\n"
        "except SystemExit as exit: code = exit.code\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    seconds: list[float] = []
    while min(seconds, default=9.9) >= 1.5 and len(seconds) < 3:  # CPU time and three tries: the machine may be busy
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", script]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == code, result.stderr
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1.5


# -- launch --


def test_flags_are_short_for_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(sys.modules, "actors.launch", FakeLaunch(seen))
    run_dir = tmp_path / "a run: 1"
    flags = ["--generators", "2", "--learner", "1", "--max-staleness", "7", "--max-steps", "9", "--seed", "5"]
    flags += ["--run-dir", str(run_dir), "--mlflow-uri", "sqlite:///x.db", "--name", "123"]
    assert cli.run(["launch", "learner.lr=1e-3", *flags, "buffer.max_attempts=2", "--mlflow-ui"]) == 0
    ((config, launched_dir),) = seen
    assert (config.generator.count, config.learner.ranks, config.buffer.max_staleness) == (2, 1, 7)
    assert (config.run.max_steps, config.run.seed, config.run.name) == (9, 5, "123")
    assert (config.learner.lr, config.buffer.max_attempts) == (1e-3, 2)
    assert (config.tracking.mlflow_uri, config.tracking.mlflow_ui) == ("sqlite:///x.db", True)
    assert launched_dir == run_dir


class FakeLaunch:
    """Stands in for actors.launch: remembers what it was asked to run."""

    def __init__(self, seen: list[Any], *, code: int = 0, error: BaseException | None = None) -> None:
        self._seen, self._code, self._error = seen, code, error

    def launch(self, config: Any, run_dir: pathlib.Path) -> int:
        self._seen.append((config, run_dir))
        create_run_dir(run_dir, config)  # as the real one does, so that the next run takes another
        if self._error is not None:
            raise self._error
        return self._code


@pytest.mark.parametrize(
    ("error", "code", "last_line"),
    [
        (KeyboardInterrupt(), 130, "streamrl: interrupted"),
        (RuntimeError("boom"), 1, "streamrl: internal error: RuntimeError: boom"),
    ],
)
def test_the_last_line_says_why_a_run_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, last_line: str
) -> None:
    monkeypatch.setitem(sys.modules, "actors.launch", FakeLaunch([], error=error))
    assert cli.run(["launch"]) == code
    assert capsys.readouterr().err.strip().splitlines()[-1] == last_line


def test_a_failure_before_the_run_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "actors.launch", FakeLaunch([], error=DeadlineExceededError("waited 900 s")))
    assert cli.run(["launch"]) == 1
    assert capsys.readouterr().err == "streamrl: waited 900 s\n"


def test_the_exit_code_of_the_run_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "actors.launch", FakeLaunch([], code=130))
    assert cli.run(["launch"]) == 130


def test_a_run_gets_a_directory_named_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(sys.modules, "actors.launch", FakeLaunch(seen))
    assert cli.run(["launch", "--name", "mine"]) == cli.run(["launch", "--name", "mine"]) == 0
    first, second = (run_dir for _, run_dir in seen)
    assert first != second
    assert first.parent == second.parent == pathlib.Path.cwd() / "runs"
    assert first.name.startswith("mine-2")


def test_a_dry_run_prints_the_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["launch", "--dry-run", "--generators", "3", "--max-staleness", "4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "3 generators, 1 learner rank",
        "16 groups x 8 = 128 rollouts",
        "(4 + 1) x 16 = 80 groups, 640 members",
        "held out",
        "Nothing was started",
    ):
        assert part in text
    assert list(pathlib.Path.cwd().iterdir()) == []


# -- refusals --


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["launch", "--generatrs", "3"], "no such option: --generatrs (did you mean --generators?)"),
        (["launch", "--generators"], "expected one argument"),
        (["launch", "--generators", "x"], "generator.count ('x'): must be an integer"),
        (["launch", "three"], "must be section.key=value"),
        (["launch", "--learner", "32"], "learner.groups_per_step (16)"),
        (["launch", "data.source=jsonl", "data.path=none.jsonl", "reward.kind=exact_match"], "none.jsonl"),
        (["launch", "data.task=spel_backward"], "spell_backward"),
        (["launch", "model.path=./nowhere"], "model.path (./nowhere)"),
        (["launch", "--ray-addres", "x"], "did you mean --ray-address?"),
        (["lunch"], "invalid choice: 'lunch'"),
        ([], "COMMAND"),
        (["status"], "no run in runs/"),
        (["status", "nowhere"], "RUN (nowhere)"),
        (["audit", "nowhere"], "RUN (nowhere)"),
        (["deliver", "nowhere"], "RUN (nowhere)"),
        (["status", "nowhere", "--jsn"], "no such argument: --jsn"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert part in refused(capsys, *arguments)


def test_a_directory_that_holds_another_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    other = finished_run(tmp_path / "other")
    before = {path: path.read_bytes() for path in other.glob("*") if path.is_file()}
    message = refused(capsys, "launch", "--run-dir", str(other))
    assert f"run.dir ({other})" in message and "another run" in message
    assert {path: path.read_bytes() for path in other.glob("*") if path.is_file()} == before


def test_a_file_in_the_place_of_the_run_directory_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(capsys, "launch", "--run-dir", str(tmp_path / "file"))
    assert "is a file" in refused(capsys, "launch", "--run-dir", str(tmp_path / "file" / "below"))


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        message = refused(capsys, "launch", "--mlflow-ui", f"tracking.mlflow_ui_port={port}")
    assert f"tracking.mlflow_ui_port ({port})" in message


def test_more_gpus_than_there_are_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert count_gpus(ask_torch=False) == 2
    shared = ["generator.gpus=0.5", "generator.gpu_memory_utilization=0.4", "learner.gpus=1"]
    shared.append("generator.kv_cache_bytes=1000000000")
    message = refused(capsys, "launch", "--generators", "3", *shared)
    assert "2.5 GPUs are asked for and there are 2" in message
    config = load_config(None, ["generator.count=2", *shared])
    assert "0.5 GPU" in make_plan(config, pathlib.Path("x")).processes[-1].device


def test_a_cluster_may_have_more_gpus_than_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        config = load_config(None, ["generator.gpus=1", f"ray.address={address}"])
        assert "ray" not in [p.name for p in make_plan(config, pathlib.Path("x")).processes]


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("127.0.0.1:99999", "no Ray cluster answers there"),
        ("ray://127.0.0.1:10001", "must be the host:port"),
        ("somewhere", "must be the host:port"),
    ],
)
def test_a_cluster_that_does_not_answer_is_refused(capsys: pytest.CaptureFixture[str], address: str, part: str) -> None:
    message = refused(capsys, "launch", "--ray-address", address)
    assert f"ray.address ({address})" in message and part in message


@pytest.mark.parametrize(("has_token", "mode"), [(True, "token"), (False, None)])
def test_a_cluster_that_is_joined_is_shown_the_token_of_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, has_token: bool, mode: str | None
) -> None:
    if has_token:
        (tmp_path / "token").write_text("a token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # restored afterwards
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setitem(sys.modules, "actors.launch", FakeLaunch([]))
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        assert cli.run(["launch", "--ray-address", f"127.0.0.1:{cluster.getsockname()[1]}"]) == 0
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_a_reward_function_that_cannot_be_had_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "launch", "reward.kind=python", "reward.function=no_such_module_here:score")
    assert "reward.function (no_such_module_here:score): cannot be imported" in message


def test_prompts_that_do_not_fit_are_refused_before_the_base_model_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(capsys, "launch", "data.max_prompt_tokens=5", "data.long_prompts=refuse")
    assert "data.max_prompt_tokens (5)" in message and "training prompts are longer" in message


def test_what_only_the_model_can_tell_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    make_character_tokenizer(["a", "b", "c"]).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("")
    message = refused(
        capsys, "launch", f"model.path={tmp_path / 'model'}", "data.max_prompt_tokens=4", "data.long_prompts=refuse"
    )
    assert "data.max_prompt_tokens (4)" in message


def test_an_empty_data_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    path = f"data.path={tmp_path / 'empty.jsonl'}"
    assert "empty.jsonl" in refused(capsys, "launch", "data.source=jsonl", path, "reward.kind=exact_match")


# -- the plan --


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["generator.threads=512"], "compute threads share"),
        (["generator.kv_cache_bytes=999000000000000"], "of memory is needed"),
        (["buffer.max_staleness=0"], "S = 0 is the synchronous loop"),
        (["generator.concurrency=5000"], "15000 slots, but admission lets at most 640"),
        (["data.epochs=1", "data.size=200", "eval.num_prompts=4"], "the data ends after"),
    ],
)
def test_what_is_allowed_but_odd_is_said(overrides: list[str], part: str) -> None:
    plan = make_plan(load_config(None, ["data.size=50", *overrides]), pathlib.Path("x"))
    assert any(part in warning for warning in plan.warnings), plan.warnings


def test_the_plan_counts_a_model_in_a_folder_by_its_weights_and_a_critic_as_another(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4_000_000)
    plan = make_plan(load_config(None, [f"model.path={tmp_path}"]), pathlib.Path("x"))
    assert "about 2.0M parameters" in dict(plan.facts)["model"]
    assert dict(plan.facts)["weights"].startswith("8 MB published every step")

    def learner_bytes(*overrides: str) -> int:
        processes = make_plan(load_config(None, [f"model.path={tmp_path}", *overrides]), pathlib.Path("x")).processes
        return next(p.num_bytes for p in processes if p.name == "learner")

    with_critic = learner_bytes("algorithm.advantage=gae") - learner_bytes()
    assert with_critic == pytest.approx(16 * 2.0e6, rel=0.05)


# -- commands on a run --


def test_status_prints_the_last_look_and_all_of_it_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    run_dir = tmp_path / "run"
    config = load_config(None, ["run.name=watched"])
    create_run_dir(run_dir, config)
    view = RunView(config=config, started=0.0)
    view.see(buffer=BufferStats(issued=20, trained=16, in_flight=4), learner=LearnerStatus(rank=0), generators=[])
    view.add_step(7, {"rollout/reward/mean": 0.5})
    write_status(run_dir, view.snapshot(run_dir=run_dir, phase="training"))
    with lock_run_dir(run_dir):
        assert cli.run(["status", str(run_dir), "--json"]) == 0
        state = json.loads(capsys.readouterr().out)
        assert state["alive"] and state["step"] == 7 and state["buffer"]["trained"] == 16
        assert cli.run(["status", str(run_dir)]) == 0
        text = capsys.readouterr().out
        assert "watched" in text and "step 7/200" in text and "issued 20 = trained 16 + in flight 4" in text
        assert "driver is gone" not in text
    assert cli.run(["status", str(run_dir)]) == 0
    assert "The driver is gone; this was its last word, at step 7" in capsys.readouterr().out


def test_status_of_a_run_that_has_nothing_to_show_yet(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    create_run_dir(tmp_path / "run", load_config())
    assert cli.run(["status", str(tmp_path / "run")]) == 0
    assert "ended before anything was running" in capsys.readouterr().out
    assert cli.run(["status", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alive"] is False


def test_the_newest_run_is_meant_when_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("b", "a")):
        run_dir = finished_run(pathlib.Path("runs") / name)
        os.utime(run_dir / "config.yaml", (number, number))
    assert cli.run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"] == "runs/a"
    assert cli.run(["audit", "b"]) == 0


def test_audit_accepts_books_that_balance(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert cli.run(["audit", str(finished_run(tmp_path / "run"))]) == 0
    text = capsys.readouterr().out
    assert "issued 40 = trained 32 + buffered 5 + stale 3" in text
    assert "WRONG" not in text


@pytest.mark.parametrize(
    ("ledger", "part"),
    [
        ({"issued": 41}, "1 UNACCOUNTED FOR"),
        ({"trained": 48, "issued": 56}, "trained 48 groups; 2 optimizer steps of 16 groups are 32"),
        ({"in_flight": 2, "issued": 42}, "nothing is in flight after the end (2)"),
        ({"buffered": -5, "issued": 30}, "no count is negative"),
        ({"trained": 15, "issued": 23}, "no step saw more groups trained (32)"),
        ({"response_lengths": {"trained": {"8": 3}}}, "every rollout that arrived has a length and a fate"),
    ],
)
def test_audit_finds_books_that_do_not_balance(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, ledger: dict[str, Any], part: str
) -> None:
    assert cli.run(["audit", str(finished_run(tmp_path / "run", **ledger))]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert any(part in line for line in wrong), wrong


@pytest.mark.parametrize(("trained", "code"), [(32, 0), (16, 0), (15, 1), (33, 1)])
def test_audit_knows_that_a_group_may_be_trained_on_more_than_once(
    tmp_path: pathlib.Path, trained: int, code: int
) -> None:
    run_dir = finished_run(tmp_path / "run", "buffer.max_times_sampled=2", trained=trained, issued=trained + 8)
    (run_dir / "metrics.jsonl").write_text("")
    assert cli.run(["audit", str(run_dir)]) == code


@pytest.mark.parametrize(
    ("steps", "part"),
    [
        ([(1, 4.0), (3, 4.0)], "with a gap after 1"),
        ([(1, 4.0), (1, 4.0)], "with a gap after 1"),
        ([(1, 4.0), (2, 5.0)], "largest staleness trained on: 5, allowed: 4"),
    ],
)
def test_audit_finds_steps_that_are_missing_doubled_or_too_stale(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, steps: list[tuple[int, float]], part: str
) -> None:
    run_dir = finished_run(tmp_path / "run")
    lines = [json.dumps({"step": step, "offpolicy/staleness/max": staleness}) for step, staleness in steps]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert cli.run(["audit", str(run_dir)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert any(part in line for line in wrong), wrong


def test_audit_of_a_run_whose_driver_was_killed_says_that_the_ledger_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    run_dir = finished_run(tmp_path / "run")
    (run_dir / "ledger.json").unlink()
    assert cli.run(["audit", str(run_dir)]) == 1
    assert "no ledger.json and no status" in capsys.readouterr().out
    view = RunView(config=load_config(), started=0.0)
    view.buffer = BufferStats(issued=20, trained=16, in_flight=4)
    write_status(run_dir, view.snapshot(run_dir=run_dir, phase="training"))
    assert cli.run(["audit", str(run_dir)]) == 1
    assert "WRONG  the run wrote its final ledger" in capsys.readouterr().out
    with lock_run_dir(run_dir):  # alive: its last status balances, and nothing more can be asked
        assert cli.run(["audit", str(run_dir)]) == 0


def test_two_runs_cannot_take_the_same_directory(tmp_path: pathlib.Path) -> None:
    create_run_dir(tmp_path / "run", load_config())
    with pytest.raises(ConfigError, match="holds another run"):
        create_run_dir(tmp_path / "run", load_config())
    with lock_run_dir(tmp_path / "run"), pytest.raises(ConfigError, match="still going"):
        lock_run_dir(tmp_path / "run")
