"""What `bench --suite restore` makes of the times that come with a streamed answer."""

from __future__ import annotations

import pytest

from llama_phase.bench_restore import gaps_of, restore_suite, speed_of


def test_speeds_leave_out_the_first_token() -> None:
    """100 tokens per second but for a pause of 50 ms behind the 30th; the 10th to 12th come in one piece."""
    pieces = [(n, 10.0 * (n - 1) + (40 if n > 30 else 0)) for n in range(1, 101) if n not in (10, 11)]
    assert speed_of(pieces, 20) == pytest.approx(100)
    assert speed_of(pieces, 64) == pytest.approx(1000 * 63 / 670)
    assert speed_of(pieces, 11) == pytest.approx(100), "the last piece that is whole"
    gaps = gaps_of(pieces)
    assert set(range(2, 101)) - set(gaps) == {10, 11, 12}, "not of the piece of several tokens"
    assert {number for number, ms in gaps.items() if ms != pytest.approx(10)} == {31}
    assert gaps[31] == pytest.approx(50)


def test_short_answers_have_no_speed() -> None:
    for pieces in ([], [(1, 0.001)], [(1, 0.001), (2, 9.0)]):
        assert speed_of(pieces, 64) is None
    assert not gaps_of([(1, 0.001)])


def test_every_policy_at_each_number_of_slots() -> None:
    suite = restore_suite(4, "64,128")
    assert [one.name for one in suite][:2] == ["64 slots, cold", "64 slots, snapshot"]
    assert len({one.name for one in suite}) == len(suite) == 10
    assert {one.settings["refill_mib"] for one in suite if "at once" in one.name} == {0}
