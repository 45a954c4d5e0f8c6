"""A model's text bundle tokenizes as transformers does for the same files, and names what it lacks."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors

from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.folder import open_folder
from kvferry_runtime.model.text import load_text_bundle
from kvferry_runtime.model.text_toy import byte_characters
from kvferry_runtime.model.toy_spec import ToySpec
from kvferry_text.tokenizer import TextTokenizer
from kvferry_wire.pod import TextBundle
from tests.support.checkpoints import CHAT_TEMPLATE, TinyLlama, make_checkpoint, make_gguf
from tests.support.prompts import PROMPTS


def transformers_tokenizer(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)


def test_a_folder_tokenizes_as_transformers(tmp_path: Path) -> None:
    """Ids of varied texts, special tokens in text included."""
    path = make_checkpoint(tmp_path)
    ours, theirs = TextTokenizer(load_text_bundle(open_folder(path))), transformers_tokenizer(path)
    for prompt in (*PROMPTS, "<|im_start|>user\nhello<|im_end|>", "<|im_start|><|im_start|>", "he <|end|>he"):
        ids = ours.encode(prompt, special=True, add_bos=True)
        assert ids == theirs(prompt).input_ids, prompt
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_gguf_file_tokenizes_as_its_folder(tmp_path: Path) -> None:
    """Tokens and merges make the same tokenizer again; digits are single tokens in both."""
    from_folder = TextTokenizer(load_text_bundle(open_folder(make_checkpoint(tmp_path / "hf"))))
    from_gguf = TextTokenizer(load_text_bundle(open_folder(make_gguf(tmp_path / "tiny.gguf"))))
    for prompt in (*PROMPTS, "<|im_start|>user\nhello<|im_end|>"):
        assert from_gguf.encode(prompt, special=True, add_bos=False) == from_folder.encode(
            prompt, special=True, add_bos=False
        )


def test_a_folders_bundle_holds_what_its_files_say(tmp_path: Path) -> None:
    """Template, special tokens, ends, and generation defaults."""
    bundle = load_text_bundle(open_folder(make_checkpoint(tmp_path)))
    assert bundle.chat_template == CHAT_TEMPLATE
    assert (bundle.bos_token, bundle.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert bundle.eos_token_ids == (262,)
    assert bundle.generation_defaults == {"temperature": 0.7}
    assert (bundle.vocab_size, bundle.add_bos) == (263, False)
    assert bundle.digest == bundle.digested().digest
    assert len(bundle.digest) == 64


def change_json(path: Path, **fields: Any) -> None:
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def bundle_after(tmp_path: Path, change: Callable[[Path], object]) -> TextBundle:
    path = make_checkpoint(tmp_path)
    change(path)
    return load_text_bundle(open_folder(path))


def test_ends_are_the_union_of_all_files(tmp_path: Path) -> None:
    """config, generation config and the tokenizer's eos each add theirs, each once."""

    def change(path: Path) -> None:
        change_json(path / "config.json", eos_token_id=[5, 6])
        change_json(path / "generation_config.json", eos_token_id=[6, 7])

    assert bundle_after(tmp_path, change).eos_token_ids == (5, 6, 7, 262)


def test_the_template_file_goes_first(tmp_path: Path) -> None:
    """chat_template.jinja, then tokenizer_config.json; of named templates the default."""
    assert (
        bundle_after(tmp_path, lambda p: (p / "chat_template.jinja").write_text("from file")).chat_template
        == "from file"
    )
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert (
        bundle_after(tmp_path, lambda p: change_json(p / "tokenizer_config.json", chat_template=named)).chat_template
        == "d"
    )
    assert (
        bundle_after(tmp_path, lambda p: change_json(p / "tokenizer_config.json", chat_template=None)).chat_template
        is None
    )


def with_processor(path: Path, processor: Any) -> None:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processor
    tokenizer.save(str(path / "tokenizer.json"))


def test_bos_is_added_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    """The post-processor decides; a Llama tokenizer's own flag goes before it."""
    adds = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 261)])
    assert bundle_after(tmp_path / "a", lambda p: with_processor(p, adds)).add_bos is True
    assert (
        bundle_after(tmp_path / "b", lambda p: change_json(p / "tokenizer_config.json", add_bos_token=True)).add_bos
        is False
    )

    def llama(path: Path) -> None:
        change_json(path / "tokenizer_config.json", add_bos_token=True, tokenizer_class="LlamaTokenizerFast")

    assert bundle_after(tmp_path / "c", llama).add_bos is True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: (p / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda p: (p / "tokenizer.json").write_text("{}"), r"tokenizer\.json: the tokenizer does not load"),
        (lambda p: (p / "tokenizer.json").write_bytes(b"\xff"), "does not load"),
        (
            lambda p: change_json(p / "tokenizer_config.json", bos_token="<nope>"),
            "bos_token '<nope>' .* not in the vocab",
        ),
        (lambda p: change_json(p / "tokenizer_config.json", chat_template=3), "chat_template: a text"),
        (lambda p: (p / "chat_template.jinja").write_bytes(b"\xff"), r"chat_template\.jinja: not UTF-8"),
        (lambda p: change_json(p / "generation_config.json", eos_token_id=263), "eos_token_id 263, not in 0..262"),
        (
            lambda p: with_processor(
                p, processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", 262)])
            ),
            "adds more than bos",
        ),
    ],
)
def test_text_files_that_cannot_be_served_are_named(
    change: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    """The file and what is wrong with it."""
    with pytest.raises(ModelError, match=said):
        bundle_after(tmp_path, change)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    """An id that the model has no row for must never come out of a prompt."""
    other = make_checkpoint(tmp_path / "other", TinyLlama(vocab=300)) / "tokenizer.json"
    with pytest.raises(ModelError, match=r"token id 299, but config\.json says vocab_size 263"):
        bundle_after(tmp_path / "tiny", lambda path: (path / "tokenizer.json").write_bytes(other.read_bytes()))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "tokenizer.ggml.pre is 'deepseek-llm'; accepted: gpt-2, smollm"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; 'gpt2' is accepted"),
    ],
)
def test_a_gguf_tokenizer_we_do_not_know_is_refused(keys: dict[str, str], said: str, tmp_path: Path) -> None:
    """No guess at rules that would tokenize almost right."""
    with pytest.raises(ModelError, match=said):
        load_text_bundle(open_folder(make_gguf(tmp_path / "tiny.gguf", keys=keys)))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_known_pre_tokenizers_lose_nothing(pre: str, tmp_path: Path) -> None:
    """Every text comes back from its ids."""
    path = make_gguf(tmp_path / "tiny.gguf", keys={"tokenizer.ggml.pre": pre})
    bundle = load_text_bundle(open_folder(path))
    tokenizer = TextTokenizer(bundle)
    assert bundle.add_bos is (pre == "llama-bpe")
    for prompt in PROMPTS[:-1]:
        got = tokenizer.decode(tokenizer.encode(prompt, special=True, add_bos=False))
        assert got == prompt if pre != "qwen2" else True


def test_the_toys_tokenizer_remembers_no_prompt() -> None:
    """It keeps words that it has seen; a word of the toy is one character, whatever the prompt."""
    tokenizer = Tokenizer.from_str(load_text_bundle(open_folder("toy")).tokenizer_json.decode())
    for prompt in ("abc  def\n\r\ngh", "naïve 🙂", "", "\x00\x7f"):
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(prompt)
        assert [prompt[begin:end] for _, (begin, end) in pieces] == list(prompt)


def test_the_toys_ids_are_bytes() -> None:
    """A byte is its own id, so that any text and any answer is easy to read in a test."""
    bundle = load_text_bundle(open_folder("toy:vocab=300"))
    tokenizer = TextTokenizer(bundle)
    for prompt in PROMPTS:
        assert tokenizer.encode(prompt, special=False, add_bos=False) == list(prompt.encode())
        assert tokenizer.decode(list(prompt.encode())) == prompt
    assert tokenizer.encode("<eos>", special=True, add_bos=False) == [257]
    assert tokenizer.decode([65, 299]) == "A w299"
    assert bundle.eos_token_ids == (ToySpec().eos_token_id,)
    assert len(set(byte_characters())) == 256


@pytest.mark.model
def test_the_demo_model_tokenizes_as_its_publishers_tokenizer(demo_model: Path) -> None:
    """transformers' reading of the GGUF file, with the digit rule that its reader leaves out and the publisher has."""
    from tests.support.reference import converted_folder

    bundle = load_text_bundle(open_folder(demo_model))
    ours = TextTokenizer(bundle)
    published = Tokenizer.from_file(str(converted_folder(demo_model) / "tokenizer.json"))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for prompt in PROMPTS:
        assert ours.encode(prompt, special=True, add_bos=False) == published.encode(prompt).ids, prompt
    assert bundle.eos_token == "<|im_end|>"
    assert bundle.eos_token_ids == (2,)
    assert bundle.chat_template is not None


def test_reading_a_models_text_needs_no_torch() -> None:
    """Tools that only look at a model start quickly."""
    code = (
        "import sys; import kvferry_runtime.model.text, kvferry_runtime.model.folder, kvferry_runtime.model.fetch, "
        "kvferry_runtime.model.toy_oracle; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
