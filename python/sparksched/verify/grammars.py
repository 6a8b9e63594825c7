"""Grammars, of which there is one for both schedulers.

A grammar goes on with each token that it accepts, so only ours asks it. What it was asked and what
it answered is kept, and vLLM's scheduler is answered the same; that it asks something else is a
difference.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class GrammarAsSeen:
    """A request's grammar for vLLM's scheduler: compiled as soon as ours has seen that it is.

    Grammars are compiled in threads; both schedulers look, but not at the same moment.
    """

    def __init__(self, original: Any) -> None:
        self.original = original

    @property
    def grammar(self) -> Any:
        """The grammar, why it can't be compiled, or None as long as that isn't known."""
        grammar = self.original._grammar
        return None if isinstance(grammar, Future) else grammar

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


@dataclass(frozen=True)
class Question:
    """What a scheduler asks of a request's grammar."""

    call: str
    request_id: str
    num_tokens: int
    """Tokens of the request as it is shown."""
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, call: str, request: Request, token_ids: Sequence[int]) -> "Question":
        """Note a question while the lists still are as they are."""
        return cls(call, request.request_id, request.num_tokens, tuple(token_ids))


class AskedManager:
    """The structured output manager as our scheduler gets it: what it answers is kept."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self.manager = manager
        self.answers: deque[tuple[Question, Any]] = deque()
        self._keeps_answers = True

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Advance a grammar."""
        return bool(self._ask("accept_tokens", request, new_token_ids))

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Cut draft tokens before the first that the grammar rejects."""
        return list(self._ask("validate_tokens", request, spec_tokens))

    def grammar_bitmask(
        self, requests: dict[str, Request], request_ids: list[str], drafts: dict[str, list[int]]
    ) -> Any:
        """Compute what the grammars allow."""
        asked = [
            Question.of("grammar_bitmask", requests[request_id], drafts.get(request_id, ()))
            for request_id in request_ids
        ]
        bitmask = self.manager.grammar_bitmask(requests, request_ids, drafts)
        if self._keeps_answers:
            self.answers.extend((question, bitmask) for question in asked)
        return bitmask

    def forget_answers(self) -> None:
        """Keep none from now on: nobody is left to repeat them to."""
        self._keeps_answers = False
        self.answers.clear()

    def _ask(self, call: str, request: Request, token_ids: list[int]) -> Any:
        question = Question.of(call, request, token_ids)
        answer = getattr(self.manager, call)(request, token_ids)
        if request.use_structured_output and self._keeps_answers:
            self.answers.append((question, answer))
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


class RepeatingManager:
    """The structured output manager as vLLM's scheduler gets it.

    What ours hasn't asked is answered nevertheless: by the grammar if that doesn't change it, else
    by a rejection, for a grammar can't be asked to go on twice.
    """

    def __init__(self, asked: AskedManager) -> None:
        self._asked = asked
        self.unexpected: tuple[Question | None, Question | None] | None = None
        """The first question that differs, vLLM's and ours, since this was last taken."""

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Advance a grammar, or say that it has been."""
        if not request.use_structured_output:
            return True
        question = Question.of("accept_tokens", request, new_token_ids)
        return self._is_next(question) and bool(self._asked.answers.popleft()[1])

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Cut draft tokens before the first that the grammar rejects."""
        if request.use_structured_output:
            question = Question.of("validate_tokens", request, spec_tokens)
            if self._is_next(question):
                return list(self._asked.answers.popleft()[1])
        return list(self._asked.manager.validate_tokens(request, spec_tokens))

    def grammar_bitmask(
        self, requests: dict[str, Request], request_ids: list[str], drafts: dict[str, list[int]]
    ) -> Any:
        """Compute what the grammars allow."""
        bitmask, is_repeated = None, True
        for request_id in request_ids:
            question = Question.of(
                "grammar_bitmask", requests[request_id], drafts.get(request_id, ())
            )
            is_repeated &= self._is_next(question)
            if is_repeated:
                bitmask = self._asked.answers.popleft()[1]
        if is_repeated:
            return bitmask
        return self._asked.manager.grammar_bitmask(requests, request_ids, drafts)

    def _is_next(self, question: Question) -> bool:
        answers = self._asked.answers
        expected = answers[0][0] if answers else None
        if question != expected and self.unexpected is None:
            self.unexpected = (question, expected)
        return question == expected

    def take_unexpected(self) -> tuple[Question | None, Question | None] | None:
        """Return the first question of the call that is over on which both differ; forget them."""
        answers = self._asked.answers
        unexpected, self.unexpected = self.unexpected, None
        if answers and unexpected is None:
            unexpected = (None, answers[0][0])
        answers.clear()
        return unexpected
