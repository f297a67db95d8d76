"""What the pages say is so: links, commands and their flags, tables, and figures that the code or a benchmark knows."""

from __future__ import annotations

import inspect
import io
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from benchmarks.memory_known import KNOWN
from docs.figures import figures_page
from docs.generate import reference_page
from faults.page import PAGE as RELIABILITY, with_table
from faults.report import REPORT, read_report
from faults.workshop import CONFIG, DATA, ROWS, as_yaml
from rich.console import Console
from tests.batching.test_finder import Device
from tests.docs.pages import PAGES, PROSE, ROOT, blocks, helped, rows
from tests.hand_made_proof import PROOF
from tests.infer.families import FAMILIES
from tests.planning.hand_made import plan_that_moves

import brim
from brim.batching import NUM_GROUPS, BatchSchedule, NoiseMeasurement, NoiseScale
from brim.batching.memory import Search, find_batch_size
from brim.batching.memory.finder import MOST_CORRECTIONS
from brim.batching.microbatch import FIRST_WAIT_STEPS
from brim.cli.app import VERBS
from brim.cli.runs import print_proof
from brim.config import WAYS, load_config, parse_batch_steps
from brim.config.introspect import all_keys
from brim.config.prompts import CONTEXT, LABELS, MAX_STEPS, SAMPLE, TASK, characters_within
from brim.config.schema import GenerationConfig, PromptConfig
from brim.data import nearest_examples
from brim.data.advice.finding import ADVICE
from brim.data.labels import MOST_LABELS
from brim.data.prompts import as_sample
from brim.data.read import EVENTS, spill
from brim.data.read.encoding import HEAD_BYTES
from brim.memory import MemoryPrediction
from brim.memory.variants import variants
from brim.planning import TrainingPlan
from brim.report import LOOKS, plan_table
from brim.storage import Cache
from brim.train.job import MEASURED_EVERY
from brim.train.optimizer import batch_factor
from brim.train.schedule import first_size
from brim.units import format_bytes, parse_bytes, parse_duration
from brim.workflows.verify_resume.comparison import promise_of

RESULTS = ROOT / "benchmarks" / "results"
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}


def test_links_lead_somewhere():
    for name, page in PAGES.items():
        folder = ROOT if name == "README" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
            assert (folder / target).exists(), (name, target)


def test_every_command_has_the_flags_that_are_shown():
    seen = set()
    for page in PAGES.values():
        for verb, rest in re.findall(r"^(?:\$ )?brim ([a-z-]+)(.*)$", page, flags=re.MULTILINE):
            if verb in VERBS:
                seen.add(verb)
                assert [flag for flag in re.findall(r"(?<!\w)--[a-z-]+", rest) if flag not in helped(verb)] == []
    assert seen >= {"memory", "plan", "check", "train", "compare", "evaluate", "predict", "embed", "chat", "schema"}
    flags = set(re.findall(r"(?<!\w)--[a-z][a-z-]+", PAGES["compare"])) - {"--against"}  # of `brim evaluate`
    assert flags == {"--dataset", "--seeds", "--output-directory", "--resume", "--gpus", "--markdown", "--json"}
    assert all(flag in helped("compare") for flag in flags)
    targets = set(re.findall(r"make ([a-z-]+)", PAGES["README"])) | {"faults", "docs"}
    assert {"demo", "test"} <= targets
    made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert targets <= set(made)
    assert "`make faults`" in PAGES["reliability"]


def test_figures_are_those_of_the_code():
    noise, noise_steps = NoiseScale(), 0
    while noise.rows is None:
        noise = noise.after(NoiseMeasurement(squared_gradient=1.0, gradient_variance=4.0))
        noise_steps += 1
    words = {number: word for word, number in NUMBERS.items()}
    for name, figure in (
        ("batch-schedules", f"up to {words[NUM_GROUPS]} groups"),
        ("batch-schedules", f"null until {words[noise_steps]} steps"),
        ("batch-schedules", f"every {['ninth', 'tenth'][MEASURED_EVERY - 9]} update"),
        ("batch-schedules", f"0.999 at 64 rows is {0.999 ** (16 / 64):.5f} at 16"),
        ("categories", f"{MOST_LABELS:,} labels"),
        ("categories", f"{MAX_STEPS:,} steps"),
        ("categories", f"{characters_within(r'.*x', MAX_STEPS):,} with one such repeat"),
        ("categories", f"{characters_within(r'.*x.*', MAX_STEPS):,} with two"),
        ("data", f"The first {format_bytes(HEAD_BYTES).replace('.0', '')} decide"),
        ("engines", f"tiny models of {len({family.partition(' ')[0] for family in FAMILIES})} families"),
        ("finding-a-batch-size", f"at most {words[MOST_CORRECTIONS]} times"),
        ("planning", f"After {FIRST_WAIT_STEPS} clean steps in a row"),
        ("prompting", as_sample("größe")),
    ):
        assert figure in PROSE[name], name


def test_pages_that_a_program_writes_are_fresh_and_the_readme_is_a_page():
    assert PAGES["configuration"] == reference_page(), "run `make docs`"
    assert PAGES["figures"] == figures_page(), "run `make docs`"
    assert len(PAGES["README"]) <= 8000


def test_what_is_named_exists():
    events = set(re.findall(r"`((?:cut|dropped)_\w+)`", PAGES["bad-rows"]))
    assert {"dropped_bad", "dropped_overlong"} < events <= set(EVENTS)
    keys = set(re.findall(r"`((?:chat|preprocessing)\.[a-z_]+)", PAGES["chat"]))
    assert {"chat.supervise", "chat.template", "chat.date", "chat.tools"} <= keys
    assert keys <= {".".join(key.path) for key in all_keys()}
    placeholders = set(re.findall(r"^\| `\{(__\w+__)\}`", PAGES["prompting"], re.MULTILINE))
    assert placeholders == {SAMPLE, TASK, CONTEXT, LABELS}
    assert set(PromptConfig.model_fields) <= set(re.findall(r"`(?:prompt\.)?(\w+)`", PAGES["prompting"]))
    for name in ("find_batch_size", "Prober", "Probe", "errors.NothingFitsError"):
        assert f"brim.{name}" in PAGES["finding-a-batch-size"]
    public = "".join(names for _, names in rows("python", "## What is public"))
    assert set(re.findall(r"`(\w+)`", public)) == set(brim.__all__)
    rare = {
        name.strip("`"): getattr(brim.errors, kind.strip("`")) for name, kind, _ in rows("python", "`brim.errors`:")
    }
    tree = {name: kind for name, kind in vars(brim.errors).items() if name.endswith("Error")}
    assert rare == {name: tree[name].__base__ for name in rare}
    assert set(tree) == set(rare) | set(brim.__all__) & set(tree)
    (session,) = blocks("memory")
    assert set(re.findall(r"prediction\.([a-z_]+)", session)) <= set(MemoryPrediction.__dataclass_fields__)
    assert re.findall(r"^\| `(\w+)` \|", PAGES["data-advice"], flags=re.MULTILINE) == list(ADVICE), "in their order"
    (session,) = blocks("README")
    compile(session, "README.md", "exec")
    assert all(callable(getattr(brim.Model, name)) for name in re.findall(r"model\.([a-z]+)\(", session))


def test_batch_schedules():
    page, prose = PAGES["batch-schedules"], PROSE["batch-schedules"]
    (table,) = re.findall(r"^\| you write \|.*?\n\n", page, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(WAYS)
    final, first = map(int, re.findall(r"effective_batch_size: (\d+) .*\n.*from a quarter of it, (\d+)", page)[0])
    assert first_size(final) == first
    lengths = page.split("## Lengths")[1].split("\n\n")[2]
    units = {parse_duration(text).unit for text in re.findall(r"`([\d.e]+[a-z]+)`", lengths)}
    assert units == {"dur", "ep", "sp", "tok", "ba"}
    ramps = re.findall(r"^\| `(\w+)`(?:, `increment: (\d+)`)? \| (\d[\d, a-z]+) \|", page, flags=re.MULTILINE)
    shapes = {
        "doubling": BatchSchedule.doubling,
        "equal_steps": BatchSchedule.equal_steps,
        "linear": BatchSchedule.linear,
    }
    assert [shape for shape, *_ in ramps] == list(shapes)
    for shape, increment, said in ramps:
        options = {"increment": int(increment)} if increment else {}
        phases = shapes[shape](initial=6, final=20, length_samples=1200, **options).phases
        assert ", ".join(f"{phase.size} from {phase.first_sample:,}" for phase in phases) == said
    (ours,) = re.findall(r"`\"(0tok.*?)\"` here", prose)
    (theirs,) = re.findall(r"step-batch-size-schedule \"(.*?)\"`", prose)  # Megatron's
    assert [(int(start.amount), size) for start, size in parse_batch_steps(ours)] == [
        (int(start.replace("B", "000000000")), int(size)) for start, size in (p.split(":") for p in theirs.split())
    ]
    assert batch_factor("sqrt", size=16, final_size=64) == 0.5


def test_the_engines_and_their_flip_rates():
    (values,) = re.findall(r"engine: auto +# or (.*)", PAGES["engines"])
    named = re.findall(r"^\| `(\w+)` \| ", PAGES["engines"], flags=re.MULTILINE)
    assert named == values.split(", ")
    assert set(GenerationConfig.model_fields["engine"].annotation.__args__) == {"auto", *named}
    record = json.loads((RESULTS / "flip_rate.json").read_text(encoding="utf-8"))
    flipped = {(each["precision"], each["engine"]): each["num_flipped"] for each in record["engines"]}
    num_rows, bf16 = record["engines"][0]["num_rows"], "bf16-true"
    assert {number for (precision, _), number in flipped.items() if precision == "fp32"} == {0}
    assert (
        f"of {num_rows} real prompts and up to {record['new_tokens']} tokens each, {flipped[bf16, 'slots']} texts of "
        f"`slots` and {flipped[bf16, 'static']} of `static`"
    ) in PROSE["engines"]


def test_the_searches_for_a_batch_size():
    ways = PAGES["finding-a-batch-size"].split("## The ways")[1].split("## ")[0]
    table = re.findall(r"^\| `(\w+)` \|.*\| ([\d, ]+) \| (\d+) \| (\d+) \|$", ways, flags=re.MULTILINE)
    assert sorted(way for way, *_ in table) == sorted(get_args(Search))
    for way, sizes, num_out_of_memory, answer in table:
        device = Device(capacity=1000 + 10 * 100)
        found = find_batch_size(device, how=way, most=1024, bytes_of=device.peak, limit_bytes=device.capacity)
        assert ", ".join(map(str, device.sizes)) == sizes
        assert (found.num_out_of_memory, found.size) == (int(num_out_of_memory), int(answer))
    results = json.loads((RESULTS / "batching_search.json").read_text(encoding="utf-8"))["contenders"]
    assert [row[1:] for row in rows("finding-a-batch-size", "## Measured")] == [
        [
            f"{each['out_of_memory']['sum']:,}",
            f"{each['probes']['median']:.0f} ({each['probes']['most']})",
            f"{each['share_of_largest']['median']:.1%} ({each['share_of_largest']['least']:.1%})",
        ]
        for each in results.values()
    ]
    predict, page = results["brim predict"], PAGES["finding-a-batch-size"]
    assert f"one probe in {predict['cases_of_one_probe_without_out_of_memory']} cases" in page
    assert f"largest size in {predict['cases_at_98_percent']} of them" in page


def test_the_memory_that_people_know_is_that_of_the_benchmark_and_the_lines_and_ways_are_brims():
    table = PAGES["memory"].split("### Figures that people know")[1].split("## Limits")[0]
    written = json.loads((RESULTS / "memory_known.json").read_text(encoding="utf-8"))["figures"]
    assert [figure["name"] for figure in written] == [known.name for known in KNOWN]
    for known, figure in zip(KNOWN, written, strict=True):
        assert (figure["command"], figure["why"]) == (known.command, known.why)
        assert known.command in table
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {known.name} |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        known_gib, brim_gib = (f"{each / 2**30:.1f}" for each in (known.num_bytes, figure["brim_bytes"]))
        assert (cells[2], cells[3].split()[0]) == (known_gib, brim_gib)
    assert [row[0] for row in rows("memory", "## What the table says")] == [look.label for look in LOOKS.values()]
    there = variants(load_config({"base_model": "base", "trainer": {"type": "finetune"}}).config)
    for row, way in zip(rows("memory", "`--compare` changes"), there, strict=True):
        quantization = way.config.quantization
        bits = "null" if quantization is None else f"`{{bits: {quantization.bits}}}`"
        assert (row[0], row[3]) == (way.name, bits)
        assert row[1].startswith(f"`{way.config.precision}`")
        assert (row[2] == "null") == (way.config.adapter is None)


def test_the_columns_and_fields_of_a_plan():
    printed = io.StringIO()
    Console(width=80, file=printed).print(plan_table(plan_that_moves(), title="m"))
    tables = re.findall(r"\| column \| what it is \|\n\| --- \| --- \|\n((?:\|.*\n)+)", PAGES["planning"])
    assert len(tables) == 2
    for first, begin, table in (("checkpointing", 2, tables[0]), ("phase", 0, tables[1])):
        header = next(line for line in printed.getvalue().splitlines() if line.startswith(first))
        named = ", ".join(re.findall(r"^\| ([^|]+) \|", table, flags=re.MULTILINE))
        assert re.split(r" {2,}", header.strip())[begin:] == named.split(", ")
    (named,) = re.findall(r"^\| `plan` \| (.*) \|$", PAGES["planning"], flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", named)) <= {field.name for field in fields(TrainingPlan)}
    named = re.search(r"batch_search: (\w+) +# or (.*)", PAGES["planning"])
    assert {named[1], *named[2].split(", ")} == set(get_args(Search))


def test_observers_and_who_says_something_and_the_options_of_an_adaptive_step():
    described = inspect.getdoc(brim.AdaptiveStep)
    for name in inspect.signature(brim.AdaptiveStep).parameters:
        assert re.search(rf"^{name}: ", described, flags=re.MULTILINE), name
        assert name in ("model", "loss") or re.search(rf"`{name}|{name}=", PAGES["own-loop"]), name
    page = PAGES["python"]
    told = dict(re.findall(r"^\| `(start|write|close)` \|.*\| (.*) \|$", page, flags=re.MULTILINE))
    assert list(told) == [name for name in vars(brim.Observer) if name in ("start", "write", "close")]
    for name in ("first_step", "total_steps", "total_samples"):
        assert name in inspect.signature(brim.Observer.start).parameters
        assert f"`{name}`" in told["start"]
    named = re.search(r"So it is with (.*?)\.\n", page, flags=re.DOTALL)[1]
    faces = {name: getattr(brim.Model, name) for name in vars(brim.Model) if not name.startswith("_")}
    faces |= {f"brim.{name}": getattr(brim, name) for name in ("plan", "compare", "verify_resume", "predict_memory")}
    for name, face in faces.items():
        has_say = callable(face) and "say" in inspect.signature(face).parameters
        assert has_say == (f"`{name}`" in named), name


@pytest.mark.skipif(not REPORT.exists(), reason="the campaign has not been run yet")
def test_the_table_of_faults_is_the_reports_and_nothing_failed():
    page, report = RELIABILITY.read_text(encoding="utf-8"), read_report()
    assert page == with_table(page, report), "run `python -m faults.page`"
    failed = {name: fault["rows"] for name, fault in report["faults"].items()}
    assert all(row["failed"] == 0 for each in failed.values() for row in each.values())
    assert "/tmp/" not in json.dumps(report)


def test_the_table_and_the_tolerances_of_verify_resume(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = PAGES["verify-resume"]
    (block,) = re.findall(r"^```\n\$ brim verify-resume results/demo\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    print_proof(PROOF)
    assert block == capsys.readouterr().out
    trainer = {"optimizer": {"type": "adamw"}, "dropout_by_row": False}
    for words, settings in (
        ("fp32, LoRA or SGD", {"precision": "fp32", "adapter": {"r": 8}}),
        ("fp32, other", {"precision": "fp32"}),
        ("bf16, fp16, 4 and 8 bits", {"precision": "bf16-mixed"}),
    ):
        promise = promise_of({"trainer": trainer, **settings}, device="a GPU", ran_out_of_memory=False)
        (tolerance,) = re.findall(rf"(\S+) \({words}\)", page)
        assert float(tolerance) == promise.loss_tolerance


def test_all_that_runs_keep_in_the_cache_has_a_budget_that_the_page_states(brim, tiny_base, tmp_path, monkeypatch):
    table = rows("planning", "## What is kept for later runs")
    stated = {kind.strip("`"): parse_bytes(most.replace(" ", "")) for kind, _, most in table}
    small = inspect.signature(Cache).parameters["most_bytes"].default
    caches = ("traces", "plans", "calibrations", "generation-proofs")
    large = {"retrieval": nearest_examples._MOST_KEPT_BYTES, "*.arrow": spill.MOST_KEPT_BYTES}
    assert stated == {**dict.fromkeys(caches, small), **large}
    assert f"at most {sum(stated.values()) / 2**30:g} GiB" in PROSE["planning"]
    monkeypatch.setattr(spill, "SPILL_BYTES", 100)  # so that a copy is kept
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(as_yaml({**CONFIG, "base_model": str(tiny_base)}))
    Path(DATA).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    told = ("trainer.batch_size=auto", "--dataset", DATA)
    assert brim("train", "config.yaml", *told, "--output-directory", "run").code == 0
    assert brim("predict", "run", *told, "--output", "predicted.jsonl").code == 0
    kept = list((tmp_path / "cache").iterdir())
    assert {path.name if path.is_dir() else f"*{path.suffix}" for path in kept} <= stated.keys()
    assert {"traces", "plans"} < {path.name for path in kept}
    assert any(path.suffix == ".arrow" for path in kept)
