"""Check rules between keys: values that are fine alone and contradict each other.

What is allowed and still has no effect, as the keys stand, becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from brim.config.batch_rules import BATCH, EFFECTIVE, RAMPUP, batch_rules, default_rows, fixes_the_cut, mismatch
from brim.config.findings import Finding
from brim.config.prompt_rules import (
    MATCH,
    OUTPUT,
    TEMPLATE,
    VOCAB,
    category_rules,
    retrieval_is_whole,
    several_inputs_are_put_together,
    template_is_whole,
    unreachable,
)
from brim.config.prompts import pattern_fault, prompt_columns
from brim.config.schedule_rules import learning_rate_rules, moves_batch, takes_default_epochs
from brim.config.schema import Config, FinetuneTrainer, FixedSplit, NoTrainer, OutputFeature, SGDConfig
from brim.config.text import Document, KeyPath, dotted, is_within, secrets_in

_TRAINING_KEYS = (
    "learning_rate",
    "epochs",
    "train_steps",
    "early_stop",
    "steps_per_checkpoint",
    "checkpoints_per_epoch",
)


def notes_on(config: Config, document: Document) -> tuple[str, ...]:
    """Return notes on keys without effect and defaults worth knowing, each with its place."""
    return tuple(f"{document.place(path).where}: {text}" for path, text in _notes(config, document))


def _notes(config: Config, document: Document) -> Iterator[tuple[KeyPath, str]]:
    trainer = config.trainer
    if isinstance(trainer, NoTrainer):
        untouched = NoTrainer()
        given = [key for key in _TRAINING_KEYS if getattr(trainer, key) != getattr(untouched, key)]
        if given:
            keys = f"{', '.join(given)} {'has' if len(given) == 1 else 'have'}"
            yield (
                ("trainer", given[0]),
                f"{keys} no effect with trainer.type: none; set trainer.type: finetune to train",
            )
    if config.prompt.template is not None and not prompt_columns(config):
        yield TEMPLATE, "prompt.template names no column, so every row gets the same prompt"
    yield from _inputs(config)
    yield from _epochs(trainer, document)
    if isinstance(trainer, FinetuneTrainer):
        yield from _batch_that_stays(trainer)
        fixed = fixes_the_cut(trainer)
        if trainer.batch_search != "predict" and fixed is not None:
            yield ("trainer", "batch_search"), f"trainer.batch_search has no effect, {dotted(fixed)} decides"
    yield from _labels_never_found(config.output_features[0])
    if config.quantization is not None:
        for key in config.quantization.keys_without_effect:
            yield (("quantization", key), f"quantization.{key} has no effect with bits: {config.quantization.bits}")


def _inputs(config: Config) -> Iterator[tuple[KeyPath, str]]:
    for number, feature in enumerate(config.input_features):
        if feature.type != "text":
            words = f"the {feature.type} {feature.name} is read as text, as it stands in the data"
            yield ("input_features", number, "type"), words
    used = prompt_columns(config)
    for number, feature in enumerate(config.input_features):
        if len(config.input_features) > 1 and feature.column_name not in used:
            words = f"the model does not read {feature.name}, since prompt.template does not name its column"
            yield ("input_features", number), words


def _epochs(trainer: NoTrainer | FinetuneTrainer, document: Document) -> Iterator[tuple[KeyPath, str]]:
    decides = [name for name in ("train_steps", "train_samples") if getattr(trainer, name, None) is not None]
    # Epochs of the file that an override replaces are no mistake.
    by_override = any(document.place(("trainer", name)).is_override for name in decides)
    if isinstance(trainer, FinetuneTrainer) and takes_default_epochs(trainer) and default_rows(trainer) is None:
        yield EPOCHS, f"trainer.epochs is not set: {trainer.epochs} epochs, the default (Ludwig's is 100)"
    elif decides and trainer.epochs != type(trainer)().epochs and document.place(EPOCHS).is_override >= by_override:
        yield EPOCHS, f"trainer.epochs has no effect, trainer.{decides[0]} decides"


def _batch_that_stays(trainer: FinetuneTrainer) -> Iterator[tuple[KeyPath, str]]:
    ramp, initial = trainer.batch_rampup, trainer.initial_effective_batch_size
    if ramp is not None and (ramp.initial or initial) == trainer.effective_batch_size:
        yield RAMPUP, "trainer.batch_rampup has no effect, it begins with trainer.effective_batch_size"
    if moves_batch(trainer):
        return
    asked = {"batch_lr_scaling": trainer.batch_lr_scaling != "none", "batch_beta2_scaling": trainer.batch_beta2_scaling}
    for name, is_asked in asked.items():
        if is_asked is True:
            yield ("trainer", name), f"trainer.{name} has no effect, the effective batch stays what it is"


def _labels_never_found(feature: OutputFeature) -> Iterator[tuple[KeyPath, str]]:
    for label in feature.labels:
        if label not in feature.rules and label != feature.fallback_label:
            yield VOCAB, f"the label {label!r} is never found, since it has no rule"
    for label, earlier in unreachable(feature):
        words = f"since the rule of {earlier!r} stands before its own and fits whenever that does"
        yield (*MATCH, label), f"the label {label!r} is never found, {words}"


EPOCHS: KeyPath = ("trainer", "epochs")


def broken_rules(config: Config, known: Sequence[Finding]) -> list[Finding]:
    """Find all contradictions, except between keys of which one is already known to be faulty."""
    faulty = [path for finding in known for path in finding.paths]
    found = [finding for rule in _RULES for finding in rule(config)]
    if isinstance(config.trainer, FinetuneTrainer):
        found += [finding for rule in _RULES_OF_TRAINING for finding in rule(config.trainer)]
    return [finding for finding in found if not any(_touches(path, faulty) for path in finding.paths)]


def _touches(path: KeyPath, faulty: Sequence[KeyPath]) -> bool:
    return is_within(path, faulty) or any(is_within(other, [path]) for other in faulty)


def _chat_stands_alone(config: Config) -> Iterator[Finding]:
    """Refuse keys that describe a prompt and an answer, since they would have no effect on conversations."""
    if config.chat is None:
        return
    for key, is_given in {
        "input_features": "input_features" in config.model_fields_set,
        "output_features": "output_features" in config.model_fields_set,
        "prompt.template": config.prompt.template is not None,
        "prompt.task": config.prompt.task is not None,
        "prompt.retrieval": config.prompt.num_examples > 0,
    }.items():
        if is_given:
            yield Finding(
                paths=(tuple(key.split(".")), ("chat",)),
                what=f"{key} has no effect on conversations, and chat is given",
                expected="chat, or features and a prompt template",
                fix=f"remove {key} (the columns are chat.messages and chat.tools), or remove chat",
            )


def _features_differ(config: Config) -> Iterator[Finding]:
    target, seen = config.output_features[0], set[str]()
    for number, source in enumerate(config.input_features):
        path: KeyPath = ("input_features", number)
        if source.name == target.name:
            yield Finding(
                paths=((*OUTPUT, "name"), (*path, "name")),
                what=f"the input and the output feature are both called {source.name}",
                expected="two names",
                fix="set chat: {} in place of the features, where the rows are conversations"
                if source.column_name in ("messages", "conversations")
                else "",
            )
        elif source.column_name == target.column_name and config.prompt.template is None:
            yield Finding(
                paths=((*OUTPUT, "column"), (*OUTPUT, "name"), (*path, "column"), (*path, "name")),
                what=f"the input and the output feature both read the column {source.column_name}",
                expected="two columns, or a prompt.template that makes the input",
            )
        if source.name in seen:
            yield Finding(
                paths=((*path, "name"),),
                what=f"two input features are called {source.name}",
                expected="a name of its own for each",
            )
        seen.add(source.name)


def _adapter_can_be_trained(config: Config) -> Iterator[Finding]:
    if config.initialize == "random" and config.adapter is not None:
        yield Finding(
            paths=(("initialize",), ("adapter",)),
            what="an adapter on random weights (initialize: random) would be saved without those weights",
            fix="train all weights (adapter: null), or start from pretrained ones",
        )
    targets = None if config.adapter is None else config.adapter.target_modules
    fault = pattern_fault(targets) if isinstance(targets, str) else None
    if fault is not None:
        yield Finding(
            paths=(("adapter", "target_modules"),),
            what=f"adapter.target_modules is refused as a regular expression: {fault}",
            expected="an expression such as .*\\.(q|v)_proj",
            fix="name the layers in a list instead",
        )


def _rows_can_be_chosen(config: Config) -> Iterator[Finding]:
    if config.preprocessing.sample_size is not None and config.preprocessing.sample_ratio < 1:
        yield Finding.of_both(("preprocessing", "sample_size"), ("preprocessing", "sample_ratio"))
    split = config.preprocessing.split
    if isinstance(split, FixedSplit):
        return
    path: KeyPath = ("preprocessing", "split", "probabilities")
    shares = list(split.probabilities)
    if abs(sum(shares) - 1) > 1e-6:
        yield Finding(
            paths=(path,),
            what=f"preprocessing.split.probabilities {shares} sum to {sum(shares):.6g}",
            expected="train, validation and test shares that sum to 1, such as [0.7, 0.1, 0.2]",
        )
    elif shares[0] == 0 and isinstance(config.trainer, FinetuneTrainer):
        yield Finding(
            paths=(path,),
            what="preprocessing.split.probabilities leave no row to train on",
            expected="a first share above 0",
        )


def _batch_sizes_multiply_up(trainer: FinetuneTrainer) -> Iterator[Finding]:
    fault = mismatch(trainer, exact=False)
    if fault is not None:
        yield fault


def _cut_has_a_batch(trainer: FinetuneTrainer) -> Iterator[Finding]:
    """Refuse a written `batch_size: auto` times an accumulation, with which the memory would decide what is learned."""
    is_open = trainer.batch_size == trainer.effective_batch_size == "auto" and "batch_size" in trainer.model_fields_set
    if is_open and trainer.gradient_accumulation_steps != "auto" and not moves_batch(trainer):
        yield Finding(
            paths=(BATCH, EFFECTIVE),
            what="trainer.batch_size: auto cuts an effective batch, and trainer.effective_batch_size is not set: the "
            "memory of the device would decide what is learned",
            expected="trainer.effective_batch_size as a number: the rows of one update",
            fix="add trainer.effective_batch_size: 32, or as many rows as an update shall see",
        )


def _maximum_needs_a_choice(trainer: FinetuneTrainer) -> Iterator[Finding]:
    fixed = fixes_the_cut(trainer)
    if trainer.use_maximum_batch_size and fixed is not None:
        given = trainer.batch_size if fixed == BATCH else trainer.gradient_accumulation_steps
        yield Finding(
            paths=(("trainer", "use_maximum_batch_size"), fixed),
            what=f"trainer.use_maximum_batch_size asks for the largest micro-batch that fits, and {dotted(fixed)} "
            f"{given} fixes it",
            fix=f"remove {dotted(fixed)} (with trainer.effective_batch_size as it shall be), or use_maximum_batch_size",
        )


def _evaluations_are_possible(config: Config) -> Iterator[Finding]:
    if config.trainer.steps_per_checkpoint and config.trainer.checkpoints_per_epoch:
        yield Finding.of_both(("trainer", "steps_per_checkpoint"), ("trainer", "checkpoints_per_epoch"))
    if config.trainer.early_stop == 0:
        yield Finding(
            paths=(("trainer", "early_stop"),),
            what="trainer.early_stop is 0",
            expected="-1 (off), or a whole number of at least 1",
        )
    given, name = config.trainer.validation_field, config.answer_name
    if given is not None and given not in (name, "combined"):
        yield Finding(
            paths=(("trainer", "validation_field"), (*OUTPUT, "name")),
            what=f"trainer.validation_field is '{given}'",
            expected=f"the output feature {name}, or combined" if config.chat is None else "combined",
        )


def _momentum_for_nesterov(trainer: FinetuneTrainer) -> Iterator[Finding]:
    optimizer = trainer.optimizer
    if isinstance(optimizer, SGDConfig) and optimizer.nesterov and (optimizer.momentum == 0 or optimizer.dampening > 0):
        section: KeyPath = ("trainer", "optimizer")
        yield Finding(
            paths=((*section, "nesterov"), (*section, "momentum"), (*section, "dampening")),
            what="trainer.optimizer.nesterov needs momentum above 0 and dampening 0",
            fix="set trainer.optimizer.momentum: 0.9",
        )


def _generation_fits(config: Config) -> Iterator[Finding]:
    settings = config.generation
    if settings.do_sample and settings.temperature == 0:
        yield Finding(
            paths=(("generation", "temperature"), ("generation", "do_sample")),
            what="generation.temperature is 0 and do_sample is true",
            expected="a temperature above 0 for sampling",
            fix="set generation.do_sample: false, which always takes the likeliest token",
        )
    if settings.min_new_tokens and settings.max_new_tokens and settings.min_new_tokens > settings.max_new_tokens:
        yield Finding(
            paths=(("generation", "min_new_tokens"), ("generation", "max_new_tokens")),
            what=f"generation.min_new_tokens is {settings.min_new_tokens}",
            expected=f"at most generation.max_new_tokens, {settings.max_new_tokens}",
        )


def biases_in_16_bits(config: Config) -> Iterator[Finding]:
    """Refuse to train biases in 16 bits: a layer's weight and bias have one dtype, and all that trains is fp32."""
    if config.adapter is not None and config.adapter.bias_type != "none" and config.precision == "bf16-true":
        yield Finding(
            paths=(("precision",), ("adapter", "bias_type")),
            what=f"adapter.bias_type {config.adapter.bias_type} trains biases, and precision bf16-true has them in "
            "16 bits, which round small updates away",
            fix="set precision: bf16-mixed, or adapter.bias_type: none",
        )


def quantised_base(config: Config) -> Iterator[Finding]:
    """Refuse what cannot be done with weights in 4 or 8 bits; the base model's folder may hold them so."""
    if config.quantization is None:
        return
    if config.initialize == "random":
        yield Finding(
            paths=(("initialize",), ("quantization",)),
            what="random weights (initialize: random) cannot be quantised: nothing could be learned in them",
            fix="remove quantization, or start from pretrained weights",
        )
    if config.adapter is not None and config.adapter.bias_type != "none":
        # bitsandbytes' layers sum a bias's gradient over the rows alone, and cast the bias as they see fit.
        yield Finding(
            paths=(("adapter", "bias_type"), ("quantization",)),
            what=f"adapter.bias_type {config.adapter.bias_type} trains biases, which bitsandbytes' layers cannot do",
            fix="set adapter.bias_type: none, or remove quantization",
        )
    if config.adapter is not None and config.generation.merge_adapter is True:
        yield Finding(
            paths=(("generation", "merge_adapter"), ("quantization",)),
            what="generation.merge_adapter is true, but the base is quantised: there is no weight to merge into",
            fix="set generation.merge_adapter: auto, or remove quantization",
        )


def _no_secrets(config: Config) -> Iterator[Finding]:
    """Refuse secrets: masked, the value would be another; as it is, it would reach the run's folder and model card."""
    for path in secrets_in(config.model_dump()):
        yield Finding(
            paths=(path,),
            what=f"a secret stands in the configuration, in {dotted(path)}",
            expected="no access tokens and no passwords",
            fix="take it out and put it in the environment (HF_TOKEN for the Hub)",
        )


_RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    template_is_whole,
    several_inputs_are_put_together,
    retrieval_is_whole,
    _chat_stands_alone,
    _features_differ,
    category_rules,
    _adapter_can_be_trained,
    _rows_can_be_chosen,
    _evaluations_are_possible,
    _generation_fits,
    biases_in_16_bits,
    quantised_base,
    _no_secrets,
)


_RULES_OF_TRAINING: tuple[Callable[[FinetuneTrainer], Iterator[Finding]], ...] = (
    _batch_sizes_multiply_up,
    batch_rules,
    _cut_has_a_batch,
    _maximum_needs_a_choice,
    learning_rate_rules,
    _momentum_for_nesterov,
)
