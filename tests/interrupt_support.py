"""Ctrl-C for a command in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def interrupted(arguments: Sequence[object], begun: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line that is interrupted once `begun` exists."""
    process = subprocess.Popen(
        [sys.executable, "-m", "granikv.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not begun.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    # As a terminal does: to the command and to all of its workers.
    os.killpg(process.pid, signal.SIGINT)
    screen, error = process.communicate()
    return process.returncode, screen, error
