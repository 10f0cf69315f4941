"""`streamrl doctor`: what it looks at, what it says when something is wrong, and that it can tell wrong weights."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import resource
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from actors import doctor
from actors.cli import run
from actors.doctor import Check, Finding, Trouble, check_disk, check_mlflow, check_open_files, check_shared_memory
from actors.doctor_engine import engine_checks
from streamrl.config import Config, load_config
from streamrl.weight_sync.segment import segment_path


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def config() -> Config:
    return load_config("configs/quickstart.yaml", [])


def test_a_full_shared_memory_is_found_before_the_first_publication(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "are needed" in check_shared_memory(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64_000_000, 60_000_000, 4_000_000))
    with pytest.raises(Trouble, match=r"16 MB are needed .* has 4 MB free\. Enlarge it \(container: --shm-size=17m\)"):
        check_shared_memory(config)


def test_a_full_disk_and_one_that_cannot_be_written_are_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "free" in check_disk(tmp_path / "runs" / "new")
    with pytest.raises(Trouble, match="cannot be written"):
        check_disk(pathlib.Path("/proc/1"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 5_000_000))
    with pytest.raises(Trouble, match=r"has 5 MB free; a run needs a gigabyte\. Name another with --run-dir"):
        check_disk(tmp_path)


def test_a_low_limit_of_open_files_is_found_with_the_command_that_raises_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (100, 4096))
    with pytest.raises(Trouble, match=r"may open 100 files, and may need 288\. Raise it: ulimit -n 288"):
        check_open_files(config)


def test_a_network_that_cannot_be_bound_is_found() -> None:
    with pytest.raises(Trouble, match=r"no socket on network.host=192\.0\.2\.1"):
        asyncio.run(doctor.check_sockets(load_config(None, ["network.host=192.0.2.1"])))


def test_a_peer_with_other_keys_is_shut_out(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nobody in without" in asyncio.run(doctor.check_sockets(config))
    keys = doctor.CurveKeys.make(listeners=["buffer"], others=["doctor"])
    monkeypatch.setattr(doctor.CurveKeys, "make", lambda **names: keys)  # then the stranger is none
    with pytest.raises(Trouble, match="a peer with other keys was let in"):
        asyncio.run(doctor.check_sockets(config))


def test_mlflow_that_cannot_be_written_is_found(config: Config, tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "mlflow.db"
    broken.write_bytes(b"this is no database" * 100)
    with pytest.raises(Trouble, match=r"tracking\.mlflow_uri \(sqlite:.*deliver later"):
        check_mlflow(config, tmp_path / "run")


def test_a_config_that_cannot_run_here_fails_the_doctor_and_starts_no_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(doctor, "check_mlflow", lambda config, run_dir: "not asked")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["generator.gpus=1", f"model.path={tmp_path}", "--run-dir", str(tmp_path / "run")]
    (tmp_path / "config.json").write_text("{}")
    assert run(["doctor", "--json", *arguments]) == 1
    findings = {f["check"]: f for f in json.loads(capsys.readouterr().out)}
    assert not findings["GPUs"]["ok"] and "3 are asked for and 0 are here" in findings["GPUs"]["text"]
    assert findings["disk"]["ok"] and "engine start" not in findings


def test_every_finding_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = Finding(check="disk", ok=False, text="it is full", seconds=0.25)
    assert doctor.describe(found) == "FAIL  disk                  it is full  (0.2 s)"


def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "buffer.max_stalenes=3"]) == 2
    assert "max_staleness" in capsys.readouterr().err


# -- with an engine --


@pytest.fixture(scope="module")
def checks(model_cache: pathlib.Path) -> Iterator[dict[str, Any]]:
    settings = [f"model.cache_dir={model_cache}", "model.warm_up.steps=3", "generator.kv_cache_bytes=67108864"]
    with engine_checks(load_config("configs/quickstart.yaml", [*settings, "eval.num_prompts=8"])) as found:
        yield dict(found)
    assert not segment_path(f"doctor-{os.getpid()}").exists()


@pytest.mark.engine
def test_an_engine_starts_agrees_takes_new_weights_and_refuses_wrong_ones(checks: dict[str, Any]) -> None:
    order: list[Check] = list(checks.items())
    assert [name for name, _ in order] == ["engine start", "log-prob parity", "weight sync", "wrong weights"]
    texts = [work() for _, work in order]
    assert "vLLM serves base in float32" in texts[0]
    assert "mean difference" in texts[1]
    assert "after weights that moved it by" in texts[2]
    assert texts[3].startswith("refused, as they must be: its probe is off by")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("eager", [True, False])
def test_an_engine_on_a_gpu_does_the_same(eager: bool, model_cache: pathlib.Path) -> None:
    settings = [
        f"model.cache_dir={model_cache}",
        "model.warm_up.steps=3",
        "model.dtype=bfloat16",
        "generator.gpus=0.4",
        "generator.gpu_memory_utilization=0.1",
        "generator.kv_cache_bytes=67108864",
        f"generator.enforce_eager={str(eager).lower()}",
        "learner.gpus=0.4",
    ]
    with engine_checks(load_config("configs/quickstart.yaml", [*settings, "eval.num_prompts=0"])) as found:
        texts = [work() for _, work in found]
    assert texts[-1].startswith("refused, as they must be: its probe is off by")
