import pytest

from octavo.core.request import expand, without_prompt_logprobs
from octavo.protocol.params import OutputConstraint
from tests.support.core_engine import EOS, new_request


def test_siblings_have_indices_of_their_own_and_one_prompt() -> None:
    requests = expand(new_request("a", [4, 5], n=3, index=2, temperature=1.0, prompt_logprobs=1), 100, 10)
    assert [(r.index, r.order) for r in requests] == [(2, 10), (3, 11), (4, 12)]
    assert [r.wants_prompt_logprobs for r in requests] == [True, False, False]
    requests[0].tokens.append(9)
    assert list(requests[1].tokens) == [4, 5]


def test_limits() -> None:
    assert expand(new_request("a", [4, 5], max_tokens=3), 100, 0)[0].limit == 5
    assert expand(new_request("a", [4, 5], max_tokens=300), 100, 0)[0].limit == 100
    assert expand(new_request("a", [4, 5], max_tokens=None), 100, 0)[0].limit == 100


def test_stops() -> None:
    request = expand(new_request("a", [4, 5], stop_token_ids=[EOS, 8], min_tokens=2), 100, 0)[0]
    assert not request.stopped_by(EOS, 1)
    assert request.stopped_by(EOS, 2)
    assert request.stop_reason(EOS) is None
    assert request.stop_reason(8) == 8
    request = expand(new_request("a", [4, 5], stop_token_ids=[EOS], ignore_eos=True), 100, 0)[0]
    assert request.stop_reason(EOS) == EOS
    assert expand(new_request("a", [4, 5], ignore_eos=True), 100, 0)[0].stop_token_ids == ()


def test_a_resumed_request_does_not_deliver_prompt_logprobs_again() -> None:
    new = new_request("a", [4, 5], prompt_logprobs=1, output_token_ids=[6])
    request = expand(new, 100, 0)[0]
    assert not request.wants_prompt_logprobs
    assert new.sampling.prompt_logprobs == 1, "the caller's parameters are left alone"
    assert request.num_outputs == 1


def test_constrained_requests_are_synchronous() -> None:
    request = expand(new_request("a", [4], constraint=OutputConstraint(reasoning_end_ids=[999])), 100, 0)[0]
    assert request.synchronous


@pytest.mark.parametrize("ids", [[2**40], ["x"], [1.5]])
def test_ids_that_are_no_32_bit_integers(ids: list[object]) -> None:
    new = new_request("a", [1])
    new.prompt_token_ids = ids  # type: ignore[assignment]
    with pytest.raises((OverflowError, TypeError)):
        expand(new, 100, 0)


def test_without_prompt_logprobs_keeps_what_needs_no_change() -> None:
    sampling = new_request("a", [1]).sampling
    assert without_prompt_logprobs(sampling) is sampling
