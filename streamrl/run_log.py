"""The lines of a run: metrics, evaluations and events appended to files as they happen, by any thread.

Invariants: a line is in the file when `append` returns; a disk that takes no more ends nothing: the line is lost,
counted and said in `problem`, and the next line that fits stands by itself. While a log is open the run is alive.
"""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

from streamrl.run_directory import EVALS_FILE, EVENTS_FILE, METRICS_FILE, encode_line, lock_run_dir


class RunLog:
    """The open files of one run directory.

    Example: log = RunLog(run_dir); log.append("events.jsonl", {"time": 1.8e9, "kind": "launch"}); log.close().
    """

    def __init__(self, run_dir: pathlib.Path) -> None:
        """Raises ConfigError if a living run has the directory."""
        self._run_lock = lock_run_dir(run_dir)
        names = (METRICS_FILE, EVALS_FILE, EVENTS_FILE)
        self._files = {name: open(run_dir / name, "ab", buffering=0) for name in names}
        self._lock = threading.Lock()
        self._torn: set[str] = set()  # files whose last line was written in part
        self._lost_lines = 0
        self.problem = ""

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Write one line."""
        line = encode_line(record)
        with self._lock:
            data = b"\n" + line if name in self._torn else line
            try:
                if self._files[name].write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._torn.add(name)
                self._lost_lines += 1
                self.problem = f"{self._lost_lines} lines of {name} could not be written: {error.strerror}"
            else:
                self._torn.discard(name)

    def close(self) -> None:
        """Nothing can be appended any more, and the run is not alive."""
        with self._lock:
            for file in (*self._files.values(), self._run_lock):
                file.close()
