"""The prompts of `surefoot demo`: what people ask a small model for, from very predictable to open-ended."""

from __future__ import annotations

from typing import NamedTuple


class DemoPrompt(NamedTuple):
    name: str
    text: str
    chat: bool  # a question for the chat template; otherwise text to be continued


DEMO_PROMPTS = (
    DemoPrompt(
        "code: merge",
        '''def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping intervals and return them in ascending order.

    >>> merge_intervals([(5, 8), (1, 3), (2, 4)])
    [(1, 4), (5, 8)]
    """
''',
        chat=False,
    ),
    DemoPrompt(
        "code: cache",
        '''from collections import OrderedDict


class LeastRecentlyUsedCache:
    """A mapping that forgets the entry that was not used for the longest time."""

    def __init__(self, capacity: int) -> None:
''',
        chat=False,
    ),
    DemoPrompt(
        "code: tests",
        """import unittest


def roman_to_int(numeral: str) -> int:
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for current, following in zip(numeral, numeral[1:] + " "):
        value = values[current]
        total += -value if value < values.get(following, 0) else value
    return total


class RomanToIntTest(unittest.TestCase):
    def test_single_letters(self):
""",
        chat=False,
    ),
    DemoPrompt(
        "edit: rename",
        """Rename the field `qty` to `quantity` everywhere in this class. Answer with the complete class only.

```python
class OrderLine:
    def __init__(self, product: str, unit_price: float, qty: int) -> None:
        if qty < 1:
            raise ValueError(f"qty must be at least 1, got {qty}")
        self.product = product
        self.unit_price = unit_price
        self.qty = qty

    def total(self) -> float:
        return self.unit_price * self.qty

    def with_discount(self, percent: float) -> "OrderLine":
        price = self.unit_price * (1 - percent / 100)
        return OrderLine(self.product, price, self.qty)

    def describe(self) -> str:
        return f"{self.qty} x {self.product} at {self.unit_price:.2f}"
```
""",
        chat=True,
    ),
    DemoPrompt(
        "maths: bakery",
        "A bakery sells rolls for 60 cents and loaves for 3 euros 20. On Saturday it sold 145 rolls and 38 loaves, and "
        "threw away 12 rolls that had cost 25 cents each to make. What did it take in, and what was left after the "
        "loss? Work it out step by step.",
        chat=True,
    ),
    DemoPrompt(
        "chat: evening",
        "I have one free evening in a small town by the sea, in November, and it is raining. "
        "What would you do with it?",
        chat=True,
    ),
)
