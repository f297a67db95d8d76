"""Activations of rows in batches, against one row at a time without padding."""

import numpy as np
import pytest
import torch

from brim.data.tokens import TokenRow, TokenRows
from brim.errors import InputError
from brim.infer import VectorStore, collect_activations, first_vectors, named_layers
from brim.infer.engines import RowsAtOnce

from .families import VOCABULARY, build

WIDTH = 32
LAYERS = [0, "last", "layers.1.mlp", "model.layers.0.self_attn.q_proj", "lm_head"]
WIDTHS = {"0": WIDTH, "last": WIDTH, "layers.1.mlp": WIDTH, "model.layers.0.self_attn.q_proj": WIDTH, "lm_head": 300}


def collect(model, rows, layers, *, pooling="mean", normalize=False, batch_rows=4, folder=None, **on_cpu):
    """What the stores hold in the end, by layer."""
    modules = named_layers(model, layers)
    starts = first_vectors(rows, pooling)
    stores = {name: VectorStore(int(starts[-1]), folder=folder) for name in modules}
    collect_activations(
        model, rows, modules, into=stores, pooling=pooling, normalize=normalize, pad_id=1, batch_rows=batch_rows,
        **on_cpu,
    )  # fmt: skip
    found = {name: np.array(store.read(0, int(starts[-1]))) for name, store in stores.items()}
    for store in stores.values():
        store.__exit__(None, None, None)
    return found


def alone(model, row):
    """The oracle: one row, no padding, no hooks: transformers' own hidden states [L + 1, T, D]."""
    with torch.no_grad():
        output = model(input_ids=torch.from_numpy(row.input_ids[None].astype(np.int64)), output_hidden_states=True)
    return torch.stack(output.hidden_states)[:, 0].numpy(), output.logits[0].numpy()


def num_hooks(model):
    """transformers' own among them, which stay once hidden states were asked for."""
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("batch_rows", [1, 4, 64])
@pytest.mark.parametrize("pooling", ["mean", "last", None])
def test_batches_equal_one_row_alone(model, prompts, on_cpu, pooling, batch_rows):
    found = collect(model, prompts, [0, "last", "lm_head"], pooling=pooling, batch_rows=batch_rows, **on_cpu)
    pool = {"mean": lambda x: x.mean(axis=0, keepdims=True), "last": lambda x: x[-1:], None: lambda x: x}[pooling]
    hidden = [alone(model, row) for row in prompts]
    expected = {
        "0": np.concatenate([pool(states[1]) for states, _ in hidden]),  # 0 of these are the embeddings
        "last": np.concatenate([pool(states[-1]) for states, _ in hidden]),
        "lm_head": np.concatenate([pool(logits) for _, logits in hidden]),
    }
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5 * np.abs(values).max())


@pytest.mark.parametrize("family", ["openai_gpt", "bloom", "gemma2", "opt", "mamba"])
def test_padding_changes_nothing_in_other_families_either(prompts, on_cpu, family):
    """Positions, windows, slopes and states: what stands behind a row's tokens has no part in any of them."""
    other = build(family).eval()
    below = TokenRows.from_rows(
        TokenRow(key=row.key, input_ids=row.input_ids % VOCABULARY, supervised=row.supervised) for row in prompts
    )
    expected = collect(other, below, ["last", 0], batch_rows=1, **on_cpu)
    found = collect(other, below, ["last", 0], batch_rows=11, **on_cpu)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5 * np.abs(values).max())


def test_layers_are_found_by_number_and_by_name(model):
    layers = named_layers(model, [0, "-1", "last", "layers.1.mlp", "model.layers.0", "lm_head"])
    assert layers["0"] is layers["model.layers.0"] is model.model.layers[0]
    assert layers["-1"] is model.model.layers[1]
    assert layers["last"] is model.model
    assert layers["layers.1.mlp"] is model.model.layers[1].mlp
    assert layers["lm_head"] is model.lm_head


def test_layers_of_an_adapted_model_have_the_base_models_names(model):
    import copy

    import peft

    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM"))
    assert named_layers(adapted, ["layers.1.mlp", 0, "last"]).keys() == {"layers.1.mlp", "0", "last"}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["layers.1.mpl"], "the model has no layer 'layers.1.mpl'(.|\n)*did you mean 'layers.1.mlp'?"),
        ([2], "the model has no layer 2(.|\n)*0 to 1, or -1 to -2"),
        ([-3], "the model has no layer -3"),
        ([""], "the model has no layer ''"),
        ([0, "0"], "the layer 0 is named twice"),
        ([], "no layer is named"),
    ],
)
def test_layers_that_are_not_there_are_named_with_the_nearest(model, layers, words):
    with pytest.raises(InputError, match=words):
        named_layers(model, layers)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("layers", "the layer layers is passed 0 times"),
        ("rotary_emb", r"the layer rotary_emb gives a tensor \[1, \d+, \d+\], not a vector for each token"),
    ],
)
def test_layers_without_a_vector_a_token_are_named_and_no_hook_stays(model, prompts, on_cpu, layer, words):
    before = num_hooks(model)
    with pytest.raises(InputError, match=words):
        collect(model, prompts, [layer, 0], batch_rows=2, **on_cpu)
    assert num_hooks(model) == before


def test_normalised_vectors_have_length_1(model, prompts, on_cpu):
    plain = collect(model, prompts, ["last"], **on_cpu)["last"]
    found = collect(model, prompts, ["last"], normalize=True, **on_cpu)["last"]
    np.testing.assert_allclose(found, plain / np.linalg.norm(plain, axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", None])
def test_what_is_kept_on_disk_is_what_is_kept_in_memory(model, prompts, on_cpu, tmp_path, pooling):
    held = collect(model, prompts, [0, "lm_head"], pooling=pooling, **on_cpu)
    kept = collect(model, prompts, [0, "lm_head"], pooling=pooling, folder=tmp_path, **on_cpu)
    for name in held:
        assert held[name].tobytes() == kept[name].tobytes()
    assert list(tmp_path.iterdir()) == []


def test_rows_that_ran_out_of_memory_are_passed_again_in_smaller_batches(model, prompts, on_cpu):
    def scarce(module, inputs, output):
        if len(output[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    expected = collect(model, prompts, [0], batch_rows=2, **on_cpu)["0"]
    at_once, before = RowsAtOnce(8), num_hooks(model)
    hook = model.model.register_forward_hook(scarce)
    try:
        found = collect(model, prompts, [0], batch_rows=at_once, **on_cpu)["0"]
    finally:
        hook.remove()
    assert at_once.num_rows == 2
    np.testing.assert_array_equal(found, expected)
    assert num_hooks(model) == before


def test_bf16_comes_out_as_fp32(model, prompts):
    from brim.models import precision

    on_cpu = {"device": torch.device("cpu"), "precision": precision("bf16-mixed")}
    exact = collect(model, prompts, ["layers.1.mlp"], device=on_cpu["device"], precision=precision("fp32"))
    found = collect(model, prompts, ["layers.1.mlp"], **on_cpu)["layers.1.mlp"]
    assert found.dtype == np.float32
    assert not np.array_equal(found, exact["layers.1.mlp"])
    np.testing.assert_allclose(found, exact["layers.1.mlp"], rtol=0.1, atol=0.1 * np.abs(found).max())


def test_the_models_mode_stays(model, prompts, on_cpu):
    model.train()
    try:
        collect(model, prompts, [0], **on_cpu)
        assert model.training
    finally:
        model.eval()
