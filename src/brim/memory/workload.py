"""Turn what brim itself runs for a configuration into workloads that can be traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import Parameter, functional
from torch.optim import Optimizer

from brim.config import Choice, accumulates
from brim.config.schema import Config, FinetuneTrainer, LoraConfig
from brim.data.tokens import Batch
from brim.memory.cuda import (
    CudaTarget,
    as_on_cuda,
    cuda_temporaries,
    foreach_as_on_cuda,
    grouped_mm,
    liger_stand_ins,
)
from brim.memory.events import EventStream
from brim.memory.loading import (
    LoadedTensor,
    LoadKind,
    bias_bytes,
    loaded_tensors,
    of_all_layers,
    warmup_bytes,
    with_loading,
)
from brim.memory.trace import (
    Recording,
    Training,
    Workload,
    no_temporaries,
    num_recomputed,
    paged_bytes,
    recomputing,
    traceable_optimizer,
)
from brim.models import LLM, cast_products, equip, precision
from brim.models.folders import ModelFolder, open_adapter
from brim.models.kernels import layer_kernels
from brim.models.packing import PackedAttention, PackedRows, passing
from brim.storage import sha256
from brim.train import clip_gradients

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from brim.data.tokens import PromptBatch
    from brim.infer.engines import CacheShape
    from brim.memory.cuda import FlashAttnPackage


_CPU = torch.device("cpu")


class ConfigWorkload:
    """Build a resolved configuration's model and run its steps, on fake tensors.

    target: the GPU to predict for; None: this machine's CPU. architecture: what the folder's config.json describes.
    """

    def __init__(
        self, config: Config, folder: ModelFolder, architecture: PretrainedConfig, *, target: CudaTarget | None
    ) -> None:
        self._config = _without_weights(config)
        self._is_adapted = _is_adapted(config)
        self._folder = folder
        self._architecture = architecture
        self._target = target
        self._precision = precision(cast(Any, config.precision))
        self._kernels = layer_kernels(self._config, lambda: architecture, liger_stand_ins(target))
        self._llm: LLM | None = None
        self._loaded: list[LoadedTensor] = []  # of the layers that the last model was built with
        self.choices: tuple[Choice, ...] = ()  # known once the model has been built

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches of a step are simulated: a third would be like the second."""
        trainer = self._config.trainer
        return 2 if isinstance(trainer, FinetuneTrainer) and accumulates(trainer) else 1

    @property
    def facts(self) -> dict[str, Any]:
        """Return all that a trace of training depends on, as JSON."""
        keys: Any = {
            "adapter": True,
            "initialize": True,
            "model_parameters": True,
            "precision": True,
            "quantization": True,
            "trainer": {
                "optimizer",
                "gradient_clipping",
                "enable_gradient_checkpointing",
                "chunked_loss",
                "dropout_by_row",
                "packing",
            },
        }
        code = self._folder.path.glob("*.py") if self._config.trust_remote_code else ()
        return {
            "architecture": self._folder.config,
            "code": {path.name: sha256(path) for path in sorted(code)},
            "config": self._config.model_dump(mode="json", include=keys),
            "adapted": self._is_adapted,
            "target": None if self._target is None else self._target.facts,
        }

    @property
    def has_cuda(self) -> bool:
        """Return whether the target is a GPU."""
        return self._target is not None

    @property
    def is_packed(self) -> bool:
        """Return whether rows pass as one sequence without padding."""
        return self._config.trainer.packing is True

    @property
    def has_chunked_loss(self) -> bool:
        """Return whether the model that was built last computes its loss in chunks."""
        return self._llm is not None and self._llm.objective.head is not None

    def paged_bytes(self, num_elements: Iterable[int]) -> int:
        """Return what the optimizer's states of weights of so many elements take outside the device's allocator."""
        return paged_bytes(self._config.finetune_trainer.optimizer, num_elements)

    def training(self) -> Workload:
        """Return the workload of an optimizer step."""
        trainer = self._config.trainer
        assert isinstance(trainer, FinetuneTrainer)
        training = Training(
            micro_batch=self._micro_batch,
            accumulates=self.micro_batches > 1,
            optimizer=partial(traceable_optimizer, trainer.optimizer, device_type="cuda" if self.has_cuda else "cpu"),
            update=self._update,
        )
        workload = self._workload(full_pack if self.is_packed else full_batch, trainable=True)
        checkpointing = trainer.enable_gradient_checkpointing
        if not isinstance(checkpointing, bool | str):
            workload = replace(workload, architecture=recomputing(workload.architecture, checkpointing))
        return replace(workload, training=training)

    def evaluation(self) -> Workload:
        """Return the workload that scores a batch of rows with answers."""
        batch = full_pack if self.is_packed else full_batch
        return replace(self._workload(batch), run=self._evaluate)

    def generation(self) -> Workload:
        """Return the workload of prompts and the first tokens that follow them."""
        from brim.memory.generation import full_prompts  # here, as below, since training needs no engine

        return replace(self._workload(full_prompts), run=self._generate)

    def slots(self, shape: CacheShape) -> Workload:
        """Return the workload of those passes of brim's own engine that take the most."""
        from brim.memory.generation import slots_at_their_peak

        def run(model: nn.Module, batch: None, begin: Callable[[str], None]) -> None:
            packed = PackedAttention(model, is_cuda=self.has_cuda) if self.is_packed else None
            settings = self.generation_settings
            slots_at_their_peak(cast(Any, model), shape, settings, self._precision, begin, packed=packed)

        return replace(self._workload(lambda rows, tokens: None), run=run)

    def _workload(self, batch: Callable[[int, int], Any], *, trainable: bool = False) -> Workload:
        return Workload(
            architecture=self._architecture,
            build=lambda architecture: self._build(architecture, trainable=trainable),
            batch=batch,
            settle=self._settle,
            view=self._view,
            temporaries=no_temporaries if self._target is None else cuda_temporaries,
        )

    @property
    def generation_settings(self) -> dict[str, Any]:
        """Return a run's settings, except for the tokens that end a text."""
        from brim.infer.engines import generation_settings

        return generation_settings(self._config.generation, pad_id=0, end_ids=[0])

    def _build(self, architecture: PretrainedConfig, *, trainable: bool) -> nn.Module:
        from transformers import AutoModelForCausalLM

        config = self._config
        if some := num_recomputed(architecture):  # of the layers that are built
            config = config.having("trainer.enable_gradient_checkpointing", some)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            architecture,
            dtype=self._weights_dtype,
            attn_implementation=self._attention,
            trust_remote_code=config.trust_remote_code,
        ).eval()
        if config.quantization is not None:
            from brim.memory.bitsandbytes import quantize_stand_in

            quantize_stand_in(
                model,
                config.quantization,
                is_stored=self._folder.is_quantised,
                skip_modules=self._folder.skipped_modules,
            )
        if self._is_frozen and self._precision.autocast_dtype is not None:
            cast_products(model, self._precision.autocast_dtype)
        self._loaded = loaded_tensors(model, arriving_bytes=self._arriving_bytes)
        trains, kernels = trainable or self._is_adapted, self._kernels if trainable else None
        self._llm = equip(model, config, self._folder, _CPU, trainable=trains, kernels=kernels)
        self.choices = self._llm.choices
        built: nn.Module = self._llm.model.train(trainable)
        return built

    def _settle(self, model: nn.Module) -> None:
        """Cast the biases of quantised layers, as bitsandbytes does once and for all in the very first pass.

        A bias takes the dtype of its layer's input, which under autocast differs from the stored one in most layers.
        """
        if self._config.quantization is None or not bias_bytes(model):
            return
        trains = model.training
        with torch.no_grad(), self._precision.autocast(_CPU):
            model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        model.train(trains)
        cast_bytes = bias_bytes(model)
        self._loaded = [
            replace(each, element_bytes=cast_bytes.get(each.name, each.element_bytes)) for each in self._loaded
        ]

    @property
    def _is_frozen(self) -> bool:
        """Return whether the base model's weights are frozen."""
        return self._config.adapter is not None or not isinstance(self._config.trainer, FinetuneTrainer)

    @property
    def _weights_dtype(self) -> torch.dtype:
        return self._precision.weights_dtype(frozen=self._is_frozen) or self._folder.stored_dtype

    @property
    def _arriving_bytes(self) -> int | None:
        """Return the bytes, on arrival, of an element that is quantised on the device; None where none is."""
        if self._config.quantization is None or self._folder.is_quantised:
            return None
        return self._weights_dtype.itemsize

    def with_loading(
        self, stream: EventStream, recording: Recording, *, device_bytes: int | None, is_sharded: bool
    ) -> EventStream:
        """Return the stream with the weights loaded in transformers' order, and with what is there only while loading.

        recording: the one that the stream was composed of. is_sharded: weights come from the host, or are cut as they
        come, and no block as large as the model is taken beforehand.
        """
        tensors, kind = self._all_loaded(recording), self._load_kind(is_sharded)
        return with_loading(stream, tensors, kind, device_bytes=device_bytes, has_warmup=not is_sharded)

    def warmup_bytes(self, recording: Recording, *, device_bytes: int | None, is_sharded: bool) -> int:
        """Return the bytes of the block that transformers takes first and gives back: all that devices differ in."""
        has_none = is_sharded or self._load_kind(is_sharded) == "moved"
        return 0 if has_none else warmup_bytes(self._all_loaded(recording), device_bytes)

    def _load_kind(self, is_sharded: bool) -> LoadKind:
        if self._config.quantization is not None:
            return "placed" if self._folder.is_quantised else "quantized"
        if is_sharded or not self.has_cuda or self._config.initialize == "random":
            return "moved"
        products_dtype = self._precision.autocast_dtype if self._is_frozen else None
        return "placed" if self._folder.stays_as_read(self._weights_dtype, products_dtype) else "moved"

    def _all_loaded(self, recording: Recording) -> list[LoadedTensor]:
        """Return the tensors of all layers."""
        depth = recording.depth
        if depth.num_recorded == depth.num_layers:
            return self._loaded
        return of_all_layers(
            self._loaded, layers_path=recording.layers_path, num_layers=depth.num_layers, template=depth.template
        )

    def _micro_batch(self, model: nn.Module, batch: Batch) -> None:
        assert self._llm is not None
        packed = batch.packed
        lengths = [batch.input_ids.shape[1]] * batch.num_rows if packed is None else packed.lengths
        dropout = self._llm.row_dropout
        with ExitStack() as stack:
            if dropout is not None:
                stack.enter_context(dropout.of_rows(range(batch.num_rows), lengths, step=0, packed=packed))
            stack.enter_context(self._passing(model, batch))
            with self._precision.autocast(_CPU):
                loss = self._llm.objective.loss(model, batch) / batch.targets.numel()
            loss.backward()  # type: ignore[no-untyped-call]

    def _passing(self, model: nn.Module, batch: Batch) -> AbstractContextManager[None]:
        """Return the context in which rows pass, as the target would have them attend."""
        attention = None if batch.packed is None else PackedAttention(model, is_cuda=self.has_cuda)
        return passing(attention, batch.packed)

    def _update(self, weights: Sequence[Parameter], optimizer: Optimizer) -> None:
        trainer = self._config.trainer
        assert isinstance(trainer, FinetuneTrainer)
        clip_gradients(weights, trainer.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _evaluate(self, model: nn.Module, batch: Batch, begin: Callable[[str], None]) -> None:
        assert self._llm is not None
        begin("evaluate")
        with torch.no_grad(), self._passing(model, batch), self._precision.autocast(_CPU, keeps_copies=False):
            self._llm.objective.scores(model, batch)

    def _generate(self, model: nn.Module, batch: PromptBatch, begin: Callable[[str], None]) -> None:
        from brim.memory.generation import generate_some

        with self._precision.autocast(_CPU, keeps_copies=False):
            generate_some(cast(Any, model), batch, self.generation_settings, begin)

    @property
    def _attention(self) -> str | None:
        """Return the implementation that the model is built with; FlashAttention replaces it later."""
        setting = self._config.model_parameters.attn_implementation
        if self._flash_attention:
            return "eager"
        return None if setting == "auto" else setting

    @property
    def _flash_attention(self) -> FlashAttnPackage | None:
        """Return a model of the flash-attn package, which need not be installed to know what it would allocate."""
        if self._target is None or self._config.model_parameters.attn_implementation != "flash_attention_2":
            return None
        from brim.memory.cuda import FlashAttnPackage

        return FlashAttnPackage(target=self._target)

    @contextmanager
    def _view(self, model: nn.Module | None) -> Iterator[None]:
        """Make operators do what the target does; without a model, the optimizer's alone."""
        with ExitStack() as stack:
            if self._target is None:
                # PyTorch's own rules for fake tensors accept it in bf16 alone.
                stack.enter_context(patch.object(functional, "grouped_mm", grouped_mm))
            else:
                stack.enter_context(foreach_as_on_cuda())
                if model is not None:
                    view = as_on_cuda(cast(Any, model), self._target, flash_attention=self._flash_attention)
                    stack.enter_context(view)
            yield


def full_batch(rows: int, tokens: int) -> Batch:
    """Return rows without padding, with all tokens but the first supervised: the most that this shape can take."""
    positions = rows * (tokens - 1)

    numbers = partial(torch.zeros, dtype=torch.int64)
    return Batch(
        input_ids=numbers(rows, tokens),
        targets=numbers(positions),
        target_rows=numbers(positions),
        logit_positions=numbers(positions),
        num_logits=tokens,
    )


def full_pack(rows: int, tokens: int) -> Batch:
    """Return packed rows of equal length, with all tokens but each first one supervised; nothing fills them up."""
    padded, num_tokens = full_batch(rows, tokens), rows * tokens
    packed = PackedRows(
        position_ids=torch.zeros(1, num_tokens, dtype=torch.int64),
        bounds=torch.zeros(rows + 1, dtype=torch.int32),
        lengths=(tokens,) * rows,
        num_rows=rows,
    )
    return replace(padded, input_ids=padded.input_ids.view(1, -1), num_logits=num_tokens, packed=packed)


def _without_weights(config: Config) -> Config:
    """Replace a pretrained adapter by a new one with its settings: the values do not matter."""
    adapter = config.adapter
    if adapter is None or adapter.pretrained_adapter_weights is None:
        return config
    folder = open_adapter(adapter.pretrained_adapter_weights)
    settings = folder.settings.model_dump(exclude={"pretrained_adapter_weights"})
    return config.model_copy(update={"adapter": LoraConfig(**settings)})


def _is_adapted(config: Config) -> bool:
    """Return whether the model has an adapter also where nothing is trained: it was trained before, or will be."""
    adapter = config.adapter
    trains = isinstance(config.trainer, FinetuneTrainer)
    return adapter is not None and (trains or adapter.pretrained_adapter_weights is not None)
