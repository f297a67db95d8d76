"""Other tools' keys: each is answered with what to write for brim, and what is written loads."""

from __future__ import annotations

import pytest

from brim.config import load_config
from brim.config.foreign_keys import FOREIGN_KEYS, FOREIGN_VALUES
from brim.config.schema_walk import all_keys
from brim.config.wording import line
from brim.errors import ConfigError

# Axolotl's examples/llama-3/qlora.yml, every key that has a value there and is not brim's own (base_model), in its
# order; then what its configuration reference gives for keys that the example leaves empty or has not.
QLORA = [
    ("model_type=AutoModelForCausalLM", "remove it: the base model's folder says"),
    ("tokenizer_type=AutoTokenizer", "remove it: brim takes the tokenizer that comes with base_model"),
    ("load_in_8bit=false", "remove it"),
    ("load_in_4bit=true", "write quantization.bits=4"),
    ("strict=false", "remove it: brim refuses what it does not know"),
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
    ("train_on_inputs=false", "remove it: brim learns the answers alone"),
    ("group_by_length=false", "remove it: brim cuts each effective batch by its rows' lengths"),
    ("bf16=auto", "remove it: brim takes bfloat16 wherever the GPU has it"),
    ("tf32=false", "remove it: brim leaves TF32 as PyTorch has it"),
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
    from brim.config.yaml_reader import read_yaml

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
        ("warmup_steps", 0, "remove it: there is no warm-up unasked"),
        ("num_train_epochs", 3.0, "write trainer.epochs: 3"),
        ("num_train_epochs", 2.5, "the key is trainer.epochs: a whole number of at least 1"),
        ("max_steps", -1, "remove it: trainer.epochs decides then"),
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
        ("load_in_4bit", "no", "remove it: brim does nothing of the kind unasked"),
        ("gradient_checkpointing", "no", "write trainer.enable_gradient_checkpointing: false and trainer.type: finetune"),
        ("gradient_checkpointing", "unsloth",
         "write trainer.enable_gradient_checkpointing: true and trainer.type: finetune"),
        ("load_in_4bit", False, "remove it: brim does nothing of the kind unasked"),
        ("wandb_project", None, "remove it: null asks for nothing"),
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
