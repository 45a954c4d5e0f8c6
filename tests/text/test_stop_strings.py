"""Stop strings: found however the text is cut, and nothing held back that cannot become one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_text.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    given_out = []
    for piece in pieces:
        fed = matcher.feed(piece)
        given_out.append(fed.text)
        if fed.stop is not None:
            return given_out, fed.stop
    return [*given_out, matcher.flush()], None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first completed match; of several that end together, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def test_text_before_the_stop_string_comes_out_and_no_more() -> None:
    """The stop string and what follows are cut."""
    assert run(["END"], ["some text EN", "D and more"]) == (["some text ", ""], "END")
    assert run(["b"], ["abc"]) == (["a"], "b")
    assert run(["a"], ["abc"]) == ([""], "a")


def test_only_a_possible_beginning_is_held_back() -> None:
    """B030: a long stop string does not delay text that cannot become one."""
    stop = "a very long stop string of 40 characters"
    assert run([stop], ["hello ", "world", " a", " v", "ase"]) == (["hello ", "world", " ", "", "a vase", ""], None)


def test_a_false_beginning_comes_out_once() -> None:
    """B031: 'Alice!' after stop 'Alice:' is given out once, whole."""
    given_out, stop = run(["Alice:"], ["I am ", "Ali", "ce", "!", " Yes"])
    assert (given_out, stop) == (["I am ", "", "", "Alice!", " Yes", ""], None)


def test_characters_of_many_bytes_are_never_cut() -> None:
    """B033: emoji and CJK pass a stop string untouched."""
    given_out, stop = run(["ZZZ"], ["🎉🚀", "你好Z", "Z世界", "Z"])
    assert ("".join(given_out), stop) == ("🎉🚀你好ZZ世界Z", None)
    assert run(["界。"], ["你好世", "界", "。!"]) == (["你好世", "", ""], "界。")


def test_the_first_completed_match_wins() -> None:
    """A shorter match inside a longer possible one ends the text; ends at one character: the longest is cut."""
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run(["bc", "abc"], ["xabc"]) == (["x"], "abc")
    assert run(["ab", "abc"], ["xabc"]) == (["x"], "ab")


def test_self_overlapping_stops_are_found() -> None:
    """A beginning that fails may hold the beginning of the real match."""
    assert run(["aab"], ["aaab"]) == (["a"], "aab")
    assert run(["abab c"], ["ababab c"]) == (["ab"], "abab c")
    assert run(["\n\n"], ["x\n", "y\n", "\nz"]) == (["x", "\ny", ""], "\n\n")


stops = st.lists(st.text(alphabet="ab界", min_size=1, max_size=5), min_size=1, max_size=4)
pieces = st.lists(st.text(alphabet="ab界c", max_size=6), max_size=12)


@settings(max_examples=500, deadline=None)
@given(stops, pieces)
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    """Pieces joined equal a naive search in the whole; held text is always a proper prefix of a stop string."""
    given_out, stop = run(stops, pieces)
    assert ("".join(given_out), stop) == naive(stops, "".join(pieces))
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        fed = matcher.feed(piece)
        if fed.stop is not None:
            break
        text += piece
        held = max((k for s in stops for k in range(len(s)) if text.endswith(s[:k])), default=0)
        assert matcher.flush() == text[len(text) - held :]
        matcher = StopMatcher(stops)
        matcher.feed(text)
