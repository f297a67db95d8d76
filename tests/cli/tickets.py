"""A ticket export as Excel saves it in German: semicolons, Windows-1252, line breaks in quotes, empty cells."""

from __future__ import annotations

import csv
import io
import random

KINDS = {
    "Drucker": "Der Drucker im Flur druckt nur Striche",
    "E-Mail": "Mails an Empfänger außerhalb gehen nicht hinaus",
    "Hardware": "Der Bildschirm bleibt schwarz, die Lüfter laufen",
    "Netzwerk": "Kein Netz in Büro 12, andere Räume gehen",
    "Passwort": "Passwort vergessen, Konto gesperrt",
    "Rechnung": "Die Rechnung enthält eine falsche Menge",
    "Rückgabe": "Ich möchte das Gerät zurückgeben",
    "Schulung": "Wann ist die nächste Einführung für Neue?",
    "Software": "Das Programm stürzt beim Öffnen ab",
    "Störung": "Die Anlage läuft seit heute früh nicht",
    "Telefon": "Das Telefon klingelt nicht mehr",
    "Zugang": "Ich brauche Zugriff auf das Laufwerk für Verträge",
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
