"""Host addresses as people write them."""

import pytest

from kueue.errors import ConfigError
from kueue_ops.address import HostAddress, check_login, duplicates, parse_host, parse_hosts


@pytest.mark.parametrize(
    ("word", "user", "host", "port"),
    [
        ("ralab01", None, "ralab01", None),
        ("ann@ralab01", "ann", "ralab01", None),
        ("ralab01:2222", None, "ralab01", 2222),
        ("ann@ralab01.uni.example:22", "ann", "ralab01.uni.example", 22),
        ("10.0.0.7:65535", None, "10.0.0.7", 65535),
        ("[fe80::1]:2222", None, "fe80::1", 2222),
        ("[::1]", None, "::1", None),
        ("fe80::1%eth0", None, "fe80::1%eth0", None),
        ("ann@[2001:db8::7]:22", "ann", "2001:db8::7", 22),
        ("ann.b-c@rechner_ä1.", "ann.b-c", "rechner_ä1.", None),
        ("DOMAIN@ann@host", None, None, None),
    ],
)
def test_every_way_to_write_a_host_is_read(word, user, host, port):
    if host is None:
        with pytest.raises(ConfigError):
            parse_host(word)
    else:
        assert parse_host(word) == HostAddress(word, user, host, port)


@pytest.mark.parametrize(
    "word",
    [
        *("@host", "user@", ":22", "host:", "host:0", "host:65536", "host:ssh", "host:٢", "host:99999999999999"),
        *("[::1", "::1]:22", "[host]:22", "[::1]22", "a:b:c:zz", "-oProxyCommand=x", "-l@host", "a;b", "$(reboot)"),
        *("host:0000099999", "host/x", "'h'", "h\\", "!h", "a b@host"),
    ],
)
def test_what_is_no_host_is_refused_by_name(word):
    with pytest.raises(ConfigError) as caught:
        parse_host(word)
    assert f"'{word}'" in str(caught.value)
    assert "user@host" in caught.value.hint


def test_hosts_are_parted_by_blanks_newlines_and_commas():
    assert [host.text for host in parse_hosts(" a, b\n\n\tc:22 ,,x@d ")] == ["a", "b", "c:22", "x@d"]
    assert parse_hosts(" \n ,") == ()


def test_a_host_written_twice_counts_once_where_it_was_first_and_is_told():
    text = "b a:22 A:22 ann@a b bob@a"
    assert [host.text for host in parse_hosts(text)] == ["b", "a:22", "ann@a", "bob@a"]
    assert duplicates(text) == ("A:22", "b")


def test_the_bad_word_among_good_ones_is_named():
    with pytest.raises(ConfigError, match="'c:x'"):
        parse_hosts("a b c:x d")


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "$(id)", "a'b", "\x1b[31m"])
def test_a_login_that_a_shell_could_take_for_more_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        check_login(name)
    assert str(caught.value).isprintable()


def test_what_is_no_host_is_shown_harmless():
    with pytest.raises(ConfigError) as caught:
        parse_host("h\x1b[31m")
    assert str(caught.value).isprintable()
