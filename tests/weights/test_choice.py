from elastic.weights.choice import BYTES_PER_S_IN_GBPS, ExpectedChange, choose_codec

ELEMENTS = 8 << 20


def chosen(share: float, gbps: float) -> str:
    return choose_codec(ExpectedChange(ELEMENTS, round(share * ELEMENTS)), gbps * BYTES_PER_S_IN_GBPS)


def test_where_the_link_is_slow_the_codec_is_the_smallest() -> None:
    assert chosen(0.013, 0.03) == "exponent_class"


def test_where_coding_is_slower_than_the_link_the_codec_is_the_fastest() -> None:
    assert {chosen(share, gbps) for share in (0.013, 0.036, 0.057) for gbps in (5, 20)} == {"gap8"}
    assert chosen(0.013, 0.5) == "gap8"


def test_the_copy_before_encoding_counts_as_encoding() -> None:
    """Decoding that is hidden behind it costs little, so that fewer bytes do not pay there."""
    assert chosen(0.013, 0.1) != "exponent_class"
