"""Run the command as `python -m brim`, where the script `brim` is not on the path."""

from __future__ import annotations

from brim.cli import main

if __name__ == "__main__":
    main()
