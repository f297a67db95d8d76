"""Labels as tokens, compared with what a tokenizer makes of them at the end of a prompt."""

from __future__ import annotations

import json

import pytest

from brim.config import load_config
from brim.data.tokens import label_room, label_tokens, load_encoder
from brim.errors import ConfigError
from brim.models import locate

LABELS = ("positive", "negative", "very positive", "1", "ñandú", "好")
TEXTS = ["It was positive: a very positive day.", "negative. The label is negative, 1 of 2"] * 20


def _bytes(folder):
    """Words with the space before them, as in GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )


def _pieces(folder):
    """A space put before every text, as in Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["</s>", "<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    return tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=special, max_token_length=9)


@pytest.fixture(scope="module", params=[_bytes, _pieces], ids=["words with a space", "a space before every text"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer, trainer = request.param(folder)
    trainer.show_progress = False
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Bytes are written as such, although the trainer took them for special tokens.
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_encoder(locate(str(folder), initialize="random"))


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(("prompt", "space"), [("ASSISTANT:", " "), ("the label is\n", ""), ("the label (", "")])
def test_tokens_are_those_of_the_label_behind_a_prompt(tokenizer, label, prompt, space):
    [before], [whole] = (tokenizer.encode([text], special_tokens=False) for text in (prompt, prompt + space + label))
    assert whole[: len(before)] == before
    assert tuple(whole[len(before) :]) in label_tokens(LABELS, tokenizer)[label]


def test_tokens_are_read_as_the_label(tokenizer):
    made = label_tokens(LABELS, tokenizer)
    assert tuple(made) == LABELS
    for label, forms in made.items():
        assert len(forms) == len(set(forms)) == 2
        assert {tokenizer.decode(form, skip_special_tokens=True).strip() for form in forms} == {label}


@pytest.mark.parametrize("is_constrained", [True, False])
def test_room_for_the_longest_label_and_its_end(tokenizer, is_constrained):
    rules = {label: {"type": "contains", "value": label} for label in ("very positive", "1")}
    decoder = {"match": rules, "constrain_to_vocabulary": is_constrained}
    feature = {"name": "a", "type": "category", "preprocessing": {"fallback_label": "1"}, "decoder": decoder}
    config = load_config({"base_model": "base", "output_features": [feature]}).config
    longest = max(map(len, label_tokens(["very positive"], tokenizer)["very positive"]))
    assert label_room(config, tokenizer) == (longest + 1 if is_constrained else None)


def test_what_cannot_be_written_is_named(tokenizer):
    with pytest.raises(ConfigError) as caught:
        label_tokens(["positive", "</s>"], tokenizer)
    assert [problem.what for problem in caught.value.problems] == [
        "the base model's tokenizer cannot write the label '</s>'"
    ]
