"""Predictions that are gone on with: the same files as in one go, or a refusal that says what differs."""

import datetime
import json
import math
import os
import random
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pyarrow as pa
import pytest
import torch

import brim
from brim.infer import Journal
from brim.infer.engines import Response
from brim.session import open_session
from brim.workflows.prediction import job as module
from brim.workflows.prediction.job import JobFolder, differences, fingerprint

pytestmark = pytest.mark.run


class Killed(BaseException):
    """Stands for a signal: nothing may catch it."""


def killed_after(num_rows):
    """An `on_batch` that ends the process's work, as far as the job can tell, once so many rows are done."""
    counts = []

    def on_batch(count):
        counts.append(count)
        if sum(counts) >= num_rows:
            raise Killed

    return on_batch


def begun(model, data, path, num_rows=4, **options):
    """Predict until so many rows are done."""
    with pytest.raises(Killed):
        model.predict(data, output=path, on_batch=killed_after(num_rows), **options)


COUNTED = ("num_rows", "num_prompt_tokens", "num_response_tokens", "finish_reasons", "cut_or_left_out")


def files(path):
    """The output and what lies beside it, but for times."""
    summary = json.loads(path.with_name(f"{path.name}.summary.json").read_text())
    ledger = path.with_name(f"{path.name}.ledger.parquet")
    return path.read_bytes(), ledger.exists() and ledger.read_bytes(), {key: summary[key] for key in COUNTED}


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_what_is_killed_and_resumed_is_the_same_file(model, sums_file, tmp_path, ending):
    model.predict(sums_file, output=tmp_path / f"whole.{ending}")
    path, generated = tmp_path / f"parts.{ending}", []
    for num_rows in (4, 30):
        begun(model, sums_file, path, num_rows, resume=True)
        assert not path.exists()
    said = []
    result = model.predict(sums_file, output=path, resume=True, on_batch=generated.append, say=said.append)
    assert files(path) == files(tmp_path / f"whole.{ending}")
    done = generated[0]
    assert f"continuing: {done} of 40 rows are done" in said
    assert 30 <= done <= 36
    assert sum(generated) == 40
    assert (result.summary["num_resumed"], result.summary["num_rows"]) == (2, 40)


def test_an_unfinished_prediction_is_not_begun_again_unasked(model, sums_file, tmp_path):
    path, said = tmp_path / "p.csv", []
    with pytest.raises(brim.InputError, match="without an output there is nothing to resume"):
        model.predict(sums_file, resume=True)
    begun(model, sums_file, path, resume=True, say=said.append)
    assert f"nothing to continue at {path}: the prediction starts from the first row" in said
    with pytest.raises(
        brim.errors.OutputError, match=r"begun and not finished; .*\n  fix: add --resume .* or remove .*job"
    ):
        model.predict("no such data", output=path)
    model.predict(sums_file, output=path, resume=True)
    with pytest.raises(brim.errors.OutputError, match="the output file exists already; nothing was changed"):
        model.predict(sums_file, output=path)
    path.unlink()
    model.predict({"question": ["add 1 and 2 ="]}, output=path, say=said.append)
    assert f"the output of an earlier prediction is gone from {path}: the prediction starts from the first row" in said
    assert len(pd.read_csv(path)) == 1


def test_what_is_complete_is_left_as_it_is_without_loading_the_model(
    zero_shot, model, sums_file, tmp_path, monkeypatch
):
    path = tmp_path / "p.parquet"
    before = model.predict(sums_file, output=path)
    status, said = path.stat(), []
    again = brim.Model(zero_shot)
    monkeypatch.setattr(again, "_weights", pytest.fail)
    result = again.predict(sums_file, output=path, resume=True, say=said.append)
    assert f"the output is complete: {path} stays as it is" in said
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (status.st_mtime_ns, status.st_ino)
    pd.testing.assert_frame_equal(result.predictions, before.predictions)
    assert result.summary == json.loads((tmp_path / "p.parquet.summary.json").read_text())


def test_the_summary_of_a_resumed_prediction_counts_what_it_wrote_and_what_was_there(
    brim, zero_shot, sums_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(json.dumps(zero_shot))
    lines = sums_file.read_text().splitlines(keepends=True)
    for num_rows, done in (
        (25, r"25 rows, \d+ tokens in [\d.]+ m?s; \d+ ended"),
        (40, r"15 rows in [\d.]+ m?s, 25 were there before; 40 rows, \d+ tokens in all: \d+ ended"),
        (40, r"0 rows in 0.0 s, 40 were there before; 40 rows, \d+ tokens in all: \d+ ended"),
    ):
        Path("rows.jsonl").write_text("".join(lines[:num_rows]))
        out = brim("predict", "config.yaml", "--dataset", "rows.jsonl", "--output", "p.csv", "--resume").out
        assert re.search(done, " ".join(out.split())), out


def test_rows_that_are_added_are_predicted_and_rows_that_are_gone_left_out(model, sums, tmp_path):
    path, whole, frame = tmp_path / "p.jsonl", tmp_path / "whole.jsonl", pd.DataFrame(sums)
    model.predict(frame[:25], output=path)
    said, generated = [], []
    model.predict(frame, output=path, resume=True, say=said.append, on_batch=generated.append)
    model.predict(frame, output=whole)
    assert files(path) == files(whole)
    assert generated[0] == 25
    assert "the data has grown since, from 25 to 40 rows" in said
    model.predict(frame[:30], output=path, resume=True, say=said.append)
    assert "10 rows that were done are not in the data any more, and not in the output" in said
    assert len(path.read_text().splitlines()) == 30


def test_a_kill_between_the_renames_leaves_what_can_be_resumed(model, sums, sums_file, tmp_path, monkeypatch):
    """The ledger is there, the output not yet; or the output is there, and the job does not know."""
    path, whole = tmp_path / "p.csv", tmp_path / "whole.csv"
    frame = pd.DataFrame([*sums, {"question": "x" * 400, "answer": "", "split": 2}])
    skip = {"on_overlong": "skip"}
    model.predict(frame, output=whole, **skip)
    replace, moves = Path.replace, []

    def killed(self, target):
        if self.parent.name == ".p.csv.job" and self.name == "output.csv":
            moves.append(target)
            if len(moves) == 2:
                replace(self, target)
            raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    for num_moves in (1, 2):
        with pytest.raises(Killed):
            model.predict(frame, output=path, resume=True, **skip)
        assert len(moves) == num_moves
        assert path.exists() == (num_moves == 2)
        assert (tmp_path / "p.csv.ledger.parquet").exists()
    monkeypatch.undo()
    model.predict(frame, output=path, resume=True, **skip)
    assert files(path) == files(whole)
    assert JobFolder(path).is_finished()


def test_an_output_of_another_run_is_refused(model, sums_file, tmp_path):
    path, theirs = tmp_path / "p.csv", tmp_path / "theirs.csv"
    for message in ("exists already, without a job beside it to resume", "is not the one that this job wrote"):
        path.write_text("mine")
        with pytest.raises(brim.errors.OutputError, match=message):
            model.predict(sums_file, output=path, resume=True)
        assert path.read_text() == "mine"
        path.rename(theirs)
        model.predict(sums_file, output=path, resume=True)
    path.unlink()
    path.symlink_to(theirs)
    with pytest.raises(brim.errors.OutputError, match="is not the one that this job wrote"):
        model.predict(sums_file, output=path, resume=True)


def test_what_gives_other_responses_is_refused_by_name(zero_shot, model, sums, tmp_path):
    path, frame = tmp_path / "p.csv", pd.DataFrame(sums)
    begun(model, frame, path)
    changed = brim.Model({**zero_shot, "random_seed": 7, "prompt": {"template": "{question}!"}})
    with pytest.raises(brim.errors.OutputError, match="has changed since it began") as refused:
        changed.predict(frame, output=path, resume=True)
    for line in ("random_seed: 42 before, 7 now", 'prompt.template: null before, "{question}!" now'):
        assert f"    {line}\n" in str(refused.value)
    model.predict(frame, output=path, resume=True)
    frame.loc[7, "question"] = "another"
    with pytest.raises(brim.errors.OutputError, match=r"row 7: 1 row is done, and the prompt has changed since"):
        model.predict(frame, output=path, resume=True)


def test_other_weights_are_refused_and_other_batches_or_places_are_not(
    zero_shot, model, sums_file, tiny_base, tmp_path
):
    base, path = shutil.copytree(tiny_base, tmp_path / "base"), tmp_path / "p.csv"
    begun(model, sums_file, path)
    moved = brim.Model({**zero_shot, "base_model": str(base), "trainer": {"type": "none", "batch_size": 3}})
    begun(moved, sums_file, path, 8, resume=True)
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (base / "model.safetensors").write_bytes(weights)
    with (base / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    names = r"    the base model's model.safetensors\n    the base model's tokenizer_config.json\n  fix: restore it"
    with pytest.raises(brim.errors.OutputError, match=names):
        moved.predict(sums_file, output=path, resume=True)


def test_rows_with_keys_may_move(model, sums, tmp_path):
    path, whole = tmp_path / "p.csv", tmp_path / "whole.csv"
    frame = pd.DataFrame(sums).assign(id=[f"row-{number}" for number in range(40)])
    begun(model, frame, path, 20, key="id")
    moved = frame[::-1].reset_index(drop=True)
    with pytest.raises(brim.errors.OutputError, match="identified by the column `id`, and now are by their numbers"):
        model.predict(moved, output=path, resume=True)
    generated = []
    model.predict(moved, output=path, key="id", resume=True, on_batch=generated.append)
    model.predict(moved, output=whole, key="id")
    assert files(path) == files(whole)
    assert generated[0] >= 20


def test_two_processes_do_not_write_to_one_output(model, sums_file, tmp_path, monkeypatch):
    """Also where one looked before the other began."""
    path, whole = tmp_path / "p.csv", tmp_path / "whole.csv"
    model.predict(sums_file, output=whole)
    monkeypatch.setattr("brim.workflows.prediction.output.check_place", lambda output, *, resume: None)

    def second(_):
        for resume in (True, False):
            with pytest.raises(brim.errors.OutputError, match="another process is writing to this output"):
                model.predict(sums_file, output=path, resume=resume)

    model.predict(sums_file, output=path, on_batch=second)
    assert files(path) == files(whole)


def test_a_damaged_list_of_sittings_does_not_keep_from_going_on(model, sums_file, tmp_path):
    for number, content in enumerate((bytes(64), b"\xf0\xff\xfe" * 9)):
        path, said = tmp_path / f"{number}.csv", []
        begun(model, sums_file, path)
        JobFolder(path).sittings.write_bytes(content)
        result = model.predict(sums_file, output=path, resume=True, say=said.append)
        assert len(result.predictions) == 40
        assert not [line for line in said if "grown" in line]


def test_a_full_disk_loses_nothing_and_says_what_to_do(model, sums_file, tmp_path, monkeypatch):
    path, append, calls = tmp_path / "p.csv", Journal.append, []

    def full(self, records):
        calls.append(len(records))
        if len(calls) == 3:
            monkeypatch.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        append(self, records)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        with pytest.raises(brim.errors.WriteError, match=r"No space left on device\n  fix: make room .* --resume"):
            model.predict(sums_file, output=path)
        monkeypatch.undo()
    generated = []
    model.predict(sums_file, output=path, resume=True, on_batch=generated.append)
    assert generated[0] == sum(calls[:2])


def test_ctrl_c_says_how_to_go_on(model, sums_file, tmp_path):
    with pytest.raises(KeyboardInterrupt, match=r"p\.csv: stopped after 4 rows\n  fix: .* with resume=True") as caught:
        model.predict(sums_file, output=tmp_path / "p.csv", on_batch=Mock(side_effect=KeyboardInterrupt))
    assert caught.type is KeyboardInterrupt, "of which Python itself makes exit code 130"


def test_scores_are_log_probabilities_under_the_model(model, sums, tmp_path):
    """An oracle: the model's own logits, row by row, over the response and the token that ended it."""
    path, frame = tmp_path / "p.parquet", pd.DataFrame(sums)
    model.predict(frame, output=path)
    result = model.predict(frame, output=path, resume=True, scores=True)
    scores = pd.read_parquet(path)["log_probability"].tolist()
    llm, session = model._weights(), model._open()
    with Journal(JobFolder(path).responses) as journal:
        for row in range(0, 40, 7):
            (number,) = journal.find(pa.array([row]).to_numpy().astype("uint64"))
            response = Response.of_bytes(journal.body(int(number)))
            prompt = session.encoder.encode([sums[row]["question"]], special_tokens=True)[0]
            written = [*response.token_ids, *([] if response.end_id is None else [response.end_id])]
            with torch.no_grad():
                logits = llm.model(torch.tensor([[*prompt, *written]])).logits[0].double().log_softmax(-1)
            expected = sum(float(logits[len(prompt) - 1 + at, token]) for at, token in enumerate(written))
            assert math.isclose(scores[row], expected, rel_tol=1e-5)
    assert result.predictions["log_probability"].tolist() == scores


def test_scores_that_were_broken_off_are_the_same_file(model, sums_file, tmp_path, monkeypatch):
    from brim.workflows.prediction import generation as generating

    monkeypatch.setattr(generating, "score_batches", lambda lengths: iter(pa.array(range(40)).to_numpy().reshape(8, 5)))
    path, whole = tmp_path / "p.csv", tmp_path / "whole.csv"
    model.predict(sums_file, output=whole, scores=True)
    score, calls = generating.scored, []

    def killed(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 4:
            raise Killed
        return score(*arguments, **more)

    monkeypatch.setattr(generating, "scored", killed)
    with pytest.raises(Killed):
        model.predict(sums_file, output=path, scores=True)
    model.predict(sums_file, output=path, scores=True, resume=True)
    assert files(path) == files(whole)
    assert len(calls) == 4 + 5


SAMPLING = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5}


def test_what_is_sampled_depends_on_the_row_or_its_key_alone(model, sums, sums_file, tmp_path):
    """Not on where it was broken off, nor on the batch."""
    path, whole = tmp_path / "p.csv", tmp_path / "whole.csv"
    model.predict(sums_file, output=whole, generation=SAMPLING, batch_size=7)
    begun(model, sums_file, path, 13, generation=SAMPLING)
    model.predict(sums_file, output=path, generation=SAMPLING, batch_size=3, resume=True)
    assert files(path) == files(whole)
    assert pd.read_csv(whole)["answer_response"].nunique() > 20
    frame = pd.DataFrame(sums).assign(id=range(40))
    shuffled = frame.sample(frac=1, random_state=0).reset_index(drop=True)
    one, other = (model.predict(each, generation=SAMPLING, key="id").predictions for each in (frame, shuffled))
    pd.testing.assert_series_equal(*(each.set_index("id")["answer_response"].sort_index() for each in (one, other)))


DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def test_what_was_begun_on_another_day_goes_on_with_its_prompts(tiny_base, tmp_path, monkeypatch):
    (tmp_path / "dated.jinja").write_text(DATED)
    chat = {"template": str(tmp_path / "dated.jinja")}
    trainer = {"type": "none", "batch_size": 2}
    config = {"base_model": str(tiny_base), "chat": chat, "generation": {"max_new_tokens": 4}, "trainer": trainer}
    rows = {"messages": [[{"role": "user", "content": f"add {number} and 2"}] for number in range(8)]}

    def predict(day, name, **how):
        monkeypatch.setattr("brim.data.chat.template.today", lambda: datetime.date.fromisoformat(day))
        brim.Model(config).predict(rows, output=tmp_path / name, **how)

    predict("2026-01-31", "whole.jsonl")
    with pytest.raises(Killed):
        predict("2026-01-31", "p.jsonl", on_batch=killed_after(3))
    predict("2026-02-01", "p.jsonl", resume=True)
    predict("2026-02-01", "next.jsonl")
    assert files(tmp_path / "p.jsonl") == files(tmp_path / "whole.jsonl") != files(tmp_path / "next.jsonl")


LONG = "add 1 and 2 = " * 40 + "the end"


def test_the_end_of_a_prompt_that_is_too_long_can_be_kept(model):
    """The answer is the one to the last tokens that fit."""
    frame = pd.DataFrame({"question": ["add 1 and 2 =", LONG]})
    with pytest.raises(brim.DataError, match="1 prompt is too long"):
        model.predict(frame)
    said = []
    cut = model.predict(frame, on_overlong="truncate_left", say=said.append)
    encoder, room = model._open().encoder, model._open().folder.context_length - 6
    assert cut.predictions["num_prompt_tokens"].tolist()[1] == room
    tokens = encoder.encode([LONG], special_tokens=True)[0]
    kept = encoder.decode(tokens[-room:], skip_special_tokens=False)
    assert cut.predictions["answer_response"][1] == model.generate(kept)
    assert any("on_overlong is truncate_left" in line for line in said)


def test_on_error_skip_leaves_out_what_cannot_be_used(model, sums, tmp_path):
    """A line that is no JSON, a cell of another type, an empty prompt, a missing one (empty, too) and a long one."""
    bad = ["{", '{"question": 7}', '{"question": ""}', '{"question": null}', json.dumps({"question": LONG})]
    lines = [json.dumps(row) for row in sums]
    data, path = tmp_path / "d.jsonl", tmp_path / "p.csv"
    data.write_text("\n".join([*lines[:20], *bad, *lines[20:]]) + "\n")
    with pytest.raises(brim.DataError, match=r"d.jsonl:21: not valid JSON"):
        model.predict(data, output=path)
    result = model.predict(data, output=path, on_error="skip")
    assert result.summary["cut_or_left_out"] == {"dropped_bad": 4, "filled_missing": 1, "dropped_overlong": 1}
    assert result.predictions["row"].tolist() == [*range(20), *range(25, 45)]
    assert result.ledger == tmp_path / "p.csv.ledger.parquet"


def killed_at(event, monkeypatch):
    """Run what follows until the n-th write, sync or rename of this process; that one is broken off by SIGKILL."""
    left = event

    def last():
        nonlocal left
        left -= 1
        return left == 0

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    write, fsync, replace = os.write, os.fsync, Path.replace

    def write_half(file, data):
        if last():
            write(file, bytes(data)[: len(data) // 2])
            die()
        return write(file, data)

    monkeypatch.setattr(os, "write", write_half)
    monkeypatch.setattr(os, "fsync", lambda file: die() if last() else fsync(file))
    monkeypatch.setattr(Path, "replace", lambda self, target: die() if last() else replace(self, target))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigkill_at_any_moment_costs_at_most_the_rows_in_flight(model, sums_file, tmp_path, monkeypatch):
    whole, path = tmp_path / "whole.parquet", tmp_path / "p.parquet"
    model.predict(sums_file, output=whole, scores=True)
    chance, num_done, num_kills = random.Random(0), 0, 0
    while True:
        child = os.fork()
        if child == 0:
            killed_at(chance.randrange(1, 14), monkeypatch)
            try:
                model.predict(sums_file, output=path, scores=True, resume=True)
            finally:
                os._exit(0)
        chance.random()
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        num_kills += 1
        if JobFolder(path).responses.exists():
            with Journal(shutil.copy(JobFolder(path).responses, tmp_path / "copy")) as journal:
                assert len(journal) == len(journal.keys()) >= num_done
                num_done = len(journal)
    assert num_kills >= 4
    assert files(path) == files(whole)


def test_the_summary_says_what_was_predicted_and_what_it_took(model, sums_file, tmp_path):
    result, said = model.predict(sums_file, output=tmp_path / "p.csv"), []
    summary, frame = json.loads((tmp_path / "p.csv.summary.json").read_text()), result.predictions
    assert summary["num_rows"] == 40
    for name in ("num_prompt_tokens", "num_response_tokens"):
        assert summary[name] == frame[name].sum()
    assert summary["finish_reasons"] == frame["finish_reason"].value_counts().to_dict()
    assert summary["rows_per_s"] == 40 / summary["seconds"]
    generation = summary["generation"]
    assert (generation["engine"], generation["rows_at_once"]) == ("slots", 4)
    assert generation["predicted_peak_bytes"] == generation["plan"]["total_bytes"]
    assert generation["measured_peak_bytes"] > 2**26
    assert generation["passes"]["num_out_of_memory"] == 0
    assert 1 <= generation["passes"]["mean_rows"] <= generation["passes"]["most_rows"] <= 4
    model.predict(sums_file, generation={"max_time": 60.0}, say=said.append)  # what the clock cuts depends on it
    assert [line for line in said if line.startswith("generation.max_time: ")]


def test_damage_in_a_journal_is_told_with_how_much_is_lost(model, sums_file, tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    model.predict(sums_file, output=whole)
    begun(model, sums_file, path, 20)
    journal = JobFolder(path).responses
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    said = []
    model.predict(sums_file, output=path, resume=True, say=said.append)
    (num_lost,) = (found[1] for line in said if (found := re.search(r"the last ([\d,]+) bytes .*are not whole", line)))
    assert len(content) / 3 < int(num_lost.replace(",", "")) < len(content)
    assert path.read_bytes() == whole.read_bytes()


GREEDY = {"max_new_tokens": 6, "do_sample": False}


def fingerprint_of(config, *, split="full", **changes):
    return fingerprint(open_session(brim.Model({**config, **changes}).config), split=split)


def test_a_fingerprint_is_the_same_each_time_and_names_every_file_and_what_reaches_a_response(zero_shot):
    found = fingerprint_of(zero_shot)
    assert found == fingerprint_of(zero_shot)
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert [name for name in found if name.startswith("the ")] == [f"the base model's {name}" for name in names]
    split = {"split": {"type": "random", "probabilities": [0.5, 0.25, 0.25]}}
    for changes, expected in (
        ({"trainer": {"type": "none", "batch_size": 9}}, []),
        ({"dataset": "elsewhere.csv"}, []),
        ({"model_parameters": {"kernels": "torch"}}, []),
        ({"memory": {"budget": "1 GiB"}}, []),
        ({"preprocessing": {"split": "fixed", "on_bad_row": "drop", "on_overlong": "truncate"}}, []),
        ({"preprocessing": split}, []),
        ({"generation": {**GREEDY, "do_sample": True}}, ["generation.do_sample"]),
        ({"generation": {**GREEDY, "max_new_tokens": 7}}, ["generation.max_new_tokens"]),
        ({"generation": {**GREEDY, "engine": "slots"}}, []),
        ({"generation": {**GREEDY, "engine": "vllm"}}, []),  # what is likeliest it finds as well
        (
            {"generation": {**GREEDY, "do_sample": True, "engine": "vllm"}},
            ["generation.do_sample", "generation.engine"],
        ),
        ({"precision": "bf16-true"}, ["precision"]),
        ({"output_features": [{"name": "reply", "type": "text"}]}, ["output_features.0.name"]),
    ):
        told = differences(found, fingerprint_of(zero_shot, **changes))
        assert [line.split(":")[0] for line in told] == expected
    before, now = (fingerprint_of(zero_shot, split="test", **each) for each in ({}, {"preprocessing": split}))
    assert "preprocessing.split.type" in [line.split(":")[0] for line in differences(before, now)]


def test_large_files_are_known_by_size_and_samples_of_all_parts(tmp_path, monkeypatch):
    for name, value in (("_WHOLE_BYTES", 10), ("_SAMPLES", 8), ("_SAMPLE_BYTES", 20)):
        monkeypatch.setattr(module, name, value)
    content, file = random.Random(0).randbytes(1000), tmp_path / "weights"
    file.write_bytes(content)
    known = module._digest_of_file(file)
    assert known.startswith("1000 bytes, sampled: ")
    for at in (0, 19, 140, 159, 980, 999):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert module._digest_of_file(file) != known


def test_another_engine_than_the_one_that_began_is_told(model, sums_file, tmp_path):
    path, said = tmp_path / "p.csv", []
    begun(model, sums_file, path)
    sittings = JobFolder(path).sittings
    sittings.write_text(sittings.read_text().replace('"engine": "slots"', '"engine": "vllm"', 1))  # as if on a GPU
    model.predict(sums_file, output=path, resume=True, say=said.append)
    assert "generation.engine was vllm when it began, and is auto now, which may round otherwise" in map(str, said)
