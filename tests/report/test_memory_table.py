"""What the table says of a prediction."""

import io

import pytest
from rich.console import Console
from tests.report.hand_made import GIB, hand_made_prediction

from brim.memory.trace import Place
from brim.report import LOOKS, gib, headline, memory_table, total_by_part
from brim.report.memory import facts, place_in_words


def printed(prediction, width=100):
    stream = io.StringIO()
    Console(file=stream, width=width).print(memory_table(prediction, title="Mistral-7B"))
    return stream.getvalue()


def test_the_whole_table(prediction):
    assert [line.rstrip() for line in printed(prediction).splitlines()] == [
        "Mistral-7B: train, 4 rows × 4,096 tokens, on a10g",
        "",
        "                         GiB     %",
        "weights                13.00  69.3  █████████████████████",
        "optimizer state         1.00   5.3  ██",
        "activations             2.00  10.7  ███",
        "logits and loss         2.00  10.7  ███",
        "allocated at the peak  18.00",
        "held, not in use        0.25   1.3  ▏",
        "outside PyTorch         0.50   2.7  █",
        "needed on the device   18.75",
        "free                    5.25",
        "",
        "W W W W W W W W W W W W W O A A L L x · · · · ·",
        "each is 1 GiB: W weights, O optimizer state, A activations, L logits and loss, x outside PyTorch, ·",
        "free",
        "",
        "peak: backward, _log_softmax_backward_data in lm_head",
        "the most is weights, 13.00 GiB: quantization: {bits: 4} makes a quarter of 16 bits",
        "each of the 4 rows has all 4,096 tokens: figures measured on shorter rows are lower",
        "allocated at most: 17.00 GiB in the first step, 18.00 GiB in later ones",
        "allocated at the end: 14.00 GiB",
        "fits: 20,132,659,200 bytes are needed and 25,769,803,776 are there",
        "sequence_length: 4096 (preprocessing.global_max_sequence_length)",
    ]


def test_the_other_way_stands_beside_the_one_that_would_start():
    without = hand_made_prediction(total_bytes=40 * GIB, fits=False, gradient_checkpointing=False)
    told = printed(hand_made_prediction(gradient_checkpointing=True, other=without))
    assert [line.split() for line in told.splitlines() if "checkpointing" in line] == [
        ["without", "checkpointing", "40.00"]
    ]
    turned = hand_made_prediction(gradient_checkpointing=False, other=hand_made_prediction(gradient_checkpointing=True))
    assert ["with", "checkpointing", "18.75"] in [line.split() for line in printed(turned).splitlines()]


def test_the_largest_part_is_told_with_the_key_that_lowers_it():
    parts = {**dict.fromkeys(hand_made_prediction().by_category, 0), "activations": 11 * GIB, "weights": 5 * GIB}
    told = " ".join(printed(hand_made_prediction(by_category=parts)).split())
    assert "the most is activations, 11.00 GiB: they grow with rows × tokens" in told
    assert "trainer.enable_gradient_checkpointing: true" in told


def test_what_is_done_already_is_not_advised():
    told = printed(hand_made_prediction(quantization_bits=4, gradient_checkpointing=True))
    assert "\nthe most is weights, 13.00 GiB\n" in told.replace(" \n", "\n")
    parts = {**dict.fromkeys(hand_made_prediction().by_category, 0), "activations": 11 * GIB}
    told = printed(hand_made_prediction(by_category=parts, gradient_checkpointing=True))
    assert "enable_gradient_checkpointing" not in told


def test_a_loss_in_chunks_is_not_advised_where_it_is_in_chunks():
    parts = {**dict.fromkeys(hand_made_prediction().by_category, 0), "logits_and_loss": 11 * GIB}
    for is_in_chunks in (False, True):
        told = printed(hand_made_prediction(by_category=parts, has_chunked_loss=is_in_chunks))
        assert "the most is logits and loss" in told
        assert ("trainer.chunked_loss: true computes" in told) is not is_in_chunks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 4}, ["shorter rows"]),
        ({"batch_size": 1}, []),
        ({"batch_size": 4, "phase": "generate"}, []),
        ({"batch_size": 1, "quantization_bits": 4, "gradient_checkpointing": False}, ["bitsandbytes"]),
        ({"batch_size": 1, "quantization_bits": 4, "gradient_checkpointing": True}, []),
        ({"batch_size": 1, "quantization_bits": 4, "gradient_checkpointing": None, "phase": "evaluate"}, []),
        ({"batch_size": 1, "quantization_bits": 8, "gradient_checkpointing": False}, []),
        ({"batch_size": 2, "quantization_bits": 4, "gradient_checkpointing": False}, ["shorter rows", "bitsandbytes"]),
    ],
)
def test_what_others_measured_is_explained_where_the_settings_make_it_differ(changes, words):
    told = [line for line in facts(hand_made_prediction(**changes)) if "figures measured" in line]
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_what_does_not_fit_says_how_much_is_missing():
    told = printed(hand_made_prediction(budget_bytes=14 * GIB))
    assert "missing                 4.75" in told
    assert "W W W W W W W W W W W W W O A!A!L!L!x!" in told
    assert "! beyond the device's memory" in " ".join(told.split())
    assert "does not fit: " in told


def test_a_device_that_is_not_known_is_not_judged():
    told = printed(hand_made_prediction(budget_bytes=None, reason="it needs 18.8 GiB"))
    assert "\nit needs 18.8 GiB\n" in told
    assert "free" not in told
    assert "fit" not in told


def test_the_parts_sum_to_what_the_device_must_have(prediction):
    assert sum(total_by_part(prediction).values()) == prediction.total_bytes
    assert total_by_part(prediction).keys() == LOOKS.keys()


def test_colours_and_letters_are_one_for_each_part():
    assert len({look.colour for look in LOOKS.values()}) == len({look.letter for look in LOOKS.values()}) == len(LOOKS)


def test_a_terminal_with_colours_has_squares(prediction):
    stream = io.StringIO()
    Console(file=stream, width=100, force_terminal=True, color_system="truecolor").print(
        memory_table(prediction, title="Mistral-7B")
    )
    told = stream.getvalue()
    assert told.count("■") == 19 + 5  # and one of each part in the legend
    assert told.count("□") == 5 + 1
    assert "\x1b[38;2;0;114;178m■" in told  # weights are blue


def test_headlines(prediction):
    one = hand_made_prediction(batch_size=1, phase="generate", world_size=2)
    assert headline(one, title="m") == "m: generate, 1 row × 4,096 tokens, on 2 × a10g"
    assert headline(hand_made_prediction(phase="load"), title="m") == "m: load, no rows, on a10g"


def test_places():
    place = Place(phase="backward", layer=3, module="base_model.model.model.layers.3.mlp", operator="aten::mm")
    assert place_in_words(place) == "backward, mm in model.layers.3.mlp"
    assert place_in_words(Place(phase="load")) == "load"


def test_gib():
    assert [gib(n) for n in (0, GIB // 20, GIB, 1234 * GIB)] == ["0", "0.050", "1.00", "1,234.00"]
