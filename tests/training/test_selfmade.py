"""Prompts that the target makes up: questions without their answers, through the template and without one."""

from __future__ import annotations

import pytest

from surefoot.targets.target import Target
from surefoot.training.files import Workplace, read_lines
from surefoot.training.options import DataOptions
from surefoot.training.prompts import Prompt, collect_prompts
from surefoot.training.selfmade import BASE, CHAT, _before_the_user, _trimmed, make_up
from tests.tiny_models import tiny_target
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.training.stage import silent

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


def speaking(template: str | None) -> Target:
    target = tiny_target("llama", vocab_size=512)
    target.tokenizer = byte_level_tokenizer()
    target.tokenizer.chat_template = template
    target.eos_token_ids = frozenset({target.tokenizer.eos_token_id})
    return target


@pytest.mark.parametrize(
    ("said", "ended", "expected"),
    [
        ("How many apples are left over?", True, "How many apples are left over?"),
        ("How many apples are left over?", False, None),  # it might have gone on in the middle of a word
        ("How many apples are left over?\n\nThere are three.", False, "How many apples are left over?"),
        ("Why?", True, None),
        ("Fix the bug in\n```python\nx", True, None),
        ('Do:\n```python\ndef f(x):\n "Twice"', False, None),
        ('Do:\n```python\ndef f(x):\n """Twice."""\n return', False, 'Do:\n```python\ndef f(x):\n """Twice."""\n```'),
        ('Do:\n```python\ndef f(x):\n    """Twice x.', True, None),
    ],
)  # fmt: skip
def test_a_question_loses_its_answer(said: str, ended: bool, expected: str | None) -> None:
    assert _trimmed(said, ended, chat=True) == expected


def test_the_template_is_cut_where_the_user_speaks() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert _before_the_user(tokenizer, "Be kind.") == "[system]Be kind.<|end|>[user]"
    tokenizer.chat_template = REFUSING
    assert _before_the_user(tokenizer, "Be kind.") == "[user]"


@pytest.mark.parametrize(("template", "openings"), [(TEMPLATE, CHAT), (None, BASE)])
def test_prompts_begin_as_asked(template: str | None, openings: tuple[object, ...]) -> None:
    target = speaking(template)
    prompts = list(make_up(target, 40, 1, silent(), rows=16))
    assert prompts, "the tiny target never came to an end: the test says nothing"
    again = list(make_up(target, 40, 1, silent(), rows=5))
    # The order is that of their ends; which they are depends on the seed alone.
    assert sorted(p.text for p in prompts) == sorted(p.text for p in again)
    starts = tuple(start for opening in openings for start in opening.starts)  # type: ignore[attr-defined]
    assert all(prompt.text.startswith(starts) and prompt.chat == (template is not None) for prompt in prompts)
    assert len({prompt.text for prompt in prompts}) > 1


def test_made_up_prompts_join_the_others(tmp_path) -> None:
    target, place = speaking(TEMPLATE), Workplace(tmp_path / "drafter")
    made_up = [Prompt(f"Question number {i}?", "math", chat=True) for i in range(30)]
    counts = collect_prompts(target, DataOptions(sources=("self",), held_out=0.1), place, [*made_up, made_up[0]])
    assert counts["prompts"] + counts["held_out"] == 30
    assert counts["duplicates"] == 1
    assert counts["workloads"] == {"math": 30}
    assert len(read_lines(place.prompts)) == counts["prompts"]
