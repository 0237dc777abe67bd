"""The accuracy gate: what counts as right, what the bootstrap can tell, and that it notices an arm that answers otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surefoot.bench import accuracy
from surefoot.bench.accuracy import (
    BUILT_IN,
    FunctionQuestion,
    NumberQuestion,
    measure_accuracy,
    paired_bootstrap,
    read_questions,
    runs,
)
from surefoot.errors import ConfigurationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.statistics import RequestStatistics
from tests.cli.conftest import checkpoints, run, strict_json

__all__ = ["checkpoints", "run"]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("so she has \\boxed{1,234} rolls", True),
        ("1234 rolls, no: \\boxed{12}", False),
        ("\\boxed{12} is wrong; it is \\boxed{1234.0}", True),
        ("first 12\n#### 1234", True),
        ("twelve, then 1234.", True),
        ("1234, then 12.", False),
        ("\\boxed{\\$1234}", True),
        ("\\boxed{-1234}", False),
        ("no number", False),
        ("", False),
    ],
)
def test_a_number_is_read_from_the_last_box(answer: str, right: bool) -> None:
    assert NumberQuestion("?", Decimal(1234)).right(answer) is right


HEAD = 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """The sum."""\n'
TEST = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```\nDone.", True),
        ("```python\nimport os\n```\n```py\ndef total(numbers):\n    return sum(numbers)\n", True),
        ("```python\ndef total(numbers):\n    return 3\n```", False),
        ("    return sum(numbers)\n\n\ndef other():\n    oops(", True),
        ("    return sum(numbers)\n# and then\nnonsense", True),
        ("    return max(numbers)\n", False),
        ("no code at all", False),
    ],
)
def test_a_function_is_right_if_its_tests_pass(answer: str, right: bool) -> None:
    assert FunctionQuestion(HEAD, TEST, "total").right(answer) is right


def test_a_program_has_little_time_memory_and_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert runs("print('x' * 10)")
    assert not runs("bytearray(2 << 30)")
    assert not runs("open('big', 'wb').write(bytes(3 << 20))")
    assert not runs("raise SystemExit(3)")
    assert runs(
        "import os; assert os.listdir() == ['answer.py']; assert list(os.environ) in (['HOME'], ['HOME', 'LC_CTYPE'])"
    )
    monkeypatch.setattr(accuracy, "LIMITED", accuracy.LIMITED.replace("RLIMIT_CPU, (10, 10)", "RLIMIT_CPU, (1, 1)"))
    assert not runs("while True: pass")
    monkeypatch.setattr(accuracy, "RUN_SECONDS", 0.4)
    assert not runs("import time; time.sleep(60)")


def test_files_of_both_formats_are_read(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    sums = {"question": "2 and 3?", "answer": "2 + 3 = 5\n#### 5", "more": 1}
    code = {"task_id": "T/0", "prompt": HEAD, "test": TEST, "entry_point": "total", "canonical_solution": "…"}
    file.write_text(json.dumps(sums) + "\n\n" + json.dumps(code) + "\n")
    assert read_questions(file, run_code=True) == [
        NumberQuestion("2 and 3?", Decimal(5)),
        FunctionQuestion(HEAD, TEST, "total"),
    ]
    with pytest.raises(ConfigurationError, match=r"to check them means to run .* allow it with --run-code"):
        read_questions(file, run_code=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no question"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1: expected 'question' and 'answer'.*got list"),
        ('{"turns": ["x"]}', "expected 'question' and 'answer'.*got 'turns'"),
        ('{"question": "x", "answer": "5"}', "does not end with '#### NUMBER'"),
        ('{"question": "x", "answer": "#### five"}', "does not end with '#### NUMBER'"),
    ],
)
def test_what_is_no_question_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_questions(file, run_code=True)
    with pytest.raises(ConfigurationError, match="cannot read the questions"):
        read_questions(tmp_path / "none.jsonl", run_code=True)


def test_the_built_in_questions_are_well_formed() -> None:
    assert len(BUILT_IN) == len({question for question, _ in BUILT_IN}) == 16


def test_the_bootstrap_errs_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    false = sum(
        paired_bootstrap(random.binomial(4, 0.5, 60) / 4, random.binomial(4, 0.5, 60) / 4, seed).differs
        for seed in range(200)
    )
    assert 3 <= false <= 20  # 5 % of 200; three standard deviations
    found = paired_bootstrap([0.75] * 20 + [0.5] * 20, [0.5] * 40)
    assert found.differs
    assert found.low < 0.125 < found.high


class Tokenizer:
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2]}


class Stub:
    """An engine that answers as it is told: `say(gamma, index)`."""

    tokenizer = Tokenizer()

    def __init__(self, say: Callable[[int | None, int], str], accepted: int) -> None:
        self.say, self.accepted = say, accepted

    def generate(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[Any]:
        def answer(index: int, own: SamplingParams) -> Any:
            text = self.say(own.gamma, index)
            statistics = RequestStatistics(drafted=9, accepted=self.accepted)
            one = SimpleNamespace(text=text, token_ids=[*text.encode()], error=None, statistics=statistics)
            return SimpleNamespace(completions=[one] * own.n, token_ids=one.token_ids)

        return [answer(index, own) for index, own in enumerate(params)]


def judged(say: Callable[[int | None, int], str], samples: int = 2, accepted: int = 3) -> accuracy.Accuracy:
    stub: Any = Stub(say, accepted)
    questions = [NumberQuestion("?", Decimal(n)) for n in range(40)]
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0.7, "seed": 1, "announce": lambda _: None}
    return measure_accuracy(stub, questions, samples=samples, **settings)


def test_arms_that_agree_pass() -> None:
    found = judged(lambda gamma, index: str(index if index % 2 else -1))
    assert found.passed
    assert found.greedy_right == found.greedy_right_target_only == 0.5
    assert found.sampled is not None
    assert found.sampled.speculative == 0.5


def test_an_arm_that_answers_otherwise_does_not() -> None:
    found = judged(lambda gamma, index: str(index) if gamma == 0 or index != 7 else "79", samples=0)
    assert [(place.question, place.token) for place in found.partings] == [(7, 1)]
    assert not found.passed
    found = judged(lambda gamma, index: str(index if gamma == 0 or index > 9 else -1))
    assert found.sampled is not None
    assert found.sampled.differs
    assert not judged(lambda gamma, index: "1", accepted=0).passed


def test_the_command_on_a_tiny_model(run: Callable[..., Any], checkpoints: Path, tmp_path: Path) -> None:
    model = str(checkpoints / "target")
    common = ("bench", "accuracy", "-m", model, "-d", "prompt-lookup", "-g", "3", "--cost-table", "none", "-n", "24")
    saved = tmp_path / "accuracy.json"
    result = run(*common, "--samples", "2", "--count", "5", "--json", "-o", str(saved))
    assert result.exit_code == 0, result.stderr
    found = strict_json(result.stdout)
    assert strict_json(saved.read_text()) == found
    assert found["passed"] is True
    assert found["questions"] == 5
    assert found["accepted"] > 0
    assert found["sampled"]["low"] <= 0 <= found["sampled"]["high"]
    printed = run(*common, "--samples", "0", "--count", "2").stdout
    assert "the same text for 2 of 2 questions" in printed
    refused = run("bench", "accuracy", "-d", "none")
    assert refused.exit_code == 2
    assert "compares with and without a drafter" in refused.stderr
    assert run(*common, "-t", "0").exit_code == 2
