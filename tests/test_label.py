"""The label grammar and the paper's rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypermlp.label import PAPER_ROWS, PROBABLE_READING, Label


def test_the_papers_rows_round_trip():
    assert len(PAPER_ROWS) == 33
    for text in (*PAPER_ROWS, *PROBABLE_READING.values()):
        assert str(Label.parse(text)) == text


def test_what_the_letters_mean():
    assert Label.parse("G-pcg-q-12o") == Label("G", "pcg", "q", "12", lag=True)
    assert Label.parse("R-12!") == Label("R", mix="12", full_width=True)
    assert Label.parse("S") == Label("S")
    assert str(Label.parse("HyperGLU")) == "G-cg-q-12o"
    assert str(Label.parse("HyperMLP")) == "R-cg-q-12o"


def test_the_average_of_the_papers_mad_columns():
    """The paper's MAD average is the mean of its six columns, to the rounding of the table."""
    for label, row in PAPER_ROWS.items():
        assert abs(sum(row[:6]) / 6 - row.mad_average) < 0.01, label


@given(
    st.sampled_from("SRG"),
    st.sets(st.sampled_from("pcg")),
    st.sampled_from(["", "q", "v"]),
    st.sampled_from(["", "1", "2", "12"]),
    st.booleans(),
)
def test_every_meaningful_label_round_trips(base, features, rank, mix, lag):
    ordered = "".join(letter for letter in "pcg" if letter in features)
    label = Label(base, ordered, rank, mix, lag=lag and bool(mix), full_width=bool(mix) and not rank)
    assert Label.parse(str(label)) == label


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X-c", r"'X' is not allowed there; allowed: one of S, R, G"),
        ("", "'' is not allowed there"),
        ("-q", "label '-q': '' is not allowed there"),
        (None, "a label must be a string, got None"),
        ("s-p", "'s' is not allowed"),
        ("S-z", r"'z' is not allowed there; allowed: S\|R\|G, then"),
        ("S-cp", "'cp' is not allowed there; allowed: features p, c, g, each at most once, in this order"),
        ("S-cc", "'cc' is not allowed"),
        ("S-cx", "'x' is not allowed there; allowed: only p, c, g"),
        ("R-q-c", "'c' is not allowed there"),
        ("R-qv", "'qv' is not allowed there; allowed: q or v"),
        ("R-q-21", "'21' is not allowed there; allowed: 1, 2 or 12"),
        ("R-q-3", "'3' is not allowed"),
        ("R-q-12x", "'x' is not allowed there; allowed: only 1, 2, o"),
        ("R-q-o", "'o' is not allowed there; allowed: o after 1, 2 or 12"),
        ("R-12o", "'12' is not allowed there; allowed: a mix paid for by q or v, or marked with !: R-12o!"),
        ("R-q-12o!", "'!' is not allowed there; allowed: ! only without q or v"),
        ("S!", "'!' is not allowed"),
        ("R-12o!!", "'!' is not allowed there; allowed: only 1, 2, o"),
        ("S-", "'' is not allowed"),
    ],
)
def test_errors_name_the_letter_and_what_is_allowed(text, message):
    with pytest.raises(ValueError, match=message):
        Label.parse(text)
