"""How long a step takes, fitted to those of a trace."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparksched.record.load import Load

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, by what is in it."""

    seconds: float
    seconds_a_decode_token: float
    seconds_with_prompts: float
    """More for a step that computes prompts, however little of them."""
    seconds_a_prompt_token: float

    def __call__(self, num_decode_tokens: int, num_prompt_tokens: int) -> float:
        """Return seconds."""
        return (
            self.seconds
            + self.seconds_a_decode_token * num_decode_tokens
            + self.seconds_with_prompts * (num_prompt_tokens > 0)
            + self.seconds_a_prompt_token * num_prompt_tokens
        )


_GUESS = StepTime(0.01, 0.0, 0.0, 0.0)
"""For a trace without steps."""
_KINDS_AN_OCTAVE = 4
"""Chains whose sizes are nearer to each other than that are of one kind."""
_NUM_FITS = 10
_LEAST_ERROR_S = 1e-5
"""All that is nearer counts as much."""


def step_time(load: Load) -> StepTime:
    """Fit to the median of each kind of chain.

    By least squares, again and again: kinds that are far off, as of steps that waited for a kernel
    to be compiled, count less and less. What would come out negative is taken to cost nothing.
    """
    if not load.chains:
        return _GUESS
    columns, times, counts = _kinds(load)
    weights = counts
    for _ in range(_NUM_FITS):
        fitted = _fit(columns * np.sqrt(weights)[:, None], times * np.sqrt(weights))
        weights = counts / np.maximum(np.abs(columns @ fitted - times), _LEAST_ERROR_S)
    return StepTime(*(float(value) for value in fitted)) if fitted.any() else _GUESS


def _kinds(load: Load) -> tuple[Floats, Floats, Floats]:
    """Return what is in each kind of chain, its median time, and how many there are of it."""
    # In the order of what a step's time is made of.
    contents = [
        (it.num_steps, it.num_decode_tokens, it.num_steps_with_prompts, it.num_prompt_tokens)
        for it in load.chains
    ]
    sizes = np.array(contents, dtype=float)
    times = np.array([it.seconds for it in load.chains])
    keys = np.round(_KINDS_AN_OCTAVE * np.log2(np.maximum(sizes, 0.5)))
    _, kinds, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(kinds.ravel(), kind="stable"), np.cumsum(counts)[:-1])
    columns = np.array([sizes[its].mean(axis=0) for its in members])
    medians = np.array([np.median(times[its]) for its in members])
    return columns, medians, counts.astype(float)


def _fit(columns: Floats, times: Floats) -> Floats:
    """Return by least squares what each column costs, nothing being less than nothing."""
    used = list(range(columns.shape[1]))
    fitted = np.zeros(columns.shape[1])
    while used:
        solution = np.linalg.lstsq(columns[:, used], times, rcond=None)[0]
        if (solution >= 0).all():
            fitted[used] = solution
            break
        used = [it for it, value in zip(used, solution, strict=True) if value >= 0]
    return fitted
