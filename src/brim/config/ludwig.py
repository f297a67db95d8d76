"""Name the keys and values that Ludwig has for language models and brim does not support yet; ignore none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from brim.config.findings import Finding
from brim.config.yaml import KeyPath, dotted, value_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """A configuration without Ludwig's unsupported keys, and what was found among them."""

    data: dict[str, Any]
    findings: list[Finding]


def screen(data: dict[str, Any]) -> Screened:
    """Take out the unsupported keys. Those whose value means "off" change nothing and are not reported."""
    data = _copied(data)
    findings = []
    for entry in KEYS:
        for path in _matches(data, tuple(entry.key.split("."))):
            value = value_at(data, path[:-1]).pop(path[-1])
            if not _is_off(value, entry):
                findings.append(_key_finding(path, entry))
    for value_entry in VALUES:
        for path in _matches(data, tuple(value_entry.key.split("."))):
            parent, value = value_at(data, path[:-1]), value_at(data, path)
            name = value.get("type") if isinstance(value, dict) and value_entry.is_type else value
            if isinstance(name, (str, bool, type(None))) and name in value_entry.values:
                findings.append(_value_finding(path, name, value_entry, is_mapping=isinstance(value, dict)))
                parent.pop(path[-1])
    return Screened(data=data, findings=findings)


def _matches(data: Any, pattern: tuple[str, ...], path: KeyPath = ()) -> Iterator[KeyPath]:
    """The given paths that fit a pattern, in which "*" stands for any entry of a list or mapping."""
    if not pattern:
        yield path
        return
    head, *rest = pattern
    if head == "*" and isinstance(data, list):
        for index, entry in enumerate(data):
            yield from _matches(entry, tuple(rest), (*path, index))
    elif head == "*" and isinstance(data, dict):
        for name, entry in data.items():
            yield from _matches(entry, tuple(rest), (*path, name))
    elif isinstance(data, dict) and head in data:
        yield from _matches(data[head], tuple(rest), (*path, head))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedKey:
    """A key of Ludwig's. Values in `off`, and null, change nothing and are accepted."""

    key: str  # dotted; "*" stands for an entry of a list or mapping
    about: str
    instead: str = ""
    off: tuple[Any, ...] = ()
    off_when_empty: bool = False  # a section whose keys are all null, 0 or empty is off


def _is_off(value: Any, entry: UnsupportedKey) -> bool:
    if isinstance(value, dict) and entry.off_when_empty:
        return all(item in (None, 0, {}) for item in value.values())
    return value is None or any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in entry.off)


def _key_finding(path: KeyPath, entry: UnsupportedKey) -> Finding:
    return Finding(
        paths=(path,),
        what=f"{dotted(path)} is not supported yet ({entry.about})",
        fix=entry.instead or "remove it",
        kind="unknown",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedValue:
    """Values of a supported key that Ludwig knows and brim does not yet."""

    key: str
    values: tuple[Any, ...]
    expected: str
    instead: str = ""
    is_type: bool = False  # the value may also stand as `type` of a section


def _value_finding(path: KeyPath, name: Any, entry: UnsupportedValue, *, is_mapping: bool) -> Finding:
    key = (*path, "type") if is_mapping else path
    shown = {True: "true", False: "false", None: "null"}.get(name, name)
    return Finding(
        paths=(key,),
        what=f"{dotted(key)}: {shown} is not supported yet",
        expected=entry.expected,
        fix=entry.instead,
        kind="value",
    )


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _key(key: str, about: str, *off: Any, instead: str = "", empty: bool = False) -> UnsupportedKey:
    return UnsupportedKey(key=key, about=about, instead=instead, off=off, off_when_empty=empty)


def _keys(section: str, about: str, /, **off: Any) -> Iterator[UnsupportedKey]:
    """Several keys of one section and one matter, each with the value (or tuple of values) that means off."""
    for name, value in off.items():
        yield _key(f"{section}.{name}", about, *(value if isinstance(value, tuple) else (value,)))


_ROOT = (
    _key("adapters", "several named adapters", empty=True),
    _key("hyperopt", "hyperparameter search", empty=True, instead="compare written configurations with `brim compare`"),
    _key("defaults", "defaults for all features of a type", empty=True, instead="set the keys in the features"),
    _key("is_multimodal", "models that see images", False),
    _key("model_parameters.rope_scaling", "a longer context by scaled positions", empty=True),
    _key("model_parameters.neftune_noise_alpha", "noise on the embeddings", 0),
    _key("preprocessing.oversample_minority", "balancing of categories"),
    _key("preprocessing.undersample_majority", "balancing of categories"),
    _key("backend.trainer", "distributed strategies", empty=True),
    _key("backend.cache_dir", "a cache of preprocessed data"),
    _key("backend.cache_format", "a cache of preprocessed data"),
    _key("backend.cache_credentials", "a cache of preprocessed data"),
    _key("backend.processor", "distributed preprocessing", empty=True),
    _key("backend.loader", "distributed preprocessing", empty=True),
    _key("backend.preprocessor_kwargs", "distributed preprocessing", empty=True),
)


def _features() -> Iterator[UnsupportedKey]:
    for side in ("input_features.*", "output_features.*"):
        yield _key(f"{side}.active", "switched-off features", True)
        yield from _keys(
            f"{side}.preprocessing",
            "the base model's own tokenizer is used",
            tokenizer=("hf_tokenizer", "space_punct"),
            pretrained_model_name_or_path=None,
            vocab_file=None,
            lowercase=False,
            most_common=(20000, 10000),  # of texts and of categories
            padding_symbol="<PAD>",
            unknown_symbol="<UNK>",
            padding=("left", "right"),
            ngram_size=2,
            compute_idf=False,
            computed_fill_value="<UNK>",
            sequence_length=None,
        )
        yield _key(f"{side}.preprocessing.cache_encoder_embeddings", "cached embeddings", False)
        yield _key(
            f"{side}.preprocessing.prompt", "a prompt of one feature", empty=True, instead="use the root's prompt"
        )
    yield _key("input_features.*.tied", "features that share an encoder")
    yield from _encoder()
    yield _key("output_features.*.loss", "other losses than the next token's", _NEXT_TOKEN, *_NEXT_TOKEN_FORMS)
    yield from _keys(
        "output_features.*",
        "several output features",
        reduce_input="sum",
        reduce_dependencies="sum",
        dependencies=([],),
        class_similarities=None,
        class_similarities_temperature=0,
        default_validation_metric=("loss", "accuracy"),
        num_classes=None,
        input_size=None,
    )
    yield from _keys(
        "output_features.*.decoder",
        "the base model's own tokenizer is used",
        tokenizer="hf_tokenizer",
        pretrained_model_name_or_path="",
        vocab_file="",
    )
    yield _key(
        "output_features.*.decoder.match_strategy",
        "one way to match for all labels",
        "contains",
        instead="give each label's rule its type",
    )
    yield from _keys("output_features.*.decoder", "given by the labels", input_size=None, str2idx=None)
    yield from _keys("output_features.*", "probabilities of categories", top_k=3, calibration=False)
    yield _key(
        "output_features.*.decoder.max_new_tokens", "a length per decoder", instead="use generation.max_new_tokens"
    )


def _encoder() -> Iterator[UnsupportedKey]:
    """Keys of the encoders that Ludwig puts before a head; a language model reads the text itself."""
    section, about = "input_features.*.encoder", "an encoder of its own; the base model reads the text"
    for name in ("pretrained_model_name_or_path", "base_model"):
        yield _key(f"{section}.{name}", about, instead="name the model in the root's base_model")
    yield _key(
        f"{section}.trainable", about, instead="what is trained is said by adapter: lora, or null for all weights"
    )
    yield _key(f"{section}.adapter", about, instead="set the root's adapter")
    yield _key(f"{section}.quantization", about, instead="set the root's quantization")
    yield _key(f"{section}.max_sequence_length", about, instead="set the feature's preprocessing.max_sequence_length")
    for name in ("use_pretrained", "reduce_output", "pretrained_kwargs", "saved_weights_in_checkpoint", "vocab_size"):
        yield _key(f"{section}.{name}", about, instead="leave the encoder out")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "embedding_size", "output_size", "dropout"):
        yield _key(f"{section}.{name}", about, instead="leave the encoder out")


_NEXT_TOKEN = "next_token_softmax_cross_entropy"


_NEXT_TOKEN_FORMS: tuple[dict[str, Any], ...] = ({"type": _NEXT_TOKEN}, {"type": _NEXT_TOKEN, "weight": 1.0}, {})


def _trainer() -> Iterator[UnsupportedKey]:
    yield _key("trainer.compile", "torch.compile", False)
    yield _key("trainer.use_mixed_precision", "mixed precision by this key", False, instead="use the root's precision")
    yield _key("trainer.regularization_lambda", "a penalty on the weights", 0, instead="use optimizer.weight_decay")
    yield _key("trainer.regularization_type", "a penalty on the weights", "l1", "l2", "l1_l2")  # no effect at lambda 0
    yield _key("trainer.enable_profiling", "profiling", False)
    yield _key("trainer.profiler", "profiling", empty=True)
    yield _key("trainer.layers_to_freeze_regex", "training some of the layers")
    yield _key("trainer.bucketing_field", "batches by length")
    yield _key(
        "trainer.eval_steps",
        "evaluation on part of a split",
        0,
        instead="remove it; updates between evaluations are steps_per_checkpoint",
    )
    yield _key("trainer.should_shuffle", "training in the file's order", True)
    yield _key("trainer.base_learning_rate", "a second learning rate", 0)
    by_length = "remove it: brim cuts each effective batch by its rows' lengths, so that little is padded"
    yield _key("trainer.packing", "several rows in one sequence", False, instead=by_length)
    yield _key("trainer.packing_max_sequences_per_pack", "several rows in one sequence", 8, instead=by_length)
    on_plateau = _keys(
        "trainer",
        "a batch size that grows when learning stalls",
        increase_batch_size_on_plateau=0,
        increase_batch_size_on_plateau_patience=5,
        increase_batch_size_on_plateau_rate=2.0,
        increase_batch_size_eval_metric="loss",
        increase_batch_size_eval_split="training",
    )
    yield from (replace(entry, instead="use batch_adaptation or batch_schedule") for entry in on_plateau)
    yield from _keys(
        "trainer",
        "training with several losses",
        loss_balancing="none",
        loss_balancing_alpha=1.5,
        loss_balancing_lr=0.01,
        loss_balancing_preference_vector=None,
        loss_balancing_tchebycheff_weight=0.5,
    )
    yield from _keys(
        "trainer",
        "contrastive pre-training",
        contrastive_pretrain_epochs=0,
        contrastive_pretrain_temperature=0.07,
        contrastive_pretrain_projection_dim=128,
        contrastive_pretrain_learnable_temperature=True,
    )
    yield _key("trainer.modality_dropout", "several input features", 0)
    yield from _keys("trainer", "averages of checkpoints", model_soup=None, model_soup_top_k=5)
    for name in ("dpo_beta", "dpo_loss_type", "dpo_label_smoothing", "kto_beta", "orpo_beta", "rejected_column"):
        yield _key(f"trainer.{name}", "training on preferences")
    for name in ("grpo_beta", "grpo_epsilon", "grpo_num_generations"):
        yield _key(f"trainer.{name}", "training on rewards")


def _schedule() -> Iterator[UnsupportedKey]:
    section = "trainer.learning_rate_scheduler"
    yield _key(f"{section}.warmup_evaluations", "warm-up by evaluations", 0, instead="use warmup_fraction")
    yield _key(f"{section}.wsd_warmup_fraction", "a warm-up of wsd's own", instead="use warmup_fraction")
    yield _key(f"{section}.wsd_stable_fraction", "given by warm-up and decay", instead="remove it; set decay_fraction")
    yield from _keys(
        section,
        "a rate that falls when learning stalls",
        reduce_on_plateau=0,
        reduce_on_plateau_patience=10,
        reduce_on_plateau_rate=0.1,
        reduce_eval_metric="loss",
        reduce_eval_split="training",
    )
    yield from _keys(section, "exponential decay", decay_rate=0.96, decay_steps=10000, staircase=False)
    yield from _keys(section, "cosine decay with restarts", t_0=None, t_mult=1)
    yield from _keys(
        section, "the one-cycle schedule", max_lr=None, pct_start=0.3, div_factor=25.0, final_div_factor=1e4
    )
    yield _key(f"{section}.inverse_sqrt_warmup_steps", "the inverse square root schedule", 4000)
    yield from _keys(section, "polynomial decay", polynomial_power=1.0, polynomial_end_lr=0.0)


def _adapter() -> Iterator[UnsupportedKey]:
    yield _key("quantization.mode", "torchao's quantization", instead="use backend: bitsandbytes and bits")
    yield _key("quantization.qat", "torchao's training of quantised weights", False)
    yield _key("adapter.loraplus_lr_ratio", "a learning rate per matrix (LoRA+)")
    for name in ("eva_config", "loftq_config"):
        yield _key(f"adapter.{name}", "starts that are computed from data or weights", empty=True)
    for name in ("rank_pattern", "alpha_pattern"):
        yield _key(f"adapter.{name}", "ranks and scales per layer", {})
    yield _key("adapter.layer_replication", "repeated layers", [])
    adafactor = "trainer.optimizer"
    yield _key(f"{adafactor}.scale_parameter", "a switch of transformers' Adafactor", True)
    yield _key(f"{adafactor}.relative_step", "transformers' Adafactor sets its own rate", False)
    yield _key(f"{adafactor}.warmup_init", "transformers' Adafactor sets its own rate", False)
    yield _key(f"{adafactor}.clip_threshold", "the name in transformers", instead="use d")
    yield _key(f"{adafactor}.decay_rate", "the name in transformers", instead="use beta2_decay")
    yield _key(f"{adafactor}.beta1", "a first moment for Adafactor")
    yield from _keys(adafactor, "bitsandbytes no longer has it", percentile_clipping=100, block_wise=True)


def _generation() -> Iterator[UnsupportedKey]:
    yield _key("generation.max_length", "prompt and answer together", 32, instead="use generation.max_new_tokens")
    yield _key("generation.min_length", "prompt and answer together", 0, instead="use generation.min_new_tokens")
    yield from _keys(
        "generation",
        "transformers no longer has it",
        num_beam_groups=1,
        diversity_penalty=0,
        penalty_alpha=(0,),
        force_words_ids=([],),
        forced_decoder_ids=([],),
    )


KEYS: tuple[UnsupportedKey, ...] = (*_ROOT, *_features(), *_trainer(), *_schedule(), *_adapter(), *_generation())


_FEATURE_TYPES: tuple[str, ...] = (
    "audio",
    "bag",
    "binary",
    "category",
    "category_distribution",
    "date",
    "h3",
    "image",
    "number",
)


_FEATURE_TYPES += ("sequence", "set", "timeseries", "vector", "anomaly")


_FILLS = ("fill_with_mode", "fill_with_mean", "fill_with_false", "fill_with_true", "bfill", "ffill")


_ENCODERS: tuple[str, ...] = ("llm", "auto_transformer", "albert", "bert", "camembert", "ctrl", "deberta", "distilbert")


_ENCODERS += ("electra", "flaubert", "gpt", "gpt2", "longformer", "mt5", "roberta", "t5", "transformer_xl", "xlm")


_ENCODERS += ("xlmroberta", "xlnet", "embed", "parallel_cnn", "stacked_cnn", "stacked_parallel_cnn", "rnn", "cnnrnn")


_ENCODERS += ("transformer", "tf_idf", "dense")


_ADAPTERS: tuple[str, ...] = (
    "adalora",
    "ia3",
    "vera",
    "loha",
    "lokr",
    "fourierft",
    "boft",
    "tinylora",
    "c3a",
    "oft",
    "hra",
    "waveft",
)


_ADAPTERS += ("ln_tuning", "vblora", "prompt_tuning", "prefix_tuning", "p_tuning", "adaption_prompt")


_OPTIMIZERS: tuple[str, ...] = ("adadelta", "adagrad", "adamax", "lamb", "lars", "lbfgs", "muon", "nadam", "radam")


# bitsandbytes' 8-bit LAMB and LARS leave out the trust ratio, which is what those are.
_OPTIMIZERS += ("rmsprop", "schedule_free_adamw", "soap", "lamb_8bit", "lars_8bit")


def _value(
    key: str, values: tuple[Any, ...], expected: str, instead: str = "", *, is_type: bool = False
) -> UnsupportedValue:
    return UnsupportedValue(key=key, values=values, expected=expected, instead=instead, is_type=is_type)


VALUES: tuple[UnsupportedValue, ...] = (
    _value("model_type", ("ecd", "gbm"), "llm"),
    _value(
        "input_features.*.type",
        tuple(t for t in _FEATURE_TYPES if t not in ("binary", "category", "number")),
        "text, category, number or binary",
    ),
    _value("output_features.*.type", tuple(t for t in _FEATURE_TYPES if t != "category"), "text or category"),
    _value(
        "input_features.*.encoder",
        _ENCODERS,
        "passthrough",
        "leave the encoder out, and name the model in base_model: a language model reads the text itself",
        is_type=True,
    ),
    _value("output_features.*.decoder.match.*.type", ("json_schema",), "contains or regex"),
    _value("input_features.*.preprocessing.missing_value_strategy", _FILLS, "error, fill_with_const or drop_row"),
    _value("output_features.*.preprocessing.missing_value_strategy", _FILLS, "error, fill_with_const or drop_row"),
    _value("adapter", _ADAPTERS, "lora", is_type=True),
    _value(
        "adapter.init_lora_weights",
        ("eva", "olora", "pissa", "corda", "loftq", "orthogonal", False),
        "default or gaussian",
    ),
    _value(
        "adapter.postprocessor.merge_adapter_into_base_model",
        (True,),
        "false",
        "merge after training with `brim export RUN --merge --output DIR`",
    ),
    _value("quantization.backend", ("torchao",), "bitsandbytes"),
    _value(
        "quantization.llm_int8_has_fp16_weight",
        (True,),
        "false",
        "remove it: the weights would stay in 16 bits, and no memory would be saved",
    ),
    _value("backend", ("ray", "horovod", "ddp", "fsdp", "deepspeed", "dask"), "local", is_type=True),
    _value("preprocessing.split", ("datetime",), "random, fixed, hash or stratify", is_type=True),
    _value("trainer", ("dpo", "kto", "orpo", "grpo"), "none or finetune", is_type=True),
    _value(
        "trainer.optimizer",
        _OPTIMIZERS,
        "adam, adamw, sgd, adafactor, lion, adam_8bit, paged_adamw or another of bitsandbytes'",
        is_type=True,
    ),
    _value(
        "trainer.learning_rate_scheduler.decay",
        ("exponential", "one_cycle", "inverse_sqrt", "polynomial"),
        "constant, linear, cosine, wsd or null",
    ),
)
