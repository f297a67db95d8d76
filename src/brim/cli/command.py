"""Run a verb of the `brim` command, and turn errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

from brim import lazy
from brim.errors import BrimError, InputError, Problem
from brim.storage import secrets_of_environment

_INTERRUPTED = 130


# Libraries would do this unasked: send statistics, fetch and run compiled code, have weights converted elsewhere; keep
# a thousand kernels of oneDNN's on a CPU, and as many of PyTorch's for it, each for one shape of a product in bf16. A
# micro-batch uses some thirty. oneDNN reads the older DNNL_ name where the user has not set ONEDNN_'s.
_UNLESS_SET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "USE_HUB_KERNELS": "NO",
    "DISABLE_SAFETENSORS_CONVERSION": "true",
    "DNNL_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # any of them has an effect


_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists where the driver is loaded, but not in WSL


_OUT_OF_MEMORY = Problem(
    what="the memory of the device, or of the machine, is used up",
    fix="free memory, load the base in fewer bits (quantization.bits: 4), or cut rows with "
    "preprocessing.global_max_sequence_length; `brim memory` shows how much each part takes",
)


def main() -> None:
    """Run the command line. Exit codes: 0; 1 the run failed; 2 the user's input; 130 interrupted."""
    # These warnings are for programmers; a user can do nothing about them.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    for name, value in _UNLESS_SET.items():
        os.environ.setdefault(name, value)
    _let_segments_grow()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a Windows pipe or an old terminal cannot show every character
    lazy.freezes_imports = True
    try:
        from brim.cli.app import run  # here, so that Ctrl-C during the import gives no traceback

        _require_no_secrets()
        run(sys.argv[1:])
    except BrimError as error:
        _tell(type(error).__name__, error.problems, error.exit_code)
    except KeyboardInterrupt as stopped:
        problems = [each for each in stopped.args if isinstance(each, Problem)]
        _tell("KeyboardInterrupt", problems or [Problem(what="interrupted")], _INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python fails again when it exits
        sys.exit(1)
    except OSError as error:
        # A full disk or a file that has vanished: not a bug in brim, so a traceback helps nobody.
        _tell(type(error).__name__, [Problem(what=str(error))], 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            _leave_with_traceback()
        _tell("OutOfMemoryError", [_OUT_OF_MEMORY], 1)
    except Exception:
        _leave_with_traceback()


def _tell(kind: str, problems: Sequence[Problem], exit_code: int) -> NoReturn:
    """Exit with the problems: as lines on stderr or, with --json, as JSON on stdout."""
    from brim.cli.options import (
        json_message,
        message,  # here, since --help needs no configuration
    )

    if "--json" not in sys.argv:
        _leave(message(problems), exit_code, kind)
    _print(json_message(kind, problems, exit_code), sys.stdout, exit_code, kind)
    sys.exit(exit_code)


def _let_segments_grow() -> None:
    """Ask PyTorch's allocator for expandable segments where there is a CUDA GPU and the user has set nothing.

    Micro-batches of many shapes leave gaps in segments of fixed size. torch reads the variable when it is imported;
    predictions read it, too, so that they simulate the allocator that the run has.
    """
    if _NVIDIA_DRIVER.exists() and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def _leave(message: str, exit_code: int, kind: str = "") -> NoReturn:
    _print(f"brim: {message}", sys.stderr, exit_code, kind)
    sys.exit(exit_code)


def _print(text: str, stream: TextIO, exit_code: int, kind: str = "") -> None:
    """Print an error; one of several processes leaves it with the launcher, which shows what failed first."""
    if "WORLD_SIZE" in os.environ:
        from brim.distributed import leave_message

        if leave_message(text, exit_code, follows=kind == "PeerError"):
            return
    print(text, file=stream)


def _require_no_secrets() -> None:
    """Refuse a secret of the environment in an argument, or in the folder's path: files of a run would repeat it."""
    secrets = secrets_of_environment()
    places = {"the path of the current folder": str(Path.cwd())} if secrets else {}
    places |= {f"argument {number}": argument for number, argument in enumerate(sys.argv) if number}
    problems = [
        Problem(
            what=f"{place} holds a secret that also stands in the environment",
            where="command line",
            expected="no access tokens and no passwords",
            fix="take it out; what needs a token finds it in the environment (HF_TOKEN for the Hub)",
        )
        for place, text in places.items()
        if any(secret in text for secret in secrets)
    ]
    if problems:
        raise InputError(*problems)


def _leave_with_traceback() -> NoReturn:
    """Exit with a masked traceback, for a bug in brim: a library's message in it may repeat a token."""
    from brim.cli.options import plain

    _print(plain(traceback.format_exc().strip()), sys.stderr, 1)
    _leave("this is a bug in brim; please report it with the lines above", 1)


def _is_out_of_memory(error: Exception) -> bool:
    """Recognise an error by its name and text, since torch, which mostly raises it, is not imported here."""
    words = ("out of memory", "can't allocate memory")
    kind = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return kind or any(each in str(error) for each in words)
