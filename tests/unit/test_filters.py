"""The filter language: what it chooses, and where it says what is wrong."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramd.errors import UsageError
from paramd.filters import MAX_FILTER_BYTES, Facts, Filter, FilterError, filter_of, parse_filter
from paramd.layout.stats import Summary
from paramd.layout.types import Box, Piece, TensorKind, TensorLayout

NAME, SHAPE = "layers.0.up.weight", (4096, 1024)


def facts_of(trainable: bool | None = None) -> Facts:
    pieces = tuple(Piece(rank, 0, Box((0, 0), SHAPE)) for rank in (0, 1))
    tensor = TensorLayout(
        NAME, "bfloat16", SHAPE, TensorKind.PARAMETER, pieces, (), "Shard(0) over 2", trainable
    )
    return Facts(tensor=tensor, kind="parameter", names=(NAME,), ranks=frozenset((0, 1)))


def summary(**changes: float) -> Summary:
    found = Summary(
        count=10, zero_count=1, nan_count=0, inf_count=0, norm=12.5, mean=0.1, std=1.0, min=-4.0,
        max=3.0, exponents=(),
    )  # fmt: skip
    return found._replace(**changes)


CHOOSE = """
    numel>1000 numel>=4194304 numel<5M dims=2 shape=4096x1024 shape=4096x* shape=*x* shape>1000
    dtype=bfloat16 dtype=bf16 dtype=torch.bfloat16 dtype!=float32 dtype~float kind=parameter
    placement~shard name~UP rank=1 rank>0 tied=false
"""
LEAVE = """
    numel>4.2M dims!=2 shape=* shape!=4096x1024 shape>4096 shape=scalar kind=buffer placement=shard
    rank=2 rank!=1 tied!=false dtype=float32
"""


def test_facts_are_compared() -> None:
    for texts, chosen in ((CHOOSE, True), (LEAVE, False)):
        for text in texts.split():
            assert parse_filter(text).matches(facts_of()) is chosen, text
    assert not parse_filter("numel>1000 dtype=float32").matches(facts_of())


def test_what_is_not_known_to_be_trainable_is_neither() -> None:
    for trainable, terms in {
        True: {"trainable=true": True, "trainable=false": False},
        False: {"trainable=false": True, "trainable!=false": False},
        None: {"trainable=true": False, "trainable=false": False, "trainable!=true": True},
    }.items():
        for text, chosen in terms.items():
            assert parse_filter(text).matches(facts_of(trainable)) is chosen, text


def test_statistics_are_compared() -> None:
    for texts, chosen in (
        (("norm>10", "nan=0", "inf=0 zero>=1", "absmax=4", "min<-3.5 max<=3"), True),
        (("norm>1e2", "nan>0", "mean!=0.1"), False),
    ):
        for text in texts:
            found = parse_filter(text)
            assert found.statistics
            assert not found.facts
            assert found.matches_numbers(summary()) is chosen, text


@pytest.mark.parametrize("comparison", ["=", "!=", "<", "<=", ">", ">="])
def test_a_number_that_does_not_exist_meets_no_term(comparison: str) -> None:
    nothing = summary(mean=math.nan, min=math.nan, max=math.nan)
    for key in ("mean", "min", "max", "absmax"):
        assert not parse_filter(f"{key}{comparison}1").matches_numbers(nothing)


def test_globs_and_terms_are_told_apart() -> None:
    found = parse_filter('layers.*  w[0:4, -3:] numel>10 "odd=name" "two words"')
    assert found.patterns == ("layers.*", "w[0:4, -3:]", "odd=name", "two words")
    assert [str(term) for term in found.facts] == ["numel>10"]
    assert parse_filter(" ") == Filter(("*",), (), ())
    assert parse_filter("w[ab x").patterns == ("w[ab", "x")


def test_patterns_one_by_one_are_globs_or_begin_with_a_term() -> None:
    for words, patterns, terms in (
        (["kind = buffer  numel > 1M"], ["*"], ["kind=buffer", "numel>1M"]),
        (['shape = 4096 x 8 "a = b"'], ["a = b"], ["shape=4096x8"]),
        (["numel>3 w*", "v*"], ["v*", "w*"], ["numel>3"]),
        (['"rank=3"', "two words", "numl > 3"], ["rank=3", "two words", "numl > 3"], []),
        (parse_filter('"rank=3" "a ""b" w* dims=2').words, ["rank=3", 'a "b', "w*"], ["dims=2"]),
    ):
        found = filter_of(words)
        assert (list(found.patterns), [str(term) for term in found.facts]) == (patterns, terms)


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("numl>3", 0, "one of name,"),
        ("w numel>", 8, "a value"),
        ("numel> 3", 6, "a value"),
        ("numel>many", 6, "a number"),
        ("numel>1e99999", 6, "a number"),
        ("numel>nan", 6, "a number"),
        ("norm>0x10", 5, "a number"),
        ("dtype>float32", 5, "one of = != ~ for dtype"),
        ("numel~3", 5, "one of = != < <= > >= for numel"),
        ("shape=4096,4096", 6, "a shape"),
        ("shape=axb", 6, "a shape"),
        ("tied=maybe", 5, "true or false"),
        ('a "b', 2, 'a closing "'),
        ('""', 0, "a glob"),
        ('"a"b', 3, "a space"),
        ("a " * 70, 128, "at most 64 words"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, position: int, expected: str) -> None:
    with pytest.raises(FilterError, match=f"at character {position + 1}") as raised:
        parse_filter(text)
    assert raised.value.position == position
    assert expected in str(raised.value)


def test_a_long_filter_is_refused_before_it_is_read() -> None:
    parse_filter("a" * MAX_FILTER_BYTES)
    began_s = time.perf_counter()
    with pytest.raises(FilterError, match="at most 1024 bytes"):
        parse_filter("[" * 10_000_000)
    assert time.perf_counter() - began_s < 1.0


@given(st.text(alphabet='abc[]=<>!~"*x.019 kM\tnumelshape', max_size=300))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        found = parse_filter(text)
    except UsageError as error:
        refusal = str(error)
    else:
        assert found.patterns
        found.matches(facts_of())
        found.matches_numbers(summary())
        return
    assert refusal.startswith("filter: at character")
    assert len(refusal) < 600
