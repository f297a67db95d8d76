"""Update the weights once by a gradient that is ready, or not at all where it is not finite.

Clipping measures the gradient's norm on the way. A step whose loss or gradient is not finite is described.

A run that ends for want of memory is explained: what it keeps, and what would help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from brim.batching import StepOutcome
from brim.batching.memory import or_explain, second_try
from brim.config.schema import GradientClippingConfig
from brim.distributed import Share, whole
from brim.errors import BrimError, OutOfMemoryError
from brim.units import format_bytes, format_count

if TYPE_CHECKING:
    from brim.train.checkpoints import TrainState
    from brim.train.gradient import Gradient, OnEvent
    from brim.train.job import TrainJob


BrimErrorT = TypeVar("BrimErrorT", bound=BrimError)


class WeightUpdate:
    """Clip, step the optimizer and drop the gradient; count the steps that are left out.

    on_event: called with each allocation that failed and was retried.
    """

    def __init__(
        self, job: TrainJob, state: TrainState, gradient: Gradient, scaler: torch.amp.GradScaler, on_event: OnEvent
    ) -> None:
        self._job = job
        self._state = state
        self._gradient = gradient
        self._scaler = scaler
        self._on_event = on_event
        self._parameters = gradient.parameters

    def clipped(self, outcome: StepOutcome, share: Share) -> tuple[float, float]:
        """Add the gradient up over the ranks, unscale and clip it; return the step's loss and the norm.

        share: what this rank says of itself; `gradient.shares` has afterwards what each has said.

        The device is waited for once, or twice where the loss is scaled. The norm is NaN, and nothing is done, where
        there will be no update. Raises OutOfMemoryError. Clipping in place is not retried: a second time would not give
        the same.
        """
        job = self._job
        numbers = self._gradient.gathered(outcome, share)
        if self._scaler.is_enabled() and not math.isfinite(float(numbers.sum())):
            return self._gradient.read(numbers.tolist()), math.nan  # after unscaling, the scaler would expect a step

        def clipped() -> tuple[float, float]:
            self._scaler.unscale_(job.optimizer)
            norm = second_try(
                lambda: gradient_norm(self._parameters),
                on_failure=lambda message: self._on_event(failure_event("gradient norm", message)),
            )
            clip(self._parameters, norm, job.clipping)
            *read, found = torch.cat([numbers, whole(norm)[None].to(numbers.device)]).tolist()
            return self._gradient.read(read), found

        return or_explain(
            clipped,
            lambda message: OutOfMemoryError(
                what=f"memory ran out when the gradient was clipped: {message}",
                where=f"step {self._state.step + 1:,}",
                fix=for_an_update(job.settings),
            ),
        )

    def __call__(
        self,
        outcome: StepOutcome,
        *,
        loss: float,
        norm: float,
        size: int,
        learning_rate: float,
        saved_step: int | None,
    ) -> NotFinite | None:
        """Update the weights, or leave it out where loss or gradient are not finite. Raises BrimError to stop there.

        loss, norm: what `clipped` gave. size: rows of the step as the schedule says. saved_step: of the newest
        checkpoint.
        """
        job, scales = self._job, self._scaler.is_enabled()
        if not math.isfinite(loss) or (not math.isfinite(norm) and not scales):
            return self._leave_out(outcome, loss, norm)
        self._state.num_skipped_in_a_row = 0
        job.rates.set(size=size, learning_rate=learning_rate)
        scale = self._scaler.get_scale()
        self._step_optimizer(saved_step)
        if self._scaler.get_scale() < scale:
            # fp16 gradients overflowed: the scaler left the update out and lowered its scale.
            job.observer.write({"step": self._state.step + 1, "event": "overflow", "loss_scale": scale})
        else:
            job.rates.stepped()
        self._gradient.drop()
        return None

    def _step_optimizer(self, saved_step: int | None) -> None:
        """Raise OutOfMemoryError where the weights may be half updated: nothing of them is saved from there on."""

        def step() -> None:
            self._scaler.step(self._job.optimizer)
            self._scaler.update()

        done = self._state.step
        or_explain(
            step,
            lambda message: OutOfMemoryError(
                what="memory ran out in the optimizer's own step; the weights, which may be half updated, are not "
                f"saved: {message}",
                where=f"step {done + 1:,}",
                fix=f"{for_an_update(self._job.settings)}. {_left(done, saved_step)}",
            ),
        )

    def _leave_out(self, outcome: StepOutcome, loss: float, norm: float) -> NotFinite:
        """Drop this step; weights and optimizer stay as they are. Raises BrimError where the run is to stop."""
        job, state = self._job, self._state
        self._gradient.drop()
        micro_batches: list[int] = []
        rows: list[int] = []
        total = 0
        for found, keys, number in job.ranks.exchanged("not finite", lambda: self._at_fault(outcome, loss)):
            micro_batches += [total + each + 1 for each in found]
            rows, total = sorted([*rows, *keys]), total + number
        if not micro_batches:  # each by itself is finite, and their sum is not
            micro_batches = list(range(1, total + 1))
            keys_of_all = job.ranks.exchanged("rows of all", lambda: self._gradient.keys_of(outcome.parts))
            rows = sorted(key for keys in keys_of_all for key in keys)
        not_finite = NotFinite(
            step=state.step + 1,
            loss=loss,
            norm=norm,
            micro_batches=micro_batches,
            num_micro_batches=total,
            rows=rows,
        )
        if job.on_nonfinite == "stop":
            raise not_finite.stop()
        state.num_skipped += 1
        state.num_skipped_in_a_row += 1
        if state.num_skipped_in_a_row == MOST_IN_A_ROW:
            raise not_finite.too_many()
        return not_finite

    def _at_fault(self, outcome: StepOutcome, loss: float) -> tuple[list[int], list[int], int]:
        """Return this rank's micro-batches at fault, the keys of their rows, and how many it had."""
        number = sum(part.micro_batch.num_rows > 0 for part in outcome.parts)  # the others, of no rows, come last
        found = [each for each in self._gradient.at_fault(outcome, loss) if each < number]
        return found, self._gradient.keys_of([outcome.parts[each] for each in found]), number


def clip_gradients(parameters: Sequence[Parameter], settings: GradientClippingConfig | None) -> Tensor:
    """Clip in place as the settings say; return the norm over all gradients before any clipping, a scalar."""
    norm = gradient_norm(parameters)
    clip(parameters, norm, settings)
    return norm


def gradient_norm(parameters: Sequence[Parameter]) -> Tensor:
    """Return the norm over all gradients, a scalar. Nothing is changed."""
    return torch.as_tensor(get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip(parameters: Sequence[Parameter], norm: Tensor, settings: GradientClippingConfig | None) -> None:
    """Clip gradients of this norm in place.

    `clipglobalnorm` and `clipnorm` both bound the norm over all gradients, as they do in Ludwig.
    """
    if settings is None:
        return
    bounds = [bound for bound in (settings.clipglobalnorm, settings.clipnorm) if bound is not None]
    if bounds:
        clip_grads_with_norm_(parameters, min(bounds), norm)
    if settings.clipvalue is not None:
        clip_grad_value_(parameters, settings.clipvalue)


# A bad row comes up once an epoch. Ten steps in a row mean that the weights themselves are not finite any more, or that
# the learning rate is far too high: leaving steps out mends neither.
MOST_IN_A_ROW = 10


_MOST_ROWS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """Describe a step that cannot be an update."""

    step: int
    loss: float
    norm: float  # of the gradient; NaN where the loss is not finite and the gradient was not examined
    micro_batches: Sequence[int]  # those at fault, from 1
    num_micro_batches: int
    rows: Sequence[int]  # keys of their rows: 0-based row numbers of the source

    def record(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl of a step that was left out."""
        cause = "gradient" if math.isfinite(self.loss) else "loss"
        return {"step": self.step, "event": "skipped", "cause": cause, "rows": list(self.rows)}

    def stop(self) -> BrimError:
        """Return the error with `trainer.on_nonfinite: stop`."""
        return self._error(
            "look at these rows and at the base model; `trainer.on_nonfinite: skip` leaves such steps out, also with "
            "--resume; or train again with a lower trainer.learning_rate"
        )

    def too_many(self) -> BrimError:
        """Return the error with `skip`, once so many steps in a row were left out."""
        return self._error(
            "that was the last of 10 such steps in a row, for which these rows cannot be the cause: train again with a "
            "lower trainer.learning_rate, or with another base model or precision"
        )

    def _error(self, fix: str) -> BrimError:
        shown = ", ".join(map(str, self.rows[:_MOST_ROWS_SHOWN])) + (" …" if len(self.rows) > _MOST_ROWS_SHOWN else "")
        batches = ", ".join(map(str, self.micro_batches))
        return BrimError(
            what=f"step {self.step} is not finite (loss {self.loss:g}, gradient norm {self.norm:g}); nothing was "
            "updated",
            where=f"rows {shown} (numbered from 0; micro-batch {batches} of {self.num_micro_batches})",
            fix=fix,
        )


def failure_event(where: str, message: str) -> dict[str, Any]:
    """Return the line in metrics.jsonl of an allocation that failed, and was tried once more."""
    return {"event": "oom", "where": where, "message": message}


def of_a_row(
    error: OutOfMemoryError, *, step: int, predicted_bytes: int | None, cap_bytes: int | None, settings: Settings
) -> OutOfMemoryError:
    """Return the error that names a row which runs out of memory by itself, with its place and what would help."""
    problem = error.problems[0]
    predicted = "" if predicted_bytes is None else f"; predicted: {format_bytes(predicted_bytes)}"
    cap = "" if cap_bytes is None else f"; limit of a micro-batch: {format_bytes(cap_bytes)}"
    return OutOfMemoryError(
        replace(problem, what=f"{problem.what}{predicted}{cap}", where=f"step {step:,}", fix=for_a_row(settings))
    )


def while_saving(message: str, *, step: int, done: int, saved_step: int | None) -> OutOfMemoryError:
    """Return the error of a checkpoint after this step. done: steps that the run has made since, and all before.

    saved_step: of the newest checkpoint that was there before.
    """
    return OutOfMemoryError(
        what=f"memory ran out twice when the checkpoint of step {step:,} was written: {message}",
        fix=f"free memory on this machine. {_left(done, saved_step)}",
    )


def with_checkpoint(error: BrimErrorT, *, step: int) -> BrimErrorT:
    """Return the error, saying that all that had been learned is saved."""
    kept = f"the checkpoint of step {step:,} holds all that was learned" if step else "nothing had been learned yet"
    first, *others = error.problems
    return type(error)(replace(first, fix=f"{first.fix}. {kept[0].upper()}{kept[1:]}"), *others)


def _left(done: int, saved_step: int | None) -> str:
    """Say what is left of a number of steps that were done."""
    if not done:
        return "Nothing had been learned yet"
    if saved_step is None:
        return f"There is no checkpoint yet: what was learned in {format_count(done, 'step')} is lost"
    if saved_step == done:
        return f"The checkpoint of step {saved_step:,} holds all that was learned before; --resume continues from it"
    again = format_count(done - saved_step, "step")
    return f"--resume continues from the checkpoint of step {saved_step:,}, and does {again} again"


Settings: TypeAlias = Mapping[str, Any]  # a resolved configuration, as JSON


def for_a_row(settings: Settings) -> str:
    """Say what makes the forward and backward pass of a row smaller, of what is not done already."""
    ways = ["train again with shorter rows (preprocessing.global_max_sequence_length)"]
    if not settings.get("quantization"):
        ways.append("with a base in 4 bits and an adapter (quantization.bits: 4)")
    if (settings.get("trainer") or {}).get("enable_gradient_checkpointing") is not True:  # of some layers, or none
        ways.insert(0, "set trainer.enable_gradient_checkpointing: true, also with --resume")
    return either(ways)


def for_an_update(settings: Settings) -> str:
    """Say what makes the optimizer's state and its step smaller, of what is not done already."""
    optimizer = str(((settings.get("trainer") or {}).get("optimizer") or {}).get("type", ""))
    ways = []
    if "8bit" not in optimizer:
        ways.append("states in 8 bits (trainer.optimizer.type: adamw_8bit)")
    if not optimizer.startswith("paged"):
        ways.append("states that move to the host when a GPU is full (paged_adamw_8bit)")
    if not settings.get("adapter"):
        ways.append("an adapter (adapter.type: lora)")
    return "train again with " + either(ways or ["a smaller adapter (adapter.r)"])


def either(ways: Sequence[str]) -> str:
    """Name them as alternatives, in a sentence."""
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
