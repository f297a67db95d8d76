"""Every automatic choice is a value and a reason."""

from tests.config.conftest import CPU, choices_of
from tests.messages import refused

from brim.config import DeviceFacts, bounded_by_rows, load_config, resolve
from brim.config.text import dump

A100 = DeviceFacts(kind="cuda", bf16=True)
T4 = DeviceFacts(kind="cuda", bf16=False)

WORKSHOP = {"batch_size": 1, "effective_batch_size": 32}
ONE_ROW = {
    "batch_size": (1, "an update is of one row"),
    "gradient_accumulation_steps": (1, "effective batch 1 / batch 1"),
}
SIZES = [  # keys of the trainer, and what is chosen of its sizes
    (WORKSHOP, {"gradient_accumulation_steps": (32, "effective batch 32 / batch 1")}),
    ({"batch_size": 1, "gradient_accumulation_steps": 16}, {"effective_batch_size": (16, "batch 1 × accumulation 16")}),
    ({"gradient_accumulation_steps": 4, "effective_batch_size": 32}, {"batch_size": (8, "effective batch 32 / accumulation 4")}),
    ({"effective_batch_size": 32}, {}),  # by length
    ({"effective_batch_size": 1}, ONE_ROW),
    ({"gradient_accumulation_steps": 16}, {"batch_size": (1, "no effective batch is set"),
                                           "effective_batch_size": (16, "batch 1 × accumulation 16")}),
    ({"batch_size": "auto", "gradient_accumulation_steps": 16, "effective_batch_size": 32},
     {"batch_size": (2, "effective batch 32 / accumulation 16")}),
]  # fmt: skip


def test_the_sizes_of_a_batch(finetune):
    for keys, chosen in SIZES:
        choices = choices_of(finetune(**keys))
        sizes = {key.removeprefix("trainer."): choice for key, choice in choices.items() if key.startswith("trainer.")}
        assert sizes == chosen, keys
    source = finetune(**WORKSHOP, learning_rate=0.0001) | {"adapter": "lora"}
    assert {key: choice for key, choice in choices_of(source).items() if not key.startswith("trainer.")} == {
        "precision": ("fp32", "the device is a CPU"),
        "adapter.alpha": (16, "twice adapter.r"),
        "generation.max_new_tokens": (256, "no length is set"),
    }
    loaded = load_config(finetune(batch_size=2, gradient_accumulation_steps=8, effective_batch_size=32))  # for two GPUs
    with refused("trainer.effective_batch_size: … 32 is not batch_size 2 × gradient_accumulation_steps 8 = 16"):
        resolve(loaded.config, CPU)


_BOTH = "the defaults are 3 epochs of 16 rows an update; Ludwig's are 100 and 1"
_BATCH_ALONE = "the default is 16 rows an update; Ludwig's is 1"


def test_the_defaults_hold_where_nothing_decides_and_are_named_with_ludwigs(finetune, file):
    for keys, choice in [
        ({}, (16, _BOTH)),
        ({"batch_size": "auto"}, (16, _BOTH)),
        ({"epochs": 3}, (16, _BATCH_ALONE)),
        ({"train_steps": 5}, (16, _BATCH_ALONE)),
        ({"train_samples": 5}, (16, _BATCH_ALONE)),
        ({"max_batch_size": 8}, (8, f"trainer.max_batch_size; {_BOTH}")),
        ({"batch_size": 1}, (1, "batch 1 × accumulation 1")),
        ({"use_maximum_batch_size": True}, None),
        ({"effective_batch_size": 32}, None),
    ]:
        resolution = resolve(load_config(finetune(**keys)).config, CPU)
        found = {each.key: (each.value, each.reason) for each in resolution.choices}
        assert found.get("trainer.effective_batch_size") == choice
        trainer = resolution.config.trainer
        assert trainer.effective_batch_size == (choice[0] if choice else keys.get("effective_batch_size", "auto"))
        assert trainer.epochs == 3
        again = resolve(load_config(file(dump(resolution.config))).config, CPU)
        assert (again.config, again.choices) == (resolution.config, ())


def test_default_epochs_are_told_where_only_the_batch_is_set(finetune):
    told = "trainer.epochs: trainer.epochs is not set: 3 epochs, the default (Ludwig's is 100)"
    for keys in ({"batch_size": 1}, {"effective_batch_size": 8}, {"use_maximum_batch_size": True}):
        assert load_config(finetune(**keys)).notes == (told,)
        for length in ({"epochs": 3}, {"train_steps": 3}, {"train_samples": 3}):
            assert load_config(finetune(**keys, **length)).notes == ()
    assert load_config(finetune()).notes == ()  # told with the default batch
    assert load_config(finetune(type="none")).notes == ()


def test_a_default_batch_is_of_no_more_rows_than_there_are(finetune):
    def bounded(num_rows, **keys):
        resolution = resolve(load_config(finetune(**keys)).config, CPU)
        config, choices = bounded_by_rows(resolution.config, resolution.choices, num_rows)
        (choice,) = (each for each in choices if each.key == "trainer.effective_batch_size")
        assert config.trainer.effective_batch_size == choice.value
        return choice.value, choice.reason

    assert bounded(16) == (16, _BOTH)
    assert bounded(10) == (10, f"all rows to train on, since they are fewer; {_BOTH}")
    assert bounded(3, batch_size=4) == (4, "batch 4 × accumulation 1")
    assert bounded(3, batch_schedule="0sp:2 4sp:8") == (8, "the last size of trainer.batch_schedule")
    asked = resolve(load_config(finetune(effective_batch_size=8)).config, CPU)
    assert bounded_by_rows(asked.config, asked.choices, 3) == (asked.config, asked.choices)


def test_the_learning_rate_is_the_usual_one(finetune):
    for keys, rate, reason in [
        ({"adapter": "lora"}, 1e-4, "usual with LoRA"),
        ({}, 1e-5, "usual when all weights of a pretrained model are trained"),
        ({"initialize": "random"}, 1e-3, "usual from scratch"),
    ]:
        assert choices_of(finetune(learning_rate="auto") | keys)["trainer.learning_rate"] == (rate, reason)
        assert "trainer.learning_rate" not in choices_of(finetune(learning_rate=0.5) | keys)


PRECISIONS = [  # the device, keys, and the choice with words of its reason
    (CPU, {"adapter": "lora"}, "fp32", "the device is a CPU"),
    (A100, {"adapter": "lora"}, "bf16-true", "the base is frozen, the adapter stays in fp32"),
    (A100, {}, "bf16-mixed", "weights stay in fp32, since 16 bits would lose small updates"),
    (A100, {"trainer": {"type": "none"}}, "bf16-true", "nothing is trained"),
    (A100, {"adapter": {"type": "lora", "bias_type": "lora_only"}}, "bf16-mixed", "the biases that are trained stay in fp32"),
    (T4, {}, "fp16-mixed", "the GPU has no bfloat16"),
    (DeviceFacts(kind="mps", bf16=False), {}, "fp32", "the device has no bfloat16"),
]  # fmt: skip


def test_the_precision(finetune):
    for device, keys, precision, reason in PRECISIONS:
        chosen, told = choices_of(finetune() | keys, device)["precision"]
        assert (chosen, reason in told) == (precision, True), told
        assert "precision" not in choices_of(finetune() | keys | {"precision": "fp32"}, device)


def test_the_compute_dtype_of_quantised_layers_is_that_of_the_precision(minimal):
    lora, key = {"adapter": "lora", "trainer": {"type": "finetune"}}, "bnb_4bit_compute_dtype"
    for device, precision, dtype, chosen in [
        (CPU, "auto", "float32", "fp32"), (A100, "auto", "bfloat16", "bf16-true"), (T4, "auto", "float16", "fp16-mixed"),
        (A100, "fp32", "float32", "fp32"), (CPU, "bf16-mixed", "bfloat16", "bf16-mixed"),
    ]:  # fmt: skip
        resolution = resolve(load_config(minimal(quantization={"bits": 4}, precision=precision, **lora)).config, device)
        assert resolution.config.quantization.bnb_4bit_compute_dtype == dtype
        assert f"quantization.{key}: {dtype} (precision is {chosen})" in map(str, resolution.choices)
        assert resolve(resolution.config, device).choices == ()
    given = resolve(load_config(minimal(quantization={"bits": 4, key: "float16"})).config, CPU)
    assert given.config.quantization.bnb_4bit_compute_dtype == "float16"


def test_the_length_of_answers(minimal):
    def told(context_length=None, **keys):
        return choices_of(minimal(**keys), context_length=context_length).get("generation.max_new_tokens")

    output = [{"name": "answer", "type": "text", "preprocessing": {"max_sequence_length": 64}}]
    limit = {"preprocessing": {"global_max_sequence_length": 600}}
    whole = "preprocessing.global_max_sequence_length"
    assert told() == (256, "no length is set")
    assert told(**limit) == told(2048, **limit) == (600, whole)
    assert told(**limit, output_features=output) == (64, "the output feature's max_sequence_length")
    assert told(1024, **limit) == (512, f"half of the model's context; {whole} would leave too little for prompts")
    assert told(generation={"max_new_tokens": 32}) is None


WAITING = {  # for the model, for the plan, for the rows
    "trainer": ["chunked_loss", "batch_size", "eval_batch_size", "gradient_accumulation_steps", "enable_gradient_checkpointing", "packing"],
    "model_parameters": ["attn_implementation", "kernels"], "generation": ["engine", "merge_adapter"], "memory": ["budget", "margin"],
    "preprocessing": ["on_bad_row", "on_overlong", "drop_unlearnable"], "backend": ["strategy"],
}  # fmt: skip


def test_what_the_user_set_stays_and_resolving_again_changes_nothing(finetune):
    source = finetune(learning_rate="auto", effective_batch_size=8) | {"adapter": {"type": "lora", "alpha": 5}}
    config = load_config(source).config
    resolution = resolve(config, CPU)
    assert resolution.config.adapter.alpha == 5
    assert (config.precision, resolution.config.precision) == ("auto", "fp32")  # the one given is not changed
    resolved = resolution.config.model_dump()
    resolved["backend"] = resolved["backend"]["trainer"]
    assert {resolved[section].pop(key) for section, keys in WAITING.items() for key in keys} == {"auto"}
    assert "auto" not in str(resolved)
    assert resolve(resolution.config, CPU).choices == ()
    assert str(resolution.choices[0]) == "precision: fp32 (the device is a CPU)"
