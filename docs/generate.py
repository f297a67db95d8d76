"""Write docs/configuration.md from the schema: `make docs`."""

from __future__ import annotations

from pathlib import Path

from brim.config import reference_page


def main() -> None:
    page = Path(__file__).parent / "configuration.md"
    page.write_text(reference_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
