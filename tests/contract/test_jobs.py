"""The life of a job: legal moves pass, all others are refused."""

import pytest

from contract.errors import IllegalTransitionError
from contract.jobs import LANES, TERMINAL, TRANSITIONS, JobState, Lane, check_transition

STATES = list(JobState)


@pytest.mark.parametrize("current", STATES)
@pytest.mark.parametrize("wanted", STATES)
def test_only_the_moves_in_the_table_are_legal(current: JobState, wanted: JobState) -> None:
    """Each pair of states is either in the table or refused, naming both."""
    if wanted in TRANSITIONS[current]:
        check_transition(current, wanted)
        return

    with pytest.raises(IllegalTransitionError, match=f"{current} cannot become {wanted}") as caught:
        check_transition(current, wanted)
    assert (caught.value.current, caught.value.wanted) == (current, wanted)


def test_terminal_states_are_the_ends() -> None:
    """Every state but queued and running is an end."""
    assert frozenset(STATES) - {JobState.QUEUED, JobState.RUNNING} == TERMINAL


def test_every_lane_has_a_place_in_the_order() -> None:
    """SQL keeps a lane's position: none may be missing or stand twice."""
    assert sorted(LANES) == sorted(Lane)
    assert LANES[0] is Lane.INTERACTIVE
