"""`streamrl doctor`: what would go wrong in a run of this config on this machine, found before it is long.

Each check is one function: it returns what it found, or raises `Trouble` with the remedy. The machine is looked at
first; then a real engine, a real learner's policy and a real weight channel prove each other (doctor_engine.py), unless
the machine has already failed, or it was asked to leave them out.

Waits: each check names its own; none waits longer than run.start_timeout_s.
"""

from __future__ import annotations

import asyncio
import pathlib
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable

import msgspec

from actors.plan import count_gpus, gpus_wanted, make_plan, model_bytes
from streamrl.config import Config
from streamrl.errors import ClosedError, ConfigError, DeadlineExceededError, StreamrlError
from streamrl.sockets import CurveKeys
from streamrl.tracking import check_store, store_uri
from streamrl.transport import Connection, Listener
from streamrl.weight_sync.choice import Placement, choose_backend

_SHM = pathlib.Path("/dev/shm")
_FREE_DISK_BYTES = 1 << 30
_FILES_PER_PROCESS = 256  # sockets, pipes, mapped files, shared objects; measured 60 to 150
_HANDSHAKE_S = 5.0
_STRANGER_S = 1.0


class Trouble(StreamrlError):
    """A check has failed; the message says what and what to do."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check.

    Example: Finding(check="shared memory", ok=True, text="540 MB are needed, 12.4 GB are free", seconds=0.01).
    """

    check: str
    ok: bool
    text: str
    seconds: float


Check = tuple[str, Callable[[], str]]


def examine(config: Config, run_dir: pathlib.Path, *, machine_only: bool, say: Callable[[Finding], None]) -> bool:
    """Make every check and `say` each finding as it comes; True if there was no trouble."""
    sound = all([_make(check, say) for check in machine_checks(config, run_dir)])
    if machine_only or not sound:
        return sound
    from actors.doctor_engine import engine_checks

    with engine_checks(config) as checks:
        # A later one stands on the ones before.
        return all(_make(check, say) for check in checks)


def _make(check: Check, say: Callable[[Finding], None]) -> bool:
    name, work = check
    began = time.monotonic()
    try:
        text, ok = work(), True
    except StreamrlError as error:
        text, ok = str(error), False
    say(Finding(check=name, ok=ok, text=text, seconds=round(time.monotonic() - began, 2)))
    return ok


def machine_checks(config: Config, run_dir: pathlib.Path) -> list[Check]:
    """Everything that needs neither engine nor model."""
    return [
        ("config, data, reward", lambda: _plan(config, run_dir)),
        ("GPUs", lambda: _gpus(config)),
        ("shared memory", lambda: check_shared_memory(config)),
        ("disk", lambda: check_disk(run_dir)),
        ("open files", lambda: check_open_files(config)),
        ("sockets, CURVE", lambda: asyncio.run(check_sockets(config))),
        ("MLflow", lambda: check_mlflow(config, run_dir)),
    ]


def _plan(config: Config, run_dir: pathlib.Path) -> str:
    plan = make_plan(config, run_dir)
    return "; ".join([f"{name}: {text}" for name, text in plan.facts if name in ("model", "data")] + [*plan.warnings])


def _gpus(config: Config) -> str:
    wanted = gpus_wanted(config)
    if not wanted:
        return "none is asked for"
    there = count_gpus(ask_torch=True)
    if wanted > there and not config.ray.address:
        raise Trouble(f"{wanted:g} are asked for and {there} are here. Set generator.gpus and learner.gpus lower.")
    import torch

    if not torch.cuda.is_available():
        raise Trouble(
            f"nvidia-smi shows {there}, and this torch ({torch.__version__}) can use none. Install a build of torch "
            "for the driver's CUDA version."
        )
    rows = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        rows.append(f"{torch.cuda.get_device_name(index)} with {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
        if free < config.generator.gpu_memory_utilization * total:
            raise Trouble(
                f"GPU {index} has {free / 1e9:.0f} of {total / 1e9:.0f} GB free, and an engine wants "
                f"generator.gpu_memory_utilization={config.generator.gpu_memory_utilization:g} of it. End what uses "
                "it, or set it lower."
            )
    return f"{'; '.join(rows)}; {_links(torch.cuda.device_count())}"


def _links(count: int) -> str:
    """How the first GPU reaches the others, by `nvidia-smi topo -m`: NV18 is 18 NVLinks, PHB or SYS a PCIe path."""
    if count < 2 or not shutil.which("nvidia-smi"):
        return "alone"
    try:
        matrix = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "nvidia-smi topo did not answer"
    first = next((line.split() for line in matrix.stdout.splitlines() if line.startswith("GPU0")), [])
    return f"GPU 0 to the others: {' '.join(first[2 : count + 1]) or 'unknown'}"


def check_shared_memory(config: Config) -> str:
    """Room for two versions in the run's segment and one in every generator's shadow."""
    backend, why = choose_backend(config, Placement.on_this_host())
    size = model_bytes(config)
    if size is None:
        return f"{backend}: {why}; the size of {config.model.path} is known only once it is here"
    needed = (2 + config.generator.count) * size
    free = shutil.disk_usage(_SHM).free
    if needed > free:
        raise Trouble(
            f"{needed / 1e6:,.0f} MB are needed for the weights ({config.generator.count} generators) and {_SHM} has "
            f"{free / 1e6:,.0f} MB free. Enlarge it (container: --shm-size={needed // 1_000_000 + 1}m), or start fewer "
            "generators."
        )
    return f"{backend}: {why}; {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free"


def check_disk(run_dir: pathlib.Path) -> str:
    """A file can be written where the run's will be, and there is room."""
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"0" * 4096)
    except OSError as error:
        raise Trouble(f"{place} cannot be written: {error.strerror}. Name another with --run-dir.") from None
    if free < _FREE_DISK_BYTES:
        raise Trouble(f"{place} has {free / 1e6:,.0f} MB free; a run needs a gigabyte. Name another with --run-dir.")
    return f"{place} has {free / 1e9:,.0f} GB free"


def check_open_files(config: Config) -> str:
    """The limit of this process is inherited by all others; the buffer has a socket for each of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_PER_PROCESS + 8 * (config.generator.count + config.learner.ranks)
    if soft != resource.RLIM_INFINITY and soft < needed:
        remedy = (
            f"ulimit -n {needed}" if hard == resource.RLIM_INFINITY or hard >= needed else "the limits of this user"
        )
        raise Trouble(f"a process may open {soft} files, and may need {needed}. Raise it: {remedy}.")
    return f"{soft} may be open, {needed} may be needed"


async def check_sockets(config: Config) -> str:
    """A peer with the keys gets in and is answered, one with other keys does not."""
    keys = CurveKeys.make(listeners=["buffer"], others=["doctor"])
    listener = Listener(bind=config.network.bind, curve=keys["buffer"], welcome=lambda name, payload: b"well met")
    try:
        address = await listener.start()
    except ConfigError as error:
        raise Trouble(
            f"no socket on network.host={config.network.host}: {error} Set network.host to an address that "
            "`hostname -I` lists."
        ) from None
    friend = Connection(address, name="doctor", curve=keys["doctor"])
    other_run = CurveKeys.make(listeners=["buffer"], others=["doctor"])
    stranger = Connection(address, name="doctor", curve=other_run["doctor"])
    try:
        try:
            if await friend.connect(timeout_s=_HANDSHAKE_S) != b"well met":
                raise Trouble(f"{address} was answered by something else. Is there a proxy on this host's network?")
        except DeadlineExceededError:
            raise Trouble(
                f"{address} does not answer from this very host within {_HANDSHAKE_S:g} s. Let the firewall pass TCP "
                "between the hosts of the run, on all ports, or set network.host=127.0.0.1 for a run on one host."
            ) from None
        try:
            await stranger.connect(timeout_s=_STRANGER_S)
        except (DeadlineExceededError, ClosedError):
            return f"{config.network.host} answers, and lets nobody in without the run's keys"
        raise Trouble("a peer with other keys was let in: libzmq was built without CURVE. Install pyzmq's own wheel.")
    finally:
        await stranger.close()
        await friend.close()
        await listener.close()


def check_mlflow(config: Config, run_dir: pathlib.Path) -> str:
    """A run can be made, written, read back and deleted. Waits: for the store, within MLflow's own request limit."""
    uri = store_uri(config, run_dir)
    try:
        check_store(config, run_dir)
    except ConfigError as error:
        raise Trouble(str(error)) from None
    return f"{uri} takes metrics and gives them back"


def describe(finding: Finding) -> str:
    """One line for the terminal."""
    return f"{'ok  ' if finding.ok else 'FAIL'}  {finding.check:<22}{finding.text}  ({finding.seconds:.1f} s)"
