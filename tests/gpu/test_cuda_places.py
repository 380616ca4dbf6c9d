"""Which end of a piece decides how it is copied. Needs no GPU."""

from forebay.gpu.cuda_places import Place, Places
from forebay.gpu.pieces import Pieces, pieces


def each(places: Places, wanted: Pieces) -> list[int]:
    found = places.of(wanted)
    return [int(found)] * len(wanted) if isinstance(found, Place) else [int(place) for place in found]


def test_the_farther_end_counts() -> None:
    places = Places()
    wanted = pieces([0, 999, 1000, 1099, 1100, 5000, 5000], [9000, 9000, 9000, 9000, 9000, 1050, 2000], 1)
    assert each(places, wanted) == [0] * 7
    places.add(1000, 100, Place.PEER)
    places.add(5000, 10, Place.HOST)
    places.add(9000, 10, Place.OWN)
    assert each(places, wanted) == [0, 0, 1, 1, 0, 2, 2]
    places.remove(5000)
    places.remove(4711)
    assert each(places, wanted) == [0, 0, 1, 1, 0, 1, 0]
    assert each(places, pieces([], [], [])) == []


def test_one_place_for_all_is_told_at_once() -> None:
    places = Places()
    for slot in range(4):
        places.add(1000 + 100 * slot, 100, Place.PEER)
    places.add(1400, 100, Place.HOST)
    assert places.of(pieces([1000, 1390], [0, 50], 10)) is Place.PEER
    assert places.of(pieces([1400, 1490], [1000, 1010], 10)) is Place.HOST
    assert places.of(pieces([0, 990], [2000, 2100], 10)) is Place.OWN
    assert each(places, pieces([1390, 1400], [0, 50], 10)) == [1, 2]
    places.remove(1200)
    assert each(places, pieces([1100, 1200, 1300], [0, 50, 60], 10)) == [1, 0, 1]


def test_a_place_may_be_taken_away_in_the_middle_of_a_look() -> None:
    """By the garbage collector, in the thread that looks."""
    places = Places()
    places.add(1000, 100, Place.PEER)
    with places._lock:
        places.remove(1000)
    assert each(places, pieces([1000], [0], 10)) == [0]
    places.add(1000, 100, Place.HOST)
    assert each(places, pieces([1000], [0], 10)) == [2]
