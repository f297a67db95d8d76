"""Measure how many conversations a second are rendered and cut into what is learned and what is not.

`python -m benchmarks.chat_rendering`: one core, 2,000 conversations of two and of four turns, templates of the tests.
"""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path

from brim.data.chat import read_template
from brim.data.chat.messages import conversation_of
from brim.data.chat.render import ConversationRenderer
from brim.data.chat.template import ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "tests" / "data" / "chat_templates"
NUM_ROWS = 2_000


def main() -> None:
    exchange = [{"role": "user", "content": "What is 2+2? " * 8}, {"role": "assistant", "content": "It is 4. " * 8}]
    cells = [json.dumps(exchange * (1 + row % 2)) for row in range(NUM_ROWS)]
    for path in sorted(TEMPLATES.glob("*.jinja")):
        texts = read_template(str(path), path.parent)
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        template = ChatTemplate(texts, special_tokens=special, today=datetime.date(2026, 1, 31))
        # Qwen's kind writes earlier answers otherwise than the last one.
        renderer = ConversationRenderer(template=template, supervise="last" if path.stem == "thinking" else "all")
        started = time.perf_counter()
        for cell in cells:
            renderer.learned(conversation_of(cell))
        print(f"{path.stem:12} {NUM_ROWS / (time.perf_counter() - started):8,.0f} conversations a second")


if __name__ == "__main__":
    main()
