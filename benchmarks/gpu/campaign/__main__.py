"""Measures everything on the GPU of this machine, in parts of a few minutes, each line beside its prediction.

    make gpu                                             # all parts, one after another, into gpu-results/
    python benchmarks/gpu/campaign --out DIR --part kernels --minutes 9 --wheels wheels

Predictions are written before anything is measured. Every part has its own JSON file in ``--out``; what is in one
already is not measured again, so that a part that ran out of time goes on where it stopped. On a machine without some
packages, ``--wheels`` names a folder with their wheels (``make gpu-wheels`` fills one), which are installed into a
folder in it, offline. Without a GPU, ``--small`` runs the same parts in small on the CPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[2] / "src"
PARTS = ("correctness", "probe", "kernels", "training", "serving", "offload")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these (default: all)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only lines whose name has this")
    parser.add_argument("--minutes", type=float, default=9.0, help="longest time of a part")
    parser.add_argument("--on", help="catalog name of this device (default: by the driver's name for it)")
    parser.add_argument("--small", action="store_true", help="tiny models and few lines; also without a GPU")
    parser.add_argument("--again", action="store_true", help="measure the parts anew")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="write the predictions and the report, measure nothing; with --on, no GPU is needed",
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels for packages that are missing")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not 0 < given.minutes < 1e6:
        parser.error(f"--minutes {given.minutes}: give a number of minutes above 0")
    return given


def told(what: str, fix: str) -> SystemExit:
    """Say what is wrong; the exception that ends the process with code 2."""
    print(f"error: {what}\n  fix: {fix}", file=sys.stderr)
    return SystemExit(2)


def find_packages(wheels: Path | None) -> None:
    """Put the project on the path of this process and its children, and with it what ``wheels`` holds: installed once,
    into a folder beside the wheels that this user alone can write to."""
    site = None if wheels is None else wheels.resolve() / f"installed-{sys.implementation.cache_tag}"
    if wheels is not None and site is not None and not site.exists():
        files = sorted(map(str, wheels.glob("*.whl")))
        if not files:
            raise told(f"no wheels in {wheels}", "fill it with `make gpu-wheels`")
        with tempfile.TemporaryDirectory(prefix=f"{site.name}-", dir=site.parent) as new:
            target = Path(new) / "site"
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target)]
            subprocess.run([*command, *files], check=True)
            try:
                target.rename(site)  # an installation that was interrupted is not taken for a whole one
            except OSError:
                if not site.exists():  # else a campaign beside this one has installed them
                    raise
    held = [str(SOURCE), str(HERE.parent), *([str(site)] if site is not None else [])]
    sys.path[:1] = held
    os.environ["PYTHONPATH"] = os.pathsep.join([*held, *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Run the campaign, or as its child the cells that it names. A user's mistake exits with code 2."""
    given = arguments()
    find_packages(given.wheels)
    try:
        from campaign import run
    except ModuleNotFoundError as e:
        raise told(f"the package {e.name!r} is not installed",
                   "`make setup`, or --wheels FOLDER (`make gpu-wheels`)") from None  # fmt: skip
    from ridgeline.spec.errors import UserError

    try:
        if given.child:
            run.measure_here(given)
        else:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
            run.campaign(given, given.part or PARTS)
    except UserError as e:
        raise told(e.what, e.fix) from None
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is kept, and the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
