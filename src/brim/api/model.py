"""brim.Model: train, evaluate, predict and generate from one configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

from brim.api.activations import Activations, Asked, activations_of, check_pooling
from brim.api.chat import template_texts, with_day_of_run, with_stored_template
from brim.api.comparison import Contender, base_of, compared, contender
from brim.api.conversation import Conversation
from brim.api.evaluation import answerable, evaluate, respond, size_for_generating
from brim.api.export import check_format, export_run
from brim.api.forward_planning import batches_for
from brim.api.generation_request import rows_by_hand
from brim.api.inference import engine_by_hand, settings_of
from brim.api.merging import merge_run, merging_of
from brim.api.planned_generation import planned_engine
from brim.api.predict_policies import OnError, OnOverlong
from brim.api.predicting import Wanted, check_wanted, predict
from brim.api.prompts import require_continuable, require_rows, require_texts
from brim.api.results import EvaluateResult, ExportResult, PredictResult, TrainResult
from brim.api.run_files import RunNotes
from brim.api.session import (
    Say,
    Session,
    choice_notes,
    open_session,
    say_nothing,
    with_choices,
    with_dataset,
    with_labels,
    with_rows,
    with_settings,
)
from brim.api.streaming import require_one, stream_text
from brim.api.training import train
from brim.api.upload import UploadResult, upload
from brim.config import Config, FinetuneTrainer, dump, load_config, require_trainable, require_trust_said_again
from brim.data import Data, Ledger, Prepared, Source, TokenRows, prepare, read, slip_notes, texts_as_source
from brim.data.same_tokens import require_same_tokens
from brim.errors import ConfigError, InputError, Problem
from brim.files import write_text
from brim.infer.activations import Pooling
from brim.infer.engine import Engine
from brim.infer.labels import label_reader
from brim.infer.named_layers import LayerName
from brim.models.adapters import is_adapted
from brim.models.llm import LLM, load_llm
from brim.notes import status, warning
from brim.planning.at_hand import limit_lifted
from brim.report.screen import listening, show
from brim.train.export import export_model
from brim.train.observer import Observer, Observers
from brim.train.run_folder import (
    RunFolder,
    check_run_folder,
    create_run_folder,
    open_run_folder,
    require_whole_model,
)

Split = Literal["train", "validation", "test", "full"]

_DEFAULT_OUTPUT = Path("results")
_A_FEW = 8  # prompts


class Model:
    """A language model described by a configuration.

    config: a YAML file, a mapping with the same keys, or a Config. overrides: dotted, "trainer.epochs=1".
    Nothing is loaded until it is needed. Raises ConfigError when the configuration is wrong.
    """

    def __init__(self, config: str | Path | Mapping[str, Any] | Config, *, overrides: Sequence[str] = ()) -> None:
        loaded = load_config(config.model_dump(exclude_unset=True) if isinstance(config, Config) else config, overrides)
        self.config = loaded.config
        self.notes = loaded.notes
        self._name = Path(loaded.name).stem
        self._session: Session | None = None
        self._llm: LLM | None = None
        self._needs_training = isinstance(self.config.trainer, FinetuneTrainer)
        self._has_learned = False
        self._run: RunFolder | None = None
        self._require_trust_to_train: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        config, run = self.config, self._run
        bits = [] if config.quantization is None else [f"in {config.quantization.bits} bits"]
        adapter = [] if config.adapter is None else [f"{config.adapter.type} adapter (r {config.adapter.r})"]
        state = ["to be trained"] if self._untrained() else [] if run is None else [f"trained, run folder {run.path}"]
        return f"Model: {'; '.join([', '.join([config.base_model, *bits, *adapter]), *state])}"

    @classmethod
    def load(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Model:
        """The model of a finished run, or one that `save` wrote.

        With `adapter=null` among the overrides, the base model that the run's adapter was trained on.
        """
        run = open_run_folder(Path(path))
        model = cls(run.config, overrides=overrides)
        require_trust_said_again(model.config, overrides, run.config)
        model._require_trust_to_train = lambda: require_trust_said_again(
            model.config, overrides, run.config, begins=True
        )
        holds_adapter = _holds_adapter(run)
        model.notes = ()  # said when the run was trained
        if not any(override.startswith("chat.template=") for override in overrides):
            model.config = with_stored_template(model.config, run)
        model._run = run
        if model.config.adapter is not None or not holds_adapter:
            require_whole_model(run)
            model.config = _with_trained_weights(model.config, run, holds_adapter=holds_adapter)
            model._needs_training = False
        return model

    @limit_lifted()
    def train(
        self,
        dataset: Data | None = None,
        *,
        output_directory: str | Path | None = None,
        resume: bool = False,
        replan: bool = False,
        observer: Observer | None = None,
        say: Say | None = show,
    ) -> TrainResult:
        """Train and write a run folder (default: results/<name of the configuration file>).

        dataset: a file, a saved `datasets` folder, a data frame or a mapping of columns; default: the key `dataset`.
        resume: continue the run in that folder exactly where its newest checkpoint stands.
        replan: do not use what earlier plans found out.
        observer: hears each step, evaluation and event. say: takes the notes; by default they are shown, and how far
        the run has come; None: nothing is. See docs/python.md for both.
        With `trainer.type: none` nothing is trained: the splits are evaluated and no folder is written.
        """
        with listening(say, is_short=True) as told:
            observers = Observers([told] if observer is None else [told, observer])
            return self._train(dataset, output_directory, observers, told, resume=resume, replan=replan)

    def _train(
        self,
        dataset: Data | None,
        output_directory: str | Path | None,
        observer: Observer,
        say: Say,
        *,
        resume: bool,
        replan: bool,
    ) -> TrainResult:
        output = Path(output_directory) if output_directory is not None else _DEFAULT_OUTPUT / self._name
        trains = isinstance(self.config.trainer, FinetuneTrainer)
        if trains:
            self._require_trust_to_train()
            check_run_folder(output, resume=resume)
        data = self._dataset(dataset)
        session = with_dataset(self._open(), data)
        if resume:
            session = with_day_of_run(session, RunFolder(output))
        require_trainable(session.config)
        notes = RunNotes(say)
        notes(status("reading the data"))
        source = read(data)
        session, slips = with_labels(session, source), slip_notes(session.config, source)
        prepared = prepare(source, session.config, session.encoder, context_length=session.folder.context_length)
        session = with_rows(session, len(prepared.splits["train"]))
        for line in [*self.notes, *choice_notes(session.choices), *slips, *prepared.notes, *prepared.ledger.summary()]:
            notes(line)
        if not trains:
            if output_directory is not None or resume:
                told = "trainer.type is none: nothing is trained, no run folder is written and none is continued"
                say(warning(told, topic="run"))
            for line in choice_notes(self._weights(say).choices):
                say(line)
            evaluated = self._evaluate_splits(session, source, prepared, say)
            return replace(evaluated, num_left_out=prepared.ledger.num_left_out())
        self._llm, self._has_learned = None, False  # one model in memory at a time
        self._llm, result = train(
            session,
            source,
            prepared,
            output_directory=output,
            resume=resume,
            replan=replan,
            observer=observer,
            say=notes,
        )
        self._session, self._has_learned, self._run = session, True, open_run_folder(output)
        return result

    @limit_lifted()
    def evaluate(
        self,
        dataset: Data | None = None,
        *,
        split: Split | None = None,
        with_texts: bool = False,
        against: str | Path | None = None,
        batch_size: int | None = None,
        say: Say | None = show,
    ) -> EvaluateResult:
        """Loss, perplexity, token and sequence accuracy of a split, each with its 95% interval.

        split: "full" takes all rows. Default: "full" of a given data set, "test" of the configuration's own.
        with_texts: generate answers, too, and compare them with the data's, for BLEU, ROUGE and exact match. Of a
        category, answers are generated in any case, for the accuracy of its labels. ROUGE counts words of Latin letters
        and digits alone (rouge-score drops all others): do not use it for other scripts.
        against: "base", or a run's folder, or a configuration: evaluate that model on the same rows, too, and give the
        differences with paired intervals. The two are never in memory together.
        batch_size: rows at once, for this call; default: `trainer.eval_batch_size`. say: as in `train`.
        """
        with listening(say) as told:
            return self._evaluate(dataset, split, against, batch_size, told, with_texts=with_texts)

    def _evaluate(
        self,
        dataset: Data | None,
        split: Split | None,
        against: str | Path | None,
        batch_size: int | None,
        say: Say,
        *,
        with_texts: bool,
    ) -> EvaluateResult:
        session = self._open()
        sizes = _given("eval_batch_size", batch_size) | _given(size_for_generating(session.config), batch_size)
        session = with_settings(session, trainer=sizes)
        source = read(self._dataset(dataset))
        session = with_labels(session, source)
        split = check_split(split) or ("test" if dataset is None else "full")
        prepared = prepare(
            source, session.config, session.encoder, context_length=session.folder.context_length, only=split
        )
        rows, ledger, asked = prepared.splits[split], prepared.ledger, None
        with_texts |= label_reader(session.config) is not None
        if with_texts:
            rows, asked, entries = answerable(source, session, prepared, split=split)
            ledger = ledger.with_more(entries)
        for line in [*self.notes, *self._untrained(), *prepared.notes, *ledger.summary()]:
            say(line)
        require_rows(rows, split, source)
        other = None if against is None else self._other(against)
        theirs = None if other is None else other._contender(source, like=session, split=split, with_texts=with_texts)
        at_once = batches_for(session, [rows], llm=self._weights(say), say=say)
        result = evaluate(self._weights(), session, rows, split=split, batches=at_once, asked=asked, say=say)
        result = replace(result, num_left_out=ledger.num_left_out())
        if other is None or theirs is None:
            return result
        self._let_go()
        ours = Contender(name=self._name, session=session, rows=rows, asked=asked)
        say(f"{theirs.name}:")
        return replace(result, comparison=compared(result, (ours, theirs), other._weights, say=say))

    @limit_lifted()
    def predict(
        self,
        dataset: Data | None = None,
        *,
        output: str | Path | None = None,
        split: Split = "full",
        batch_size: int | None = None,
        generation: Mapping[str, Any] | None = None,
        resume: bool = False,
        scores: bool = False,
        key: str | None = None,
        on_error: OnError | None = None,
        on_overlong: OnOverlong | None = None,
        say: Say | None = show,
        on_batch: Callable[[int], None] | None = None,
    ) -> PredictResult:
        """One response a row, in the order of the input, beside the input's columns; written to `output` if given.

        split: the rows to predict; "full" takes all. batch_size: rows at once, and generation: keys of the
        configuration's `generation`, both for this call. scores: add the log-probability of each response.
        resume: go on with what was begun for this output; responses that are there are kept. key: the column that tells
        which row is which; default: their order. on_error, on_overlong: what becomes of rows that cannot be used, and
        of prompts that are too long; default: as the configuration says. See docs/predict.md. say: as in `train`.
        on_batch: told how many more rows are done.
        """
        path = None if output is None else Path(output)
        check_wanted(path, resume=resume)
        session = self._open()
        size = size_for_generating(session.config)
        session = with_settings(session, generation=generation, trainer=_given(size, batch_size))
        wanted = Wanted(
            output=path,
            split=split,
            resume=resume,
            scores=scores,
            key=key,
            on_error=on_error,
            on_overlong=on_overlong,
            is_unnamed=dataset is None,
        )
        notes = [*self.notes, *self._untrained()]
        with listening(say) as told:
            return predict(
                session,
                self._dataset(dataset),
                wanted,
                weights=lambda: self._weights(told),
                notes=notes,
                say=told,
                on_batch=_both(told.advance, on_batch),
            )

    @overload
    def generate(self, prompts: str | Sequence[str], *, stream: Literal[True], **generation: Any) -> Iterator[str]: ...

    @overload
    def generate(
        self, prompts: str | Sequence[str], *, stream: Literal[False] = False, **generation: Any
    ) -> str | list[str]: ...

    @limit_lifted()
    def generate(
        self, prompts: str | Sequence[str], *, stream: bool = False, **generation: Any
    ) -> str | list[str] | Iterator[str]:
        """The model's answer to a finished prompt, or to each of several; the template is not applied.

        With `chat`, a prompt is a text that the chat template has written: no BOS is added to it.
        stream: give the answer to the one prompt in pieces, as it is made, which join up to the whole of it; an
        iterator that is closed or dropped frees its memory.
        generation: keys of the configuration's `generation`, for this call.
        """
        session = with_settings(self._open(), generation=generation)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        require_texts(texts)
        rows = texts_as_source(texts, session.encoder, are_chats=session.config.chat is not None)
        require_continuable(rows, session, lambda key: f"prompt {key + 1}")
        if stream:
            require_one(rows)
            return stream_text(self._weights(), session, rows)
        if not texts:
            return []
        responses = respond(_engine_for(self._weights(), session, rows), session, rows)
        answers: list[str] = responses["response"].tolist()
        return answers[0] if isinstance(prompts, str) else answers

    def chat(self, *, say: Say | None = show) -> Conversation:
        """A conversation with the model: `ask` gives an answer in pieces, as `brim chat` shows it.

        With `chat`, the template writes all turns into each prompt; otherwise each prompt stands alone.
        """
        with listening(say) as told:
            for line in [*self.notes, *self._untrained()]:
                told(line)
            weights = self._weights(told)
        return Conversation(self._open(), weights, say=say or say_nothing)

    @limit_lifted()
    def collect_activations(
        self,
        layers: LayerName | Sequence[LayerName],
        dataset: Data | None = None,
        *,
        split: Split = "full",
        pooling: Pooling = "mean",
        normalize: bool = False,
        batch_size: int | Literal["auto"] | None = None,
        output: str | Path | None = None,
        columns: Sequence[str] | None = None,
        say: Say | None = show,
        on_batch: Callable[[int], None] | None = None,
    ) -> Activations:
        """What layers make of each row's prompt, in fp32 and in the order of the rows.

        layers: the number of a decoder layer, "last" for what the output layer reads, or a module's name; or several.
        pooling: "mean" over the prompt's tokens, its "last" token, or None for a vector a token. normalize: to length
        1. batch_size: rows at once, for this call; default: `trainer.eval_batch_size`. output: a parquet file for the
        vectors, which are then not held in memory; columns: their names in it, which are else those of the layers.
        say: as in `train`. on_batch: told how many more rows are done.
        """
        asked = Asked(
            layers=[layers] if isinstance(layers, str | int) else layers,
            split=split,
            pooling=check_pooling(pooling),
            normalize=normalize,
            output=None if output is None else Path(output),
            columns=columns,
        )
        with listening(say) as told:
            return activations_of(
                with_settings(self._open(), trainer=_given("eval_batch_size", batch_size)),
                self._dataset(dataset),
                asked,
                llm=self._llm,
                weights=lambda: self._weights(told),
                notes=[*self.notes, *self._untrained()],
                say=told,
                on_batch=_both(told.advance, on_batch),
            )

    def save(self, path: str | Path) -> None:
        """Write the model (or adapter), the tokenizer and the configuration, for `Model.load`.

        path: a new or an empty folder. Raises OutputError when it holds anything or cannot be written.
        """
        run = create_run_folder(Path(path), resume=False)
        session, llm = self._open(), self._weights()
        export_model(llm, run.model, generation=settings_of(llm, session), chat=template_texts(session))
        # An adapter that was never trained is not part of the model, which is then saved as it is.
        config = with_choices(session, llm.choices).config
        config = config if is_adapted(llm.model) else config.model_copy(update={"adapter": None})
        write_text(run.config, dump(config))

    def export(
        self,
        path: str | Path,
        *,
        merge: bool = False,
        format: str = "safetensors",
        say: Say | None = show,
        **merging: Any,
    ) -> ExportResult:
        """Write the adapter, or the whole model, of a finished run to a new or an empty folder, without paths or logs.

        merge: put the adapter into the weights of its base, for plain transformers; `merging`: dtype ("bf16", "fp16",
        "fp32"), max_divergence (nats a token) and dataset (whose rows show the divergence), as in docs/export.md.
        Raises ExportError, leaving nothing behind, when merging changes the model by more than that.
        """
        check_format(format)
        how = merging_of(merge, **merging)
        run = self._finished_run()
        if not merge:
            return export_run(run, Path(path))
        holds_adapter, config = _holds_adapter(run), self._open().config  # with the data set and day of the training
        self._let_go()  # one model in memory at a time
        if config.adapter is not None or not holds_adapter:
            config = _with_trained_weights(config, run, holds_adapter=holds_adapter)
        with listening(say) as told:
            told(status("merging"))
            return merge_run(run, open_session(config), Path(path), how, say=told)

    def upload(self, repo_id: str, **options: Any) -> UploadResult:
        """Send what `export` writes to the Hub, in one commit, with the token in HF_TOKEN.

        options: private, revision, commit_message.
        """
        return upload(self._finished_run().path, repo_id, **options)

    def _finished_run(self) -> RunFolder:
        if self._run is None:
            raise InputError(
                Problem(
                    what="there is nothing trained to hand on: this model comes from a configuration, not from a run",
                    expected="a run's folder, or a model that was trained just now",
                    fix="name the folder that `brim train` wrote; what `Model.save` writes can be loaded, too",
                )
            )
        return self._run

    def _open(self) -> Session:
        if self._session is None:
            session = open_session(self.config)
            if self._run is not None:
                require_same_tokens(self._run.model, session.folder)
            self._session = session
        return self._session

    def _other(self, against: str | Path) -> Model:
        """The model to compare with."""
        if against != "base":
            path = Path(against)
            return Model.load(path) if path.is_dir() else Model(path)
        return Model(base_of(self.config, self._run, has_learned=self._has_learned))

    def _contender(self, source: Source, *, like: Session, split: str, with_texts: bool) -> Contender:
        name = self.config.base_model if self._run is None else str(self._run.path)
        return contender(name, self._open(), source, like=like, split=split, with_texts=with_texts)

    def _let_go(self) -> None:
        """Free the weights. What was learned in this process is read from the run's folder when it is needed again."""
        self._llm = None
        if self._has_learned and self._run is not None:
            trust = ["trust_remote_code=true"] if self.config.trust_remote_code else []
            self.config = Model.load(self._run.path, overrides=trust).config
            self._session, self._has_learned, self._needs_training = None, False, False

    def _weights(self, say: Say = say_nothing) -> LLM:
        if self._llm is None:
            say(status("loading the model"))
            session = self._open()
            self._llm = load_llm(session.config, session.folder, session.device, trainable=False)
        return self._llm

    def _untrained(self) -> list[str]:
        """A note for those who take a configuration for the run that it describes."""
        if self._has_learned or not self._needs_training:
            return []
        return ["this is the model before training; for what a run has learned, name the run's folder"]

    def _dataset(self, dataset: Data | None) -> Data:
        if dataset is not None:
            return dataset
        if self.config.dataset is not None:
            return self.config.dataset
        raise ConfigError(
            Problem(
                what="there is no data set",
                expected="--dataset FILE, the key `dataset`, or dataset=… in Python",
                fix="name a csv, tsv, json, jsonl or parquet file, or a saved datasets folder",
            )
        )

    def _evaluate_splits(self, session: Session, source: Source, prepared: Prepared, say: Say) -> TrainResult:
        """What `train` does with `trainer.type: none`, as in Ludwig."""
        trainer, splits = session.config.trainer, prepared.splits
        started = time.perf_counter()
        wanted = [] if trainer.skip_all_evaluation else ["train", "validation", "test"]
        if not trainer.evaluate_training_set:
            wanted = wanted[1:]
        metrics: dict[str, Mapping[str, float]] = {}
        for split in (split for split in wanted if len(splits[split])):
            rows, asked = splits[split], None
            if label_reader(session.config) is not None:
                rows, asked, entries = answerable(source, session, prepared, split=split)
                for line in Ledger(num_rows=len(splits[split]), entries=entries).summary():
                    say(line)
            at_once = batches_for(session, [rows], llm=self._weights(), say=say)
            result = evaluate(self._weights(), session, rows, split=split, batches=at_once, asked=asked, say=say)
            metrics[split] = result.metrics
        return TrainResult(
            output_directory=None,
            num_steps=0,
            best_step=None,
            metrics=metrics,
            num_rows={split: len(rows) for split, rows in splits.items()},
            seconds=time.perf_counter() - started,
        )


def check_split(name: str | None) -> Split | None:
    """A split's name as a person typed it. Raises InputError for one that does not exist."""
    for split in get_args(Split):
        if name == split:
            return cast(Split, split)
    if name is None:
        return None
    raise InputError(Problem(what=f"there is no split {name!r}", expected=", ".join(get_args(Split))))


def _both(first: Callable[[int], None], second: Callable[[int], None] | None) -> Callable[[int], None]:
    def told(num_rows: int) -> None:
        first(num_rows)
        if second is not None:
            second(num_rows)

    return told


def _given(key: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {key: value}


def _engine_for(llm: LLM, session: Session, prompts: TokenRows) -> Engine:
    """A few prompts are answered before a plan would be made, unless there is a budget to keep to."""
    if len(prompts) > _A_FEW or session.config.memory.budget != "auto":
        return planned_engine(llm, session, prompts, say=say_nothing).engine
    return engine_by_hand(llm, session, batch_rows=min(rows_by_hand(session.config) or _A_FEW, len(prompts)))


def _holds_adapter(run: RunFolder) -> bool:
    return (run.model / "adapter_config.json").is_file()


def _with_trained_weights(config: Config, run: RunFolder, *, holds_adapter: bool) -> Config:
    """The configuration of a run with what it has learned in place of what it started from."""
    weights = str(run.model.resolve())
    if config.adapter is not None and holds_adapter:
        adapter = config.adapter.model_copy(update={"pretrained_adapter_weights": weights})
        return config.model_copy(update={"adapter": adapter})
    return config.model_copy(update={"base_model": weights, "initialize": "pretrained"})
