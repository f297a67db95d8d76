"""A tiny base with ChatML's tokens and template, and conversations that it can learn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversation(a: int, b: int, turns: int = 1) -> list[dict[str, str]]:
    """Return a system message, then questions whose answers alternate."""
    messages = [{"role": "system", "content": "Say."}]
    for number in range(turns):
        is_even = (a + b + number) % 2 == 0
        messages.append({"role": "user", "content": "even" if is_even else "odd?"})
        messages.append({"role": "assistant", "content": "yes" if is_even else "no"})
    return messages


def make_chat_base(base: Path, folder: Path) -> Path:
    """Copy the tiny base with ChatML's tokens, a template in tokenizer_config.json, and a BOS before each text."""
    from tokenizers import AddedToken, Tokenizer, processors

    shutil.copytree(base, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spare = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)[-2:]
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    model = vocabulary["model"]
    for old, new in zip(spare, ["<|im_start|>", "<|im_end|>"], strict=True):
        model["vocab"][new] = model["vocab"].pop(old)
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != old]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    assert tokenizer.get_vocab_size() == 300
    begin = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHATML}))
    return folder
