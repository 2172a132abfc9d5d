"""The command line: thin. Results go to standard output, everything else to standard error.

Exit codes: 0 done, 1 ran but no feasible answer or a threshold was broken, 2 the user's mistake, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
import time
from importlib import import_module

from ridgeline.cli.base import app, say
from ridgeline.spec.errors import UserError

_COMMANDS = (
    "init", "predict", "explain", "probe", "validate", "plan", "calibrate", "train", "bench", "ablate", "study",
    "dissect", "compress", "eval", "finetune", "merge", "load", "top", "runs", "compare", "report", "techniques",
    "models", "devices", "hardware", "serve", "router", "fleet", "swarm", "generate", "web",
)  # fmt: skip
"""The modules that register the commands, in the order of ``ridgeline --help``."""
for _name in _COMMANDS:
    import_module(f"ridgeline.cli.{_name}")

_LATER = 120.0
"""Seconds that ranks without an error of their own wait before they exit: torchrun ends all ranks as soon as one exits,
including one that has not reported its error yet."""


def main() -> None:
    """Entry point: turns mistakes into one message and exit code 2, Ctrl-C into 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # rather a question mark than no answer, where a locale lacks a sign
            stream.reconfigure(errors="replace")
    try:
        app()
    except UserError as e:
        from ridgeline.jobs.launchers import reports_errors

        if reports_errors():
            say(f"error: {e}")
        else:
            time.sleep(_LATER)
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
