"""Whole sweeps timed in pairs: twelve short jobs one after the other, and by two workers at once.

python scripts/bench_sweep.py [--rounds 3] [--jobs 12] [key=value …]      settings go to every job

A round runs both, in alternating order, so that what else the machine does meets both. Each is the whole command, its
start, checks and report included.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = Path(__file__).resolve().parent.parent / "run.py"
SETTINGS = ["experiment=hidden_bits", "tracking=disabled", "quiet=true", "steps=8", "hidden_bits.fit_messages=2",
            "hidden_bits.test_messages=2", "hidden_bits.n_bits=4"]  # fmt: skip
LAUNCHERS = {"basic": [], "joblib, 2 workers": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]}


def seconds(launcher: list[str], jobs: int, settings: list[str]) -> float:
    """Wall time of one sweep over ``jobs`` seeds. CalledProcessError, with what it said, when a job fails."""
    seeds = ",".join(map(str, range(jobs)))
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(RUN),
            "-m",
            *SETTINGS,
            *settings,
            f"seed={seeds}",
            f"hydra.sweep.dir={folder}/sweep",
        ]
        started = time.perf_counter()
        done = subprocess.run([*command, *launcher], capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stderr)
            done.check_returncode()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a sweep of short jobs with the basic launcher and with joblib")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("settings", nargs="*")
    told = parser.parse_args()
    ratios = []
    for number in range(told.rounds):
        order = list(LAUNCHERS.items())[:: 1 if number % 2 == 0 else -1]
        times = {name: seconds(launcher, told.jobs, told.settings) for name, launcher in order}
        basic, joblib = (times[name] for name in LAUNCHERS)
        ratios.append(basic / joblib)
        print(f"round {number + 1}: {', '.join(f'{name} {t:.1f} s' for name, t in times.items())}, ×{ratios[-1]:.2f}")
    print(f"{told.jobs} jobs: joblib's throughput is ×{statistics.median(ratios):.2f} of basic's (median)")


if __name__ == "__main__":
    main()
