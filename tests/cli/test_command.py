"""The command around its verbs: help, mistakes on the command line, errors, secrets, Ctrl-C, the installed process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.gallery import stopped_after

import brim.cli.app as app
import brim.cli.command as command
import brim.cli.options as opening
from brim import Model
from brim.cli import main
from brim.errors import Problem
from brim.memory.allocator import AllocatorSettings
from brim.memory.allocator.settings import VARIABLES
from brim.train import Loop
from brim.train.logs import MetricsLog

SECRET = "a secret of no known shape"

# CONTRACT.md and the issue: what each verb takes.
OPTIONS = {
    "check": "--dataset --show --rows --json",
    "memory": "--batch-size --sequence-length --device --memory --phase --world-size --offload --compare --explain "
    "--measure --layers --steps --plot --json",
    "plan": "--dataset --device --memory --gpus --replan --json --rows --sequence-length",
    "train": "--dataset --output-directory --resume --gpus --replan --json",
    "verify-resume": "--steps --from-step --dataset --gpus --keep --json",
    "compare": "--dataset --seeds --output-directory --resume --gpus --markdown --json",
    "evaluate": "--dataset --split --texts --against --against-base --rows --gpus --json",
    "predict": "--dataset --output --split --resume --scores --key --on-error --on-overlong --gpus --plan --device "
    "--memory --json",
    "embed": "--dataset --output --split --layer --pooling --normalize --gpus --json",
    "chat": "",
    "export": "--output --merge --dtype --max-divergence --dataset --format --json",
    "upload": "--private --revision --commit-message --json",
    "schema": "",
}


# Help


def test_the_verbs_are_listed_and_no_verb_is_an_error_that_shows_the_help(brim):
    done = brim("--help")
    assert (done.code, max(map(len, done.out.splitlines())) <= 80) == (0, True)
    assert re.findall(r"^  ([\w-]+)  +\S", done.out.split("Commands:")[1], flags=re.MULTILINE) == list(OPTIONS)
    done = brim()
    assert (done.code, "evaluate" in done.out + done.err) == (2, True)


def test_a_verb_explains_each_of_its_options_in_80_columns(brim):
    for verb, options in OPTIONS.items():
        done = brim(verb, "--help")
        assert (done.code, max(map(len, done.out.splitlines())) <= 80) == (0, True)
        explained = dict(re.findall(r"^  (--[a-z-]+)(?: [A-Z]+)? +(\S.*)$", done.out, flags=re.MULTILINE))
        assert explained.keys() == {*options.split(), "--help"}
        if verb not in ("upload", "schema"):
            assert all(words in done.out for words in ("KEY=VALUE", "trainer.epochs=1"))


SLOW = "('torch', 'transformers', 'peft', 'datasets', 'pandas', 'pyarrow', 'matplotlib')"
QUICK = [
    "--help", "--version", "train --help", "schema", "check no-such-file.yaml", "memory config.yaml --device a100-80bg",
    "memory config.yaml --memory 14", "memory config.yaml --steps 2", "memory config.yaml --plot a.gif",
    "memory config.yaml base_model=no/such/folder",
]  # fmt: skip


@pytest.mark.process
def test_nothing_slow_is_imported_for_help_and_mistakes(project):
    code = (
        "import sys\n"
        "from brim.cli import main\n"
        f"for command in {QUICK!r}:\n"
        "    sys.argv = ['brim', *command.split()]\n"
        "    code = 0\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as leaving:\n"
        "        code = leaving.code or 0\n"
        f"    slow = [name for name in {SLOW} if name in sys.modules]\n"
        "    print(command, code, slow, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [line for line in done.stderr.splitlines() if line.endswith("]")]
    assert told == [f"{each} {0 if number < 4 else 2} []" for number, each in enumerate(QUICK)]
    assert f"brim {version('brim')}\n" in done.stdout


# What a failed verb shows


def test_all_problems_are_shown_as_lines_and_as_json_without_secrets():
    problems = [Problem(what=f"fault {number}", fix="mend it") for number in range(40)]
    assert opening.message(problems) == "\n".join(f"fault {number}\n  fix: mend it" for number in range(40))
    token = "hf_" + "a1" * 17
    told = opening.json_message("ConfigError", [Problem(what=f"a\x1b {token}", where="c.yaml:1")], 2)
    assert "\n" not in told
    problem = {"what": "a\x1b ***", "where": "c.yaml:1", "expected": "", "fix": ""}
    assert json.loads(told) == {"error": {"kind": "ConfigError", "exit_code": 2, "problems": [problem]}}
    plain = opening.plain
    assert plain("a\x1b[31mb\x07\u202ec\ud800\td\ne é 日") == "a\\x1b[31mb\\x07\\u202ec\\ud800\\td\ne é 日"
    assert plain("x" * 1000) == "x" * 1000
    assert plain("x" * 1001 + "\ny") == "x" * 999 + "…\ny"
    assert plain(f"token {token} here") == "token *** here"


WRONG = {f"key_{number}": number for number in range(26)}
COMMANDS = {
    "check": "wrong.yaml", "memory": "wrong.yaml", "plan": "wrong.yaml --dataset rows.csv",
    "train": "wrong.yaml --dataset rows.csv", "verify-resume": "nowhere",
    "compare": "wrong.yaml wrong.yaml --dataset rows.csv --output-directory out",
    "evaluate": "wrong.yaml --dataset rows.csv", "predict": "wrong.yaml --dataset rows.csv --output out.csv",
    "embed": "wrong.yaml --dataset rows.csv --output out.parquet", "export": "nowhere --output out",
    "upload": "nowhere me/model",
}  # fmt: skip


def test_every_verb_tells_all_that_is_wrong_as_lines_or_as_json(brim, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text(json.dumps({"base_model": "m", **WRONG}))
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    for verb, arguments in COMMANDS.items():
        lines, as_json = (brim(verb, *arguments.split(), *more) for more in ([], ["--json"]))
        assert (lines.code, as_json.code, lines.out, as_json.err) == (2, 2, "", ""), verb
        error = json.loads(as_json.out)["error"]
        assert error["exit_code"] == 2
        number = 26 if "wrong.yaml" in arguments else 1
        assert [problem.keys() for problem in error["problems"]] == [{"what", "where", "expected", "fix"}] * number
        assert lines.err == "brim: " + "".join(f"{Problem(**problem)}\n" for problem in error["problems"])
    verbs = app.app_of().registered_commands
    assert {verb.name for verb in verbs if "as_json" in verb.callback.__code__.co_varnames} == set(COMMANDS)


@pytest.fixture
def failing(monkeypatch, capfd):
    """failing(error, …): the exit code and the output of a verb that raises it."""

    def run(error, *more):
        def verb(arguments):
            raise error

        monkeypatch.setattr(app, "run", verb)
        monkeypatch.setattr(sys, "argv", ["brim", "check", *more])
        with pytest.raises(SystemExit) as leaving:
            main()
        return leaving.value.code, *capfd.readouterr()

    return run


def test_memory_that_is_used_up_is_one_message(failing):
    for error in (
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA"),  # as torch.OutOfMemoryError
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 4 bytes"),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
    ):
        code, out, err = failing(error)
        assert (code, out) == (1, "")
        assert err.startswith(
            "brim: the memory of the device, or of the machine, is used up\n  fix: free memory, load "
        )


def test_a_mistake_of_brims_shows_its_traceback_without_secrets(failing, monkeypatch):
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    code, _, err = failing(KeyError(f"{SECRET}\x1b[31m"))
    assert code == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert "KeyError: '***\\x1b[31m'" in err
    assert err.endswith("brim: this is a bug in brim; please report it with the lines above\n")
    assert SECRET not in err
    assert "RuntimeError: odd" in failing(RuntimeError("odd"))[2], "which is no lack of memory"


def test_with_json_a_full_disk_and_an_interruption_are_json_too(failing, brim, project, monkeypatch):
    def stop(loop, stop):
        raise KeyboardInterrupt(Problem(what="stopped after step 3", where="run", fix="continue with --resume"))

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", stop)
        done = brim("train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "run", "--json")
    assert done.code == 130
    again = "brim train config.yaml --dataset sums.jsonl --output-directory run --json --resume"
    problem = {"what": "stopped after step 3", "where": "run", "expected": "", "fix": f"continue with `{again}`"}
    error = {"kind": "KeyboardInterrupt", "exit_code": 130, "problems": [problem]}
    assert json.loads(done.out)["error"] == error
    code, out, _ = failing(OSError(28, "No space left on device", "out.csv"), "--json")
    error = json.loads(out)["error"]
    assert (code, error["kind"]) == (1, "OSError")
    assert error["problems"][0]["what"] == "[Errno 28] No space left on device: 'out.csv'"


# What the command switches off, refuses and sets


def test_libraries_do_nothing_unasked(brim, monkeypatch):
    for given, expected in ({}, "NO"), ({"USE_HUB_KERNELS": "YES"}, "YES"):
        monkeypatch.setattr(os, "environ", dict(given))
        brim("--help")
        assert [os.environ[name] for name in command._UNLESS_SET] == ["1", expected, "true", "64", "64"]


# The bytes by which products in bf16 of changing shapes grow a process, after the first ones; in children of one that has
# torch imported, since the cache is made at the first product.
PRODUCTS = """
import json, os, re, sys
from pathlib import Path
import torch
from brim.cli import main

def anonymous_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def grown_bytes():
    layer, before = torch.nn.Linear(64, 64, dtype=torch.bfloat16), 0
    for rows in range(1, 301):
        before = anonymous_bytes() if rows == 20 else before
        layer(torch.ones(rows, 64, dtype=torch.bfloat16)).sum().backward()
    return anonymous_bytes() - before

for who, given in json.loads(sys.argv.pop()).items():
    child = os.fork()
    if not child:
        os.environ.update(given)
        try:
            if who != "torch":
                sys.argv[1:] = ["--help"]
                main()
        except SystemExit:
            pass
        print(json.dumps({who: grown_bytes()}), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, who
"""


@pytest.mark.process
def test_products_of_changing_shapes_in_bf16_do_not_fill_the_memory():
    kernels = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in kernels}
    cases = {"torch": {}, "main": {}, "main again": {kernels[0]: "1024", kernels[2]: "1024"}}
    line = [sys.executable, "-c", PRODUCTS, json.dumps(cases)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    told = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    grown = {who: num_bytes for each in told for who, num_bytes in each.items()}
    if grown["torch"] < 100_000_000:
        pytest.skip("this machine's products in bf16 are not compiled")
    assert grown["main"] < 0.3 * grown["torch"]
    assert grown["main again"] > 0.7 * grown["torch"]  # what the user sets holds


def test_a_secret_on_the_command_line_or_in_the_current_folder_is_refused_and_not_repeated(brim, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    done = brim("check", "config.yaml", "--dataset", f"/data/{SECRET}/rows.csv", code=2)
    assert done.err.startswith("brim: command line: argument 4 holds a secret that also stands in the environment\n")
    (tmp_path / SECRET).mkdir()
    monkeypatch.chdir(tmp_path / SECRET)
    other = brim("schema", code=2)
    assert "the path of the current folder holds a secret" in other.err
    assert SECRET not in done.err + other.err


def test_segments_grow_on_a_gpu_unless_the_user_says_how(brim, monkeypatch, tmp_path):
    for has_driver, given, settings in [
        (True, {}, AllocatorSettings(expandable_segments=True)),
        (False, {}, AllocatorSettings()),
        (True, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, AllocatorSettings()),
        (True, {"PYTORCH_CUDA_ALLOC_CONF": ""}, AllocatorSettings()),
    ]:
        environment = dict(given)
        with monkeypatch.context() as patch:
            patch.setattr(command, "_NVIDIA_DRIVER", tmp_path if has_driver else tmp_path / "none")
            patch.setattr(os, "environ", environment)
            patch.setattr(sys, "argv", ["brim", "--help"])
            with pytest.raises(SystemExit):
                main()
        assert AllocatorSettings.from_environment(environment) == settings
    assert set(command._ALLOCATOR) == set(VARIABLES)


# All that is wrong is told in one round


def test_all_unknown_flags_are_told_at_once(brim, project):
    done = brim("train", "config.yaml", "--epochs", "1", "--dataset", "x.csv", "--lr", "1e-4", "--batch-size=4")
    assert [line for line in done.err.splitlines() if "fix" in line] == [
        "  fix: write trainer.epochs=1",
        "  fix: write trainer.learning_rate=0.0001",
        "  fix: write trainer.batch_size=4",
    ]


ROW = '{"question": "a", "answer": "b", "split": 0}\n'
BAD = ROW + "{broken\n" + ROW * 4


ALL = [
    "config.yaml:17: unknown key trainer.epoch",
    "bad.jsonl: no column `hint`, which prompt.template names",
    "bad.jsonl: no column `reply`, which output_features[0] names",
    "bad.jsonl:2: not valid JSON: ",
]


def told(done, *, alike=ALL):
    """The first lines of the problems, without what follows the words that are alike."""
    lines = [line for line in done.err.removeprefix("brim: ").splitlines() if not line.startswith("  ")]
    return [next((text for text in alike if line.startswith(text)), line) for line in lines]


def test_the_configuration_the_columns_and_the_rows_are_told_together(brim, project):
    """A misspelt key, a template with a column that is not there, another answer's name, and a broken line."""
    text = (project / "config.yaml").read_text().replace("name: answer", "name: reply").replace("epochs: 2", "epoch: 2")
    (project / "config.yaml").write_text(text + "prompt: {template: '{question} {hint}'}\n")
    (project / "bad.jsonl").write_text(BAD)
    for arguments, missing in [
        ("check config.yaml --dataset bad.jsonl", None),
        ("check config.yaml dataset=bad.jsonl", None),
        ("train config.yaml --dataset bad.jsonl", None),
        ("plan config.yaml --dataset bad.jsonl", None),
        ("evaluate config.yaml --dataset bad.jsonl", None),
        ("predict config.yaml --dataset bad.jsonl --output out.csv", 2),
        ("embed config.yaml --dataset bad.jsonl --output out.parquet", 2),
    ]:
        done = brim(*arguments.split(), code=2)
        assert told(done) == [text for number, text in enumerate(ALL) if number != missing], arguments
    done = brim("check", "config.yaml", "--dataset", "bad.jsonl", "--json")
    assert (done.code, done.err) == (2, "")
    problems = json.loads(done.out)["error"]["problems"]
    assert [each["where"] for each in problems] == ["config.yaml:17", "bad.jsonl", "bad.jsonl", "bad.jsonl:2"]
    text = (project / "config.yaml").read_text().replace("{template:", "{templat:").replace("epoch:", "epochs:")
    (project / "config.yaml").write_text(text)
    assert told(brim("check", "config.yaml", "--dataset", "bad.jsonl"))[1:] == ALL[2:], "a template that is misspelt"


def test_wrong_columns_cells_rows_and_a_base_model_that_is_not_there_hide_nothing(brim, project):
    (project / "bad.jsonl").write_text(BAD + '{"question": null, "answer": "b"}\n')
    check = ("check", "config.yaml", "--dataset", "bad.jsonl", "output_features.0.name=reply")
    strict = "input_features.0.preprocessing={missing_value_strategy: error}"
    assert told(brim(*check, "preprocessing.split.column=part", strict)) == [
        "bad.jsonl: no column `reply`, which output_features[0] names",
        "bad.jsonl: no column `part`, which preprocessing.split.column names",
        "bad.jsonl:2: not valid JSON: ",
        "bad.jsonl:7: column `question` is empty in 1 row",
    ]
    (project / "bad.jsonl").write_text(BAD)
    without_base = brim(*check, "base_model=nowhere")
    assert [line.split(": ")[0] for line in told(without_base)] == ["base_model", "bad.jsonl", "bad.jsonl:2"]


def test_what_a_wrong_key_may_change_is_not_told_as_the_datas_fault(brim, project, monkeypatch):
    (project / "c.yaml").write_text(f"base_model: {project / 'base'}\ntrainer: finetune\n")
    (project / "rows.csv").write_text("question,answer\na,b\n")
    overrides = ("template={question}", "output_features=3", "input_features.0.nam=x", "chat=3", "messages_column=x")
    for override in overrides:
        done = brim("check", "c.yaml", "--dataset", "rows.csv", override, code=2)
        assert all(line.startswith("override ") for line in told(done))
    monkeypatch.setattr(opening, "problems_with_data", lambda *args, **kwargs: pytest.fail("read twice"))
    assert brim("check", "config.yaml", "--dataset", "sums.jsonl").code == 0


# The installed command, and Ctrl-C as a real signal

LONGEST_WAIT_S = 240
BRIM = [sys.executable, "-c", "from brim.cli import main; main()"]
# As the installed command does, with a word on stdout once a module is being loaded.
LOADING = """
import builtins
from brim.cli import main
load = builtins.__import__
def announce(name, *rest, **more):
    if name == {module!r}:
        builtins.__import__ = load
        print("loading", flush=True)
    return load(name, *rest, **more)
builtins.__import__ = announce
main()
"""
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


@pytest.mark.process
def test_the_installed_command_and_the_module_are_the_same(project):
    message = "brim: override trainer.epoch=3: unknown key trainer.epoch\n  fix: did you mean trainer.epochs?\n"
    for brim in ([Path(sys.executable).with_name("brim")], [sys.executable, "-m", "brim"]):
        done = subprocess.run([*brim, "check", "config.yaml", "trainer.epoch=3"], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.process
def test_check_shows_samples_and_needs_no_torch_nor_an_output_that_takes_every_sign(project):
    code = "import sys; from brim.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "config.yaml", "--dataset", "sums.jsonl", "--show", "2"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "add 0 and 0 =? 0<|end|>?" in done.stdout
    assert "???: what the model learns to write" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_traceback():
    """As in `brim schema | head -1`."""
    process = start([*BRIM, "schema"])
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(LONGEST_WAIT_S) == 1


def start(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")


def steps(run):
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if '"learning_rate"' in line]


OVERRIDES = ["trainer.train_steps=16", "trainer.early_stop=-1", "trainer.steps_per_checkpoint=1"]


@posix
@pytest.mark.run
def test_ctrl_c_while_training_saves_a_checkpoint_and_resume_finishes(brim, project, monkeypatch):
    run, write = project / "run", MetricsLog.write

    def press_after_two_steps(log, record):
        write(log, record)
        if record["step"] == 2 and "learning_rate" in record:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(MetricsLog, "write", press_after_two_steps)
    typed = ["train", "config.yaml", *OVERRIDES, "--dataset", "sums.jsonl", "--output-directory", "run"]
    done = brim(*typed, code=130)
    fix = f"  fix: continue with `{shlex.join(['brim', *typed, '--resume'])}`\n"
    assert done.err.endswith(f"brim: run: stopped after step 2\n{fix}")
    assert (run / "checkpoints" / "step-00000002" / "manifest.json").exists()
    assert not (run / "model").exists()
    assert "continuing after step 2 " in brim("train", "run", "--resume", code=0).err
    assert steps(run) == list(range(1, 17))
    assert (run / "model" / "adapter_model.safetensors").exists()


@pytest.mark.run
def test_an_interruption_in_python_is_a_keyboard_interrupt_that_says_how_to_go_on(project):
    again = r"^run: stopped after step 1\n  fix: continue with --resume, in Python with resume=True$"
    with stopped_after(1) as observer, pytest.raises(KeyboardInterrupt, match=again):
        Model("config.yaml").train("sums.jsonl", output_directory="run", say=None, observer=observer)


@posix
@pytest.mark.process
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_before_training_starts_leaves_nothing_behind(project, digests, module):
    before = digests(project)
    command = [sys.executable, "-c", LOADING.format(module=module)]
    process = start([*command, "train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "run"])
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONGEST_WAIT_S)
    assert (process.returncode, err) == (130, "brim: interrupted\n"), out
    assert digests(project) == before
