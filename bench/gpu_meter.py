"""What the GPU scripts share: progress lines, and the memory and load of the GPUs while something runs."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import threading
import time


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def config_arguments(arguments: argparse.Namespace) -> list[str]:
    return ["--config", str(arguments.config), *arguments.settings]


class GpuMeter:
    """Memory and load of the GPUs, sampled by nvidia-smi; nothing without it."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[tuple[float, float]]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> GpuMeter:
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _sample(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._ended.wait(1.0):
            with contextlib.suppress(subprocess.SubprocessError, ValueError):
                answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
                rows = [tuple(float(x) for x in row.split(",")) for row in answer.splitlines()]
                self.samples.append((time.time(), rows))  # type: ignore[arg-type]

    def summary(self, since: float = 0.0) -> list[dict[str, float]]:
        rows = [rows for moment, rows in self.samples if moment >= since]
        return [
            {
                "memory_max_mb": max(r[gpu][0] for r in rows),
                "load_mean_percent": round(statistics.mean(r[gpu][1] for r in rows), 1),
            }
            for gpu in range(len(rows[0]) if rows else 0)
        ]
