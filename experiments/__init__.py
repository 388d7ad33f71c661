"""The experiments, one file each: `check` before the model is loaded, `run` with it, `show` what it found."""
