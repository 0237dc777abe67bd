"""Does speculation change what the model gets right? Questions with checkable answers, with drafts and without.

Greedy answers must be the same, token for token. Sampled answers are other texts by nature; of them the share that is right
must be the same, as far as a paired bootstrap over the questions can tell.

Two formats of questions, as their datasets have them (JSON lines):

* gsm8k: `question`, and an `answer` that ends with `#### NUMBER`;
* humaneval: `prompt` (the head of a function), `test`, `entry_point`. To check an answer means to run it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from surefoot.bench.prompts import chat_tokens
from surefoot.engine.results import RequestOutput
from surefoot.errors import ConfigurationError
from surefoot.llm import LLM
from surefoot.sampling import SamplingParams

RESAMPLES = 10_000
CONFIDENCE = 0.95
RUN_SECONDS = 10.0
RUN_BYTES = 1 << 30
"""Memory that a checked program may have."""

BOXED = "Reason step by step, and put the final number into \\boxed{}."
COMPLETE = "Complete this function. Answer with the whole function in one code block.\n\n```python\n{}```"
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(")
"""Where the continuation of a function ends, for models without a chat template."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Question(Protocol):
    """One question."""

    def text(self, chat: bool) -> str:
        """What is asked of a model with a chat template, or what a base model continues."""
        ...

    def right(self, answer: str) -> bool:
        """Whether an answer is."""
        ...


@dataclass(frozen=True)
class NumberQuestion:
    """gsm8k: the answer is a number."""

    question: str
    number: Decimal

    def text(self, chat: bool) -> str:
        return f"{self.question}\n{BOXED}" if chat else f"Question: {self.question}\n{BOXED}\nAnswer:"

    def right(self, answer: str) -> bool:
        """The last number in a box, after `####`, or at all."""
        boxes = re.findall(r"\\boxed\{([^{}]*)\}", answer)
        marked = re.findall(r"####([^\n]*)", answer)
        for place in (boxes[-1:], marked[-1:], [answer]):
            if place and (found := NUMBER.findall(place[0])):
                return number(found[-1]) == self.number
        return False


@dataclass(frozen=True)
class FunctionQuestion:
    """humaneval: the answer is a function that passes tests."""

    prompt: str
    test: str
    entry_point: str

    def text(self, chat: bool) -> str:
        return COMPLETE.format(self.prompt) if chat else self.prompt

    def right(self, answer: str) -> bool:
        blocks = re.findall(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
        code = next((block for block in blocks if f"def {self.entry_point}" in block), None)
        head = self.prompt if code is None else self.prompt[: max(0, self.prompt.find("def "))]  # its imports
        body = answer if code is None else code
        if code is None:
            body = body[: min((at for end in ENDS if (at := body.find(end)) >= 0), default=len(body))]
        return runs(f"{head}{body}\n\n{self.test}\n\ncheck({self.entry_point})\n")


def number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


LIMITED = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, ({RUN_BYTES}, {RUN_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({round(RUN_SECONDS)}, {round(RUN_SECONDS)}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def runs(program: str) -> bool:
    """Whether a program ends well, in a process with little memory and time and an empty folder.

    That keeps mistakes small. It is no sandbox: the program can do what this user can.
    """
    with tempfile.TemporaryDirectory(prefix="surefoot-") as folder:
        file = Path(folder) / "answer.py"
        file.write_text(program, encoding="utf-8")
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-c", LIMITED, str(file)],
                cwd=folder,
                env={"HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2 * RUN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def read_questions(path: Path | None, *, run_code: bool) -> list[Question]:
    """The built-in questions, or those of a file.

    Raises:
        ConfigurationError: a file that cannot be read, a line that is no question; answers that would have to be run unasked.
    """
    if path is None:
        return [NumberQuestion(question, Decimal(answer)) for question, answer in BUILT_IN]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"cannot read the questions {path}: {problem}. Give a file of JSON lines") from problem
    questions = [_question(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigurationError(f"{path} holds no question: give JSON lines in the format of gsm8k or humaneval")
    if not run_code and any(isinstance(question, FunctionQuestion) for question in questions):
        raise ConfigurationError(
            f"{path} asks for programs, and to check them means to run what the model has written: allow it with --run-code"
        )
    return questions


def _question(line: str, where: str) -> Question:
    try:
        data = json.loads(line)
    except ValueError as problem:
        raise ConfigurationError(f"{where} is not JSON: {problem}") from problem
    texts = {name: value for name, value in data.items() if isinstance(value, str)} if isinstance(data, dict) else {}
    if {"question", "answer"} <= texts.keys():
        found = number(texts["answer"].rpartition("####")[2].strip()) if "####" in texts["answer"] else None
        if found is None:
            raise ConfigurationError(f"{where}: 'answer' does not end with '#### NUMBER', as those of gsm8k do")
        return NumberQuestion(texts["question"], found)
    if {"prompt", "test", "entry_point"} <= texts.keys():
        return FunctionQuestion(texts["prompt"], texts["test"], texts["entry_point"])
    raise ConfigurationError(
        f"{where}: expected 'question' and 'answer' (gsm8k), or 'prompt', 'test' and 'entry_point' (humaneval), got "
        f"{', '.join(map(repr, data)) if isinstance(data, dict) else type(data).__name__}"
    )


@dataclass(frozen=True)
class Parting:
    """A greedy answer that is not the target's."""

    question: int
    token: int


@dataclass(frozen=True)
class Sampled:
    """The shares of right answers, and their difference by a paired bootstrap over the questions."""

    speculative: float
    target_only: float
    low: float  # of the difference, speculative - target-only
    high: float

    @property
    def differs(self) -> bool:
        return not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Accuracy:
    """What was found."""

    questions: int
    samples: int
    greedy_right: float  # share, with drafts
    greedy_right_target_only: float
    partings: list[Parting]
    sampled: Sampled | None
    drafted: int  # in the greedy answers
    accepted: int
    failed: list[str]  # why answers could not go on

    @property
    def passed(self) -> bool:
        sampled_differ = self.sampled is not None and self.sampled.differs
        return not (self.partings or self.failed or sampled_differ) and self.accepted > 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def measure_accuracy(
    llm: LLM,
    questions: Sequence[Question],
    *,
    max_tokens: int,
    samples: int,
    temperature: float,
    seed: int,
    announce: Callable[[str], None],
) -> Accuracy:
    """Answer every question greedily and `samples` times at `temperature`, with drafts and without, on one engine.

    Args:
        announce: told what comes next; the engine has progress bars of its own.
    """
    chat = bool(getattr(llm.tokenizer, "chat_template", None))
    texts = [question.text(chat) for question in questions]
    assert llm.tokenizer is not None
    prompts = [
        chat_tokens(llm.tokenizer, [{"role": "user", "content": text}])
        if chat
        else list(llm.tokenizer(text)["input_ids"])
        for text in texts
    ]
    greedy, failed = SamplingParams(temperature=0, max_tokens=max_tokens), list[str]()

    def answers(params: SamplingParams, gamma: int | None) -> list[RequestOutput]:
        kind = f"{params.n} samples each at temperature {params.temperature:g}" if params.temperature else "greedy"
        announce(f"{len(prompts)} questions, {kind}, {'with drafts' if gamma is None else 'target-only'} …")
        mine = [replace(params, gamma=gamma, seed=seed + index) for index in range(len(prompts))]
        found = llm.generate(prompts, mine)
        failed.extend(
            str(completion.error)
            for output in found
            for completion in output.completions
            if completion.error is not None
        )
        return found

    ours, plain = answers(greedy, None), answers(greedy, 0)
    partings = [
        Parting(index, next((k for k, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y))))
        for index, (x, y) in enumerate((one.token_ids, other.token_ids) for one, other in zip(ours, plain, strict=True))
        if x != y
    ]
    statistics = [completion.statistics for output in ours for completion in output.completions]
    sampled = None
    if samples:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, n=samples)
        shares = [right_shares(questions, answers(params, gamma)) for gamma in (None, 0)]
        sampled = paired_bootstrap(shares[0], shares[1], seed)
    return Accuracy(
        questions=len(questions),
        samples=samples,
        greedy_right=float(np.mean(right_shares(questions, ours))),
        greedy_right_target_only=float(np.mean(right_shares(questions, plain))),
        partings=partings,
        sampled=sampled,
        drafted=sum(one.drafted for one in statistics),
        accepted=sum(one.accepted for one in statistics),
        failed=failed,
    )


def right_shares(questions: Sequence[Question], outputs: Sequence[RequestOutput]) -> list[float]:
    """[Q] share of right answers to each question."""
    return [
        float(np.mean([question.right(completion.text) for completion in output.completions]))
        for question, output in zip(questions, outputs, strict=True)
    ]


def paired_bootstrap(speculative: Sequence[float], target_only: Sequence[float], seed: int = 0) -> Sampled:
    """The bounds of the mean difference, questions drawn with replacement."""
    difference = np.asarray(speculative) - np.asarray(target_only)
    drawn = np.random.default_rng(seed).integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.quantile(difference[drawn].mean(1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Sampled(float(np.mean(speculative)), float(np.mean(target_only)), float(low), float(high))


BUILT_IN = (
    ("A baker makes 14 trays of 12 rolls and sells 137 of them. How many rolls are left?", 31),
    ("A book has 336 pages. Mara reads 28 pages a day. In how many days has she read it?", 12),
    ("Three friends share 84 marbles equally, and one of them then loses 9. How many does that one have?", 19),
    ("A bus has 46 seats. 29 people are in it; at the next stop 7 leave and 15 come. How many seats are free?", 9),
    ("A rope of 9 metres is cut into pieces of 75 centimetres. How many pieces are there?", 12),
    ("Tickets cost 8 euros, for children half of that. What do 3 adults and 5 children pay, in euros?", 44),
    ("A tap fills 6 litres a minute. How many minutes does it need for a tub of 144 litres that is a third full?", 16),
    ("Ben is 4 years older than Ida. Together they are 30. How old is Ben?", 17),
    ("A shirt costs 40 euros and is 15 % cheaper today. What does it cost today, in euros?", 34),
    ("A field is 45 metres long and 28 metres wide. How long is its fence, in metres?", 146),
    ("A printer makes 18 pages a minute. How many pages does it make in 3 minutes and 20 seconds?", 60),
    ("Of 240 seeds, 5 out of 8 grow. How many do not grow?", 90),
    ("A lorry carries 2.4 tonnes. How many crates of 60 kilograms does it carry?", 40),
    ("Nina saves 7 euros a week for 11 weeks, and then spends 29 euros. How many euros has she left?", 48),
    ("A clock is 4 minutes late every day. How many minutes is it late after 3 weeks?", 84),
    ("Five boxes hold 16 cups each. 12 cups are broken. How many are whole?", 68),
)
