"""`brim memory`: what it prints, draws and refuses."""

import json

import pytest
from tests.report.hand_made import GIB, hand_made_prediction

from brim.errors import Problem
from brim.memory.events import CATEGORIES
from brim.workflows.measure import Leak, PhasePeak
from brim.workflows.measure.messages import Measured

CONFIG = """\
base_model: {base}
adapter: lora
trainer: {{type: finetune, optimizer: adamw, batch_size: 2}}
"""


@pytest.fixture
def config(tiny_base, tmp_path, monkeypatch):
    """config.yaml in the current folder."""
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=tiny_base))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """What predict_memory was called with; it answers with a prediction made by hand."""
    import brim.memory.predict as memory

    calls = []

    def predict_memory(config, **given):
        calls.append({"config": config, **given})
        return hand_made_prediction(batch_size=given["batch_size"] or 4, phase=given["phase"] or "train")

    monkeypatch.setattr(memory, "predict_memory", predict_memory)
    return calls


def test_a_real_prediction_as_a_table_with_its_sums_and_as_json(brim, config):
    done = brim("memory", "config.yaml", "--sequence-length", 32, "--device", "t4", "--explain", "--verbose", code=0)
    lines = done.out.splitlines()
    assert lines[0].endswith(": train, 2 rows × 32 tokens, on t4")
    starts = ("weights ", "fits: it needs ", "precision: ")  # T4s have no bfloat16
    assert all(any(line.startswith(start) for line in lines) for start in starts)
    assert max(map(len, lines)) <= 80
    for words in ("on a napkin", "parameters × ", "the napkin says "):
        assert words in done.out
    done = brim("memory", "config.yaml", "--sequence-length", 32, "--memory", "14GiB", "--json", "--explain", code=0)
    told = json.loads(done.out)
    assert (told["budget_bytes"], told["batch_size"], told["sequence_length"]) == (14 * GIB, 2, 32)
    assert told["napkin"]["total_bytes"] == max(told["napkin"]["moments"].values())
    weights = {line["name"]: line["num_bytes"] for line in told["napkin"]["lines"]}
    in_blocks = told["by_category"]["weights"]  # of 512 B
    assert weights["weights"] + weights["adapter"] == pytest.approx(in_blocks, rel=0.1)


def test_both_figures_of_checkpointing_are_told_whatever_is_asked_beside(brim, config):
    """Without a key it is the run that brim train would start; --explain and --json are of the same one."""
    shape = ("--sequence-length", 64, "--batch-size", 64)
    roomy = json.loads(brim("memory", "config.yaml", *shape, "--device", "a100-80gb", "--json").out)
    assert roomy["gradient_checkpointing"] is False
    flags = (*shape, "--memory", f"{roomy['total_bytes'] // 2**20}MiB")
    told = json.loads(brim("memory", "config.yaml", *flags, "--json", "--explain").out)
    assert (told["gradient_checkpointing"], told["other"]["gradient_checkpointing"]) == (True, False)
    assert told["other"]["total_bytes"] > told["total_bytes"]
    assert "between the layers" in {line["name"] for line in told["napkin"]["lines"]}
    words = " ".join(brim("memory", "config.yaml", *flags, "--verbose").out.split())
    assert "without checkpointing" in words
    assert "gradient checkpointing: on (trainer.enable_gradient_checkpointing: auto; without it" in words
    done = brim("memory", "config.yaml", *flags, "trainer.enable_gradient_checkpointing=false", "--json")
    assert (json.loads(done.out)["gradient_checkpointing"], json.loads(done.out)["other"]) == (False, None)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cpu", "train, 2 rows × 32 tokens, packed"),
        ("t4", "trainer.packing: False, not as configured (PyTorch's attention"),
    ],
)
def test_the_card_says_that_rows_are_packed_or_why_they_are_not_as_asked(brim, config, device, words):
    asked = ("trainer.packing=true", "trainer.enable_gradient_checkpointing=false")
    done = brim("memory", "config.yaml", "--device", device, "--sequence-length", 32, *asked, code=0)
    assert words in " ".join(done.out.split())


def test_flags_reach_the_prediction(brim, config, asked, finished_run):
    options = ("--batch-size", 3, "--sequence-length", 16, "--phase", "evaluate", "--device", "a100-80gb")
    brim("memory", "config.yaml", "trainer.epochs=1", *options, "--world-size", 4, code=0)
    call = asked.pop()
    assert call.pop("config").trainer.epochs == 1
    assert call == {
        "batch_size": 3, "sequence_length": 16, "phase": "evaluate", "device": "a100-80gb", "memory_bytes": None,
        "world_size": 4, "offload": None,
    }  # fmt: skip
    assert brim("memory", finished_run, "--sequence-length", 16).code == 0
    assert asked[0]["config"].adapter is not None, "a run's folder will do"


def test_a_picture(brim, config, asked):
    for name, begins in (("memory.png", b"\x89PNG"), ("deep/memory.html", b"<!DOCTYPE html>")):
        assert f"picture: {name}" in brim("memory", "config.yaml", "--plot", name, code=0).err
        assert (config / name).read_bytes().startswith(begins)
    assert "step 2: backward" in (config / name).read_text()


@pytest.fixture
def compared(monkeypatch):
    """Five ways made by hand, the last one of which cannot be; a T4 has room for the fourth, with checkpointing."""
    import brim.memory.variants as compare
    from brim.memory.variants import variants

    def compare_memory(config, **given):
        *ways, last = variants(config)
        for variant, gib in zip(ways, (60, 30, 14, 9), strict=True):
            weights = gib * GIB
            prediction = hand_made_prediction(
                by_category={**dict.fromkeys(CATEGORIES, 0), "weights": weights},
                allocated_bytes=weights,
                reserved_bytes=weights,
                total_bytes=weights + GIB // 2,
                budget_bytes=None,
                gradient_checkpointing=gib < 10,
            )
            on_t4 = compare.OnCard(name="t4", total_bytes=11 * GIB, fits=gib == 9, gradient_checkpointing=True)
            on_a100 = compare.OnCard(name="a100-80gb", total_bytes=61 * GIB, fits=True, gradient_checkpointing=False)
            yield compare.Compared(variant=variant, prediction=prediction, cards=(on_t4, on_a100))
        problem = Problem(what="adapter.dropout is 0.05, and experts are among them", fix="set adapter.dropout: 0")
        yield compare.Failed(variant=last, problems=(problem,))

    monkeypatch.setattr(compare, "compare_memory", compare_memory)


def test_compare_shows_the_ways_side_by_side_and_what_could_not_be(brim, config, compared, golden):
    short = brim("memory", "config.yaml", "--compare")
    done = brim("memory", "config.yaml", "--compare", "--plot", "ways.html", "--verbose", code=0)
    assert done.out.startswith(short.out), "then the squares"
    assert (short.code, "needs" in short.err, "W " in short.out) == (0, False, False)
    golden("cli/memory_compare.txt", short.out)
    assert done.out.count("W ") >= 60 + 30 + 14 + 9
    page = (config / "ways.html").read_text()
    assert "8-bit + LoRA" in page
    assert "quantization: {bits: 8}" in page
    told = json.loads(brim("memory", "config.yaml", "--compare", "--json").out)
    assert [each["name"] for each in told] == ["full", "16-bit", "LoRA", "8-bit + LoRA", "4-bit + LoRA"]
    assert [each["fits_on"] for each in told[:-1]] == [["a100-80gb"]] * 3 + [["t4", "a100-80gb"]]
    assert told[3]["cards"]["t4"] == {"total_bytes": 11 * GIB, "fits": True, "gradient_checkpointing": True}
    assert told[-1]["problems"][0].startswith("adapter.dropout is 0.05, and experts are among them")


@pytest.fixture
def measured(monkeypatch, asked):
    """A measurement made by hand, of a CPU; the calls that asked for it."""
    import brim.memory.predict as memory
    import brim.workflows.measure.run as measuring

    calls = []

    def measure(config, folder, **given):
        calls.append({"config": config, **given})
        steps = given["steps"]
        step = {"phase": "train", "total_bytes": 19 * GIB, "end_bytes": 15 * GIB, "baseline_bytes": GIB}
        load = {"phase": "load", "total_bytes": 14 * GIB, "end_bytes": 14 * GIB, "baseline_bytes": GIB}
        peaks = (PhasePeak(step=None, **load), *(PhasePeak(step=number + 1, **step) for number in range(steps)))
        return Measured(
            device="cpu",
            kind="cpu",
            batch_size=given["batch_size"],
            sequence_length=given["sequence_length"],
            num_layers=8,
            layers_run=(8,),
            baseline_bytes=GIB,
            peaks=peaks,
            leak=Leak(bytes_per_step=1024, end_bytes=(1, 2, 3, 4)) if steps >= 5 else None,
            notes=("the whole model was run",),
        )

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "predict_memory", memory.predict_memory)
    return calls


def test_measured_beside_predicted_by_phase(brim, config, measured, golden):
    """Predicted are 6 MB that a CPU keeps, too; later steps are alike."""
    done = brim("memory", "config.yaml", "--measure", "--phase", "train", "--sequence-length", 16, code=0)
    golden("cli/memory_measured.txt", done.out)
    call = measured[0]
    assert (call["phases"], call["steps"], call["layers"]) == (("load", "train"), 3, None)
    assert call["config"].precision == "auto"  # which the process that measures resolves for its device
    done = brim("memory", "config.yaml", "--measure", "--phase", "train", "--layers", 1, "--json", code=0)
    told = json.loads(done.out)
    assert set(told["predicted"]) == {"train"}
    assert [peak["phase"] for peak in told["measured"]["peaks"]] == ["load", "train", "train", "train"]
    assert measured[1]["layers"] == 1


def test_a_leak_over_the_steps_that_were_asked_for_and_a_picture(brim, config, measured, golden):
    done = brim("memory", "config.yaml", "--measure", "--steps", 5, "--phase", "train", "--plot", "memory.html", code=0)
    golden("cli/memory_measured_over_time.txt", done.out)
    page = (config / "memory.html").read_text()
    assert "measured, at most" in page
    assert "Predicted and measured, GiB" in page
    assert "warning: a leak?" in page


def test_all_phases_unless_one_is_named_and_checkpointing_as_predicted(brim, config, measured, asked, monkeypatch):
    import brim.workflows.measure.run as measuring

    assert brim("memory", "config.yaml", "--measure").code == 0
    assert measured[0]["phases"] == ("load", "train", "evaluate", "generate")
    assert [call["phase"] for call in asked] == ["train", "evaluate", "generate"]
    checkpointed = hand_made_prediction(gradient_checkpointing=True)
    monkeypatch.setattr(measuring, "predict_memory", lambda config, **given: checkpointed)
    assert brim("memory", "config.yaml", "--measure", "--phase", "train").code == 0
    assert measured[1]["config"].trainer.enable_gradient_checkpointing is True
