"""The command line: `streamrl launch | status | audit | deliver`.

Invariants: nothing heavy (torch, ray, mlflow, transformers) is imported before a run really starts, so help and
refusals take a second; what is refused is refused before anything was started or written. Exit codes: 0 done, 1 the run
failed (the last line says why), 2 refused (one sentence on stderr), 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from streamrl.config import Config, load_config
from streamrl.errors import ConfigError, StreamrlError
from streamrl.run_directory import CONFIG_FILE, check_free, choose_run_dir, is_alive

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

_FLAGS = {  # flag of `launch`: (setting, help)
    "--name": ("run.name", "name of the run, in MLflow too"),
    "--generators": ("generator.count", "vLLM engines that generate"),
    "--learner": ("learner.ranks", "FSDP2 ranks that train"),
    "--max-staleness": ("buffer.max_staleness", "S: most optimizer steps between generating and training on a token"),
    "--max-steps": ("run.max_steps", "optimizer steps after which the run ends"),
    "--seed": ("run.seed", "seed of the prompt order, the base model, sampling and training"),
    "--run-dir": ("run.dir", "directory of the run's files; runs/<name>-<time> if left out"),
    "--mlflow-uri": ("tracking.mlflow_uri", "MLflow tracking URI; a SQLite store beside the run if left out"),
    "--ray-address": ("ray.address", "a running Ray cluster; one is started for the run if left out"),
}


class _Parser(argparse.ArgumentParser):
    """Refuses with one sentence, like every other refusal."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Carry out one command line; returns the exit code."""
    try:
        return _dispatch(argv)
    except ConfigError as error:
        print(f"streamrl: {error}", file=sys.stderr)
        return REFUSED
    except StreamrlError as error:
        print(f"streamrl: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("streamrl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # a fault of ours: the whole story first, the reason on the last line
        traceback.print_exc()
        print(f"streamrl: internal error: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED


def _dispatch(argv: Sequence[str]) -> int:
    parser, launcher = _parsers()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command in ("launch", "doctor"):
        overrides = [_as_override(word, launcher) for word in rest]
        return (_launch if arguments.command == "launch" else _doctor)(arguments, overrides)
    if rest:
        parser.error(f"no such argument: {rest[0]}")
    commands = {"status": _status, "audit": _audit, "deliver": _deliver}
    return commands[arguments.command](arguments)


def _parsers() -> tuple[_Parser, _Parser]:
    parser = _Parser(
        prog="streamrl", description="Asynchronous off-policy streaming RL for language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"streamrl {importlib.metadata.version('streamrl')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    launcher: _Parser = commands.add_parser(
        "launch",
        help="start a run and watch it",
        usage="streamrl launch [section.key=value ...] [options]",
        description="Start a run and watch it. Every setting can be given as section.key=value, for example "
        "buffer.max_staleness=8; docs/configuration.md lists them. Options stand for the settings named in brackets.",
        allow_abbrev=False,
    )
    _add_config_options(launcher)
    launcher.add_argument("--dry-run", action="store_true", help="check everything, print the plan and start nothing")

    doctor = commands.add_parser(
        "doctor",
        help="find what would go wrong in a run, before it is long",
        usage="streamrl doctor [section.key=value ...] [options]",
        description="Check this machine for a run of a config, then start one engine and prove it, the learner and the "
        "weight channel against each other. Takes a config as launch does. Exits with 1 if a check fails.",
        allow_abbrev=False,
    )
    _add_config_options(doctor)
    doctor.add_argument("--machine-only", action="store_true", help="start no engine")
    doctor.add_argument("--json", action="store_true", help="print the findings as one JSON array")

    status = commands.add_parser("status", help="print the state of a run", allow_abbrev=False)
    status.add_argument("run", metavar="RUN", nargs="?", help="directory of the run; the newest in runs/ if left out")
    status.add_argument("--json", action="store_true", help="print all of it as one JSON object")
    audit = commands.add_parser(
        "audit", help="re-add a run's ledger; exits with 1 if it does not balance", allow_abbrev=False
    )
    audit.add_argument("run", metavar="RUN", nargs="?", help="directory of the run; the newest in runs/ if left out")
    deliver = commands.add_parser("deliver", help="send to MLflow what it has not got from a run", allow_abbrev=False)
    deliver.add_argument("run", metavar="RUN", nargs="?", help="directory of the run; the newest in runs/ if left out")
    deliver.add_argument("--mlflow-uri", metavar="URI", default="", help="another MLflow than the run's own")
    return parser, launcher


def _add_config_options(parser: _Parser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file of settings; {_default_config() or 'the defaults'} if left out"
    )
    for flag, (setting, text) in _FLAGS.items():
        parser.add_argument(flag, metavar=flag.rsplit("-", 1)[-1].upper(), help=f"{text} [{setting}]")
    parser.add_argument(
        "--mlflow-ui", action="store_true", help="start `mlflow server` on loopback beside the run [tracking.mlflow_ui]"
    )


# -- launch --


def _launch(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = _read_config(arguments, overrides)
    run_dir = choose_run_dir(config)
    check_free(run_dir)

    from actors.plan import make_plan, print_plan

    plan = make_plan(config, run_dir, quick=arguments.dry_run)  # refuses what cannot run
    if arguments.dry_run:
        print_plan(plan)
        return DONE
    if config.ray.address:
        _use_ray_token()
    from actors.launch import launch

    return launch(config, run_dir)


def _use_ray_token() -> None:
    """Have Ray show its token to the cluster that a run joins.

    Ray reads RAY_AUTH_MODE once, when it is imported. `ray start` asks for the token that Ray keeps on this machine as
    soon as there is one; a driver that joins sends it only in this mode. A cluster without a token takes it too.
    """
    token = pathlib.Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if "RAY_AUTH_TOKEN" in os.environ or token.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _read_config(arguments: argparse.Namespace, overrides: list[str]) -> Config:
    for flag, (setting, _) in _FLAGS.items():
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is not None:
            overrides.append(f"{setting}={value}")
    if arguments.mlflow_ui:
        overrides.append("tracking.mlflow_ui=true")
    return load_config(arguments.config or _default_config(), overrides)


def _default_config() -> pathlib.Path | None:
    """The quickstart of the checkout this file is in; None when streamrl was installed without one."""
    path = pathlib.Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
    return path if path.exists() else None


def _as_override(word: str, launcher: _Parser) -> str:
    """A word that is no option must be section.key=value; the nearest option is named otherwise."""
    if not word.startswith("-"):
        return word
    options = [*_FLAGS, "--config", "--mlflow-ui", "--dry-run"]
    near = difflib.get_close_matches(word.split("=")[0], options, n=1, cutoff=0.5)
    launcher.error(f"no such option: {word}{f' (did you mean {near[0]}?)' if near else ''}")


def _doctor(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = _read_config(arguments, overrides)

    from actors.doctor import Finding, describe, examine

    findings: list[Finding] = []

    def say(finding: Finding) -> None:
        findings.append(finding)
        if not arguments.json:
            print(describe(finding), flush=True)

    sound = examine(config, choose_run_dir(config), machine_only=arguments.machine_only, say=say)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(findings)))
    return DONE if sound else FAILED


# -- commands on a run --


def _status(arguments: argparse.Namespace) -> int:
    from actors.run_view import read_status

    run_dir = _find_run(arguments.run)
    snapshot = read_status(run_dir)
    alive = is_alive(run_dir)
    if arguments.json:
        state: dict[str, Any] = {"alive": alive, "run_dir": str(run_dir)}
        state |= msgspec.to_builtins(snapshot) if snapshot is not None else {}
        print(json.dumps(state))
        return DONE
    if snapshot is None:
        print(f"{run_dir}: {'starting' if alive else 'ended before anything was running'}")
        return DONE
    from rich.console import Console

    from actors.live_view import render

    Console(highlight=False).print(render(snapshot))
    if not alive and not snapshot.phase.startswith(("done", "ended")):
        print(f"The driver is gone; this was its last word, at step {snapshot.step}.")
    return DONE


def _audit(arguments: argparse.Namespace) -> int:
    from actors.audit import audit_run, length_table

    audit = audit_run(_find_run(arguments.run))
    for finding in audit.findings:
        print(finding)
    if audit.stats is not None and (lengths := length_table(audit.stats)):
        print("", *lengths, sep="\n")
    return DONE if audit.sound else FAILED


def _deliver(arguments: argparse.Namespace) -> int:
    from streamrl.tracking import deliver

    run_dir = _find_run(arguments.run)
    try:
        rows = deliver(run_dir, uri=arguments.mlflow_uri)
    except ConfigError:
        raise
    except Exception as error:  # MLflow has many ways to fail; each of them means: not now
        print(f"streamrl: MLflow does not take it: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    print(f"MLflow took {rows} rows of metrics and has everything of {run_dir}")
    return DONE


def _find_run(name: str | None) -> pathlib.Path:
    """A directory, or the name of one in runs/, or the newest there.

    Raises:
        ConfigError: there is no such run.
    """
    runs = pathlib.Path("runs")
    if name is None:
        found = sorted(runs.glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ConfigError("RUN (left out): there is no run in runs/. Name the directory of a run.")
        return found[-1].parent
    for candidate in (pathlib.Path(name), runs / name):
        if (candidate / CONFIG_FILE).exists():
            return candidate
    raise ConfigError(f"RUN ({name}): no {CONFIG_FILE} is there. Name the directory of a run.")


if __name__ == "__main__":
    main()
