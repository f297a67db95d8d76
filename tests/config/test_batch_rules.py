"""A batch that moves: keys that contradict each other, what they resolve to, and how they are written."""

from __future__ import annotations

import pytest

from brim.config import DeviceFacts, accumulates, dump, json_schema, load_config, resolve
from brim.config.batch_rules import BatchSizes, batch_sizes
from brim.config.schema.trainer import RampupConfig

CPU = DeviceFacts(kind="cpu", bf16=False)
RAMP = "trainer.batch_rampup"
SCHEDULE = "trainer.learning_rate_scheduler"
DURATION = (
    "a number and a unit, ba (batches), ep (epochs), sp (samples), tok (tokens) or dur (share of the run), such as "
    "500ba, 2ep, 5000sp, 1e6tok or 0.1dur"
)
ADAPTATION = {"min": 8, "max": 64}
WITHOUT_BATCH = (
    "trainer.effective_batch_size, which is not set\n"
    "  expected: trainer.effective_batch_size as a number: the rows of one update\n"
    "  fix: add trainer.effective_batch_size: 32, or as many rows as an update shall see"
)


def grow(epoch, current_batch_size):
    return current_batch_size


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"effective_batch_size": 32, "batch_rampup": "0.1dur", "batch_schedule": "0sp:8 9sp:32"},
            f"{RAMP}: {RAMP} and trainer.batch_schedule both move the batch\n"
            "  expected: at most one of batch_rampup, batch_schedule, batch_increase_function, batch_adaptation\n"
            "  fix: keep one of them",
        ),
        (
            {"effective_batch_size": 32, "batch_rampup": "50"},
            f"{RAMP}.length: {RAMP}.length: '50' is no duration: {DURATION}",
        ),
        (
            {"effective_batch_size": 32, "batch_rampup": {"length": "1.5sp"}},
            f"{RAMP}.length: {RAMP}.length: '1.5sp' is not a whole number of samples",
        ),
        (
            {"effective_batch_size": 32, "batch_rampup": "2dur"},
            f"{RAMP}.length: {RAMP}.length: '2dur' is longer than the run: a share from 0dur to 1dur",
        ),
        ({"batch_rampup": "0.1dur"}, f"{RAMP}: {RAMP} leads to {WITHOUT_BATCH}"),
        (
            {
                "effective_batch_size": 32,
                "initial_effective_batch_size": 4,
                "batch_rampup": {"length": "1ep", "from": 8},
            },
            f"{RAMP}.from: {RAMP}.from 8 and trainer.initial_effective_batch_size 4 are both given\n"
            "  fix: keep one of them",
        ),
        (
            {"effective_batch_size": 32, "initial_effective_batch_size": 4},
            "trainer.initial_effective_batch_size: trainer.initial_effective_batch_size is where a ramp begins, and "
            "there is none\n  fix: add trainer.batch_rampup: 0.1dur, or remove it",
        ),
        (
            {"effective_batch_size": 32, "batch_rampup": {"length": "1ep", "increment": 2}},
            f"{RAMP}.increment: {RAMP}.increment has no effect with shape: doubling\n"
            f"  fix: set {RAMP}.shape: linear, or remove increment",
        ),
        (
            {"batch_schedule": "0sp:8 5tok:16 2ep:32"},
            "trainer.batch_schedule: trainer.batch_schedule: steps in ep and tok: a table has one unit",
        ),
        (
            {"batch_schedule": "0sp:8 9sp:32", "effective_batch_size": 16},
            "trainer.effective_batch_size: trainer.effective_batch_size is 16, and trainer.batch_schedule ends with 32\n"
            "  expected: the last size of the schedule\n"
            "  fix: remove trainer.effective_batch_size, or set it to 32",
        ),
        (
            {"effective_batch_size": 32, "batch_increase_function": "increase"},
            "trainer.batch_increase_function: trainer.batch_increase_function is 'increase'\n"
            "  expected: module:function, such as mymodule:increase for the function increase of mymodule.py",
        ),
        (
            {"batch_increase_function": "mymodule:increase"},
            f"trainer.batch_increase_function: trainer.batch_increase_function adds to {WITHOUT_BATCH}",
        ),
        (
            {"batch_adaptation": {"min": 64, "max": 8}},
            "trainer.batch_adaptation.min: trainer.batch_adaptation.min 64 is above max 8\n  fix: swap them",
        ),
        (
            {"batch_adaptation": ADAPTATION, "effective_batch_size": 4},
            "trainer.effective_batch_size: trainer.effective_batch_size 4, with which training begins, is not within "
            "trainer.batch_adaptation's bounds\n  expected: rows from 8 to 64\n"
            "  fix: remove trainer.effective_batch_size to begin with 8",
        ),
        (
            {"batch_adaptation": {"min": 1, "max": 8}},
            "trainer.batch_adaptation.min: trainer.batch_adaptation.min is 1, and a batch of one row shows no noise to "
            "follow\n  expected: at least 2 rows",
        ),
        (
            {"batch_adaptation": ADAPTATION, "train_steps": 100},
            "trainer.train_steps: trainer.train_steps does not say how many rows the run has, since "
            "trainer.batch_adaptation decides the batch in its course\n"
            "  fix: set trainer.train_samples or trainer.epochs instead",
        ),
        (
            {"effective_batch_size": 32, "batch_rampup": "0.1dur", "gradient_accumulation_steps": 4},
            "trainer.gradient_accumulation_steps: trainer.gradient_accumulation_steps 4 fixes the batch, and "
            f"{RAMP} moves it\n  fix: remove trainer.gradient_accumulation_steps",
        ),
        (
            {"batch_schedule": "0sp:128 9sp:32", "max_batch_size": 64},
            "trainer.max_batch_size: trainer.batch_schedule has a batch of 128 rows, above trainer.max_batch_size 64\n"
            "  fix: set trainer.max_batch_size: 128, or a smaller batch",
        ),
        (
            {"batch_adaptation": ADAPTATION, "max_batch_size": 32},
            "trainer.max_batch_size: trainer.batch_adaptation.max has a batch of 64 rows, above trainer.max_batch_size "
            "32\n  fix: set trainer.max_batch_size: 64, or a smaller batch",
        ),
        (
            {"effective_batch_size": 8, "batch_rampup": {"length": "1ep", "from": 64}, "max_batch_size": 32},
            f"trainer.max_batch_size: {RAMP}.from has a batch of 64 rows, above trainer.max_batch_size 32\n"
            "  fix: set trainer.max_batch_size: 64, or a smaller batch",
        ),
        (
            {"train_samples": 100, "train_steps": 10},
            "trainer.train_samples: trainer.train_samples and train_steps are both given\n  fix: keep one of them",
        ),
        (
            {"batch_beta2_scaling": True, "optimizer": "sgd"},
            "trainer.batch_beta2_scaling: trainer.batch_beta2_scaling needs an Adam's second beta, and sgd has none\n"
            "  fix: set trainer.optimizer.type: adamw, or trainer.batch_beta2_scaling: auto",
        ),
        (
            {"effective_batch_size": 10**9, "batch_rampup": {"length": "1ep", "shape": "linear"}},
            f"{RAMP}: {RAMP} has 750,000,000 stages, with an increment of 1\n  expected: at most 10,000 stages\n"
            f"  fix: set {RAMP}.increment: 75000, or more, or another shape",
        ),
        (
            {
                "effective_batch_size": 1,
                "batch_rampup": {"length": "1ep", "from": 30_002, "shape": "linear", "increment": 3},
            },
            f"{RAMP}.increment: {RAMP} has 10,001 stages, with an increment of 3\n  expected: at most 10,000 stages\n"
            f"  fix: set {RAMP}.increment: 4, or more, or another shape",
        ),
        (
            {"noise_scale_every": 5, "batch_size": 1},
            "trainer.noise_scale_every: trainer.noise_scale_every measures how the gradients of an update's rows "
            "differ, and an update has one row\n  expected: at least 2 rows\n"
            "  fix: set trainer.effective_batch_size: 32, or remove trainer.noise_scale_every",
        ),
    ],
)
def test_contradictions(finetune, problems, keys, message):
    assert problems(finetune(**keys)) == [message]


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


@pytest.mark.parametrize(
    "keys",
    [
        {"effective_batch_size": 20, "batch_rampup": {"length": "1ep", "from": 6}, "batch_size": 7},
        {"effective_batch_size": 8, "batch_rampup": {"length": "1ep", "from": 64, "shape": "linear", "increment": 3}},
        {"effective_batch_size": 8, "batch_rampup": {"length": "0dur"}},
        {"effective_batch_size": 10_001, "batch_rampup": {"length": "1ep", "from": 1, "shape": "linear"}},
        {"batch_schedule": "0sp:128 9sp:32", "batch_size": "auto"},
        {"batch_schedule": "0sp:128 9sp:32", "effective_batch_size": 32},
        {"batch_adaptation": ADAPTATION, "effective_batch_size": 8, "max_batch_size": 64},
        {"batch_adaptation": ADAPTATION, "effective_batch_size": 64, "train_samples": 1000},
        {"effective_batch_size": 8, "batch_increase_function": "a.b:C.d", "noise_scale_every": 1},
        {"noise_scale_every": 1},
        {"batch_size": 2, "noise_scale_every": 1},
        {"gradient_accumulation_steps": 2, "noise_scale_every": 1},
        {"batch_beta2_scaling": True, "optimizer": "paged_adamw_8bit"},
        {"batch_beta2_scaling": False, "optimizer": "lion"},
    ],
)
def test_what_is_allowed(finetune, file, keys):
    config = load_config(finetune(**keys)).config
    assert load_config(file(dump(config))).config == config


def test_a_text_that_dump_writes_loads_to_the_same(finetune, file):
    keys = {"effective_batch_size": 8, "batch_rampup": {"length": "1ep", "from": 64}}
    schedule = {"decay": "wsd", "warmup_length": "5ba", "decay_length": "0.2dur"}
    config = load_config(finetune(**keys, learning_rate_scheduler=schedule)).config
    written = dump(resolve(config, CPU).config)
    assert "    from: 64\n" in written
    assert load_config(file(written)).config == resolve(config, CPU).config


def test_from_is_called_from_everywhere(finetune, problems):
    short = finetune(effective_batch_size=32, batch_rampup="0.1dur")
    config = load_config(short, ["trainer.batch_rampup.from=8"]).config
    ramp = config.trainer.batch_rampup
    assert (ramp.length, ramp.initial, ramp.shape) == ("0.1dur", 8, "doubling")
    assert config.model_dump(mode="json")["trainer"]["batch_rampup"] == {
        "length": "0.1dur",
        "from": 8,
        "shape": "doubling",
        "increment": None,
    }
    assert list(json_schema()["$defs"]["RampupConfig"]["properties"]) == ["length", "from", "shape", "increment"]
    (misspelt,) = problems(finetune(effective_batch_size=32, batch_rampup={"length": "1ep", "form": 8}))
    assert misspelt == f"{RAMP}.form: unknown key {RAMP}.form\n  fix: did you mean {RAMP}.from?"
    assert RampupConfig(length="1ep").initial is None


@pytest.mark.parametrize("value", [0.1, 10, True, ["0.1dur"]])
def test_a_ramp_is_a_duration_or_a_mapping(finetune, problems, value):
    (told,) = problems(finetune(effective_batch_size=32, batch_rampup=value))
    assert told.splitlines()[1] == (
        "  expected: a duration: a number with ba, ep, sp, tok or dur, such as 0.1dur or 5000sp, a mapping with "
        "length, or null"
    )


def test_a_bare_number_lacks_its_unit(finetune, problems):
    schedule = {"warmup_length": 500}
    share, batches = problems(finetune(effective_batch_size=32, batch_rampup=0.1, learning_rate_scheduler=schedule))
    assert share.endswith("\n  fix: add the unit: 0.1dur for a share of the run")
    assert batches.endswith("\n  fix: add the unit: 500ba")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, -0.5])
def test_no_unit_makes_a_duration_of_it(finetune, problems, value):
    (told,) = problems(finetune(effective_batch_size=32, batch_rampup=value))
    assert "add the unit" not in told


def test_a_function_of_python_stays_what_it_is(finetune, file):
    loaded = load_config(finetune(effective_batch_size=8, batch_increase_function=grow))
    assert loaded.config.trainer.batch_increase_function is grow
    assert loaded.config.model_dump()["trainer"]["batch_increase_function"] is grow
    again = load_config(file(dump(loaded.config))).config
    assert again.trainer.batch_increase_function == f"{__name__}:grow"
    nameless = load_config(finetune(effective_batch_size=8, batch_increase_function=lambda epoch, size: 1)).config
    name = f"{__name__}:test_a_function_of_python_stays_what_it_is.<locals>.<lambda>"
    assert load_config(file(dump(nameless))).config.trainer.batch_increase_function == name


@pytest.mark.parametrize("value", [3, [grow], {"a": 1}, True, ""])
def test_what_is_no_function(finetune, problems, value):
    (told,) = problems(finetune(effective_batch_size=8, batch_increase_function=value))
    assert told.splitlines()[1] == "  expected: module:function such as mymodule:increase, or null"


@pytest.mark.parametrize(
    ("keys", "rows", "reason"),
    [
        ({"batch_schedule": "0sp:128 9sp:32"}, 32, "the last size of trainer.batch_schedule"),
        ({"batch_adaptation": ADAPTATION}, 8, "trainer.batch_adaptation.min, with which training begins"),
    ],
)
def test_the_effective_batch_that_moving_ones_imply(finetune, keys, rows, reason):
    resolution = resolve(load_config(finetune(**keys)).config, CPU)
    trainer = resolution.config.trainer
    assert (trainer.effective_batch_size, trainer.batch_size) == (rows, "auto")
    assert trainer.gradient_accumulation_steps == "auto"
    assert f"trainer.effective_batch_size: {rows} ({reason})" in map(str, resolution.choices)
    assert resolve(resolution.config, CPU).choices == ()


def test_a_moving_batch_has_no_number_of_micro_batches(finetune):
    keys = {"effective_batch_size": 20, "batch_rampup": "0.1dur", "batch_size": 7}
    trainer = resolve(load_config(finetune(**keys)).config, CPU).config.trainer
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (7, "auto")
    sizes = BatchSizes(effective_rows=20, micro_batch_rows=7, accumulation_steps=None)
    assert batch_sizes(trainer, num_processes=1) == sizes
    one = load_config(finetune(effective_batch_size=1, batch_rampup={"length": "1ep", "from": 8})).config.trainer
    assert batch_sizes(one, num_processes=1).micro_batch_rows is None


@pytest.mark.parametrize(
    ("keys", "several"),
    [
        ({"effective_batch_size": 1, "batch_rampup": {"length": "1ep", "from": 8}}, True),
        ({"effective_batch_size": 1, "batch_increase_function": "a:b"}, True),
        ({"batch_schedule": "0sp:1 9sp:8 10sp:1"}, True),
        ({"batch_schedule": "0sp:1 9sp:8", "batch_size": 8}, False),
        ({"batch_adaptation": ADAPTATION, "batch_size": 8}, True),
    ],
)
def test_whether_gradients_accumulate(finetune, keys, several):
    assert accumulates(load_config(finetune(**keys)).config.trainer) is several


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        ({"batch_rampup": "1ep", "batch_lr_scaling": "sqrt"}, True, "batch_lr_scaling is sqrt, and the batch moves"),
        (
            {"batch_rampup": "1ep", "batch_lr_scaling": "sqrt", "optimizer": "sgd"},
            False,
            "sgd has no second beta as Adam's",
        ),
        ({"batch_rampup": "1ep", "batch_lr_scaling": "linear"}, False, None),
        ({"batch_rampup": "1ep"}, False, None),
        ({"batch_lr_scaling": "sqrt"}, False, None),
        ({"batch_beta2_scaling": True}, True, None),
        ({"batch_rampup": "1ep", "batch_lr_scaling": "sqrt", "batch_beta2_scaling": False}, False, None),
    ],
)
def test_the_scaling_of_beta2(finetune, keys, value, reason):
    resolution = resolve(load_config(finetune(effective_batch_size=8, **keys)).config, CPU)
    assert resolution.config.trainer.batch_beta2_scaling is value
    told = [choice.reason for choice in resolution.choices if choice.key == "trainer.batch_beta2_scaling"]
    assert told == ([] if reason is None else [reason])


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        (
            {"batch_rampup": {"length": "1ep", "from": 8}},
            "trainer.batch_rampup: trainer.batch_rampup has no effect, it begins with trainer.effective_batch_size",
        ),
        (
            {"batch_lr_scaling": "sqrt"},
            "trainer.batch_lr_scaling: trainer.batch_lr_scaling has no effect, the effective batch stays what it is",
        ),
        (
            {"batch_beta2_scaling": True},
            "trainer.batch_beta2_scaling: trainer.batch_beta2_scaling has no effect, the effective batch stays what "
            "it is",
        ),
        (
            {"train_samples": 100, "epochs": 5},
            "trainer.epochs: trainer.epochs has no effect, trainer.train_samples decides",
        ),
    ],
)
def test_notes_on_what_has_no_effect(finetune, keys, note):
    assert load_config(finetune(**{"effective_batch_size": 8, "epochs": 4, **keys})).notes == (note,)


def test_a_base_model_alone_has_no_batch_to_move(minimal, problems):
    assert problems(minimal(trainer={"type": "none", "batch_rampup": "1ep"})) == [
        "trainer.batch_rampup: trainer.batch_rampup has no place with trainer.type: none\n"
        "  fix: remove it, or set trainer.type: finetune"
    ]


def test_ludwigs_key_names_what_there_is_instead(finetune, problems):
    assert problems(finetune(increase_batch_size_on_plateau=2)) == [
        "trainer.increase_batch_size_on_plateau: trainer.increase_batch_size_on_plateau is not supported yet (a batch "
        "size that grows when learning stalls)\n  fix: use batch_adaptation or batch_schedule"
    ]
