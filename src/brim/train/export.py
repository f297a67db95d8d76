"""The model folder of a run: what PEFT and transformers open."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from brim.batching.oom import is_out_of_memory
from brim.batching.second_try import first_line, second_try
from brim.data.chat_template import TemplateTexts, store_template
from brim.digests import write_manifest
from brim.errors import CheckpointError, OutOfMemoryError, Problem
from brim.files import whole_folder
from brim.models.llm import LLM
from brim.models.quiet import no_library_bars, no_library_warnings

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
)


@no_library_warnings()
def export_model(llm: LLM, path: Path, *, generation: Mapping[str, Any], chat: TemplateTexts | None) -> None:
    """Write the adapter (PEFT's format) or the full model (transformers'), tokenizer, chat template, generation config.

    generation: of transformers' GenerationConfig. chat: the template that was used; None: the base's own.
    Raises CheckpointError when the folder cannot be written, OutOfMemoryError when memory runs out twice.
    """
    try:
        second_try(lambda: _export(llm, path, generation=generation, chat=chat))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            Problem(
                what=f"the model could not be written: {error}",
                where=str(path),
                fix="make room or make the folder writable, then run again with --resume",
            )
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            Problem(
                what=f"memory ran out twice when the model was written: {first_line(error)}",
                where=str(path),
                fix="free memory on this machine, then run again with --resume: what was learned is in the checkpoints",
            )
        ) from None


def _export(llm: LLM, path: Path, *, generation: Mapping[str, Any], chat: TemplateTexts | None) -> None:
    from transformers import GenerationConfig

    with whole_folder(path) as folder, no_library_bars():
        llm.model.save_pretrained(str(folder))
        GenerationConfig(**generation).save_pretrained(str(folder))
        for name in _TOKENIZER_FILES:
            if (llm.folder.path / name).exists():
                shutil.copyfile(llm.folder.path / name, folder / name)
        if chat is not None:
            store_template(chat, folder)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form; the run's own card stands beside
        write_manifest(folder)
