"""What CUDA does otherwise than a CPU: casts, accumulation, temporaries, lists of tensors, whole models."""

import warnings
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from tests.memory.traced import Births, gradient_functions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    masking_utils,
    modeling_flash_attention_utils as flash_utils,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from brim.memory.cuda import CudaTarget, FlashAttnPackage, as_on_cuda, cuda_temporaries, foreach_as_on_cuda
from brim.memory.cuda.autocast import FP32, FP32_RESULT, LOWER, PROMOTE, AccumulationInPlace, autocast_as_on_cuda
from brim.memory.cuda.dispatch import cuda_kernels

FAKE = pytest.mark.usefixtures("fake")
TARGET = CudaTarget(compute_capability=(8, 0))
LOW = torch.bfloat16


@pytest.fixture
def autocast():
    with autocast_as_on_cuda(), torch.autocast("cpu", dtype=LOW):
        yield


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.rand(4, 8, dtype=LOW) + 0.5


@pytest.mark.usefixtures("autocast")
def test_what_loses_precision_runs_in_fp32(x):
    weight = torch.ones(8, dtype=LOW)
    results = [
        torch.exp(x), x.log(), x.pow(3), x**2, 2.0**x, torch.rsqrt(x), x.reciprocal(), functional.softplus(x),
        functional.layer_norm(x, (8,), weight, weight), functional.rms_norm(x, (8,)), x.logsumexp(-1),
        functional.softmax(x, -1), x.log_softmax(-1), x.sum(), x.sum(-1), x.prod(), x.cumsum(0),
        torch.linalg.vector_norm(x),
    ]  # fmt: skip
    assert {each.dtype for each in results} == {torch.float32}
    torch.testing.assert_close(functional.softmax(x, -1), functional.softmax(x.float(), -1))
    assert x.sum(-1, dtype=LOW).dtype == LOW  # a dtype that the caller names is kept
    assert torch.arange(4).cumsum(0).dtype == torch.int64
    every = [*FP32, *FP32_RESULT, *PROMOTE, *LOWER]
    assert len(every) == len(set(every))


@pytest.mark.usefixtures("autocast")
def test_products_are_lowered_and_the_rest_is_left_alone(x):
    wide = x.float()
    assert functional.linear(wide, torch.ones(8, 8)).dtype == LOW
    assert torch.einsum("ab,cb->ac", wide, wide).dtype == LOW
    assert torch.mv(wide, torch.ones(8)).dtype == LOW
    assert functional.gelu(x).dtype == LOW
    assert torch.cat([x, wide]).dtype == torch.float32
    assert torch.addcmul(wide, x, x).dtype == torch.float32


def test_cross_entropy_is_cast_in_its_parts_and_outside_the_cpu_casts_as_before(x):
    labels = torch.arange(4)
    narrow = torch.log_softmax(x, -1, dtype=LOW)
    with autocast_as_on_cuda(), torch.autocast("cpu", dtype=LOW):
        loss = functional.cross_entropy(x, labels)
    assert torch.equal(loss, functional.nll_loss(narrow.float(), labels))
    with torch.autocast("cpu", dtype=LOW):
        assert torch.exp(x).dtype == LOW
        assert torch.cat([x, x.float()]).dtype == torch.float32


ADDING = ("add", "index_add", "index_put", "scatter_add", "scatter")
WATCHED = {f"aten::{name}{place}" for name in ADDING for place in ("", "_")}
ROWS = (0, 3, 3)


class Names(TorchDispatchMode):
    """The operators that run, by name, within a backward pass and outside one."""

    def __init__(self):
        super().__init__()
        self.names, self.backward = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_backward = torch._C._current_autograd_node() is not None
        (self.backward if is_backward else self.names).append(func._schema.name)
        return func(*args, **(kwargs or {}))


def residual(h, w):
    y = h + (h @ w).relu()
    return y + (y @ w).relu()


def kept(h, w):
    h.relu().register_hook(lambda grad: None)
    y = h.relu()
    y.retain_grad()
    return y + y.tanh() + h


GRAPHS = {
    "residual": residual,
    "parallel": lambda h, w: h + (h @ w).relu() + (h @ w).tanh(),
    "doubled": lambda h, w: h + h,
    "kept": kept,
    "viewed": lambda h, w: torch.cat([h.view(-1), h.t().reshape(-1), h[:2].reshape(-1)]),
    "selected": lambda h, w: h.index_select(0, torch.tensor(ROWS)),
    "indexed": lambda h, w: h[torch.tensor(ROWS)],
    "gathered": lambda h, w: h.gather(0, torch.tensor(ROWS)[:, None].expand(3, 8)),
    "largest": lambda h, w: h.topk(2).values + (h * 3).max(-1, keepdim=True).values,
}


def made(graph, mode):
    with mode:
        x, w = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
        out = graph(x * 2, w) * 2
        return out, torch.ones_like(out)


def added(graph, in_place):
    with FakeTensorMode() as fake, Names() as seen, in_place:
        out, grad = made(graph, fake)
        out.backward(grad)
    return [name for name in seen.backward if name in WATCHED]


def named(event):
    return event.name.replace("_index_put_impl_", "index_put_")


def is_watched(event):
    return event is not None and named(event) in WATCHED


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_as_autograd_adds_tensors_that_are_not_fake(graph):
    out, grad = made(graph, nullcontext())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        out.backward(grad)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    expected = [named(event) for event in events if is_watched(event) and not is_watched(event.cpu_parent)]
    assert added(graph, AccumulationInPlace()) == expected


@FAKE
def test_temporaries():
    def needed(name, *args):
        return cuda_temporaries(name if "::" in name else f"aten::{name}", args, {})

    def ids(*shape):
        return torch.empty(shape, dtype=torch.int64)

    # The gradient of an embedding is summed in parts in fp32: 4,096 tokens by tens, and one for each of the 1,000 rows
    # of the table; few tokens are added without a sort.
    parts = 409 + 1000
    expected = 8 * (3 * 4096 + 2 * 1000 + parts) + 4 * parts * 64
    grad = torch.empty(2, 2048, 64, dtype=LOW)
    assert needed("embedding_dense_backward", grad, ids(2, 2048), 1000, -1, False) == expected
    assert needed("embedding_dense_backward", torch.empty(1, 3072, 64), ids(1, 3072), 1000, -1, False) == 0
    # Logits of several rows are sorted.
    for shape, num_bytes in (((4096,), 0), ((1, 50_000), 50_000 * 20), ((4, 50_000), 200_000 * 32)):
        assert needed("sort", torch.empty(shape)) == num_bytes
    for shape, num_bytes in (((4, 50_000), 0), ((11, 128_000), 0), ((4, 128_000), 512_000 * (12 + 32))):
        assert needed("topk", torch.empty(shape), 50) == num_bytes  # a few large rows are sorted whole
    # A draw needs noise of the shape of the probabilities.
    assert needed("multinomial", torch.empty(4, 1000), 1) == 16_000
    # Indices are sorted only to accumulate.
    table = torch.empty(100, 8)
    assert needed("index_put_", table, [ids(40)], torch.empty(40, 8)) == 0
    assert needed("index_put_", table, [ids(40)], torch.empty(40, 8), True) == 48 * 40
    # Norms have one part for each chunk of the longest tensor.
    assert needed("_foreach_norm", [torch.empty(65_537, dtype=LOW), torch.empty(3, dtype=LOW)], 2) == 4 * 2 * 2
    assert needed("mm", torch.empty(4, 4), torch.empty(4, 4)) == 0  # nothing beside its workspace
    # An 8-bit weight is multiplied by its scales before the constant.
    weight = torch.empty(64, 128, dtype=torch.int8)
    assert needed("bitsandbytes::int8_vectorwise_dequant", weight, torch.empty(64)) == 4 * 64 * 128


@FAKE
def test_rms_norm_keeps_one_number_a_row_unless_its_weight_has_another_dtype():
    values = torch.empty(4, 16, 64, dtype=LOW, requires_grad=True)
    norm = nn.RMSNorm(64, dtype=LOW)
    with cuda_kernels(TARGET):
        with Births() as forward:
            out = norm(values)
        assert forward.sizes == [2 * 4 * 16 * 64, 4 * 4 * 16]
        out.sum().backward()
        assert (values.grad.shape, values.grad.dtype) == (values.shape, LOW)
        assert norm.weight.grad.shape == (64,)
        with Births() as plain, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Mismatch dtype")  # PyTorch says it once a process
            functional.rms_norm(torch.empty(4, 64, dtype=LOW), (64,), torch.empty(64))
    assert len(plain.sizes) > 2


@FAKE
def test_a_grouped_product_starts_rows_at_multiples_of_16_bytes():
    tokens, experts = torch.empty(24, 64, requires_grad=True), torch.empty(4, 64, 30, requires_grad=True)
    with cuda_kernels(TARGET):
        with Births() as forward:
            out = functional.grouped_mm(tokens, experts, offs=torch.empty(4, dtype=torch.int32))
        assert (out.shape, forward.sizes[-1]) == ((24, 30), 4 * (23 * 32 + 30))
        out.sum().backward()
    assert (tokens.grad.shape, experts.grad.shape) == (tokens.shape, experts.shape)


@FAKE
def test_an_fp16_softmax_in_fp32_copies_nothing():
    with cuda_kernels(TARGET):
        for dtype, sizes in ((torch.float16, [4096]), (LOW, [4096, 4096])):
            scores = torch.empty(32, 32, dtype=dtype, requires_grad=True)
            with Births() as forward:
                out = functional.softmax(scores, dim=-1, dtype=torch.float32)
            assert forward.sizes == sizes
            out.sum().backward()
            assert scores.grad.dtype == dtype


def weights():
    found = [nn.Parameter(torch.empty(4, 4)) for _ in range(3)]
    for each in found:
        each.grad = torch.empty(4, 4)
    return found


@FAKE
def test_optimizers_and_clipping_work_on_lists():
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        with foreach_as_on_cuda(), Names() as seen:
            kind(weights(), lr=0.1).step()
        assert any(each.startswith("aten::_foreach_") for each in seen.names)
        assert "aten::addcdiv_" not in seen.names
    with foreach_as_on_cuda(), Names() as seen:
        clip_grad_norm_(weights(), 1.0)
    assert {"aten::_foreach_norm", "aten::_foreach_mul_"} <= set(seen.names)
    assert "aten::mul_" not in seen.names
    adafactor = torch.optim.Adafactor(weights())
    with foreach_as_on_cuda():
        adafactor.step()  # reads its step
    assert all("row_var" in adafactor.state[each] for each in adafactor.param_groups[0]["params"])
    with Names() as seen:  # outside nothing has changed
        torch.optim.SGD(weights(), lr=0.1).step()
    assert not any("foreach" in each for each in seen.names)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "eos_token_id": 1, "bos_token_id": 1}
SIZES |= {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(head_dim=16, sliding_window=8, **SIZES),
    "mixtral": MixtralConfig(num_local_experts=4, **SIZES),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, eos_token_id=1, bos_token_id=1),
}


def build(name, attention="eager", dtype=LOW):
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention, dtype=dtype)


KERNELS = {"eager": "SoftmaxBackward0", "sdpa": "FlashKernelBackward", "flash": "_FixedBackward"}
# Gemma 2 caps its scores, which PyTorch's kernels do not.
WAYS = [*product(("llama", "gpt2"), KERNELS), ("gemma2", "eager"), ("gemma2", "flash")]


@FAKE
@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_every_weight_gets_a_gradient(name, attention):
    """Kept, checkpointed and reentrantly checkpointed, of one row and of several."""
    package = FlashAttnPackage(target=TARGET) if attention == "flash" else None
    model = build(name, "sdpa" if attention == "sdpa" else "eager").train()
    for reentrant, rows in ((None, 1), (None, 3), (False, 3), (True, 1)):
        if reentrant is not None:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        with as_on_cuda(model, TARGET, flash_attention=package):
            logits = model(input_ids=torch.zeros(rows, 32, dtype=torch.long), use_cache=False).logits
            if reentrant is None:
                assert KERNELS[attention] in gradient_functions(logits)
            logits.float().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters()), (reentrant, rows)
        model.zero_grad()


@FAKE
@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=str)
@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), "_GroupedBackward"), ((7, 5), "grouped_mm_fallback")], ids=str
)
def test_experts_are_one_grouped_product(capability, expected, dtype):
    model = build("mixtral", "sdpa", dtype).train()
    with as_on_cuda(model, CudaTarget(compute_capability=capability)):
        logits = model(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False).logits
        assert any(expected in name for name in gradient_functions(logits)), gradient_functions(logits)
        logits.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@FAKE
@pytest.mark.parametrize("attention", KERNELS)
def test_a_padded_prompt_and_the_next_token(attention):
    package = FlashAttnPackage(target=TARGET) if attention == "flash" else None
    model = build("llama", "sdpa" if attention == "sdpa" else "eager").eval()
    with as_on_cuda(model, TARGET, flash_attention=package), torch.no_grad():
        tokens = torch.zeros(2, 32, dtype=torch.long)
        first = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True)
        mask, cache = torch.ones(2, 33, dtype=torch.long), first.past_key_values
        second = model(input_ids=tokens[:, :1], attention_mask=mask, past_key_values=cache, use_cache=True)
    assert second.logits.shape == (2, 1, 96)
    assert second.past_key_values.get_seq_length() == 33


@FAKE
def test_torch_and_transformers_are_left_as_they_were():
    def replaced():
        theirs = (masking_utils.find_packed_sequence_indices, flash_utils._upad_input)
        kernels = (functional.scaled_dot_product_attention, functional.softmax, functional.rms_norm)
        return *theirs, *kernels, functional.dropout, torch.dropout, set(ALL_ATTENTION_FUNCTIONS.keys())

    before, model = replaced(), build("llama")
    with as_on_cuda(model, TARGET, flash_attention=FlashAttnPackage(target=TARGET)):
        assert model.config._attn_implementation != "eager"
        assert not any(now is was for now, was in zip(replaced(), before, strict=True))
    assert model.config._attn_implementation == "eager"
    assert replaced() == before
