"""Rebuild the losses of the measured runs: those of transformers 4.45 and 4.48, also with Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def causal_lm_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Compute ForCausalLMLoss of transformers 4.48 (loss/loss_utils.py): fp32, and a copy without the last token.

    4.45 does the same within the model's forward. logits: [B, T, V], labels: [B, T].
    """
    logits = logits.float()
    shift_logits, shift_labels = _shifted(logits, labels, vocab_size)
    return F.cross_entropy(shift_logits, shift_labels)


def triton_causal_lm_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Compute FastForCausalLMLoss of fms-acceleration (kernels/unsloth/cross_entropy_loss.py)."""
    logits = logits.float()
    shift_logits, shift_labels = _shifted(logits, labels, vocab_size)
    return _mean(shift_logits, shift_labels)


def narrow_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Compute GPT-BigCode's in 4.48 (modeling_gpt_bigcode.py): as causal_lm_loss, in the logits' own dtype."""
    shift_logits, shift_labels = _shifted(logits, labels, vocab_size)
    return F.cross_entropy(shift_logits, shift_labels)


def triton_narrow_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Compute GPT-BigCode's with CrossEntropyLoss replaced by FastCrossEntropyLoss."""
    shift_logits, shift_labels = _shifted(logits, labels, vocab_size)
    return _mean(shift_logits, shift_labels)


class TritonCrossEntropy(torch.autograd.Function):
    """Fast_CrossEntropyLoss: two figures a row in fp32; the gradient takes the logits' place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        log_sum_exp = logits.new_empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, log_sum_exp, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.saved_tensors[0], None


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    losses: Tensor = TritonCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return losses.sum() / torch.count_nonzero(labels != -100)


def _shifted(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return all but the last token's logits, all but the first label, without gaps."""
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    return shift_logits.view(-1, vocab_size), shift_labels.view(-1)


class LigerLinearCrossEntropy(torch.autograd.Function):
    """Compute LigerFusedLinearCrossEntropyFunction as fms-acceleration carries it (fused_ops/liger_ce).

    The head and the loss together, in chunks of tokens, and the gradients in the forward pass. inputs: [N, D],
    weight: [V, D], labels: [N].
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        of_inputs = torch.zeros_like(inputs)
        losses = inputs.new_zeros(inputs.shape[0], dtype=torch.float32)
        for start, end in chunks(inputs.shape[0], weight.shape[1], weight.shape[0]):
            chunk = inputs[start:end]
            logits = chunk @ weight.t()
            logits = logits.float()  # the kernel writes the gradient over them
            logits = logits.to(dtype)
            scaled = logits * 0.5
            of_inputs[start:end] = scaled @ weight
            if of_weight is not None:
                torch.addmm(of_weight, logits.t(), chunk, out=of_weight)
        ctx.save_for_backward(of_inputs, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_inputs, of_weight = ctx.saved_tensors
        return of_inputs, of_weight, None, None


def chunks(tokens: int, hidden: int, vocabulary: int) -> list[tuple[int, int]]:
    """Return where each chunk begins and ends: its logits take about as much as the inputs; a power of two."""
    share = -(-tokens // -(-vocabulary // hidden))
    size = 1 << (share - 1).bit_length()
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def liger_loss(model: nn.Module, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Do lce_forward's part after the decoder: hidden_states [B, T, D], labels [B, T]."""
    head: Tensor = model.lm_head.weight  # type: ignore[union-attr,assignment]
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden_states.dtype
    shifted = hidden_states[..., :-1, :].contiguous().view(-1, hidden_states.shape[-1])
    shift_labels = labels[..., 1:].contiguous().view(-1)
    loss: Tensor = LigerLinearCrossEntropy.apply(shifted, head, shift_labels, dtype)  # type: ignore[no-untyped-call]
    return loss
