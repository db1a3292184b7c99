"""Hugging Face directories <-> model: config.json, safetensors in one file or in shards, tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolr0_core.model import Model, ModelConfig

NANO = Path(__file__).parent / "assets" / "nano"
HUB = {"qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
       "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct", "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct"}
FAMILIES = ("llama", "qwen2", "qwen3")


class ModelError(ValueError):
    """A model directory that cannot be used, in one sentence: what, the rule, the remedy."""


def model_path(path_or_preset: str | Path) -> Path:
    """The directory of a model: itself, or that of a preset's model."""
    path = Path(path_or_preset)
    if path.is_dir():
        return path
    name = str(path_or_preset)
    if name == "nano":
        return NANO
    if name == "smollm2-135m":
        from toolr0_core import smollm2

        return smollm2.directory()
    if name in HUB:
        return _from_hub(HUB[name])
    raise ModelError(f"model {name!r} is neither a directory nor a preset; presets are nano, smollm2-135m, {', '.join(HUB)}")


def _from_hub(repository: str) -> Path:
    """A hub model's directory, from the cache or fetched: only what this project reads."""
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
    try:
        return Path(snapshot_download(repository, allow_patterns=files))
    except Exception as error:  # network, access or a missing licence agreement: many types, one remedy
        raise ModelError(f"{repository} is not here and could not be fetched ({type(error).__name__}); type `hf download "
                         f"{repository}` where there is a network, or give --model a directory") from None


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig of a config.json as transformers 4 or 5 writes it."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json cannot be read ({error}); --model takes a Hugging Face directory") from None
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{folder}/config.json says model_type {family!r}; known are {', '.join(FAMILIES)}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"{folder}/config.json says rope_type {kind!r}; known are default and llama3")
    heads = raw["num_attention_heads"]
    return ModelConfig(
        vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"], intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"], num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads, rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        rope_scaling=rope if kind == "llama3" else None, qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_position_embeddings=raw.get("max_position_embeddings", 32768))


def load_model(path_or_preset: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Model:
    folder = model_path(path_or_preset)
    config = read_config(folder)
    with torch.device("meta"):
        model = Model(config)
    tensors = _read_tensors(folder, device, dtype)
    wanted = set(model.state_dict())
    missing = sorted(wanted - set(tensors))
    if missing:
        raise ModelError(f"{folder} lacks the tensor {missing[0]} ({len(missing)} in all); its weights are not whole")
    model.load_state_dict({k: v for k, v in tensors.items() if k in wanted}, assign=True)
    return model


def _read_tensors(folder: Path, device, dtype) -> dict[str, Tensor]:
    tensors = {}
    for path in weight_files(folder):
        with safe_open(path, "pt", device=str(device)) as file:
            for name in file.keys():
                value = file.get_tensor(name)
                tensors[name.removeprefix("model.")] = value if dtype is None else value.to(dtype)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}; fetch the whole model directory again")
    return [folder / name for name in names]


def check_model(folder: Path) -> None:
    """Raises ModelError, before any long work, where the directory lacks something that a run needs."""
    config = read_config(folder)
    shapes = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name.removeprefix("model."): tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except Exception as error:  # the library raises its own types
            raise ModelError(f"{path} is no readable safetensors file ({error}); fetch it again") from None
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in Model(config).state_dict().items()}
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise ModelError(f"{folder}: tensor {name} is {shapes.get(name, 'absent')}, config.json says {shape}; "
                             f"fetch the whole model directory again")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} lacks tokenizer.json; copy the base model's tokenizer files there")


def export_model(weights: dict[str, Tensor], config: ModelConfig, source: Path, out: Path,
                 dtype: torch.dtype | None = None) -> None:
    """A directory that transformers loads: source's configuration and tokenizer with these weights; whole or not at all."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "special_tokens_map.json", "vocab.json", "merges.txt"):
        if (source / name).is_file():
            shutil.copy(source / name, part / name)
    raw: dict[str, Any] = json.loads((part / "config.json").read_text())
    tensors = {name if name.startswith("lm_head") else f"model.{name}": (t if dtype is None else t.to(dtype)).contiguous()
               for name, t in weights.items()}
    kind = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    raw["torch_dtype"] = raw["dtype"] = kind
    (part / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    former = out.with_name(out.name + ".old")
    shutil.rmtree(former, ignore_errors=True)
    if out.exists():
        out.rename(former)
    part.rename(out)
    shutil.rmtree(former, ignore_errors=True)
