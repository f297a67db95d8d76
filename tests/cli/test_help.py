"""What `brim --help` says, and that it says it quickly."""

import re
import subprocess
import sys

import pytest

# CONTRACT.md and the issue: what each verb takes.
OPTIONS = {
    "check": {"--dataset", "--show", "--rows", "--json"},
    "memory": {
        *("--batch-size", "--sequence-length", "--device", "--memory", "--phase", "--world-size", "--offload"),
        *("--compare", "--explain", "--measure", "--layers", "--steps", "--plot", "--json"),
    },
    "plan": {"--dataset", "--device", "--memory", "--replan", "--json", "--rows", "--sequence-length"},
    "train": {"--dataset", "--output-directory", "--resume", "--replan", "--json"},
    "verify-resume": {"--steps", "--from-step", "--dataset", "--keep", "--json"},
    "compare": {"--dataset", "--seeds", "--output-directory", "--resume", "--markdown", "--json"},
    "evaluate": {"--dataset", "--split", "--texts", "--against", "--against-base", "--rows", "--json"},
    "predict": {
        "--dataset",
        "--output",
        "--split",
        "--resume",
        "--scores",
        "--key",
        "--on-error",
        "--on-overlong",
        *("--plan", "--device", "--memory"),
        "--json",
    },
    "embed": {"--dataset", "--output", "--split", "--layer", "--pooling", "--normalize", "--json"},
    "chat": set(),
    "export": {"--output", "--merge", "--dtype", "--max-divergence", "--dataset", "--format", "--json"},
    "upload": {"--private", "--revision", "--commit-message", "--json"},
    "schema": set(),
}


def test_the_verbs_are_listed(brim):
    done = brim("--help")
    assert done.code == 0
    assert re.findall(r"^  ([\w-]+)  +\S", done.out.split("Commands:")[1], flags=re.MULTILINE) == list(OPTIONS)
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("verb", OPTIONS)
def test_a_verb_explains_each_of_its_options_in_80_columns(brim, verb):
    done = brim(verb, "--help")
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
    explained = dict(re.findall(r"^  (--[a-z-]+)(?: [A-Z]+)? +(\S.*)$", done.out, flags=re.MULTILINE))
    assert explained.keys() == OPTIONS[verb] | {"--help"}
    if verb not in ("upload", "schema"):
        assert "KEY=VALUE" in done.out
        assert "trainer.epochs=1" in done.out


def test_no_verb_is_an_error_that_shows_the_help(brim):
    done = brim()
    assert done.code == 2
    assert "evaluate" in done.out + done.err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["schema"], ["check", "no-such-file.yaml"]])
def test_nothing_slow_is_imported_for(arguments):
    code = (
        "import sys\n"
        f"sys.argv = ['brim', *{arguments!r}]\n"
        "from brim.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "slow = ('torch', 'transformers', 'peft', 'datasets', 'pandas', 'pyarrow')\n"
        "print([name for name in slow if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
