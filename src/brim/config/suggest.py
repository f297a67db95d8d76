"""For an unknown key: the nearest valid one, or the place where a key of that name belongs."""

from __future__ import annotations

from typing import Any

from brim.config.findings import Finding
from brim.config.places import Path, dotted, value_at
from brim.config.schema import Section
from brim.config.schema_walk import all_keys, type_name
from brim.config.wording import nearest, shortened

_SURE = 0.8  # similarity from which a key of the same section is meant, rather than one elsewhere
_ELSEWHERE = 3  # more places than these say nothing

# Names that other tools have for the same thing.
_SYNONYMS = {
    "lr": "trainer.learning_rate",
    "max_lr": "trainer.learning_rate",
    "num_epochs": "trainer.epochs",
    "num_train_epochs": "trainer.epochs",
    "max_steps": "trainer.train_steps",
    "per_device_train_batch_size": "trainer.batch_size",
    "per_device_eval_batch_size": "trainer.eval_batch_size",
    "micro_batch_size": "trainer.batch_size",
    "global_batch_size": "trainer.effective_batch_size",
    "rampup_batch_size": "trainer.batch_rampup",
    "batch_size_warmup": "trainer.batch_rampup",
    "step_batch_size_schedule": "trainer.batch_schedule",
    "warmup_steps": "trainer.learning_rate_scheduler.warmup_length",
    "gradient_checkpointing": "trainer.enable_gradient_checkpointing",
    "max_grad_norm": "trainer.gradient_clipping.clipglobalnorm",
    "lr_scheduler_type": "trainer.learning_rate_scheduler.decay",
    "warmup_ratio": "trainer.learning_rate_scheduler.warmup_fraction",
    "lora_r": "adapter.r",
    "rank": "adapter.r",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "model_name_or_path": "base_model",
    "model": "base_model",
    "seed": "random_seed",
    "max_seq_length": "preprocessing.global_max_sequence_length",
    "max_length": "preprocessing.global_max_sequence_length",
    "attn_implementation": "model_parameters.attn_implementation",
    "bf16": "precision",
    "fp16": "precision",
    "torch_dtype": "precision",
    "dtype": "precision",
}


def unknown_key(path: Path, sections: tuple[type[Section], ...], data: dict[str, Any]) -> Finding:
    """The finding for a key that its section does not have."""
    section = sections[0]
    other_type = _type_that_has_it(path, section)
    if other_type:
        parent = dotted(path[:-1])
        return Finding(
            paths=(path,),
            what=f"{dotted(path)} has no place with {parent}.type: {_given_type(path, data, section)}",
            fix=f"remove it, or set {parent}.type: {other_type}",
            kind="unknown",
        )
    meant = nearest(str(path[-1]), section.model_fields, at_least=_SURE) or ""
    fix = f"did you mean {meant}?" if meant else _fix(str(path[-1]), list(section.model_fields))
    return Finding(
        paths=(path,),
        what=f"unknown key {shortened(dotted(path))}",
        expected="" if fix else "one of " + ", ".join(section.model_fields),
        fix=fix or "remove it",
        kind="unknown",
        meant=meant,
    )


def _fix(name: str, siblings: list[str]) -> str:
    """Where else the key belongs, or what it may stand for."""
    places = _places(name)
    if 1 <= len(places) <= _ELSEWHERE:
        return f"{name} belongs elsewhere: {' or '.join(places)}"
    if name in _SYNONYMS:
        return f"did you mean {_SYNONYMS[name]}?"
    near = nearest(name, siblings)
    if near:
        return f"did you mean {near}?"
    far = nearest(name, {key.name for key in all_keys()}, at_least=_SURE)
    places = _places(far) if far else []
    return f"did you mean {' or '.join(places)}?" if 1 <= len(places) <= _ELSEWHERE else ""


def _places(name: str) -> list[str]:
    return list(dict.fromkeys(".".join(key.path).replace("*", "0") for key in all_keys() if key.name == name))


def _type_that_has_it(path: Path, section: type[Section]) -> str | None:
    """Another type of the same section that has the key."""
    pattern = tuple("*" if isinstance(part, int) else part for part in path)
    for key in all_keys():
        if key.path == pattern and key.section is not section and type_name(key.section) is not None:
            return type_name(key.section)
    return None


def _given_type(path: Path, data: dict[str, Any], section: type[Section]) -> str:
    parent = value_at(data, path[:-1])
    given = parent.get("type") if isinstance(parent, dict) else None
    return str(given or type_name(section))
