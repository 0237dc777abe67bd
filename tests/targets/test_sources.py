"""From what the user typed to a directory with weights: aliases in wheels, GGUF files, directories, the hub."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.errors import ConfigurationError, ModelError
from surefoot.kernels import native
from surefoot.paths import cache_directory
from surefoot.targets import conversion, sources
from surefoot.targets.loading import describe_target, load_target
from surefoot.targets.sources import ALIASES, Alias, locate, prepare

from .flat import FlatRunner, random_model

_HIDDEN, _VOCABULARY = 32, 300


def write_gguf(
    path: Path,
    *,
    tied: bool = False,
    without: str | None = None,
    extra: Mapping[str, tuple[int, ...]] | None = None,
    prepare: Callable[[Any], None] = lambda writer: None,
) -> dict[str, np.ndarray]:
    """A two-layer Qwen2 with a byte-level vocabulary, in Q8_0 where a real file has it. Returns its tensors.

    Args:
        tied: without a head of its own.
        without: a tensor that is left out.
        extra: more tensors, by name and shape.
        prepare: called with the writer, for more metadata or tensors.
    """
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    letters = list(bytes_to_unicode().values())
    merges = [f"{a} {b}" for a, b in itertools.pairwise(letters[:41])]
    merged = [merge.replace(" ", "") for merge in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = (
        letters + merged + [f"<|unused{i}|>" for i in range(_VOCABULARY - len(letters) - len(merged) - 3)] + special
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (_VOCABULARY - 3) + [3] * 3)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(_VOCABULARY - 1)
    writer.add_bos_token_id(_VOCABULARY - 3)
    writer.add_pad_token_id(_VOCABULARY - 3)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    shapes = {"token_embd.weight": (_VOCABULARY, _HIDDEN), "output_norm.weight": (_HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (_VOCABULARY, _HIDDEN)
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (_HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (_HIDDEN,),
            f"blk.{i}.attn_q.weight": (_HIDDEN, _HIDDEN),
            f"blk.{i}.attn_q.bias": (_HIDDEN,),
            f"blk.{i}.attn_k.weight": (_HIDDEN // 2, _HIDDEN),
            f"blk.{i}.attn_k.bias": (_HIDDEN // 2,),
            f"blk.{i}.attn_v.weight": (_HIDDEN // 2, _HIDDEN),
            f"blk.{i}.attn_v.bias": (_HIDDEN // 2,),
            f"blk.{i}.attn_output.weight": (_HIDDEN, _HIDDEN),
            f"blk.{i}.ffn_gate.weight": (64, _HIDDEN),
            f"blk.{i}.ffn_up.weight": (64, _HIDDEN),
            f"blk.{i}.ffn_down.weight": (_HIDDEN, 64),
        }
    shapes |= extra or {}
    shapes.pop(without or "", None)
    tensors = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    prepare(writer)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or name in ("token_embd.weight", "output.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    native.available()  # compiled kernels live in the cache too: build them in the user's, not in every test's
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """The tiny GGUF in two installed distributions whose modules must not be imported."""
    content, site = gguf_file.read_bytes(), tmp_path / "site"
    cut = len(content) // 2
    for number, part in enumerate((content[:cut], content[cut:]), start=1):
        package, info = site / f"tiny_part{number}", site / f"tiny_part{number}-1.0.dist-info"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('a data wheel was imported')")
        (package / "data" / f"part{number}.bin").write_bytes(part)
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"tiny_part{number}/__init__.py,,\ntiny_part{number}/data/part{number}.bin,,\n")
    monkeypatch.syspath_prepend(str(site))
    alias = Alias(
        name="tiny",
        parts=(("tiny-part1", "tiny_part1/data/part1.bin"), ("tiny-part2", "tiny_part2/data/part2.bin")),
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        weights="Q8_0 GGUF",
        repository="surefoot-test/does-not-exist",
        extra="tiny",
        tied=True,
    )
    monkeypatch.setitem(ALIASES, "tiny", alias)
    return alias


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "targets").iterdir()] if (cache / "targets").is_dir() else []


def test_an_alias_is_converted_once_and_loads(wheels, own_cache):
    target = load_target("tiny", quiet=True)
    assert target.vocab_size == _VOCABULARY
    assert target.dtype == torch.bfloat16
    assert target.eos_token_ids == {_VOCABULARY - 1, _VOCABULARY - 3}  # <|im_end|> as stated, <|endoftext|> by its name
    assert target.tokenizer.chat_template
    assert target.tokenizer.decode(target.tokenizer("a b, c")["input_ids"]) == "a b, c"
    assert leftovers(own_cache) == [wheels.directory.name]
    before = (wheels.directory / "model.safetensors").stat().st_mtime_ns
    assert locate("tiny").kind == "directory"
    load_target("tiny", quiet=True)
    assert (wheels.directory / "model.safetensors").stat().st_mtime_ns == before


def test_a_tied_weight_stored_twice_becomes_one_and_is_the_finer(wheels, gguf_file):
    import gguf

    target = load_target("tiny", quiet=True)
    assert target.embed_tokens.weight is target.lm_head.weight
    head = next(t for t in gguf.GGUFReader(gguf_file).tensors if t.name == "output.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(head.data, head.tensor_type)).to(torch.bfloat16)
    assert torch.equal(target.lm_head.weight, expected)


def test_a_converted_gguf_computes_what_transformers_computes_from_it(gguf_file):
    from transformers import GgufConfig

    stock = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    ).float()  # fmt: skip
    target = load_target(str(gguf_file), dtype="float32", quiet=True)
    assert target.embed_tokens.weight is not target.lm_head.weight  # a user's file is not tied unasked
    runner, ids = FlatRunner(target), list(range(5, 20))
    logits = target.forward(runner.batch([(0, 0, ids)]), runner.cache).logits
    with torch.no_grad():
        torch.testing.assert_close(logits, stock(torch.tensor([ids])).logits[0], rtol=1e-5, atol=1e-5)


def test_a_changed_gguf_is_converted_again(tmp_path):
    path = tmp_path / "own.gguf"
    write_gguf(path)
    first = prepare(locate(str(path)), quiet=True)
    assert prepare(locate(str(path)), quiet=True) == first
    write_gguf(path, tied=True)
    assert prepare(locate(str(path)), quiet=True) != first


def test_wrong_digest_is_refused_and_leaves_nothing(wheels, own_cache, monkeypatch):
    monkeypatch.setitem(ALIASES, "tiny", dataclasses.replace(wheels, sha256="0" * 64))
    with pytest.raises(
        ModelError, match=r"target 'tiny': the parts have SHA-256 .* expected 0{12}\.\.\.; .*pip install"
    ):
        load_target("tiny", quiet=True)
    assert leftovers(own_cache) == []


def test_wrong_size_is_refused(wheels, monkeypatch):
    monkeypatch.setitem(ALIASES, "tiny", dataclasses.replace(wheels, num_bytes=7))
    with pytest.raises(ModelError, match=r"bytes instead of 7; .*pip install"):
        load_target("tiny", quiet=True)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ModelError])
def test_an_interrupted_conversion_leaves_nothing(wheels, own_cache, monkeypatch, interrupt):
    def half_written(gguf: Path, result: Path, *rest: Any) -> None:
        result.mkdir()
        (result / "model.safetensors").write_bytes(b"half")
        raise interrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_dequantise", half_written)
        with pytest.raises(interrupt):
            load_target("tiny", quiet=True)
    assert leftovers(own_cache) == []
    assert load_target("tiny", quiet=True).vocab_size == _VOCABULARY


def test_two_conversions_at_once_both_succeed(wheels, own_cache, monkeypatch):
    """The slower one finds the faster one's result and uses it."""
    both_working = threading.Barrier(2, timeout=30)
    finished: list[Path] = []

    def write(gguf: Path, result: Path, *rest: Any) -> None:
        random_model("qwen3").save_pretrained(result)
        both_working.wait()

    monkeypatch.setattr(conversion, "_dequantise", write)
    source = locate("tiny")
    threads = [threading.Thread(target=lambda: finished.append(prepare(source, quiet=True))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == [wheels.directory] * 2
    assert leftovers(own_cache) == [wheels.directory.name]


def test_what_a_killed_conversion_left_is_cleared_away_at_the_next_start(wheels, own_cache):
    """At once, because a lock tells whether anybody still works there; a living conversion is left alone."""
    import os

    from filelock import FileLock

    for name in ("killed", "working", "old", "new"):
        (own_cache / "targets" / f".converting-{name}").mkdir(parents=True)
    (own_cache / "targets" / ".converting-killed" / "lock").touch()
    os.utime(own_cache / "targets" / ".converting-old", (0, 0))  # of a version that locked nothing
    with FileLock(own_cache / "targets" / ".converting-working" / "lock"):
        load_target("tiny", quiet=True)
        assert sorted(leftovers(own_cache)) == [".converting-new", ".converting-working", wheels.directory.name]


@pytest.mark.parametrize("damage", ["model.safetensors", "config.json"])
def test_a_damaged_conversion_is_set_aside_said_once_and_made_anew(wheels, own_cache, caplog, damage):
    first = load_target("tiny", quiet=True)
    file = wheels.directory / damage
    file.write_bytes(file.read_bytes()[:-100])
    second = load_target("tiny", quiet=True)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    said = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert len(said) == 1
    assert damage in said[0]
    assert sorted(leftovers(own_cache)) == [wheels.directory.name, f"{wheels.directory.name}.damaged"]
    caplog.clear()
    load_target("tiny", quiet=True)
    assert not caplog.records


def test_a_full_disk_is_one_line_and_leaves_nothing(wheels, own_cache):
    """The real writer, stopped by the operating system's limit on the size of a file."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (wheels.num_bytes + 1000, before[1]))  # the joined GGUF fits
        file = own_cache / "probe"
        own_cache.mkdir(exist_ok=True)
        with pytest.raises(OSError, match="large"):
            file.write_bytes(bytes(wheels.num_bytes + 2000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
        with pytest.raises(
            ModelError, match=r"de-quantising into .* failed .*free some space there, or set SUREFOOT_CACHE"
        ) as e:
            load_target("tiny", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(e.value)
    assert leftovers(own_cache) == []


def test_a_cache_that_cannot_be_written_is_one_line(gguf_file, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        ModelError, match=r"failed \(Not a directory\); .*SUREFOOT_CACHE to a directory that is writable"
    ):
        load_target(str(gguf_file), quiet=True)


def test_a_gguf_without_a_weight_is_refused(tmp_path):
    """transformers would write random numbers in its place, and the next start would find nothing missing."""
    path = tmp_path / "gap.gguf"
    write_gguf(path, without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lacks 1 weights of Qwen2ForCausalLM .*layers\.1\.mlp\.up_proj"):
        load_target(str(path), quiet=True)


def test_a_gguf_with_a_weight_too_many_is_refused(tmp_path):
    path = tmp_path / "more.gguf"
    write_gguf(path, extra={"blk.0.attn_output.bias": (_HIDDEN,)})
    with pytest.raises(ModelError, match=r"no place for blk\.0\.attn_output\.bias"):
        load_target(str(path), quiet=True)


def test_a_truncated_gguf_is_refused(gguf_file, tmp_path, own_cache):
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"cut\.gguf' is truncated, or not a GGUF") as caught:
        load_target(str(path), quiet=True)
    assert "\n" not in str(caught.value)
    assert leftovers(own_cache) == []


def test_a_file_that_only_looks_like_gguf_is_refused(tmp_path):
    (tmp_path / "fake.gguf").write_bytes(b"hello")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load_target(str(tmp_path / "fake.gguf"), quiet=True)


@pytest.mark.parametrize("name", ["/no/such/directory", "./nothing", "missing.gguf", "what is this?", ""])
def test_a_name_that_is_nothing_lists_what_is_allowed(name):
    with pytest.raises(
        ModelError, match=r"does not exist: give an alias \(qwen2\.5-coder-0\.5b, gemma3-270m\)"
    ) as caught:
        load_target(name)
    assert repr(name)[1:-1] in str(caught.value)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)


def test_a_misspelt_alias_is_corrected_without_a_hub(no_hub):
    with pytest.raises(ModelError, match=r"'gemma-270m' .* hub cannot be reached .*did you mean 'gemma3-270m'\?"):
        load_target("gemma-270m")


def test_an_alias_without_wheels_says_what_to_install_and_never_means_other_weights(monkeypatch):
    """No look at the hub: the official weights of the same model have a name of their own."""
    from huggingface_hub import HfApi

    def reached(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked for an alias")

    monkeypatch.setattr(HfApi, "model_info", reached)
    alias = Alias(
        "absent", (("no-such-wheel", "x"),), 1, "0" * 64, "Q4_K_M GGUF", "surefoot-test/official", "demo", True
    )
    monkeypatch.setitem(ALIASES, "absent", alias)
    expected = (
        r"""is the Q4_K_M GGUF of wheels .* pip install "surefoot\[demo\]" .* or give surefoot-test/official for"""
    )
    for load in (load_target, describe_target, locate):
        with pytest.raises(ModelError, match=expected) as caught:
            load("absent")
        assert "\n" not in str(caught.value)


def test_every_target_says_what_its_weights_are(wheels, gguf_file, checkpoint):
    expected = {"tiny": "Q8_0 GGUF", str(gguf_file): "Q8_0 GGUF"}
    for name, weights in expected.items():
        assert describe_target(name, quiet=True).weights == f"{weights}, de-quantised to bfloat16"
        assert load_target(name, quiet=True).weights == f"{weights}, de-quantised to bfloat16"
    assert describe_target(str(checkpoint)).weights == "float32 safetensors"
    assert load_target(str(checkpoint), dtype="bfloat16").weights == "float32 safetensors"


def test_the_aliases_say_that_they_are_quantised():
    assert ALIASES["qwen2.5-coder-0.5b"].weights == "Q4_K_M GGUF made from an AWQ checkpoint"
    assert ALIASES["gemma3-270m"].weights == "Q4_K_M GGUF"


def test_a_complete_snapshot_is_used_without_asking_the_hub(no_hub, monkeypatch, tmp_path, checkpoint):
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def snapshot(repository: str, **options: Any) -> str:
        asked.append(options)
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert prepare(locate("some/model")) == checkpoint
    assert asked == [{"local_files_only": True}]
    (checkpoint / "model.safetensors").unlink()  # an interrupted download is not complete
    with pytest.raises(ModelError, match="hub cannot be reached"):
        prepare(locate("some/model"))


def test_an_unknown_repository_is_not_a_missing_network(monkeypatch):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    def not_found(*args: Any, **kwargs: Any) -> None:
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # without the HTTP response it is made from

    monkeypatch.setattr(HfApi, "model_info", not_found)
    with pytest.raises(ModelError, match=r"'no/such-model' is not on the Hugging Face hub: give an alias"):
        load_target("no/such-model")


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"is a directory without config\.json"):
        load_target(str(tmp_path))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    random_model("qwen3").save_pretrained(directory)
    return directory


def test_a_directory_loads(checkpoint):
    target = load_target(str(checkpoint))
    assert target.tokenizer is None
    assert target.dtype == torch.float32
    assert load_target(str(checkpoint), dtype="bfloat16").dtype == torch.bfloat16


def test_truncated_safetensors_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt .*; copy or download it again"):
        load_target(str(checkpoint))


def test_missing_weights_are_refused(checkpoint):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(str(checkpoint))
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \.safetensors or \.bin weights"):
        load_target(str(checkpoint))


def test_a_missing_shard_is_named(checkpoint):
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_target(str(checkpoint))


def test_an_unknown_architecture_is_refused(checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "not-a-model"}))
    with pytest.raises(ModelError, match="transformers does not know this configuration"):
        load_target(str(checkpoint))


def test_unknown_dtype_and_device_are_refused(checkpoint):
    with pytest.raises(ConfigurationError, match="dtype 'int3': allowed are auto, bfloat16"):
        load_target(str(checkpoint), dtype="int3")
    with pytest.raises(ConfigurationError, match="device 'gpu7' is unknown"):
        load_target(str(checkpoint), device="gpu7")


def test_description_agrees_with_the_loaded_target(checkpoint, wheels):
    described, target = describe_target(str(checkpoint)), load_target(str(checkpoint))
    assert described.servable
    assert described.reason is None
    assert described.windows == tuple(spec.window for spec in target.layers)
    assert described.num_parameters == sum(p.numel() for p in target.model.parameters())
    assert (described.architecture, described.dtype, described.max_model_len) == ("Qwen3ForCausalLM", "float32", 128)
    assert described.kv_bytes_per_token == 3 * 2 * (16 + 16) * 4
    assert not described.chat_template
    assert describe_target("tiny", quiet=True).chat_template


def test_a_gguf_is_described_from_its_header(gguf_file, own_cache):
    described = describe_target(str(gguf_file))
    assert (described.num_layers, described.vocab_size, described.servable) == (2, _VOCABULARY, True)
    assert leftovers(own_cache) == []


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("SUREFOOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "surefoot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "surefoot"


def test_progress_goes_to_stderr(wheels, capfd):
    load_target("tiny")
    out, err = capfd.readouterr()
    assert out == ""
    assert "tiny: reading the vocabulary" in err
    assert "4/4" in err


@pytest.mark.real
def test_the_aliases_are_what_the_design_says():
    """Both real targets, found in their wheels; converted only if the user's cache does not have them."""
    for alias in (ALIASES["qwen2.5-coder-0.5b"], ALIASES["gemma3-270m"]):
        parts = sources._parts(alias)
        assert parts is not None, f"pip install surefoot[{alias.extra}]"
        assert sum(part.stat().st_size for part in parts) == alias.num_bytes
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.read_bytes())
        assert digest.hexdigest() == alias.sha256


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "gemma3-270m"])
def test_a_real_target_agrees_with_the_stock_model(name, monkeypatch):
    """In float32, so that a difference would be an error and not rounding; a window of 512 is not reached here."""
    monkeypatch.delenv("SUREFOOT_CACHE")
    directory = prepare(locate(name), quiet=True)
    ids = AutoTokenizer.from_pretrained(directory)("def fibonacci(n):\n    if n")["input_ids"]
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = stock(torch.tensor([ids])).logits[0]
    del stock
    target = load_target(name, dtype="float32")
    runner = FlatRunner(target)
    first = target.forward(runner.batch([(1, 0, ids[:4])]), runner.cache).logits
    rest = target.forward(runner.batch([(1, 4, ids[4:])]), runner.cache).logits
    actual = torch.cat([first, rest])
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
