"""The schema agrees with the libraries whose keys it takes over, explains every key, and so does the page of all keys."""

import inspect
import re

import pydantic
import pytest
import torch
from docs.generate import EXAMPLE, reference_page

from brim.config import json_schema, load_config
from brim.config.foreign import foreign_keys
from brim.config.introspect import all_keys, expected
from brim.config.ludwig import unsupported_keys
from brim.config.schema import AdamWConfig, Config, GenerationConfig, SGDConfig
from brim.config.schema.optimizer import AdafactorConfig, AdamConfig


def test_optimizers_have_torchs_keys():
    for section in (AdamConfig, AdamWConfig, SGDConfig, AdafactorConfig):
        optimizer = getattr(torch.optim, section.__name__.removesuffix("Config"))
        theirs = inspect.signature(optimizer.__init__).parameters
        ours = {key: field.default for key, field in section.model_fields.items() if key != "type"}
        assert ours.keys() <= theirs.keys()
        differing = {key for key, default in ours.items() if theirs[key].default != default}
        assert differing == ({"weight_decay"} if section is AdamWConfig else set())


def test_transformers_knows_every_generation_key():
    from transformers import GenerationConfig as Theirs

    assert set(GenerationConfig.model_fields) - {"engine", "merge_adapter"} <= set(Theirs().__dict__)


def test_every_key_is_explained():
    for key in all_keys():
        assert re.fullmatch(r"[A-Z`(].*[.)]", key.description, re.DOTALL), key.path
        assert expected(key.field), key.path
        assert not set(key.description) & set("\n\t"), key.path


def test_a_configuration_is_frozen(minimal):
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Config.model_validate(minimal()).base_model = "other"


def test_the_json_schema_describes_every_property():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["base_model"]
    definitions = schema["$defs"]
    for section in (schema, *definitions.values()):
        assert section["additionalProperties"] is False
        for name, described in section["properties"].items():
            target = definitions[described["$ref"].rsplit("/", 1)[1]] if "$ref" in described else {}
            assert described.get("description") or target.get("description"), name
    assert set(re.findall(r"#/\$defs/(\w+)", str(schema))) == set(definitions)


def test_the_json_schema_allows_bare_types_and_tells_types_apart():
    schema = json_schema()
    definitions = schema["$defs"]
    assert schema["properties"]["adapter"]["anyOf"][0] == {"type": "string", "enum": ["lora"]}
    assert definitions["FinetuneTrainer"]["properties"]["batch_rampup"]["anyOf"][0] == {"type": "string"}
    assert "type" in definitions["FinetuneTrainer"]["required"]
    assert "type" not in definitions["NoTrainer"].get("required", [])
    assert definitions["HashSplit"]["required"] == ["column", "type"]


def test_the_example_loads_and_every_key_is_on_the_page(file):
    assert load_config(file(EXAMPLE)).notes == ()
    page = reference_page()
    tables = page.split("\n## ")
    for key in all_keys():
        heading = "`" + ".".join(key.path[:-1]) + "`" if len(key.path) > 1 else "The root"
        assert f"\n| `{key.name}` |" in next(part for part in tables if part.startswith(heading)), key.path
    assert all(f"`{entry.key}`" in page for entry in unsupported_keys())
    assert all(f"`{name}`" in page for foreign in foreign_keys() for name in foreign.names)


def test_links_lead_to_headings_and_rows_of_tables_have_equal_numbers_of_cells():
    page = reference_page()
    headings = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page, re.M)}
    links = set(re.findall(r"\]\(#([^)]*)\)", page))
    assert links
    assert links <= headings
    before = 0
    for line in page.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert before in (0, cells) or cells == 0, line
        before = cells
