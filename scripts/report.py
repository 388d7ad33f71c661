"""Writes summary.csv and a page about a sweep, or a single run, into its folder; prints where the page is.

python scripts/report.py multirun/hidden_bits/2030-01-31/12-00-00-ab12cd
"""

import sys
from pathlib import Path

from feedback import report

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("use: python scripts/report.py FOLDER    (of a run or of a sweep)")
    try:
        print(report.write(Path(sys.argv[1])))
    except OSError as error:
        sys.exit(f"error: {error}")
