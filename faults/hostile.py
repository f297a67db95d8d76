"""Folders and files that somebody made to run code, to read or write elsewhere, or to go on for ever.

    python -m faults --only hostile

Each is given to brim with a canary: code that runs writes a file, whatever asks the Hub is counted, and nothing may
change beside the project.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from faults import Settings, Trial
from faults.bad_input import WORKING, BadInput, Edit, Verb, fault_of
from faults.forked import Brim
from faults.workshop import CONFIG, ROWS, as_yaml, build

ROW = "hostile"
CODE = b"open('canary', 'w').close()\nclass M: pass\n"
PICKLE = b"cbuiltins\nexec\n(S\"open('canary', 'w').close()\"\ntR."
_SHORT_STEP = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """Something made to harm, as an input that must be refused; or, where it is inert, taken without harm."""

    bad: BadInput
    inert: bool = False  # accepted, and nothing may come of it


def run(campaign: Settings) -> Iterator[Trial]:
    """Every case with every verb that it is for."""
    with hub() as counter, Brim(environment={"HF_ENDPOINT": counter.address, "HF_HUB_OFFLINE": "0"}) as brim:
        project = campaign.folder / "outer" / "project"
        project.mkdir(parents=True)
        build(project, brim)
        config = project / "run" / "config.yaml"  # so that a copy's run has the copy's base model
        config.write_text(config.read_text().replace(str(project.resolve()), "."))
        trials = [
            (hostile, verb)
            for number, hostile in enumerate(cases(project))
            for verb in (hostile.bad.verbs if not campaign.short else _one_of(hostile.bad.verbs, number))
        ]
        for number, (hostile, verb) in enumerate(trials):
            if campaign.is_mine(number):
                yield trial(hostile, verb, brim, project, counter)


def _one_of(verbs: tuple[Verb, ...], number: int) -> tuple[Verb, ...]:
    """In short, each seventh case with one verb, another one from case to case."""
    return (verbs[number // _SHORT_STEP % len(verbs)],) if number % _SHORT_STEP == 0 else ()


def trial(hostile: Hostile, verb: Verb, brim: Brim, project: Path, counter: Counter) -> Trial:
    """Spoil a copy of the project, run the verb in it, and look for the canary."""
    bad = hostile.bad
    copy = project.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(project, copy, symlinks=True)
    outside = project.parent / "outside"
    outside.mkdir(exist_ok=True)
    for edit in bad.edits:
        edit.apply(copy)
    before, counted, beside = _files(copy), counter.requests, _contents(outside)
    done = brim(*bad.command(verb), folder=copy, limit_s=60)
    made = _files(copy) - before
    if hostile.inert:
        why = "" if done.code == 0 else f"exit code {done.code}: {done.err[-300:]}"
    else:
        why = fault_of(bad, verb, done, made)
    if any(Path(name).name.startswith("canary") for name in made):
        why = "the folder's code ran"
    elif counter.requests != counted:
        why = f"the Hub was asked {counter.requests - counted} times: {counter.last}"
    elif _contents(outside) != beside:
        why = "a file outside the project was changed"
    return Trial(row=ROW, case=f"{verb}: {bad.name}", outcome="failed" if why else "passed", why=why)


@dataclass(slots=True)
class Counter:
    """A Hub of nothing, which counts who asks."""

    address: str
    requests: int = 0
    last: str = ""


@contextmanager
def hub(*, echo: bool = False) -> Iterator[Counter]:
    """A server on this machine that has no files. echo: its answer repeats what it was sent, tokens and all."""
    counter = Counter(address="")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            counter.requests += 1
            counter.last = self.path
            if not echo:
                self.send_error(404)
                return
            content = json.dumps({"error": str(self.headers)}).encode()
            self.send_response(401)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Error-Message", str(self.headers.get("Authorization")))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        counter.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield counter
        finally:
            server.shutdown()
            thread.join()


def cases(project: Path) -> list[Hostile]:
    """All of them. project: an untouched one, whose files are changed a little."""
    return [
        *_base_models(project),
        *_weights(project),
        *_adapters(project),
        *_templates(),
        *_data(),
        *_outputs(),
        *_runs(project),
    ]


def _json(project: Path, path: str, **values: Any) -> Edit:
    file = project / path
    content = json.loads(file.read_text()) if file.exists() else {}
    return Edit(path=path, content=json.dumps({**content, **values}).encode())


def _case(name: str, *edits: Edit, says: str, inert: bool = False, **keys: Any) -> Hostile:
    return Hostile(bad=BadInput(row=ROW, name=name, edits=edits, says=(says,), **keys), inert=inert)


def _base_models(project: Path) -> Iterator[Hostile]:
    code = Edit(path="base/evil.py", content=CODE)
    maps = {"AutoConfig": "evil.M", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": "evil.M"}
    own = "asks for its own code to be run"
    config, tokenizer = "base/config.json", "base/tokenizer_config.json"

    def settings(path: str, name: str, says: str = own, **values: Any) -> Hostile:
        return _case(name, code, _json(project, path, **values), says=says)

    yield settings(config, "auto_map, unknown model_type", auto_map=maps, model_type="evil")
    yield settings(config, "auto_map, known model_type", auto_map=maps)
    yield settings(config, "auto_map that names another repository", auto_map={"AutoConfig": "evil/repo--evil.M"})
    yield settings(config, "auto_map below text_config", text_config={"auto_map": maps})
    yield settings(config, "trust_remote_code in config.json", trust_remote_code=True, auto_map=maps)
    yield settings(config, "custom_pipelines", custom_pipelines={"text-generation": {"impl": "evil.M", "pt": ["x"]}})
    yield settings(tokenizer, "auto_map of the tokenizer", auto_map={"AutoTokenizer": ["evil.M", "evil.M"]})
    yield settings("base/generation_config.json", "custom_generate", custom_generate="evil/repo")
    yield _case("custom_generate/", Edit(path="base/custom_generate/generate.py", content=CODE), says=own)
    fetches = "fetch compiled code"
    yield settings(config, "a kernel from the Hub", fetches, attn_implementation="evil/kernel")
    yield settings(config, "a kernel from the Hub, inside", fetches, _attn_implementation={"": "evil/kernel@main:f"})
    yield settings(config, "experts from the Hub", fetches, experts_implementation="evil/kernel")
    yield settings(config, "use_kernels", fetches, use_kernels=True)
    yield settings(config, "kernel_config", fetches, kernel_config={"kernel_mapping": {"RMSNorm": "evil/k:RMSNorm"}})
    yield settings(config, "a quantisation of nobody's", "quantised by", quantization_config={"quant_method": "evil"})
    yield settings(config, "a quantisation with kernels", "quantised by", quantization_config={"quant_method": "mxfp4"})
    yield settings(config, "a billion layers", "num_hidden_layers", num_hidden_layers=10**9)
    yield settings(config, "a huge vocabulary", "vocab_size", vocab_size=10**12)
    yield settings(config, "control characters in a name", "", model_type="\x1b]0;evil\x07\x1b[2J")
    yield settings(
        "base/adapter_config.json", "an adapter in the base", "holds an adapter", base_model_name_or_path="evil/m"
    )


def _weights(project: Path) -> Iterator[Hostile]:
    whole = (project / "base" / "model.safetensors").read_bytes()
    gone = Edit(path="base/model.safetensors", how="remove")
    yield _case("pickled weights", gone, Edit(path="base/pytorch_model.bin", content=PICKLE), says="are pickled")
    yield _case(
        "a pickle called safetensors", Edit(path="base/model.safetensors", content=PICKLE), says="base", verbs=WORKING
    )
    for target in ("../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors"):
        index = _json(project, "base/model.safetensors.index.json", weight_map={"lm_head.weight": target})
        outside = Edit(path="outside.safetensors", content=whole)
        yield _case(f"an index to {target}", gone, index, outside, says="no safetensors file of this folder")
    outside = Edit(path="outside.safetensors", content=whole)
    link = Edit(path="base/model.safetensors", how="link", target="../outside.safetensors")
    yield _case("weights that are a link", outside, link, says="leaves the folder")
    yield _case(
        "weights of another name",
        outside,
        _json(project, "base/config.json", transformers_weights="../outside.safetensors"),
        says="transformers_weights",
    )
    secret = Edit(path="secret", content=b"a secret")
    for name in ("merges.txt", "chat_template.jinja", "special_tokens_map.json", "evil\x1b[2J"):
        yield _case(
            f"{name!r} is a link",
            secret,
            Edit(path=f"base/{name}", how="link", target="../secret"),
            says="leaves the folder",
        )
    yield _case("a tokenizer without end", Edit(path="base/tokenizer.json", how="sparse"), says="tokenizer.json has")
    yield _case("a config.json without end", Edit(path="base/config.json", how="sparse"), says="config.json has")
    yield _case("a pipe for a tokenizer", Edit(path="base/tokenizer.json", how="fifo"), says="no regular file")


def _adapters(project: Path) -> Iterator[Hostile]:
    config = {**CONFIG, "adapter": {"type": "lora", "pretrained_adapter_weights": "./run/model"}}
    named = Edit(path="config.yaml", content=as_yaml(config).encode())
    path = "run/model/adapter_config.json"

    def settings(name: str, says: str, **values: Any) -> Hostile:
        return _case(f"adapter: {name}", named, _json(project, path, **values), says=says)

    yield settings("an unknown field", "does not know: evil", evil="evil.py")
    yield settings("auto_mapping", "auto_mapping", auto_mapping={"base_model_class": "M", "parent_library": "evil"})
    yield settings("megatron_core", "megatron_core", megatron_core="evil", megatron_config={"a": 1})
    yield settings("corda_config", "corda_config", corda_config={"cache_file": "/etc/passwd"})
    yield settings("eva_config", "eva_config", eva_config={"rho": 2.0})
    yield settings("arrow_config", "arrow_config", arrow_config={"task_adapter_names": ["evil"]})
    yield settings("layer_replication", "layer_replication", layer_replication=[[0, 10**9]])
    yield settings("an endless expression", "target_modules", target_modules="(([a-z]+)*\\.?)*!")
    yield settings("an endless expression to exclude", "exclude_modules", exclude_modules="(.+)+!")
    yield settings("an endless expression for ranks", "rank_pattern", rank_pattern={"(.+)+!": 4})
    yield settings("an endless expression for modules", "modules_to_save", modules_to_save=["(.+)+!"])
    yield settings("a huge rank", "has 2 rows", r=10**9)
    yield settings("another kind", "not LORA", peft_type="PROMPT_TUNING", tokenizer_name_or_path="evil/m")
    yield _case(
        "adapter: of another base",
        named,
        _json(project, path, base_model_name_or_path="evil/model", revision="evil"),
        says="",
        inert=True,
        verbs=("check", "train"),
    )
    weights = Edit(path="run/model/adapter_model.safetensors", how="remove")
    pickled = Edit(path="run/model/adapter_model.bin", content=PICKLE)
    yield _case("adapter: pickled", named, weights, pickled, says="holds no adapter_model.safetensors")
    renamed = Edit(path="run/model/adapter_model.safetensors", content=PICKLE)
    yield _case("adapter: a pickle called safetensors", named, renamed, says="is damaged")
    link = Edit(path="run/model/adapter_config.json", how="link", target="../../rows.jsonl")
    yield _case("adapter: settings that are a link", named, link, says="leaves the folder")


def _templates() -> Iterator[Hostile]:
    for template in (
        "{x.__class__}",
        "{question.__class__.__mro__}",
        "{question.__init__.__globals__}",
        "{x[0]}",
        "{question[0]}",
        "{0}",
        "{x!r}",
        "{question!r}",
        "{question:>999999999}",
        "{question:{question}}",
        "{__import__}",
        "{self}",
        "{}",
    ):
        content = {**CONFIG, "prompt": {"template": template}}
        yield _case(f"template {template}", Edit(path="config.yaml", content=as_yaml(content).encode()), says="")
    turns = [
        {
            "messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}],
            "split": row["split"],
        }
        for row in ROWS
    ]
    data = Edit(path="chat.jsonl", content="".join(json.dumps(row) + "\n" for row in turns).encode())
    kept = {key: value for key, value in CONFIG.items() if key not in ("input_features", "output_features", "prompt")}
    config = Edit(path="config.yaml", content=as_yaml({**kept, "chat": {}}).encode())
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
        "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**11 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'evil' %}",
        "{{ '(((((' * 100000 }}" + "{{ (" * 5000,
        "{% set x = namespace(l=[]) %}{% for i in range(10**7) %}{% set x.l = x.l + x.l + [1] %}{% endfor %}",
    ):
        edit = Edit(path="base/chat_template.jinja", content=template.encode())
        yield _case(f"chat template {template[:60]}", data, config, edit, says="chat", dataset="chat.jsonl")


def _data() -> Iterator[Hostile]:
    state = {
        "_data_files": [{"filename": "../outside.arrow"}],
        "_fingerprint": "x",
        "_format_type": None,
        "_split": None,
    }
    yield _case(
        "a saved data set with a file outside",
        Edit(path="saved/state.json", content=json.dumps(state).encode()),
        Edit(path="saved/dataset_info.json", content=b"{}"),
        dataset="saved",
        says="state.json",
    )
    yield _case(
        "a folder with a loading script",
        Edit(path="saved/saved.py", content=CODE),
        Edit(path="saved/dataset_infos.json", content=b"{}"),
        dataset="saved",
        says="not a saved data set",
    )
    yield _case("a script", Edit(path="rows.py", content=CODE), dataset="rows.py", says="ending")
    yield _case("a pickle", Edit(path="rows.pkl", content=PICKLE), dataset="rows.pkl", says="ending")
    yield _case(
        "a pickle called parquet", Edit(path="rows.parquet", content=PICKLE), dataset="rows.parquet", says="parquet"
    )
    columns = {"../../../outside/canary": "a", "/etc/passwd": "b"}
    rows = "".join(json.dumps({**row, **columns}) + "\n" for row in ROWS).encode()
    yield _case("columns called like paths", Edit(path="rows.jsonl", content=rows), says="", inert=True)


def _outputs() -> Iterator[Hostile]:
    outside = Edit(path="../outside/victim", content=b"precious")
    for name in ("new.jsonl", ".new.jsonl.tmp"):
        link = Edit(path=name, how="link", target="../outside/victim")
        inert = name != "new.jsonl"
        yield _case(f"{name} is a link", outside, link, says="exists already", verbs=("predict",), inert=inert)
    dangling = Edit(path="new.jsonl", how="link", target="../outside/made")
    yield _case("new.jsonl is a link to nothing", dangling, says="exists already", verbs=("predict",))
    folder = Edit(path="new", how="link", target="../outside")
    yield _case("the run's folder is a link", outside, folder, says="new", verbs=("train",))


_RUN_VERBS: tuple[Verb, ...] = ("evaluate", "predict", "resume")


def _runs(project: Path) -> Iterator[Hostile]:
    content = (project / "run" / "config.yaml").read_text()
    code = Edit(path="base/evil.py", content=CODE)
    mapped = _json(project, "base/config.json", auto_map={"AutoModelForCausalLM": "evil.M", "AutoConfig": "evil.M"})
    trusting = content.replace("trust_remote_code: false", "trust_remote_code: true")
    run: dict[str, Any] = {"model": "run", "verbs": _RUN_VERBS, "codes": (1, 2)}
    yield _case(
        "a run that trusts its base model",
        code,
        mapped,
        Edit(path="run/config.yaml", content=trusting.encode()),
        says="trust_remote_code",
        **{**run, "verbs": ("check", *_RUN_VERBS)},
    )
    yield _case("a run whose base model asks for code", code, mapped, says="its own code", **run)
    evil = _json(project, "run/model/adapter_config.json", auto_mapping={"parent_library": "evil"})
    unlisted = Edit(path="run/model/manifest.json", how="remove")
    yield _case(
        "a run whose adapter imports", evil, unlisted, says="auto_mapping", **{**run, "verbs": ("evaluate", "predict")}
    )
    newest = max((project / "run" / "checkpoints").iterdir()).name
    for name in ("../../../outside/victim", "/etc/passwd"):
        lying = _json(project, f"run/checkpoints/{newest}/manifest.json", **{name: "0" * 64})
        yield _case(
            f"a checkpoint that lists {name}",
            lying,
            says="checkpoint",
            **{**run, "verbs": ("resume",)},
            may_pass=("resume",),
        )
    link = Edit(path=f"run/checkpoints/{newest}/model.safetensors", how="link", target="/etc/passwd")
    yield _case(
        "a checkpoint that is a link", link, says="checkpoint", **{**run, "verbs": ("resume",)}, may_pass=("resume",)
    )


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
