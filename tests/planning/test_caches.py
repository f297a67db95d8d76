"""What planning keeps between runs: entries, traces, plans, and what measured peaks say."""

import importlib.metadata
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest
from tests.batching.cost_examples import linear_costs
from tests.planning.hand_made import MIB, hand_made_plan

from brim.config import DeviceFacts, load_config, resolve
from brim.memory.devices import cpu_device
from brim.memory.events import Work, WorkCount, WorkPlace
from brim.planning.costs import Calibrations, Correction, corrected, time as costs_of_time, versions
from brim.planning.costs.time import RunPeaks, combined, of_run
from brim.planning.costs.traces import Found, Traces
from brim.planning.plan_cache import PlanCache, plan_facts
from brim.storage import Cache, digest, forget_oldest, sealed


def test_what_is_kept_comes_back(tmp_path):
    cache = Cache(tmp_path / "deep" / "folder", "plans")
    assert cache.read("a") is None
    cache.write("a", {"x": [1, 2.5, None]})
    cache.write("a", {"x": [3]})
    cache.write("b", "other")
    assert (cache.read("a"), cache.read("b"), cache.note) == ({"x": [3]}, "other", None)
    assert sorted(path.name for path in (tmp_path / "deep" / "folder" / "plans").iterdir()) == ["a.json", "b.json"]
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1}) != digest({"a": 2})
    assert len(digest({})) == 32


def test_a_damaged_entry_is_said_and_written_anew(tmp_path):
    path = tmp_path / "plans" / "a.json"
    Cache(tmp_path, "plans").write("a", {"bytes": 1})
    kept = path.read_bytes()
    contents = [b"", b'{"x": ', b"\xff\xfe", b"[" * 100_000, b"[]", b"3", b'{"value": 1}']
    changed = [kept.replace(b'"bytes": 1', b'"bytes": ' + value) for value in (b"2", b"NaN", b'"1"', b"null")]
    for content in contents + changed:
        assert content != kept
        path.write_bytes(content)
        cache = Cache(tmp_path, "plans")
        assert cache.read("a") is None
        assert cache.note == f"{path} is damaged, and is not used"
        cache.write("a", 1)
        assert Cache(tmp_path, "plans").read("a") == 1


def test_where_nothing_can_be_written_or_a_folder_is_in_the_way_nothing_fails(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "plans" / "a.json").mkdir(parents=True)
    unwritten, folder = Cache(tmp_path / "file", "plans"), Cache(tmp_path, "plans")
    assert unwritten.read("a") is folder.read("a") is None
    assert folder.note == f"{tmp_path / 'plans' / 'a.json'} cannot be read, and is not used: Is a directory"
    unwritten.write("a", 1)
    unkept = "nothing is kept for later runs: an entry of the cache could not be written: "
    assert unwritten.note.startswith(unkept)
    assert traces_with(FOUND, tmp_path / "file").note.startswith(unkept)


def test_what_was_used_longest_ago_goes(tmp_path):
    def age(name, seconds):
        os.utime(tmp_path / "plans" / f"{name}.json", ns=(10**18 - seconds * 10**9,) * 2)

    cache = Cache(tmp_path, "plans", most_bytes=500)
    for number, name in enumerate("abcd"):
        cache.write(name, "x" * 98)  # 189 bytes with its quotes and checksum
        if number < 2:
            age(name, 100 - number)
    assert sorted(path.stem for path in (tmp_path / "plans").iterdir()) == ["c", "d"]
    age("c", 100)
    age("d", 99)
    cache.read("c")  # what is read is used
    forget_oldest(tmp_path / "plans", most_bytes=200)
    assert [path.stem for path in (tmp_path / "plans").iterdir()] == ["c"]


def test_what_a_killed_write_left_goes_after_a_day(tmp_path):
    """Of brim's kind: the folder of copied data may be a person's home."""
    days = {".a.json.tmp": 2, ".index.tmp": 2, ".index.old": 2, ".b.json.tmp": 0, ".begun.tmp": 2, "mine": 2}
    for name, age in days.items():
        path = tmp_path / "plans" / name
        if "json" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        else:
            path.mkdir(parents=True)
            (path / "embeddings.npy").write_bytes(b"x")
            if name != ".begun.tmp":  # written to just now
                os.utime(path / "embeddings.npy", (time.time() - age * 86_400,) * 2)
        os.utime(path, (time.time() - age * 86_400,) * 2)
    Cache(tmp_path, "plans").write("new", 1)
    names = {path.name for path in (tmp_path / "plans").iterdir()}
    assert names == {*days, "new.json"} - {".a.json.tmp"}
    forget_oldest(tmp_path / "plans", "[!.]*")
    assert {path.name for path in (tmp_path / "plans").iterdir()} == names - {".index.tmp", ".index.old"}


PLACE = WorkPlace(phase="forward", layer=None, module="lm_head", operator="aten.mm", unit="matrix", dtype="bfloat16")
FOUND = {
    (): Found({"static": 9, "unrecorded": 2}, {"update": WorkCount(places={})}),
    (1, 2): Found({"peak": 7}, {"pass": WorkCount(places={})}),
    (3, 40): Found({"peak": 90}, {"pass": WorkCount(places={PLACE: Work(6, 5, 4)})}),
}


class HandMade:
    """A workload of which is found what is given."""

    names = (("static", "unrecorded", "update"), ("peak", "pass"))

    def __init__(self, found, facts):
        self.config, self.facts, self._found = None, facts, found

    def record(self, shape):
        return None

    def find(self, traces, shape):
        traces.recording(shape)
        return self._found[shape]


def open_traces(found, folder, **facts):
    return Traces(HandMade(found, {"architecture": {"model_type": "llama"}, **facts}), cpu_device(), folder=folder)


def traces_with(found, folder):
    """Traces that have found all of it, and kept it."""
    traces = open_traces(found, folder)
    for shape in found:
        traces.find(shape)
    traces.save()
    return traces


def kept_in(folder, **facts):
    """What another run reads: shapes that are not kept are not found."""
    traces, found = open_traces({}, folder, **facts), {}
    for shape in FOUND:
        with suppress(KeyError):
            found[shape] = traces.find(shape)
    return found


def test_traces_are_read_again_for_the_same_facts_and_what_another_run_has_found_meanwhile_stays(tmp_path):
    traces_with(FOUND, tmp_path)
    assert kept_in(tmp_path) == FOUND
    assert kept_in(tmp_path, target="t4") == {}
    one, other = (open_traces(FOUND, tmp_path / "two") for _ in range(2))
    for traces, shape in ((one, (1, 2)), (other, (3, 40))):
        traces.find(shape)
        traces.save()
    assert kept_in(tmp_path / "two") == {shape: FOUND[shape] for shape in ((1, 2), (3, 40))}


def test_a_damaged_file_of_traces_is_said_and_not_used(tmp_path):
    traces_with(FOUND, tmp_path)
    (path,) = tmp_path.rglob("*.json")
    kept = json.dumps(json.loads(path.read_text())["value"])
    of = json.loads(kept)
    for damaged in (
        kept[:-20],
        "[]",
        kept.replace('"static": 9', '"static": "9"'),
        kept.replace('"peak": 90', '"peak": 90.5'),
        kept.replace('"matrix", ', ""),
        kept.replace('"peak": 90', '"peek": 90'),  # it would be looked for in vain while a plan is made
        kept.replace('"pass"', '"path"'),
        kept.replace('"unrecorded": 2', '"unrecorded": 2, "more": 2'),
        json.dumps({**of, "overheads_bytes": [1]}),
        json.dumps({"overheads_bytes": of["overheads_bytes"]}),
    ):
        assert damaged != kept
        path.write_text(sealed(damaged))
        assert kept_in(tmp_path) == {}
        assert open_traces({}, tmp_path).note == f"{path} is damaged, and is not used"
        traces_with(FOUND, tmp_path)
        assert kept_in(tmp_path) == FOUND


def test_brims_own_source_is_part_of_the_versions_and_it_need_not_be_installed(monkeypatch):
    assert {"brim", "torch", "transformers", "peft", "bitsandbytes"} == set(versions())
    assert re.fullmatch("[0-9a-f]{32}", versions()["brim"])
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert facts()["versions"]["release"] == "0+unknown"


BASE = {"model_type": "llama", "hidden_size": 64}


def facts(*, lengths=(3, 5, 8), base=BASE, adapter=None, **trainer):
    trainer = {"type": "finetune", "effective_batch_size": 32, **trainer}
    config = load_config({"base_model": "m", "adapter": "lora", "trainer": trainer}).config
    return plan_facts(resolve(config, DeviceFacts(kind="cpu", bf16=False)).config, base, lengths, adapter=adapter)


def less(plan, num_bytes):
    return replace(plan.budget, limit_bytes=plan.budget.limit_bytes - num_bytes)


@pytest.fixture
def cache(tmp_path):
    """cache(budget, epochs=2): the cache of a plan for these facts."""
    return lambda budget, **other: PlanCache(facts(**other), budget, folder=tmp_path)


def test_a_plan_is_found_by_equal_work_and_no_other(cache):
    plan = hand_made_plan()
    budget = plan.budget
    assert cache(budget).read() is None
    cache(budget).write(plan)
    again = cache(budget, learning_rate=0.5, eval_batch_size=9)
    assert again.read() == replace(plan, from_cache=True)
    again.write(again.read())
    assert cache(budget).read() == replace(plan, from_cache=True)
    others = [{"lengths": (3, 8, 5)}, {"base": {**BASE, "hidden_size": 128}}, {"adapter": {"r": 4}}]
    keys = {"effective_batch_size": 16, "batch_size": 4, "enable_gradient_checkpointing": True, "optimizer": "sgd"}
    for other in [*others, *({key: value} for key, value in keys.items()), {"epochs": 2}]:
        assert cache(budget, **other).read() is None, other
    assert cache(replace(budget, device="l4")).read() is None
    nothing = replace(budget, limit_bytes=0)  # a budget of nothing has a place too
    cache(nothing).write(replace(plan, budget=nothing))
    assert cache(nothing).read() is not None


def test_a_little_more_memory_changes_nothing_and_a_little_less_plans_again(cache, tmp_path):
    plan = hand_made_plan()
    cache(plan.budget).write(plan)
    more, tight = less(plan, -MIB), less(plan, MIB)
    assert cache(more).read().budget == more
    assert cache(tight).read() is None
    cache(tight).write(replace(plan, budget=tight))
    assert cache(more).read() is not None  # the same file
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_a_plan_that_no_limit_cuts_is_used_under_any_budget_that_it_fits(cache):
    plan = hand_made_plan()
    chosen = replace(plan.chosen, cap_binds=False)
    # One for which others were too large is not used under a larger budget.
    cache(plan.budget).write(replace(plan, chosen=chosen))
    assert cache(less(plan, -1024 * MIB)).read() is None
    plan = replace(plan, chosen=chosen, candidates=(chosen,))  # the first strategy, as if there were no limit
    cache(plan.budget).write(plan)
    spare_bytes = plan.budget.limit_bytes - plan.budget.margin_bytes - chosen.total_bytes
    for less_bytes in (-40 * MIB * 1024, MIB, spare_bytes):
        found = cache(less(plan, less_bytes)).read()
        assert found.budget == less(plan, less_bytes)
        assert found.chosen.cap_bytes == chosen.cap_bytes - max(less_bytes, 0)
        assert found.candidates == (found.chosen,)
        assert replace(found.chosen, cap_bytes=chosen.cap_bytes) == chosen
    assert cache(less(plan, spare_bytes + 1)).read() is None


def test_a_plan_that_was_measured_to_promise_too_much_is_not_used_nor_what_is_not_a_plan(cache, tmp_path):
    plan = hand_made_plan()
    plan = replace(plan, costs=replace(plan.costs, scale=1.2))
    cache(plan.budget).write(plan)
    # It runs as it did, within 1% of what was measured, too.
    assert [cache(plan.budget).read(scale=scale) is not None for scale in (0.7, 1.21, 1.22)] == [True, True, False]
    (path,) = (tmp_path / "plans").iterdir()
    for content in ("[]", "{}", '{"chosen": 3}', "3"):
        path.write_text(sealed(content))
        damaged = cache(plan.budget)
        assert damaged.read() is None
        assert damaged.note == f"{path} is damaged, and is not used"


STATIC = 1000
DEVICE = {"device": "t4", "model": {"layers": 3}}


def scale_of(*pairs, **keys):
    return of_run(pairs, static_bytes=STATIC, **keys)


def run(scale, outside=None):
    return RunPeaks(scale=scale, outside_bytes=outside)


def test_what_the_shapes_add_is_compared_and_the_most_counts(monkeypatch):
    # A few megabytes say nothing.
    assert scale_of((STATIC + 63 * MIB, STATIC + 90 * MIB)) is None
    assert scale_of((STATIC + 64 * MIB, STATIC + 80 * MIB)).scale == 1.25
    monkeypatch.setattr(costs_of_time, "TELLING_BYTES", 1)
    assert scale_of((3000, 3200), (2900, 2900), (2000, 1900), outside_bytes=77) == run(1.1, 77)
    # Peaks that are small beside the largest do not count, nor do shapes that add next to nothing.
    assert scale_of((3000, 3000), (1900, 9000)) == run(1.0)
    assert scale_of() is scale_of((1040, 1080)) is scale_of((900, 950)) is None
    assert [scale_of((2000, measured)).scale for measured in (100_000, 1100)] == [2.0, 0.5]  # bounded
    # A probe that takes more counts at once, and one that takes less does not.
    costs = linear_costs(static_bytes=STATIC, scale=1.04)
    assert corrected(costs, (3000, 3400)) == replace(costs, scale=1.2)
    assert corrected(costs, (3000, 2000)) == corrected(costs, (1040, 1080)) == costs


def test_the_median_of_the_newest_eight_runs_counts_and_of_two_the_larger():
    assert combined([run(1.0), run(1.9), run(1.1)]).scale == 1.1
    assert combined([run(1.05), run(1.2)]).scale == 1.2
    assert combined([run(0.9, 5), run(0.8, 9), run(0.9)]) == Correction(scale=0.9, outside_bytes=9, num_runs=3)
    assert combined([run(2.0)] * 20 + [run(1.1)] * 8) == Correction(scale=1.1, num_runs=8)
    assert combined([run(1.008)] * 3) == Correction(scale=1.0, num_runs=3)  # a hundredth is no correction
    assert combined([]) == Correction()
    assert Correction().reason == ""
    assert Correction(scale=1.04, num_runs=3).reason == "measured in 3 runs: ×1.04"


def test_runs_are_kept_by_their_facts(tmp_path):
    def learned(scale):
        calibrations = Calibrations(tmp_path, DEVICE)
        calibrations.learn([(100 * MIB, round(scale * 100 * MIB))], static_bytes=0, outside_bytes=40)
        return Calibrations(tmp_path, DEVICE).correction()

    assert [learned(scale).scale for scale in (1.2, 1.1, 1.3)] == pytest.approx([1.2, 1.2, 1.2], rel=1e-7)
    now = Calibrations(tmp_path, DEVICE)
    assert (now.correction().outside_bytes, now.correction().num_runs) == (40, 3)
    now.learn([(900, 950)], static_bytes=STATIC)  # which says nothing
    assert Calibrations(tmp_path, DEVICE).correction().num_runs == 3
    assert Calibrations(tmp_path, {**DEVICE, "device": "l4"}).correction() == Correction()
    for saved in ([1], {"a": 1}, [{"scale": 9.0, "outside_bytes": None}], [{"scale": None}], 7):
        Cache(tmp_path, "calibrations").write(digest(DEVICE), saved)
        calibrations = Calibrations(tmp_path, DEVICE)
        assert calibrations.correction() == Correction()
        assert "is damaged" in calibrations.note
        assert learned(1.5).scale == 1.5
