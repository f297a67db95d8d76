"""What the tables and squares say of a prediction, and the napkin beside it."""

import io
import re

import pytest
from hypothesis import given, strategies as st
from rich.console import Console
from tests.report.hand_made import GIB, hand_made_prediction

from brim.memory.closed_form import Line, Napkin
from brim.memory.events import Place
from brim.notes import PlanCard, wrapped
from brim.report import LOOKS, Card, memory_lines, memory_table, napkin_table, total_by_part
from brim.report.memory import distance, facts, square_bytes_for, squares


def shown(what, **changes):
    stream = io.StringIO()
    Console(file=stream, **{"width": 100, **changes}).print(what)
    return stream.getvalue()


def printed(prediction=None, **changes):
    return shown(memory_table(prediction or hand_made_prediction(**changes), title="Mistral-7B"))


def most_is(category):
    """Changes of a prediction in which a category takes the most."""
    return {"by_category": {**dict.fromkeys(hand_made_prediction().by_category, 0), category: 11 * GIB}}


def test_the_table_says_what_is_missing_and_what_the_other_way_takes_and_judges_no_unknown_device(golden):
    golden("report/memory.txt", printed())
    told = printed(budget_bytes=14 * GIB)
    assert "missing                 4.75" in told
    assert "W W W W W W W W W W W W W O A!A!L!L!x!" in told
    assert "! beyond the device's memory" in " ".join(told.split())
    assert "does not fit: " in told
    told = printed(budget_bytes=None, reason="it needs 18.8 GiB")
    assert "\nit needs 18.8 GiB\n" in told
    assert not re.search("free|fit", told)
    without = hand_made_prediction(total_bytes=40 * GIB, fits=False, gradient_checkpointing=False)
    told = printed(gradient_checkpointing=True, other=without)
    assert re.findall("(with.*checkpointing.*?) +\n", told) == ["without checkpointing  40.00"]
    turned = printed(gradient_checkpointing=False, other=hand_made_prediction(gradient_checkpointing=True))
    assert "with checkpointing" in turned


@pytest.mark.parametrize(
    ("changes", "part", "key", "is_advised"),
    [
        ({}, "weights, 13.0 GiB", "quantization: {bits: 4}", True),
        ({"quantization_bits": 4, "gradient_checkpointing": True}, "weights, 13.0 GiB", "quantization", False),
        (most_is("activations"), "activations, 11.0 GiB", "trainer.enable_gradient_checkpointing: true", True),
        ({**most_is("activations"), "gradient_checkpointing": True}, "activations", "gradient_checkpointing", False),
        (most_is("logits_and_loss"), "logits and loss", "trainer.chunked_loss: true computes", True),
        ({**most_is("logits_and_loss"), "has_chunked_loss": True}, "logits and loss", "trainer.chunked_loss", False),
    ],
)
def test_the_largest_part_is_told_with_the_key_that_lowers_it_unless_that_is_done(changes, part, key, is_advised):
    told = " ".join(printed(**changes).split())
    assert f"the largest part is {part}" in told
    assert (key in told) is is_advised


def test_what_others_measured_is_explained_where_the_settings_make_it_differ():
    four_bit = {"batch_size": 1, "quantization_bits": 4, "gradient_checkpointing": False}
    for changes, words in (
        ({"batch_size": 4}, ["shorter rows"]),
        ({"batch_size": 4, "phase": "generate"}, []),
        (four_bit, ["bitsandbytes"]),
        ({**four_bit, "gradient_checkpointing": True}, []),
        ({**four_bit, "quantization_bits": 8}, []),
        ({**four_bit, "batch_size": 2}, ["shorter rows", "bitsandbytes"]),
    ):
        told = [line for line in facts(hand_made_prediction(**changes)) if "figures measured" in line]
        assert len(told) == len(words)
        assert all(word in line for word, line in zip(words, told, strict=True))


def test_the_parts_sum_to_what_the_device_must_have_and_look_different(prediction):
    assert sum(total_by_part(prediction).values()) == prediction.total_bytes
    assert total_by_part(prediction).keys() == LOOKS.keys()
    assert len({look.colour for look in LOOKS.values()}) == len({look.letter for look in LOOKS.values()}) == len(LOOKS)
    table = memory_table(prediction, title="Mistral-7B")
    told = shown(table, force_terminal=True, color_system="truecolor")
    assert told.count("■") == 19 + 5  # and one of each part in the legend
    assert told.count("□") == 5 + 1
    assert "\x1b[38;2;0;114;178m■" in told  # weights are blue


def test_headlines_and_places_in_words():
    one = hand_made_prediction(batch_size=1, phase="generate", world_size=2)
    assert one.shape_in_words() == "generate, 1 row × 4,096 tokens, on 2 × a10g"
    assert hand_made_prediction(is_packed=True).batch_in_words() == "train, 4 rows × 4,096 tokens, packed"
    assert hand_made_prediction(phase="load").shape_in_words() == "load, no rows, on a10g"
    place = Place(phase="backward", layer=3, module="base_model.model.model.layers.3.mlp", operator="aten::mm")
    for peak, words in ((place, "backward, mm in model.layers.3.mlp"), (Place(phase="load"), "load")):
        assert next(facts(hand_made_prediction(peak=peak))) == f"peak: {words}"


def test_a_napkin_has_its_lines_moments_and_distance(prediction, golden):
    def line(name, category, formula, gibs, *moments):
        return Line(name=name, category=category, formula=formula, num_bytes=gibs * GIB, moments=moments)

    lines = (
        line("weights", "weights", "7 parameters × 2 B", 14, "loss", "update"),
        line("gradients", "gradients", "7 × 4 B", 1, "update"),
        line("logits", "logits_and_loss", "8 × 4 B", 3, "loss"),
    )
    moments = {"loss": 17 * GIB, "update": 15 * GIB}
    napkin = Napkin(lines=lines, notes=("newcomer is not known",), moments=moments)
    golden("report/napkin.txt", shown(napkin_table(napkin, prediction)))
    assert distance(napkin, prediction).endswith("-5.6%")  # of the largest moment


@given(st.lists(st.integers(0, 5 * GIB), min_size=3, max_size=3))
def test_there_are_as_many_as_the_whole_rounds_to_and_each_part_is_near_its_own(sizes):
    parts = dict(zip(("weights", "gradients", "activations"), sizes, strict=True))
    found = squares(parts)
    assert abs(len(found) - sum(sizes) / GIB) <= 0.5
    for part, size in parts.items():
        assert abs(found.count(part) - size / GIB) <= 1
    assert found == sorted(found, key=list(parts).index)
    uneven = {"weights": int(2.4 * GIB), "gradients": int(0.2 * GIB), "activations": int(1.6 * GIB)}
    assert squares(uneven) == ["weights", "weights", "gradients", "activations"], "what stands at a square's middle"


def test_squares_stand_for_more_where_they_would_be_too_many():
    sizes = {0: 1, 2048 * GIB: 1, 2048 * GIB + 1: 2, 2**50: 512, 2**80: 2**39}
    assert {most: square_bytes_for(most) // GIB for most in sizes} == sizes
    lines = shown(Card(parts={"weights": 2**49}, budget_bytes=2**50)).splitlines()
    assert sum(line.count("W") for line in lines[:-1]) == 1024
    assert sum(line.count("·") for line in lines[:-1]) == 1024
    assert lines[-1].startswith("each is 512 GiB: ")


def test_a_card_says_what_is_needed_what_is_there_and_the_largest_parts(golden):
    cases = {
        "fits": {"other": hand_made_prediction(gradient_checkpointing=True), "gradient_checkpointing": False},
        "does not fit": {"fits": False, "budget_bytes": 16 * GIB, "gradient_checkpointing": True},
        "barely fits": {"fits": True, "budget_bytes": 18 * GIB, "reason": "only because cached blocks are given back"},
        "no device": {"fits": None, "budget_bytes": None},
        "generates": {"phase": "generate"},
    }
    cards = {}
    for name, changes in cases.items():
        card = PlanCard(hint="--verbose")
        for line in memory_lines(hand_made_prediction(**changes)):
            card.take(line)
        cards[name] = [wrapped(*line, width=80) for line in card.end()]
    golden("report/memory_cards.txt", "\n\n".join("\n".join([f"# {name}", *card]) for name, card in cards.items()))
