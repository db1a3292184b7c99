"""Hugging Face directories <-> model: config.json, safetensors in one file or in shards, tokenizer files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolr0_core.model import Model, ModelConfig

NANO = Path(__file__).parent / "assets" / "nano"
HUB = {"qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
       "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct", "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct"}
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json",
              "special_tokens_map.json", "added_tokens.json", "merges.txt")
HEAD = "lm_head.weight"
AGAIN = "fetch the whole model directory again"


class ModelError(ValueError):
    """A model directory that cannot be used, in one sentence: what, the rule, the remedy."""


# -- where a model is ------------------------------------------------------------------------------------------------


def model_path(path_or_preset: str | Path, weights: bool = True) -> Path:
    """The directory of a model: itself, or that of a preset's model, which is fetched or converted where it must be.

    weights: False fetches only the small files of a hub model, its configuration and tokenizer.
    """
    path, name = Path(path_or_preset), str(path_or_preset)
    if path.is_dir():
        return path
    if name == "nano":
        return NANO
    if name == "smollm2-135m":
        from toolr0_core import smollm2

        return smollm2.directory()
    if name in HUB or name in HUB.values():
        return _from_hub(HUB.get(name, name), weights)
    raise ModelError(f"model {name!r} is neither a directory nor a preset; presets are nano, smollm2-135m, {', '.join(HUB)}")


def _from_hub(repository: str, weights: bool) -> Path:
    """A hub model's directory, from the cache or fetched: only what this project reads."""
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.jinja", "merges.txt", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(repository, allow_patterns=files))
    except Exception as error:  # network, access or a missing licence agreement: many types, one remedy
        raise ModelError(f"{repository} is not here and could not be fetched ({type(error).__name__}); type `hf download "
                         f"{repository}` where there is a network, or give --model a directory") from None


# -- config.json -----------------------------------------------------------------------------------------------------


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file, or `missing` where there is no file. Raises ModelError."""
    if missing is not None and not path.is_file():
        return missing
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); --model takes a whole Hugging Face directory") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object; {AGAIN}")
    return value


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig of a config.json as transformers 4 or 5 writes it. Raises ModelError for what this model is not."""
    path = folder / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path} says model_type {family!r}; known are {', '.join(FAMILIES)}; use a model of one of them")
    _refuse_unsupported(path, raw)
    for key in SIZES:
        if type(raw.get(key)) is not int or raw[key] < 1:
            raise ModelError(f"{path} says {key} {raw.get(key)!r}; it must be a positive integer; {AGAIN}")
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or (128 if family == "qwen3" else raw["hidden_size"] // heads)  # transformers' defaults
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{path} says {heads} heads over {kv_heads} key heads of size {head_dim}; the first must be a "
                         f"multiple of the second and the size even; {AGAIN}")
    theta, scaling = _rope(path, raw)
    tied = raw.get("tie_word_embeddings")
    return ModelConfig(
        **{key: raw[key] for key in SIZES}, num_key_value_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6), rope_theta=theta, rope_scaling=scaling,
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
        tie_word_embeddings=HEAD not in _headers(folder) if tied is None else bool(tied),
        max_position_embeddings=raw.get("max_position_embeddings", 32768))


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    """Settings that would change the logits and that this model does not have."""
    legal = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None}
    if raw["model_type"] != "qwen2":  # Qwen2's bias is not an option and not on o_proj
        legal["attention_bias"] = False
    for key, value in legal.items():
        if raw.get(key) not in (None, value):
            raise ModelError(f"{path} says {key} {str(raw[key])[:80]!r}; this project runs {value}; use a model without it")
    windowed = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    if "layer_types" in raw:
        windowed = set(raw["layer_types"] or ()) - {"full_attention"}
    elif raw["model_type"] == "llama" or raw.get("max_window_layers", 28) >= (raw.get("num_hidden_layers") or 0):
        windowed = False  # no layer is beyond the first max_window_layers, which see everything
    if windowed:
        raise ModelError(f"{path} says sliding_window {raw.get('sliding_window')} for some layers; every layer here sees all "
                         f"tokens; use a model with full attention")


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, dict[str, float] | None]:
    """Base and Llama 3 scaling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind not in ("default", "llama3") or any(isinstance(v, dict) for v in rope.values()):
        raise ModelError(f"{path} says rope_type {kind!r}; known are default and llama3; use a model with one of these")
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path} says partial_rotary_factor {rope['partial_rotary_factor']}; this project runs 1.0; use a "
                         f"model without it")
    if kind == "default":
        return theta, None
    for key in LLAMA3:
        if not isinstance(rope.get(key), (int, float)) or rope[key] <= 0:
            raise ModelError(f"{path} says {key} {rope.get(key)!r}; llama3 scaling needs a positive number; {AGAIN}")
    return theta, {key: rope[key] for key in LLAMA3}


# -- reading weights -------------------------------------------------------------------------------------------------


def load_model(path_or_preset: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Model:
    """The model of a directory or preset on `device`; dtype None: that of the file's embedding. Raises ModelError."""
    folder = model_path(path_or_preset)
    config = read_config(folder)
    headers = check_tensors(folder, config)
    dtype = dtype or DTYPES[headers["embed_tokens.weight"][0]]
    tensors = {}
    for path in weight_files(folder):
        with safe_open(path, "pt", device=str(device)) as file:
            tensors |= {_own_name(name): file.get_tensor(name).to(dtype) for name in file.keys()}
    if config.tie_word_embeddings and HEAD in tensors and not torch.equal(tensors[HEAD], tensors["embed_tokens.weight"]):
        raise ModelError(f"{folder} holds an lm_head.weight other than its embedding, but config.json ties the two; set "
                         f"tie_word_embeddings to false there")
    with torch.device("meta"):
        model = Model(config)
    model.load_state_dict({name: tensors[name] for name in model.state_dict()}, assign=True)
    return model


def check_model(folder: Path, weights: bool = True) -> None:
    """Raises ModelError, in a second and before any long work, where the directory lacks something that a run needs.

    weights: False asks for none, but checks those that are there.
    """
    from toolr0_core import tokenizer

    config = read_config(folder)
    if weights or any(folder.glob("*.safetensors")):
        check_tensors(folder, config)
    size = tokenizer.load(folder).vocab_size
    if size > config.vocab_size:
        raise ModelError(f"{folder}/tokenizer.json has token ids up to {size - 1}, but the model has {config.vocab_size} rows; "
                         f"copy the base model's tokenizer files there")


def check_tensors(folder: Path, config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes in the files, from their headers alone; ModelError where they are not the model's."""
    found, wanted = _headers(folder), _shapes(config)
    spare = {HEAD} if config.tie_word_embeddings else set()  # a tied head saved twice
    extra = sorted(name for name in set(found) - set(wanted) - spare if not name.endswith("rotary_emb.inv_freq"))
    if missing := sorted(set(wanted) - set(found)):
        raise ModelError(f"{folder} lacks the tensor {missing[0]} ({len(missing)} in all); {AGAIN}")
    if extra:
        raise ModelError(f"{folder} has the tensor {extra[0]} ({len(extra)} in all), which the model of its config.json does "
                         f"not have; use the config.json that belongs to these weights")
    for name, shape in wanted.items():
        if found[name][1] != shape:
            raise ModelError(f"{folder}: tensor {name} has shape {found[name][1]}, config.json says {shape}; {AGAIN}")
        if found[name][0] not in DTYPES:
            raise ModelError(f"{folder}: tensor {name} is {found[name][0]}; known are {', '.join(DTYPES)}; use weights that "
                             f"are not quantised")
    return found


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index names; all of them exist. Raises ModelError."""
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file() and not (folder / names[0]).is_file():  # transformers prefers the one file too
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{index} has no weight_map; {AGAIN}")
        names = sorted(set(map(str, shards.values())))
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}; {AGAIN} (only safetensors are read)")
    return [folder / name for name in names]


def _headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    headers = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                slices = {_own_name(name): file.get_slice(name) for name in file.keys()}
                headers |= {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is no readable safetensors file ({error}); fetch it again") from None
    return headers


def _own_name(name: str) -> str:
    return name.removeprefix("model.")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Model(config).state_dict().items()}


# -- writing weights -------------------------------------------------------------------------------------------------


def export_model(weights: Model | dict[str, Tensor], config: ModelConfig, source: Path | None, out: Path,
                 dtype: torch.dtype | None = None) -> None:
    """A directory that transformers loads: source's configuration and tokenizer with these weights; whole or not at all.

    Without a source, config.json is made from `config` and there is no tokenizer. Raises ModelError.
    """
    weights = weights.state_dict() if isinstance(weights, Model) else weights
    tensors = {name if name == HEAD else f"model.{name}": (t if dtype is None else t.to(dtype)).contiguous()
               for name, t in weights.items() if not (name == HEAD and config.tie_word_embeddings)}
    raw = read_json(source / "config.json") if source else _plain_config(config)
    raw["torch_dtype"] = raw["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")  # 4 and 5
    raw["tie_word_embeddings"] = config.tie_word_embeddings
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        (part / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        for name in COMPANIONS:
            if source and (source / name).is_file():
                shutil.copyfile(source / name, part / name)
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "model.safetensors").chmod((part / "config.json").stat().st_mode & 0o777)  # the library's are private
        check_tensors(part, read_config(part))
        _swap(part, out)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{out} could not be written ({error}); free space, or name a directory that can be written") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _swap(part: Path, out: Path) -> None:
    """`part` becomes `out`; what stood there goes only afterwards."""
    former = out.with_name(out.name + ".old")
    shutil.rmtree(former, ignore_errors=True)
    if out.exists():
        out.rename(former)
    part.rename(out)
    shutil.rmtree(former, ignore_errors=True)


def _plain_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model that never had one."""
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    if config.qk_norm and config.qkv_bias:
        raise ModelError("a model with both qkv_bias and qk_norm is of no family that transformers loads; set one of them")
    raw = {"architectures": [FAMILIES[family]], "model_type": family, "hidden_act": "silu", "bos_token_id": None,
           "eos_token_id": None, **vars(replace(config, rope_scaling=None))}
    for key in ("qkv_bias", "qk_norm", "rope_scaling"):
        del raw[key]
    rope = {"rope_type": "llama3", **config.rope_scaling} if config.rope_scaling else {"rope_type": "default"}
    return raw | {"rope_parameters": rope | {"rope_theta": config.rope_theta}}
