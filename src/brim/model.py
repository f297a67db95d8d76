"""Offer `brim.Model`: train, evaluate, predict and generate from one configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from brim.config import load_config, require_trust_said_again
from brim.config.schema import Config, FinetuneTrainer
from brim.config.text import dump
from brim.data import Split, check_split
from brim.data.read import Data, Source, read
from brim.data.tokens import require_same_tokens
from brim.distributed import Place, joined
from brim.memory.devices import limit_lifted
from brim.models import LLM, is_adapted, load_llm
from brim.notes import OnBatch, Say, status, warning
from brim.report import listening, show
from brim.session import Session, choice_notes, dataset_of, open_session, say_nothing, with_choices, with_settings
from brim.storage import write_text
from brim.train import Observer, Observers, RunFolder
from brim.workflows import export, prediction, training
from brim.workflows.runs import RunNotes, TrainResult, with_stored_template, with_trained_weights

if TYPE_CHECKING:
    from brim.infer import LayerName, Pooling
    from brim.workflows.export import UploadResult
    from brim.workflows.prediction import Activations, Contender, Conversation, OnError, OnOverlong
    from brim.workflows.runs import EvaluateResult, ExportResult, PredictResult


class Model:
    """Hold a language model that a configuration describes.

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
        self._learned: Config | None = None  # of what was trained here, once its weights are freed
        self._require_trust: Callable[[], None] = lambda: None  # before it is trained

    def __repr__(self) -> str:
        config, run = self.config, self._run
        bits = [] if config.quantization is None else [f"in {config.quantization.bits} bits"]
        adapter = [] if config.adapter is None else [f"{config.adapter.type} adapter (r {config.adapter.r})"]
        state = ["to be trained"] if self._untrained() else [] if run is None else [f"trained, run folder {run.path}"]
        return f"Model: {'; '.join([', '.join([config.base_model, *bits, *adapter]), *state])}"

    @classmethod
    def load(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Model:
        """Open the model of a finished run, or one that `save` wrote.

        With `adapter=null` among the overrides, open the base model that the run's adapter was trained on.
        """
        run = RunFolder.open(Path(path))
        model = cls(run.config, overrides=overrides)
        require_trust_said_again(model.config, overrides, run.config)
        model._require_trust = lambda: require_trust_said_again(model.config, overrides, run.config, begins=True)
        model.notes = ()  # they were shown when the run was trained
        if not any(override.startswith("chat.template=") for override in overrides):
            model.config = with_stored_template(model.config, run)
        model._run = run
        trained = with_trained_weights(model.config, run)
        if trained is not model.config:
            run.require_whole_model()
            model.config, model._needs_training = trained, False
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

        dataset: a file, or what is in memory (see docs/data.md); default: the key `dataset`.
        resume: continue the run in that folder exactly from its newest checkpoint.
        replan: do not use what earlier plans found out.
        observer: is called with each step, evaluation and event. say: is called with the notes; by default, notes and
        progress are shown; with None, nothing is. See docs/python.md for both.
        With `trainer.type: none`, nothing is trained: the splits are evaluated and no folder is written.
        """
        with ExitStack() as stack, listening(say, is_short=True) as told:
            output = Path(output_directory) if output_directory is not None else Path("results") / self._name
            trains = isinstance(self.config.trainer, FinetuneTrainer)
            place, offloads = Place.of_environment() if trains else Place(), self.config.memory.offload == "weights"
            ranks = stack.enter_context(joined(place, offloads=offloads))
            if trains:
                self._require_trust()
                if ranks.is_first:
                    RunFolder(output).check(resume=resume)
            data = dataset_of(self.config, dataset)
            notes, resumed = RunNotes(told), RunFolder(output) if resume else None
            lone = ranks.place.lone_notes(self.config.backend.trainer.num_workers) if trains else ()
            opened = self._opened(self.config, is_one_of_several=ranks.are_several)
            session = training.among(ranks, self.config, opened)
            session, source, prepared = training.prepared_for(
                session, data, resumed=resumed, notes=[*lone, *self.notes], say=notes, ranks=ranks
            )
            if not trains:
                assert source is not None, "a lone process has read it"
                if output_directory is not None or resume:
                    why = "trainer.type is none: nothing is trained, no run folder is written and none is continued"
                    told(warning(why, topic="run"))
                for line in choice_notes(self._weights(told).choices):
                    told(line)
                return prediction.evaluate_splits(
                    self._weights(), session, source, prepared, say=told, on_batch=told.advance
                )
            # One model in memory at a time; and training does not start from what was trained before.
            self._llm, self._session, self._learned, self._has_learned = None, None, None, False
            self._llm, result = training.train(
                session,
                source,
                prepared,
                output_directory=output,
                resume=resume,
                replan=replan,
                observer=Observers([told] if observer is None else [told, observer]),
                say=notes,
                ranks=ranks,
            )
            self._session, self._has_learned, self._run = session, True, RunFolder.open(output)
            if self._llm.gathers is not None:  # of sharded weights this process has a part
                self._let_go()
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
        gpus: int | str | None = None,
        say: Say | None = show,
    ) -> EvaluateResult:
        """Compute loss, perplexity, token and sequence accuracy of a split, each with its 95% interval.

        split: "full" takes all rows. Default: "full" of a given data set, "test" of the configuration's own.
        with_texts: generate answers, too, and compare them with the data's, for BLEU, ROUGE and exact match. For a
        category, answers are always generated, for the accuracy of its labels. ROUGE counts words of Latin letters
        and digits alone (rouge-score drops all others): do not use it for other scripts.
        against: "base", or a run's folder, or a configuration: evaluate that model on the same rows, too, and give the
        differences with paired intervals. The two are never in memory together.
        batch_size: rows at once, for this call; default: `trainer.eval_batch_size`. gpus: as in `predict`. say: as in
        `train`.
        """
        number = prediction.num_members(self.config, gpus, let_go=self._let_go)
        with listening(say, is_short=True) as told:
            session = self._open()
            sizes = _given(batch_size, "eval_batch_size", prediction.size_for_generating(session.config))
            session = with_settings(session, trainer=sizes)
            source = read(dataset_of(self.config, dataset))
            split = check_split(split) or ("test" if dataset is None else "full")
            ours = prediction.Contender.of(self._name, session, source, split=split, with_texts=with_texts)
            for line in [*self.notes, *self._untrained(), *ours.notes]:
                told(line)
            prediction.require_rows(ours.rows, split, source)
            other = None if against is None else self._other(against)
            theirs = None if other is None else other._contender(source, like=ours, split=split)
            how: dict[str, Any] = {"num_members": number, "say": told, "on_batch": told.advance}
            result = ours.evaluated(lambda: self._weights(told), split=split, **how)
            if other is None or theirs is None:
                return result
            self._let_go()
            found = ours.compared(result, theirs, other._weights, **how)
            return replace(result, comparison=found)

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
        keep_weights: bool = True,
        gpus: int | str | None = None,
        say: Say | None = show,
        on_batch: OnBatch | None = None,
    ) -> PredictResult:
        """Generate a response for each row, in the input's order beside its columns; write them to `output` if given.

        split: the rows to predict; "full" takes all. batch_size: rows at once, and generation: keys of the
        configuration's `generation`, both for this call. scores: add the log-probability of each response.
        resume: continue what was begun for this output; finished responses are kept. key: the column that identifies a
        row; default: its number. on_error, on_overlong: what becomes of rows that cannot be used, and of prompts that
        are too long. keep_weights: with False, the weights are given up with the call, so that an adapter is merged
        without a copy. gpus: processes that generate, or "all", one a GPU or sharing the CPU, each with its own model;
        None: one, or all of a Ray cluster. say: as in `train`. on_batch: is called with the number of rows done since.
        """
        wanted = prediction.Wanted(
            output=None if output is None else Path(output),
            split=check_split(split) or "full",
            resume=resume,
            scores=scores,
            key=key,
            on_error=on_error,
            on_overlong=on_overlong,
            num_members=prediction.num_members(self.config, gpus, let_go=self._let_go),
            is_unnamed=dataset is None,
        )
        wanted.require_place()
        session = self._open()
        sizes = _given(batch_size, prediction.size_for_generating(session.config))
        session = with_settings(session, generation=generation, trainer=sizes)
        with listening(say, is_short=True) as told, ExitStack() as stack:
            if not keep_weights:
                stack.callback(self._let_go)
            return prediction.predict(
                session,
                dataset_of(self.config, dataset),
                wanted,
                weights=lambda: self._weights(told),
                is_loaded=self._llm is not None,
                is_spent=not keep_weights,
                notes=[*self.notes, *self._untrained()],
                say=told,
                on_batch=_both(told.advance, on_batch),
            )

    @overload
    def generate(
        self, prompts: str | Sequence[str], *, stream: Literal[True], say: Say | None = show, **generation: Any
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self, prompts: str | Sequence[str], *, stream: Literal[False] = False, say: Say | None = show, **generation: Any
    ) -> str | list[str]: ...

    @limit_lifted()
    def generate(
        self, prompts: str | Sequence[str], *, stream: bool = False, say: Say | None = show, **generation: Any
    ) -> str | list[str] | Iterator[str]:
        """Return the model's answer to a finished prompt, or to each of several; the template is not applied.

        With `chat`, a prompt is a text that the chat template has written: no BOS is added to it.
        stream: return the answer to the one prompt in pieces; joined, they are all of it. An iterator that is closed or
        dropped frees its memory.
        generation: keys of the configuration's `generation`, for this call. say: as in `train`.
        """
        session = with_settings(self._open(), generation=generation)
        rows = prediction.prompts_of_texts(
            [prompts] if isinstance(prompts, str) else prompts, session, is_streamed=stream
        )
        if not len(rows):
            return []
        with listening(say) as told:
            for line in [*self.notes, *self._untrained()] if self._llm is None else []:
                told(line)
            llm = self._weights(told)
            if stream:
                return prediction.stream_text(llm, session, rows)
            answers = prediction.answered(llm, session, rows, say=told, on_batch=told.advance)
        return answers[0] if isinstance(prompts, str) else answers

    def chat(self, *, say: Say | None = show) -> Conversation:
        """Begin a conversation with the model: `ask` yields an answer in pieces, as `brim chat` shows it.

        With `chat`, the template writes all turns into each prompt; otherwise each prompt stands alone.
        """
        with listening(say) as told:
            for line in [*self.notes, *self._untrained()]:
                told(line)
            llm = self._weights(told)
        return prediction.Conversation(self._open(), llm, say=say or say_nothing)

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
        gpus: int | str | None = None,
        say: Say | None = show,
        on_batch: OnBatch | None = None,
    ) -> Activations:
        """Collect the outputs of layers for each row's prompt, in fp32 and in the order of the rows.

        layers: the number of a decoder layer, "last" for what the output layer reads, or a module's name; or several.
        pooling: "mean" over the prompt's tokens, its "last" token, or None for a vector a token. normalize: to length
        1. batch_size: rows at once, for this call; default: `trainer.eval_batch_size`. output: a parquet file for the
        vectors, which are then not held in memory; columns: their names in it; default: those of the layers.
        gpus: as in `predict`. say: as in `train`. on_batch: is called with the number of rows finished since.
        """
        collection = prediction.Collection(
            layers=[layers] if isinstance(layers, str | int) else layers,
            split=check_split(split) or "full",
            pooling=prediction.check_pooling(pooling),
            normalize=normalize,
            output=None if output is None else Path(output),
            columns=columns,
            num_members=prediction.num_members(self.config, gpus, let_go=self._let_go),
        )
        with listening(say, is_short=True) as told:
            return collection.activations(
                with_settings(self._open(), trainer=_given(batch_size, "eval_batch_size")),
                dataset_of(self.config, dataset),
                llm=self._llm,
                weights=lambda: self._weights(told),
                notes=[*self.notes, *self._untrained()],
                say=told,
                on_batch=_both(told.advance, on_batch),
            )

    def save(self, path: str | Path, *, say: Say | None = show) -> None:
        """Write the model (or adapter), the tokenizer and the configuration, for `Model.load`.

        path: a new or an empty folder. Raises OutputError when it holds anything or cannot be written. say: as in
        `train`.
        """
        run = RunFolder.create(Path(path), resume=False)
        with listening(say) as told:
            session, llm = self._open(), self._weights(told)
            told(status("writing the model"))
            training.export_trained(llm, session, run)
        # An adapter that was never trained is not part of the model, so the base model is saved without it.
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
        Raises ExportError, and leaves nothing behind, when merging changes the model by more than that.
        """
        export.check_format(format)
        how = export.merging_of(merge, **merging)
        run = export.require_run(self._run)
        if not merge:
            return export.export_run(run, Path(path))
        config = with_trained_weights(self._open().config, run)  # with the data set and day of the training
        self._let_go()  # one model in memory at a time
        with listening(say) as told:
            told(status("merging"))
            return export.merge_run(run, open_session(config), Path(path), how, say=told)

    def upload(self, repo_id: str, *, say: Say | None = show, **options: Any) -> UploadResult:
        """Send what `export` writes to the Hub, in one commit, with the token in HF_TOKEN.

        options: private, revision, commit_message. say: as in `train`.
        """
        with listening(say) as told:
            told(status("uploading the model"))
            return export.upload(export.require_run(self._run).path, repo_id, **options)

    def _open(self) -> Session:
        if self._session is None:
            self._session = self._opened(self._learned or self.config)
        return self._session

    def _opened(self, config: Config, *, is_one_of_several: bool = False) -> Session:
        session = open_session(config, is_one_of_several=is_one_of_several)
        if self._run is not None:
            require_same_tokens(self._run.model, session.folder)
        return session

    def _other(self, against: str | Path) -> Model:
        """Return the model to compare with."""
        if against != "base":
            path = Path(against)
            return Model.load(path) if path.is_dir() else Model(path)
        return Model(prediction.base_of(self._learned or self.config, self._run, has_learned=self._has_learned))

    def _contender(self, source: Source, *, like: Contender, split: str) -> Contender:
        name = self.config.base_model if self._run is None else self._run.path
        return prediction.Contender.of(str(name), self._open(), source, split=split, like=like)

    def _let_go(self) -> None:
        """Free the weights. What was learned in this process is read from the run's folder when it is needed again."""
        self._llm = None
        if self._has_learned and self._run is not None:
            trust = ["trust_remote_code=true"] if self.config.trust_remote_code else []
            self._learned = Model.load(self._run.path, overrides=trust).config
            self._session, self._has_learned = None, False

    def _weights(self, say: Say = say_nothing) -> LLM:
        if self._llm is None:
            say(prediction.loading_note(self.config))
            session = self._open()
            self._llm = load_llm(session.config, session.folder, session.device, trainable=False)
        return self._llm

    def _untrained(self) -> list[str]:
        """Return a note for those who mistake a configuration for the run that it describes."""
        if self._has_learned or self._learned is not None or not self._needs_training:
            return []
        return ["this is the model before training; for what a run has learned, name the run's folder"]


def _both(first: OnBatch, second: OnBatch | None) -> OnBatch:
    """Return a function that passes a number of rows to both; the first alone if there is no second."""

    def call(num_rows: int) -> None:
        first(num_rows)
        if second is not None:
            second(num_rows)

    return call


def _given(value: Any, *keys: str) -> dict[str, Any]:
    return {} if value is None else dict.fromkeys(keys, value)
