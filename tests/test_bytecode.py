from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lhotse_oomfit.bytecode import callable_digest, code_digest, init_names, moved_attributes


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Encoder:
    def __init__(self, hop: int, *, context: int = 5) -> None:
        self.hop = hop
        self.context = context
        self.num_calls = 0
        self.longest = 0
        self.temperature = 1.0

    def forward(self, x: Any, other: Any = None) -> Any:
        """Says something."""
        self.num_calls += 1
        self._grow(len(x))
        other.shared = 3
        return [y for y in x]

    def training_step(self, batch: Any) -> None:
        self.temperature *= 0.9

    @logged
    def _grow(self, length: int) -> None:
        self.longest = max(self.longest, length)

    def change_context(self, context: int) -> None:
        self.context = context


class Deeper(Encoder):
    def __init__(self, width: int) -> None:
        super().__init__(3)
        self.width = width


def test_what_code_that_runs_in_training_assigns_is_found_through_calls_and_decorators() -> None:
    own, others = moved_attributes(Encoder)
    assert own == {"num_calls", "longest", "temperature"}
    assert others == {"shared"}
    assert moved_attributes(Deeper) == (own, others)


class Recording(Encoder):
    def forward(self, x: Any, other: Any = None) -> Any:
        self.seen.append(len(x))
        self.by_length.setdefault(len(x), 0)
        return self.table.index(x)


def test_what_code_that_runs_in_training_fills_is_found_and_what_it_reads_is_not() -> None:
    assert {"seen", "by_length"} <= moved_attributes(Recording)[0]
    assert "table" not in moved_attributes(Recording)[0]


def test_the_arguments_of_every_constructor_are_found() -> None:
    assert init_names(Deeper) == {"self", "hop", "context", "width"}


def test_a_digest_of_code_sees_constants_calls_and_inner_functions_and_no_comments() -> None:
    def made(body: str) -> str:
        space: dict[str, Any] = {"__name__": "made"}
        exec(f"class Net:\n  def forward(self, x):\n    {body}", space)
        return code_digest(space["Net"])

    plain = made("return [y + 1 for y in x]")
    assert plain == made('"""Doc."""\n    # comment\n    return [y + 1 for y in x]')
    assert plain != made("return [y + 2 for y in x]")
    assert plain != made("return [y - 1 for y in x]")
    assert made("return x.relu()") != made("return x.gelu()")
    assert made("return x in {'a', 'b', 'c', 'd'}") == made("return x in {'d', 'c', 'b', 'a'}")


FACTOR = 1


def helper(x: Any) -> Any:
    return [x] * FACTOR


def test_a_digest_of_a_function_sees_the_functions_constants_and_values_that_it_uses(monkeypatch) -> None:
    def make(width: int, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = []

        def step(x: Any) -> Any:
            calls.append(x)
            return function(x * width), helper(x)

        return step

    plain = callable_digest(make(3, helper))
    assert plain == callable_digest(make(3, helper))
    assert plain != callable_digest(make(4, helper))
    assert plain != callable_digest(make(3, logged))
    assert plain != callable_digest(functools.partial(make(3, helper), x=1))
    step = make(3, helper)
    step(2)
    assert callable_digest(step) == plain  # what it collected while it ran is no setting
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert callable_digest(make(3, helper)) != plain


def test_a_digest_of_an_object_that_can_be_called_sees_its_class_and_plain_attributes() -> None:
    class Doubling:
        def __init__(self, times: int) -> None:
            self.times = times

        def __call__(self, x: Any) -> Any:
            return x * self.times

    assert callable_digest(Doubling(2)) == callable_digest(Doubling(2))
    assert callable_digest(Doubling(2)) != callable_digest(Doubling(3))
    assert callable_digest(Doubling(2).__call__) == callable_digest(Doubling(5).__call__)
    assert callable_digest(str.upper) != callable_digest(str.lower)
