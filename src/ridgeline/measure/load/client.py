"""The client of a measured server, as a process of its own: a job on standard input, progress and a result out.

{"url": …, "model": …, "experiment": …, "timeout": …}  →  lines of progress, then {"result": …}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ridgeline.measure.load.endpoint import find_endpoint
from ridgeline.measure.load.prompts import RandomIds
from ridgeline.measure.load.run_load import Settings, measure_load
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import Serve


def main() -> int:
    """Run the job; a user's mistake is reported as ``{"refused": …}``."""

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    job = json.loads(sys.stdin.read())
    e = Experiment.model_validate(job["experiment"])
    assert isinstance(e.workload, Serve)
    prompts = RandomIds(e.model.vocab_size, e.workload.seed, e.workload.shared_prefix)
    try:
        endpoint = find_endpoint(job["url"], job["model"])
        settings = Settings(prompts=f"random token ids below {e.model.vocab_size}")
        result, _ = measure_load(endpoint, e.workload, prompts, settings, e, progress=say)
    except UserError as refusal:
        say({"refused": [refusal.what, refusal.fix]})
        return 2
    say({"result": result.model_dump(mode="json", by_alias=True)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
