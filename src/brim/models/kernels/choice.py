"""Say by which kernels a model computes while it is trained: PyTorch's, or Liger's where they are there and agree.

Liger's are written in Triton and run on CUDA. Where the device is at hand they are tried before they are taken: a small
random model of the same configuration must have the scores and the gradient that it has without them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from brim.config import Choice
from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError, require_extra
from brim.models.kernels.forms import Forms, Kernels, LayerKernels, forms_of
from brim.models.packing import packing_choice, small_model
from brim.storage import Cache, cache_folder, digest, source_digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SETTING = "model_parameters.kernels"
_AMPERE = (8, 0)


def execution_choices(
    config: Config,
    read: Callable[[], PretrainedConfig],
    *,
    capability: tuple[int, int] | None,
    at_hand: torch.device | None = None,
    trains: bool = True,
) -> tuple[Choice, ...]:
    """Say how a model computes, as far as that is open: the layout of its rows, and its kernels.

    trains: False: the model is loaded to be run alone, whatever the configuration says. Other arguments and errors as
    in `packing_choice` and `kernels_choice`.
    """
    layout = packing_choice(config, read, capability=capability)
    kernels = kernels_choice(config, read, capability=capability, at_hand=at_hand) if trains else None
    return tuple(choice for choice in (layout, kernels) if choice is not None)


def kernels_choice(
    config: Config,
    read: Callable[[], PretrainedConfig],
    *,
    capability: tuple[int, int] | None,
    at_hand: torch.device | None = None,
) -> Choice | None:
    """Say by which kernels layers compute; None where nothing is open, as it is where nothing is trained.

    read: returns the architecture, where it is asked for. capability: of the GPU; None: not on a GPU. at_hand: the GPU,
    if it is this machine's; on another one nothing can be tried, and Liger's kernels count as installed if asked for.
    Raises InputError where they are asked for and cannot be had.
    """
    asked = config.model_parameters.kernels
    if asked == "torch" or not isinstance(config.trainer, FinetuneTrainer) or (asked == "auto" and capability is None):
        return None
    against, reason = _against(asked, capability, at_hand), ""
    if against is None:
        against, reason = _found(config, read(), at_hand)
    if asked == "auto":
        return Choice(key=_SETTING, value="torch" if against else "liger", reason=against or reason)
    if against is not None:
        raise ConfigError(what=f"{_SETTING} is liger, and cannot be: {against}", fix=f"set {_SETTING}: auto or torch")
    return None


def _against(asked: str, capability: tuple[int, int] | None, at_hand: torch.device | None) -> str | None:
    """Return what, beside the architecture, speaks against Liger's kernels."""
    if capability is None or capability < _AMPERE:
        return "Liger's kernels need a GPU of compute capability 8.0 or more"
    if asked == "liger" and at_hand is not None:
        require_extra("liger", *_PACKAGES, what=f"{_SETTING}: liger", otherwise=f"set {_SETTING}: torch")
    if asked == "auto" and not all(map(find_spec, _PACKAGES)):
        return "Liger's kernels are not installed (pip install 'brim[liger]')"
    return None


_PACKAGES = ("triton", "liger_kernel")


def layer_kernels(
    config: Config, read: Callable[[], PretrainedConfig], kernels: Kernels | None = None
) -> LayerKernels | None:
    """Return what a model that is to be trained computes by; None where that is its own operators.

    config: with the choice made; where it is open, they are its own. kernels: what stands for Liger's; None: they.
    """
    if config.model_parameters.kernels != "liger" or not isinstance(config.trainer, FinetuneTrainer):
        return None
    forms = _forms(read(), trust_remote_code=config.trust_remote_code)
    return LayerKernels(forms=forms, kernels=kernels or liger_kernels())


def liger_kernels() -> Kernels:
    """Return Liger's kernels. A norm's gradient is not written over the gradient that it comes from: others read it."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

    def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float, casting: str) -> Any:
        return LigerRMSNormFunction.apply(x, weight, epsilon, offset, casting, False, None)

    return Kernels(norm=norm, gate=LigerSiLUMulFunction.apply, rotate=LigerRopeFunction.apply)


def _found(config: Config, architecture: PretrainedConfig, at_hand: torch.device | None) -> tuple[str | None, str]:
    """Return what speaks against Liger's kernels, if anything does, and what speaks for them."""
    try:
        forms = _forms(architecture, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever an architecture raises when it is built otherwise, or tried
        return f"no small model of it could be built, or tried: {type(error).__name__}", ""
    if not forms.names:
        return "none of its layers is one that they compute", ""
    named = " and ".join(filter(None, (", ".join(forms.names[:-1]), forms.names[-1])))
    if at_hand is None:
        return None, f"{named} are Liger's, {len(forms.names)} of 3; not tried, since the device is not at hand"
    agrees, reason = _tried(config, architecture, forms, at_hand)
    return (None, f"{named} are Liger's: {reason}") if agrees else (f"Liger's kernels were tried: {reason}", "")


def _forms(architecture: PretrainedConfig, *, trust_remote_code: bool) -> Forms:
    """Return the forms that were found before, or try. What code of a model's own does is not kept."""
    cache, name = Cache(cache_folder(), "kernels"), _entry(architecture)

    def parse(saved: Any) -> Forms:
        norms = {str(kind): (float(offset), str(casting)) for kind, (offset, casting) in saved["norms"].items()}
        return Forms(norms=norms, gated=tuple(saved["gated"]), rotating=tuple(saved["rotating"]))

    forms: Forms | None = None if trust_remote_code else cache.read(name, parse)
    if forms is None:
        forms = forms_of(_model(architecture, trust_remote_code=trust_remote_code))
        if not trust_remote_code:
            cache.write(name, asdict(forms))
    return forms


def _model(architecture: PretrainedConfig, *, trust_remote_code: bool) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return small_model(architecture, trust_remote_code=trust_remote_code, attention=None)


def _entry(architecture: PretrainedConfig, *packages: str, **facts: str) -> str:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", *packages)}
    code = source_digest(("models",))
    return digest({"architecture": architecture.to_dict(), "versions": versions, "code": code, **facts})


def _tried(config: Config, architecture: PretrainedConfig, forms: Forms, device: torch.device) -> tuple[bool, str]:
    """Return what `compared` does on the device; only what agrees is kept, since the rest may be mended."""
    cache = Cache(cache_folder(), "kernels")
    facts = {"precision": config.precision, "device": torch.cuda.get_device_name(device)}
    name = _entry(architecture, "liger-kernel", "triton", **facts)
    kept = None if config.trust_remote_code else cache.read(name, str)
    if kept is not None:
        return True, kept
    try:
        model = _model(architecture, trust_remote_code=config.trust_remote_code).to(device)
        agrees, reason = compared(model, LayerKernels(forms=forms, kernels=liger_kernels()), config.precision)
    except Exception as error:  # of Triton, which compiles them now, or of the device
        return False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        torch.cuda.empty_cache()
    if agrees and not config.trust_remote_code:
        cache.write(name, reason)
    return agrees, reason


# Of rounding both have as much; beside it, a kernel of another formula is off by more than 1e-2.
_WORSE, _ROUNDING, _TELLS_NOTHING = 1.5, 1e-4, 0.5


def compared(model: Any, used: LayerKernels, precision: str) -> tuple[bool, str]:
    """Return whether a model has the scores and the gradient with the kernels that it has without, and how near.

    model: in fp32; it is changed. precision: in which they are compared, such as bf16-true: there both are off from
    fp32, and the kernels may be little more so.
    """
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision.partition("-")[0], torch.float32)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        tokens = torch.randint(model.config.get_text_config().vocab_size, (2, 15)).to(device)
        for weight in model.parameters():
            weight.copy_(weight.to(narrow))
    exact = _scored(model, tokens)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if precision.endswith("mixed"):
        around = partial(torch.autocast, device.type, narrow)
    else:
        model.to(narrow)
    plain = _apart(_scored(model, tokens, around), exact)
    if not max(plain) < _TELLS_NOTHING:
        return False, "a random model of it tells nothing, as rounding makes another one of it"
    used.use(model)
    found = _apart(_scored(model, tokens, around), exact)
    agrees = all(one <= _WORSE * other + _ROUNDING for one, other in zip(found, plain, strict=True))
    if agrees:
        return True, f"a gradient {found[1]:.0e} from that in fp32, where PyTorch's is {plain[1]:.0e}"
    reason = f"scores are {found[0]:.0e} and the gradient {found[1]:.0e} from those in fp32, where PyTorch's are "
    return False, f"{reason}{plain[0]:.0e} and {plain[1]:.0e}"


def _scored(
    model: nn.Module, tokens: Tensor, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[Tensor, Tensor]:
    """Return scores and gradient, each as one vector."""
    model.zero_grad()
    with around():
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    (logits.square().sum() / 100).backward()
    gradients = [each.grad.flatten().float() for each in model.parameters() if each.grad is not None]
    return logits.detach().flatten(), torch.cat(gradients)


def _apart(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> tuple[float, ...]:
    """Return relative differences of the scores and of the gradient; NaN where they are not finite."""
    return tuple(float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))
