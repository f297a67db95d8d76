"""Build the optimizer that the configuration names, and set its rates before each update.

The learning rate is a pure function of consumed samples and of the batch; at another batch than the final one it is
multiplied by a factor. Adam's second beta may move with the batch: then it forgets as fast in samples at every size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from brim.config import has_beta2
from brim.config.schema import Config, FinetuneTrainer, OptimizerConfig
from brim.data.tokens import TokenRows
from brim.errors import ConfigError
from brim.models import require_bitsandbytes
from brim.train.schedule import RunClock, RunLength
from brim.units import parse_duration

Decay = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Compute the learning rate: a linear warm-up to the peak, then a decay to the floor, on a clock of samples.

    During warm-up a step's rate is that of its last sample, so the first step learns something; afterwards it is that
    of its first sample. wsd (warm-up, stable, decay) stays at the peak until the last `decay_samples`, then falls
    linearly.

    With a scaling, all of it, the floor too, is multiplied by a factor of the batch. Nothing of that is stored, so it
    cannot be applied twice.
    """

    peak: float
    floor: float = 0.0
    decay: Decay = "constant"
    warmup_samples: int = 0
    decay_samples: int = 0  # wsd alone
    total_samples: int
    scaling: BatchScaling = "none"
    final_size: int | None = None  # rows of a step at which the factor is 1; needed with a scaling

    @classmethod
    def of(cls, trainer: FinetuneTrainer, rows: TokenRows, length: RunLength, *, seed: int) -> LearningRate:
        """Return the learning rate's course over a run of this length; fractions are of the run's samples.

        seed: of the rows' order. Raises ConfigError where warm-up and decay are longer than the run.
        """
        assert isinstance(trainer.learning_rate, float), "resolved before"
        schedule, total, final_size = trainer.learning_rate_scheduler, length.total_samples, length.schedule.final_size
        clock = RunClock(lengths=rows.lengths, seed=seed, total_samples=total, final_size=final_size)

        def samples(duration: str | None, fraction: float) -> int:
            return round(fraction * total) if duration is None else clock.samples(parse_duration(duration))

        warmup_samples = samples(schedule.warmup_length, schedule.warmup_fraction)
        decay_samples = samples(schedule.decay_length, schedule.decay_fraction)
        is_wsd = schedule.decay == "wsd"
        require_room(warmup_samples=warmup_samples, decay_samples=decay_samples if is_wsd else 0, total_samples=total)
        return cls(
            peak=trainer.learning_rate,
            floor=schedule.eta_min,
            decay=schedule.decay or "constant",
            warmup_samples=warmup_samples,
            decay_samples=decay_samples,
            total_samples=total,
            scaling=trainer.batch_lr_scaling,
            final_size=final_size,
        )

    def __call__(self, *, consumed_samples: int, batch_samples: int, size: int | None = None) -> float:
        """Return the rate of the step that follows `consumed_samples` and takes `batch_samples` more.

        size: rows of the step as the schedule says, of which the end of an epoch may have cut some; needed with a
            scaling.
        """
        rate = self._unscaled(consumed_samples, batch_samples)
        if self.scaling == "none":
            return rate
        assert size is not None, "a scaling needs the size of the step"
        assert self.final_size is not None, "a scaling needs the final size"
        return rate * batch_factor(self.scaling, size=size, final_size=self.final_size)

    def _unscaled(self, consumed_samples: int, batch_samples: int) -> float:
        reached = consumed_samples + batch_samples
        if reached < self.warmup_samples:
            return self.peak * reached / self.warmup_samples
        share = self._share(consumed_samples)
        # The sum below may miss the peak by a rounding.
        return self.peak if share == 1 else self.floor + (self.peak - self.floor) * share

    def _share(self, consumed_samples: int) -> float:
        """Return the share of the distance from the floor to the peak, 1 to 0."""
        if self.decay == "constant":
            return 1.0
        length = self.decay_samples if self.decay == "wsd" else self.total_samples - self.warmup_samples
        progress = 1 - (self.total_samples - consumed_samples) / length if length > 0 else 0.0
        progress = min(max(progress, 0.0), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress


def require_room(*, warmup_samples: int, decay_samples: int, total_samples: int) -> None:
    """Raise ConfigError where a warm-up and a decay take more samples than the run has.

    decay_samples: those of wsd; 0 with another decay, which takes what the warm-up leaves.
    Both are rounded to whole samples, so that two halves of an odd number may come to one more: that passes.
    """
    if warmup_samples + decay_samples <= total_samples + 1 and max(warmup_samples, decay_samples) <= total_samples:
        return
    asked = [
        f"a {name} of {samples:,} samples"
        for name, samples in (("warm-up", warmup_samples), ("decay", decay_samples))
        if samples
    ]
    raise ConfigError(
        where="trainer.learning_rate_scheduler",
        what=f"{' and '.join(asked)} in a run of {total_samples:,}",
        expected="at most the run in all",
        fix="shorten warmup_length or decay_length, or train for longer",
    )


BatchScaling = Literal["none", "sqrt", "linear"]


def batch_factor(scaling: BatchScaling, *, size: int, final_size: int) -> float:
    """Return the factor of the learning rate: 1 at the final size, and always with `none`.

    size: rows of a step as the schedule says, not those that the end of an epoch leaves of it.
    The square root suits Adam (Malladi et al. 2022, arXiv 2205.10287), the linear rule SGD (Goyal et al. 2017,
    arXiv 1706.02677); both keep the gradient's noise in an epoch, and neither holds above the noise scale.
    """
    if scaling == "none" or size == final_size:
        return 1.0
    share = size / final_size
    return math.sqrt(share) if scaling == "sqrt" else share


class FixedBetas:
    """Set an optimizer's rates before each update: the learning rate alone changes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def set(self, *, size: int, learning_rate: float) -> None:
        """Set the rates before an update; size: rows of the step as the schedule says."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def stepped(self) -> None:
        """Count the update for which rates were set; not called for one that was left out."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to what `state` gave."""


def update_rates(trainer: FinetuneTrainer, optimizer: Optimizer, *, final_size: int) -> FixedBetas | MovingBeta2:
    """Return the rates that the configuration asks for; a beta2 that moves is the optimizer's own at `final_size`."""
    assert isinstance(trainer.batch_beta2_scaling, bool), "resolved before"
    if trainer.batch_beta2_scaling:
        return MovingBeta2(trainer.optimizer, optimizer, final_size=final_size)
    return FixedBetas(optimizer)


class MovingBeta2:
    """Set an Adam's rates before each update: beta2 becomes beta2^(size / final size).

    The average of squared gradients starts at 0, so after updates with betas b1 … bn its weights sum to 1 - b1·…·bn:
    that is what it has to be divided by. Adam's implementations divide by 1 - bn^n instead, with the present beta for
    all. With k² = (1 - bn^n) / (1 - b1·…·bn), the right update is theirs with the learning rate and eps divided by k;
    decoupled weight decay, which they multiply by the learning rate, is multiplied by k. While all sizes are the final
    one, k is 1, exactly.

    A weight that had no gradient in some updates has an n of its own, and its k would be another one; it gets that of
    the others.
    """

    def __init__(self, settings: OptimizerConfig, optimizer: Optimizer, *, final_size: int) -> None:
        assert has_beta2(settings), "a rule refuses other optimizers"
        keys = settings.model_dump()
        self._optimizer = optimizer
        self._final_size = final_size
        self._beta1, self._beta2 = keys["betas"]
        self._eps: float = keys["eps"]
        self._weight_decay: float = keys["weight_decay"]
        self._is_decoupled = settings.type != "adam"  # that of torch; bitsandbytes' Adam takes it off as AdamW does
        self._num_updates = 0
        self._exponents = 0.0  # of the betas of those updates, summed
        self._next_exponent = 1.0

    def set(self, *, size: int, learning_rate: float) -> None:
        """Set the rates of an update on a step of this size, as the schedule says."""
        self._next_exponent = size / self._final_size
        beta2 = self._beta2**self._next_exponent
        k = self._correction(beta2)
        for group in self._optimizer.param_groups:
            group["betas"] = (self._beta1, beta2)
            group["lr"] = learning_rate / k
            group["eps"] = self._eps / k
            group["weight_decay"] = self._weight_decay * k if self._is_decoupled else self._weight_decay

    def stepped(self) -> None:
        """Count the update for which rates were set."""
        self._num_updates += 1
        self._exponents += self._next_exponent

    def state(self) -> dict[str, Any]:
        """Return the betas used so far, as JSON."""
        return {"num_updates": self._num_updates, "exponents": self._exponents}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._num_updates, self._exponents = saved["num_updates"], saved["exponents"]

    def _correction(self, beta2: float) -> float:
        """Return k of the update to come."""
        theirs = 1 - beta2 ** (self._num_updates + 1)
        right = 1 - self._beta2 ** (self._exponents + self._next_exponent)
        return math.sqrt(theirs / right)


_OF_TORCH: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


_OF_BITSANDBYTES = {
    "lion": "Lion",
    "adam_8bit": "Adam8bit",
    "adamw_8bit": "AdamW8bit",
    "lion_8bit": "Lion8bit",
    "sgd_8bit": "SGD8bit",
    "rmsprop_8bit": "RMSprop8bit",
    "adagrad_8bit": "Adagrad8bit",
    "paged_adam": "PagedAdam",
    "paged_adamw": "PagedAdamW",
    "paged_lion": "PagedLion",
    "paged_adam_8bit": "PagedAdam8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_lion_8bit": "PagedLion8bit",
}


# In one kernel on a GPU, without temporaries; and so where a CPU steps for a GPU: 24 sharded weights of 2 MiB took a
# fifth of the time of a kernel for each operation (one thread). Not SGD: torch 2.13 leaves its first momentum as it lay
# in memory where a loss scale's first gradients overflow, and without momentum it is one kernel anyway.
_FUSED = ("adam", "adamw")


def build_optimizer(
    settings: OptimizerConfig,
    parameters: Iterable[Parameter],
    *,
    device_type: str | None = None,
    is_offloaded: bool = False,
) -> Optimizer:
    """Build an optimizer over the parameters; the loop sets its learning rate before each step.

    device_type: of the device that a trace's parameters stand for; None: they are where they are. is_offloaded: they
    are on the host, for a GPU that computes the gradients.
    Raises ModelError when it is one of bitsandbytes', which cannot be imported.
    """
    parameters, keys = list(parameters), settings.model_dump(exclude={"type"})
    types = {device_type or each.device.type for each in parameters}
    if settings.type in _FUSED and (is_offloaded or types == {"cuda"}):
        keys["fused"] = True
    if settings.type in _OF_TORCH:
        return _OF_TORCH[settings.type](parameters, lr=0.0, **keys)  # type: ignore[call-arg]
    require_bitsandbytes()
    import bitsandbytes as bnb

    optimizer: Optimizer = getattr(bnb.optim, _OF_BITSANDBYTES[settings.type])(parameters, lr=0.0, **keys)
    return optimizer


def build_host_optimizer(settings: OptimizerConfig, weights: Iterable[Parameter]) -> Optimizer:
    """Build an optimizer that steps on the host for weights of a device: it keeps copies of them, and its states.

    Before a step gradients are copied to the host, after it weights to the device, each once, from and to pinned
    memory. The next pass waits for them on its own stream, and the next step's gradients behind that; so the host never
    writes what is still being copied. A state that is loaded makes it copy the weights again, which are restored first.
    """
    weights = list(weights)
    device = weights[0].device
    is_cuda = device.type == "cuda"
    copies = [torch.empty_like(each, device="cpu", pin_memory=is_cuda) for each in weights]
    gradients = [torch.empty_like(each, pin_memory=is_cuda) for each in copies]
    hosts = [Parameter(each) for each in copies]
    optimizer = build_optimizer(settings, hosts, is_offloaded=is_cuda)

    @torch.no_grad()
    def take_weights(*_: object) -> None:
        for host, weight in zip(hosts, weights, strict=True):
            host.copy_(weight)

    @torch.no_grad()
    def take_gradients(*_: object) -> None:
        for host, weight, gradient in zip(hosts, weights, gradients, strict=True):
            host.grad = None if weight.grad is None else gradient.copy_(weight.grad, non_blocking=is_cuda)
        if is_cuda:
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def give_weights(*_: object) -> None:
        for host, weight in zip(hosts, weights, strict=True):
            if host.grad is not None:
                weight.copy_(host, non_blocking=is_cuda)

    take_weights()
    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(give_weights)
    optimizer.register_load_state_dict_post_hook(take_weights)
    return optimizer


def host_obstacles(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what does not go with an optimizer on the host, its key, and what would do instead."""
    kind = config.finetune_trainer.optimizer.type
    if config.backend.trainer.strategy == "fsdp":
        yield "a sharded model", "backend.trainer.strategy", "set it to auto, or take memory.offload: weights"
    if config.precision == "fp16-mixed":
        yield "a scaled loss", "precision", "set it to bf16-mixed or fp32"
    if kind.startswith("paged_"):
        yield f"{kind}, whose states go to the host as the GPU fills", "trainer.optimizer.type", "keep that alone"
    elif kind not in _OF_TORCH:
        instead = f"set it to one of {', '.join(_OF_TORCH)}"
        yield f"{kind}, whose kernels are the GPU's", "trainer.optimizer.type", instead
