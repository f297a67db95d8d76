"""Batch arithmetic, by example and by an oracle; a batch that moves; and how steps of a batch are written."""

from fractions import Fraction

from hypothesis import given, strategies as st
from tests.config.conftest import CPU, choices_of
from tests.messages import refused, says

from brim.config import (
    accumulates,
    default_rows,
    is_sized_by_memory,
    json_schema,
    load_config,
    parse_batch_steps,
    resolve,
)
from brim.config.batch_rules import ACCUMULATION, BATCH, BatchSizes, batch_sizes, fixes_the_cut
from brim.config.findings import Finding
from brim.config.schema import FinetuneTrainer
from brim.config.text import dump
from brim.units import Duration

RAMP = "trainer.batch_rampup"
SCHEDULE = "trainer.learning_rate_scheduler"
ADAPTATION = {"min": 8, "max": 64}
EFFECTIVE = "trainer.effective_batch_size"


def _trainer(**keys):
    return FinetuneTrainer.model_validate({"type": "finetune", **keys})


AUTO = "auto"


def test_what_does_not_multiply_up_says_what_would():
    for keys, what, fix in [
        ({"batch_size": 8, "effective_batch_size": 3}, "3 is not a multiple of batch_size 8", "8"),
        (
            {"batch_size": 2, "gradient_accumulation_steps": 8, "effective_batch_size": 32},
            "32 is not batch_size 2 × gradient_accumulation_steps 8 = 16", "16, or leave one of the other two out",
        ),
        ({"batch_size": 16, "max_batch_size": 8}, "of 16 rows is above trainer.max_batch_size 8", "trainer.max_batch_size: 16"),
    ]:  # fmt: skip
        found = batch_sizes(_trainer(**keys))
        assert isinstance(found, Finding)
        assert what in found.what
        assert fix in found.fix
    for keys in ({"batch_size": 8}, {"effective_batch_size": 8}, {"effective_batch_size": 8, "batch_size": 4}):
        assert isinstance(batch_sizes(_trainer(**keys, max_batch_size=8)), BatchSizes)  # as many as it may


_SIZE = st.integers(1, 12)


@given(st.none() | _SIZE, st.just("auto") | _SIZE, st.just("auto") | st.integers(1, 60))
def test_the_product_is_exact_and_what_was_given_is_kept(batch, accumulation, effective):
    keys = {"gradient_accumulation_steps": accumulation, "effective_batch_size": effective}
    keys |= {} if batch is None else {"batch_size": batch}
    found = batch_sizes(_trainer(**keys))
    micro, steps = ([given] if isinstance(given, int) else range(1, 61) for given in (batch, accumulation))
    possible = any(effective in ("auto", rows * times) for rows in micro for times in steps)
    assert isinstance(found, BatchSizes) == possible
    if isinstance(found, BatchSizes) and found.micro_batch_rows is None:
        assert (batch, accumulation) == (None, "auto")
        assert found.effective_rows > 1
        assert found.effective_rows == (16 if effective == "auto" else effective)
    elif isinstance(found, BatchSizes):
        assert found.micro_batch_rows * found.accumulation_steps == found.effective_rows
        assert batch in (None, found.micro_batch_rows)
        assert accumulation in ("auto", found.accumulation_steps)
        assert effective in ("auto", found.effective_rows)


def test_what_the_given_sizes_tell(finetune):
    for batch, accumulation, effective, several, fixed in [
        (None, AUTO, AUTO, True, None), (None, AUTO, 1, False, None), (8, AUTO, 8, False, BATCH), (4, AUTO, 8, True, BATCH),
        (4, AUTO, AUTO, False, BATCH), (None, 1, AUTO, False, ACCUMULATION), (None, 2, 8, True, ACCUMULATION),
        (8, 2, AUTO, True, BATCH),
    ]:  # fmt: skip
        keys = {"gradient_accumulation_steps": accumulation, "effective_batch_size": effective}
        trainer = _trainer(**keys, **({} if batch is None else {"batch_size": batch}))
        assert (accumulates(trainer), fixes_the_cut(trainer)) == (several, fixed), keys
    ramp = {"length": "1ep", "from": 8}
    for keys, several in [
        ({"max_batch_size": 1}, False),
        ({"effective_batch_size": 1, "batch_rampup": ramp}, True),
        ({"effective_batch_size": 1, "batch_increase_function": "a:b"}, True),
        ({"batch_schedule": "0sp:1 9sp:8 10sp:1"}, True),
        ({"batch_schedule": "0sp:1 9sp:8", "batch_size": 8}, False),
        ({"batch_adaptation": ADAPTATION, "batch_size": 8}, True),
    ]:
        assert accumulates(load_config(finetune(**keys)).config.trainer) is several


def test_the_default_holds_where_no_key_says_how_many_rows_make_an_update():
    memory = {"use_maximum_batch_size": True}
    for keys, rows in [
        ({}, 16), ({"batch_size": AUTO}, 16), ({"max_batch_size": 8}, 8), ({"max_batch_size": 2**40}, 16),
        ({"batch_size": 1}, None), ({"gradient_accumulation_steps": 4}, None), ({"effective_batch_size": 32}, None),
        ({"batch_schedule": "0sp:4 8sp:8"}, None), (memory, None),
    ]:  # fmt: skip
        assert default_rows(_trainer(**keys)) == rows
        assert is_sized_by_memory(_trainer(**keys)) == (keys == memory)
        assert is_sized_by_memory(_trainer(**keys | memory)) == (rows is not None or keys == memory)
    found = batch_sizes(_trainer(**memory, batch_rampup="0.1dur"))
    assert found == BatchSizes(effective_rows=None, micro_batch_rows=None, accumulation_steps=None)


def grow(epoch, current_batch_size):
    return current_batch_size


CONTRADICTIONS = [  # keys of the trainer
    {"effective_batch_size": 32, "batch_rampup": "0.1dur", "batch_schedule": "0sp:8 9sp:32"},
    {"effective_batch_size": 32, "batch_rampup": "50"},
    {"effective_batch_size": 32, "batch_rampup": {"length": "1.5sp"}},
    {"effective_batch_size": 32, "batch_rampup": "2dur"},
    {"batch_rampup": "0.1dur"},
    {"effective_batch_size": 32, "initial_effective_batch_size": 4, "batch_rampup": {"length": "1ep", "from": 8}},
    {"effective_batch_size": 32, "initial_effective_batch_size": 4},
    {"effective_batch_size": 32, "batch_rampup": {"length": "1ep", "increment": 2}},
    {"batch_schedule": "0sp:8 5tok:16 2ep:32"},
    {"batch_schedule": "0sp:8 9sp:32", "effective_batch_size": 16},
    {"effective_batch_size": 32, "batch_increase_function": "increase"},
    {"batch_increase_function": "mymodule:increase"},
    {"batch_adaptation": {"min": 64, "max": 8}},
    {"batch_adaptation": ADAPTATION, "effective_batch_size": 4},
    {"batch_adaptation": {"min": 1, "max": 8}},
    {"batch_adaptation": ADAPTATION, "train_steps": 100},
    {"effective_batch_size": 32, "batch_rampup": "0.1dur", "gradient_accumulation_steps": 4},
    {"batch_schedule": "0sp:128 9sp:32", "max_batch_size": 64},
    {"batch_adaptation": ADAPTATION, "max_batch_size": 32},
    {"effective_batch_size": 8, "batch_rampup": {"length": "1ep", "from": 64}, "max_batch_size": 32},
    {"train_samples": 100, "train_steps": 10},
    {"batch_beta2_scaling": True, "optimizer": "sgd"},
    {"effective_batch_size": 10**9, "batch_rampup": {"length": "1ep", "shape": "linear"}},
    {"effective_batch_size": 1, "batch_rampup": {"length": "1ep", "from": 30_002, "shape": "linear", "increment": 3}},
    {"noise_scale_every": 5, "batch_size": 1},
    *({"effective_batch_size": 8, "batch_increase_function": value} for value in (3, [len], {"a": 1}, True, "")),
    {"increase_batch_size_on_plateau": 2},
]


def test_contradictions_of_a_batch_that_moves(finetune, refusals):
    refusals("contradictions_of_a_batch_that_moves.txt", lambda keys: load_config(finetune(**keys)), CONTRADICTIONS)


def test_all_are_told_at_once(finetune, problems):
    schedule = {"warmup_length": "z"}
    keys = {"batch_rampup": "x", "batch_schedule": "y", "train_steps": 1, "train_samples": 1}
    found = problems(finetune(**keys, learning_rate_scheduler=schedule))
    assert [message.split(": ")[0] for message in found] == [
        "trainer.batch_rampup",  # two ways
        "trainer.batch_rampup.length",
        "trainer.batch_rampup",  # without an effective batch
        "trainer.batch_schedule",
        "trainer.train_samples",
        f"{SCHEDULE}.warmup_length",
    ]


FROM_64 = {"length": "1ep", "from": 64}
ALLOWED = [
    {"effective_batch_size": 20, "batch_rampup": {"length": "1ep", "from": 6}, "batch_size": 7},
    {"effective_batch_size": 8, "batch_rampup": {**FROM_64, "shape": "linear", "increment": 3}},
    {"effective_batch_size": 8, "batch_rampup": {"length": "0dur"}},
    {"effective_batch_size": 10_001, "batch_rampup": {"length": "1ep", "from": 1, "shape": "linear"}},
    {"batch_schedule": "0sp:128 9sp:32", "batch_size": "auto"}, {"batch_schedule": "0sp:8 9sp:32", "effective_batch_size": 32},
    {"batch_adaptation": ADAPTATION, "effective_batch_size": 8, "max_batch_size": 64},
    {"batch_adaptation": ADAPTATION, "effective_batch_size": 64, "train_samples": 1000},
    {"effective_batch_size": 8, "batch_increase_function": "a.b:C.d", "noise_scale_every": 1}, {"noise_scale_every": 1},
    {"batch_size": 2, "noise_scale_every": 1}, {"gradient_accumulation_steps": 2, "noise_scale_every": 1},
    {"batch_beta2_scaling": True, "optimizer": "paged_adamw_8bit"}, {"batch_beta2_scaling": False, "optimizer": "lion"},
]  # fmt: skip


def test_what_is_allowed_loads_from_what_dump_writes(finetune, file):
    for keys in ALLOWED:
        config = load_config(finetune(**keys)).config
        assert load_config(file(dump(config))).config == config
    schedule = {"decay": "wsd", "warmup_length": "5ba", "decay_length": "0.2dur"}
    keys = {"effective_batch_size": 8, "batch_rampup": FROM_64, "learning_rate_scheduler": schedule}
    config = resolve(load_config(finetune(**keys)).config, CPU).config
    assert "    from: 64\n" in dump(config)
    assert load_config(file(dump(config))).config == config


def test_from_is_called_from_everywhere(finetune):
    short = finetune(effective_batch_size=32, batch_rampup="0.1dur")
    config = load_config(short, ["trainer.batch_rampup.from=8"]).config
    ramp = config.trainer.batch_rampup
    assert (ramp.length, ramp.initial, ramp.shape) == ("0.1dur", 8, "doubling")
    assert config.model_dump(mode="json")["trainer"]["batch_rampup"]["from"] == 8
    assert list(json_schema()["$defs"]["RampupConfig"]["properties"]) == ["length", "from", "shape", "increment"]
    with refused(f"{RAMP}.form: unknown key {RAMP}.form … did you mean {RAMP}.from?"):
        load_config(finetune(effective_batch_size=32, batch_rampup={"length": "1ep", "form": 8}))


def test_a_ramp_is_a_duration_with_its_unit_or_a_mapping(finetune, problems):
    def told(value, **keys):
        return problems(finetune(effective_batch_size=32, batch_rampup=value, **keys))

    for value in (0.1, 10, True, ["0.1dur"], float("inf"), float("nan"), -1, -0.5):
        (text,) = told(value)
        assert "expected: a duration: a number with ba, ep, sp, tok or dur" in text
        assert ("add the unit" in text) == (value in (0.1, 10) and value is not True), text
    share, batches = told(0.1, learning_rate_scheduler={"warmup_length": 500})
    assert share.endswith("\n  fix: add the unit: 0.1dur for a share of the run")
    assert batches.endswith("\n  fix: add the unit: 500ba")


def test_a_function_of_python_stays_what_it_is(finetune, file):
    loaded = load_config(finetune(effective_batch_size=8, batch_increase_function=grow))
    assert loaded.config.trainer.batch_increase_function is grow
    assert loaded.config.model_dump()["trainer"]["batch_increase_function"] is grow
    assert load_config(file(dump(loaded.config))).config.trainer.batch_increase_function == f"{__name__}:grow"
    nameless = load_config(finetune(effective_batch_size=8, batch_increase_function=lambda epoch, size: 1)).config
    name = f"{__name__}:test_a_function_of_python_stays_what_it_is.<locals>.<lambda>"
    assert load_config(file(dump(nameless))).config.trainer.batch_increase_function == name


def test_the_effective_batch_that_moving_ones_imply_and_no_number_of_micro_batches(finetune):
    for keys, rows, reason in [
        ({"batch_schedule": "0sp:128 9sp:32"}, 32, "the last size of trainer.batch_schedule"),
        ({"batch_adaptation": ADAPTATION}, 8, "trainer.batch_adaptation.min, with which training begins"),
    ]:
        resolution = resolve(load_config(finetune(**keys)).config, CPU)
        trainer = resolution.config.trainer
        assert trainer.effective_batch_size == rows
        assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (AUTO, AUTO)
        assert f"trainer.effective_batch_size: {rows} ({reason})" in map(str, resolution.choices)
        assert resolve(resolution.config, CPU).choices == ()
    keys = {"effective_batch_size": 20, "batch_rampup": "0.1dur", "batch_size": 7}
    trainer = resolve(load_config(finetune(**keys)).config, CPU).config.trainer
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (7, AUTO)
    assert batch_sizes(trainer) == BatchSizes(effective_rows=20, micro_batch_rows=7, accumulation_steps=None)
    one = load_config(finetune(effective_batch_size=1, batch_rampup={"length": "1ep", "from": 8})).config.trainer
    assert batch_sizes(one).micro_batch_rows is None


def test_the_scaling_of_beta2(finetune):
    sqrt, key = {"batch_rampup": "1ep", "batch_lr_scaling": "sqrt"}, "trainer.batch_beta2_scaling"
    for keys, value, reason in [
        (sqrt, True, "batch_lr_scaling is sqrt, and the batch moves"),
        (sqrt | {"optimizer": "sgd"}, False, "sgd has no second beta as Adam's"),
        (sqrt | {"batch_lr_scaling": "linear"}, False, None), ({"batch_rampup": "1ep"}, False, None),
        ({"batch_lr_scaling": "sqrt"}, False, None), ({"batch_beta2_scaling": True}, True, None),
        (sqrt | {"batch_beta2_scaling": False}, False, None),
    ]:  # fmt: skip
        source = finetune(effective_batch_size=8, **keys)
        assert resolve(load_config(source).config, CPU).config.trainer.batch_beta2_scaling is value
        assert choices_of(source).get(key) == (None if reason is None else (value, reason))


def test_notes_on_what_has_no_effect(finetune):
    for keys, words in [
        ({"batch_rampup": {"length": "1ep", "from": 8}}, f"{RAMP}: … no effect, it begins with {EFFECTIVE}"),
        ({"batch_lr_scaling": "sqrt"}, "trainer.batch_lr_scaling: … no effect, the effective batch stays"),
        ({"batch_beta2_scaling": True}, "trainer.batch_beta2_scaling: … no effect, the effective batch stays"),
        ({"train_samples": 100, "epochs": 5}, "trainer.epochs: … no effect, trainer.train_samples decides"),
    ]:
        (note,) = load_config(finetune(**{"effective_batch_size": 8, "epochs": 4, **keys})).notes
        assert says(note, words), note


def test_what_tables_of_steps_say():
    for text, steps in [
        ("0sp:1024 250000sp:2048 1e6sp:4096", [("0sp", 1024), ("250000sp", 2048), ("1000000sp", 4096)]),
        ("0:8 1.5e6tok:16", [("0tok", 8), ("1500000tok", 16)]), ("0ep:8 0.5dur:4", [("0dur", 8), ("0.5dur", 4)]),
        ("  0sp:8\n 500ba:1\t", [("0ba", 8), ("500ba", 1)]), ("0:8", [("0sp", 8)]), (f"0:{2**40}", [("0sp", 2**40)]),
        ("0ep:8 0.5ep:9 2ep:9", [("0ep", 8), ("0.5ep", 9), ("2ep", 9)]),
    ]:  # fmt: skip
        assert [(str(start), size) for start, size in parse_batch_steps(text)] == steps


NO_TABLES = [
    "", " ", "0sp:8, 5sp 9sp:3", "0sp:8 5sp", "5sp:8", "0sp:8 1ep:9 3tok:10", "0sp:8 9sp:9 9sp:10",
    "0sp:8 9sp:9 8sp:10", "0sp:8 0sp:9", "0sp:8 1dur:9", "0sp:0", "0sp:-1", "0sp:4e3", "0sp:8:9",
    f"0sp:{2**40 + 1}", "0sp:", "0sp:٣", "0sp:8 500:9", "0sp:8 5 sp:9", "0sp:8 -1sp:9", "0sp:8 1.5sp:9",
    "0sp:8 2dur:9",
]  # fmt: skip


def test_what_is_no_table_of_steps(refusals):
    refusals("batch_schedules.txt", parse_batch_steps, NO_TABLES)


@given(
    unit=st.sampled_from(["sp", "tok", "ep", "ba"]),
    starts=st.lists(st.integers(1, 10**12), unique=True, max_size=6),
    data=st.data(),
)
def test_what_is_written_is_read(unit, starts, data):
    starts = [0, *sorted(starts)]
    sizes = [data.draw(st.integers(1, 10**6)) for _ in starts]
    text = " ".join(f"{start}{unit}:{size}" for start, size in zip(starts, sizes, strict=True))
    expected = tuple((Duration(Fraction(start), unit), size) for start, size in zip(starts, sizes, strict=True))
    assert parse_batch_steps(text) == expected


@given(text=st.text(alphabet="0123456789.:esptokdur- \n", max_size=20))
def test_whatever_is_no_table_is_a_value_error(text):
    try:
        steps = parse_batch_steps(text)
    except ValueError:
        return
    assert steps[0][0].amount == 0
    assert all(size >= 1 for _, size in steps)
