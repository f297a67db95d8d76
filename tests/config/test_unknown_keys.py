"""Keys that brim does not know: misspelt ones, Ludwig's that are not supported yet, and other tools'."""

import shlex

import pytest
from tests.messages import refused

from brim.config import load_config
from brim.config.foreign import foreign_keys
from brim.config.ludwig import unsupported_keys, unsupported_values
from brim.config.text import contains, line, misspelt, read_yaml
from brim.errors import ConfigError
from brim.notes import kind_of

UNKNOWN = [
    "base-model", "Adapter", "epochs", "r", "seed", "template", "max_sequence_length", "trainer.learning_rat",
    "adapter.lora_alpha", "adapter.epochs", "trainer.warmup_fraction", "trainer.precision", "prompt.xyz",
]  # fmt: skip


def test_unknown_keys(minimal, refusals):
    def load(dotted):
        source = minimal(adapter={"type": "lora"}, trainer={"type": "finetune"}, prompt={})
        section, _, key = dotted.rpartition(".")
        (source[section] if section else source)[key] = 1
        load_config(source)

    refusals("unknown_keys.txt", load, UNKNOWN)


def test_a_misspelt_key_is_named_whole_wherever_it_stands_and_its_value_is_checked_too(minimal):
    source = minimal(trainer={"type": "finetune", "optimizer": {"type": "adam", "weigth_decay": 0.1}}, random_sed=-1)
    source["input_features"][0]["nmae"] = "q"
    with refused(
        "input_features.0.nmae: … did you mean input_features.0.name?",
        "trainer.optimizer.weigth_decay: … did you mean trainer.optimizer.weight_decay?",
        "random_sed: unknown key … mean random_seed?",
        "random_sed: random_seed is -1 … at least 0",
    ):
        load_config(source)


def test_no_guess_is_better_than_a_wrong_one(minimal, problems):
    for source in [
        {"learning_rat": 1},  # a key of another section
        {"trainer": {"type": "finetune", "epoch": [3]}}, {"trainer": {"type": "finetune", "train_stepz": {}}},  # a number's
        {"preprocessing": {"sample_rise": "many"}}, {"memory": {"bud": 3}},
    ]:  # fmt: skip
        (text,) = problems(minimal(**source))
        assert "did you mean" not in text
        assert "write" not in text


def test_a_slip_of_the_keyboard():
    names = ("finetune", "type", "min", "main", "train_steps", "gradient_clipping")
    for name, meant in {
        "finetun": "finetune", "fientune": "finetune", "typ": "type", "tpye": "type",
        "xype": None,  # no slip of type: another word, as rat and cat are
        "finetine": "finetune", "ty": None,
        "mian": None,  # as near to min as to main
        "save_steps": None, "gradient_clippings": "gradient_clipping", "gradiant_cliping": "gradient_clipping",
        "gradiant_clipin": None,
    }.items():  # fmt: skip
        assert misspelt(name, names) == meant
    assert misspelt("Fine-Tune", (*names, "fine_tune")) == "fine_tune"


SECTIONS = {
    "trainer": {"type": "finetune"}, "adapter": {"type": "lora"}, "backend": {"type": "local"}, "quantization": {"bits": 8},
}  # fmt: skip


def with_key(minimal, key, value):
    """The least configuration with a dotted key set, `*` being the first entry of a list, or a label."""
    source = minimal(**{name: dict(section) for name, section in SECTIONS.items()})
    at = source
    *parents, last = key.split(".")
    for part in parents:
        if part == "*":
            at = at[0] if isinstance(at, list) else at.setdefault("0", {"value": "text"})
        else:
            at = at.setdefault(part, {})
    at[last] = value
    return source


def test_every_key_of_ludwigs_that_is_not_supported_is_named_and_off_is_accepted(minimal):
    plain = load_config(with_key(minimal, "random_seed", 42)).config
    for entry in unsupported_keys():
        dotted = entry.key.replace("*", "0")
        with refused(f"{dotted}: {dotted} is not supported yet ({entry.about})\n  fix: {entry.instead or 'remove it'}"):
            load_config(with_key(minimal, entry.key, "something"))
        for off in (None, *entry.off, *(({"type": None, "k": 0}, {}) if entry.off_when_empty else ())):
            if not contains(SECTIONS, tuple(entry.key.split("."))):
                assert load_config(with_key(minimal, entry.key, off)).config.model_dump() == plain.model_dump(), dotted


def test_every_value_of_ludwigs_that_is_not_supported_is_named(minimal):
    for entry in unsupported_values():
        for value in entry.values:
            shown = {True: "true", False: "false", None: "null"}.get(value, value)
            for given in (value, *([{"type": value}] if entry.is_type else [])):
                is_section = (
                    given != value or entry.key != "backend.trainer.strategy"
                )  # a text, and no section, in brim
                dotted = entry.key.replace("*", "0") + (".type" if entry.is_type and is_section else "")
                words = f"{dotted}: {dotted}: {shown} is not supported yet … {entry.expected} … {entry.instead or ''}"
                with refused(words):
                    load_config(with_key(minimal, entry.key, given))


IDLE = "asks for nothing that brim does not do anyway: it can be removed"  # said in a note; the key is accepted
AXOLOTL = """
    model_type=AutoModelForCausalLM tokenizer_type=AutoTokenizer load_in_8bit=false load_in_4bit=true strict=false
    'datasets=[{path: tatsu-lab/alpaca, type: alpaca}]' val_set_size=0 output_dir=./outputs/qlora-out adapter=qlora
    sequence_len=4096 sample_packing=true pad_to_sequence_len=true lora_r=32 lora_alpha=16 lora_dropout=0.05
    lora_target_linear=true gradient_accumulation_steps=4 micro_batch_size=2 num_epochs=4
    optimizer=paged_adamw_32bit lr_scheduler=cosine learning_rate=0.0002 train_on_inputs=false group_by_length=false
    bf16=auto tf32=false gradient_checkpointing=true logging_steps=1 flash_attention=true warmup_steps=10
    evals_per_epoch=4 saves_per_epoch=1 weight_decay=0.0 special_tokens.pad_token=<|end_of_text|>
    wandb_project=tickets early_stopping_patience=3 resume_from_checkpoint=./outputs/qlora-out/checkpoint-100
    dataset_prepared_path=last_run_prepared save_steps=500 optimizer=adamw_torch
"""


def test_axolotls_forty_overrides_are_answered_and_what_is_to_be_written_loads(finetune, golden):
    told = []
    for override in shlex.split(AXOLOTL):
        try:
            (answer,) = (note for note in load_config(finetune(), [override]).notes if IDLE in note)
        except ConfigError as error:
            answer = error.problems[0].fix
        if answer.startswith("write "):
            written = [text.strip("'") for text in answer.removeprefix("write ").split(" (")[0].split(" and ")]
            load_config(finetune(), written)
        told.append(f"{override}\n    {answer}")
    assert len(told) == 40
    golden("config/axolotl.txt", "\n".join(told))


ENTRIES = [(name, entry) for entry in foreign_keys() for name in entry.names]


def with_lines(source, lines):
    for key, value in lines:
        *parents, last = key.split(".")
        at = source
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return source


def _lines_of(fix):
    """Return the keys and values of a fix, read as YAML."""
    texts = fix.removeprefix("write ").split(" (")[0].split(" and ") if fix.startswith("write ") else []
    return [(key, read_yaml(value, "fix")[0]) for key, value in (text.split(": ", 1) for text in texts)]


def test_what_is_to_be_written_in_place_of_another_tools_key_loads(minimal):
    for name, entry in ENTRIES:
        if not entry.target:
            continue
        with pytest.raises(ConfigError) as caught:
            in_trainer = "." in name  # such as optimizer.params
            given = minimal(trainer={"type": "finetune"}) if in_trainer else minimal()
            load_config(with_lines(given, [(f"trainer.{name}" if in_trainer else name, entry.example)]))
        (problem,) = caught.value.problems
        lines = _lines_of(problem.fix)
        assert lines, problem.fix
        rows = 16 if entry.target == "trainer.batch_schedule" else 32  # which the schedule ends with
        base = {"base_model": "model", "trainer": {"type": "finetune", "effective_batch_size": rows}}
        if "initial" in entry.target:
            base["trainer"]["batch_rampup"] = "0.1dur"
        assert entry.target.split(".")[0] in load_config(with_lines(base, lines)).config.model_fields_set, name
        if not isinstance(entry.example, dict):
            assert all(line(key, value) in problem.fix for key, value in lines)


def test_what_has_no_key_says_what_does_it(minimal):
    for name, entry in ENTRIES:
        name = name.replace("*", "x")
        if not entry.target:
            with refused(f"{name}: unknown key {name}\n  fix: {entry.answer(True).words}"):
                load_config({**minimal(), name: True})


def test_a_key_is_known_wherever_it_stands(minimal):
    for section in ("", *SECTIONS):
        source = minimal(**{name: dict(keys) for name, keys in SECTIONS.items()})
        (source[section] if section else source)["micro_batch_size"] = 2
        with refused("… fix: write trainer.batch_size: 2"):
            load_config(source)


FIXES = [  # another tool's key with its value
    {"warmup_steps": 0.1}, {"num_train_epochs": 3.0}, {"num_train_epochs": 2.5}, {"max_duration": "500ba"},
    {"eval_interval": "1ep"}, {"save_steps": 0.1}, {"device_train_microbatch_size": "auto"}, {"val_set_size": 0.05},
    {"val_set_size": 200}, {"lora_target": "q_proj,v_proj"}, {"lora_target": "all"}, {"bf16": True},
    {"load_in_4bit": "yes"}, {"gradient_checkpointing": "no"}, {"gradient_checkpointing": "unsloth"},
    {"lr_scheduler_type": "cosine_with_restarts"}, {"lr_scheduler_type": "tanh"},
    {"optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5}}, {"max_grad_norm": 0},
    {"datasets": [{"path": "rows.jsonl", "type": "alpaca"}]},
    {"datasets": [{"path": "one.jsonl"}, {"path": "json", "data_files": ["two.jsonl", "three.jsonl"]}]},
    {"datasets": [{"path": "one.jsonl"}, {"path": "org/rows"}]}, {"finetuning_type": "full"},
    {"use_maximum_batch_size": True}, {"inital_global_train_batch_size": 8},
]  # fmt: skip
OF_BRIMS_OWN_KEYS = [  # a key of brim's with another tool's value
    {"adapter": "qlora"}, {"adapter": {"type": "qlora", "r": 4}},
    {"trainer": {"type": "finetune", "optimizer": "adamw_torch"}},
    {"trainer": {"type": "finetune", "optimizer": {"type": "adamw_bnb_8bit"}}},
    {"trainer": {"type": "finetune", "learning_rate_scheduler": {"decay": "constant_with_warmup"}}},
    {"trainer": {"type": "finetune", "learning_rate_scheduler": "cosine"}},
    {"trainer": {"type": "finetune", "gradient_clipping": 1.0}}, {"quantization": "nf4"},
    {"model_parameters": {"attn_implementation": "fa2"}}, {"precision": "amp_bf16"},
    {"trainer": {"type": "finetune", "optimizer": {"type": "adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}}}},
    {"trainer": {"type": "finetune", "optimizer": {"type": "adam", "params": {"bits": 3}}}},
]  # fmt: skip


def test_values_are_written_in_brims_form(minimal, refusals):
    refusals("other_tools.txt", lambda keys: load_config(minimal(**keys)), FIXES + OF_BRIMS_OWN_KEYS)


IDLE_KEYS = {
    "torch_compile": [False, None, "no"], "label_smoothing_factor": [0, 0.0, None], "deepspeed": [None, "", {}],
    "fsdp": [[], None], "fp16": [False], "wandb_project": ["", None], "report_to": ["none", []],
    "special_tokens": [{}, {"pad_token": None, "bos_token": ""}], "load_in_4bit": [False, "no"], "warmup_steps": [0],
    "max_steps": [-1], "flash_attention": [False], "lora_r": [None], "assistant_only_loss": [None],
}  # fmt: skip


@pytest.mark.parametrize("section", ["", "trainer"])
def test_a_key_that_asks_for_nothing_is_accepted_with_a_note(finetune, section):
    plain = load_config(finetune())
    for key, values in IDLE_KEYS.items():
        name = f"{section}.{key}" if section else key
        for value in values:
            source = finetune()
            (source[section] if section else source)[key] = value
            loaded = load_config(source)
            assert loaded.config == plain.config
            assert set(loaded.notes) - set(plain.notes) == {f"{name}: {name} {IDLE}"}
            assert kind_of(next(note for note in loaded.notes if IDLE in note)) == "warning"


def test_many_of_them_are_one_note_in_the_order_of_the_file(file):
    source = file("# axolotl\ndeepspeed:\nfp16: false\ngroup_by_length: false\nbase_model: m\n")
    (note,) = load_config(source).notes
    asks = "ask for nothing that brim does not do anyway: they can be removed"
    assert note == f"config.yaml:2: deepspeed, fp16, group_by_length {asks}"


def test_what_asks_for_something_though_it_is_off_stays_an_error(minimal):
    off = ["bf16", "shuffle", "assistant_only_loss", "load_best_model_at_end", "save_safetensors", "use_fast_tokenizer"]
    off += ["gradient_checkpointing", "a_key_of_nobodys"]
    others = {"save_strategy": "no", "adam_beta1": 0, "lora_dropout": 0, "max_grad_norm": 0, "torch_compile": True}
    for key, value in [*((key, False) for key in off), *others.items(), ("a_key_of_nobodys", None)]:
        with refused(f"{key}: unknown key {key}\n"):
            load_config({**minimal(), key: value})


def test_beside_a_mistake_only_the_mistake_is_told_and_no_secret_is_written_out(minimal, problems):
    (text,) = problems({**minimal(), "deepspeed": None, "torch_compile": False, "micro_batch_size": 2})
    assert "write trainer.batch_size: 2" in text
    token = "hf_" + "a1B2" * 8 + "c3"
    (text,) = problems(minimal(run_name=token, model_id=token))[1:]
    assert token not in text
