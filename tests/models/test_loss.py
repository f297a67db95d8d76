"""The loss: against transformers' own, over padding and cuts, and in chunks against whole logits in every family."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.infer.families import rows_of
from tests.memory.tiny_architectures import FAMILIES as TINY, HEADS, SMALL
from tests.models.test_adapter_function import Operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from brim.data.tokens import collate
from brim.memory.workload import full_batch
from brim.models.loss import LogitHead, NextToken, chunked as chunked_loss
from brim.models.loss.chunked import LogitTransform, chunked_loss_sum, chunked_scores
from brim.models.loss.next_token import NoLogitHead, logit_head


def rows(lengths, num_prompt_tokens=2, vocabulary=300):
    return list(rows_of(lengths, vocabulary=vocabulary, num_prompt_tokens=num_prompt_tokens))


def labels(rows):
    """What transformers' own loss wants: the ids, -100 on the prompt and the padding."""
    marked = [torch.from_numpy(np.where(row.supervised, row.input_ids, -100)).long() for row in rows]
    return pad_sequence(marked, batch_first=True, padding_value=-100)


@pytest.fixture
def model(tiny_base):
    return AutoModelForCausalLM.from_pretrained(tiny_base).eval()


def test_sums_and_scores_are_transformers_mean_times_the_supervised_tokens_whatever_the_padding(model):
    (row,) = rows([9])
    batch = collate([row], pad_id=1)
    mean = model(input_ids=batch.input_ids, labels=labels([row])).loss
    torch.testing.assert_close(NextToken().loss(model, batch), 7 * mean)
    some = rows([9, 30, 4, 17])
    batch = collate(some, pad_id=1)
    together, scores = NextToken().loss(model, batch), NextToken().scores(model, batch)
    torch.testing.assert_close(together, sum(NextToken().loss(model, collate([row], pad_id=1)) for row in some))
    torch.testing.assert_close(scores.loss.sum().float(), together)
    assert scores.num_supervised.tolist() == [7, 28, 2, 15]
    predicted = model(input_ids=batch.input_ids).logits.argmax(-1)[:, :-1]
    targets = labels(some)[:, 1:]
    assert scores.num_correct.tolist() == ((predicted == targets) & (targets != -100)).sum(1).tolist()
    (row,) = rows([6], num_prompt_tokens=0)  # the first token is no target
    assert int(NextToken().scores(model, collate([row], pad_id=1)).num_supervised) == 5 == row.num_supervised


def test_the_gradient_of_a_batch_is_the_sum_of_its_cuts(model):
    some = rows([9, 30, 4, 17])

    def gradient(cuts):
        model.zero_grad()
        for cut in cuts:
            NextToken().loss(model, collate(cut, pad_id=1)).backward()
        return torch.cat([p.grad.flatten().clone() for p in model.parameters()])

    whole, cut = gradient([some]), gradient([some[:1], some[1:]])
    assert float((whole - cut).norm() / whole.norm()) < 1e-6


S, D, V = 23, 8, 50
TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(cap=5.0), LogitTransform(scale=3.0, cap=2.0)]


def inputs(dtype=torch.float32, *, bias=False, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, D, generator=generator, dtype=torch.float64) * size for rows in (S, V))
    offset = torch.randn(V, generator=generator, dtype=torch.float64) if bias else None
    tensors = [None if each is None else each.to(dtype).requires_grad_() for each in (hidden, weight, offset)]
    return *tensors, torch.randint(V, (S,), generator=generator)


def whole(hidden, weight, bias, targets, transform):
    logits = linear(hidden, weight, bias)
    logits = logits * transform.scale
    if transform.cap is not None:
        logits = torch.tanh(logits / transform.cap) * transform.cap
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide, targets, reduction="sum")


def gradients(loss, tensors):
    return torch.autograd.grad(loss * 3, [each for each in tensors if each is not None])


def error(one, other):
    """Of several tensors as one, in the norm."""
    one, other = (torch.cat([each.flatten().double() for each in tensors]) for tensors in (one, other))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits_in_fp64_and_finite_differences(transform):
    for bias in (False, True):
        *tensors, targets = inputs(torch.float64, bias=bias)
        expected = whole(*tensors, targets, transform)
        expected_gradients = gradients(expected, tensors)
        for most_rows in (1, 4, 22, 23, 100):
            loss = chunked_loss_sum(*tensors, targets, transform=transform, most_rows=most_rows)
            torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
            assert error(gradients(loss, tensors), expected_gradients) < 1e-14
    (direction,) = gradients(chunked_loss_sum(*tensors, targets, transform=transform, most_rows=5), tensors[1:2])

    def loss_after(step):
        weight = (tensors[1] + step * direction).detach()
        return float(chunked_loss_sum(tensors[0].detach(), weight, tensors[2].detach(), targets, transform=transform))

    slope = (loss_after(1e-6) - loss_after(-1e-6)) / 2e-6
    assert slope == pytest.approx(float((direction / 3 * direction).sum()), rel=1e-6)


def test_whether_there_is_a_gradient_does_not_matter_and_the_same_again_is_equal_to_the_bit():
    *tensors, targets = inputs()
    with torch.no_grad():
        without = chunked_loss_sum(*tensors, targets, most_rows=6)
    assert torch.equal(without, chunked_loss_sum(*tensors, targets, most_rows=6))
    *tensors, targets = inputs(torch.bfloat16)
    first, second = (gradients(chunked_loss_sum(*tensors, targets, most_rows=4), tensors) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["bf16-true", "bf16-mixed"])
def test_in_bf16_it_is_as_near_to_the_truth_as_whole_logits(transform, weights):
    *tensors, targets = inputs(weights, bias=True)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    truth = gradients(whole(*exact, targets, transform), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=weights == torch.float32):
        loss = chunked_loss_sum(*tensors, targets, transform=transform, most_rows=4)
        same = whole(*tensors, targets, transform)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, same, rtol=1e-2, atol=0)
    ours, theirs = (error(gradients(each, tensors), truth) for each in (loss, same))
    assert ours < 1e-2
    assert ours < 1.5 * theirs


def test_hits_and_losses_of_each_position_and_nothing_to_learn():
    hidden, weight, bias, targets = inputs()
    logits = linear(hidden, weight)
    scores = chunked_scores(hidden, weight, bias, targets, most_rows=4)
    torch.testing.assert_close(scores.loss, cross_entropy(logits, targets, reduction="none"))
    assert torch.equal(scores.is_correct, logits.argmax(dim=-1) == targets)
    assert not scores.loss.requires_grad
    loss = chunked_loss_sum(hidden[:0], weight, bias, targets[:0])
    assert loss.item() == 0
    assert not any(each.any() for each in gradients(loss, [hidden, weight]))


class _Births(TorchDispatchMode):
    """Every tensor that an operator makes, and every operator."""

    def __init__(self):
        super().__init__()
        self.shapes, self.operators = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators.add(func.name())
        self.shapes += [tuple(each.shape) for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        return result


@pytest.mark.parametrize("trained", [True, False])
def test_logits_never_stand_whole_and_nothing_is_made_that_nobody_needs(trained):
    hidden, weight, _, targets = inputs()
    weight.requires_grad_(trained)
    with _Births() as births:
        chunked_loss_sum(hidden, weight, None, targets, most_rows=4).backward()
    assert (4, V) in births.shapes
    assert (S, V) not in births.shapes
    assert ((V, D) in births.shapes) == trained
    assert not any("local_scalar" in name or "nonzero" in name or "is_nonzero" in name for name in births.operators)
    assert all(name.startswith("aten::") for name in births.operators)


@pytest.mark.parametrize(
    ("dtype", "transform", "expected"),
    [
        (torch.float32, LogitTransform(), 11),
        (torch.bfloat16, LogitTransform(), 13),
        (torch.bfloat16, LogitTransform(scale=0.5), 15),
    ],
)
def test_a_chunk_runs_so_many_operators(dtype, transform, expected):
    hidden, weight, _, targets = inputs(dtype)
    counts = []
    for num_chunks in (1, 2):
        with Operators() as operators:
            rows = slice(4 * num_chunks)
            chunked_loss_sum(hidden[rows], weight.detach(), None, targets[rows], transform=transform, most_rows=4)
        counts.append(operators.count)
    assert counts[1] - counts[0] == expected


def test_a_weights_gradient_in_16_bits_is_summed_in_32():
    """300 chunks that each add 1/300 of the gradient: a sum in bf16 would stop growing half-way."""
    rows = 300
    hidden = torch.ones(rows, D, dtype=torch.bfloat16)
    weight = torch.zeros(V, D, dtype=torch.bfloat16, requires_grad=True)
    chunked_loss_sum(hidden, weight, None, torch.zeros(rows, dtype=torch.int64), most_rows=1).backward()
    expected = torch.full((V, D), rows / V)
    expected[0] -= rows
    assert error([weight.grad], [expected]) < 4e-3  # bf16 has 8 bits


def gradient_of_the_unlikely(loss_of, scale):
    """Positions between two likely tokens; all others have a probability of 1e-9, which is 0 in fp16."""
    hidden = torch.eye(D)
    weight = torch.zeros(V, D)
    weight[:D] = weight[D : 2 * D] = 20 * torch.eye(D)
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(hidden, weight, None, torch.arange(D)) / D
    (gradient,) = torch.autograd.grad(loss * scale, weight)
    return [gradient[2 * D :]]


def test_in_fp16_small_gradients_live_by_the_loss_scale():
    scale = torch.tensor(65536.0)
    expected = gradient_of_the_unlikely(lambda *args: whole(*args, LogitTransform()), scale)
    settings = {"gradient_scale": scale / D, "most_rows": 3}
    scaled = gradient_of_the_unlikely(lambda *args: chunked_loss_sum(*args, **settings), scale)
    assert bool(expected[0].all())
    assert error(scaled, expected) < 1e-2
    assert not gradient_of_the_unlikely(lambda *args: chunked_loss_sum(*args, most_rows=3), scale)[0].any()


FAMILIES = {
    **{
        name: TINY[name]
        for name in (
            "llama", "qwen2", "phi", "gpt_neox", "olmo2", "qwen3", "phi3", "starcoder2", "gpt2", "gpt_bigcode", "mistral",
            "mixtral", "gemma2", "gemma3_text", "opt", "falcon", "bloom", "gpt_oss", "gptj", "mpt", "qwen3_moe",
        )
    },
    **dict.fromkeys(("nanochat", "stablelm"), SMALL),
    **dict.fromkeys(("gemma", "glm4"), HEADS),
    "granite": {**SMALL, "logits_scaling": 2.0},
    "granitemoe": {**TINY["granitemoe"], "logits_scaling": 3.0},
    "cohere": {**SMALL, "logit_scale": 0.0625},
    "cohere2": {**TINY["cohere2"], "logit_scale": 0.0625},
    "minicpm3": {
        **SMALL, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip
TWO_LAYERS = {"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2}
WITHOUT_SDPA = ("bloom", "gemma2", "gpt_oss", "gptj", "mpt")  # transformers has none, for capped scores for instance
# What lies between an architecture's body and its logits, where that is more than a matrix product.
HIDDEN_SCALES = {"minicpm3": 8.0}  # 256, where its muP began, over hidden_size
BEHIND_THE_BODY = {
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


def three(*numbers):
    """A batch of three rows, or of some of them, in the families' vocabulary."""
    some = rows([23, 9, 16], vocabulary=120)
    return collate([some[number] for number in numbers or range(3)], pad_id=1)


def loss_and_gradient(model, head, *, autocast=None):
    model.zero_grad()
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = NextToken(head=head).loss(model, three()) / 45
    loss.backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.detach(), torch.cat([each.flatten().float() for each in trained])


def assert_alike(model, head, tolerance, **settings):
    (loss, gradient), (expected, theirs) = (loss_and_gradient(model, each, **settings) for each in (head, None))
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    assert float((gradient - theirs).norm() / theirs.norm()) < tolerance


def llama(kind=LlamaForCausalLM, **settings):
    torch.manual_seed(0)
    return kind(LlamaConfig(**{**SMALL, **TWO_LAYERS, **settings}))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_in_parts_is_the_whole_one_and_padding_changes_no_row(family, small_chunks):
    torch.manual_seed(0)
    sizes = FAMILIES[family]
    depth = {key: layers for key, layers in TWO_LAYERS.items() if key in sizes}
    architecture = AutoConfig.for_model(family, **{**sizes, **depth})
    kernel = "eager" if family in WITHOUT_SDPA else "sdpa"
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation=kernel).eval()
    head = logit_head(model)
    assert isinstance(head, LogitHead)
    assert head.projection is model.get_output_embeddings()
    assert head.hidden_scale == HIDDEN_SCALES.get(family, 1.0)
    assert head.transform == BEHIND_THE_BODY.get(family, LogitTransform())
    assert_alike(model, head, 1e-6)
    with torch.no_grad():
        scores, expected = (NextToken(head=each).scores(model, three()) for each in (head, None))
        alone = torch.cat([NextToken().scores(model, three(number)).loss for number in range(3)])
    torch.testing.assert_close(scores.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores.num_correct, expected.num_correct)
    assert torch.equal(scores.num_supervised, expected.num_supervised)
    torch.testing.assert_close(expected.loss, alone, rtol=1e-5, atol=1e-5)


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
    settings = {"target_modules": "all-linear", "init_lora_weights": False, "use_dora": kind == "dora"}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).train()
    head = logit_head(adapted)
    assert isinstance(head, LogitHead)
    assert_alike(adapted, head, 1e-6)
    assert head.projection.weight.grad is None


def test_an_adapted_head_and_one_that_something_is_hooked_into_are_left_whole():
    adapted = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
    assert logit_head(adapted) == NoLogitHead(reason="the output layer is a Linear of peft, not a plain linear layer")
    model = llama()
    model.lm_head.register_forward_hook(lambda module, given, output: output * 2)
    assert logit_head(model) == NoLogitHead(reason="the output layer has hooks")


whole_forward = LlamaForCausalLM.forward


def altering(change):
    """A forward whose logits something is done to."""

    def forward(model, **inputs):
        output = whole_forward(model, **inputs)
        output.logits = change(model, output.logits)
        return output

    return forward


def shifted(model, input_ids, **inputs):
    return whole_forward(model, input_ids=input_ids + 1, **inputs)


def twice(model, **inputs):
    model.model(**inputs)
    return whole_forward(model, **inputs)


def normed(model, input_ids, **inputs):
    hidden = model.model(input_ids=input_ids).last_hidden_state
    return SimpleNamespace(logits=model.lm_head(hidden - hidden.mean(dim=-1, keepdim=True)))


def fails(model, **inputs):
    raise ValueError("no")


CHANGED = "what the output layer gives is changed in a way that is not known"


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (altering(lambda model, logits: logits.log_softmax(dim=-1)), CHANGED),
        (altering(lambda model, logits: logits[..., :100]), CHANGED),
        (altering(lambda model, logits: logits * (1 + model.training)), "its forward is another one in training"),
        (shifted, "the body is not given the tokens alone"),
        (twice, "its forward calls other modules, too"),
        (normed, "what the body gives is changed before the output layer"),
        (fails, "ValueError in its forward"),
    ],
)
def test_what_is_not_known_is_left_whole_with_a_reason(forward, reason):
    model = llama(type("Altered", (LlamaForCausalLM,), {"forward": forward}))
    assert logit_head(model) == NoLogitHead(reason=f"Altered cannot be run as body and output layer: {reason}")
    assert_no_trace(model)


def assert_no_trace(model):
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


def test_it_needs_no_values_and_leaves_no_trace(small_chunks):
    for values in (torch.device("meta"), FakeTensorMode()):
        with values:
            model = llama()
        head = logit_head(model)
        assert isinstance(head, LogitHead)
        assert_no_trace(model)
    with values:
        NextToken(head=head).loss(model, full_batch(3, 23)).backward()
    assert head.projection.weight.grad.shape == (120, 32)
