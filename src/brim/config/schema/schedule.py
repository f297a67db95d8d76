"""`trainer.learning_rate_scheduler`: the learning rate over the run."""

from typing import Literal

from brim.config.schema.base import Fraction, NonNegativeFloat, Section, Text, key
from brim.config.schema.batch_schedule import DURATION


class LearningRateScheduler(Section):
    """Warm-up, then a decay. It runs on samples, so a change of the batch size does not bend it."""

    decay: Literal["constant", "linear", "cosine", "wsd"] | None = key(
        None,
        "How the rate falls after the warm-up: linearly or along a cosine down to `eta_min`; `wsd` stays up and falls "
        "linearly at the end; null and `constant` stay up.",
    )
    warmup_fraction: Fraction = key(0.0, "Share of the run in which the rate rises from 0.")
    warmup_length: Text | None = key(
        None,
        "The warm-up as a duration, instead of `warmup_fraction`: `500ba` (batches of the final size), `2ep`, "
        "`5000sp`, `1e6tok` or `0.1dur`.",
        brim=True,
        expected=f"{DURATION}, or null",
    )
    eta_min: NonNegativeFloat = key(0.0, "The rate at which a decay ends; an absolute learning rate.")
    decay_fraction: Fraction = key(
        0.1, "Share of the run in which `wsd` falls. Ludwig's `wsd_decay_fraction` is accepted too.", brim=True
    )
    decay_length: Text | None = key(
        None,
        "The fall of `wsd` as a duration, instead of `decay_fraction`.",
        brim=True,
        expected=f"{DURATION}, or null",
    )
