"""Rules between keys: values that are fine alone and contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from brim.config.batch import BATCH, EFFECTIVE, fixes_the_cut, mismatch
from brim.config.batch_rules import batch_rules
from brim.config.category_rules import category_rules
from brim.config.findings import Finding, is_within
from brim.config.learning_rate_rules import learning_rate_rules
from brim.config.mask import secrets_in
from brim.config.moving_batch import moves_batch
from brim.config.pattern import pattern_fault
from brim.config.places import Path, dotted
from brim.config.prompt_rules import (
    retrieval_is_whole,
    several_inputs_are_put_together,
    template_names_what_is_set,
)
from brim.config.schema import Config, FinetuneTrainer, FixedSplit, SGDConfig
from brim.config.template import names, parse_template
from brim.errors import ConfigError

TEMPLATE: Path = ("prompt", "template")
OUTPUT: Path = ("output_features", 0)


def broken_rules(config: Config, known: Sequence[Finding]) -> list[Finding]:
    """Every contradiction, but for those between keys of which one has a finding of its own."""
    faulty = [path for finding in known for path in finding.paths]
    found = [finding for rule in _RULES for finding in rule(config)]
    return [finding for finding in found if not any(_touches(path, faulty) for path in finding.paths)]


def _touches(path: Path, faulty: Sequence[Path]) -> bool:
    return is_within(path, faulty) or any(is_within(other, [path]) for other in faulty)


def _template_is_readable(config: Config) -> Iterator[Finding]:
    if config.prompt.template is None:
        return
    try:
        used = names(parse_template(config.prompt.template))
    except ConfigError as error:
        for problem in error.problems:
            yield Finding(paths=(TEMPLATE,), what=problem.what, expected=problem.expected, fix=problem.fix)
        return
    answer = config.output_features[0].column_name
    if answer in used:
        yield Finding(
            paths=(TEMPLATE, (*OUTPUT, "name"), (*OUTPUT, "column")),
            what=f"prompt.template names the output column {answer}: the prompt would give the answer away",
            fix=f"take {{{answer}}} out of the template",
        )


def _chat_stands_alone(config: Config) -> Iterator[Finding]:
    """Keys that describe a prompt and an answer would have no effect on conversations."""
    if config.chat is None:
        return
    given: list[Path] = [(name,) for name in ("input_features", "output_features") if name in config.model_fields_set]
    prompt = config.prompt
    said = {"template": prompt.template is not None, "task": prompt.task is not None, "retrieval": prompt.num_examples}
    given += [("prompt", name) for name, is_said in said.items() if is_said]
    for path in given:
        yield Finding(
            paths=(path, ("chat",)),
            what=f"{dotted(path)} has no effect on conversations, and chat is given",
            expected="chat, or features and a prompt template",
            fix=f"remove {dotted(path)} (the columns are chat.messages and chat.tools), or remove chat",
        )


def _features_differ(config: Config) -> Iterator[Finding]:
    target, seen = config.output_features[0], set[str]()
    for number, source in enumerate(config.input_features):
        path: Path = ("input_features", number)
        if source.name == target.name:
            yield Finding(
                paths=((*OUTPUT, "name"), (*path, "name")),
                what=f"the input and the output feature are both called {source.name}",
                expected="two names",
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


def _random_weights_train_whole(config: Config) -> Iterator[Finding]:
    if config.initialize == "random" and config.adapter is not None:
        yield Finding(
            paths=(("initialize",), ("adapter",)),
            what="an adapter on random weights (initialize: random) would be saved without those weights",
            fix="train all weights (adapter: null), or start from pretrained ones",
        )


def _target_modules_can_be_matched(config: Config) -> Iterator[Finding]:
    targets = None if config.adapter is None else config.adapter.target_modules
    fault = pattern_fault(targets) if isinstance(targets, str) else None
    if fault is not None:
        yield Finding(
            paths=(("adapter", "target_modules"),),
            what=f"adapter.target_modules is refused as a regular expression: {fault}",
            expected="an expression such as .*\\.(q|v)_proj",
            fix="name the layers in a list instead",
        )


def _one_way_to_sample(config: Config) -> Iterator[Finding]:
    if config.preprocessing.sample_size is not None and config.preprocessing.sample_ratio < 1:
        yield Finding(
            paths=(("preprocessing", "sample_size"), ("preprocessing", "sample_ratio")),
            what="preprocessing.sample_size and sample_ratio are both given",
            fix="keep one of them",
        )


def _shares_sum_to_one(config: Config) -> Iterator[Finding]:
    split = config.preprocessing.split
    if isinstance(split, FixedSplit):
        return
    path: Path = ("preprocessing", "split", "probabilities")
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


def _batch_sizes_multiply_up(config: Config) -> Iterator[Finding]:
    if isinstance(config.trainer, FinetuneTrainer):
        fault = mismatch(config.trainer, num_processes=None)
        if fault is not None:
            yield fault


def _cut_has_a_batch(config: Config) -> Iterator[Finding]:
    """A written batch_size: auto times an accumulation would leave what is learned to the memory."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer) or "batch_size" not in trainer.model_fields_set:
        return
    is_open = trainer.batch_size == trainer.effective_batch_size == "auto"
    if is_open and trainer.gradient_accumulation_steps != "auto" and not moves_batch(trainer):
        yield Finding(
            paths=(BATCH, EFFECTIVE),
            what="trainer.batch_size: auto cuts an effective batch, and trainer.effective_batch_size is not set: the "
            "memory of the device would decide what is learned",
            expected="trainer.effective_batch_size as a number: the rows of one update",
            fix="add trainer.effective_batch_size: 32, or as many rows as an update shall see",
        )


def _maximum_needs_a_choice(config: Config) -> Iterator[Finding]:
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer) or not trainer.use_maximum_batch_size:
        return
    fixed = fixes_the_cut(trainer)
    if fixed is not None:
        given = trainer.batch_size if fixed == BATCH else trainer.gradient_accumulation_steps
        yield Finding(
            paths=(("trainer", "use_maximum_batch_size"), fixed),
            what=f"trainer.use_maximum_batch_size asks for the largest micro-batch that fits, and {dotted(fixed)} "
            f"{given} fixes it",
            fix=f"remove {dotted(fixed)} (with trainer.effective_batch_size as it shall be), or use_maximum_batch_size",
        )


def _one_way_to_checkpoint(config: Config) -> Iterator[Finding]:
    if config.trainer.steps_per_checkpoint and config.trainer.checkpoints_per_epoch:
        yield Finding(
            paths=(("trainer", "steps_per_checkpoint"), ("trainer", "checkpoints_per_epoch")),
            what="trainer.steps_per_checkpoint and checkpoints_per_epoch are both given",
            fix="keep one of them",
        )


def _patience_is_not_zero(config: Config) -> Iterator[Finding]:
    if config.trainer.early_stop == 0:
        yield Finding(
            paths=(("trainer", "early_stop"),),
            what="trainer.early_stop is 0",
            expected="-1 (off), or a whole number of at least 1",
        )


def _validation_field_exists(config: Config) -> Iterator[Finding]:
    given, name = config.trainer.validation_field, config.answer_name
    if given is not None and given not in (name, "combined"):
        yield Finding(
            paths=(("trainer", "validation_field"), (*OUTPUT, "name")),
            what=f"trainer.validation_field is '{given}'",
            expected=f"the output feature {name}, or combined" if config.chat is None else "combined",
        )


def _momentum_for_nesterov(config: Config) -> Iterator[Finding]:
    optimizer = config.trainer.optimizer if isinstance(config.trainer, FinetuneTrainer) else None
    if isinstance(optimizer, SGDConfig) and optimizer.nesterov and (optimizer.momentum == 0 or optimizer.dampening > 0):
        section: Path = ("trainer", "optimizer")
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
    """A linear layer takes its weight and its bias in one dtype, and all that trains is fp32."""
    if config.adapter is not None and config.adapter.bias_type != "none" and config.precision == "bf16-true":
        yield Finding(
            paths=(("precision",), ("adapter", "bias_type")),
            what=f"adapter.bias_type {config.adapter.bias_type} trains biases, and precision bf16-true has them in "
            "16 bits, which round small updates away",
            fix="set precision: bf16-mixed, or adapter.bias_type: none",
        )


def quantised_base(config: Config) -> Iterator[Finding]:
    """What cannot be done with weights in 4 or 8 bits, which may also come so from the base model's folder."""
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


def _no_secrets(config: Config) -> Iterator[Finding]:
    """Masked, the value would be another one; as it is, it would reach the run's folder and its model card."""
    for path in secrets_in(config.model_dump()):
        yield Finding(
            paths=(path,),
            what=f"a secret stands in the configuration, in {dotted(path)}",
            expected="no access tokens and no passwords",
            fix="take it out and put it in the environment (HF_TOKEN for the Hub)",
        )


_RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _template_is_readable,
    template_names_what_is_set,
    several_inputs_are_put_together,
    retrieval_is_whole,
    _chat_stands_alone,
    _features_differ,
    category_rules,
    _random_weights_train_whole,
    _target_modules_can_be_matched,
    _one_way_to_sample,
    _shares_sum_to_one,
    _batch_sizes_multiply_up,
    batch_rules,
    _cut_has_a_batch,
    _maximum_needs_a_choice,
    _one_way_to_checkpoint,
    _patience_is_not_zero,
    _validation_field_exists,
    learning_rate_rules,
    _momentum_for_nesterov,
    _generation_fits,
    biases_in_16_bits,
    quantised_base,
    _no_secrets,
)
