"""The run directory: who owns it, how it is named, and what a reader sees while a writer is at work."""

from __future__ import annotations

import datetime
import math
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from streamrl.config import Config, load_config
from streamrl.errors import ConfigError
from streamrl.records import BufferStats
from streamrl.run_directory import (
    check_free,
    choose_run_dir,
    create_run_dir,
    encode_line,
    is_alive,
    lock_run_dir,
    read_lines,
    write_json,
)
from streamrl.run_plot import plot_run

NOON = datetime.datetime(2026, 11, 30, 12, 0, 0)


def test_a_directory_is_named_after_the_run_and_the_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["run.name=mine"])
    first = choose_run_dir(config, now=NOON)
    assert first == tmp_path / "runs" / "mine-20261130-120000"
    create_run_dir(first, config)
    assert choose_run_dir(config, now=NOON) == tmp_path / "runs" / "mine-20261130-120000-2"


def test_a_named_directory_is_taken_as_it_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_run_dir(load_config(None, ["run.dir=some/where"])) == tmp_path / "some" / "where"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "ledger.json"])
def test_a_directory_with_files_of_a_run_is_taken(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    check_free(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=rf"run\.dir .*{name} is there.*--run-dir"):
        check_free(tmp_path)


def test_the_config_saved_with_a_run_is_the_resolved_one(tmp_path: pathlib.Path) -> None:
    config = load_config(None, ["buffer.max_staleness=9"])
    create_run_dir(tmp_path / "run", config)
    assert load_config(tmp_path / "run" / "config.yaml") == config
    assert (tmp_path / "run" / "logs").is_dir()


def test_a_run_is_alive_until_its_driver_is_dead_however_it_died(tmp_path: pathlib.Path) -> None:
    create_run_dir(tmp_path / "run", Config())
    assert not is_alive(tmp_path / "run")
    script = (
        "import pathlib, time; from streamrl.run_directory import lock_run_dir\n"
        f"lock = lock_run_dir(pathlib.Path({str(tmp_path / 'run')!r})); print('locked', flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None and driver.stdout.readline() == "locked\n"
    assert is_alive(tmp_path / "run")
    with pytest.raises(ConfigError, match="still going"):
        lock_run_dir(tmp_path / "run")
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    assert not is_alive(tmp_path / "run")


def test_a_reader_ignores_the_line_that_is_being_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(read_lines(path)) == []
    path.write_bytes(encode_line({"step": 1}) + b'{"step": 2')
    ((record, offset),) = read_lines(path)
    assert record == {"step": 1}
    with path.open("ab") as file:
        file.write(b', "x": 1.5}\n')
    assert [record for record, _ in read_lines(path, offset=offset)] == [{"step": 2, "x": 1.5}]


def test_a_reader_skips_what_is_no_record(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n[3]\n\xff\n{"step": 2}\n')
    assert [record["step"] for record, _ in read_lines(path)] == [1, 2]


def test_numbers_that_json_does_not_have_become_null() -> None:
    assert encode_line({"a": math.nan, "b": -math.inf, "c": 1.0}) == b'{"a":null,"b":null,"c":1.0}\n'


def test_a_json_file_is_replaced_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ledger.json"
    write_json(path, BufferStats(issued=1))
    before = path.stat().st_ino
    write_json(path, BufferStats(issued=2))
    assert '"issued": 2' in path.read_text()
    assert path.stat().st_ino != before, "written beside and renamed, so that no reader sees half a file"
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_the_plot_shows_what_there_is(tmp_path: pathlib.Path) -> None:
    assert plot_run(tmp_path) is None
    rows = [{"step": s, "rollout/reward/mean": s / 9, "offpolicy/staleness/max": 3.0} for s in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(encode_line, rows)))
    (tmp_path / "evals.jsonl").write_bytes(encode_line({"step": 0, "eval/reward": 0.25}))
    path = plot_run(tmp_path)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
