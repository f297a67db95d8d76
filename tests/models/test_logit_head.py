"""A model run as body and head: equal to the architecture's own forward, or left whole with a reason."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.models.test_families import FAMILIES, GPT, KERNELS, SMALL
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from brim.data.tokens import TokenRow, collate
from brim.models import LogitHead, chunked_loss, next_token_loss, next_token_scores
from brim.models.chunked_loss import LogitTransform
from brim.models.loss import NoLogitHead, logit_head

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
MORE_FAMILIES = {
    "bloom": {"vocab_size": 120, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": {**SMALL, "logit_scale": 0.0625},
    "cohere2": {**SMALL, "logit_scale": 0.0625, "sliding_window": 4},
    "gemma3_text": {**SMALL, "head_dim": 8, "sliding_window": 4},
    "glm4": {**SMALL, "head_dim": 8},
    "gpt_oss": {**SMALL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {**GPT, "rotary_dim": 4},
    "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "minicpm3": {**SMALL, **LATENT},
    "mpt": {"vocab_size": 120, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "nanochat": SMALL,
    "olmo2": SMALL,
    "qwen3_moe": {**SMALL, **EXPERTS, "head_dim": 8},
    "stablelm": SMALL,
    "starcoder2": {**SMALL, "sliding_window": None},
}
WITHOUT_SDPA = ("bloom", "gpt_oss", "gptj", "mpt")
# What lies between an architecture's body and its logits, where that is more than a matrix product.
HIDDEN_SCALES = {"minicpm3": 8.0}  # 256, where its muP began, over hidden_size
TRANSFORMS = {
    "cohere": LogitTransform(scale=0.0625),
    "cohere2": LogitTransform(scale=0.0625),
    "gemma2": LogitTransform(cap=30.0),
    "granite": LogitTransform(scale=0.5),
    "granitemoe": LogitTransform(scale=0.333333333333),
    "nanochat": LogitTransform(cap=15.0),
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Seven positions of the families' vocabulary at a time."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * 120 * 7)
    monkeypatch.setattr(chunked_loss, "FEWEST_ROWS", 1)
    monkeypatch.setattr(chunked_loss, "TRAINED_HEAD_FACTOR", 1)


def batch():
    generator = np.random.default_rng(0)
    rows = [
        TokenRow(
            key=key, input_ids=generator.integers(2, 120, length).astype(np.int32), supervised=np.arange(length) >= 2
        )
        for key, length in enumerate([23, 9, 16])
    ]
    return collate(rows, pad_id=1)


def loss_and_gradient(model, head, *, autocast=None):
    model.zero_grad()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = next_token_loss(model, batch(), head=head) / 45
    loss.backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.detach(), torch.cat([each.flatten().float() for each in trained])


def assert_alike(model, head, tolerance, **settings):
    (loss, gradient), (expected, expected_gradient) = (
        loss_and_gradient(model, each, **settings) for each in (head, None)
    )
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < tolerance


def llama(kind=LlamaForCausalLM, **settings):
    torch.manual_seed(0)
    return kind(LlamaConfig(**{**SMALL, **settings}))


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_an_architecture_in_parts_is_the_whole_one(family, small_chunks):
    torch.manual_seed(0)
    architecture = AutoConfig.for_model(family, **{**FAMILIES, **MORE_FAMILIES}[family])
    kernel = KERNELS.get(family, "eager" if family in WITHOUT_SDPA else "sdpa")
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation=kernel).eval()
    head = logit_head(model)
    assert isinstance(head, LogitHead)
    assert head.projection is model.get_output_embeddings()
    assert head.hidden_scale == HIDDEN_SCALES.get(family, 1.0)
    assert head.transform == TRANSFORMS.get(family, LogitTransform())
    assert_alike(model, head, 1e-6)
    with torch.no_grad():
        scores, expected = (next_token_scores(model, batch(), head=each) for each in (head, None))
    torch.testing.assert_close(scores.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores.num_correct, expected.num_correct)
    assert torch.equal(scores.num_supervised, expected.num_supervised)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_in_bf16(precision, tied, small_chunks):
    model = llama(tie_word_embeddings=tied)
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    assert_alike(model, logit_head(model), 1e-2, autocast=torch.bfloat16 if precision == "bf16-mixed" else None)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_act(kind, checkpointing, small_chunks):
    model = llama()
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    settings = LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False, use_dora=kind == "dora"
    )
    adapted = get_peft_model(model, settings).train()
    head = logit_head(adapted)
    assert isinstance(head, LogitHead)
    assert_alike(adapted, head, 1e-6)
    assert head.projection.weight.grad is None


def test_an_adapted_head_is_left_whole():
    adapted = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
    assert logit_head(adapted) == NoLogitHead(reason="the output layer is a Linear of peft, no plain linear layer")


def test_a_head_that_something_is_hooked_into_is_left_whole():
    model = llama()
    model.lm_head.register_forward_hook(lambda module, given, output: output * 2)
    assert logit_head(model) == NoLogitHead(reason="the output layer is hooked into")


class _LogSoftmax(LlamaForCausalLM):
    """An architecture that makes of its logits what no transform that is known does."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits.log_softmax(dim=-1)
        return output


class _Narrower(LlamaForCausalLM):
    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits[..., :100]
        return output


class _Shifted(LlamaForCausalLM):
    def forward(self, input_ids, **inputs):
        return super().forward(input_ids=input_ids + 1, **inputs)


class _OnlyInTraining(LlamaForCausalLM):
    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits * (2 if self.training else 1)
        return output


class _Twice(LlamaForCausalLM):
    def forward(self, **inputs):
        self.model(**inputs)
        return super().forward(**inputs)


class _Normed(LlamaForCausalLM):
    """The hidden states are changed before the head: in the head's pre-hook's place, a function of our own."""

    def forward(self, input_ids, **inputs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return type("Output", (), {"logits": self.lm_head(hidden - hidden.mean(dim=-1, keepdim=True))})


class _Fails(LlamaForCausalLM):
    def forward(self, **inputs):
        raise ValueError("no")


BEYOND = "is no body with an output layer behind it"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_LogSoftmax, f"_LogSoftmax {BEYOND}: what the output layer gives is changed in a way that is not known"),
        (_Narrower, f"_Narrower {BEYOND}: what the output layer gives is changed in a way that is not known"),
        (_Shifted, f"_Shifted {BEYOND}: the body is not given the tokens alone"),
        (_OnlyInTraining, f"_OnlyInTraining {BEYOND}: its forward is another one in training"),
        (_Twice, f"_Twice {BEYOND}: its forward calls other modules, too"),
        (_Normed, f"_Normed {BEYOND}: what the body gives is changed before the output layer"),
        (_Fails, f"_Fails {BEYOND}: ValueError in its forward"),
    ],
)
def test_what_is_not_known_is_left_whole_with_a_reason(kind, reason):
    model = llama(kind)
    assert logit_head(model) == NoLogitHead(reason=reason)
    assert_no_trace(model)


def assert_no_trace(model):
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


def test_looking_leaves_no_trace_and_runs_no_layer():
    with torch.device("meta"):
        model = llama()
    assert isinstance(logit_head(model), LogitHead)  # with weights that are nowhere
    assert_no_trace(model)


def test_it_runs_on_fake_tensors(small_chunks):
    with FakeTensorMode() as mode:
        model = llama()
    head = logit_head(model)
    with mode:
        real = batch()
        fake = type(real)(
            input_ids=torch.zeros(3, 23, dtype=torch.int64),
            targets=torch.zeros(45, dtype=torch.int64),
            target_rows=torch.zeros(45, dtype=torch.int64),
            logit_positions=torch.zeros(45, dtype=torch.int64),
            num_logits=real.num_logits,
        )
        next_token_loss(model, fake, head=head).backward()
    assert head.projection.weight.grad.shape == (120, 32)
