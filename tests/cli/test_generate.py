"""`sardonyx bench --generate` and `sardonyx compare --generate`: what they tell of a model that generates tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from sardonyx.capture.cache_buffers import BLOCK

from .calling import BERT, ROOT, run, told

pytest.importorskip("transformers", reason="needs the package transformers")

LLAMA = f"{ROOT}/examples/models.py:llama"
QUICK = ("--generate", "--prompt", "5", "--new-tokens", "4")

_FACTORIES = """
import torch
import transformers

WORDS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
BRANCHED = torch.arange(64.0)

class Branched(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        if torch.compiler.is_exporting():
            found.logits = found.logits + BRANCHED
        return found

def branched():
    return Branched(transformers.LlamaConfig(**WORDS, **SIZES)).eval()

def short():
    sizes = dict(n_embd=32, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**WORDS, **sizes)).eval()

def t5():
    sizes = dict(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes)).eval()
    return model, (), {"input_ids": torch.arange(3, 10)[None].expand(2, 7).contiguous()}

def linear():
    return torch.nn.Linear(4, 4)

class Own(torch.nn.Linear):
    def generate(self, x):
        return self(x)

def own():
    return Own(4, 4)
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "generators.py"
    path.write_text(_FACTORIES)
    return path


def test_eager_and_sardonyx_are_told_with_times_cache_and_memory() -> None:
    found = told("bench", LLAMA, *QUICK, "--batch", "2", "--rounds", "2")
    assert (found["prompt"], found["batch"], found["new_tokens"], found["sessions"]) == (5, 2, 4, 3)
    assert [x["name"] for x in found["contenders"]] == ["eager", "sardonyx"]
    for contender, rows in zip(found["contenders"], (8, BLOCK), strict=True):
        assert contender["differs_at"] is None
        assert contender["cache_bytes"] == 2 * 2 * (2 * 2 * rows * 16) * 4, (
            "keys and values, layers, batch to width, float"
        )
        assert contender["peak_bytes"] is None or contender["peak_bytes"] > 10**8
        assert {len(times) for times in contender["rounds"].values()} == {2}
        assert 0 < contender["first_token_cold"] < contender["first_generation"]


def test_a_table_has_a_row_for_each_and_says_that_tokens_are_equal() -> None:
    done = run("bench", LLAMA, *QUICK, "--rounds", "1")
    assert done.exit_code == 0, done.output
    headings, eager, ours, *rest = done.stdout.splitlines()
    wanted = ["first token, cold", "warm", "first call", "tokens/s", "× eager", "cache", "peak memory"]
    assert headings.split() == " ".join(wanted).split()
    assert (eager.split()[0], ours.split()[0]) == ("eager", "sardonyx")
    assert "batch 1, prompt 5, 4 new tokens: equal to eager's" in rest
    assert "3 sessions were built in the first call of sardonyx" in rest


def test_tokens_that_differ_are_told_with_the_next_step(factories: Path) -> None:
    done = run("bench", f"{factories}:branched", *QUICK, "--rounds", "1")
    assert done.exit_code == 1, done.output
    assert "equal to eager's until token 0" in done.stdout
    assert "--generate, with the same sizes" in done.stdout


def test_tokens_in_lower_precision_may_differ(factories: Path) -> None:
    done = run("bench", f"{factories}:branched", *QUICK, "--rounds", "1", "--precision", "int8", "--max-drop", "0.5")
    assert done.exit_code == 0, done.output
    assert "equal to eager's until token 0" in done.stdout


def test_tokens_of_eager_and_compiled_are_compared() -> None:
    done = run("compare", LLAMA, *QUICK, "--batch", "2")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("sardonyx against torch: 2 rows of 4 tokens, all tokens equal; logits differ by ")


def test_the_first_token_that_differs_is_told_with_both_logits(factories: Path) -> None:
    done = run("compare", f"{factories}:branched", *QUICK)
    assert done.exit_code == 1, done.output
    lines = done.stdout.splitlines()
    assert "1 of 1 rows differ" in lines[0]
    assert lines[1].startswith("row 0: token 0 is 63, not ")
    assert lines[1].endswith("more than rounding")
    assert lines[6].split() == ["token", "torch", "sardonyx", "chosen", "by"]
    found = told("compare", f"{factories}:branched", *QUICK, exit_code=1)
    (divergence,) = found["divergences"]
    assert (divergence["position"], divergence["found"], divergence["by_rounding"]) == (0, 63, False)
    assert {token: ours - theirs for token, theirs, ours in divergence["top"]} == pytest.approx(
        {token: float(token) for token, _, _ in divergence["top"]}, abs=1e-4
    )


def test_any_two_ways_can_generate() -> None:
    found = told("compare", LLAMA, *QUICK, "--way", "torch:float64", "--way", "onnxruntime:optimize=none")
    assert (found["names"], found["differs"]) == (["torch:float64", "onnxruntime:optimize=none"], False)


def test_example_arguments_are_the_prompt_of_an_encoder_and_decoder(factories: Path) -> None:
    found = told("compare", f"{factories}:t5", "--generate", "--new-tokens", "3")
    assert (found["prompt"], found["batch"], found["differs"]) == (7, 2, False)
    assert [len(row) for row in found["expected"]] == [3, 3]


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_model_that_cannot_generate_is_an_error(command: str, factories: Path, bert: Path) -> None:
    for model, kind in ((BERT, "BertModel"), (f"{factories}:linear", "Linear")):
        done = run(command, model, "--generate")
        assert (done.exit_code, f"is a {kind}, which has no generate()" in done.stderr) == (3, True), done.output
        assert "next: let the factory return a model of transformers" in done.stderr
    done = run(command, f"{factories}:own", "--generate")
    assert (done.exit_code, "whose generate() is not that of transformers" in done.stderr) == (3, True)
    done = run(command, bert, "--generate")
    assert (done.exit_code, "this command needs a torch module" in done.stderr) == (3, True)


def test_more_tokens_than_positions_are_an_error(factories: Path) -> None:
    done = run("bench", f"{factories}:short", "--generate", "--prompt", "10", "--new-tokens", "7")
    assert done.exit_code == 3
    assert "a prompt of 10 and 7 new tokens exceed the 16 positions of the model" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "--prompt", "3"), "next: add --generate"),
        (("bench", "--generate", "--against", "eager"), "--against cannot be used with --generate"),
        (("bench", "--generate", "--size", "batch=2"), "next: --prompt and --batch make random prompts"),
        (("compare", "--generate", "--nan"), "--nan, --all and --tolerance cannot be used with --generate"),
        (("compare", "--generate", "--way", "torch"), "next: use --way twice"),
    ],
)
def test_options_that_do_not_go_together_are_an_error(words: tuple[str, ...], said: str) -> None:
    command, *rest = words
    done = run(command, LLAMA, *rest)
    assert (done.exit_code, said in done.stderr) == (3, True), done.output
