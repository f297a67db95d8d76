"""What is allowed and still worth a word: keys that have no effect as they stand."""

from __future__ import annotations

from brim.config.batch import default_rows, fixes_the_cut
from brim.config.category_rules import MATCH, VOCAB, unreachable, without_rule
from brim.config.moving_batch import moves_batch, takes_default_epochs
from brim.config.places import Document, dotted
from brim.config.prompt_parts import prompt_columns
from brim.config.schema import Config, FinetuneTrainer, NoTrainer, QuantizationConfig, TrainerConfig
from brim.config.schema.quantization import EIGHT_BIT_KEYS, FOUR_BIT_KEYS

_TRAINING_KEYS = (
    "learning_rate",
    "epochs",
    "train_steps",
    "early_stop",
    "steps_per_checkpoint",
    "checkpoints_per_epoch",
)


def notes_on(config: Config, document: Document) -> tuple[str, ...]:
    """Notes, each with its place."""
    notes = []
    if isinstance(config.trainer, NoTrainer):
        untouched = NoTrainer()
        given = [key for key in _TRAINING_KEYS if getattr(config.trainer, key) != getattr(untouched, key)]
        if given:
            where = document.place(("trainer", given[0])).where
            keys = f"{', '.join(given)} {'has' if len(given) == 1 else 'have'}"
            notes.append(f"{where}: {keys} no effect with trainer.type: none; set trainer.type: finetune to train")
    if config.prompt.template is not None and not prompt_columns(config):
        where = document.place(("prompt", "template")).where
        notes.append(f"{where}: prompt.template names no column, so every row gets the same prompt")
    notes += _inputs(config, document)
    notes += _epochs_told(config.trainer, document)
    if isinstance(config.trainer, FinetuneTrainer):
        notes += _batch_that_stays(config.trainer, document)
    if isinstance(config.trainer, FinetuneTrainer) and config.trainer.batch_search != "predict":
        fixed = fixes_the_cut(config.trainer)
        where = document.place(("trainer", "batch_search")).where
        notes += [] if fixed is None else [f"{where}: trainer.batch_search has no effect, {dotted(fixed)} decides"]
    notes += _labels_never_found(config, document)
    if config.quantization is not None:
        notes += _keys_of_other_bits(config.quantization, document)
    return tuple(notes)


def _inputs(config: Config, document: Document) -> list[str]:
    if config.chat is not None:
        return []
    notes = [
        f"{document.place(('input_features', number, 'type')).where}: the {feature.type} {feature.name} is read as "
        "text, as it stands in the data"
        for number, feature in enumerate(config.input_features)
        if feature.type != "text"
    ]
    if len(config.input_features) > 1:
        used = prompt_columns(config)
        notes += [
            f"{document.place(('input_features', number)).where}: the model does not read {feature.name}, since "
            "prompt.template does not name its column"
            for number, feature in enumerate(config.input_features)
            if feature.column_name not in used
        ]
    return notes


def _epochs_told(trainer: TrainerConfig, document: Document) -> list[str]:
    lengths = {"train_steps": trainer.train_steps}
    if isinstance(trainer, FinetuneTrainer):
        lengths["train_samples"] = trainer.train_samples
    decides = [f"trainer.{name}" for name, length in lengths.items() if length is not None]
    where = document.place(("trainer", "epochs")).where
    if isinstance(trainer, FinetuneTrainer) and takes_default_epochs(trainer) and default_rows(trainer) is None:
        return [f"{where}: trainer.epochs is not set: {trainer.epochs} epochs, the default (Ludwig's is 100)"]
    if not decides or trainer.epochs == type(trainer)().epochs:
        return []
    return [f"{where}: trainer.epochs has no effect, {decides[0]} decides"]


def _batch_that_stays(trainer: FinetuneTrainer, document: Document) -> list[str]:
    ramp, initial = trainer.batch_rampup, trainer.initial_effective_batch_size
    if ramp is not None and (ramp.initial or initial) == trainer.effective_batch_size:
        where = document.place(("trainer", "batch_rampup")).where
        return [f"{where}: trainer.batch_rampup has no effect, it begins with trainer.effective_batch_size"]
    if moves_batch(trainer):
        return []
    asked = {"batch_lr_scaling": trainer.batch_lr_scaling != "none", "batch_beta2_scaling": trainer.batch_beta2_scaling}
    return [
        f"{document.place(('trainer', name)).where}: trainer.{name} has no effect, the effective batch stays what it is"
        for name, is_asked in asked.items()
        if is_asked is True
    ]


def _labels_never_found(config: Config, document: Document) -> list[str]:
    feature, where = config.output_features[0], document.place(VOCAB).where
    return [
        *(f"{where}: the label {label!r} is never found, since it has no rule" for label in without_rule(feature)),
        *(
            f"{document.place((*MATCH, label)).where}: the label {label!r} is never found, since the rule of "
            f"{earlier!r} stands before its own and fits whenever that does"
            for label, earlier in unreachable(feature)
        ),
    ]


def _keys_of_other_bits(quantization: QuantizationConfig, document: Document) -> list[str]:
    bits, others = quantization.bits, EIGHT_BIT_KEYS if quantization.bits == 4 else FOUR_BIT_KEYS
    untouched = QuantizationConfig()
    given = [key for key in others if getattr(quantization, key) != getattr(untouched, key)]
    return [
        f"{document.place(('quantization', key)).where}: quantization.{key} has no effect with bits: {bits}"
        for key in given
    ]
