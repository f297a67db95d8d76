"""Other tools' keys: each is answered with what to write for brim, and what is written loads."""

from __future__ import annotations

import pytest

from brim.config import all_keys, line, load_config
from brim.config.foreign import FOREIGN_KEYS, FOREIGN_VALUES
from brim.errors import ConfigError
from brim.notes import kind_of

IDLE = "asks for nothing that brim does not do by itself: it may go"  # said in a note; the key is accepted

# Axolotl's examples/llama-3/qlora.yml, every key that has a value there and is not brim's own (base_model), in its
# order; then what its configuration reference gives for keys that the example leaves empty or has not.
QLORA = [
    ("model_type=AutoModelForCausalLM", "remove it: the base model's folder says"),
    ("tokenizer_type=AutoTokenizer", "remove it: brim takes the tokenizer that comes with base_model"),
    ("load_in_8bit=false", IDLE),
    ("load_in_4bit=true", "write quantization.bits=4"),
    ("strict=false", IDLE),
    ("datasets=[{path: tatsu-lab/alpaca, type: alpaca}]", "--dataset FILE"),
    ("val_set_size=0", "write 'preprocessing.split.probabilities=[1.0, 0.0, 0.0]'"),
    ("output_dir=./outputs/qlora-out", "brim train CONFIG --output-directory DIR"),
    ("adapter=qlora", "write adapter.type=lora and quantization.bits=4"),
    ("sequence_len=4096", "write preprocessing.global_max_sequence_length=4096"),
    ("sample_packing=true", "remove it: brim cuts each effective batch by its rows' lengths"),
    ("pad_to_sequence_len=true", "remove it: brim cuts each effective batch by its rows' lengths"),
    ("lora_r=32", "write adapter.r=32 and adapter.type=lora"),
    ("lora_alpha=16", "write adapter.alpha=16 and adapter.type=lora"),
    ("lora_dropout=0.05", "write adapter.dropout=0.05 and adapter.type=lora"),
    ("lora_target_linear=true", "write adapter.target_modules=all-linear and adapter.type=lora"),
    ("gradient_accumulation_steps=4", "write trainer.gradient_accumulation_steps=4"),
    ("micro_batch_size=2", "write trainer.batch_size=2"),
    ("num_epochs=4", "write trainer.epochs=4"),
    ("optimizer=paged_adamw_32bit", "write trainer.optimizer.type=paged_adamw"),
    ("lr_scheduler=cosine", "write trainer.learning_rate_scheduler.decay=cosine"),
    ("learning_rate=0.0002", "write trainer.learning_rate=0.0002"),
    ("train_on_inputs=false", IDLE),
    ("group_by_length=false", IDLE),
    ("bf16=auto", IDLE),
    ("tf32=false", IDLE),
    ("gradient_checkpointing=true", "write trainer.enable_gradient_checkpointing=true"),
    ("logging_steps=1", "remove it: metrics.jsonl in the run's folder has a line for each update"),
    ("flash_attention=true", "write model_parameters.attn_implementation=flash_attention_2"),
    ("warmup_steps=10", "write trainer.learning_rate_scheduler.warmup_length=10ba"),
    ("evals_per_epoch=4", "write trainer.checkpoints_per_epoch=4"),
    ("saves_per_epoch=1", "write trainer.checkpoints_per_epoch=1"),
    ("weight_decay=0.0", "write trainer.optimizer.weight_decay=0.0"),
    ("special_tokens.pad_token=<|end_of_text|>", "remove it: brim takes the tokens that come with base_model"),
    ("wandb_project=tickets", "remove it: brim writes metrics.jsonl and TensorBoard files"),
    ("early_stopping_patience=3", "write trainer.early_stop=3"),
    ("resume_from_checkpoint=./outputs/qlora-out/checkpoint-100", "brim train CONFIG --resume"),
    ("dataset_prepared_path=last_run_prepared", "remove it: brim reads and prepares the data by itself"),
    ("save_steps=500", "write trainer.steps_per_checkpoint=500"),
    ("optimizer=adamw_torch", "write trainer.optimizer.type=adamw"),
]


@pytest.fixture
def help_with(finetune):
    """What is said about an override, and the configuration without it."""

    def refused(override):
        if (override, IDLE) in QLORA:
            notes = [note for note in load_config(finetune(), [override]).notes if IDLE in note]
            assert notes == [f"override {override}: {override.partition('=')[0]} {IDLE}"]
            return IDLE
        with pytest.raises(ConfigError) as caught:
            load_config(finetune(), [override])
        (problem,) = caught.value.problems
        assert problem.where == f"override {override}"
        return problem.fix

    return refused


def test_there_are_forty_of_them():
    assert len(QLORA) == len({override for override, _ in QLORA}) == 40


@pytest.mark.parametrize(("override", "helps"), QLORA, ids=[override for override, _ in QLORA])
def test_axolotls_overrides_are_answered(help_with, finetune, override, helps):
    fix = help_with(override)
    assert fix.startswith(helps) or (helps.startswith(("--", "brim ")) and helps in fix)
    if fix.startswith("write "):
        written = [text.strip("'") for text in fix.removeprefix("write ").split(" (")[0].split(" and ")]
        load_config(finetune(), written)


ENTRIES = [(name, entry) for entry in FOREIGN_KEYS for name in entry.names]
HAVE_TARGETS = [(name.lstrip("."), entry) for name, entry in ENTRIES if entry.target]


def _given(minimal, name, value):
    """The least configuration with another tool's key."""
    at = source = minimal()
    *parents, last = ("trainer." + name if "." in name else name).split(".")
    for parent in parents:
        at = at.setdefault(parent, {"type": "finetune"} if parent == "trainer" else {})
    at[last] = value
    return source


def _with(source, lines):
    for key, value in lines:
        *parents, last = key.split(".")
        at = source
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return source


def test_the_table_has_the_tools_keys_once():
    names = [name for name, _ in ENTRIES]
    assert len(names) == len(set(names)) > 200


@pytest.mark.parametrize("name", sorted({entry.target for entry in (*FOREIGN_KEYS, *FOREIGN_VALUES) if entry.target}))
def test_every_target_is_a_key_of_the_schema(name):
    assert any(".".join(key.path) == name for key in all_keys())


@pytest.mark.parametrize(("name", "entry"), HAVE_TARGETS, ids=[name for name, _ in HAVE_TARGETS])
def test_what_is_to_be_written_loads(minimal, problems, name, entry):
    source = _given(minimal, name, entry.example)
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    (problem,) = caught.value.problems
    lines = _lines_of(problem.fix)
    assert lines, problem.fix
    rows = 16 if entry.target == "trainer.batch_schedule" else 32  # which the schedule ends with
    base = {"base_model": "model", "trainer": {"type": "finetune", "effective_batch_size": rows}}
    if "initial" in entry.target:
        base["trainer"]["batch_rampup"] = "0.1dur"
    loaded = load_config(_with(base, lines)).config
    assert entry.target.split(".")[0] in loaded.model_fields_set
    if not isinstance(entry.example, dict):
        assert all(line(key, value) in problem.fix for key, value in lines)


def _lines_of(fix):
    """The keys and values of a fix, read as YAML."""
    from brim.config import read_yaml

    texts = fix.removeprefix("write ").split(" (")[0].split(" and ") if fix.startswith("write ") else []
    return [(key, read_yaml(value, "fix")[0]) for key, value in (text.split(": ", 1) for text in texts)]


NO_TARGET = [(name, entry) for name, entry in ENTRIES if not entry.target]


@pytest.mark.parametrize(("name", "entry"), NO_TARGET, ids=[name for name, _ in NO_TARGET])
def test_what_has_no_key_says_what_does_it(minimal, problems, name, entry):
    name = name.replace("*", "x")
    (text,) = problems({**minimal(), name: True})
    assert text == f"{name}: unknown key {name}\n  fix: {entry.answer(True).words}"


@pytest.mark.parametrize("section", ["", "trainer", "adapter", "preprocessing", "quantization"])
def test_a_key_is_known_wherever_it_stands(minimal, problems, section):
    source = minimal(trainer={"type": "finetune"}, adapter={"type": "lora"}, preprocessing={}, quantization={"bits": 4})
    (source[section] if section else source)["micro_batch_size"] = 2
    (text,) = problems(source)
    assert text.endswith("\n  fix: write trainer.batch_size: 2")


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("warmup_steps", 0.1, "write trainer.learning_rate_scheduler.warmup_fraction: 0.1 and trainer.type: finetune"),
        ("num_train_epochs", 3.0, "write trainer.epochs: 3"),
        ("num_train_epochs", 2.5, "the key is trainer.epochs: a whole number of at least 1"),
        ("max_duration", "500ba", "write trainer.train_steps: 500"),
        ("eval_interval", "1ep", "remove it: brim evaluates and saves at the end of each epoch"),
        ("save_steps", 0.1, "shares of the run have no key; trainer.checkpoints_per_epoch says how often in an epoch"),
        ("device_train_microbatch_size", "auto", "remove it: brim cuts each effective batch "
         "(trainer.effective_batch_size) so that it fits the memory"),
        ("val_set_size", 0.05, "write preprocessing.split.probabilities: [0.95, 0.05, 0.0]"),
        ("val_set_size", 200, "the key is preprocessing.split.probabilities: the shares of train, validation and test, "
         "such as [0.95, 0.05, 0.0]"),
        ("lora_target", "q_proj,v_proj", "write adapter.target_modules: [q_proj, v_proj] and adapter.type: lora"),
        ("lora_target", "all", "write adapter.target_modules: all-linear and adapter.type: lora"),
        ("bf16", True, "write precision: bf16-mixed (left out, brim takes bfloat16 wherever the GPU has it)"),
        ("load_in_4bit", "yes", "write quantization.bits: 4"),
        ("gradient_checkpointing", "no", "write trainer.enable_gradient_checkpointing: false and trainer.type: finetune"),
        ("gradient_checkpointing", "unsloth",
         "write trainer.enable_gradient_checkpointing: true and trainer.type: finetune"),
        ("lr_scheduler_type", "cosine_with_restarts",
         "a cosine with restarts is not supported yet; brim's cosine falls once"),
        ("lr_scheduler_type", "tanh",
         "the key is trainer.learning_rate_scheduler.decay: constant, linear, cosine, wsd or null"),
        ("optimizer", {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
         "write trainer.optimizer: {type: adamw} and trainer.learning_rate: 2e-05 and trainer.type: finetune"),
        ("max_grad_norm", 0, "write trainer.gradient_clipping: null and trainer.type: finetune"),
        ("datasets", [{"path": "rows.jsonl", "type": "alpaca"}], "write dataset: rows.jsonl"),
        (
            "datasets",
            [{"path": "one.jsonl"}, {"path": "json", "data_files": ["two.jsonl", "three.jsonl"]}],
            "write dataset: [one.jsonl, two.jsonl, three.jsonl]",
        ),
        ("datasets", [{"path": "one.jsonl"}, {"path": "org/rows"}],
         "save the rows to local files and name them: dataset: FILE or [FILE, FILE], or --dataset FILE; "
         "input_features, output_features and prompt (or chat) say what their columns are"),
        ("finetuning_type", "full", "leave the adapter out: without one all weights are trained"),
        ("use_maximum_batch_size", True, "write trainer.use_maximum_batch_size: true and trainer.type: finetune"),
        ("inital_global_train_batch_size", 8, "write trainer.initial_effective_batch_size: 8 and trainer.type: finetune "
         "(trainer.batch_rampup says how long the ramp from there is)"),
    ],
)  # fmt: skip
def test_values_are_written_in_brims_form(minimal, problems, key, value, fix):
    (text,) = problems({**minimal(), key: value})
    assert text == f"{key}: unknown key {key}\n  fix: {fix}"


IDLE_KEYS = {
    "torch_compile": [False, None, "no"],
    "label_smoothing_factor": [0, 0.0, None],
    "deepspeed": [None, "", {}],
    "fsdp": [[], None],
    "fp16": [False],
    "wandb_project": ["", None],
    "report_to": ["none", []],
    "special_tokens": [{}, {"pad_token": None, "bos_token": ""}],
    "load_in_4bit": [False, "no"],
    "warmup_steps": [0],
    "max_steps": [-1],
    "flash_attention": [False],
    "lora_r": [None],
    "assistant_only_loss": [None],
}


@pytest.mark.parametrize("key", IDLE_KEYS)
@pytest.mark.parametrize("section", ["", "trainer"])
def test_a_key_that_asks_for_nothing_is_accepted_with_a_note(finetune, section, key):
    plain = load_config(finetune())
    for value in IDLE_KEYS[key]:
        source = finetune()
        (source[section] if section else source)[key] = value
        loaded = load_config(source)
        name = f"{section}.{key}" if section else key
        assert loaded.config == plain.config
        assert set(loaded.notes) - set(plain.notes) == {f"{name}: {name} {IDLE}"}
        assert kind_of(next(note for note in loaded.notes if IDLE in note)) == "warning"


def test_many_of_them_are_one_note_in_the_order_of_the_file(finetune, tmp_path):
    import json

    file = tmp_path / "c.yaml"
    idle = "deepspeed:\nfp16: false\ngroup_by_length: false\n"
    file.write_text(f"# axolotl\n{idle}" + "".join(f"{key}: {json.dumps(each)}\n" for key, each in finetune().items()))
    (note,) = (note for note in load_config(file).notes if "asks" in note or "ask " in note)
    assert note == (
        f"{file}:2: deepspeed, fp16, group_by_length ask for nothing that brim does not do by itself: they may go"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bf16", False),
        ("shuffle", False),
        ("assistant_only_loss", False),
        ("load_best_model_at_end", False),
        ("save_safetensors", False),
        ("save_strategy", "no"),
        ("adam_beta1", 0),
        ("use_fast_tokenizer", False),
        ("lora_dropout", 0),
        ("max_grad_norm", 0),
        ("gradient_checkpointing", False),
        ("torch_compile", True),
        ("a_key_of_nobodys", None),
        ("a_key_of_nobodys", False),
    ],
)
def test_what_asks_for_something_though_it_is_off_stays_an_error(minimal, problems, key, value):
    (text,) = problems({**minimal(), key: value})
    assert text.startswith(f"{key}: unknown key {key}\n")


def test_beside_a_mistake_only_the_mistake_is_told(minimal, problems):
    (text,) = problems({**minimal(), "deepspeed": None, "torch_compile": False, "micro_batch_size": 2})
    assert "write trainer.batch_size: 2" in text


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("adapter", "qlora", "write adapter.type: lora and quantization.bits: 4"),
        ("adapter", {"type": "qlora", "r": 4}, "write adapter.type: lora and quantization.bits: 4"),
        ("trainer", {"type": "finetune", "optimizer": "adamw_torch"}, "write trainer.optimizer.type: adamw"),
        ("trainer", {"type": "finetune", "optimizer": {"type": "adamw_bnb_8bit"}},
         "write trainer.optimizer.type: adamw_8bit"),
        ("trainer", {"type": "finetune", "learning_rate_scheduler": {"decay": "constant_with_warmup"}},
         "write trainer.learning_rate_scheduler.decay: constant"),
        ("trainer", {"type": "finetune", "learning_rate_scheduler": "cosine"},
         "write trainer.learning_rate_scheduler.decay: cosine"),
        ("trainer", {"type": "finetune", "gradient_clipping": 1.0},
         "write trainer.gradient_clipping.clipglobalnorm: 1.0"),
        ("quantization", "nf4", "write quantization.bits: 4"),
        ("model_parameters", {"attn_implementation": "fa2"},
         "write model_parameters.attn_implementation: flash_attention_2"),
        ("precision", "amp_bf16", "write precision: bf16-mixed"),
    ],
)  # fmt: skip
def test_values_of_brims_own_keys_too(minimal, problems, key, value, fix):
    (text,) = problems({**minimal(), key: value})
    assert text.endswith(f"\n  fix: {fix}")


@pytest.mark.parametrize(
    ("trainer", "fix"),
    [
        ({"optimizer": {"type": "adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}}},
         "write trainer.learning_rate: 0.001 and trainer.optimizer.betas: [0.9, 0.95] (one level up)"),
        ({"optimizer": {"type": "adam", "params": {"bits": 3}}},
         "the key is trainer.optimizer.betas: two numbers from 0 to below 1, such as [0.9, 0.999]"),
    ],
)  # fmt: skip
def test_keys_of_the_optimizer_move_up(finetune, problems, trainer, fix):
    (text,) = problems(finetune(**trainer))
    assert text == f"trainer.optimizer.params: unknown key trainer.optimizer.params\n  fix: {fix}"


def test_no_secret_is_written_out(minimal, problems):
    token = "hf_" + "a1B2" * 8 + "c3"
    (text,) = problems(minimal(run_name=token, model_id=token))[1:]
    assert token not in text
