"""A newcomer's first quarter of an hour: a ticket export from Excel, and the shortest configuration for it."""

from __future__ import annotations

import csv
import io
import random
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from brim.data.read import read

pytestmark = pytest.mark.run

# The export as Excel saves it in German: semicolons, Windows-1252, line breaks in quotes, empty cells

KINDS = {
    "Drucker": "Der Drucker im Flur druckt nur Striche",
    "Netzwerk": "Kein Netz in Büro 12, andere Räume gehen",
    "Passwort": "Passwort vergessen, Konto gesperrt",
    "Rückgabe": "Ich möchte das Gerät zurückgeben",
    "Störung": "Die Anlage läuft seit heute früh nicht",
}
COLUMNS = ["Ticket-Nr", "Kunde", "Betreff", "Beschreibung", "Kategorie"]
_CUSTOMERS = ["Müller & Söhne", "Bäckerei Groß", "Jürgen Weiß", "Stadtwerke", "Hörgeräte König"]


def tickets(num_rows: int = 400, *, seed: int = 1) -> list[list[str]]:
    """Rows under COLUMNS. Every 16th has no category, every 9th no subject; some descriptions have several lines."""
    draw = random.Random(seed)
    rows = []
    for number in range(num_rows):
        kind = draw.choice(list(KINDS))
        lines = [f"{KINDS[kind]}; bitte um „schnelle“ Hilfe.", f"Betrag: {draw.randint(10, 99)},50 €", "Grüße"]
        subject = "" if number % 9 == 4 else f"{kind.lower()} – {draw.choice(['dringend', 'Rückfrage', 'neu'])}"
        description = "\n".join(lines[: draw.randint(1, 3)])
        category = "" if number % 16 == 7 else kind
        rows.append([str(10_000 + number), draw.choice(_CUSTOMERS), subject, description, category])
    return rows


def as_excel_saves_it(rows: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=";", lineterminator="\r\n").writerows([COLUMNS, *rows])
    return text.getvalue().encode("cp1252")


BASE = Path(__file__).parents[2] / "examples/stdlib_code/base-model"
CONFIG = """\
base_model: {base}
input_features:
  - {{name: Betreff, type: text}}
  - {{name: Beschreibung, type: text}}
output_features:
  - {{name: Kategorie, type: category}}
adapter: lora
trainer: {{type: finetune, train_steps: 1}}
"""


@pytest.fixture
def export(tmp_path, monkeypatch):
    """The current folder: tickets.csv and config.yaml."""
    (tmp_path / "tickets.csv").write_bytes(as_excel_saves_it(tickets()))
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=BASE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_ticket_export_trains_without_one_refusal_and_the_run_predicts_and_evaluates(export, brim):
    checked = brim("check", "config.yaml", "--dataset", "tickets.csv", "--show", 1, code=0)
    trained = brim("train", "config.yaml", "--dataset", "tickets.csv", "--output-directory", "run", code=0)
    said = " ".join(checked.out.split())
    assert "tickets.csv is read as Windows-1252, with semicolons between its fields" in said
    assert "output_features.0.decoder.match: 5 labels (the values of column `Kategorie`: Drucker, Netzwerk," in said
    assert "output_features.0.preprocessing.fallback_label: Störung (the most frequent label, of 86 rows)" in said
    assert "25 of 400 rows were dropped: a cell that the prompt or the answer needs is missing (no value" in said
    assert "41 of 400 rows had missing cells, which were filled (no value in `Betreff`)" in said
    shown = re.search(r"^Betreff: .*\nBeschreibung: (.|\n)*?\nKategorie:\n«([\w-]+)", checked.out, re.MULTILINE)
    assert shown is not None
    assert shown[2] in KINDS
    assert re.search(r"^done +1 step in", trained.out, re.MULTILINE)
    # The run keeps what was chosen, and predicts and evaluates with it.
    kept = YAML(typ="safe").load(Path("run/config.yaml").read_text())
    feature = kept["output_features"][0]
    assert list(feature["decoder"]["match"]) == sorted(KINDS)
    assert feature["preprocessing"]["fallback_label"] == "Störung"
    assert kept["prompt"]["template"] == "Betreff: {Betreff}\nBeschreibung: {Beschreibung}\nKategorie:\n"
    new = [[*row[:4], ""] for row in tickets(6, seed=2)]
    Path("new.csv").write_bytes(as_excel_saves_it(new))
    few = ["generation.max_new_tokens=3"]
    brim("predict", "run", "--dataset", "new.csv", "--output", "new.parquet", *few, code=0)
    assert set(pq.read_table("new.parquet")["Kategorie_predictions"].to_pylist()) <= set(KINDS)
    Path("few.csv").write_bytes(as_excel_saves_it([row for row in tickets(20) if row[4] == "Passwort"]))
    brim("evaluate", "run", "--dataset", "few.csv", *few, code=0)  # one label of the five
    brim("train", "config.yaml", "--dataset", "tickets.csv", "--output-directory", "run", "--resume", code=0)


def test_several_files_train_one_run_and_predict_one_output(export, brim):
    rows = tickets(40)
    for name, part in (("2023.csv", rows[:25]), ("2024.csv", rows[25:])):
        Path(name).write_bytes(as_excel_saves_it(part))
    both = ["--dataset", "2023.csv", "--dataset", "2024.csv"]
    assert "2023.csv and 1 more: 40 rows" in brim("check", "config.yaml", *both, code=0).out
    brim("train", "config.yaml", *both, "--output-directory", "run", code=0)
    kept = YAML(typ="safe").load(Path("run/config.yaml").read_text())
    assert kept["dataset"] == [str(export / "2023.csv"), str(export / "2024.csv")]
    assert brim("train", "run", "--output-directory", "run", "--resume").code == 0
    few = "generation.max_new_tokens=2"
    brim("predict", "run", "--dataset", "20*.csv", "--output", "both.csv", few, code=0)
    assert read("both.csv").table["Ticket-Nr"].to_pylist() == [int(row[0]) for row in rows]
    brim("evaluate", "run", "--split", "full", few, code=0)
