"""`streamrl audit` with a journal: the books are added up again, and whatever was changed afterwards is found."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import lmdb
import msgspec
import pytest
from stand_ins import make_rollout

from actors import cli
from actors.audit import audit_run, length_table
from buffers.replay import ReplayBuffer
from streamrl.config import load_config
from streamrl.records import BufferStats, Failure
from streamrl.run_directory import JOURNAL_DIR, create_run_dir, lock_run_dir

OVERRIDES = ["learner.groups_per_step=2", "algorithm.group_size=2", "buffer.journal=async", "buffer.max_staleness=1"]
STEPS = 3


def run_with_journal(
    run_dir: pathlib.Path,
    *,
    end: bool = True,
    overrides: list[str] = OVERRIDES,
    trained: tuple[float, float] = (4.0, 22.0),
) -> None:
    """Three steps of two groups of two, one group that failed, one stale, one late rollout; long ones are discarded."""
    config = load_config(None, overrides)
    create_run_dir(run_dir, config)
    buffer = ReplayBuffer(config.buffer, group_size=2, issued_only=True, journal_path=run_dir / JOURNAL_DIR)
    steps: list[dict[str, Any]] = []

    def insert(uid: str, *, version: int, length: int) -> None:
        buffer.issue(uid)
        for member in range(2):
            buffer.insert(make_rollout(uid, member, version=version, length=length))

    buffer.issue("failed")
    for attempt in range(config.buffer.max_attempts):
        buffer.fail(Failure(uid="failed", member=0, attempt=attempt, reason="reward_timeout"))
    buffer.insert(make_rollout("failed", 1, length=50))
    buffer.insert(make_rollout("nobody's"))
    for version in range(STEPS):
        for i in range(2):
            insert(f"{version}-{i}", version=version, length=5 + i)
        groups = buffer.sample(2, policy_version=version, timeout_s=0)
        buffer.insert(make_rollout(groups[0].uid, 0, version=version))  # a duplicate
        buffer.advance(version + 1)
        buffer.commit(version + 1)
        stats = buffer.stats()
        steps.append(
            {
                "step": version + 1,
                "buffer/issued": stats.issued,
                "buffer/in_flight": stats.in_flight,
                "buffer/groups": stats.buffered,
                "buffer/trained": stats.trained,
                **{f"buffer/discarded/{reason}": count for reason, count in stats.discarded.items()},
                "learner/rollouts": trained[0],
                "learner/response_tokens": trained[1],
            }
        )
    insert("stale", version=0, length=60)
    buffer.issue("at the end")
    if end:
        buffer.discard_in_flight("run_ended")
        (run_dir / "ledger.json").write_bytes(msgspec.json.encode(buffer.stats()))
        (run_dir / "events.jsonl").write_text(json.dumps({"kind": "end", "policy_version": STEPS}) + "\n")
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    buffer.close()


def wrong(run_dir: pathlib.Path) -> list[str]:
    return [finding.text for finding in audit_run(run_dir).findings if not finding.ok]


def test_the_journal_adds_up_to_the_ledger_and_both_to_the_learners_books(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    run_dir = tmp_path / "run"
    run_with_journal(run_dir)
    assert cli.run(["audit", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "issued 9 = trained 6 + failed 1 + stale 1 + run_ended 1 (ledger.json)" in text
    assert "9 uids and 15 rollouts, counted in the journal, are those of the ledger" in text
    assert "the learner trained on 12 rollouts of 66 response tokens in 3 steps; the buffer handed out 12 of 66" in text
    assert "the ledger balances in the metrics of 3 steps" in text


def test_greedy_responses_are_handed_out_and_not_trained_on(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    with_greedy = ["algorithm.group_size=1", "algorithm.advantage=remax"]
    run_with_journal(run_dir, overrides=[*OVERRIDES, *with_greedy], trained=(2.0, 11.0))
    texts = [finding.text for finding in audit_run(run_dir).findings]
    said = "trained on 6 rollouts of 33 response tokens in 3 steps; the buffer handed out 12 of 66, 6 greedy ones among"
    assert wrong(run_dir) == [] and any(said in text for text in texts)
    other = tmp_path / "other"
    run_with_journal(other, overrides=[*OVERRIDES, *with_greedy], trained=(4.0, 22.0))
    assert len(wrong(other)) == 1, "it trained on the greedy ones too"


def test_a_row_that_is_missing_in_the_journal_is_found(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    run_with_journal(run_dir)
    with lmdb.open(str(run_dir / JOURNAL_DIR), max_dbs=4, map_size=1 << 30) as env:
        finals = env.open_db(b"finals")
        with env.begin(db=finals, write=True) as transaction:
            cursor = transaction.cursor()
            assert cursor.last() and cursor.prev() and cursor.prev() and cursor.delete()
    (found,) = wrong(run_dir)
    assert "; issued 9 but 8; trained 6 but 5; inserted_rollouts 12 but 10" in found


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("learner/rollouts", 5.0, "the learner trained on 13 rollouts"),
        ("learner/response_tokens", 21.0, "of 65 response tokens"),
        ("buffer/issued", 9.0, "but not in those of step 3"),
        ("buffer/discarded/lost", 1.0, "no step saw more groups discarded/lost (1)"),
    ],
)
def test_metrics_that_do_not_agree_with_the_ledger_are_found(
    tmp_path: pathlib.Path, name: str, value: float, part: str
) -> None:
    run_dir = tmp_path / "run"
    run_with_journal(run_dir)
    steps = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps[-1] = json.dumps({**json.loads(steps[-1]), name: value})
    (run_dir / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    assert any(part in text for text in wrong(run_dir)), wrong(run_dir)


def test_an_interrupted_run_may_lack_the_records_of_its_last_steps_only(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    run_with_journal(run_dir)
    steps = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join(steps[:2]) + "\n")
    assert wrong(run_dir) == []


def test_with_a_journal_a_run_that_was_killed_with_its_buffer_has_books_too(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    run_with_journal(run_dir, end=False)
    audit = audit_run(run_dir)
    assert audit.sound and audit.stats is not None
    assert (audit.stats.issued, audit.stats.in_flight, audit.stats.trained) == (9, 1, 6)
    assert audit.stats.response_lengths["trained"] == {8: 12}
    assert any("the buffer died before the end, with 1 groups in flight" in f.text for f in audit.findings)
    (run_dir / "ledger.json").write_text(json.dumps({"final": False, "issued": 3, "in_flight": 3}))
    assert audit_run(run_dir).stats == audit.stats, "the last status of a dead buffer is older than its journal"


def test_without_a_journal_the_last_status_of_a_dead_buffer_is_no_final_ledger(tmp_path: pathlib.Path) -> None:
    create_run_dir(tmp_path / "run", load_config())
    (tmp_path / "run" / "ledger.json").write_text(json.dumps({"final": False, "issued": 3, "in_flight": 3}))
    assert any(text.startswith("the run wrote its final ledger") for text in wrong(tmp_path / "run"))


def test_a_journal_that_is_in_use_is_left_alone(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    run_with_journal(run_dir)
    config = load_config(None, OVERRIDES)
    buffer = ReplayBuffer(config.buffer, group_size=2, journal_path=run_dir / JOURNAL_DIR)
    assert any("another process has it open" in text for text in wrong(run_dir))
    with lock_run_dir(run_dir):  # the run is going on
        assert wrong(run_dir) == []
    buffer.close()


def test_lengths_of_trained_generated_and_discarded_rollouts_lie_side_by_side(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    run_dir = tmp_path / "run"
    run_with_journal(run_dir)
    assert cli.run(["audit", str(run_dir)]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-5:]]
    assert table == [
        ["response", "tokens", "trained", "buffered", "discarded", "generated"],
        ["5-8", "100.0%", "-", "0.0%", "80.0%"],
        ["33-64", "0.0%", "-", "100.0%", "20.0%"],
        ["mean", "5.5", "-", "56.7", "15.7"],
        ["rollouts", "12", "0", "3", "15"],
    ]
    assert length_table(BufferStats()) == []
