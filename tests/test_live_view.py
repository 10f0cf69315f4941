"""The live view: what a person reads, in a terminal, in a file and at the end; and the numbers behind it."""

from __future__ import annotations

import io
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from actors.live_view import LiveView, render, show_progress, sparkline, summary
from actors.run_view import RunView, Snapshot, ledger_line, read_status, write_status
from streamrl.config import Config, load_config
from streamrl.records import BufferStats, GeneratorStatus, LearnerStatus, Wait, WeightAck

SYNC = WeightAck(
    generator="generator-0", incarnation=0, policy_version=3, ok=True, pause_s=0.025, total_s=0.140, num_bytes=4_000_000
)


class FakeTracker:
    """Addresses as the tracker gives them."""

    run_url = ""
    problem = ""
    viewing_command = "mlflow server --backend-store-uri sqlite:///x.db"


class ManualClock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def generator(number: int, *, tokens: int, busy_s: float, uptime_s: float, **fields: Any) -> GeneratorStatus:
    return GeneratorStatus(
        name=f"generator-{number}", generated_tokens=tokens, busy_s=busy_s, uptime_s=uptime_s, **fields
    )


def outcome(**fields: Any) -> Any:
    defaults = {"exit_code": 0, "reason": "", "policy_version": 2, "generator_busy": 0.97, "learner_busy": 0.41}
    return SimpleNamespace(**{**defaults, "ledger": BufferStats(issued=40, trained=32, buffered=8), **fields})


def running_view(config: Config | None = None) -> RunView:
    """Two looks, ten seconds apart: 3 generators with 1000 tokens/s each and 90 % busy, the learner 40 %."""
    clock = ManualClock()
    view = RunView(config=config or load_config(None, ["run.name=watched"]), started=0.0, clock=clock)
    for seconds in (20.0, 30.0):
        clock.now += 10.0
        view.see(
            buffer=BufferStats(issued=40, trained=32, in_flight=6, discarded={"stale": 2}),
            learner=LearnerStatus(
                rank=0,
                policy_version=4,
                phase="wait_for_batch",
                busy_s=0.4 * seconds,
                uptime_s=seconds,
                trained_tokens=int(2500 * seconds),
                wait=Wait(waiter="learner-0", waiting_for="3 more groups", owner="generators", since=0.0),
            ),
            generators=[
                generator(
                    i,
                    tokens=int(1000 * seconds),
                    busy_s=0.9 * seconds,
                    uptime_s=seconds,
                    policy_version=3 + (i > 0),
                    running=64,
                    recent_syncs=(SYNC,),
                )
                for i in range(3)
            ],
        )
    view.add_eval(0, 0.31)
    for step, reward in enumerate((0.3, 0.4, 0.6), start=1):
        view.add_step(
            step,
            {
                "rollout/reward/mean": reward,
                "offpolicy/staleness/mean": 1.25,
                "offpolicy/staleness/max": 3.0,
                "learner/loss": -0.0123,
                "weight_sync/total_s": 0.14,
            },
        )
    view.add_eval(3, 0.62)
    return view


def snapshot(view: RunView | None = None, **fields: str) -> Snapshot:
    return (view or running_view()).snapshot(run_dir=pathlib.Path("/runs/watched"), phase="training", **fields)


def text_of(renderable: Any, *, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


# -- the numbers --


def test_rates_and_busy_shares_come_from_the_totals_of_the_last_seconds() -> None:
    view = running_view()
    assert view.generator_tokens_per_s == pytest.approx(3000)
    assert view.tokens_per_s == pytest.approx({f"generator-{i}": 1000 for i in range(3)})
    assert view.learner_tokens_per_s == pytest.approx(2500)
    assert view.busy == pytest.approx((0.9, 0.4))


def test_the_window_forgets_what_is_older_than_ten_seconds() -> None:
    clock = ManualClock()
    view = RunView(config=load_config(), started=0.0, clock=clock)
    tokens = 0
    for second in range(100):
        tokens += 1000 if second < 60 else 10
        clock.now += 1
        status = generator(0, tokens=tokens, busy_s=min(second, 60), uptime_s=second)
        view.see(buffer=BufferStats(), learner=LearnerStatus(rank=0), generators=[status])
    assert view.generator_tokens_per_s == pytest.approx(10)
    assert view.busy == (0.0, None)


def test_nothing_is_claimed_before_anything_was_measured() -> None:
    view = RunView(config=load_config(), started=0.0)
    assert view.busy == (None, None)
    assert view.generator_tokens_per_s == view.learner_tokens_per_s == 0
    text = text_of(render(snapshot(view)))
    assert "busy" not in text and "nan" not in text


def test_a_restarted_generator_never_shows_a_negative_rate() -> None:
    clock = ManualClock()
    view = RunView(config=load_config(), started=0.0, clock=clock)
    for tokens, uptime_s in ((5000, 50.0), (100, 1.0)):
        clock.now += 1
        status = generator(0, tokens=tokens, busy_s=uptime_s, uptime_s=uptime_s)
        view.see(buffer=BufferStats(), learner=LearnerStatus(rank=0), generators=[status])
    assert view.generator_tokens_per_s == 0
    assert view.busy == (None, None)


def test_the_ledger_line_says_what_does_not_add_up() -> None:
    assert ledger_line(BufferStats(issued=9, trained=4, buffered=3, discarded={"stale": 2})) == (
        "issued 9 = trained 4 + buffered 3 + stale 2"
    )
    assert ledger_line(BufferStats(issued=9, trained=4)).endswith("; 5 UNACCOUNTED FOR")


def test_a_stalled_run_says_who_waited_for_whom() -> None:
    view = running_view()
    assert "learner-0 has waited" in view.describe_waits()
    assert "for 3 more groups from generators" in view.describe_waits()
    assert RunView(config=load_config(), started=0.0).describe_waits() == "No process reports a wait."


def test_status_json_gives_the_same_look_back(tmp_path: pathlib.Path) -> None:
    look = snapshot(run_url="http://x/#/1")
    assert read_status(tmp_path) is None
    write_status(tmp_path, look)
    assert read_status(tmp_path) == look


# -- the panel --


def test_the_panel_shows_the_whole_run() -> None:
    text = text_of(render(snapshot(run_url="http://127.0.0.1:5000/#/run")))
    for part in (
        "watched  training  step 3/200",
        "0.600",
        "0.620 at step 3 (was 0.310 at step 0)",
        "mean 1.25  max 3 of S = 4",
        "3,000 tok/s 90% busy",
        "2,500 tok/s 40% busy  (wait_for_batch)",
        "pause 25 ms  published to proven 140 ms",
        "learner-0 for 3 more groups from generators",
        "issued 40 = trained 32 + in flight 6 + stale 2",
        "http://127.0.0.1:5000/#/run",
        "3 (-1)",
    ):
        assert part in text, part
    assert text.count("generator-") == 3


def test_the_panel_fits_a_narrow_terminal_and_takes_brackets_for_text() -> None:
    view = running_view(load_config(None, ["run.name=[red]x"]))
    text = text_of(render(snapshot(view)), width=60)
    assert all(len(line) <= 60 for line in text.splitlines())
    assert "[red]x" in text


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([0.5], " "),
        ([1, 1, 1], "   "),
        ([0, 1], " #"),
        ([0, 0.5, 1], " =#"),
        ([float(i) for i in range(8)], " .:-=+*#"),
    ],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest(values: list[float], bars: str) -> None:
    assert sparkline(values, unicode=False) == bars


def test_a_long_sparkline_is_averaged_down() -> None:
    assert len(sparkline([float(i) for i in range(1000)], width=40)) <= 40


# -- plain output --


def lines_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False, soft_wrap=True)


def test_without_a_terminal_there_is_one_line_a_step(tmp_path: pathlib.Path) -> None:
    console = plain_console()
    view = running_view()
    with LiveView(load_config(), tmp_path, FakeTracker(), console=console) as live:
        live.phase("starting processes")
        live.update(view)
        live.update(view)
        view.add_step(4, view.metrics)
        live.update(view)
    assert lines_of(console) == [
        "starting processes",
        "held-out reward 0.620 at step 3",
        "step 3/200  reward 0.600  staleness 1.25 max 3/4  generators 3,000 tok/s 90% busy  "
        "learner 2,500 tok/s 40% busy  loss -0.0123  sync 140 ms",
        "step 4/200  reward 0.600  staleness 1.25 max 3/4  generators 3,000 tok/s 90% busy  "
        "learner 2,500 tok/s 40% busy  loss -0.0123  sync 140 ms",
    ]
    look = read_status(tmp_path)
    assert look is not None and look.phase == "starting processes"


def test_the_address_and_troubles_of_mlflow_are_said_once(tmp_path: pathlib.Path) -> None:
    console, tracker, view = plain_console(), FakeTracker(), RunView(config=load_config(), started=0.0)
    live = LiveView(load_config(), tmp_path, tracker, console=console)
    tracker.run_url = "http://x/#/1"
    live.update(view)
    tracker.problem = "connection refused"
    live.update(view)
    live.update(view)
    tracker.problem = ""
    live.update(view)
    assert lines_of(console) == [
        "MLflow run: http://x/#/1",
        "metrics are not taken at the moment, training goes on: connection refused",
        "metrics are taken again",
    ]


def test_a_note_is_said_at_once_and_again_under_the_summary(tmp_path: pathlib.Path) -> None:
    console = plain_console()
    live = LiveView(load_config(), tmp_path, FakeTracker(), console=console)
    live.note("data     3 prompts")
    assert lines_of(console) == ["data     3 prompts"]
    live.close(outcome())
    assert lines_of(console).count("data     3 prompts") == 2


def test_in_a_terminal_the_panel_is_drawn_and_the_summary_stays(tmp_path: pathlib.Path) -> None:
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True, color_system=None)
    live = LiveView(load_config(), tmp_path, FakeTracker(), console=console)
    with live:
        live.update(running_view())
    live.close(outcome())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "generator-2" in text
    panel = [line.rstrip() for line in text.splitlines() if "generators  " in line]
    assert panel and max(len(line) for line in panel) <= 97, "a ^C fits behind the panel"
    assert text.rstrip().splitlines()[-1] == "mlflow   mlflow server --backend-store-uri sqlite:///x.db"


def test_a_terminal_can_be_asked_for_plain_lines(tmp_path: pathlib.Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with LiveView(load_config(None, ["tracking.live_view=false"]), tmp_path, FakeTracker(), console=console) as live:
        live.update(running_view())
    assert [line[:10] for line in lines_of(console)] == ["held-out r", "step 3/200"]


# -- the end --


def test_the_summary_says_which_side_was_the_slower_and_how_busy_both_were() -> None:
    text = summary(snapshot(), outcome())
    assert (
        "slower   generators: after the first ten steps the generators were busy 97% of the time, the learner 41%"
        in text
    )
    assert "reward   held-out 0.310 at step 0 -> 0.620 at step 3" in text
    assert "reward   training 0.300 -> 0.600" in text
    assert "ledger   issued 40 = trained 32 + buffered 8" in text
    assert "files    /runs/watched" in text
    text = summary(snapshot(), outcome(generator_busy=0.2, learner_busy=0.95))
    assert "slower   learner: " in text


def test_the_summary_of_a_run_that_never_trained_claims_nothing() -> None:
    view = RunView(config=load_config(), started=0.0)
    text = summary(snapshot(view), outcome(exit_code=1, generator_busy=0.0, learner_busy=0.0, ledger=BufferStats()))
    assert "slower" not in text and "reward" not in text
    assert "0 optimizer steps" in text


def test_the_summary_of_an_interrupted_run_says_so() -> None:
    text = summary(snapshot(), outcome(exit_code=130, reason="interrupted"))
    assert text.splitlines()[0].endswith(", interrupted")


def test_the_last_status_says_how_the_run_ended(tmp_path: pathlib.Path) -> None:
    live = LiveView(load_config(), tmp_path, FakeTracker(), console=plain_console())
    live.close(outcome(exit_code=1, reason="generator-1 died"))
    look = read_status(tmp_path)
    assert look is not None and look.phase == "ended: generator-1 died"


# -- progress --


def test_progress_is_one_line_for_each_work_without_a_terminal() -> None:
    console = plain_console()
    with show_progress(console=console) as progress:
        for done in range(200):
            progress("warming up the base model", done, 200)
    assert lines_of(console) == ["warming up the base model (200)"]


def test_progress_in_a_terminal_is_a_bar_that_ends_full() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with show_progress(console=console) as progress:
        for done in range(201):
            progress("warming up", done, 200)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "warming up" in text and "200/200" in text
