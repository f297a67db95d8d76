"""Activations of rows in batches, against one row at a time without padding."""

import copy

import numpy as np
import peft
import pytest
import torch
from tests.infer.families import ON_CPU, build, rows_of, runs_out

from brim.errors import InputError
from brim.infer import VectorStore, collect_activations, first_vectors, named_layers
from brim.infer.engines import RowsAtOnce
from brim.models import precision
from brim.models.packing import PackedAttention


def collect(model, rows, layers, *, pooling="mean", normalize=False, batches=4, **how):
    """What the stores hold in the end, by layer."""
    modules = named_layers(model, layers)
    num_vectors = int(first_vectors(rows, pooling)[-1])
    stores = {name: VectorStore(num_vectors, folder=None) for name in modules}
    collect_activations(
        model, rows, modules, into=stores, pooling=pooling, normalize=normalize, pad_id=1,
        batches=RowsAtOnce(batches) if isinstance(batches, int) else batches,
        **{**ON_CPU, **how},
    )  # fmt: skip
    return {name: store.read(0, num_vectors) for name, store in stores.items()}


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5 * np.abs(values).max())


def alone(model, row):
    """The oracle: one row, no padding, no hooks: transformers' own hidden states [L + 1, T, D]."""
    with torch.no_grad():
        output = model(input_ids=torch.from_numpy(row.input_ids[None].astype(np.int64)), output_hidden_states=True)
    return torch.stack(output.hidden_states)[:, 0].numpy(), output.logits[0].numpy()


def num_hooks(model):
    """transformers' own among them, which stay once hidden states were asked for."""
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("pooling", ["mean", "last", None])
def test_batches_equal_one_row_alone(model, prompts, pooling):
    pool = {"mean": lambda x: x.mean(axis=0, keepdims=True), "last": lambda x: x[-1:], None: lambda x: x}[pooling]
    hidden = [alone(model, row) for row in prompts]
    expected = {
        "0": np.concatenate([pool(states[1]) for states, _ in hidden]),  # 0 of these are the embeddings
        "last": np.concatenate([pool(states[-1]) for states, _ in hidden]),
        "lm_head": np.concatenate([pool(logits) for _, logits in hidden]),
    }
    for batches in (1, 4, 64):
        found = collect(model, prompts, [0, "last", "lm_head"], pooling=pooling, batches=batches)
        assert_near(found, expected)
    packed = PackedAttention(model)
    assert_near(collect(model, prompts, [0, "last", "lm_head"], pooling=pooling, batches=4, packed=packed), expected)
    unit = collect(model, prompts, ["last"], pooling=pooling, normalize=True, batches=64)["last"]
    np.testing.assert_allclose(unit, found["last"] / np.linalg.norm(found["last"], axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("family", ["openai-gpt", "bloom", "gemma2", "opt", "mamba"])
def test_padding_changes_nothing_in_other_families_either(family):
    """Positions, windows, slopes and states: what stands behind a row's tokens has no part in any of them."""
    other, rows = build(family), rows_of([3, 60, 9, 1, 31, 9, 2, 44, 17, 5, 28])
    expected = collect(other, rows, ["last", 0], batches=1)
    assert_near(collect(other, rows, ["last", 0], batches=11), expected)


def test_layers_are_found_by_number_and_by_name_and_refused_with_the_nearest(model, prompts):
    layers = named_layers(model, [0, "-1", "last", "layers.1.mlp", "model.layers.0", "lm_head"])
    assert layers["0"] is layers["model.layers.0"] is model.model.layers[0]
    assert layers["-1"] is model.model.layers[1]
    assert layers["last"] is model.model
    assert layers["layers.1.mlp"] is model.model.layers[1].mlp
    assert layers["lm_head"] is model.lm_head
    for wanted, words in [
        (["layers.1.mpl"], "the model has no layer 'layers.1.mpl'(.|\n)*did you mean 'layers.1.mlp'?"),
        ([2], "the model has no layer 2(.|\n)*0 to 1, or -1 to -2"),
        ([-3], "the model has no layer -3"),
        ([""], "the model has no layer ''"),
        ([0, "0"], "the layer 0 is named twice"),
        ([], "no layer is named"),
    ]:
        with pytest.raises(InputError, match=words):
            named_layers(model, wanted)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM"))
    assert named_layers(adapted, ["layers.1.mlp", 0, "last"]).keys() == {"layers.1.mlp", "0", "last"}
    for layer, words in [
        ("layers", "the layer layers is passed 0 times"),
        ("rotary_emb", r"the layer rotary_emb gives a tensor \[1, \d+, \d+\], not a vector for each token"),
    ]:
        before = num_hooks(model)
        with pytest.raises(InputError, match=words):
            collect(model, prompts, [layer, 0], batches=2)
        assert num_hooks(model) == before


def test_rows_that_ran_out_of_memory_are_passed_again_in_smaller_batches(model, prompts):
    expected = collect(model, prompts, [0], batches=2)["0"]
    at_once, before = RowsAtOnce(8), num_hooks(model)
    with runs_out(model.model, lambda rows, tokens, number: rows > 3):
        found = collect(model, prompts, [0], batches=at_once)["0"]
    assert at_once.num_rows == 2
    np.testing.assert_array_equal(found, expected)
    assert num_hooks(model) == before


def test_bf16_comes_out_as_fp32_and_the_models_mode_stays(model, prompts):
    exact = collect(model, prompts, ["layers.1.mlp"])["layers.1.mlp"]
    trains = copy.deepcopy(model).train()
    found = collect(trains, prompts, ["layers.1.mlp"], precision=precision("bf16-mixed"))["layers.1.mlp"]
    assert trains.training
    assert found.dtype == np.float32
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, rtol=0.1, atol=0.1 * np.abs(found).max())
