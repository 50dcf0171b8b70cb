"""Metrics pages: series by name, with labels where ranks count apart."""

from modelyard.engines.pages import read_labelled, read_samples

PAGE = 'xa{b="1"} 2\na{b="2"} 3\n  a{b="4"} 5\na{c="}"} 1e3\na{x} y\n# a{b} 7\nab{c="1"} 9\na{} 8'


def test_series_of_one_name_are_read_with_their_labels_and_of_no_other() -> None:
    assert read_labelled(PAGE, "a") == [('b="2"', 3.0), ('c="}"', 1000.0), ("", 8.0)]
    assert read_labelled(PAGE, "xa") == [('b="1"', 2.0)]
    assert read_labelled(PAGE, "b") == []


def test_series_of_one_name_are_added_up() -> None:
    assert read_samples(PAGE)["a"] == 1011.0
