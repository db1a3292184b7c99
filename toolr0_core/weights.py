"""Hugging Face directories <-> model: config.json, safetensors in one file or in shards, tokenizer files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
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
MAX_SIZE, MAX_LAYERS = 10**6, 1000  # no model of these families is near; torch crashes where a product is beyond 2**63


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
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}); --model takes a whole Hugging Face directory") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object; {AGAIN}")
    return value


def read_number(path: Path, raw: dict[str, Any], key: str, low: float, high: float, default: float | None = None) -> Any:
    """raw[key], or the default where it is absent or null: a number from low to high, whole where low is. Raises ModelError."""
    value, kinds = default if raw.get(key) is None else raw[key], (int,) if isinstance(low, int) else (int, float)
    if type(value) not in kinds or not low <= value <= high:
        raise ModelError(f"{path} says {key} {value!r:.80}; it must be a {'whole ' * (len(kinds) == 1)}number from {low:g} to "
                         f"{high:g}; {AGAIN}")
    return value


def read_config(folder: Path) -> ModelConfig:
    """ModelConfig of a config.json as transformers 4 or 5 writes it. Raises ModelError for what this model is not."""
    path = folder / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if str(family) not in FAMILIES:
        raise ModelError(f"{path} says model_type {family!r:.80}; known are {', '.join(FAMILIES)}; use a model of one of them")
    number = partial(read_number, path, raw)
    sizes = {key: number(key, 1, MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE) for key in SIZES}
    _refuse_unsupported(path, raw)
    heads = sizes["num_attention_heads"]
    kv_heads = number("num_key_value_heads", 1, MAX_SIZE, heads)
    head_dim = number("head_dim", 1, MAX_SIZE, 128 if family == "qwen3" else sizes["hidden_size"] // heads)  # as transformers
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{path} says {heads} heads over {kv_heads} key heads of size {head_dim}; the first must be a "
                         f"multiple of the second and the size even; {AGAIN}")
    theta, scaling = _rope(path, raw)
    tied = raw.get("tie_word_embeddings")
    if tied not in (None, True, False):
        raise ModelError(f"{path} says tie_word_embeddings {tied!r:.80}; it must be true or false; {AGAIN}")
    return ModelConfig(
        **sizes, num_key_value_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=number("rms_norm_eps", 1e-15, 1.0, 1e-6), rope_theta=theta, rope_scaling=scaling,
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
        tie_word_embeddings=HEAD not in _headers(folder) if tied is None else bool(tied),
        max_position_embeddings=number("max_position_embeddings", 1, 2**31, 32768))


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    """Settings that would change the logits and that this model does not have."""
    legal = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None}
    if raw["model_type"] != "qwen2":  # Qwen2's bias is not an option and not on o_proj
        legal["attention_bias"] = False
    for key, value in legal.items():
        if raw.get(key) not in (None, value):
            raise ModelError(f"{path} says {key} {raw[key]!r:.80}; this project runs {value}; use a model without it")
    kinds, window = raw.get("layer_types"), raw.get("sliding_window", 4096)
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ModelError(f"{path} says layer_types {kinds!r:.80}; every layer here is a 'full_attention'; use a model of those")
    if kinds is None and raw["model_type"] != "llama" and raw.get("use_sliding_window") and window is not None:
        if read_number(path, raw, "max_window_layers", 0, MAX_SIZE, 28) < raw["num_hidden_layers"]:  # the first see everything
            raise ModelError(f"{path} says sliding_window {window!r:.80} for some layers; every layer here sees all tokens; "
                             f"use a model with full attention")


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, dict[str, float] | None]:
    """Base and Llama 3 scaling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    flat = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
    kind = rope.get("rope_type", rope.get("type", "default")) if flat else rope
    if not flat or kind not in ("default", "llama3"):
        raise ModelError(f"{path} says rope_type {kind!r:.80}; known are default and llama3; use a model with one of these")
    theta = read_number(path, raw | {k: v for k, v in rope.items() if v is not None}, "rope_theta", 1.0, 1e15, 10000.0)
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError(f"{path} says partial_rotary_factor {rope['partial_rotary_factor']!r:.80}; this project runs 1.0; use "
                         f"a model without it")
    if kind == "default":
        return theta, None
    scaling = {key: read_number(path, rope, key, 1e-6, 1e9) for key in LLAMA3}
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ModelError(f"{path} says low_freq_factor {scaling['low_freq_factor']}; it must be under high_freq_factor "
                         f"({scaling['high_freq_factor']}); {AGAIN}")
    return theta, scaling


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
    text = tokenizer.load(folder)
    size = max(text.vocab_size, 1 + max(text.stop_token_ids))
    if size > config.vocab_size:
        raise ModelError(f"{folder}: the tokenizer has token ids up to {size - 1}, but the model has {config.vocab_size} rows; "
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
    """The model's tensors; every layer has the first one's."""
    with torch.device("meta"):
        state = Model(replace(config, num_hidden_layers=1)).state_dict()
    return {name.replace("layers.0.", f"layers.{layer}."): tuple(p.shape)
            for layer in range(config.num_hidden_layers) for name, p in state.items()}


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
