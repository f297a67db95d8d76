"""docs/engines.md: its engines are those of the configuration, and its figures those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ruamel.yaml import YAML
from tests.infer.families import FAMILIES, MISLED

from brim.config import load_config
from brim.config.schema import GenerationConfig
from brim.planning import engines as engine_choice

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def test_the_configuration_is_the_default_one():
    (written,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    config = load_config({"base_model": "base", **YAML(typ="safe").load(written)}).config
    assert config == load_config({"base_model": "base"}).config


def test_each_engine_is_explained():
    (values,) = re.findall(r"engine: auto +# or (.*)", PAGE)
    named = re.findall(r"^\| `(\w+)` \| ", PAGE, flags=re.MULTILINE)
    assert ["auto", *named] == ["auto", *values.split(", ")]
    assert set(GenerationConfig.model_fields["engine"].annotation.__args__) == {"auto", *named}


def test_what_measuring_may_cost_is_as_it_is():
    assert f"no more than {engine_choice._SHARE_OF_RUN:.0%} of the job, and {engine_choice.MOST_S:.0f} seconds" in TEXT
    assert f"more than {engine_choice._LEAST_GAIN - 1:.0%} faster" in TEXT


def test_the_families_are_counted():
    assert f"tiny models of {len({name for name, _ in FAMILIES.values()})} families" in TEXT
    assert {"rwkv", "minimax"} == MISLED


def test_the_flip_rates_are_those_that_were_measured():
    record = json.loads((ROOT / "benchmarks" / "results" / "flip_rate.json").read_text(encoding="utf-8"))
    flipped = {(each["precision"], each["engine"]): each["num_flipped"] for each in record["engines"]}
    rows, bf16 = record["engines"][0]["num_rows"], "bf16-true"
    assert {count for (precision, _), count in flipped.items() if precision == "fp32"} == {0}
    assert (
        f"of {rows} real prompts and up to {record['new_tokens']} tokens each, {flipped[bf16, 'slots']} texts of "
        f"`slots`, {flipped[bf16, 'static']} of `static` and {flipped[bf16, 'paged']} of `paged`"
    ) in TEXT
